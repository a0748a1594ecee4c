"""An orthonormal basis that grows by a block of columns, in buffers of a fixed size.

With a basis Q of the columns so far, a new block X is split by block Gram-Schmidt, twice:

    X = Q C + V K,    Q* V = 0, V* V = I or a diagonal of ones and zeros.

In the code: Q is `basis`, V is `block`, C is `coefficients`, K is `coupling`.

Buffers have the shape `(n, p)` and are zero beyond the columns in use. They are read a
block of b columns at a time, so that the work is proportional to the number of blocks in
use, a traced integer. A buffer for a single block is that block, and then everything here
is plain algebra without a loop.

Reference: Stewart, Block Gram-Schmidt orthogonalization, SIAM J. Sci. Comput. 31 (2008).
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Inexact, Int, Real

from .dense import normalise, qr, rank_revealing_qr


def take(buffer: Inexact[Array, "n p"], i: Int[ArrayLike, ""], b: int) -> Array:
    """Block i, shape `(n, b)`."""
    return jax.lax.dynamic_slice_in_dim(buffer, i * b, b, axis=1)


def put(
    buffer: Inexact[Array, "n p"], block: Inexact[Array, "n b"], i: Int[ArrayLike, ""]
) -> Inexact[Array, "n p"]:
    if buffer.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, i * block.shape[1], axis=1)


def put_rows(
    buffer: Inexact[Array, "p m"], block: Inexact[Array, "b m"], i: Int[ArrayLike, ""]
) -> Inexact[Array, "p m"]:
    if buffer.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, i * block.shape[0], axis=0)


def border(
    products: Sequence[Inexact[Array, "p p"]],
    pairs: Sequence[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]],
    i: Int[Array, ""],
    b: int,
) -> list[Inexact[Array, "p p"]]:
    """`left* right` for each of the pairs of buffers, from the `products` without the
    rows and columns of block i, the last one."""
    # Without this case, a fixed budget would compile a loop for its only block.
    if products[0].shape[0] == b:
        return [left.conj().T @ right for left, right in pairs]

    def fill_in(j, products):
        j = jnp.asarray(j, i.dtype)  # an integer of Python under `jax.disable_jit`
        return [
            _put_product(_put_product(product, pair, i, j, b), pair, j, i, b)
            for product, pair in zip(products, pairs, strict=True)
        ]

    return jax.lax.fori_loop(0, i + 1, fill_in, list(products))


def _put_product(
    product: Inexact[Array, "p p"],
    pair: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]],
    i: Int[Array, ""],
    j: Int[Array, ""],
    b: int,
) -> Inexact[Array, "p p"]:
    left, right = take(pair[0], i, b), take(pair[1], j, b)
    block = left.conj().T @ right
    return jax.lax.dynamic_update_slice(product, block, (i * b, j * b))


def rescale(
    x: Inexact[Array, "n b"], scale: Real[Array, ""], i: Int[Array, ""]
) -> tuple[Inexact[Array, "n b"], Real[Array, ""]]:
    """`x / scale`, and the scale, which is set by the first block so that no square of an
    entry overflows or underflows."""
    scale = jnp.where(i == 0, normalise(x)[1], scale)
    return x / scale, scale


def remove(
    basis: Inexact[Array, "n p"], x: Inexact[Array, "n m"], count: Int[Array, ""], b: int
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "p m"]]:
    """`x - basis (basis* x)` and `basis* x`, with `count` blocks of an orthonormal
    basis."""

    def project_out(i, state):
        remainder, rows = state
        block = take(basis, i, b)
        # Of the remainder and not of x: modified Gram-Schmidt loses less orthogonality.
        part = block.conj().T @ remainder
        return remainder - block @ part, put_rows(rows, part, i)

    rows = jnp.zeros_like(x, shape=(basis.shape[1], x.shape[1]))
    return jax.lax.fori_loop(0, count, project_out, (x, rows))


class Extension(eqx.Module):
    """`x = basis @ coefficients + block @ coupling`."""

    block: Inexact[Array, "n b"]
    coefficients: Inexact[Array, "p b"]
    coupling: Inexact[Array, "b b"]


def extend(
    basis: Inexact[Array, "n p"],
    x: Inexact[Array, "n b"],
    count: Int[Array, ""],
    eps: float | None = None,
    scale: Real[Array, ""] | float = 0.0,
) -> Extension:
    """New columns for the range of x: orthonormal, or zero where x adds nothing that
    exceeds `eps` times its largest singular value or `scale`. By default `eps` is the
    square of the machine epsilon, so that the columns keep all of x, however small beside
    its largest part. The columns of a single block are orthonormal whatever the rank of
    x."""
    b = x.shape[1]
    if eps is None:
        eps = float(jnp.finfo(x.dtype).eps) ** 2
    if basis.shape[1] == b:
        block, r = qr(x)
        return Extension(block=block, coefficients=jnp.zeros_like(r), coupling=r)

    def project(state, limits):
        x, coefficients, coupling = state
        cutoff, size = limits
        remainder, part = remove(basis, x, count, b)
        block, factor = rank_revealing_qr(remainder, cutoff, size)
        return (block, coefficients + part @ coupling, factor @ coupling), None

    # Once is not enough: what a column of the block has in the basis after the first pass
    # is small beside the strong columns, but may not be beside a weak one. A weak column
    # that loses half of its length in the second pass was rounding, and is dropped.
    real = jnp.finfo(x.dtype).dtype
    cutoffs = jnp.asarray([eps, 0.5], real), jnp.stack([jnp.asarray(scale, real), 1])
    coefficients = jnp.zeros_like(x, shape=(basis.shape[1], b))
    start = x, coefficients, jnp.eye(b, dtype=x.dtype)
    (block, coefficients, coupling), _ = jax.lax.scan(project, start, cutoffs)
    return Extension(block=block, coefficients=coefficients, coupling=coupling)
