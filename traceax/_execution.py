import abc
from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, PyTree, Shaped

from ._vectors import FlatOperator


class AbstractExecution(eqx.Module):
    """Where, and how many at a time, probe vectors meet the operator."""

    @abc.abstractmethod
    def map(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
    ) -> PyTree[Shaped[Array, "m ..."]]:
        """`fn(operator, x)` for each `x` along the leading axis of `xs`, stacked."""

    def matmat(self, operator: FlatOperator, x: Array) -> Array:
        """The operator applied to the columns of `x`, shape `(n, m)`."""
        return self.map(FlatOperator.mv, operator, x.T).T


class Local(AbstractExecution):
    """Run on the devices where the operator's arrays are, a block of probes at a time.

    The product is vectorised (`jax.vmap`) over a block, and blocks follow one another
    in a compiled loop. Answers do not depend on the block size, beyond rounding.

    **Attributes:**

    - `block_size`: probe vectors per block. `None` takes 128, or fewer where n is large:
        `max(1, min(128, 2**21 // n))`, so that a block holds at most two million numbers.
    """

    block_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        size = self.block_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"`block_size` must be a positive Python integer or None. Found {size!r}."
            )

    def map(self, fn, operator, xs):
        count = jax.tree.leaves(xs)[0].shape[0]
        block = self.block_size or max(1, min(128, 2**21 // operator.size))
        if block >= count:
            return jax.vmap(lambda x: fn(operator, x))(xs)
        batch_size = None if block == 1 else block
        return jax.lax.map(lambda x: fn(operator, x), xs, batch_size=batch_size)


Local.__init__.__doc__ = """**Arguments:**

- `block_size`: probe vectors per block; see above.
"""
