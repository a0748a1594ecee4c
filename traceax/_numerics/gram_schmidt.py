"""Gram-Schmidt against basis vectors that are rows of buffers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import normalise


@jax.custom_batching.custom_vmap
def _put_one(
    rows: Inexact[Array, "m n"], row: Inexact[Array, " n"], j: Int[Array, ""]
) -> Inexact[Array, "m n"]:
    return jax.lax.dynamic_update_index_in_dim(rows, row, j, axis=0)


@_put_one.def_vmap
def _put_each(size: int, mapped: list[bool], *args: Any) -> Any:
    """If j is the same for all, it is one slice: `vmap` would make it a scatter."""
    if mapped[2]:
        axes = [0 if is_mapped else None for is_mapped in mapped]
        put = jax.lax.dynamic_update_index_in_dim
        return jax.vmap(lambda *args: put(*args, axis=0), axes)(*args), True
    rows, row = (
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(args[:2], mapped[:2], strict=True)
    )
    return jax.lax.dynamic_update_index_in_dim(rows, row, args[2], axis=1), True


def put_row(
    buffers: tuple[Inexact[Array, "_ n"], ...],
    vector: Inexact[Array, " n"],
    j: Int[Array, ""] | int,
) -> tuple[Inexact[Array, "_ n"], ...]:
    """Row j of the buffers, one after another, becomes `vector`."""
    filled, offset = [], 0
    for rows in buffers:
        row, here = vector, j
        if len(buffers) > 1:
            here = jnp.clip(j - offset, 0, len(rows) - 1)
            row = jnp.where(j - offset == here, vector, rows[here])
        filled.append(_put_one(rows, row, here))
        offset += len(rows)
    return tuple(filled)


def unit(x: Inexact[Array, " n"]) -> tuple[Inexact[Array, " n"], Real[Array, ""]]:
    """`x / ||x||` and `||x||`, or zeros; nothing overflows before x does."""
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
    """`unit` of x less its components along rows of the buffers, orthonormal or zero, the
    last of which is row j: along all of them, or as many of the last ones as the `window`
    has, and if that is 0 along those `near`, which the recurrence has removed already: at
    a breakdown what it leaves is rounding, in any direction. A second pass is made where
    the first one cancels most of x ("twice is enough": Kahan)."""
    if window == 0:
        for vector in near:
            x = x - dot(vector, x) * vector
        return unit(x)
    x, scale = normalise(x)
    if window is not None:
        (rows,) = buffers
        recent = jnp.maximum(j + 1 - window, 0), min(window, len(rows))
        buffers = (jax.lax.dynamic_slice_in_dim(rows, *recent),)

    def remove(x, rows):
        coefficients = jnp.matmul(rows.conj(), x, precision="highest")
        return x - jnp.matmul(coefficients, rows, precision="highest")

    def project(state):
        x, norm, before = state
        x, offset = remove(x, buffers[0]), len(buffers[0])
        for rows in buffers[1:]:
            x = jax.lax.cond(j >= offset, remove, lambda x, _: x, x, rows)
            offset += len(rows)
        # From infinite to the norm before the first pass, to zero: there is no third.
        return x, _length(x), jnp.where(jnp.isinf(before), norm, 0)

    def cancelled(state):
        _, norm, before = state
        return norm < before / 2**0.5

    norm = _length(x)
    state = x, norm, jnp.full_like(norm, jnp.inf)
    x, norm, _ = jax.lax.while_loop(cancelled, project, state)
    return x / jnp.where(norm > 0, norm, 1).astype(x.dtype), scale * norm
