"""An orthonormal basis that grows by a block of columns, in buffers of a fixed size.

Buffers have the shape `(n, p)`, are zero beyond the columns in use, and are read a block
of b columns at a time, so that work is in proportion to the number of blocks in use, a
traced integer. A buffer for a single block is that block, and all of this is plain
algebra without a loop.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import normalise, qr, thin_svd


def take(buffer: Inexact[Array, "n p"], i: Int[Array, ""], b: int) -> Array:
    """Block i, shape `(n, b)`."""
    return jax.lax.dynamic_slice_in_dim(buffer, i * b, b, axis=1)


def put(
    buffer: Inexact[Array, "n p"], block: Inexact[Array, "n b"], i: Int[Array, ""]
) -> Inexact[Array, "n p"]:
    if buffer.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, i * block.shape[1], axis=1)


def put_rows(
    buffer: Inexact[Array, "p m"], block: Inexact[Array, "b m"], i: Int[Array, ""]
) -> Inexact[Array, "p m"]:
    if buffer.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, i * block.shape[0], axis=0)


def border(
    product: Inexact[Array, "p p"],
    left: Inexact[Array, "n p"],
    right: Inexact[Array, "n p"],
    i: Int[Array, ""],
    b: int,
) -> Inexact[Array, "p p"]:
    """`left* right` with the rows and columns of block i, the last one, from the product
    without them."""
    if product.shape[0] == b:
        return left.conj().T @ right

    def against(buffer, block):
        def one(j, rows):
            return put_rows(rows, take(buffer, j, b).conj().T @ block, j)

        empty = jnp.zeros_like(block, shape=(product.shape[0], b))
        return jax.lax.fori_loop(0, i + 1, one, empty)

    product = put(product, against(left, take(right, i, b)), i)
    return put_rows(product, against(right, take(left, i, b)).conj().T, i)


def rescale(
    x: Inexact[Array, "n b"], scale: Real[Array, ""], i: Int[Array, ""]
) -> tuple[Inexact[Array, "n b"], Real[Array, ""]]:
    """`x / scale` and the scale, which the first block sets."""
    scale = jnp.where(i == 0, normalise(x)[1], scale)
    return x / scale, scale


def remove(
    basis: Inexact[Array, "n p"], x: Inexact[Array, "n m"], count: Int[Array, ""], b: int
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "p m"]]:
    """`x - basis (basis* x)` and `basis* x`, the basis orthonormal, of `count` blocks."""

    def one(i, state):
        rest, rows = state
        block = take(basis, i, b)
        part = block.conj().T @ rest
        return rest - block @ part, put_rows(rows, part, i)

    rows = jnp.zeros_like(x, shape=(basis.shape[1], x.shape[1]))
    return jax.lax.fori_loop(0, count, one, (x, rows))


class Extension(eqx.Module):
    """`x = basis @ coefficients + block @ coupling`."""

    block: Inexact[Array, "n b"]
    coefficients: Inexact[Array, "p b"]
    coupling: Inexact[Array, "b b"]


def extend(
    basis: Inexact[Array, "n p"],
    x: Inexact[Array, "n b"],
    count: Int[Array, ""],
    eps: float,
    scale: Real[Array, ""] | float = 0.0,
) -> Extension:
    """New columns for the range of x: orthonormal, or zero where x brings nothing new
    beyond `eps * scale`. Block Gram-Schmidt, twice (Stewart, SIAM J. Sci. Comput. 31,
    2008). The columns of a single block are orthonormal whatever the rank of x."""
    b = x.shape[1]
    if basis.shape[1] == b:
        block, r = qr(x)
        return Extension(block, jnp.zeros_like(r), r)
    rest, first = remove(basis, x, count, b)
    block, s, vh = thin_svd(rest, eps, scale)
    triangle = s[:, None] * vh
    # Weak directions of the block have components in the basis that were small beside the
    # strong ones; where the second pass cancels half of one, it was rounding.
    rest, second = remove(basis, block, count, b)
    block, s, vh = thin_svd(rest, 0.5, 1.0)
    return Extension(block, first + second @ triangle, (s[:, None] * vh) @ triangle)
