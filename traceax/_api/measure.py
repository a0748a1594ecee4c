"""Any quantity that estimators read from matvecs."""

from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.quantity import AbstractQuantity
from .._core.solution import Solution
from .._estimators.base import AbstractEstimator, Measurement
from .._estimators.deflated import deflated
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve


def measure(
    quantity: AbstractQuantity,
    operator: OperatorLike,
    estimator: AbstractEstimator,
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
    square: bool = True,
) -> Solution[Any]:
    """Estimate any quantity of an operator that is read from its matvecs, such as the
    trace.

    **Arguments:**

    - `quantity`: an `AbstractQuantity`, of which `for_structure` of the operator's images
        is estimated.
    - `square`: whether the operator must be square. Norms are defined for others too.
    - The other arguments: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose value is `quantity.present` of the estimate.

    **Raises:**

    The errors of [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate this quantity.
    """
    entered = enter(operator, square=square, second=estimator)
    check_instance("estimator", estimator, AbstractEstimator, "XTraceEstimator()")
    quantity = quantity.for_structure(entered.image)
    task = Measurement(estimator=estimator, quantity=quantity)
    task = deflated(task, entered, deflation, k)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
