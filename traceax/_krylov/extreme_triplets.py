"""The largest singular values of a tall A, by block Golub-Kahan bidiagonalisation with
thick restarts (`thick_restart.py`).

With orthonormal bases V and W, and a next block V_next, step by step

    V <- [V, V_next],   R = A V_next - W H = W_next C,   H = W* A V_next,
    W <- [W, W_next],   S = A* W_next - V V* A* W_next = V_next' B,

H above C is the last block of columns of `T = W* A V`, and

    A V = W T,    A* W = V T* + V_next B E*.

For a singular triplet (x, sigma, y) of T the vectors W x and V y have the residuals 0 and
V_next B E* x. Neither A* A nor A A* is formed, so that rounding errors are relative to
the largest singular value and not to its square.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import qr, svd
from .extreme_eigenpairs import ExtremePairs
from .thick_restart import (
    column_norms,
    last_rows,
    next_block,
    project_out,
    put_columns,
    RestartedState,
    Ritz,
    run,
    Sizes,
    start,
    with_sentinels,
)


_Matmat = Callable[[Array], Array]
_Draw = Callable[[Int[Array, ""] | int], Inexact[Array, "n b"]]


def extreme_triplets(
    matmat: _Matmat,
    adjoint_matmat: _Matmat,
    draw: _Draw,
    draw_left: _Draw,
    sizes: Sizes,
    *,
    tolerance: Real[Array, ""],
    max_matvecs: int,
    eps: float,
) -> ExtremePairs:
    """The `num` largest singular values with left and right vectors.

    **Arguments:**

    - `matmat`, `adjoint_matmat`: A and A* as functions of several vectors, as columns.
    - `draw`, `draw_left`: random vectors that A and A* are applied to.
    - `sizes`, `tolerance`, `max_matvecs`, `eps`: as for `extreme_eigenpairs`.
    """

    def advance(state):
        left, right = state.bases
        right = put_columns(right, state.block, state.made)
        residual, above = project_out(left, matmat(state.block))
        scale = jnp.maximum(jnp.max(jnp.abs(state.matrix)), jnp.max(jnp.abs(above)))
        draws = state.step + 1
        left_block, diagonal = next_block(
            residual, left, lambda: draw_left(draws), eps=eps, scale=scale
        )
        left = put_columns(left, left_block, state.made)
        matrix = put_columns(state.matrix, above, state.made)
        at = state.made, state.made
        matrix = jax.lax.dynamic_update_slice(matrix, diagonal, at)
        residual, _ = project_out(right, adjoint_matmat(left_block))
        block, coupling = next_block(
            residual,
            right,
            lambda: draw(draws),
            eps=eps,
            scale=jnp.max(jnp.abs(matrix)),
        )
        made, step = state.made + sizes.block, state.step + 1
        return RestartedState((left, right), matrix, block, coupling, made, step)

    lengths = len(draw_left(0)), len(first := draw(0))
    state, ritz = run(
        start(first, lengths, sizes),
        advance=advance,
        read=_read,
        sizes=sizes,
        tolerance=tolerance,
        max_vectors=max_matvecs // 2 - sizes.num,
    )
    basis, _ = qr(state.bases[1] @ ritz.vectors[1][:, : sizes.num])
    images = matmat(basis)
    left, values, right = _decompose(images)
    back = adjoint_matmat(left)
    errors = images @ right - left * values, back - basis @ right * values
    return ExtremePairs(
        values=values,
        vectors=(left, basis @ right),
        residuals=column_norms(jnp.concatenate(errors)),
        others=jnp.where(ritz.exists, ritz.values, jnp.inf)[sizes.num :],
        scale=ritz.scale,
        num_matvecs=2 * (state.step * sizes.block + sizes.num),
    )


def _decompose(x: Inexact[Array, "n m"]) -> tuple[Array, Array, Array]:
    """`U`, `s` and `V` of a tall `x = U diag(s) V*`."""
    q, r = qr(x)
    u, values, vh = svd(r)
    return q @ u, values, vh.conj().T


def _read(state: RestartedState) -> Ritz:
    most = len(state.matrix)
    matrix, unit = with_sentinels(state.matrix, state.made)
    left, values, right = svd(matrix)
    # Sentinels are the largest: they go to the end.
    order = (jnp.arange(most) - state.made) % most
    exists = jnp.arange(most) < state.made
    values, vectors = unit * values[order], (left[:, order], right.conj().T[:, order])
    return Ritz(
        values=values,
        vectors=vectors,
        residuals=column_norms(state.coupling @ last_rows(vectors[0], state)),
        exists=exists,
        scale=jnp.max(jnp.where(exists, values, 0)),
    )


def all_triplets(matmat: _Matmat, like: Inexact[Array, "n b"], num: int) -> ExtremePairs:
    """The same from n matvecs and a dense factorisation. `like` has the length and the
    dtype of the vectors that A is applied to."""
    matrix = matmat(jnp.eye(len(like), dtype=like.dtype))
    left, values, right = _decompose(matrix)
    chosen, others = values[:num], values[num:]
    left, right = left[:, :num], right[:, :num]
    errors = matrix @ right - left * chosen, matrix.conj().T @ left - right * chosen
    return ExtremePairs(
        values=chosen,
        vectors=(left, right),
        residuals=column_norms(jnp.concatenate(errors)),
        others=others,
        scale=values[0],
        num_matvecs=len(like),
    )
