"""The one door to dense factorisations.

A batched LAPACK call inside one XLA:CPU program can deadlock (see "JAX versions" in the
developer documentation). So, on CPU, `vmap` of a factorisation is a loop over single
calls; on other platforms it is the batched call. Factorisations are never differentiated.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real


def _door(factorise: Callable[[Array], tuple[Array, ...]]):
    one_at_a_time = jax.custom_batching.sequential_vmap(factorise)

    @ft.wraps(factorise)
    def call(x):
        return jax.lax.platform_dependent(x, cpu=one_at_a_time, default=factorise)

    return call


@_door
def qr(x: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n p"], Inexact[Array, "p m"]]:
    """Householder QR, reduced: `Q` has orthonormal columns whatever the rank of `x`."""
    q, r = jnp.linalg.qr(x)
    return q, r


@_door
def eigh(x: Inexact[Array, "m m"]) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """Eigenvalues, ascending, and eigenvectors of a Hermitian matrix."""
    values, vectors = jnp.linalg.eigh(x)
    return values, vectors


@_door
def svd(
    x: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n p"], Real[Array, " p"], Inexact[Array, "p m"]]:
    """Reduced singular value decomposition; singular values descend."""
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return u, s, vh


def thin_svd(
    x: Inexact[Array, "n m"], cutoff: float, scale: Real[Array, ""] | float = 0.0
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """`x = Q diag(s) Vh`, by QR; singular values below `cutoff * max(s, scale)` become 0,
    and so do their columns of `Q`."""
    q, r = qr(x)
    u, s, vh = svd(r)
    s = jnp.where(s > cutoff * jnp.maximum(s[0], scale), s, 0)
    return (q @ u) * (s > 0), s, vh


def thin_svd_gram(
    x: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """`thin_svd` from the eigenvalues of `x* x`: several times faster, and accurate only
    for columns that are well conditioned or exactly dependent."""
    values, vectors = eigh(x.conj().T @ x)
    cutoff = x.shape[1] * jnp.finfo(x.dtype).eps * values[-1]
    s = jnp.sqrt(jnp.where(values > cutoff, values, 0))
    q = x @ (vectors * jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0))
    return q, s, vectors.conj().T


def normalise(x: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n m"], Real[Array, ""]]:
    """`x / c` and `c`, with `c` the largest modulus in `x`, or 1 for a zero `x`."""
    largest = jnp.max(jnp.abs(x))
    scale = jnp.where(largest > 0, largest, 1)
    return x / scale, scale
