from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from ._adaptive import Adaptive, largest_budget
from ._checks import check_instance, check_operator, check_positive
from ._execution import AbstractExecution, Local
from ._flat import flatten
from ._matfun.all_eigenvalues import exact_over_singular_values, exact_trace_of_function
from ._matfun.base import AbstractFunctionEstimator, AbstractFunctionTask
from ._matfun.functions import Log
from ._matfun.gradients import AbstractFunctionGradient, LanczosGradient
from ._matfun.preconditioner import AbstractPreconditioner
from ._matfun.slq import SLQEstimator
from ._matfun.structured import SignLog, structured_log_det
from ._sampler import draw_for
from ._solution import Estimate, failure, RESULTS, Solution
from ._solve import solve


class _LogDet(AbstractFunctionTask):
    """An estimator of the log-determinant, with its settings."""

    estimator: AbstractFunctionEstimator
    preconditioner: AbstractPreconditioner | None
    gradient: AbstractFunctionGradient
    num_steps: int = eqx.field(static=True)

    def exact(
        self, operator: lx.AbstractLinearOperator, execution: AbstractExecution
    ) -> Estimate:
        if (determinant := structured_log_det(operator)) is not None:
            return _from_structure(determinant)
        sign, definite = _definite(operator)
        if definite is None:
            return exact_over_singular_values(
                flatten(operator), Log(), self.gradient, execution
            )
        flat = flatten(definite)
        estimate = exact_trace_of_function(flat, Log(), self.gradient, execution)
        return _with_stats(estimate, sign=sign)

    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        if (determinant := structured_log_det(operator)) is not None:
            return _from_structure(determinant)
        num_steps = min(self.num_steps, operator.in_size())
        settings: Any = {"k": k, "num_steps": num_steps, "key": key}
        settings["execution"] = execution
        sign, definite = _definite(operator)
        if definite is None:
            assert isinstance(self.estimator, SLQEstimator)
            flat = flatten(operator)
            return self.estimator.run_singular(flat, Log(), self.gradient, **settings)
        flat, outer = flatten(definite), self.preconditioner
        if outer is None:
            estimate = self.estimator.run(flat, Log(), self.gradient, **settings)
            return _with_stats(estimate, sign=sign)
        assert isinstance(self.estimator, SLQEstimator)
        bound = self.estimator.lower_bound
        if bound is not None:
            # From A >= bound I follows P^(-1/2) A P^(-1/2) >= (bound / max P) I.
            bound = bound / outer.largest
        estimator = dataclasses.replace(self.estimator, lower_bound=bound)
        inside = outer.apply_to(flat)
        if isinstance(k, Adaptive):
            settings["k"] = dataclasses.replace(k, offset=outer.logdet)
        estimate = estimator.run(inside, Log(), self.gradient, **settings)
        count = largest_budget(k)
        probes = draw_for(inside, self.estimator.sampler, key, jnp.arange(count))
        if isinstance(k, Adaptive):
            # Those that were used, as if they were as many as there could be.
            used = estimate.num_matvecs // num_steps
            share = jnp.maximum(used, 1).astype(probes.dtype) / count
            weight = 1 / jnp.sqrt(share)
            probes = jnp.where(jnp.arange(count) < used, weight * probes, 0)
        value = outer.control(flat, estimate.value, probes, execution)
        samples = estimate.samples
        assert samples is not None
        shifted = {
            name: estimate.extra[name] + outer.logdet
            for name in ("bracket", "sample_brackets")
        }
        estimate = dataclasses.replace(
            estimate,
            value=value + outer.logdet,
            samples=samples + outer.logdet,
            num_matvecs=estimate.num_matvecs + outer.num_matvecs,
        )
        return _with_stats(estimate, sign=sign, **shifted)


def _definite(
    operator: lx.AbstractLinearOperator,
) -> tuple[float, lx.AbstractLinearOperator | None]:
    """The sign of the determinant, and the operator or its negative, whichever is
    positive semidefinite; None if neither is known to be."""
    if lx.is_positive_semidefinite(operator):
        return 1.0, operator
    if lx.is_negative_semidefinite(operator):
        return (-1.0) ** operator.in_size(), -operator
    return 1.0, None


def _with_stats(estimate: Estimate, *, sign: Any, **stats: Array) -> Estimate:
    stats["sign"] = jnp.asarray(sign, estimate.value.dtype)
    return dataclasses.replace(estimate, extra=estimate.extra | stats)


def _from_structure(determinant: SignLog) -> Estimate:
    return Estimate(
        value=determinant.log,
        std_err=jnp.zeros_like(determinant.log),
        samples=determinant.log[None],
        num_matvecs=0,
        rounding=0.0,
        result=failure(determinant.sign == 0, RESULTS.zero_determinant),
        extra={"sign": determinant.sign},
    )


