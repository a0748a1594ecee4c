from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .lanczos import orthogonalise, unit


class GolubKahan(eqx.Module):
    """`A V = U B` and `A* U = V B* + r e_s*` with B upper bidiagonal.

    - `diagonal`, `above`: of B; the last of `above` is the norm of r. After a breakdown
        (an invariant subspace) `above` is 0, and `diagonal` repeats its first entry.
    - `left`, `right`: the columns of U and V, as rows; zero after a breakdown.
    - `norm`: of the start vector, which is `norm * V e_1`.
    """

    diagonal: Real[Array, " s"]
    above: Real[Array, " s"]
    left: Inexact[Array, "s n"]
    right: Inexact[Array, "s n"]
    norm: Real[Array, ""]


def golub_kahan(
    mv: Callable[[Array], Array],
    adjoint_mv: Callable[[Array], Array],
    start: Inexact[Array, " n"],
    num_steps: int,
    *,
    window: int | None = None,
    eps: float,
) -> GolubKahan:
    """`num_steps` steps of bidiagonalisation, each with one product with A and one with
    its adjoint. `window` and `eps` as for `lanczos`. Golub and Kahan, SIAM J. Numer.
    Anal. 2, 1965; lower-to-upper variant as in Paige and Saunders, ACM TOMS 8, 1982."""
    n = start.shape[0]

    def clean(x, rows, j):
        if window is None:
            return orthogonalise(x, (rows,))
        if window == 0:
            return x
        first = jnp.maximum(j + 1 - window, 0)
        recent = jax.lax.dynamic_slice_in_dim(rows, first, min(window, num_steps))
        return orthogonalise(x, (recent,))

    def split(x, scale):
        x, norm = unit(x)
        alive = ~(norm <= eps * scale)
        return jnp.where(alive, x, 0), jnp.where(alive, norm, 0)

    def step(j, state):
        (vector, previous, beta, scale), (lefts, rights, diagonal, above) = state
        rights = rights.at[j].set(vector)
        rest = clean(mv(vector) - beta.astype(start.dtype) * previous, lefts, j)
        left, alpha = split(rest, scale)
        scale = jnp.maximum(scale, alpha)
        lefts = lefts.at[j].set(left)
        rest = adjoint_mv(left) - alpha.astype(start.dtype) * vector
        vector, beta = split(clean(rest, rights, j), scale)
        scale = jnp.maximum(scale, beta)
        found = lefts, rights, diagonal.at[j].set(alpha), above.at[j].set(beta)
        return (vector, left, beta, scale), found

    vector, norm = unit(start)
    rows = jnp.zeros_like(start, shape=(num_steps, n))
    zeros = jnp.zeros_like(norm, shape=(num_steps,))
    zero = jnp.zeros_like(norm)
    carry = (vector, jnp.zeros_like(vector), zero, zero)
    _, found = jax.lax.fori_loop(0, num_steps, step, (carry, (rows, rows, zeros, zeros)))
    lefts, rights, diagonal, above = found
    broken = jnp.append(False, above[:-1] == 0)
    diagonal = jnp.where(jnp.cumsum(broken) > 0, diagonal[0], diagonal)
    return GolubKahan(diagonal, above, lefts, rights, norm)
