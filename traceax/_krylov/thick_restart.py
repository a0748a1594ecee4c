"""Krylov spaces that are restarted, for a few eigenvalues or singular values.

A basis of at most `most` vectors grows by blocks of b. When it is full, the `kept` best
Ritz vectors take its place, and it grows on from the same next block (Wu and Simon 2000,
section 2, for eigenvalues; Baglama and Reichel 2005, section 3, for singular values). All
coefficients are computed by Gram-Schmidt against the whole basis, so that a step after a
restart is the same as any other one (Stewart's Krylov-Schur form, SIAM J. Matrix Anal.
Appl. 23, 2001).

Blocks find eigenvalues of a multiplicity of up to b. One vector alone would see a
multiple eigenvalue once, but for rounding. Where a Krylov space is exhausted, as that of
the identity is after one step, random directions take the place of the missing ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._numerics.dense import normalise, qr, rank_revealing_qr


# The basis grows by this many vectors between two looks at the Ritz values.
_GROWTH = 8
# A basis of twice as many vectors as pairs, and this many more. With 24 fewer, blocks of
# two took 1.5 to 2 times the matvecs on the spectra that were tried.
_EXTRA = 24
_SMALLEST_BASIS = 40
# The share of the unwanted vectors that a restart keeps. Between 0.3 and 0.7 the number
# of matvecs hardly changes.
_KEPT_SHARE = 0.4
# As for block Lanczos: a direction of which less than this share is left was rounding.
_MIN_LENGTH_LEFT = 0.5


class Sizes(NamedTuple):
    """The sizes of a run for `num` pairs: the number of vectors in a block, in a full
    basis, and in a basis after a restart."""

    num: int
    block: int
    most: int
    kept: int

    @classmethod
    def of(cls, num: int) -> "Sizes":
        # A largest eigenvalue by itself is right whatever its multiplicity.
        block = 1 if num == 1 else 2
        most = _rounded_up(max(2 * num + _EXTRA, _SMALLEST_BASIS))
        kept = _rounded_up(num + _KEPT_SHARE * (most - num) - _GROWTH / 2)
        return cls(num=num, block=block, most=most, kept=kept)

    @property
    def growth(self) -> int:
        """The number of vectors between two looks at the Ritz values."""
        return _GROWTH

    @property
    def least(self) -> int:
        """The number of vectors at the first look that finds `num` pairs."""
        return _rounded_up(self.num)

    def fills(self, n: int) -> bool:
        """Whether a full basis and a next block have no room in `n` dimensions."""
        return n < self.most + self.block


def _rounded_up(number: float) -> int:
    return -int(-number // _GROWTH) * _GROWTH


class Ritz(eqx.Module):
    """What a basis says of the operator, the wanted pairs first.

    - `values`: the Ritz values, shape `(most,)`.
    - `vectors`: for each basis the coefficients of the Ritz vectors, as columns.
    - `residuals`: the norms of the residuals in exact arithmetic.
    - `exists`: False for values beyond the size of the basis.
    - `scale`: the largest modulus of a Ritz value.
    """

    values: Real[Array, " m"]
    vectors: tuple[Inexact[Array, "m m"], ...]
    residuals: Real[Array, " m"]
    exists: Bool[Array, " m"]
    scale: Real[Array, ""]


class RestartedState(eqx.Module):
    """A run: `A V = W T` and `A* W = V T* + block coupling E*`, where for a Hermitian A
    the bases W and V are one. `made` is their number of columns, of which those beyond
    are zero. `step` counts the steps."""

    bases: tuple[Inexact[Array, "_ m"], ...]
    matrix: Inexact[Array, "m m"]
    block: Inexact[Array, "n b"]
    coupling: Inexact[Array, "b b"]
    made: Int[Array, ""]
    step: Int[Array, ""]


def start(
    block: Inexact[Array, "n b"], lengths: tuple[int, ...], sizes: Sizes
) -> RestartedState:
    """A run before its first step, from random vectors, as columns."""
    zeros = lambda *shape: jnp.zeros_like(block, shape=shape)  # noqa: E731
    return RestartedState(
        bases=tuple(zeros(n, sizes.most) for n in lengths),
        matrix=zeros(sizes.most, sizes.most),
        block=qr(block)[0],
        coupling=zeros(sizes.block, sizes.block),
        made=jnp.zeros((), int),
        step=jnp.zeros((), int),
    )


def run(
    state: RestartedState,
    *,
    advance: Callable[[RestartedState], RestartedState],
    read: Callable[[RestartedState], Ritz],
    sizes: Sizes,
    tolerance: Real[Array, ""],
    max_vectors: int,
) -> tuple[RestartedState, Ritz]:
    """Make steps until the residuals of the wanted pairs are at most `tolerance` times
    the largest Ritz value, or until one more look would take more than `max_vectors`.
    `advance` makes one step, and `read` looks at the Ritz values."""
    most_steps = max_vectors // sizes.growth * (sizes.growth // sizes.block)

    def unfinished(carry):
        state, ritz = carry
        wanted = slice(sizes.num)
        small = ritz.residuals[wanted] <= tolerance * ritz.scale
        done = jnp.all(small & ritz.exists[wanted])
        return ~done & jnp.isfinite(ritz.scale) & (state.step < most_steps)

    def grow(carry):
        state, ritz = carry
        state = jax.lax.cond(
            state.made == sizes.most, lambda: _restart(state, ritz, sizes), lambda: state
        )
        steps = sizes.growth // sizes.block
        state = jax.lax.fori_loop(0, steps, lambda _, state: advance(state), state)
        return state, read(state)

    # Only zeros of the right shapes: nothing exists yet.
    nothing = jax.tree.map(
        lambda x: jnp.zeros_like(state.matrix, shape=x.shape, dtype=x.dtype),
        jax.eval_shape(read, state),
    )
    return jax.lax.while_loop(unfinished, grow, (state, nothing))


def _restart(state: RestartedState, ritz: Ritz, sizes: Sizes) -> RestartedState:
    kept = jnp.arange(sizes.most) < sizes.kept
    bases = tuple(
        basis @ (vectors * kept)
        for basis, vectors in zip(state.bases, ritz.vectors, strict=True)
    )
    values = jnp.where(kept, ritz.values, 0).astype(state.matrix.dtype)
    return RestartedState(
        bases=bases,
        matrix=jnp.diag(values),
        block=state.block,
        coupling=state.coupling,
        made=jnp.full_like(state.made, sizes.kept),
        step=state.step,
    )


def put_columns(
    x: Inexact[Array, "n m"], columns: Inexact[Array, "n b"], at: Int[Array, ""]
) -> Inexact[Array, "n m"]:
    """`x` with other columns from number `at` on."""
    return jax.lax.dynamic_update_slice_in_dim(x, columns, at, axis=1)


def last_rows(
    vectors: Inexact[Array, "m m"], state: RestartedState
) -> Inexact[Array, "b m"]:
    """`E* Y`: the rows that belong to the last block of the basis."""
    size = len(state.coupling)
    return jax.lax.dynamic_slice_in_dim(vectors, state.made - size, size)


def project_out(
    basis: Inexact[Array, "n m"], x: Inexact[Array, "n b"]
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "m b"]]:
    """`x` without its components in the basis, by two passes of Gram-Schmidt, and these
    components."""
    first = basis.conj().T @ x
    x = x - basis @ first
    second = basis.conj().T @ x
    return x - basis @ second, first + second


def next_block(
    residual: Inexact[Array, "n b"],
    basis: Inexact[Array, "n m"],
    draw: Callable[[], Inexact[Array, "n b"]],
    *,
    eps: float,
    scale: Real[Array, ""],
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "b b"]]:
    """`residual = block coupling`, with an orthonormal block, orthogonal to the basis.
    Directions of the residual below `eps` times `scale` are rounding. Random ones, from
    `draw`, take their place, and have no coupling."""
    block, coupling = rank_revealing_qr(residual, eps, scale)
    # Weak directions were scaled up, with their components in the basis.
    block, rotation = rank_revealing_qr(
        project_out(basis, block)[0], _MIN_LENGTH_LEFT, scale=1.0
    )
    missing = ~jnp.any(block != 0, axis=0)

    def complete():
        random, _ = qr(project_out(basis, draw())[0])
        # The length that is left may be small, and be mostly rounding.
        random, _ = project_out(basis, random)
        random, _ = project_out(block, random)
        return jnp.where(missing, qr(random)[0], block)

    block = jax.lax.cond(jnp.any(missing), complete, lambda: block)
    return block, rotation @ coupling


def with_sentinels(
    matrix: Inexact[Array, "m m"], made: Int[Array, ""]
) -> tuple[Inexact[Array, "m m"], Real[Array, ""]]:
    """The matrix in units of its largest entry, and this unit. Beyond the first `made`
    rows its diagonal is above all eigenvalues and singular values of the rest, so that
    those that do not exist come last in ascending order."""
    unit = jnp.max(jnp.abs(matrix))
    matrix, _ = normalise(matrix)
    bound = 1 + 2 * jnp.max(jnp.sum(jnp.abs(matrix), axis=0))
    beyond = jnp.arange(len(matrix)) >= made
    return matrix + jnp.diag(jnp.where(beyond, bound, 0).astype(matrix.dtype)), unit


def column_norms(x: Inexact[Array, "n m"]) -> Real[Array, " m"]:
    """The norm of each column. Squares of entries do not overflow."""
    x, unit = normalise(x)
    return unit * jnp.sqrt(jnp.sum(jnp.abs(x) ** 2, axis=0))
