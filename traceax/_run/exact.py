import equinox as eqx
import jax.numpy as jnp
import lineax as lx

from .._core.flat import dtypes, flatten
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._operators.diagonal import diagonal_cost
from .execution import AbstractExecution
from .loop import fold


def exact_cost(quantity: AbstractQuantity, operator: lx.AbstractLinearOperator) -> int:
    """Products that [`exact`][] makes, at most n."""
    if quantity.diagonal_only:
        return diagonal_cost(operator)
    return operator.in_size()


def exact(
    quantity: AbstractQuantity,
    operator: lx.AbstractLinearOperator,
    execution: AbstractExecution,
) -> Estimate:
    """The quantity itself: from the diagonal where it depends on that alone and lineax
    knows it, otherwise from n products with unit vectors, a block at a time."""
    size, cost = operator.in_size(), exact_cost(quantity, operator)
    if cost < size:
        diagonal = lx.diagonal(operator).astype(dtypes(operator)[0])
        value = quantity.read(jnp.ones_like(diagonal), diagonal)
    else:
        flat = flatten(operator)

        def body(flat, index):
            unit = jnp.zeros(size, flat.dtype).at[index].set(1)
            return quantity.read(unit, flat.mv(unit)), ()

        body = eqx.filter_checkpoint(body, prevent_cse=False)
        value, () = fold(body, lambda *_: (), lambda _: (), flat, size, execution)
    return Estimate(
        value=value,
        std_err=jnp.zeros_like(value.real),
        samples=value[None] if value.ndim == 0 else None,
        num_matvecs=cost,
        rounding=0.0,
    )
