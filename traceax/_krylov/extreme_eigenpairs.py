"""Eigenvalues at the ends of the spectrum of a Hermitian A, by block Lanczos with thick
restarts (`thick_restart.py`).

With an orthonormal basis V and a next block V_next, step by step

    V <- [V, V_next],   H = V* A V_next,   R = A V_next - V H = V_next' B,

H is the last block of columns of `T = V* A V`, and `A V = V T + V_next B E*`. For an
eigenpair (theta, y) of T the Ritz vector V y has a residual of norm |B E* y|.

The pairs that are returned come from a last Rayleigh-Ritz step in the space of the wanted
vectors, whose residuals are computed from their images under A.
"""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import eigh, qr
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


Which = Literal["largest", "smallest", "both"]
_Matmat = Callable[[Array], Array]


class ExtremePairs(eqx.Module):
    """Approximate eigenpairs, or singular values with their vectors.

    - `values`: the wanted values, shape `(num,)`.
    - `vectors`: their vectors as columns, or left and right ones.
    - `residuals`: the norms of their residuals.
    - `others`: further Ritz values, infinite where there are none.
    - `scale`: the largest modulus of a Ritz value.
    - `num_matvecs`: the number of matvecs.
    """

    values: Real[Array, " num"]
    vectors: tuple[Inexact[Array, "_ num"], ...]
    residuals: Real[Array, " num"]
    others: Real[Array, " others"]
    scale: Real[Array, ""]
    num_matvecs: Int[Array, ""] | int


def extreme_eigenpairs(
    matmat: _Matmat,
    draw: Callable[[Int[Array, ""] | int], Inexact[Array, "n b"]],
    sizes: Sizes,
    *,
    which: Which,
    tolerance: Real[Array, ""],
    max_matvecs: int,
    eps: float,
) -> ExtremePairs:
    """`num` extreme eigenvalues with eigenvectors.

    **Arguments:**

    - `matmat`: A as a function of arrays of shape `(n, b)`.
    - `draw`: random vectors, as columns, one block for each number.
    - `sizes`: of the run; `n` must have room for the basis.
    - `which`: the ends of the spectrum.
    - `tolerance`: of residuals, relative to the largest Ritz value.
    - `max_matvecs`: at most so many matvecs, a Python integer.
    - `eps`: the machine epsilon of the matvecs.
    """

    def advance(state):
        (basis,), block = state.bases, state.block
        basis = put_columns(basis, block, state.made)
        residual, form = project_out(basis, matmat(block))
        matrix = put_columns(state.matrix, form, state.made)
        matrix = put_columns(matrix.conj().T, form, state.made)
        block, coupling = next_block(
            residual,
            basis,
            lambda: draw(state.step + 1),
            eps=eps,
            scale=jnp.max(jnp.abs(matrix)),
        )
        made, step = state.made + sizes.block, state.step + 1
        return RestartedState((basis,), matrix, block, coupling, made, step)

    state = start(first := draw(0), (len(first),), sizes)
    state, ritz = run(
        state,
        advance=advance,
        read=lambda state: _read(state, which),
        sizes=sizes,
        tolerance=tolerance,
        max_vectors=max_matvecs - sizes.num,
    )
    basis, _ = qr(state.bases[0] @ ritz.vectors[0][:, : sizes.num])
    images = matmat(basis)
    values, rotation = eigh(_hermitian_part(basis.conj().T @ images))
    if which != "smallest":
        values, rotation = values[::-1], rotation[:, ::-1]
    vectors = basis @ rotation
    return ExtremePairs(
        values=values,
        vectors=(vectors,),
        residuals=column_norms(images @ rotation - vectors * values),
        others=jnp.where(ritz.exists, ritz.values, jnp.inf)[sizes.num :],
        scale=ritz.scale,
        num_matvecs=state.step * sizes.block + sizes.num,
    )


def _read(state: RestartedState, which: Which) -> Ritz:
    matrix, unit = with_sentinels(_hermitian_part(state.matrix), state.made)
    values, vectors = eigh(matrix)
    order = jnp.argsort(_ranks(state.made, len(matrix), which))
    exists = (jnp.arange(len(matrix)) < state.made)[order]
    values, vectors = unit * values[order], vectors[:, order]
    return Ritz(
        values=values,
        vectors=(vectors,),
        residuals=column_norms(state.coupling @ last_rows(vectors, state)),
        exists=exists,
        scale=jnp.max(jnp.where(exists, jnp.abs(values), 0)),
    )


def _ranks(made: Int[Array, ""], most: int, which: Which) -> Int[Array, " m"]:
    """The rank of each of `made` ascending values, 0 for the one most wanted. Those at
    both ends take turns. What does not exist comes last."""
    from_bottom = jnp.arange(most)
    from_top = made - 1 - from_bottom
    ranks = {
        "largest": from_top,
        "smallest": from_bottom,
        "both": jnp.minimum(2 * from_top, 2 * from_bottom + 1),
    }[which]
    return jnp.where(from_bottom < made, ranks, 2 * most + from_bottom)


def all_eigenpairs(
    matmat: _Matmat, like: Inexact[Array, "n b"], num: int, *, which: Which
) -> ExtremePairs:
    """The same from n matvecs and a dense factorisation. `like` has the length and the
    dtype of the vectors."""
    n = len(like)
    matrix = matmat(jnp.eye(n, dtype=like.dtype))
    values, vectors = eigh(_hermitian_part(matrix))
    order = jnp.argsort(_ranks(jnp.asarray(n), n, which))
    # The wanted ones from both ends descend, as elsewhere.
    wanted = jnp.sort(order[:num], descending=which != "smallest")
    chosen, vectors = values[wanted], vectors[:, wanted]
    return ExtremePairs(
        values=chosen,
        vectors=(vectors,),
        residuals=column_norms(matrix @ vectors - vectors * chosen),
        others=values[order[num:]],
        scale=jnp.max(jnp.abs(values)),
        num_matvecs=n,
    )


def _hermitian_part(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    return (matrix + matrix.conj().T) / 2
