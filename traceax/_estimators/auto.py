"""The choice of a trace estimator from the operator's tags and the budget."""

import dataclasses
from typing import ClassVar

from jaxtyping import PRNGKeyArray

from .._core.checks import check_positive
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._operators.checks import checked_operator
from .._operators.convert import OperatorLike
from .._operators.diagonal import diagonal_cost
from .._operators.tags import sign_of
from .._run.adaptive import Adaptive
from .._run.budget import Budget, first_budget
from .._run.execution import AbstractExecution
from .base import AbstractEstimator
from .exact import ExactTraceEstimator
from .hutchinson import HutchinsonEstimator
from .xnystrace import XNysTraceEstimator
from .xtrace import XTraceEstimator


def select_trace_estimator(operator: OperatorLike, k: int) -> AbstractEstimator:
    """The estimator that [`traceax.AutoTraceEstimator`][] uses for `operator` and `k`.

    1. [`traceax.ExactTraceEstimator`][] if the exact trace needs at most `k` matvecs;
    2. [`traceax.XNysTraceEstimator`][] if the operator is tagged positive or negative
       semidefinite;
    3. [`traceax.XTraceEstimator`][] for any other operator;
    4. [`traceax.HutchinsonEstimator`][] for any other operator if `k` is 1.

    The choice itself makes no matvec.

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

    - `operator`: a square matrix or operator.
    - `k`: the budget of matrix-vector products, a Python integer. For a
        [`traceax.Adaptive`][] pass its `round_size`: the choice depends on that, and not
        on `max_k`.

    **Returns:**

    An estimator with its default settings.

    **Raises:**

    `TypeError` and `ValueError` for `operator` and `k` as in [`traceax.trace`][].
    """
    operator = checked_operator(operator).operator
    if isinstance(k, Adaptive):
        raise TypeError(
            "`k` must be an integer. Found a `traceax.Adaptive`. Pass its `round_size`."
        )
    if diagonal_cost(operator) <= check_positive("k", k):
        return ExactTraceEstimator()
    return _select(sign_of(operator), k)


def _select(sign: int, k: int) -> AbstractEstimator:
    # The sign is 1 or -1 for an operator that is tagged semidefinite, else 0. XNysTrace
    # comes first, since its basis is twice the size of XTrace's for the same k.
    if sign != 0:
        return XNysTraceEstimator()
    if k >= XTraceEstimator.min_matvecs:
        return XTraceEstimator()
    return HutchinsonEstimator()


class AutoTraceEstimator(AbstractEstimator):
    """Chooses an estimator from the operator's tags and the budget, before any matvec.

    [`traceax.select_trace_estimator`][] makes the choice, for `k` or, with
    [`traceax.Adaptive`][], for its `round_size`; `max_k` does not matter. The chosen
    estimator determines cost and memory: at most `k` matvecs, and between one block of
    probes and `3.2 k` vectors of length n.

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

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return _select(operator.sign, k.round_size).default_max_k(operator, k)

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        # A number `k`, or the size of the first round: the last round is not known yet.
        estimator = _select(operator.sign, first_budget(k))
        estimate = estimator.measure(quantity, operator, k, key, execution)
        return dataclasses.replace(estimate, method=estimator.name)


AutoTraceEstimator.__init__.__doc__ = "**Arguments:** none."
