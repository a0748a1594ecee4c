"""The Lanczos recurrence for a Hermitian A.

From `v_1 = z / ||z||`, step j makes one matvec and one new basis vector,

    alpha_j = v_j* A v_j                                          (`alpha`)
    r = A v_j - alpha_j v_j - beta_(j-1) v_(j-1)                  (`residual`)
    beta_j = ||r||,   v_(j+1) = r / beta_j                        (`beta`, `following`)

so that after s steps `A V = V T + beta_s v_(s+1) e_s*` with the tridiagonal `T = V* A V`.
This is algorithm 6.15 of Saad, Iterative Methods for Sparse Linear Systems, 2003, with
Gram-Schmidt repeated while there is cancellation (Daniel, Gragg, Kaufman and Stewart,
Math. Comp. 30, 1976). docs/devdocs/quadrature.md treats breakdown and
reorthogonalisation.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import dot, orthogonalise, put_row, unit


# The largest number of basis vectors in one buffer. A step reads the full buffers and the
# one that is being filled, so it reads at most this many rows that are still zero. A
# single buffer would be read as a whole: twice as many rows as are filled, on average.
# Smaller buffers make more kernels.
_MAX_BUFFER_ROWS = 32


class LanczosDecomposition(eqx.Module):
    """`A V = V T + r e_s*` with the tridiagonal `T = V* A V`.

    - `alpha`: the diagonal of T.
    - `beta`: the off-diagonal of T, with `beta[j]` between steps j and j + 1; the last
        entry is the norm of the residual r. After a breakdown (an invariant subspace)
        `beta` and the rows of the basis are 0, and `alpha` repeats its first entry, which
        is in the numerical range of A. Entries beyond `last` are filled likewise.
    - `projected`: the off-diagonal again, from the other matvec: `v_j* A v_(j+1)`
        computed with `A v_(j+1)`, where `beta[j]` is computed with `A v_j`. The two
        differ by rounding errors of the matvecs only. The last entry is 0.
    - `neglected`: the norm of the residual that counted as zero at a breakdown.
    - `basis`: the columns of V, as rows.
    - `norm`: the norm of the start vector, which is `norm * V e_1`.
    - `last`: the index of the last column of V.
    """

    alpha: Real[Array, " s"]
    beta: Real[Array, " s"]
    projected: Real[Array, " s"]
    neglected: Real[Array, ""]
    basis: Inexact[Array, "s n"]
    norm: Real[Array, ""]
    last: Int[Array, ""] | int


class LanczosState(eqx.Module):
    """A run that can be continued.

    - `carry`: v_j, v_(j-1), beta_(j-1), and the largest entry of T so far.
    - `buffers`: the basis vectors so far, as rows.
    - `entries`: `alpha`, `beta`, `projected` and `neglected` of the steps so far, as
        columns.
    - `norm`: the norm of the start vector.
    """

    carry: tuple[Array, ...]
    buffers: tuple[Inexact[Array, "_ n"], ...]
    entries: Real[Array, "s 4"]
    norm: Real[Array, ""]


def lanczos(
    mv: Callable[[Array], Array],
    start: Inexact[Array, " n"],
    num_steps: int,
    *,
    window: int | None = None,
    eps: float,
) -> LanczosDecomposition:
    """`num_steps` steps of Lanczos for a Hermitian A. Cost: `num_steps` matvecs, and
    `O(n num_steps^2)` operations, or with `window=0` `O(n num_steps)`. Memory:
    `num_steps` vectors of length n.

    **Arguments:**

    - `mv`: A as a function of vectors, shape `(n,)` to `(n,)`.
    - `start`: the first vector of the Krylov space, shape `(n,)`.
    - `num_steps`: s, a Python integer.
    - `window`: how many of the last basis vectors each new one is orthogonalised against,
        beyond the three-term recurrence: all for None, none for 0.
    - `eps`: the machine epsilon of the matvecs.

    **Returns:**

    A decomposition with the fields `alpha` and `beta` of the tridiagonal matrix, shape
    `(s,)`, the `basis`, shape `(s, n)`, and the `norm` of `start`. Steps after a
    breakdown multiply A by 0.
    """
    state = lanczos_start(start, num_steps, window=window)
    state = lanczos_advance(mv, state, 0, num_steps, window=window, eps=eps)
    return lanczos_run(state, num_steps)


def lanczos_start(
    start: Inexact[Array, " n"], most: int, *, window: int | None = None
) -> LanczosState:
    """A run of at most `most` steps, before its first step."""
    vector, norm = unit(start)
    zero = jnp.zeros_like(norm)
    # With a window, a step reads a slice of the buffer.
    num_buffers = -(-most // _MAX_BUFFER_ROWS) if window is None else 1
    sizes = [most // num_buffers + (i < most % num_buffers) for i in range(num_buffers)]
    return LanczosState(
        # There is no vector before the first one. Any will do in its place, since its
        # coupling beta_0 is 0.
        carry=(vector, vector, zero, zero),
        buffers=tuple(jnp.zeros_like(start, shape=(m, start.shape[0])) for m in sizes),
        entries=jnp.zeros_like(norm, shape=(most, 4)),
        norm=norm,
    )


def lanczos_advance(
    mv: Callable[[Array], Array],
    state: LanczosState,
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    *,
    window: int | None = None,
    eps: float,
) -> LanczosState:
    """The run after the steps from number `first` on, before number `last`."""
    dtype = state.carry[0].dtype

    def step(j, state):
        (vector, previous, coupling, scale), buffers, entries = state
        buffers = put_row(buffers, vector, j)
        image = mv(vector)
        alpha = dot(vector, image).real
        projected = dot(previous, image).real
        residual = image - alpha.astype(dtype) * vector
        residual = residual - coupling.astype(dtype) * previous
        scale = jnp.maximum(scale, jnp.maximum(jnp.abs(alpha), coupling))
        following, norm = orthogonalise(
            residual, buffers, j, window, near=(vector, previous)
        )
        # A residual at rounding level has a random direction. Going on with it would
        # break the relation above, so the run continues with zeros.
        alive = ~(norm <= eps * scale)
        following = jnp.where(alive, following, 0)
        beta, neglected = jnp.where(alive, norm, 0), jnp.where(alive, 0, norm)
        # After a breakdown alpha would be 0, where f may be infinite. The first alpha is
        # a Rayleigh quotient, and its node has no weight.
        alpha = jnp.where((j > 0) & (coupling == 0), entries[0, 0], alpha)
        new = jnp.stack([alpha, beta, projected, neglected])
        # A step computes the `projected` coupling of the step before it. The comparison
        # in place of a scatter saves kernels.
        row = jnp.stack([j, j, j - 1, j])
        entries = jnp.where(jnp.arange(len(entries))[:, None] == row, new, entries)
        return (following, vector, beta, scale), buffers, entries

    carry, buffers, entries = jax.lax.fori_loop(
        first, last, step, (state.carry, state.buffers, state.entries)
    )
    return LanczosState(carry, buffers, entries, norm=state.norm)


def lanczos_run(state: LanczosState, steps: Int[Array, ""] | int) -> LanczosDecomposition:
    """The decomposition after `steps` steps, at most as many as the run has made. Rows of
    the basis that later steps have made are left, and have no weight."""
    alpha, beta, projected, neglected = state.entries.T
    last = steps - 1
    index = jnp.arange(len(alpha))
    return LanczosDecomposition(
        alpha=jnp.where(index <= last, alpha, alpha[0]),
        beta=move_residual_to_end(beta, last),
        projected=jnp.where(index < last, projected, 0),
        basis=jnp.concatenate(state.buffers),
        neglected=jnp.max(neglected),
        norm=state.norm,
        last=last,
    )


def move_residual_to_end(
    couplings: Real[Array, " s"], last: Int[Array, ""] | int
) -> Real[Array, " s"]:
    """The couplings of each step with the next one. The coupling of the `last` step, the
    norm of the residual, moves to the end of the array, and 0 takes its place."""
    index = jnp.arange(len(couplings))
    at_end = jnp.where(index == len(couplings) - 1, couplings[last], 0)
    return jnp.where(index < last, couplings, at_end)
