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
from .._operators.door import enter, Facts
from .._operators.tags import is_complex
from .._preconditioners.base import AbstractPreconditioning
from .._quadrature.functions import Log
from .._run.adaptive import Adaptive
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
    call: _Call,
    opened: tuple[FlatOperator, Facts],
    k: int | Budget,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
) -> Solution:
    flat, _ = opened
    preconditioner, prepared = None, None
    if call.preconditioner is not None:
        prepared = Prepared.of(
            call.preconditioner,
            flat.frozen,
            {"k": k, "num_steps": call.num_steps, "key": key, "execution": execution},
        )
        preconditioner, k = prepared.preconditioner, prepared.call["k"]
    task = call.task(preconditioner)
    determinant = solution_of(task, opened, k, key, execution)
    state = determinant.state
    if prepared is not None:
        state = prepared.state(state)
    residual, initial = jax.tree.map(jnp.asarray, (call.residual, call.initial))
    right = to_flat(residual, flat.dtype)
    frozen = jax.lax.stop_gradient(right)
    start = jnp.zeros_like(frozen)
    if initial is not None:
        start = jax.lax.stop_gradient(to_flat(initial, flat.dtype))
    known, exact = determinant.stats, determinant.std_err == 0
    if "ritz_values" in known:
        smallest = known["ritz_values"][0]
    else:
        smallest = jnp.exp(jax.lax.stop_gradient(determinant.value) / flat.size)
    preconditioner = freeze(preconditioner)
    if preconditioner is not None:
        # Eigenvalues that come with an exact answer are those of A itself.
        unit = jnp.where(exact, preconditioner.largest, 1)
        smallest = smallest / unit.astype(smallest.dtype)
    settings = preconditioner, smallest, call.solver
    found, ended, counted = solve_scaled(flat.frozen, frozen, start, *settings)
    quadratic, left_over = inverse_form(flat, right, found)

    def combine(log_det):
        constant = flat.size * math.log(2 * math.pi)
        return -(quadratic + log_det + constant) / 2

    # In exact arithmetic the residual of conjugate gradients is orthogonal to the
    # solution. Of rounding errors it may be by chance: the root of the sum of squares is
    # what their product is in the root mean square over signs.
    rounding = flat.rounding * dot(jnp.abs(found), jnp.abs(frozen))
    along = jnp.maximum(jnp.abs(dot(found, left_over)), two_norm(found * left_over))
    rounding = jnp.hypot(rounding, along)
    size, left = two_norm(frozen), two_norm(left_over)
    steps = jnp.asarray(counted.get("num_steps", 0))
    std_err = jnp.hypot(determinant.std_err, rounding) / 2
    stats = {
        "num_matvecs": known["num_matvecs"] + steps + 2,
        "std.err": std_err,
        "samples": combine(known["samples"]),
        "quadratic_form": quadratic,
        "logdet": dataclasses.replace(determinant, state=None),
        "solve": from_flat(found, call.structure),
        "solve_steps": steps,
        "solve_residual": left / jnp.where(size > 0, size, 1),
    }
    for name in {"bounds", "proven_bounds"} & set(known):
        ends, bars = known[name][::-1].T
        bars = jnp.hypot(bars, rounding) / 2
        stats[name] = jnp.stack([combine(ends), bars], axis=1)
    if "ritz_values" in known:
        stats["ritz_values"] = known["ritz_values"]
    if "history" in known:
        made, values, bars = known["history"].T
        values = jnp.where(jnp.isfinite(values), combine(values), values)
        bars = jnp.hypot(bars, rounding) / 2
        stats["history"] = jnp.stack([made, values, bars], axis=1)
    value = combine(determinant.value)
    result = first_failure(
        determinant.result,
        ended,
        failure(quadratic < -rounding, RESULTS.not_positive_definite),
        # Solvers that overflow may say that they succeeded.
        failure((size > 0) & ~(left < size), RESULTS.breakdown),
        failure(~jnp.isfinite(value), RESULTS.nonfinite_product),
    )
    std_err, stats = freeze((std_err, stats))
    return Solution(value, std_err, result, stats, state)


def _check_vector(name: str, value: PyTree, operator: lx.AbstractLinearOperator) -> None:
    structure = operator.in_structure()
    leaves = jax.tree.leaves(value)
    fits = jax.tree.structure(value) == jax.tree.structure(structure)
    found = [jnp.shape(leaf) for leaf in leaves if eqx.is_array_like(leaf)]
    shapes = [leaf.shape for leaf in jax.tree.leaves(structure)]
    if not fits or found != shapes or any(map(jnp.iscomplexobj, leaves)):
        raise ValueError(
            f"`{name}` must be a real vector that `operator` applies to. Found leaves "
            f"of the shapes {found} for an operator with in_structure()={structure}. "
            "For several vectors use `jax.vmap`."
        )


