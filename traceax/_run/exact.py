"""The exact answer, from a diagonal that is known or from n products."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .execution import AbstractExecution
from .fold import fold


def exact(
    quantity: AbstractQuantity, operator: FlatOperator, execution: AbstractExecution
) -> Estimate:
    """The quantity itself, from n products with unit vectors, a block at a time."""
    size = operator.size

    def body(operator, index):
        unit = jnp.zeros(size, operator.dtype).at[index].set(1)
        return quantity.read(unit, operator.mv(unit)), ()

    body = eqx.filter_checkpoint(body, prevent_cse=False)
    value, () = fold(body, lambda *_: (), lambda _: (), operator, size, execution)
    return _exactly(value, size)


def exact_from_diagonal(
    quantity: AbstractQuantity, diagonal: Inexact[Array, " n"], cost: int
) -> Estimate:
    """A quantity that depends on the diagonal alone, from a diagonal that `cost` products
    were made for."""
    return _exactly(quantity.read(jnp.ones_like(diagonal), diagonal), cost)


def _exactly(value: Inexact[Array, "*q"], num_matvecs: int) -> Estimate:
    return Estimate(
        value=value,
        std_err=jnp.zeros_like(value.real),
        samples=value[None] if value.ndim == 0 else None,
        num_matvecs=num_matvecs,
        rounding=0.0,
    )
