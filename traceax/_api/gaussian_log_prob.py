"""Gaussian log-densities, `-(r* A^-1 r + log det A + n log(2 pi)) / 2`.

`logdet` estimates log det A. With x ~ A^-1 r from one linear solve (`solution`), the
quadratic form is `2 x* r - x* A x`, whose derivatives need no further solve: they are
`2 x* dr - x* dA x`. Gardner, Pleiss, Bindel, Weinberger and Wilson 2018.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree, Real

from .._core.checks import check_instance
from .._core.flat import FlatOperator, freeze, from_flat, to_flat
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Solution
from .._functions.base import AbstractFunctionEstimator
from .._functions.gradients import AbstractFunctionGradient, LanczosGradient
from .._functions.inverse_form import inverse_form, solve_scaled
from .._functions.preconditioned import check_preconditioner, Preconditioned, Prepared
from .._functions.slq import SLQEstimator
from .._numerics.dense import two_norm
from .._numerics.gram_schmidt import dot
from .._operators.convert import OperatorLike
from .._operators.door import enter, Facts
from .._preconditioners.base import AbstractPreconditioner, AbstractPreconditioning
from .._quadrature.functions import Log
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.budget import Budget
from .._run.call import call
from .._run.callback import raising_for_callbacks
from .._run.execution import AbstractExecution, Local
from .._run.solve import budget_of, solution_of
from .._run.steps import AdaptiveSteps, check_steps
from .logdet import LogDet


class _Call(eqx.Module):
    """The arguments of one call."""

    residual: PyTree[Array]
    initial: PyTree[Array] | None
    estimator: AbstractFunctionEstimator
    gradient: AbstractFunctionGradient
    num_steps: int | AdaptiveSteps
    preconditioner: AbstractPreconditioning | None
    solver: lx.AbstractLinearSolver
    structure: PyTree[jax.ShapeDtypeStruct]

    def task(self, preconditioner: AbstractPreconditioning | None) -> LogDet:
        """The log-determinant, with this preconditioner."""
        estimator = self.estimator
        if preconditioner is not None:
            estimator = Preconditioned(estimator, preconditioner)
        return LogDet(
            estimator=estimator,
            function=Log(),
            gradient=self.gradient,
            num_steps=self.num_steps,
        )


def _log_prob(
    inputs: _Call,
    opened: tuple[FlatOperator, Facts],
    k: int | Budget,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
) -> Solution[Array]:
    flat, _ = opened
    preconditioner, prepared = None, None
    if inputs.preconditioner is not None:
        prepared = Prepared.of(
            inputs.preconditioner,
            flat.frozen,
            {"k": k, "num_steps": inputs.num_steps, "key": key, "execution": execution},
        )
        preconditioner, k = prepared.preconditioner, prepared.call["k"]
    determinant = solution_of(
        inputs.task(preconditioner), opened, k=k, key=key, execution=execution
    )
    state, logdet_stats = determinant.state, determinant.stats
    if prepared is not None:
        state = prepared.state(state)
    residual, initial = jax.tree.map(jnp.asarray, (inputs.residual, inputs.initial))
    right = to_flat(residual, flat.dtype)
    frozen = jax.lax.stop_gradient(right)
    start = jnp.zeros_like(frozen)
    if initial is not None:
        start = jax.lax.stop_gradient(to_flat(initial, flat.dtype))
    preconditioner = freeze(preconditioner)
    solution, solve_result, solver_stats = solve_scaled(
        flat.frozen,
        residual=frozen,
        initial=start,
        preconditioner=preconditioner,
        smallest=_smallest_eigenvalue(determinant, preconditioner, size=flat.size),
        solver=inputs.solver,
    )
    # Its error is of second order in the error of the solve: with rho = r - A x,
    # 2 x* r - x* A x = r* A^-1 r - rho* A^-1 rho.
    quadratic, solve_residual = inverse_form(flat, residual=right, solution=solution)

    def log_density(log_det):
        constant = flat.size * math.log(2 * math.pi)
        return -(quadratic + log_det + constant) / 2

    rounding = jnp.hypot(
        flat.rounding * dot(jnp.abs(solution), jnp.abs(frozen)),
        _overlap(solution, solve_residual),
    )
    size, residual_size = two_norm(frozen), two_norm(solve_residual)
    steps = jnp.asarray(solver_stats.get("num_steps", 0))
    std_err = jnp.hypot(determinant.std_err, rounding) / 2
    unchanged = "num_samples", "num_steps", "exact", "ritz_values"
    stats = _entries(logdet_stats, *unchanged) | {
        "num_matvecs": logdet_stats["num_matvecs"] + steps + 2,
        "std.err": std_err,
        "samples": log_density(logdet_stats["samples"]),
        "quadratic_form": quadratic,
        "logdet": dataclasses.replace(determinant, state=None),
        "solve": from_flat(solution, inputs.structure),
        "solve_steps": steps,
        "solve_residual": residual_size / jnp.where(size > 0, size, 1),
    }
    for name, bounds in _entries(logdet_stats, "bounds", "proven_bounds").items():
        # Reversed: the upper end of the log-determinant is the lower end of the density.
        ends, bars = bounds[::-1].T
        bars = jnp.hypot(bars, rounding) / 2
        stats[name] = jnp.stack([log_density(ends), bars], axis=1)
    if "history" in logdet_stats:
        spent, values, bars = logdet_stats["history"].T
        values = jnp.where(jnp.isfinite(values), log_density(values), values)
        bars = jnp.hypot(bars, rounding) / 2
        stats["history"] = jnp.stack([spent, values, bars], axis=1)
    value = log_density(determinant.value)
    result = first_failure(
        determinant.result,
        solve_result,
        failure(quadratic < -rounding, RESULTS.not_positive_definite),
        # Solvers that overflow may say that they succeeded.
        failure((size > 0) & ~(residual_size < size), RESULTS.breakdown),
        failure(~jnp.isfinite(value), RESULTS.nonfinite_product),
    )
    std_err, stats = freeze((std_err, stats))
    fields = {"value": value, "std_err": std_err, "result": result, "stats": stats}
    fields |= {"state": state, "quantity": "Log-density of a Gaussian"}
    return dataclasses.replace(determinant, **fields)


def _smallest_eigenvalue(
    determinant: Solution, preconditioner: AbstractPreconditioner | None, size: int
) -> Real[Array, ""]:
    """An estimate for the (preconditioned) operator, from its log-determinant."""
    if "ritz_values" in determinant.stats:
        smallest = determinant.stats["ritz_values"][0]
    else:
        # The geometric mean of the eigenvalues.
        smallest = jnp.exp(jax.lax.stop_gradient(determinant.value) / size)
    if preconditioner is not None:
        # An exact log-determinant comes with eigenvalues of A itself.
        exact = determinant.std_err == 0
        unit = jnp.where(exact, preconditioner.largest, 1)
        smallest = smallest / unit.astype(smallest.dtype)
    return smallest


def _entries(stats: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of these entries that there are, in this order: that of a set, and so the
    program, would differ between processes."""
    return {name: stats[name] for name in names if name in stats}


