from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .lanczos import unit


class Arnoldi(eqx.Module):
    """`A Q = Q H + r e_s*` with `H = Q* A Q` upper Hessenberg, for any square A.

    - `matrix`: H. After a breakdown (an invariant subspace) its columns are 0.
    - `residual`: the norm of r, 0 after a breakdown.
    - `basis`: the columns of Q, as rows; zero after a breakdown.
    - `norm`: of the start vector, which is `norm * Q e_1`.
    """

    matrix: Inexact[Array, "s s"]
    residual: Real[Array, ""]
    basis: Inexact[Array, "s n"]
    norm: Real[Array, ""]


def arnoldi(
    mv: Callable[[Array], Array],
    start: Inexact[Array, " n"],
    num_steps: int,
    *,
    eps: float,
) -> Arnoldi:
    """`num_steps` steps, with one product each. `eps` is the unit roundoff of the
    products. Steps after a breakdown multiply A by 0. Arnoldi, Quarterly of Applied
    Mathematics 9, 1951; Gram-Schmidt is done twice, which is enough (Giraud, Langou,
    Rozloznik and van den Eshof, Numerische Mathematik 101, 2005)."""

    def step(j, state):
        (vector, scale, _), (basis, matrix) = state
        basis = basis.at[j].set(vector)
        rest = mv(vector)
        scale = jnp.maximum(scale, unit(rest)[1])
        column = jnp.zeros_like(start, shape=num_steps)
        for _ in range(2):
            coefficients = jnp.matmul(basis.conj(), rest, precision="highest")
            rest = rest - jnp.matmul(coefficients, basis, precision="highest")
            column = column + coefficients
        following, norm = unit(rest)
        alive = ~(norm <= eps * scale)
        following = jnp.where(alive, following, 0)
        norm = jnp.where(alive, norm, 0)
        # Where there is no further row, that entry is the residual.
        column = column.at[j + 1].set(norm.astype(start.dtype), mode="drop")
        return (following, scale, norm), (basis, matrix.at[:, j].set(column))

    vector, norm = unit(start)
    zero = jnp.zeros_like(norm)
    basis = jnp.zeros_like(start, shape=(num_steps, start.shape[0]))
    matrix = jnp.zeros_like(start, shape=(num_steps, num_steps))
    (_, _, residual), (basis, matrix) = jax.lax.fori_loop(
        0, num_steps, step, ((vector, zero, zero), (basis, matrix))
    )
    return Arnoldi(matrix, residual, basis, norm)
