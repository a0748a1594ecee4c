"""Gram-Schmidt against basis vectors that are rows of buffers.

One pass replaces x by `x - V* (conj(V) x)`, with the basis vectors as rows of V. Where
that cancels most of x, rounding errors along the rows are large beside what is left, and
a second pass removes them. A third one is never needed: "twice is enough" (Kahan; see
Parlett, The Symmetric Eigenvalue Problem).

In the code: V is one or more `buffers`, since a projection against all of a buffer would
also read its rows that are still zero.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import normalise


# A second pass is made if the first one leaves less than 1 over this of the vector. With
# more than that left, errors along the basis are at most so many roundoffs of the result.
# A smaller number would make more second passes, for no more accuracy than this.
_CANCELLATION = 2**0.5


@jax.custom_batching.custom_vmap
def _put_one(
    rows: Inexact[Array, "m n"], row: Inexact[Array, " n"], j: Int[Array, ""]
) -> Inexact[Array, "m n"]:
    return jax.lax.dynamic_update_index_in_dim(rows, row, j, axis=0)


@_put_one.def_vmap
def _put_each(size: int, is_mapped: list[bool], rows: Any, row: Any, j: Any) -> Any:
    # By JAX's own rule `vmap` makes a scatter, which is several kernels on CPU. If j is
    # the same for all, such as the number of a step, one update of a slice suffices.
    if is_mapped[2]:
        put = ft.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
        axes = [0 if mapped else None for mapped in is_mapped]
        return jax.vmap(put, axes)(rows, row, j), True
    rows, row = (
        x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, mapped in zip((rows, row), is_mapped[:2], strict=True)
    )
    return jax.lax.dynamic_update_index_in_dim(rows, row, j, axis=1), True


def put_row(
    buffers: tuple[Inexact[Array, "_ n"], ...],
    vector: Inexact[Array, " n"],
    j: Int[Array, ""] | int,
) -> tuple[Inexact[Array, "_ n"], ...]:
    """Set row j of the buffers, counted through all of them in order, to `vector`."""
    updated, offset = [], 0
    for rows in buffers:
        row, index = vector, j
        if len(buffers) > 1:
            # Each buffer is written to, since j may be traced: where row j is in another
            # one, its first or last row is written back as it is.
            index = jnp.clip(j - offset, 0, len(rows) - 1)
            row = jnp.where(j - offset == index, vector, rows[index])
        updated.append(_put_one(rows, row, index))
        offset += len(rows)
    return tuple(updated)


def unit(x: Inexact[Array, " n"]) -> tuple[Inexact[Array, " n"], Real[Array, ""]]:
    """`x / ||x||` and `||x||`, or zeros for a zero x. Squares of entries do not
    overflow."""
    x, scale = normalise(x)
    norm = _length(x)
    return x / jnp.where(norm > 0, norm, 1).astype(x.dtype), scale * norm


def _length(x: Inexact[Array, " n"]) -> Real[Array, ""]:
    return jnp.sqrt(dot(x, x).real)


def dot(x: Inexact[Array, " n"], y: Inexact[Array, " n"]) -> Inexact[Array, ""]:
    """`x* y`, at full precision on accelerators too."""
    return jnp.vdot(x, y, precision="highest")


def orthogonalise(
    x: Inexact[Array, " n"],
    buffers: tuple[Inexact[Array, "_ n"], ...],
    j: Int[Array, ""] | int,
    window: int | None,
    near: Sequence[Inexact[Array, " n"]],
) -> tuple[Inexact[Array, " n"], Real[Array, ""]]:
    """Remove from x its components along basis vectors, and return `unit` of the result.

    The basis vectors are rows of the buffers, orthonormal or zero, up to row j. All are
    removed if `window` is None, else the last `window` of them. With `window=0` only
    those along the vectors `near` are removed, a second time: the recurrence has removed
    them already, but at a breakdown it leaves rounding errors in any direction.
    """
    if window == 0:
        for vector in near:
            x = x - dot(vector, x) * vector
        return unit(x)
    x, scale = normalise(x)
    if window is not None:
        (rows,) = buffers
        start = jnp.maximum(j + 1 - window, 0)
        size = min(window, len(rows))
        buffers = (jax.lax.dynamic_slice_in_dim(rows, start, size),)

    def remove(x, rows):
        # TF32, the default on GPUs, would leave components of size 1e-3.
        coefficients = jnp.matmul(rows.conj(), x, precision="highest")
        return x - jnp.matmul(coefficients, rows, precision="highest")

    def project(state):
        x, norm, previous_norm = state
        x, offset = remove(x, buffers[0]), len(buffers[0])
        for rows in buffers[1:]:
            # Buffers behind row j are all zero, and are not read.
            x = jax.lax.cond(j >= offset, remove, lambda x, _: x, x, rows)
            offset += len(rows)
        # The previous norm is infinite before the first pass and 0 after the second one,
        # which ends the loop: there is no third pass.
        return x, _length(x), jnp.where(jnp.isinf(previous_norm), norm, 0)

    def needs_pass(state):
        _, norm, previous_norm = state
        return norm < previous_norm / _CANCELLATION

    norm = _length(x)
    state = x, norm, jnp.full_like(norm, jnp.inf)
    x, norm, _ = jax.lax.while_loop(needs_pass, project, state)
    return x / jnp.where(norm > 0, norm, 1).astype(x.dtype), scale * norm
