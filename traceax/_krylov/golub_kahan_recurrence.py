"""Golub-Kahan bidiagonalisation of an m by n operator A.

From `v_1 = z / ||z||`, step j makes a matvec with A and one with A*,

    alpha_j u_j     = A v_j - beta_(j-1) u_(j-1)       (`alpha`, `left`)
    beta_j v_(j+1)  = A* u_j - alpha_j v_j             (`beta`, `vector`)

so that after s steps `A V = U B` and `A* U = V B* + beta_s v_(s+1) e_s*`, with B upper
bidiagonal, alpha on its diagonal (`diagonal`) and beta above it (`above`). `B* B` is the
tridiagonal matrix of Lanczos for `A* A`, which is never formed. Golub and Kahan, SIAM J.
Numer. Anal. 2, 1965; the upper bidiagonal variant is as in Paige and Saunders, ACM TOMS
8, 1982.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import dot, orthogonalise, put_row, unit
from .lanczos_recurrence import move_residual_to_end


class Bidiagonalisation(eqx.Module):
    """`A V = U B` and `A* U = V B* + r e_s*` with B upper bidiagonal, for any A of shape
    (m, n).

    - `diagonal`, `above`: the entries of B on and above the diagonal; the last one of
        `above` is the norm of r. After a breakdown (an invariant subspace) `above` is 0,
        and `diagonal` repeats its first entry. Entries beyond `last` are filled likewise.
    - `projected_diagonal`, `projected_above`: `diagonal` and `above[:-1]` again, from the
        other matvec: `v_j* A* u_j` computed with `A* u_j`, and `u_j* A v_(j+1)` computed
        with `A v_(j+1)`, where the first ones are computed with `A v_j` and `A* u_j`. The
        two differ by rounding errors of the matvecs only.
    - `left`, `right`: the columns of U and V, as rows; zero after a breakdown.
    - `norm`: the norm of the start vector, which is `norm * V e_1`.
    - `last`: the index of the last column of V.
    """

    diagonal: Real[Array, " s"]
    above: Real[Array, " s"]
    projected_diagonal: Real[Array, " s"]
    projected_above: Real[Array, " s-1"]
    left: Inexact[Array, "s m"]
    right: Inexact[Array, "s n"]
    norm: Real[Array, ""]
    last: Int[Array, ""] | int


class GolubKahanState(eqx.Module):
    """A run that can be continued.

    - `carry`: v_j, u_(j-1), beta_(j-1), and the largest entry of B so far.
    - `buffers`: the left and the right basis vectors so far, as rows, and alpha, beta and
        their projected values, as columns.
    - `norm`: the norm of the start vector.
    """

    carry: tuple[Array, ...]
    buffers: tuple[Inexact[Array, "s m"], Inexact[Array, "s n"], Real[Array, "s 4"]]
    norm: Real[Array, ""]


def golub_kahan_start(
    mv: Callable[[Array], Array], start: Inexact[Array, " n"], most: int
) -> GolubKahanState:
    """A run of at most `most` steps, before its first step."""
    vector, norm = unit(start)
    rights = jnp.zeros_like(start, shape=(most, start.shape[0]))
    # There is no left vector before the first one; its coupling beta_0 is 0.
    previous = jnp.zeros_like(start, shape=jax.eval_shape(mv, start).shape)
    lefts = jnp.zeros_like(start, shape=(most, *previous.shape))
    entries = jnp.zeros_like(norm, shape=(most, 4))
    zero = jnp.zeros_like(norm)
    carry = (vector, previous, zero, zero)
    return GolubKahanState(carry, (lefts, rights, entries), norm)


def golub_kahan_advance(
    mv: Callable[[Array], Array],
    adjoint_mv: Callable[[Array], Array],
    state: GolubKahanState,
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    *,
    window: int | None = None,
    eps: float,
) -> GolubKahanState:
    """The run after the steps from number `first` on, before number `last`, each with a
    matvec with A and one with its adjoint. `window` and `eps` are as for `lanczos`."""
    dtype = state.carry[0].dtype

    def split(x, rows, last, near, scale):
        """The direction and the norm of x, orthogonalised against `rows`; zeros where the
        norm is at rounding level, since a direction made of rounding is random."""
        x, norm = orthogonalise(x, (rows,), last, window, near=[near])
        alive = ~(norm <= eps * scale)
        return jnp.where(alive, x, 0), jnp.where(alive, norm, 0)

    def step(j, state):
        (vector, previous, beta, scale), (lefts, rights, entries) = state
        (rights,) = put_row((rights,), vector, j)
        image = mv(vector)
        projected_beta = dot(previous, image).real
        residual = image - beta.astype(dtype) * previous
        left, alpha = split(residual, lefts, j - 1, previous, scale)
        scale = jnp.maximum(scale, alpha)
        (lefts,) = put_row((lefts,), left, j)
        image = adjoint_mv(left)
        projected_alpha = dot(vector, image).real
        residual = image - alpha.astype(dtype) * vector
        vector, beta = split(residual, rights, j, vector, scale)
        scale = jnp.maximum(scale, beta)
        new = jnp.stack([alpha, beta, projected_alpha, projected_beta])
        # A comparison in place of a scatter saves kernels.
        entries = jnp.where((jnp.arange(len(entries)) == j)[:, None], new, entries)
        return (vector, left, beta, scale), (lefts, rights, entries)

    carry, buffers = jax.lax.fori_loop(first, last, step, (state.carry, state.buffers))
    return GolubKahanState(carry, buffers, state.norm)


def golub_kahan_run(
    state: GolubKahanState, steps: Int[Array, ""] | int
) -> Bidiagonalisation:
    """The decomposition after `steps` steps, at most as many as the run has made. Rows of
    the bases that later steps have made are left, and have no weight."""
    lefts, rights, entries = state.buffers
    diagonal, above, projected_diagonal, projected_above = entries.T
    last = steps - 1
    above = move_residual_to_end(above, last)
    # After a breakdown the diagonal would be 0, where f may be infinite. Its first entry
    # is inside the domain, and what it changes has no weight.
    broken = jnp.append(False, above[:-1] == 0)
    return Bidiagonalisation(
        diagonal=jnp.where(broken, diagonal[0], diagonal),
        above=above,
        projected_diagonal=jnp.where(broken, diagonal[0], projected_diagonal),
        # A step computes the projected coupling of the step before it.
        projected_above=jnp.where(above[:-1] == 0, 0, projected_above[1:]),
        left=lefts,
        right=rights,
        norm=state.norm,
        last=last,
    )
