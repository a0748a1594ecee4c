"""Gauss and Gauss-Radau quadrature from the recurrence that a Lanczos run finds.

Golub and Meurant, Matrices, Moments and Quadrature with Applications, 2010, chapters 6
and 7. A tridiagonal T stands for the measure whose orthonormal polynomials have its
entries as coefficients; its eigenvalues are nodes, and the squared first entries of its
eigenvectors weights.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Real

from .dense import eigh


def ritz(
    alpha: Real[Array, " s"], beta: Real[Array, " s"]
) -> tuple[Real[Array, " s"], Real[Array, "s s"]]:
    """Ritz values, ascending, and eigenvectors of T; the last of `beta` is outside."""
    return eigh(jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1))


def radau(
    alpha: Real[Array, " s"], beta: Real[Array, " s"], end: Real[Array, ""]
) -> tuple[Real[Array, " p"], Real[Array, " p"]]:
    """The recurrence of one node more, that node being `end`, at or below the spectrum
    (Golub, SIAM Review 15, 1973, 318-334)."""

    def eliminate(pivot, entry):
        # Pivots of T - end I, positive as long as `end` is below the Ritz values.
        alpha, beta = entry
        return jnp.maximum(alpha - end - beta * (beta / pivot), floor), None

    floor = jnp.finfo(alpha.dtype).eps * jnp.max(jnp.abs(alpha) + beta)
    floor = jnp.where(floor > 0, floor, 1)
    start = jnp.maximum(alpha[0] - end, floor)
    pivot, _ = jax.lax.scan(eliminate, start, (alpha[1:], beta[:-1]))
    last = end + beta[-1] * (beta[-1] / pivot)
    return jnp.append(alpha, last), jnp.append(beta, 0)


def apply_to_first(
    nodes: Real[Array, " s"], vectors: Real[Array, "s s"], values: Real[Array, " s"]
) -> Real[Array, " s"]:
    """`g(T) e_1` from the values of g at the nodes."""
    return jnp.matmul(vectors, values * vectors[0], precision="highest")
