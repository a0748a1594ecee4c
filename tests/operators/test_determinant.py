"""Products of rectangular operators, whose diagonals do not tell the determinant."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx


SPACES = [jax.ShapeDtypeStruct((n,), np.float64) for n in (5, 3)]
CUT = lx.IdentityLinearOperator(*SPACES)
TALL = np.tril(np.arange(1.0, 16.0).reshape(5, 3))
LOWER = lx.MatrixLinearOperator(TALL, lx.lower_triangular_tag)
SQUARE = np.tril(np.arange(1.0, 26.0).reshape(5, 5))
PRODUCTS = {
    "gram": LOWER.T @ LOWER,
    "singular": LOWER @ LOWER.T,
    "block": CUT @ lx.MatrixLinearOperator(SQUARE, lx.lower_triangular_tag) @ CUT.T,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_rectangular_operators(name):
    """The log-determinant is that of products with unit vectors."""
    operator = PRODUCTS[name]
    n = operator.in_size()

    @jax.jit
    def run():
        matrix = jax.vmap(operator.mv, out_axes=1)(jnp.eye(n))
        return matrix, tx.logdet(operator, k=n, throw=False)

    matrix, logdet = run()
    if np.linalg.matrix_rank(matrix) < n:
        assert logdet.result == tx.RESULTS.zero_determinant
        return
    expected = np.linalg.slogdet(matrix)[1]
    np.testing.assert_allclose(logdet.value, expected, rtol=1e-10)