def _overlap(x: Real[Array, " n"], residual: Real[Array, " n"]) -> Real[Array, ""]:
    """The size of x* rho. In exact arithmetic the residual rho of conjugate gradients is
    orthogonal to x, so this measures rounding errors."""
    # It may be small by chance. The norm of the terms is its root mean square over random
    # signs of them.
    return jnp.maximum(jnp.abs(dot(x, residual)), two_norm(x * residual))


def _check_vector(name: str, value: PyTree, structure: PyTree) -> None:
    leaves = jax.tree.leaves(value)
    fits = jax.tree.structure(value) == jax.tree.structure(structure)
    shapes = [jnp.shape(leaf) for leaf in leaves if eqx.is_array_like(leaf)]
    expected = [leaf.shape for leaf in jax.tree.leaves(structure)]
    if not fits or shapes != expected or any(map(jnp.iscomplexobj, leaves)):
        raise ValueError(
            f"`{name}` must be a real vector that `operator` applies to. Found leaves "
            f"of the shapes {shapes} for an operator with in_structure()={structure}. "
            "For several vectors use `jax.vmap`."
        )


def gaussian_log_prob(
    operator: OperatorLike,
    residual: PyTree[Real[Array, ...]],
    estimator: AbstractFunctionEstimator = SLQEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    preconditioner: AbstractPreconditioning | None = None,
    solver: lx.AbstractLinearSolver | None = None,
    initial: PyTree[Real[Array, ...]] | None = None,
    gradient: AbstractFunctionGradient = LanczosGradient(),
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate the log-density $-\\frac12 (r^T A^{-1} r + \\log\\det A + n \\log 2\\pi)$
    of a Gaussian with covariance A at a residual r: the log marginal likelihood of a
    Gaussian process.

    [`traceax.logdet`][] estimates the log-determinant, and one linear solve gives the
    quadratic form. The gradient needs no further solve. Both take the same
    preconditioner.

    Cost: the matvecs of the log-determinant, one for each step of the solver, and two
    more. Memory: that of [`traceax.logdet`][] and the vectors of the solver, a few of
    length n with conjugate gradients.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        y = jnp.sin(12 * x)

        def log_likelihood(noise, key):
            kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + noise * jnp.eye(500)
            operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
            key1, key2 = jax.random.split(key)
            preconditioner = tx.nystrom_preconditioner(
                operator, rank=20, key=key1, shift=noise
            )
            solution = tx.gaussian_log_prob(
                operator, y, k=10, key=key2, preconditioner=preconditioner
            )
            return solution.value, solution

        slope = jax.grad(log_likelihood, has_aux=True)
        noise_slope, solution = slope(jnp.array(0.1), jax.random.key(0))
        print(solution.value, "+-", solution.std_err, noise_slope)
        ```

    **Arguments:**

    - `operator`: A, a real matrix or operator ([`traceax.as_operator`][]), tagged
        positive semidefinite.
    - `residual`: r, the observations minus their mean, an array or PyTree that the
        operator applies to. For several residuals use `jax.vmap`: they share one
        log-determinant.
    - `estimator`, `k`, `num_steps`, `key`, `state`, `gradient`, `execution`: for the
        log-determinant, as for [`traceax.logdet`][]. With [`traceax.Adaptive`][],
        tolerances apply to the log-determinant, and a `callback` is given its progress.
        `gradient` does not affect the quadratic form.
    - `preconditioner`: for the log-determinant and the solve, as for
        [`traceax.logdet`][].
    - `solver`: for $x = A^{-1} r$. It is applied to r scaled to a root mean square of
        one, and to A scaled such that x is of about that size, so its tolerances are
        relative to these scales. Default: `lineax.CG`, whose tolerances are the square
        root of the machine epsilon.
    - `initial`: a guess of $A^{-1} r$ that the solver starts from, such as
        `stats["solve"]` of the last step of an optimiser.
    - `throw`: whether to raise if the result is not `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][]. The error of `value` is of second order in the error of
    the solve. `std_err` is half the standard error of the log-determinant, combined with
    the rounding error of the quadratic form, which $x^T (r - A x)$ measures. `stats`
    has, beside the entries described there,

    - `"solve"`: $x = A^{-1} r$; `"solve_steps"`, how many steps it took;
        `"solve_residual"`, $\\|r - A x\\| / \\|r\\|$. Neither `std_err` nor the interval
        counts the error of the solve: with $\\rho = r - A x$ the value is too large by
        $\\rho^T A^{-1} \\rho / 2$.
    - `"quadratic_form"`: $r^T A^{-1} r$; `"logdet"`: the solution of
        [`traceax.logdet`][], with its own `stats`; `"exact"`: whether that is exact.
    - `"num_matvecs"`: the matvecs of the log-determinant (if it is exact, without those
        of the preconditioner), one for each step of the solver, and two more. It is too
        small for solvers that make more matvecs in a step, or do not count steps.

    Derivatives in what the operator closes over and in the residual: $-\\frac12
    \\mathrm{tr}(A^{-1} dA)$ is estimated, the others are $\\frac12 x^T dA\\, x$ and
    $-x^T dr$. Second derivatives are refused. The preconditioner and `initial` are
    constant to derivatives, and do not bias them.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.logdet`][]; `operator` is complex or not
        tagged; `residual` or `initial` does not fit it; `solver` is not of lineax.
    - An `equinox` run-time error with `throw=True`: the solver did not converge; the
        operator was seen not to be positive definite; a matvec was not finite; rounding
        errors are a large part of the reported error; a tolerance was not met.

    ??? cite

        ```bibtex
        @inproceedings{gardner2018gpytorch,
            author    = {Gardner, Jacob R. and Pleiss, Geoff and Bindel, David and
                         Weinberger, Kilian Q. and Wilson, Andrew Gordon},
            title     = {{GPyTorch}: Blackbox Matrix-Matrix {Gaussian} Process Inference
                         with {GPU} Acceleration},
            booktitle = {Advances in Neural Information Processing Systems},
            volume    = {31},
            year      = {2018},
        }
        ```
    """
    entered = enter(operator, second=residual)
    if not jnp.issubdtype(entered.flat.dtype, jnp.floating):
        raise TypeError(
            "`operator` must be real. Found one of a complex dtype, for which the "
            "density has another normalisation. Add up `traceax.logdet` and "
            "`lineax.linear_solve`."
        )
    if entered.flat.sign <= 0:
        raise ValueError(
            "`operator` must be a covariance, and say so by a tag. Found `operator` "
            "without one. Say so: `traceax.as_operator(operator, "
            "tags=lineax.positive_semidefinite_tag)`."
        )
    _check_vector("residual", residual, entered.structure)
    if initial is not None:
        _check_vector("initial", initial, entered.structure)
    if preconditioner is not None:
        check_preconditioner(preconditioner, entered.size)
    if solver is None:
        tolerance = entered.flat.eps**0.5
        limit = 10 * entered.size
        # Without extra matvecs to refresh the residual: the true one is computed at the
        # end.
        solver = lx.CG(tolerance, tolerance, stabilise_every=None, max_steps=limit)
    if not isinstance(solver, lx.AbstractLinearSolver):
        raise TypeError(
            f"`solver` must be a `lineax.AbstractLinearSolver`. Found {solver!r}. Pass, "
            "for example, `lineax.CG(rtol=1e-6, atol=1e-6)`."
        )
    check_instance("estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()")
    check_instance("gradient", gradient, AbstractFunctionGradient, "LanczosGradient()")
    num_steps = check_steps(num_steps, entered.size, estimator.most_steps)
    arguments = _Call(
        residual=residual,
        initial=initial,
        estimator=estimator,
        gradient=gradient,
        num_steps=num_steps,
        preconditioner=preconditioner,
        solver=solver,
        structure=entered.structure,
    )
    # The budget is checked against the state of the log-determinant alone, and then runs
    # with the state of the whole call.
    resumed, logdet_state = _split_state(preconditioner, state)
    budget = budget_of(
        arguments.task(resumed), entered.size, k=k, key=key, state=logdet_state
    )
    if isinstance(budget, Budget):
        budget = dataclasses.replace(budget, state=state)
    with raising_for_callbacks(budget) as budget:
        return call(
            _log_prob,
            arguments,
            entered,
            budget,
            key,
            execution,
            name="gaussian_log_prob",
            execution=execution,
            throw=throw,
        )


def _split_state(
    preconditioner: AbstractPreconditioning | None, state: Any
) -> tuple[AbstractPreconditioning | None, Any]:
    """The preconditioner of the run that this one continues, and the state of its
    log-determinant."""
    if preconditioner is None or state is None:
        return preconditioner, state
    if not isinstance(state, tuple):
        raise ValueError(
            "`state` must be of a call with the same kind of preconditioner. Found one "
            f"of type {type(state).__name__}."
        )
    earlier, logdet_state = state
    return preconditioner if earlier is None else earlier, logdet_state
