from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import unit


class ArnoldiDecomposition(eqx.Module):
    """`A Q = Q H + r e_s*` with `H = Q* A Q` upper Hessenberg, for any square A.

    - `matrix`: H. After a breakdown (an invariant subspace) its columns are 0. So they
        are too after the last of fewer steps than there is room for.
    - `residual`: the norm of r, 0 after a breakdown.
    - `basis`: the columns of Q, as rows; zero after a breakdown.
    - `norm`: of the start vector, which is `norm * Q e_1`.
    - `last`: the index of the last column of Q.
    """

    matrix: Inexact[Array, "s s"]
    residual: Real[Array, ""]
    basis: Inexact[Array, "s n"]
    norm: Real[Array, ""]
    last: Int[Array, ""] | int


class ArnoldiState(eqx.Module):
    """A run that may go on: the next basis vector, the scale of products and the norm of
    the residual, the basis, and H."""

    carry: tuple[Array, ...]
    buffers: tuple[Inexact[Array, "s n"], Inexact[Array, "s s"]]
    norm: Real[Array, ""]


def arnoldi_start(start: Inexact[Array, " n"], most: int) -> ArnoldiState:
    """Before the first of at most `most` steps."""
    vector, norm = unit(start)
    zero = jnp.zeros_like(norm)
    basis = jnp.zeros_like(start, shape=(most, start.shape[0]))
    matrix = jnp.zeros_like(start, shape=(most, most))
    return ArnoldiState((vector, zero, zero), (basis, matrix), norm)


def arnoldi_advance(
    mv: Callable[[Array], Array],
    state: ArnoldiState,
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    *,
    eps: float,
) -> ArnoldiState:
    """Steps from number `first` on, before number `last`, with one product each. `eps` is
    the machine epsilon of the products. Steps after a breakdown multiply A by 0. Arnoldi,
    Quarterly of Applied Mathematics 9, 1951; Gram-Schmidt is done twice, which is enough
    (Giraud, Langou, Rozloznik and van den Eshof, Numerische Mathematik 101, 2005)."""

    def step(j, state):
        (vector, scale, _), (basis, matrix) = state
        basis = basis.at[j].set(vector)
        rest = mv(vector)
        scale = jnp.maximum(scale, unit(rest)[1])
        column = jnp.zeros_like(vector, shape=len(basis))
        for _ in range(2):
            coefficients = jnp.matmul(basis.conj(), rest, precision="highest")
            rest = rest - jnp.matmul(coefficients, basis, precision="highest")
            column = column + coefficients
        following, norm = unit(rest)
        alive = ~(norm <= eps * scale)
        following = jnp.where(alive, following, 0)
        norm = jnp.where(alive, norm, 0)
        # Where there is no further row, that entry is the residual.
        column = column.at[j + 1].set(norm.astype(column.dtype), mode="drop")
        return (following, scale, norm), (basis, matrix.at[:, j].set(column))

    part = (state.carry, state.buffers)
    carry, buffers = jax.lax.fori_loop(first, last, step, part)
    return ArnoldiState(carry, buffers, state.norm)


def arnoldi_run(state: ArnoldiState, steps: Int[Array, ""] | int) -> ArnoldiDecomposition:
    """What `steps` steps have found, all that were made."""
    (_, _, residual), (basis, matrix) = state.carry, state.buffers
    made = jnp.arange(len(matrix)) < steps
    matrix = jnp.where(made[:, None], matrix, 0)
    return ArnoldiDecomposition(matrix, residual, basis, state.norm, steps - 1)
