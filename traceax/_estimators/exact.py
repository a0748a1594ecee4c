"""The exact trace, `sum_i e_i* A e_i` over the unit vectors `e_i`, as an estimator."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._run.budget import Budget, largest_budget
from .._run.exact import exact
from .._run.execution import AbstractExecution
from .base import AbstractEstimator


class ExactTraceEstimator(AbstractEstimator):
    """The exact trace, without randomness.

    If lineax knows the diagonal, it is summed without any matvec. It does for matrix,
    diagonal, identity and tridiagonal operators, their sums and multiples, and products
    of diagonal ones. Otherwise the cost is `n` matvecs with unit vectors, of which one
    block is held in memory at a time: pass `k >= n`. `std_err` is 0. Every estimator
    does the same when its budget is `k >= n`.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0]))
        solution = tx.trace(operator, tx.ExactTraceEstimator(), k=1)
        print(solution.value)  # 6.0
        ```

    **Raises:**

    `ValueError` if `k` is smaller than the number of matvecs needed.
    """

    min_matvecs: ClassVar[int] = 1
    quadratic: ClassVar[bool] = True
    takes_known_diagonal: ClassVar[bool] = True

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return operator.size

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        # An adaptive budget sets the cost of the exact answer aside, and then counts it
        # separately from `max_k`.
        budget = largest_budget(k)
        if isinstance(k, Budget) and k.exact_cost is not None:
            budget = max(budget, k.exact_cost)
        if operator.size > budget:
            raise ValueError(
                f"`ExactTraceEstimator` needs k={operator.size} matrix-vector products, "
                f"or fewer where lineax knows the diagonal. Found k={budget}. Raise `k`, "
                "or use `traceax.AutoTraceEstimator`."
            )
        estimate = exact(quantity, operator, execution)
        return dataclasses.replace(estimate, extra={"exact": jnp.ones((), bool)})


ExactTraceEstimator.__init__.__doc__ = "**Arguments:** none."
