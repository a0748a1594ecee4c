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


# Relative to the largest sum. That of m terms may lose about m roundoffs.
_LARGEST_LOSS = 2**-11


def reduce_together(
    terms: Sequence[Inexact[Array, "m ..."]],
    operations: Iterable[Callable[[Array, Array], Array]] = repeat(jax.lax.add),
) -> tuple[Inexact[Array, "..."], ...]:
    """Each of the terms combined along its first axis: by its own operation, of which 0
    is the identity, or added. They have the same shape, but that a vector may be beside
    arrays: it counts for each of their entries.

    It adds one term after another. Where that may lose too many digits, each reduction
    stays apart, and XLA makes a tree of it."""
    shape = max((term.shape for term in terms), key=len)
    operations = tuple(op for op, _ in zip(operations, terms, strict=False))
    terms = [jax.lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in terms]
    loss = shape[0] * max(float(jnp.finfo(term.dtype).eps) for term in terms)
    return (_apart if loss > _LARGEST_LOSS else _together)(operations, *terms)


def _apart(operations, *terms):
    pairs = zip(operations, terms, strict=True)
    return tuple(jax.lax.reduce(x, _zero(x), op, (0,)) for op, x in pairs)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _together(operations, *terms):
    zeros = tuple(map(_zero, terms))
    return jax.lax.reduce(terms, zeros, ft.partial(pairwise, operations), (0,))


@_together.defjvp
def _together_jvp(operations, terms, tangents):
    """JAX has one for any reduction, which makes a tree of slices."""
    _, slopes = jax.jvp(ft.partial(_apart, operations), terms, tangents)
    return _together(operations, *terms), slopes


def _zero(x):
    return jnp.zeros((), x.dtype)


def pairwise(
    operations: Iterable[Callable[[Array, Array], Array]],
    x: Sequence[Array],
    y: Sequence[Array],
) -> tuple[Array, ...]:
    """Each of x combined with that of y by its own operation."""
    return tuple(op(*pair) for op, *pair in zip(operations, x, y, strict=False))
