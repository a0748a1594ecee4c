from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.gram_schmidt import dot, orthogonalise, put_row, unit


# Basis vectors are kept in buffers of at most this many, of which a step reads those that
# are in use: little more than the vectors that there are.
_BUFFER = 32


class LanczosDecomposition(eqx.Module):
    """`A V = V T + r e_s*` with the tridiagonal `T = V* A V`.

    - `alpha`: diagonal of T.
    - `beta`: its off-diagonal, `beta[j]` between steps j and j + 1, and last the norm of
        the residual r. After a breakdown (an invariant subspace) it is 0, rows of the
        basis are 0 and `alpha` repeats its first entry, which is in A's numerical range.
        So it is too after the last of fewer steps than there is room for.
    - `projected`: what `beta` is but for rounding errors of the products, measured from
        the other side: `v_j* A v_(j+1)`, where `beta[j]` is from `A v_j`; last 0.
    - `neglected`: the norm of the residual that counted as zero at a breakdown.
    - `basis`: the columns of V, as rows.
    - `norm`: of the start vector, which is `norm * V e_1`.
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
    """A run that may go on: the next basis vector, what the recurrence needs of the steps
    before, and the basis and the entries of T that there are."""

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
    """`num_steps` steps of Lanczos for a Hermitian A, with one product each.

    **Arguments:**

    - `mv`: A as a function of vectors, shape `(n,)` to `(n,)`.
    - `start`: the vector that the Krylov space is made from.
    - `num_steps`: s, a Python integer.
    - `window`: how many of the last basis vectors each new one is orthogonalised against,
        beyond the three-term recurrence: all for None, none for 0.
    - `eps`: the machine epsilon of the products.

    **Returns:**

    The fields `alpha` and `beta` of the tridiagonal matrix, shape `(s,)`, the `basis`,
    shape `(s, n)`, and the `norm` of `start`. Steps after a
    breakdown multiply A by 0.

    Algorithm 6.15 of Saad, Iterative Methods for Sparse Linear Systems, 2003, with
    Gram-Schmidt repeated while there is cancellation (Daniel, Gragg, Kaufman, Stewart,
    Math. Comp. 30, 1976).
    """
    state = lanczos_start(start, num_steps, window=window)
    state = lanczos_advance(mv, state, 0, num_steps, window=window, eps=eps)
    return lanczos_run(state, num_steps)


def lanczos_start(
    start: Inexact[Array, " n"], most: int, *, window: int | None = None
) -> LanczosState:
    """Before the first of at most `most` steps."""
    vector, norm = unit(start)
    zero = jnp.zeros_like(norm)
    num_buffers = -(-most // _BUFFER) if window is None else 1
    sizes = [most // num_buffers + (i < most % num_buffers) for i in range(num_buffers)]
    return LanczosState(
        # No part of a vector before the first one is taken off, whatever it is.
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
    """Steps from number `first` on, before number `last`."""
    dtype = state.carry[0].dtype

    def step(j, state):
        (vector, previous, before, scale), buffers, entries = state
        buffers = put_row(buffers, vector, j)
        product = mv(vector)
        form = dot(vector, product).real
        projected = dot(previous, product).real
        rest = product - form.astype(dtype) * vector
        rest = rest - before.astype(dtype) * previous
        scale = jnp.maximum(scale, jnp.maximum(jnp.abs(form), before))
        near = vector, previous
        following, residual = orthogonalise(rest, buffers, j, window, near)
        alive = ~(residual <= eps * scale)
        following = jnp.where(alive, following, 0)
        beta = jnp.where(alive, residual, 0)
        neglected = jnp.where(alive, 0, residual)
        # After a breakdown all of them are 0.
        form = jnp.where((j > 0) & (before == 0), entries[0, 0], form)
        found = jnp.stack([form, beta, projected, neglected])
        row = jnp.stack([j, j, j - 1, j])
        entries = jnp.where(jnp.arange(len(entries))[:, None] == row, found, entries)
        return (following, vector, beta, scale), buffers, entries

    part = state.carry, state.buffers, state.entries
    carry, buffers, entries = jax.lax.fori_loop(first, last, step, part)
    return LanczosState(carry, buffers, entries, state.norm)


def lanczos_run(state: LanczosState, steps: Int[Array, ""] | int) -> LanczosDecomposition:
    """What `steps` steps have found, all that were made."""
    alpha, beta, projected, neglected = state.entries.T
    last = steps - 1
    alpha = jnp.where(jnp.arange(len(alpha)) <= last, alpha, alpha[0])
    beta, basis = cut(beta, last), jnp.concatenate(state.buffers)
    neglected = jnp.max(neglected)
    return LanczosDecomposition(
        alpha, beta, projected, neglected, basis, state.norm, last
    )


def cut(couplings: Real[Array, " s"], last: Int[Array, ""] | int) -> Real[Array, " s"]:
    """The couplings of each step with the next one, that of the last step, the norm of
    the residual, at the end."""
    index = jnp.arange(len(couplings))
    at_end = jnp.where(index == len(couplings) - 1, couplings[last], 0)
    return jnp.where(index < last, couplings, at_end)
