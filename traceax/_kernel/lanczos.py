from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .dense import thin_svd


# Basis vectors are kept in buffers of at most this many, so that a step reads little more
# than the vectors that there are, and a run of usual depth still compiles to one loop.
_BUFFER = 32


class Lanczos(eqx.Module):
    """`A V = V T + r e_s*` with the tridiagonal `T = V* A V`.

    - `alpha`: diagonal of T.
    - `beta`: its off-diagonal, `beta[j]` between steps j and j + 1, and last the norm of
        the residual r. After a breakdown (an invariant subspace) it is 0, rows of the
        basis are 0 and `alpha` repeats its first entry, which is in A's numerical range.
    - `projected`: what `beta[:-1]` is but for rounding errors of the products, measured
        from the other side: `v_j* A v_(j+1)`, where `beta[j]` is from `A v_j`.
    - `basis`: the columns of V, as rows.
    - `norm`: of the start vector, which is `norm * V e_1`.
    """

    alpha: Real[Array, " s"]
    beta: Real[Array, " s"]
    projected: Real[Array, " s-1"]
    basis: Inexact[Array, "s n"]
    norm: Real[Array, ""]


def lanczos(
    mv: Callable[[Array], Array],
    start: Inexact[Array, " n"],
    num_steps: int,
    *,
    window: int | None = None,
    eps: float,
) -> Lanczos:
    """`num_steps` steps for a Hermitian A, with one product each.

    `window` is how many of the last basis vectors each new one is orthogonalised against,
    beyond the three-term recurrence: all for None, none for 0. `eps` is the unit roundoff
    of the products. Steps after a breakdown multiply A by 0. Algorithm 6.15 of Saad,
    Iterative Methods for Sparse Linear Systems, 2003, with Gram-Schmidt repeated while
    there is cancellation (Daniel, Gragg, Kaufman, Stewart, Math. Comp. 30, 1976).
    """
    vector, norm = unit(start)
    entries, buffers = [], []
    carry = (vector, jnp.zeros_like(vector), jnp.zeros_like(norm), jnp.zeros_like(norm))
    num_buffers = -(-num_steps // _BUFFER) if window is None else 1
    for i in range(num_buffers):
        size = num_steps // num_buffers + (i < num_steps % num_buffers)

        def step(j, state, full=tuple(buffers)):
            (vector, previous, beta, scale), (buffer, entry) = state
            buffer = buffer.at[j].set(vector)
            product = mv(vector)
            form = dot(vector, product).real
            projected = dot(previous, product).real
            rest = product - form.astype(start.dtype) * vector
            rest = rest - beta.astype(start.dtype) * previous
            if window is None:
                rest = orthogonalise(rest, (*full, buffer))
            elif window > 0:
                recent = jnp.maximum(j + 1 - window, 0)
                rows = jax.lax.dynamic_slice_in_dim(
                    buffer, recent, min(window, len(buffer))
                )
                rest = orthogonalise(rest, (rows,))
            scale = jnp.maximum(scale, jnp.maximum(jnp.abs(form), beta))
            following, beta = unit(rest)
            alive = ~(beta <= eps * scale)
            following = jnp.where(alive, following, 0)
            beta = jnp.where(alive, beta, 0)
            entry = entry.at[j].set(jnp.stack([form, beta, projected]))
            return (following, vector, beta, scale), (buffer, entry)

        rows = jnp.zeros_like(start, shape=(size, start.shape[0]))
        zeros = jnp.zeros_like(norm, shape=(size, 3))
        carry, (buffer, entry) = jax.lax.fori_loop(0, size, step, (carry, (rows, zeros)))
        buffers, entries = [*buffers, buffer], [*entries, entry]
    alpha, beta, projected = jnp.concatenate(entries).T
    broken = jnp.append(False, beta[:-1] == 0)
    alpha = jnp.where(jnp.cumsum(broken) > 0, alpha[0], alpha)
    return Lanczos(alpha, beta, projected[1:], jnp.concatenate(buffers), norm)


class BlockLanczos(eqx.Module):
    """`A V = V T + v B E_s*` with a block tridiagonal `T = V* A V`.

    - `matrix`: T, of shape (s b, s b). Where the basis has a zero column, its diagonal
        entry is one of A's Rayleigh quotients.
    - `coupling`: B, of the last block to the next one, v.
    - `basis`: V, block after block; columns are orthonormal or, after a breakdown, zero.
    """

    matrix: Inexact[Array, "p p"]
    coupling: Inexact[Array, "b b"]
    basis: Inexact[Array, "n p"]


def block_lanczos(
    matmat: Callable[[Array], Array],
    start: Inexact[Array, "n b"],
    num_steps: int,
    *,
    eps: float,
) -> BlockLanczos:
    """`num_steps` steps from the range of `start`, with one product of b columns each,
    fully reorthogonalised. Golub and Underwood, The Block Lanczos Method for Computing
    Eigenvalues, 1977."""
    n, b = start.shape
    block, _, _ = thin_svd(start, eps)

    def step(j, state):
        block, previous, coupling, scale, (basis, diagonal, below) = state
        basis = jax.lax.dynamic_update_slice(basis, block, (0, j * b))
        product = matmat(block)
        form = block.conj().T @ product
        rest = product - block @ form - previous @ coupling.conj().T
        rest = rest - basis @ (basis.conj().T @ rest)
        scale = jnp.maximum(scale, jnp.max(jnp.abs(form)))
        following, s, vh = thin_svd(rest, eps, scale)
        # Weak directions of the block have components in the basis that were small beside
        # the strong ones: a second pass, and what it cancels half of was rounding.
        following = following - basis @ (basis.conj().T @ following)
        following, kept, rotation = thin_svd(following, 0.5, 1.0)
        coupling = (kept[:, None] * rotation) @ (s[:, None] * vh)
        state = basis, diagonal.at[j].set(form), below.at[j].set(coupling)
        return following, block, coupling, scale, state

    square = jnp.zeros_like(block, shape=(b, b))
    blocks = jnp.zeros_like(block, shape=(num_steps, b, b))
    empty = jnp.zeros_like(block, shape=(n, num_steps * b)), blocks, blocks
    scale = jnp.zeros_like(block, shape=(), dtype=jnp.finfo(start.dtype).dtype)
    start_state = (block, jnp.zeros_like(block), square, scale, empty)
    *_, (basis, diagonal, below) = jax.lax.fori_loop(0, num_steps, step, start_state)

    matrix = jnp.zeros_like(block, shape=(num_steps, b, num_steps, b))
    steps = jnp.arange(num_steps)
    matrix = matrix.at[steps, :, steps].set(diagonal)
    matrix = matrix.at[steps[1:], :, steps[:-1]].set(below[:-1])
    matrix = matrix.at[steps[:-1], :, steps[1:]].set(below[:-1].conj().mT)
    matrix = matrix.reshape(num_steps * b, num_steps * b)
    missing = jnp.sum(jnp.abs(basis), axis=0) == 0
    matrix = matrix + jnp.diag(jnp.where(missing, matrix[0, 0], 0))
    return BlockLanczos((matrix + matrix.conj().T) / 2, below[-1], basis)


def unit(x: Inexact[Array, " n"]) -> tuple[Inexact[Array, " n"], Real[Array, ""]]:
    """`x / ||x||` and `||x||`, or zeros; nothing overflows before x does."""
    largest = jnp.max(jnp.abs(x))
    safe = jnp.where(largest > 0, largest, 1)
    x = x / safe.astype(x.dtype)
    norm = jnp.sqrt(dot(x, x).real)
    return x / jnp.where(norm > 0, norm, 1).astype(x.dtype), safe * norm


def dot(x: Inexact[Array, " n"], y: Inexact[Array, " n"]) -> Inexact[Array, ""]:
    """`x* y`, at full precision on accelerators too."""
    return jnp.vdot(x, y, precision="highest")


def orthogonalise(
    x: Inexact[Array, " n"], buffers: tuple[Inexact[Array, "_ n"], ...]
) -> Inexact[Array, " n"]:
    """`x` less its components along the rows of `buffers`, orthonormal or zero. A second
    pass is made where the first one cancels most of x ("twice is enough": Kahan)."""

    def once(x):
        for rows in buffers:
            coefficients = jnp.matmul(rows.conj(), x, precision="highest")
            x = x - jnp.matmul(coefficients, rows, precision="highest")
        return x, unit(x)[1]

    def cancelled(state):
        _, norm, before, count = state
        return (norm < before / 10) & (count < 2)

    def again(state):
        x, norm, _, count = state
        return *once(x), norm, count + 1

    before = unit(x)[1]
    count = jnp.ones_like(before, dtype=jnp.int32)
    state = jax.lax.while_loop(cancelled, again, (*once(x), before, count))
    return state[0]
