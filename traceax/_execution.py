import abc
import contextlib
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
from jaxtyping import Array, PyTree, Shaped

from ._vectors import FlatOperator


@contextlib.contextmanager
def full_precision(
    matmat: Callable[[Array], Array],
) -> Iterator[Callable[[Array], Array]]:
    """Our own products must not fall to the low-precision default of an accelerator;
    those with the operator, `matmat`, stay as the user has them."""
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore

    def as_asked(x):
        with jax.default_matmul_precision(asked):
            return matmat(x)

    with jax.default_matmul_precision("highest"):
        yield as_asked


class AbstractExecution(eqx.Module):
    """Where, and how many at a time, probe vectors meet the operator."""

    @abc.abstractmethod
    def map(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> PyTree[Shaped[Array, "m ..."]]:
        """`fn(operator, x)` for each `x` along the leading axis of `xs`, stacked. One
        call of `fn` holds about `width` vectors of length n."""

    def matmat(self, operator: FlatOperator, x: Array) -> Array:
        """The operator applied to the columns of `x`, shape `(n, m)`."""
        return self.map(FlatOperator.mv, operator, x.T).T


class Local(AbstractExecution):
    """Run on the devices where the operator's arrays are, a block of probes at a time.

    The product is vectorised (`jax.vmap`) over a block, and blocks follow one another
    in a compiled loop. Answers do not depend on the block size, beyond rounding.

    **Attributes:**

    - `block_size`: probe vectors per block. `None` takes 128, or fewer where n is large:
        so many that a block of probes holds at most two million numbers and, for
        estimators that keep a Krylov basis for each probe, all bases at most 64 million.
    """

    block_size: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        size = self.block_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"`block_size` must be a positive Python integer or None. Found {size!r}."
            )

    def map(self, fn, operator, xs, width=1):
        count = jax.tree.leaves(xs)[0].shape[0]
        n = operator.size
        block = self.block_size or max(1, min(128, 2**21 // n, 2**26 // (n * width)))
        if block >= count:
            return jax.vmap(lambda x: fn(operator, x))(xs)
        batch_size = None if block == 1 else block
        return jax.lax.map(lambda x: fn(operator, x), xs, batch_size=batch_size)


Local.__init__.__doc__ = """**Arguments:**

- `block_size`: probe vectors per block; see above.
"""
