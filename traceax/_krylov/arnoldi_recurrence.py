"""The Arnoldi recurrence for any square A.

From `q_1 = z / ||z||`, step j makes one matvec and one new basis vector,

    h_ij = q_i* A q_j  for i <= j                       (`column`)
    r = A q_j - sum_i h_ij q_i                          (`residual`)
    h_(j+1)j = ||r||,   q_(j+1) = r / h_(j+1)j          (`norm`, `following`)

so that after s steps `A Q = Q H + r e_s*` with `H = Q* A Q` upper Hessenberg. Arnoldi,
Quarterly of Applied Mathematics 9, 1951. Gram-Schmidt is done twice, which is enough
(Giraud, Langou, Rozloznik and van den Eshof, Numerische Mathematik 101, 2005).
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import unit


class ArnoldiDecomposition(eqx.Module):
    """`A Q = Q H + r e_s*` with `H = Q* A Q` upper Hessenberg, for any square A.

    - `matrix`: H. After a breakdown (an invariant subspace) its columns are 0. Entries
        beyond `last` are filled likewise.
    - `residual`: the norm of r, 0 after a breakdown.
    - `basis`: the columns of Q, as rows; zero after a breakdown.
    - `norm`: the norm of the start vector, which is `norm * Q e_1`.
    - `last`: the index of the last column of Q.
    """

    matrix: Inexact[Array, "s s"]
    residual: Real[Array, ""]
    basis: Inexact[Array, "s n"]
    norm: Real[Array, ""]
    last: Int[Array, ""] | int


class ArnoldiState(eqx.Module):
    """A run that can be continued.

    - `carry`: q_j, the largest norm of a matvec so far, and the norm of the residual.
    - `buffers`: the basis vectors so far, as rows, and H.
    - `norm`: the norm of the start vector.
    """

    carry: tuple[Array, ...]
    buffers: tuple[Inexact[Array, "s n"], Inexact[Array, "s s"]]
    norm: Real[Array, ""]


def arnoldi_start(start: Inexact[Array, " n"], most: int) -> ArnoldiState:
    """A run of at most `most` steps, before its first step."""
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
    """The run after the steps from number `first` on, before number `last`, with one
    matvec each. `eps` is the machine epsilon of the matvecs. Steps after a breakdown
    multiply A by 0."""

    def step(j, state):
        (vector, scale, _), (basis, matrix) = state
        basis = basis.at[j].set(vector)
        residual = mv(vector)
        scale = jnp.maximum(scale, unit(residual)[1])
        column = jnp.zeros_like(vector, shape=len(basis))
        # One pass leaves components along the basis where it cancels most of the vector.
        for _ in range(2):
            coefficients = jnp.matmul(basis.conj(), residual, precision="highest")
            residual = residual - jnp.matmul(coefficients, basis, precision="highest")
            column = column + coefficients
        following, norm = unit(residual)
        # The direction of a residual at rounding level is random: going on with it would
        # break the relation above, so the run continues with zeros.
        alive = ~(norm <= eps * scale)
        following = jnp.where(alive, following, 0)
        norm = jnp.where(alive, norm, 0)
        # In the last column there is no such row: the entry is the residual.
        column = column.at[j + 1].set(norm.astype(column.dtype), mode="drop")
        return (following, scale, norm), (basis, matrix.at[:, j].set(column))

    carry, buffers = jax.lax.fori_loop(first, last, step, (state.carry, state.buffers))
    return ArnoldiState(carry, buffers, state.norm)


def arnoldi_run(state: ArnoldiState, steps: Int[Array, ""] | int) -> ArnoldiDecomposition:
    """The decomposition after `steps` steps, which is how many the run has made."""
    (_, _, residual), (basis, matrix) = state.carry, state.buffers
    # With fewer steps than columns, the norm of the residual is in row `steps` of H, and
    # is no entry of `Q* A Q`.
    is_step = jnp.arange(len(matrix)) < steps
    matrix = jnp.where(is_step[:, None], matrix, 0)
    return ArnoldiDecomposition(
        matrix=matrix,
        residual=residual,
        basis=basis,
        norm=state.norm,
        last=steps - 1,
    )