def gaussian_log_prob(
    operator: lx.AbstractLinearOperator,
    residual: PyTree[Real[Array, ...]],
    estimator: AbstractFunctionEstimator = SLQEstimator(),
    *,
    k: int | Adaptive,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    preconditioner: AbstractPreconditioning | None = None,
    solver: lx.AbstractLinearSolver | None = None,
    initial: PyTree[Real[Array, ...]] | None = None,
    gradient: AbstractFunctionGradient = LanczosGradient(),
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution:
    """The log-density $-\\frac12 (r^T A^{-1} r + \\log\\det A + n \\log 2\\pi)$ of a
    Gaussian with covariance A at a residual r: the log marginal likelihood of a Gaussian
    process.

    The log-determinant is that of [`traceax.logdet`][], the quadratic form one linear
    solve, and the gradient needs no further one. Both take the same preconditioner.

    Cost: the products of the log-determinant, one for each step of the solver, and two.
    Memory: that of [`traceax.logdet`][], and the vectors of the solver: with conjugate
    gradients a few of length n.

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

    - `operator`: A, a real `lineax.AbstractLinearOperator` tagged positive semidefinite.
    - `residual`: r, the observations minus their mean, an array or PyTree that the
        operator applies to. For several, `jax.vmap`: they share one log-determinant.
    - `estimator`, `k`, `num_steps`, `key`, `state`, `gradient`, `execution`: of the
        log-determinant, as for [`traceax.logdet`][]; so are the tolerances and what a
        `callback` is given with [`traceax.Adaptive`][]. `gradient` does not matter to
        the quadratic form.
    - `preconditioner`: for the log-determinant and the solve, as for
        [`traceax.logdet`][].
    - `solver`: for $x = A^{-1} r$. It is applied to r scaled to a root mean square of
        one, and to A scaled such that x is about of that size, so its tolerances are
        relative to that. Default: `lineax.CG` with
        tolerances of the square root of the machine epsilon.
    - `initial`: a guess of $A^{-1} r$ that the solver starts from, such as
        `stats["solve"]` of the last step of an optimiser.
    - `throw`: whether to raise if the result is not `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][]. The error of `value` is of second order in the error of
    the solve. `std_err` is half of that of the log-determinant, combined with the
    rounding error of the quadratic form, which is measured by $x^T (r - A x)$. `stats`
    has, beside the entries described there,

    - `"solve"`: $x = A^{-1} r$; `"solve_steps"`, how many steps it took;
        `"solve_residual"`, $\\|r - A x\\| / \\|r\\|$. Neither `std_err` nor the interval
        counts the error of the solve: with $\\rho = r - A x$ the value is too large by
        $\\rho^T A^{-1} \\rho / 2$.
    - `"quadratic_form"`: $r^T A^{-1} r$; `"logdet"`: the solution of
        [`traceax.logdet`][], with its own `stats`.
    - `"num_matvecs"`: the products of the log-determinant (of an exact one without those
        of the preconditioner), one for each step of the solver, and two. It is too small
        for solvers that make more products in a step, or do not count steps.

    Derivatives in what the operator closes over and in the residual: $-\\frac12
    \\mathrm{tr}(A^{-1} dA)$ is estimated, the others are $\\frac12 x^T dA\\, x$ and
    $-x^T dr$. Second derivatives are refused. The preconditioner and `initial` are
    constant to derivatives, and do not bias them.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.logdet`][]; `operator` is complex or not
        tagged; `residual` or `initial` does not fit it; `solver` is not of lineax.
    - An `equinox` run-time error with `throw=True`: the solver did not converge; the
        operator was seen not to be positive definite; a product was not finite; rounding
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
    if is_complex(operator):
        raise TypeError(
            "`operator` must be real. Found one of a complex dtype, for which the "
            "density has another normalisation. Add up `traceax.logdet` and "
            "`lineax.linear_solve`."
        )
    if entered.flat.sign <= 0:
        raise ValueError(
            "`operator` must be a covariance, and say so by a tag. Found `operator` of "
            f"type {type(operator).__name__} without one. Wrap it: "
            "`lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)`."
        )
    _check_vector("residual", residual, operator)
    if initial is not None:
        _check_vector("initial", initial, operator)
    if preconditioner is not None:
        check_preconditioner(preconditioner, entered.size)
    if solver is None:
        tolerance = entered.flat.eps**0.5
        limit = 10 * entered.size
        # Without extra products to refresh the residual: the true one is computed at the
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
    made, inner = _earlier(preconditioner, state)
    budget = budget_of(arguments.task(made), entered.size, k=k, key=key, state=inner)
    if isinstance(budget, Budget):
        budget = dataclasses.replace(budget, state=state)
    settings = {"name": "gaussian_log_prob", "execution": execution, "throw": throw}
    with raising_for_callbacks(budget) as budget:
        return call(_log_prob, arguments, entered, budget, key, execution, **settings)


def _earlier(
    preconditioner: AbstractPreconditioning | None, state: Any
) -> tuple[AbstractPreconditioning | None, Any]:
    """The preconditioner of the run that this one goes on from, and the state of its
    log-determinant."""
    if preconditioner is None or state is None:
        return preconditioner, state
    if not isinstance(state, tuple):
        raise ValueError(
            "`state` must be of a call with the same kind of preconditioner. Found one "
            f"of type {type(state).__name__}."
        )
    made, inner = state
    return preconditioner if made is None else made, inner
