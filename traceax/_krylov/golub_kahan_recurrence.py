from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import dot, orthogonalise, put_row, unit
from .lanczos_recurrence import cut


class Bidiagonalisation(eqx.Module):
    """`A V = U B` and `A* U = V B* + r e_s*` with B upper bidiagonal, for any A of shape
    (m, n).

    - `diagonal`, `above`: of B; the last of `above` is the norm of r. After a breakdown
        (an invariant subspace) `above` is 0, and `diagonal` repeats its first entry. So
        it is too after the last of fewer steps than there is room for.
    - `projected_diagonal`, `projected_above`: what `diagonal` and `above[:-1]` are
        but for rounding errors of the products, measured from the other side:
        `v_j* A* u_j` and `u_j* A v_(j+1)`, where those are from `A v_j` and `A* u_j`.
    - `left`, `right`: the columns of U and V, as rows; zero after a breakdown.
    - `norm`: of the start vector, which is `norm * V e_1`.
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
    """A run that may go on, as `LanczosState`."""

    carry: tuple[Array, ...]
    buffers: tuple[Inexact[Array, "s m"], Inexact[Array, "s n"], Real[Array, "s 4"]]
    norm: Real[Array, ""]


def golub_kahan_start(
    mv: Callable[[Array], Array], start: Inexact[Array, " n"], most: int
) -> GolubKahanState:
    """Before the first of at most `most` steps."""
    vector, norm = unit(start)
    rights = jnp.zeros_like(start, shape=(most, start.shape[0]))
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
    """Steps of bidiagonalisation from number `first` on, before number `last`, each with
    a product with A and one with its adjoint. `window` and `eps` as for `lanczos`. Golub
    and Kahan, SIAM J. Numer. Anal. 2, 1965; lower-to-upper variant as in Paige and
    Saunders, ACM TOMS 8, 1982."""
    dtype = state.carry[0].dtype

    def split(x, rows, last, near, scale):
        x, norm = orthogonalise(x, (rows,), last, window, [near])
        alive = ~(norm <= eps * scale)
        return jnp.where(alive, x, 0), jnp.where(alive, norm, 0)

    def step(j, state):
        (vector, previous, beta, scale), (lefts, rights, entries) = state
        (rights,) = put_row((rights,), vector, j)
        product = mv(vector)
        projected_beta = dot(previous, product).real
        rest = product - beta.astype(dtype) * previous
        left, alpha = split(rest, lefts, j - 1, previous, scale)
        scale = jnp.maximum(scale, alpha)
        (lefts,) = put_row((lefts,), left, j)
        product = adjoint_mv(left)
        projected_alpha = dot(vector, product).real
        rest = product - alpha.astype(dtype) * vector
        vector, beta = split(rest, rights, j, vector, scale)
        scale = jnp.maximum(scale, beta)
        found = jnp.stack([alpha, beta, projected_alpha, projected_beta])
        entries = jnp.where((jnp.arange(len(entries)) == j)[:, None], found, entries)
        return (vector, left, beta, scale), (lefts, rights, entries)

    part = (state.carry, state.buffers)
    carry, buffers = jax.lax.fori_loop(first, last, step, part)
    return GolubKahanState(carry, buffers, state.norm)


def golub_kahan_run(
    state: GolubKahanState, steps: Int[Array, ""] | int
) -> Bidiagonalisation:
    """What `steps` steps have found, all that were made."""
    lefts, rights, entries = state.buffers
    diagonal, above, projected_diagonal, projected_above = entries.T
    last = steps - 1
    above = cut(above, last)
    # After a breakdown all of them are 0.
    broken = jnp.append(False, above[:-1] == 0)
    return Bidiagonalisation(
        diagonal=jnp.where(broken, diagonal[0], diagonal),
        above=above,
        projected_diagonal=jnp.where(broken, diagonal[0], projected_diagonal),
        projected_above=projected_above[1:],
        left=lefts,
        right=rights,
        norm=state.norm,
        last=last,
    )
