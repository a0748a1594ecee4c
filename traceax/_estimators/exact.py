from typing import ClassVar

import lineax as lx
from jaxtyping import PRNGKeyArray

from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._run.adaptive import Adaptive, largest_budget
from .._run.exact import exact, exact_cost
from .._run.execution import AbstractExecution
from .base import AbstractQuantityEstimator


class ExactTraceEstimator(AbstractQuantityEstimator):
    """The trace itself, without randomness.

    Where lineax knows the diagonal (matrix, diagonal, identity and tridiagonal
    operators, their sums and multiples, products of diagonal ones) it is summed, and no
    product is made. Otherwise `n` products with unit vectors are made, and one block of
    them is held at a time: pass `k >= n`. `std_err` is 0. Every estimator does this
    when its budget is `k >= n`.

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

    `ValueError` if `k` is smaller than the number of products needed.
    """

    min_matvecs: ClassVar[int] = 1
    quadratic: ClassVar[bool] = True

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        budget = largest_budget(k)
        if isinstance(k, Adaptive) and k.exact_cost is not None:
            budget = max(budget, k.exact_cost)
        cost = exact_cost(quantity, operator)
        if cost > budget:
            raise ValueError(
                f"`ExactTraceEstimator` needs k={cost} matrix-vector products for this "
                f"operator. Found k={budget}. Raise `k`, or use "
                "`traceax.AutoTraceEstimator`."
            )
        return exact(quantity, operator, execution)


ExactTraceEstimator.__init__.__doc__ = "**Arguments:** none."
