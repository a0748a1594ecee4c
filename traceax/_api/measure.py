from collections.abc import Callable

import lineax as lx
from jaxtyping import PRNGKeyArray

from .._core.checks import check_instance, check_is_operator
from .._core.quantity import AbstractQuantity
from .._core.solution import Solution
from .._estimators.base import AbstractTraceEstimator, Measurement
from .._run.adaptive import Adaptive
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve


def measure(
    quantity: Callable[[lx.AbstractLinearOperator], AbstractQuantity],
    operator: lx.AbstractLinearOperator,
    estimator: AbstractTraceEstimator,
    *,
    k: int | Adaptive,
    key: PRNGKeyArray | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution:
    """Estimate any quantity, as [`traceax.trace`][] does the trace.

    **Arguments:**

    - `quantity`: a function of the operator, checked, to an `AbstractQuantity`.
    - the others: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose value is what the quantity presents.

    **Raises:**

    Errors as [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate this quantity.
    """
    check_is_operator(operator, second=estimator)
    check_instance("estimator", estimator, AbstractTraceEstimator, "XTraceEstimator()")
    task = Measurement(estimator=estimator, quantity=quantity(operator))
    return solve(task, operator, k=k, key=key, execution=execution, throw=throw)
