"""Means of operators over batches of data: the mean of M(x, b) over b, for a curvature
matrix M at the point x and a batch b. A matvec is one pass over the data."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from .._core.arithmetic import standard_promotion
from .._core.checks import check_positive


def convert_bfloat16(x: PyTree) -> PyTree:
    """Convert NumPy arrays in bfloat16 to JAX arrays. NumPy does not know that bfloat16
    is inexact, so `equinox.is_inexact_array` would take them for constants."""

    def convert(leaf):
        unrecognised = isinstance(leaf, np.ndarray) and not eqx.is_inexact_array(leaf)
        inexact = unrecognised and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(leaf) if inexact else leaf

    return jax.tree.map(convert, x)


class _MeanProduct(eqx.Module):
    """`v -> mean over b of M(b) v`, where `make` makes the operator M(b) from the
    functions `p -> fn(p, b)` and the point `x`. The user's functions remain the same
    objects, and arrays are leaves, so that compiled programs are used again."""

    make: Callable[..., lx.AbstractLinearOperator]
    fns: tuple[Callable[..., Any], ...]
    x: PyTree
    batches: PyTree[Array]
    chunk_size: int = eqx.field(static=True)

    @eqx.filter_jit
    def __call__(self, vector: PyTree[Array]) -> PyTree[Array]:
        # With the checkpoint, neither the forward nor the backward pass keeps residuals
        # of more than one batch. `prevent_cse` is not needed inside `scan`.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def batch_mv(batch):
            fns = [lambda point, fn=fn: fn(point, batch) for fn in self.fns]
            return self.make(*fns, self.x).mv(vector)

        def add(total, batch):
            image = batch_mv(batch)
            return jax.tree.map(lambda t, y: t + y.astype(t.dtype), total, image), None

        def sum_over(batches):
            return jax.lax.scan(add, zeros, batches)[0]

        # Sums over batches would lose digits in bfloat16 or float16.
        with standard_promotion():
            zeros = jax.tree.map(
                lambda v: jnp.zeros_like(v, jnp.promote_types(v.dtype, jnp.float32)),
                vector,
            )
        count = len(jax.tree.leaves(self.batches)[0])
        if self.chunk_size == 1:
            sums = sum_over(self.batches)
        else:
            # Contiguous batches share a lane. If the leading axis is split over devices,
            # each device then works on its own batches.
            size = (self.chunk_size, count // self.chunk_size)
            lanes = jax.tree.map(lambda b: b.reshape(*size, *b.shape[1:]), self.batches)
            sums = jax.tree.map(lambda t: jnp.sum(t, axis=0), jax.vmap(sum_over)(lanes))
        return jax.tree.map(lambda t, v: (t / count).astype(v.dtype), sums, vector)


def _check_batches(batches: Any, chunk_size: int) -> PyTree[Shaped[Array, "b ..."]]:
    if batches is None:
        raise ValueError(
            "`chunk_size` is how many of the `batches` are processed at the same time. "
            f"Found chunk_size={chunk_size!r} without `batches`."
        )
    leaves = jax.tree.leaves(batches)
    shapes = [jnp.shape(leaf) if eqx.is_array_like(leaf) else None for leaf in leaves]
    counts = {shape[0] if shape else 0 for shape in shapes}
    # A list of several elements with the same structure and shapes is a list of batches,
    # as data loaders return it, which would be taken for one PyTree.
    parts = batches if isinstance(batches, list) else []
    kinds = {(jax.tree.structure(b), *map(np.shape, jax.tree.leaves(b))) for b in parts}
    listed = len(parts) > len(kinds) == 1
    if listed or len(counts) != 1 or 0 in counts:
        described = [
            type(leaf).__name__ if shape is None else shape
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        raise ValueError(
            "`batches` must be an array, or a PyTree of arrays, with one leading axis of "
            f"the same length: the number of batches. Found leaves of shapes {described}"
            f"{', in a list of batches (or make it a tuple)' if listed else ''}. "
            "Stack batches of one size, for example by `jax.tree.map(lambda *xs: "
            "jnp.stack(xs), *list_of_batches)`. Pad the last one, with weights of zero "
            "as a part of the batch, or leave it out."
        )
    (count,) = counts
    if count % check_positive("chunk_size", chunk_size):
        raise ValueError(
            f"`chunk_size` must divide the number of batches. Found {chunk_size}, and "
            f"{count} batches, the length of the leading axis of `batches`."
        )
    return jax.tree.map(jnp.asarray, batches)


def mean_operator(
    make: Callable[..., lx.AbstractLinearOperator],
    *fns: Callable[..., Any],
    x: PyTree,
    batches: PyTree,
    chunk_size: int,
    tags: object,
) -> lx.FunctionLinearOperator:
    """The mean of `make(*fns, x)` over batches, where each `fn` has a batch as its second
    argument."""
    mean_mv = _MeanProduct(
        make=make,
        fns=fns,
        x=x,
        batches=_check_batches(batches, chunk_size),
        chunk_size=chunk_size,
    )
    structure = jax.eval_shape(
        lambda: eqx.filter(convert_bfloat16(x), eqx.is_inexact_array)
    )
    operator = lx.FunctionLinearOperator(mean_mv, structure, tags, closure_convert=False)
    # Tracing checks `x` and the results of the functions, here and not in a later call.
    operator.out_structure()
    return operator
