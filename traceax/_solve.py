import operator as _builtin
from typing import Any, ClassVar, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from ._adaptive import Adaptive, largest_budget
from ._execution import AbstractExecution
from ._solution import Estimate, RESULTS, Solution
from ._vectors import check_square, dtypes, hermitian_tag, standard_promotion


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


def check_operator(operator: Any) -> None:
    if isinstance(operator, lx.AbstractLinearOperator):
        return check_square(operator)
    if eqx.is_array_like(operator):
        fix = "Wrap a matrix as `lineax.MatrixLinearOperator(matrix)`."
    elif callable(operator):
        fix = (
            "Wrap a function `v -> A v` as `lineax.FunctionLinearOperator(function, "
            "jax.ShapeDtypeStruct((n,), dtype))`."
        )
    else:
        fix = "See the operators of lineax."
    raise TypeError(
        "`operator` must be a `lineax.AbstractLinearOperator`. Found an object of type "
        f"{type(operator).__name__}. {fix}"
    )


def check_hermitian(operator: lx.AbstractLinearOperator) -> None:
    """Raise unless the tags say so; lineax has no tag for complex Hermitian operators."""
    is_complex = jnp.issubdtype(dtypes(operator)[0], jnp.complexfloating)
    if lx.is_positive_semidefinite(operator) or lx.is_negative_semidefinite(operator):
        return
    if hermitian_tag in getattr(operator, "tags", ()):
        return
    if not is_complex and lx.is_symmetric(operator):
        return
    tag = "traceax.hermitian_tag" if is_complex else "lineax.symmetric_tag"
    raise ValueError(
        "`operator` must be Hermitian, and say so by a tag. Found `operator` of type "
        f"{type(operator).__name__} without one. If it is, wrap it: "
        f"`lineax.TaggedLinearOperator(operator, {tag})`, or "
        "`lineax.positive_semidefinite_tag` where that holds."
    )


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        is_class = isinstance(value, type)
        found = f"the class {value.__name__}" if is_class else repr(value)
        raise TypeError(
            f"`{name}` must be an instance of `traceax.{kind.__name__}`. Found {found}. "
            f"Pass, for example, `traceax.{example}`."
        )


def check_positive(name: str, value: Any) -> int:
    """A Python integer, 1 or more, on which array shapes depend."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` must be a Python integer, because array shapes depend on it. "
            f"Found a traced value, {value}. Mark it static: `jax.jit(f, "
            f"static_argnames='{name}')`, or use `equinox.filter_jit`, which does so for "
            "Python integers. If the budget depends on the data, use `traceax.Adaptive`."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"`{name}` must be an integer. Found {value!r} of type "
            f"{type(value).__name__}. Round it, for example `int({value!r})`."
        )
    value = _builtin.index(value)
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1. Found {value}.")
    return value


def check_window(window: Any) -> None:
    if window is not None and (type(window) is not int or window < 0):
        raise ValueError(
            "`window` must be a Python integer, 0 or more, or None for all basis "
            f"vectors. Found {window!r}."
        )


def check_key(key: Any) -> None:
    if key is None:
        return
    typed = eqx.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and key.shape == ():
        return
    if eqx.is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1:
        return
    shape = f" of shape {key.shape}" if eqx.is_array(key) else ""
    raise TypeError(
        "`key` must be one JAX PRNG key. Found an object of type "
        f"{type(key).__name__}{shape}. Pass, for example, `jax.random.key(0)`; for "
        "several keys use `jax.vmap`."
    )


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
