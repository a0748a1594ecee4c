"""The diagonal of an operator, and the traces of its diagonal blocks."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.quantity import Diagonal, LeafTraces
from .._core.solution import Solution
from .._estimators.auto import AutoTraceEstimator
from .._estimators.auto_diagonal import AutoDiagonalEstimator
from .._estimators.base import AbstractEstimator
from .._operators.checks import operator_first
from .._operators.convert import OperatorLike
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .measure import measure


@operator_first
def diagonal(
    operator: OperatorLike,
    estimator: AbstractEstimator = AutoDiagonalEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    control: Any = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    """Estimate the diagonal of a square linear operator from `k` matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def loss(w):
            return jnp.sum(jnp.cosh(w["a"])) + jnp.sum(w["a"]) * jnp.sum(w["b"] ** 2)

        weights = {"a": jnp.linspace(0.0, 1.0, 300), "b": jnp.zeros(200)}
        operator = tx.hessian(loss, weights)
        solution = tx.diagonal(operator, k=40, key=jax.random.key(0))
        print(jax.tree.map(jnp.shape, solution.value))  # {'a': (300,), 'b': (200,)}
        error = jnp.abs(solution.value["a"] - jnp.cosh(weights["a"]))
        print(jnp.mean(error < 3 * solution.std_err["a"]))
        ```

    **Arguments:**

    - `operator`: a square matrix, or an operator on arrays or PyTrees, real or complex,
        of any floating dtype. See [`traceax.as_operator`][].
    - `estimator`: which estimator to use. Default: [`traceax.AutoDiagonalEstimator`][].
    - `k`: the number of matrix-vector products, a Python integer (static under
        `jax.jit`), which is never exceeded; matvecs with the adjoint count. With
        `k >= n` the answer is exact, and where lineax knows the diagonal no matvec is
        made. Or [`traceax.Adaptive`][]: as many as it takes until the error is below a
        tolerance, in the norm `traceax.Adaptive(norm=...)`. Default: 1%, in the two-norm
        of all entries.
    - `key`: a JAX PRNG key. Not needed where nothing is random.
    - `state`, `deflation`: as for [`traceax.trace`][].
    - `control`: as for [`traceax.trace`][], with the known diagonal of B, a PyTree of the
        structure of a vector. All entries share one coefficient c, which takes two of the
        `k` probes.
    - `execution`: where matvecs run, and how many at a time.
    - `throw`: whether to raise if the result is not `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][]. `value` and `std_err` are PyTrees of the operator's
    structure, with a standard error for each entry. `stats["num_samples"]` is the
    number of samples m: an interval for an entry takes the quantile of Student's t with
    m - 1 degrees of freedom. The estimate is unbiased; with the default estimator there
    is a [small bias][traceax.AutoDiagonalEstimator]. Operators in bfloat16 or float16
    are applied in their own dtype; everything else is float32, and so are `value` and
    `std_err`. The estimator determines the memory: the default takes about `6.6 k`
    vectors of length n, and `6.2 k` with a semidefinite tag.

    `jit`, `vmap`, `grad`, `jvp` and second derivatives work with respect to the
    operator's arrays. A derivative is an estimate of the derivative of the diagonal,
    with no more bias than the value.

    **Raises:**

    The errors of [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate diagonals.
    """
    return measure(
        Diagonal(),
        operator,
        estimator,
        k=k,
        key=key,
        state=state,
        deflation=deflation,
        control=control,
        execution=execution,
        throw=throw,
    )


@operator_first
def leaf_traces(
    operator: OperatorLike,
    estimator: AbstractEstimator = AutoTraceEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    control: Any = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    """Estimate the trace of each diagonal block that belongs to a leaf of the operator's
    PyTree, from the same matvecs. For a Hessian this is a trace for each layer.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def loss(w):
            return jnp.sum(w["a"] ** 2) + 3 * jnp.sum(w["b"] ** 2) + jnp.sum(w["a"]) ** 2

        operator = tx.hessian(loss, {"a": jnp.zeros(100), "b": jnp.zeros(200)})
        solution = tx.leaf_traces(operator, k=20, key=jax.random.key(0))
        print({name: f"{x:.0f}" for name, x in solution.value.items()})
        ```

    **Arguments:**

    - `operator`, `estimator`, `key`, `state`, `deflation`, `execution`, `throw`: as
        for [`traceax.trace`][].
    - `control`: as for [`traceax.trace`][], with the known traces of the leaves of B.
        Each leaf has a coefficient of its own.
    - `k`: as for [`traceax.trace`][]; with [`traceax.Adaptive`][] the errors of all
        traces together are compared with the tolerance, in the norm
        `traceax.Adaptive(norm=...)`.

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` are PyTrees of the operator's
    structure with a scalar for each leaf. Up to rounding, the values sum to the value of
    [`traceax.trace`][] with the same key and estimator. `solution.covariance` is the
    covariance of the traces, and `solution.transform` gives a function of them, such as a
    ratio, one error bar. `stats["num_samples"]` is the number of samples. Matvecs and
    derivatives are the same as with `traceax.trace`, and memory is up to 1.3 times as
    much.

    **Raises:**

    The errors of [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate traces of leaves.
    """
    return measure(
        LeafTraces(),
        operator,
        estimator,
        k=k,
        key=key,
        state=state,
        deflation=deflation,
        control=control,
        execution=execution,
        throw=throw,
    )
