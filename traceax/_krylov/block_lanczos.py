"""Block Lanczos for a Hermitian A, from a block of b start vectors.

From an orthonormal basis V_1 of the start vectors, step j makes b matvecs and b new basis
vectors,

    M_j = V_j* A V_j                                          (`form`)
    R = A V_j - V_j M_j - V_(j-1) B_(j-1)*                    (`residual`)
    V_(j+1) B_j = R,  a rank-revealing QR factorisation       (`following`, `coupling`)

so that after s steps `A V = V T + V_(s+1) B_s E_s*`. T is block tridiagonal, with M_j on
its diagonal, B_j below it and B_j* above it. Golub and Underwood, The Block Lanczos
Method for Computing Eigenvalues, 1977; here with full reorthogonalisation.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import rank_revealing_qr, two_norm


# The second pass of Gram-Schmidt drops directions of which less than this share is left:
# a direction mostly in the span of the basis was rounding. Any number well between the
# machine epsilon and 1 tells the two apart.
_MIN_LENGTH_LEFT = 0.5


class BlockLanczosDecomposition(eqx.Module):
    """`A V = V T + v B E_s*` with a block tridiagonal `T = V* A V`.

    - `matrix`: T, of shape (s b, s b). Where the basis has a zero column, the diagonal
        entry of T is a Rayleigh quotient of A.
    - `coupling`: B, which couples the last block to the next block v.
    - `again`: T again, from the entries of `V* A V` on the other side of the diagonal.
        The two differ by rounding errors of the matvecs only.
    - `neglected`: the largest norm of a residual, or part of one, that counted as zero.
    - `basis`: V, block after block. Its columns are orthonormal, or zero after a
        breakdown and for steps that were not made.
    """

    matrix: Inexact[Array, "p p"]
    coupling: Inexact[Array, "b b"]
    again: Inexact[Array, "p p"]
    neglected: Real[Array, ""]
    basis: Inexact[Array, "n p"]


class BlockLanczosState(eqx.Module):
    """A run that can be continued, in buffers for the largest number of steps.

    - `block`, `previous`, `coupling`: V_j, V_(j-1), and B_(j-1) between them.
    - `scale`: the largest entry of a diagonal block so far.
    - `basis`: the blocks of V so far.
    - `diagonal`, `below`, `above`: M_j, B_j, and `V_(j-1)* A V_j`, which in exact
        arithmetic is B_(j-1)*.
    - `neglected`: as in `BlockLanczosDecomposition`.
    """

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
    """`num_steps` steps of block Lanczos for a Hermitian A, fully reorthogonalised. Golub
    and Underwood, The Block Lanczos Method for Computing Eigenvalues, 1977. Cost: `s b`
    matvecs, b at a time, and `O(n (s b)^2)` operations. Memory: `s b` vectors of length
    n.

    **Arguments:**

    - `matmat`: A as a function of arrays of shape `(n, b)`.
    - `start`: the start vectors of the Krylov space, as columns, shape `(n, b)`.
    - `num_steps`: s, a Python integer.
    - `eps`: the machine epsilon of the matvecs.

    **Returns:**

    A decomposition with the fields `matrix`, the block tridiagonal matrix of shape
    `(s b, s b)`; `coupling` to the next block, shape `(b, b)`; and `basis`, shape
    `(n, s b)`, with zero columns after a breakdown.
    """
    state = block_lanczos_start(start, num_steps, eps=eps)
    state = block_lanczos_advance(matmat, state, 0, num_steps, eps=eps)
    return block_lanczos_run(state, num_steps)


def block_lanczos_start(
    start: Inexact[Array, "n b"], most: int, *, eps: float
) -> BlockLanczosState:
    """A run of at most `most` steps, before its first step."""
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
    """The run after the steps from number `first` on, before number `last`."""

    def step(j, state):
        block, b = state.block, state.block.shape[1]
        at = jnp.zeros_like(j), j * b
        basis = jax.lax.dynamic_update_slice(state.basis, block, at)
        image = matmat(block)
        form = block.conj().T @ image
        residual = image - block @ form - state.previous @ state.coupling.conj().T
        residual = residual - basis @ (basis.conj().T @ residual)
        scale = jnp.maximum(state.scale, jnp.max(jnp.abs(form)))
        # Single directions break down: those of singular values at rounding level, which
        # are made of rounding, become zero columns.
        following, below = rank_revealing_qr(residual, eps, scale)
        neglected = two_norm(residual - following @ below)
        # Weak directions of the block may have components in the basis, which were small
        # beside the strong directions before the QR factorisation scaled them up. A
        # second pass removes them, and drops columns that lose more than half of their
        # length.
        following = following - basis @ (basis.conj().T @ following)
        following, rotation = rank_revealing_qr(
            following, cutoff=_MIN_LENGTH_LEFT, scale=1.0
        )
        coupling = rotation @ below
        return BlockLanczosState(
            block=following,
            previous=block,
            coupling=coupling,
            scale=scale,
            basis=basis,
            diagonal=state.diagonal.at[j].set(form),
            below=state.below.at[j].set(coupling),
            above=state.above.at[j].set(state.previous.conj().T @ image),
            neglected=jnp.maximum(state.neglected, neglected),
        )

    return jax.lax.fori_loop(first, last, step, state)


def block_lanczos_run(
    state: BlockLanczosState, steps: Int[Array, ""] | int
) -> BlockLanczosDecomposition:
    """The decomposition after `steps` steps, which is how many the run has made."""
    most, b, _ = state.diagonal.shape
    index = jnp.arange(most)
    missing = jnp.sum(jnp.abs(state.basis), axis=0) == 0

    def assemble(diagonal, below):
        """The Hermitian matrix with these blocks on the diagonal, and below it."""
        # The coupling of the last step is not part of T.
        below = jnp.where((index < steps - 1)[:, None, None], below, 0)[:-1]
        matrix = jnp.zeros_like(state.basis, shape=(most, b, most, b))
        matrix = matrix.at[index, :, index].set(diagonal)
        matrix = matrix.at[index[1:], :, index[:-1]].set(below)
        matrix = matrix.at[index[:-1], :, index[1:]].set(below.conj().mT)
        matrix = matrix.reshape(most * b, most * b)
        # At a zero column T has a zero eigenvalue, where f may be infinite. T_11 is a
        # Rayleigh quotient of A, and its node has no weight.
        return matrix + jnp.diag(jnp.where(missing, matrix[0, 0], 0))

    # Step j computes the block above the diagonal that couples it to step j - 1.
    forms, above = state.diagonal, jnp.roll(state.above, -1, axis=0)
    # The lower triangles of the blocks, mirrored, differ from the blocks by rounding too.
    lower_triangles = jnp.tril(forms) + jnp.tril(forms, -1).conj().mT
    return BlockLanczosDecomposition(
        matrix=assemble((forms + forms.conj().mT) / 2, state.below),
        coupling=state.below[steps - 1],
        again=assemble(lower_triangles, above.conj().mT),
        neglected=state.neglected,
        basis=state.basis,
    )
