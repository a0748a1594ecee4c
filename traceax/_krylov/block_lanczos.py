"""Block Lanczos: an orthonormal basis of the Krylov space of a block of vectors."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import rank_revealing_qr, two_norm


class BlockLanczosDecomposition(eqx.Module):
    """`A V = V T + v B E_s*` with a block tridiagonal `T = V* A V`.

    - `matrix`: T, of shape (s b, s b). Where the basis has a zero column, its diagonal
        entry is one of A's Rayleigh quotients.
    - `coupling`: B, of the last block to the next one, v.
    - `again`: what `matrix` is but for rounding errors of the products, from the entries
        of `V* A V` on the other side of the diagonal.
    - `neglected`: the largest norm of a part of A's products that counted as zero.
    - `basis`: V, block after block; columns are orthonormal or, after a breakdown and for
        steps that were not made, zero.
    """

    matrix: Inexact[Array, "p p"]
    coupling: Inexact[Array, "b b"]
    again: Inexact[Array, "p p"]
    neglected: Real[Array, ""]
    basis: Inexact[Array, "n p"]


class BlockLanczosState(eqx.Module):
    """Where a run is, in buffers for the largest number of steps: the block to apply A
    to, the one before it with its coupling, the size of what was seen, and what was
    found."""

    block: Inexact[Array, "n b"]
    previous: Inexact[Array, "n b"]
    coupling: Inexact[Array, "b b"]
    scale: Real[Array, ""]
    basis: Inexact[Array, "n p"]
    diagonal: Inexact[Array, "s b b"]
    below: Inexact[Array, "s b b"]
    above: Inexact[Array, "s b b"]
    neglected: Real[Array, ""]


def block_lanczos(
    matmat: Callable[[Array], Array],
    start: Inexact[Array, "n b"],
    num_steps: int,
    *,
    eps: float,
) -> BlockLanczosDecomposition:
    """`num_steps` steps of block Lanczos for a Hermitian A, fully reorthogonalised, with
    one product of b columns each. Golub and Underwood, The Block Lanczos Method for
    Computing Eigenvalues, 1977.

    **Arguments:**

    - `matmat`: A as a function of arrays of shape `(n, b)`.
    - `start`: shape `(n, b)`, the columns that the Krylov space is made from.
    - `num_steps`: s, a Python integer.
    - `eps`: the machine epsilon of the products.

    **Returns:**

    The fields `matrix`, the block tridiagonal one of shape `(s b, s b)`, `coupling` to
    the next block, and `basis`, shape `(n, s b)`, with zero columns after a breakdown.
    """
    state = block_lanczos_start(start, num_steps, eps=eps)
    state = block_lanczos_advance(matmat, state, 0, num_steps, eps=eps)
    return block_lanczos_run(state, num_steps)


def block_lanczos_start(
    start: Inexact[Array, "n b"], most: int, *, eps: float
) -> BlockLanczosState:
    """No step yet, of at most `most`."""
    n, b = start.shape
    block, _ = rank_revealing_qr(start, eps)
    blocks = jnp.zeros_like(block, shape=(most, b, b))
    zero = jnp.zeros_like(block, shape=(), dtype=jnp.finfo(start.dtype).dtype)
    return BlockLanczosState(
        block=block,
        previous=jnp.zeros_like(block),
        coupling=jnp.zeros_like(block, shape=(b, b)),
        scale=zero,
        basis=jnp.zeros_like(block, shape=(n, most * b)),
        diagonal=blocks,
        below=blocks,
        above=blocks,
        neglected=zero,
    )


def block_lanczos_advance(
    matmat: Callable[[Array], Array],
    state: BlockLanczosState,
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    *,
    eps: float,
) -> BlockLanczosState:
    """The steps from `first`, as many as were made, to `last`."""

    def step(j, state):
        block, b = state.block, state.block.shape[1]
        at = jnp.zeros_like(j), j * b
        basis = jax.lax.dynamic_update_slice(state.basis, block, at)
        product = matmat(block)
        form = block.conj().T @ product
        rest = product - block @ form - state.previous @ state.coupling.conj().T
        rest = rest - basis @ (basis.conj().T @ rest)
        scale = jnp.maximum(state.scale, jnp.max(jnp.abs(form)))
        following, below = rank_revealing_qr(rest, eps, scale)
        neglected = two_norm(rest - following @ below)
        # Weak directions of the block have components in the basis that were small beside
        # the strong ones: a second pass, and what it cancels half of was rounding.
        following = following - basis @ (basis.conj().T @ following)
        following, rotation = rank_revealing_qr(following, 0.5, 1.0)
        coupling = rotation @ below
        return BlockLanczosState(
            block=following,
            previous=block,
            coupling=coupling,
            scale=scale,
            basis=basis,
            diagonal=state.diagonal.at[j].set(form),
            below=state.below.at[j].set(coupling),
            above=state.above.at[j].set(state.previous.conj().T @ product),
            neglected=jnp.maximum(state.neglected, neglected),
        )

    return jax.lax.fori_loop(first, last, step, state)


def block_lanczos_run(
    state: BlockLanczosState, steps: Int[Array, ""] | int
) -> BlockLanczosDecomposition:
    """What `steps` steps have found, all that were made."""
    most, b, _ = state.diagonal.shape
    index = jnp.arange(most)
    missing = jnp.sum(jnp.abs(state.basis), axis=0) == 0

    def assembled(diagonal, below):
        """The matrix of Hermitian blocks on the diagonal, and blocks below them."""
        below = jnp.where((index < steps - 1)[:, None, None], below, 0)[:-1]
        matrix = jnp.zeros_like(state.basis, shape=(most, b, most, b))
        matrix = matrix.at[index, :, index].set(diagonal)
        matrix = matrix.at[index[1:], :, index[:-1]].set(below)
        matrix = matrix.at[index[:-1], :, index[1:]].set(below.conj().mT)
        matrix = matrix.reshape(most * b, most * b)
        return matrix + jnp.diag(jnp.where(missing, matrix[0, 0], 0))

    forms, above = state.diagonal, jnp.roll(state.above, -1, axis=0)
    one_side = jnp.tril(forms) + jnp.tril(forms, -1).conj().mT
    return BlockLanczosDecomposition(
        matrix=assembled((forms + forms.conj().mT) / 2, state.below),
        coupling=state.below[steps - 1],
        again=assembled(one_side, above.conj().mT),
        neglected=state.neglected,
        basis=state.basis,
    )
