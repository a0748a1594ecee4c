"""The quadrature rules by the polynomials that they integrate exactly."""

import jax
import jax.numpy as jnp
import numpy as np

from traceax._numerics.dense import eigh, svd
from traceax._quadrature.tridiagonal import Compression, radau, radau_factor, ritz

from ..krylov.recurrences import golub_kahan_of, lanczos_of, N, normal


rule = jax.jit(ritz)


@jax.jit
def extended_rule(alpha, beta, end):
    matrix = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    coupling, last = beta[-1:, None], len(beta) - 1
    return eigh(radau(Compression(matrix, coupling, last, *eigh(matrix)), end))


@jax.jit
def extended_factor(diagonal, above, end):
    matrix = jnp.diag(diagonal) + jnp.diag(above[:-1], 1)
    border = jnp.zeros_like(above).at[-1].set(above[-1])
    u, s, _ = svd(matrix)
    return radau_factor(matrix, border, u, s, end)


def test_gauss_and_radau_are_exact_for_polynomials():
    """Degree 2 s - 1 for Gauss with s nodes, 2 s for Gauss-Radau with one more; and not
    one degree further."""
    values, start, s = np.linspace(0.5, 2, N), normal(10, (N,)), 4
    run = lanczos_of(np.diag(values), start, s)
    end = jnp.asarray(0.25)
    extended = extended_rule(run.alpha, run.beta, end)
    assert np.allclose(extended[0][0], end, rtol=1e-13)
    for (nodes, vectors), last in (
        (rule(run.alpha, run.beta), 2 * s - 1),
        (extended, 2 * s),
    ):
        for degree in range(last + 2):
            exact = start @ (values**degree * start)
            weights = np.asarray(vectors)[0] ** 2
            found = run.norm**2 * np.sum(weights * np.asarray(nodes) ** degree)
            assert np.allclose(found, exact, rtol=1e-12, atol=0) == (degree <= last)


def test_radau_is_exact_for_even_polynomials_of_singular_values():
    """As that of the squares: of degree 2 s in these, and not one degree further."""
    values, start, s = np.linspace(0.5, 2, N), normal(10, (N,)), 4
    run = golub_kahan_of(np.diag(values), start, s)
    for end in (0.0, 0.25):
        factor = extended_factor(run.diagonal, run.above, jnp.asarray(end))
        _, nodes, vh = np.linalg.svd(factor)
        assert np.allclose(nodes[-1], end, rtol=1e-13, atol=1e-15)
        for degree in range(2 * s + 2):
            exact = start @ (values ** (2 * degree) * start)
            found = run.norm**2 * (vh[:, 0] ** 2 @ nodes ** (2 * degree))
            assert np.allclose(found, exact, rtol=1e-12, atol=0) == (degree <= 2 * s)