def logdet(
    operator: lx.AbstractLinearOperator,
    estimator: AbstractFunctionEstimator = SLQEstimator(),
    *,
    k: int | Adaptive,
    num_steps: int,
    key: PRNGKeyArray | None = None,
    preconditioner: AbstractPreconditioner | None = None,
    gradient: AbstractFunctionGradient = LanczosGradient(),
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution:
    """Estimate $\\log|\\det A|$ from products with vectors.

    - Operators tagged positive (or negative) semidefinite: $\\mathrm{tr} \\log A$ by
      `estimator`, with Lanczos; `k * num_steps` products.
    - Diagonal, triangular, tridiagonal and identity operators that store their entries,
      and multiples and products of them: exactly, without a product.
    - Any other square operator: $\\mathrm{tr} \\log(A^* A) / 2$ by Golub-Kahan; `k *
      num_steps` products with $A$ and as many with $A^*$. Needs an `SLQEstimator`.

    With `k >= n` the answer is exact, from n products and a dense factorisation. For
    matrices that fit, a Cholesky factorisation is faster up to n of several thousand:
    see [Log-determinants](../logdet.md).

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key1)
        solution = tx.logdet(
            operator, k=10, num_steps=10, key=key2, preconditioner=preconditioner
        )
        print(solution.value, "+-", solution.std_err, solution.stats["bracket"])
        ```

    **Arguments:**

    - `operator`: a square `lineax.AbstractLinearOperator`, real or complex, on arrays or
        PyTrees, of any floating dtype.
    - `estimator`: default: [`traceax.SLQEstimator`][].
    - `k`: the number of probes, a Python integer, or [`traceax.Adaptive`][]: as many as
        it takes to reach a tolerance (of `std_err`; the bracket depends on `num_steps`).
    - `num_steps`: the number of Lanczos steps for each, a Python integer; more than n
        count as n.
    - `key`: a JAX PRNG key. Not needed where nothing is random.
    - `preconditioner`: of an operator tagged positive semidefinite, which may have been
        made from the same or from a similar operator. See
        [`traceax.nystrom_preconditioner`][].
    - `gradient`: how derivatives are made: [`traceax.LanczosGradient`][], from the same
        run, or [`traceax.SolveGradient`][], which has second derivatives.
    - `execution`: where and how many at a time products are made.
    - `throw`: whether to raise if the result is not `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][] with a real `value`. `std_err` is the sampling error alone.
    `stats` has, beside the entries described there,

    - `"sign"`: of the determinant, where it is known: 1 or, for a negative semidefinite
        operator, $(-1)^n$; for structured operators the sign, or in complex arithmetic
        the phase. Absent for other operators.
    - the entries of the estimator: for `SLQEstimator` `"bracket"`, shape `(2,)`, between
        whose ends `value` would lie without quadrature error (for the same probes);
        `"sample_brackets"`, the same for each probe, shape `(k, 2)`; `"ritz_values"`, the
        smallest and the largest (of the preconditioned operator, if there is a
        preconditioner); `"gradient_residual"`, shape `(k,)`, the relative
        residuals of the solves behind the gradient.

    Derivatives in the operator's arrays are estimates of $\\mathrm{tr}(A^{-1} dA)$.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer.
    - `ValueError`: `operator` is not square; `k` or `num_steps` is too small; `key` is
        missing; `preconditioner` or `estimator` does not fit the operator.
    - An `equinox` run-time error with `throw=True`: the operator was seen not to be
        positive definite; it is singular; a product was not finite.
    """
    check_operator(operator)
    num_steps = check_positive("num_steps", num_steps)
    check_instance("estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()")
    check_instance("gradient", gradient, AbstractFunctionGradient, "LanczosGradient()")
    definite = lx.is_positive_semidefinite(operator)
    negative = lx.is_negative_semidefinite(operator)
    slq = isinstance(estimator, SLQEstimator)
    if not slq and (preconditioner is not None or not (definite or negative)):
        raise ValueError(
            "`estimator` must be a `traceax.SLQEstimator` for a log-determinant with a "
            "preconditioner, and for one of an operator without a semidefinite tag. "
            f"Found `{type(estimator).__name__}`."
        )
    if preconditioner is not None:
        example = "nystrom_preconditioner(operator, rank, key=key)"
        check_instance("preconditioner", preconditioner, AbstractPreconditioner, example)
        if preconditioner.size != operator.in_size():
            raise ValueError(
                "`preconditioner` must be of the size of `operator`. Found "
                f"{preconditioner.size} and {operator.in_size()}. Make it from this "
                f"operator, for example `traceax.{example}`."
            )
        if not definite:
            raise ValueError(
                "`operator` must be tagged positive semidefinite where there is a "
                f"`preconditioner`. Found `operator` of type {type(operator).__name__} "
                "without the tag. If it is, say so: `lineax.TaggedLinearOperator("
                "operator, lineax.positive_semidefinite_tag)`; if not, leave "
                "`preconditioner` out."
            )
    task = _LogDet(
        estimator=estimator,
        preconditioner=preconditioner,
        gradient=gradient,
        num_steps=num_steps,
    )
    return solve(task, operator, k=k, key=key, execution=execution, throw=throw)
