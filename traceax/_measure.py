from collections.abc import Callable

import lineax as lx
from jaxtyping import PRNGKeyArray

from ._adaptive import Adaptive
from ._checks import check_instance, check_operator
from ._estimator.base import AbstractTraceEstimator, Measurement
from ._execution import AbstractExecution
from ._quantity import AbstractQuantity
from ._solution import Solution
from ._solve import solve


def measure(
    quantity: Callable[[lx.AbstractLinearOperator], AbstractQuantity],
    operator: lx.AbstractLinearOperator,
    estimator: AbstractTraceEstimator,
    k: int | Adaptive,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
    throw: bool,
) -> Solution:
    """The public call for a quantity of an operator."""
    check_instance("estimator", estimator, AbstractTraceEstimator, "XTraceEstimator()")
    check_operator(operator)
    task = Measurement(estimator=estimator, quantity=quantity(operator))
    return solve(task, operator, k=k, key=key, execution=execution, throw=throw)
