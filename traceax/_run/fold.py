"""Sums over many samples, of which few are held at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .._core.flat import FlatOperator
from .execution import AbstractExecution, even


def fold(
    fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    reduce: Callable[[PyTree, Bool[Array, " p"]], tuple],
    merge: Callable[[tuple], tuple],
    operator: FlatOperator,
    k: int,
    execution: AbstractExecution,
    width: int = 1,
) -> tuple[Inexact[Array, "*q"], tuple]:
    """The sum of the first results of `fn(operator, i)` for i below k, and one
    summary of all, as for `stream`. It holds only as many results as the execution
    takes at a time."""

    def add(carry, indices):
        total, summary = carry
        outs, parts = execution.map_reduce(fn, reduce, operator, indices, width)
        term, summary = jnp.sum(outs[0], axis=0), merge(stacked(summary, parts))
        # Rounding errors of like terms, added one after another, do not cancel. So these
        # are kept and added at once, unless they take more memory than a vector.
        few = term.size * (k // size) <= operator.size
        return ((total, summary), term) if few else ((total + term, summary), None)

    # A few at a time, even where products are made one by one: so the summary, which may
    # have as many entries as a vector, is merged less often.
    size = even(k, max(8, execution.chunk(operator.size, width)))
    full = k - k % size

    def once(indices):
        outs, parts = execution.map_reduce(fn, reduce, operator, indices, width)
        return jnp.sum(outs[0], axis=0), merge(parts)

    if full == size:
        total, summary = once(jnp.arange(size))
    else:
        chunks = jnp.arange(full).reshape(-1, size)
        empty = zeros_like_shapes(jax.eval_shape(once, chunks[0]))
        (total, summary), terms = jax.lax.scan(add, empty, chunks)
        total = total if terms is None else jnp.sum(terms, axis=0)
    if full < k:
        (more, summary), term = add((total, summary), jnp.arange(full, k))
        total = more if term is None else total + term
    return total, summary


def stacked(one: PyTree[Array], more: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda x, xs: jnp.append(x[None], xs, axis=0), one, more)


def zeros_like_shapes(shapes: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
