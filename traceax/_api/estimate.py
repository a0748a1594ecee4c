"""Several quantities of an operator from the same matvecs."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.joint import quantity_of
from .._core.quantity import AbstractQuantity
from .._core.solution import Solution
from .._estimators.auto import AutoTraceEstimator
from .._estimators.auto_diagonal import AutoDiagonalEstimator
from .._estimators.base import AbstractEstimator, Measurement
from .._estimators.deflated import deflated
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve


def estimate(
    operator: OperatorLike,
    quantities: PyTree[AbstractQuantity],
    estimator: AbstractEstimator | None = None,
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    """Estimate several quantities of a square linear operator from the same `k` matvecs:
    its trace, its diagonal, traces of leaves, traces of products with other operators, or
    quantities of your own.

    Each quantity has the value and the error bar that it has alone. Because all come from
    the same probes, their errors are correlated: `solution.covariance` is the covariance
    of the scalars, and `solution.transform` gives a function of them one error bar.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def loss(w):
            return jnp.sum(w["a"] ** 4) + jnp.sum(w["b"] ** 2) * jnp.sum(w["a"])

        point = {"a": jnp.linspace(1.0, 2.0, 100), "b": jnp.ones(100)}
        operator = tx.hessian(loss, point)
        quantities = {"trace": tx.Trace(), "layers": tx.LeafTraces()}
        solution = tx.estimate(operator, quantities, k=40, key=jax.random.key(0))
        print(solution)
        print(solution.transform(lambda x: x["layers"]["a"] / x["trace"]))
        ```

    **Arguments:**

    - `operator`: a square matrix, or an operator on arrays or PyTrees, real or complex,
        of any floating dtype. See [`traceax.as_operator`][].
    - `quantities`: a PyTree of [`traceax.AbstractQuantity`][]s that are linear in the
        operator: [`traceax.Trace`][], [`traceax.Diagonal`][], [`traceax.LeafTraces`][],
        [`traceax.TraceOfProduct`][] or your own.
    - `estimator`: which estimator to use. Default: [`traceax.AutoDiagonalEstimator`][] if
        all quantities are diagonals, else [`traceax.AutoTraceEstimator`][].
    - `k`: as for [`traceax.trace`][]; with [`traceax.Adaptive`][] the errors of all
        entries together are compared with the tolerance, in the norm
        `traceax.Adaptive(norm=...)`.
    - `key`, `state`, `deflation`, `execution`, `throw`: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` have for each quantity what it
    has alone. `stats["joint_samples"]` are the samples of the q scalars among their
    leaves, in their order, shape `(m, q)`. Cost and memory are those of the estimator;
    diagonals keep no samples.

    Each quantity has the derivatives that it has alone.

    **Raises:**

    The errors of [`traceax.trace`][]; a `TypeError` if a leaf of `quantities` is not a
    quantity; and a `ValueError` if there is none, if one is not linear in the operator,
    as norms are not, or if the estimator does not estimate one of them.
    """
    entered = enter(operator, second=quantities)
    flat = entered.flat
    quantity = quantity_of(quantities, entered.image, flat.size, flat.dtype)
    if estimator is None:
        diagonals = quantity.entrywise
        estimator = AutoDiagonalEstimator() if diagonals else AutoTraceEstimator()
    check_instance("estimator", estimator, AbstractEstimator, "XTraceEstimator()")
    task = Measurement(estimator=estimator, quantity=quantity)
    task = deflated(task, entered, deflation, k)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
