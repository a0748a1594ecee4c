import operator as _builtin
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from ._exact import exact_trace
from ._execution import AbstractExecution
from ._solution import Estimate, RESULTS, Solution
from ._vectors import check_square, standard_promotion


class _Runnable(Protocol):
    min_matvecs: Any

    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int,
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


def check_budget(k: Any) -> int:
    if isinstance(k, Tracer):
        raise TypeError(
            "`k` must be a Python integer, because array shapes depend on it. Found a "
            f"traced value, {k}. Mark it static: `jax.jit(f, static_argnames='k')`, or "
            "use `equinox.filter_jit`, which does so for Python integers."
        )
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TypeError(
            f"`k`, the number of matrix-vector products, must be an integer. Found {k!r} "
            f"of type {type(k).__name__}. Round it, for example `int({k!r})`."
        )
    k = _builtin.index(k)
    if k < 1:
        raise ValueError(
            f"`k`, the number of matrix-vector products, must be at least 1. Found {k}."
        )
    return k


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
    with jax.named_scope(type(estimator).__name__), standard_promotion():
        if k >= operator.in_size():
            estimate = exact_trace(operator, execution)
        else:
            estimate = estimator.run(operator, k, key, execution)
    value = estimate.value
    others = jax.lax.stop_gradient((estimate.std_err, estimate.samples, estimate.extra))
    std_err, samples, extra = others
    rounding = estimate.rounding * jnp.abs(jax.lax.stop_gradient(value))
    std_err = jnp.hypot(std_err, rounding)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(samples))
    result: Any = RESULTS.successful
    if estimate.semidefinite is not None:
        result = RESULTS.where(estimate.semidefinite, result, RESULTS.not_semidefinite)
    result = RESULTS.where(finite, result, RESULTS.nonfinite_product)
    stats = {
        "num_matvecs": estimate.num_matvecs,
        "samples": samples,
        "std.err": std_err,
    }
    return Solution(value, std_err, result, stats | extra, state=None)


def solve(
    estimator: _Runnable,
    operator: lx.AbstractLinearOperator,
    *,
    k: int,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
    throw: bool,
) -> Solution:
    """The one path from a call to its answer: check, run compiled, package.

    A budget of n products or more is spent on the exact trace, whatever the estimator.
    """
    check_operator(operator)
    k = check_budget(k)
    check_key(key)
    if k < min(estimator.min_matvecs, operator.in_size()):
        raise ValueError(
            f"`{type(estimator).__name__}` needs at least k={estimator.min_matvecs} "
            f"matrix-vector products. Found k={k}. Raise `k`, or use "
            "`traceax.HutchinsonEstimator`, which needs 1."
        )
    solution = _run(estimator, operator, k, key, execution)
    if throw:
        failed = solution.result != RESULTS.successful
        solution = solution.result.error_if(solution, failed)
    return solution
