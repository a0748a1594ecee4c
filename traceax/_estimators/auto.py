from typing import ClassVar

import lineax as lx
from jaxtyping import PRNGKeyArray

from .._core.checks import check_positive
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._operators.checks import check_is_operator
from .._operators.diagonal import diagonal_cost
from .._operators.tags import sign_of
from .._run.budget import Budget, first_budget
from .._run.execution import AbstractExecution
from .base import AbstractEstimator
from .exact import ExactTraceEstimator
from .hutchinson import HutchinsonEstimator
from .xnystrace import XNysTraceEstimator
from .xtrace import XTraceEstimator


def select_trace_estimator(
    operator: lx.AbstractLinearOperator, k: int
) -> AbstractEstimator:
    """The estimator that [`traceax.AutoTraceEstimator`][] uses for `operator` and `k`.

    1. [`traceax.ExactTraceEstimator`][] where at most `k` products give the exact trace;
    2. [`traceax.XNysTraceEstimator`][] where the operator is tagged positive or negative
       semidefinite;
    3. [`traceax.XTraceEstimator`][] for any other operator;
    4. [`traceax.HutchinsonEstimator`][] for those if `k` is 1.

    It makes no product.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.FunctionLinearOperator(lambda v: 2 * v, jnp.zeros(500))
        print(tx.select_trace_estimator(operator, k=20).name)  # XTraceEstimator
        print(tx.select_trace_estimator(operator, k=500).name)  # ExactTraceEstimator
        ```

    **Arguments:**

    - `operator`: a square `lineax` operator.
    - `k`: the budget of matrix-vector products, a Python integer. For a
        [`traceax.Adaptive`][] pass its `round_size`: the choice is made by that, and not
        by `max_k`.

    **Returns:**

    An estimator with its default settings.

    **Raises:**

    `TypeError` and `ValueError` for `operator` and `k` as in [`traceax.trace`][].
    """
    check_is_operator(operator)
    if isinstance(k, Budget):
        raise TypeError(
            "`k` must be an integer. Found a `traceax.Adaptive`. Pass its `round_size`."
        )
    if diagonal_cost(operator) <= check_positive("k", k):
        return ExactTraceEstimator()
    return _select(sign_of(operator), k)


def _select(sign: int, k: int) -> AbstractEstimator:
    if sign != 0:
        return XNysTraceEstimator()
    if k >= XTraceEstimator.min_matvecs:
        return XTraceEstimator()
    return HutchinsonEstimator()


class AutoTraceEstimator(AbstractEstimator):
    """Picks an estimator from the operator's tags and the budget, before any product.

    The choice is that of [`traceax.select_trace_estimator`][], for `k` or, with
    [`traceax.Adaptive`][], for its `round_size`, whatever `max_k` is. Cost and memory are
    those of the estimator that is chosen: at most `k` products, and from one block of
    probes to `3.2 k` vectors of length n.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        # What lineax knows is taken from there: k may be anything, and no key is needed.
        operator = lx.MatrixLinearOperator(jnp.ones((500, 500)))
        solution = tx.trace(operator, tx.AutoTraceEstimator(), k=1)
        print(solution.value, solution.stats["num_matvecs"])  # 500.0 0
        ```
    """

    min_matvecs: ClassVar[int] = 1
    takes_known_diagonal: ClassVar[bool] = True

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        chosen = _select(operator.sign, first_budget(k))
        return chosen.measure(quantity, operator, k, key, execution)


AutoTraceEstimator.__init__.__doc__ = "**Arguments:** none."
