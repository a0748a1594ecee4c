"""Sums over many samples that hold only a few of them at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .._core.flat import FlatOperator
from .execution import AbstractExecution, equal_block_size


# The smallest block. Each block merges its summary into the earlier summary, and the
# moments of a diagonal have several entries for each of the operator's rows. Where a
# block has one vector, that would take more time than a cheap matvec.
_MIN_BLOCK = 8


def fold(
    fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    reduce: Callable[[PyTree, Bool[Array, " p"]], tuple],
    merge: Callable[[tuple], tuple],
    operator: FlatOperator,
    k: int,
    execution: AbstractExecution,
    width: int = 1,
    keep: Callable[[Array], Array | None] = lambda _: None,
) -> tuple[Inexact[Array, "*q"], tuple, Inexact[Array, "k ..."] | None]:
    """The sum of the first results of `fn(operator, i)` for `i = 0, ..., k - 1`; one
    summary of all results, made by `reduce` and `merge` as in `stream`; and what `keep`
    takes from each first result. Memory is that of one block of results, and of what is
    kept."""
    size = equal_block_size(k, max(_MIN_BLOCK, execution.block(operator, width)))
    full = k - k % size

    def fold_block(indices):
        outs, parts = execution.map_reduce(fn, reduce, operator, indices, width)
        return (jnp.sum(outs[0], axis=0), merge(parts)), jax.vmap(keep)(outs[0])

    def add_block(carry, indices):
        total, summary = carry
        outs, parts = execution.map_reduce(fn, reduce, operator, indices, width)
        term, summary = jnp.sum(outs[0], axis=0), merge(prepend(summary, parts))
        # Rounding errors of like terms, added one after another, do not cancel: float32
        # would lose four of seven digits of 200,000 equal ones. So the sums of blocks are
        # kept and added at once, unless they take more memory than a vector.
        few = term.size * (k // size) <= operator.size
        kept = jax.vmap(keep)(outs[0])
        if few:
            return (total, summary), (term, kept)
        return (total + term, summary), (None, kept)

    if full == size:
        (total, summary), kept = fold_block(jnp.arange(size))
    else:
        blocks = jnp.arange(full).reshape(-1, size)
        empty = zeros_like_shapes(jax.eval_shape(fold_block, blocks[0])[0])
        (total, summary), (terms, kept) = jax.lax.scan(add_block, empty, blocks)
        total = total if terms is None else jnp.sum(terms, axis=0)
        kept = jax.tree.map(lambda x: x.reshape(full, *x.shape[2:]), kept)
    if full < k:
        remainder = jnp.arange(full, k)
        (sum_with_last, summary), (term, last) = add_block((total, summary), remainder)
        total = sum_with_last if term is None else total + term
        kept = jax.tree.map(lambda *x: jnp.concatenate(x), kept, last)
    return total, summary, kept


def prepend(summary: PyTree[Array], summaries: PyTree[Array]) -> PyTree[Array]:
    """One summary in front of several that are stacked."""
    return jax.tree.map(lambda x, xs: jnp.append(x[None], xs, axis=0), summary, summaries)


def zeros_like_shapes(shapes: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """Arrays of zeros. A summary of zeros is the summary of no samples."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
