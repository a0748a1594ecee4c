"""Gauss and Gauss-Radau quadrature from the recurrence that a Lanczos run finds.

Golub and Meurant, Matrices, Moments and Quadrature with Applications, 2010, chapters 6
and 7. A tridiagonal T stands for the measure whose orthonormal polynomials have its
entries as coefficients; its eigenvalues are nodes, and the squared first entries of its
eigenvectors weights.
"""

import jax.numpy as jnp
from jaxtyping import Array, Real

from .dense import eigh


def ritz(
    alpha: Real[Array, " s"], beta: Real[Array, " s"]
) -> tuple[Real[Array, " s"], Real[Array, "s s"]]:
    """Ritz values, ascending, and eigenvectors of T; the last of `beta` is outside."""
    return eigh(jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1))


def radau(
    alpha: Real[Array, " s"],
    beta: Real[Array, " s"],
    nodes: Real[Array, " s"],
    last: Real[Array, " s"],
    end: Real[Array, ""],
) -> tuple[Real[Array, " p"], Real[Array, " p"]]:
    """The recurrence of one node more, that node being `end`, at or below the spectrum
    (Golub, SIAM Review 15, 1973, 318-334). `nodes` are the Ritz values, and `last` the
    last entries of their eigenvectors, which solve the linear system that there is."""
    floor = jnp.finfo(alpha.dtype).eps * jnp.max(jnp.abs(alpha) + beta)
    floor = jnp.where(floor > 0, floor, 1)
    inverse = jnp.sum(last * (last / jnp.maximum(nodes - end, floor)))
    entry = end + beta[-1] * (beta[-1] * inverse)
    return jnp.append(alpha, entry), jnp.append(beta, 0)


def neighbours(
    alpha: Real[Array, " s"],
    beta: Real[Array, " s"],
    nodes: Real[Array, " s"],
    last: Real[Array, " s"],
    lower: Real[Array, ""],
    upper: Real[Array, ""] | None,
) -> list[tuple[Real[Array, " p"], Real[Array, " p"]]]:
    """Recurrences of other rules for the same measure, all of one length: Gauss-Radau
    with a node at `lower`, and where `upper` is given one with a node there, and the
    Gauss rule of one step less. A node that does not belong to a rule has no weight."""
    found = [radau(alpha, beta, nodes, last, lower)]
    if upper is not None:
        mirrored, coupling = radau(-alpha, beta, -nodes, last, -upper)
        found.append((-mirrored, coupling))
        if len(alpha) > 1:
            # Decoupled from the others, at the first entry, which is inside the spectrum.
            left_out = jnp.arange(len(alpha) + 1) >= len(alpha) - 1
            shorter = jnp.where(left_out, alpha[0], jnp.append(alpha, alpha[0]))
            coupling = jnp.append(beta[:-2], jnp.zeros_like(beta, shape=(3,)))
            found.append((shorter, coupling))
    return found


def apply_to_first(
    nodes: Real[Array, " s"], vectors: Real[Array, "s s"], values: Real[Array, " s"]
) -> Real[Array, " s"]:
    """`g(T) e_1` from the values of g at the nodes."""
    return jnp.matmul(vectors, values * vectors[0], precision="highest")
