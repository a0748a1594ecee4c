"""Reductions over a first axis, in the forms that XLA:CPU compiles to short, fast code.

XLA:CPU fuses several reductions, written as one `lax.reduce`, and their inputs into one
kernel. A single reduction of more than 32 entries is three kernels, and the code of one
that is fused with a function such as the logarithm is several times longer. See "JAX
versions" in the developer documentation for the measurements.
"""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree, Real


# The largest relative rounding error of a sum that is added up in a row. In a row m terms
# may lose m roundoffs: in float32, sums of up to 4096 terms stay in one kernel. A million
# equal terms would lose three digits, of which a tree loses none.
_LARGEST_LOSS = 2**-11


def reduce_together(
    terms: Sequence[Inexact[Array, "m ..."]],
    operations: Iterable[Callable[[Array, Array], Array]] = repeat(jax.lax.add),
) -> tuple[Inexact[Array, "..."], ...]:
    """Reduce each of the terms along its first axis, all of them in one kernel.

    **Arguments:**

    - `terms`: arrays of one shape `(m, ...)`. Vectors of shape `(m,)` are broadcast
        against the others.
    - `operations`: one for each of the terms, with the identity 0. Default: addition.

    **Returns:**

    The reduced arrays. The kernel adds one term after another. Where that may lose too
    many digits, each reduction stays apart, and XLA makes a tree of it.
    """
    shape = max((term.shape for term in terms), key=len)
    operations = tuple(op for op, _ in zip(operations, terms, strict=False))
    terms = [jax.lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in terms]
    loss = shape[0] * max(float(jnp.finfo(term.dtype).eps) for term in terms)
    reduce = _reduce_apart if loss > _LARGEST_LOSS else _reduce_in_one_kernel
    return reduce(operations, *terms)


def _reduce_apart(operations, *terms):
    pairs = zip(operations, terms, strict=True)
    return tuple(jax.lax.reduce(x, _zero(x), op, (0,)) for op, x in pairs)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduce_in_one_kernel(operations, *terms):
    zeros = tuple(map(_zero, terms))
    return jax.lax.reduce(terms, zeros, ft.partial(apply_each, operations), (0,))


@_reduce_in_one_kernel.defjvp
def _reduce_in_one_kernel_jvp(operations, terms, tangents):
    # JAX has a rule for reductions of several operands, but it makes a tree of slices,
    # with many kernels. The rules of single reductions are sums.
    _, slopes = jax.jvp(ft.partial(_reduce_apart, operations), terms, tangents)
    return _reduce_in_one_kernel(operations, *terms), slopes


def _zero(x):
    return jnp.zeros((), x.dtype)


def apply_each(
    operations: Iterable[Callable[[Array, Array], Array]],
    x: Sequence[Array],
    y: Sequence[Array],
) -> tuple[Array, ...]:
    """Apply the i-th operation to the i-th arrays of `x` and `y`, for each i."""
    triples = zip(operations, x, y, strict=False)
    return tuple(operation(left, right) for operation, left, right in triples)


# XLA:CPU reduces an array of 10 long rows over its first axis at 9 ns an entry, and adds
# whole rows at 0.3 ns. So rows of `_LARGE_ROW` entries or more are added one by one: up
# to `_MOST_UNROLLED` of them without a loop, which compiles longer with each row. Both
# numbers trade running time off against compilation; neither is critical.
_LARGE_ROW, _MOST_UNROLLED = 1024, 8


def reduce_rows(
    fn: Callable[[PyTree[Array]], tuple[Array, ...]],
    parts: PyTree[Real[Array, "m ..."]],
    operations: Iterable[Callable[[Array, Array], Array]] = repeat(jax.lax.add),
) -> Sequence[Array]:
    """Apply `fn` to each of the stacked `parts`, and reduce the arrays that it returns
    over the parts as in `reduce_together`."""
    leaves, tree = jax.tree.flatten(parts)
    num_parts = len(leaves[0])
    if max(leaf.size for leaf in leaves) < num_parts * _LARGE_ROW:
        return reduce_together(jax.vmap(fn)(parts), operations)

    def add(total, part):
        return apply_each(operations, total, fn(part)), None

    if num_parts > _MOST_UNROLLED:
        first = jax.tree.map(lambda x: x[0], parts)
        others = jax.tree.map(lambda x: x[1:], parts)
        return jax.lax.scan(add, fn(first), others)[0]
    first, *others = (tree.unflatten(row) for row in zip(*map(list, leaves), strict=True))
    return ft.reduce(lambda total, part: add(total, part)[0], others, fn(first))
