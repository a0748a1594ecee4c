from typing import Any, ClassVar, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from ._adaptive import Adaptive, largest_budget
from ._checks import check_key, check_operator, check_positive
from ._execution import AbstractExecution
from ._flat import standard_promotion
from ._solution import Estimate, RESULTS, Solution


class _Runnable(Protocol):
    fallback: ClassVar[str]

    @property
    def min_matvecs(self) -> int: ...

    @property
    def name(self) -> str: ...

    def exact(
        self, operator: lx.AbstractLinearOperator, execution: AbstractExecution
    ) -> Estimate: ...

    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate: ...


@eqx.filter_jit
def _run(estimator, operator, k, key, execution) -> Solution:
    scope = jax.named_scope(estimator.name)
    with scope, standard_promotion(), execution.factorising():
        size = operator.in_size()
        if isinstance(k, Adaptive):
            exact, k = k.round_size >= size, k.at_most(size)
        else:
            exact = k >= size
        if exact:
            estimate = estimator.exact(operator, execution)
        else:
            estimate = estimator.run(operator, k, key, execution)
    value = estimate.value
    others = jax.lax.stop_gradient((estimate.std_err, estimate.samples, estimate.extra))
    std_err, samples, extra = others
    if estimate.rounding > 0:
        rounding = estimate.rounding * jnp.abs(jax.lax.stop_gradient(value))
        std_err = jnp.hypot(std_err, rounding)
    result: Any = RESULTS.successful if estimate.result is None else estimate.result
    unseen = ~jnp.isfinite(value) & (result == RESULTS.successful)
    result = RESULTS.where(unseen, RESULTS.nonfinite_product, result)
    stats = {
        "num_matvecs": estimate.num_matvecs,
        "samples": samples,
        "std.err": std_err,
    }
    return Solution(value, std_err, result, stats | extra, estimate.state)


def solve(
    estimator: _Runnable,
    operator: lx.AbstractLinearOperator,
    *,
    k: int | Adaptive,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
    throw: bool,
) -> Solution:
    """The one path from a call to its answer: check, run compiled, package.

    A budget of n products or more is spent on the exact trace, whatever the estimator.
    """
    check_operator(operator)
    check_key(key)
    if not isinstance(k, Adaptive):
        k = check_positive("k", k)
    budget = largest_budget(k)
    if budget < min(estimator.min_matvecs, operator.in_size()):
        raise ValueError(
            f"`{estimator.name}` needs at least k={estimator.min_matvecs}. Found "
            f"k={budget}. Raise `k`, or use `traceax.{estimator.fallback}`, which needs "
            "1."
        )
    solution = _run(estimator, operator, k, key, execution)
    return _raise_if_failed(solution, execution) if throw else solution


def _raise_if_failed(solution: Solution, execution: AbstractExecution) -> Solution:
    failed = solution.result != RESULTS.successful
    if isinstance(failed, Tracer):
        if execution.can_raise:
            return solution.result.error_if(solution, failed)
        value = jnp.where(failed, jnp.nan, solution.value)
        return eqx.tree_at(lambda x: x.value, solution, value)
    if not failed:
        return solution
    if solution.result == RESULTS.max_matvecs_reached:
        found = (
            f"Reached {solution.value} with a standard error of {solution.std_err} after "
            f"{solution.stats['num_matvecs']} products."
        )
    elif "ritz_values" in solution.stats:
        smallest, largest = solution.stats["ritz_values"]
        found = f"Found Ritz values from {smallest} to {largest}."
    else:
        found = ""
    message = f"{RESULTS[solution.result]}\n\n{found}".strip()
    # On one device: an error on one of several would leave the others waiting for it.
    # With `EQX_ON_ERROR=nan` it is NaN rather than an error.
    zero = jnp.zeros((), solution.value.dtype)
    value = solution.value + eqx.error_if(zero, jnp.ones((), bool), message)
    return eqx.tree_at(lambda x: x.value, solution, value)
