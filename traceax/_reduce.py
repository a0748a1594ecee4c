"""Several reductions at once.

XLA:CPU makes one kernel of it, with what its operands are computed from inside. A single
reduction of more than 32 entries is three kernels, and the code of one that is fused with
a function such as the logarithm is several times longer (see "JAX versions" in the
developer documentation).
"""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact


def reduce_together(
    terms: Sequence[Inexact[Array, "m ..."]],
    operations: Iterable[Callable[[Array, Array], Array]] = repeat(jax.lax.add),
) -> tuple[Inexact[Array, "..."], ...]:
    """Each of the terms, which have the same shape, combined along its first axis: by its
    own operation, of which 0 is the identity, or added."""

    zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
    together = ft.partial(pairwise, operations)
    return jax.lax.reduce(tuple(terms), zeros, together, (0,))


def pairwise(
    operations: Iterable[Callable[[Array, Array], Array]],
    x: Sequence[Array],
    y: Sequence[Array],
) -> tuple[Array, ...]:
    """Each of x combined with that of y by its own operation."""
    return tuple(op(*pair) for op, *pair in zip(operations, x, y, strict=False))


@jax.custom_jvp
def sums(*terms: Inexact[Array, " m"]) -> tuple[Inexact[Array, ""], ...]:
    """The sum of each of some vectors of the same length."""
    return reduce_together(terms)


@sums.defjvp
def _sums_jvp(primals, tangents):
    """JAX has one for any reduction, which makes a tree of slices."""
    return sums(*primals), tuple(map(jnp.sum, tangents))
