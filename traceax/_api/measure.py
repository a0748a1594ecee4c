"""Any quantity that estimators read from matvecs."""

from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.quantity import AbstractQuantity
from .._core.solution import Solution
from .._estimators.base import AbstractEstimator, Measurement
from .._estimators.controlled import controlled, ControlledMeasurement
from .._estimators.deflated import deflated
from .._operators.control import Controlled
from .._operators.convert import OperatorLike
from .._operators.diagonal import diagonal_cost
from .._operators.door import enter, EnteredOperator
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
    control: Any = None,
) -> Solution[Any]:
    """Estimate any quantity of an operator that is read from its matvecs, such as the
    trace.

    **Arguments:**

    - `quantity`: an `AbstractQuantity`, of which `for_structure` of the operator's images
        is estimated.
    - `square`: whether the operator must be square. Norms are defined for others too.
    - `control`: for square operators, as for [`traceax.trace`][].
    - The other arguments: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose value is `quantity.present` of the estimate.

    **Raises:**

    The errors of [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate this quantity.
    """
    task, entered = None, None
    if control is not None:
        task, entered = _with_control(quantity, operator, estimator, control, deflation)
    if task is None or entered is None:
        entered = enter(operator, square=square, second=estimator)
        check_instance("estimator", estimator, AbstractEstimator, "XTraceEstimator()")
        quantity = quantity.for_structure(entered.image)
        task = Measurement(estimator=estimator, quantity=quantity)
        task = deflated(task, entered, deflation, k)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )


def _with_control(
    quantity: AbstractQuantity,
    operator: OperatorLike,
    estimator: AbstractEstimator,
    control: Any,
    deflation: Any,
) -> tuple[ControlledMeasurement | None, EnteredOperator | None]:
    """The task with a control, and the operators that are stacked for it; None where the
    diagonal of the operator is stored, and the estimator uses it."""
    if deflation is not None:
        raise ValueError(
            "`control` and `deflation` exclude each other. Found both. Leave one out; "
            "deflation is a control with an operator of low rank."
        )
    check_instance("estimator", estimator, AbstractEstimator, "HutchinsonEstimator()")
    operators = Controlled.of(operator, control)
    quantity = quantity.for_structure(operators.entered.structure)
    task = controlled(quantity, estimator, operators)
    if estimator.takes_known_diagonal and diagonal_cost(operators.parts[0]) == 0:
        return None, None
    return task, operators.entered
