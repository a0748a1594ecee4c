"""The exact answer, from a diagonal that lineax knows or from n matvecs.

Since the unit vectors add up to `sum_i e_i e_i* = I`, the operator is
`A = sum_i (A e_i) e_i*`. So a linear quantity is the sum of its parts for the pairs
`(e_i, A e_i)`: the trace is `sum_i e_i* A e_i`. Squared norms are such sums too:
`||A||_F^2 = sum_i ||A e_i||^2`.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.norms import FrobeniusNorm
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .execution import AbstractExecution
from .fold import fold


def exact(
    quantity: AbstractQuantity, operator: FlatOperator, execution: AbstractExecution
) -> Estimate:
    """The quantity itself, from n matvecs with unit vectors. Memory is one block of
    vectors, forward and in reverse mode."""
    size = operator.size

    def read_column(operator, index):
        unit = jnp.zeros(size, operator.dtype).at[index].set(1)
        return quantity.read(unit, operator.mv(unit)), ()

    # Without the checkpoint reverse mode would keep all n columns. The loop around it
    # prevents common subexpressions already, and JAX's barrier against them takes time.
    read_column = eqx.filter_checkpoint(read_column, prevent_cse=False)
    value, (), _ = fold(
        read_column,
        reduce=lambda *_: (),
        merge=lambda _: (),
        operator=operator,
        k=size,
        execution=execution,
    )
    return _exact_estimate(quantity, value, size)


def exact_from_vector(
    quantity: AbstractQuantity, vector: Inexact[Array, " m"], cost: int
) -> Estimate:
    """A quantity that depends on the diagonal alone, or on the norms of the rows alone,
    from these, which took `cost` matvecs."""
    # One pair is enough: the matrix `diag(A) 1*` has the same diagonal as A, and the
    # matrix of one column, the norms, has the same norms of rows.
    value = quantity.read(jnp.ones_like(vector), vector)
    return _exact_estimate(quantity, value, cost)


def squares_of_rows(
    operator: FlatOperator, execution: AbstractExecution
) -> Real[Array, " m"]:
    """The squared norm of each row, the diagonal of `A A*`, from m matvecs with A*."""
    size = operator.num_rows

    def square_of_row(operator, index):
        unit = jnp.zeros(size, operator.dtype).at[index].set(1)
        return FrobeniusNorm().read(unit, operator.adjoint_mv(unit))

    square_of_row = eqx.filter_checkpoint(square_of_row, prevent_cse=False)
    return execution.map(square_of_row, operator, jnp.arange(size))


def _exact_estimate(
    quantity: AbstractQuantity, value: Inexact[Array, "*q"], num_matvecs: int
) -> Estimate:
    """An estimate without errors. Scalars are their own only sample."""
    scalars = value if value.ndim == 0 else quantity.scalars(value)
    return Estimate(
        value=value,
        std_err=jnp.zeros_like(value.real),
        samples=None if scalars is None else scalars[None],
        num_matvecs=num_matvecs,
        rounding=0.0,
    )
