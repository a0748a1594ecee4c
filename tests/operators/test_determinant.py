"""Products of rectangular operators, whose diagonals do not tell the determinant, and
errors of functions that make operators."""

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


# --- what may go wrong ---

POINT, KEY = np.ones(3), jax.random.key(0)
BATCHES = np.ones((2, 4, 3))
EYE = lx.MatrixLinearOperator(np.eye(3))


def loss(w, batch):
    return jnp.sum((batch @ w) ** 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda **settings: tx.hessian(jnp.sum, POINT, **settings),
        lambda **settings: tx.ggn(jnp.sin, jnp.sum, POINT, **settings),
        lambda **settings: tx.empirical_fisher(jnp.sin, POINT, **settings),
    ],
)
def test_at_once_needs_batches(make):
    with pytest.raises(ValueError, match=r"`at_once` is how.*=2 without `batches`"):
        make(at_once=2)
    make(at_once=1)


def test_lists_of_batches():
    """A list of alike elements is refused, but not one of the parts of a batch."""
    message = r"`batches` must be.* in a list of batches"
    for batches in ([(x, np.ones(4)) for x in BATCHES], list(BATCHES)):
        with pytest.raises(ValueError, match=message):
            tx.hessian(lambda w, batch: loss(w, batch[0]), POINT, batches)
    weights = {"weight": np.ones(2)}
    parts = lambda w, batch: batch[1]["weight"] * loss(w, batch[0])  # noqa: E731
    operator = tx.hessian(parts, POINT, [BATCHES, weights])
    np.testing.assert_allclose(operator.mv(POINT), 24 * POINT)


def test_outputs_that_are_no_floating_point_numbers():
    rounded = lambda x: (jnp.sin(x), jnp.round(x).astype(np.int32))  # noqa: E731
    message = r"must return an array.*Found leaves of \[.*'int32'\]"
    with pytest.raises(TypeError, match=f"`f` {message}"):
        tx.jacobian_gram(rounded, POINT)
    with pytest.raises(TypeError, match=f"`model` {message}"):
        tx.ggn(rounded, lambda y: jnp.sum(y[0] ** 2), POINT)
    with pytest.raises(TypeError, match=f"`model` {message}"):
        tx.ggn(lambda x, b: rounded(x), lambda y, b: jnp.sum(y[0]), POINT, BATCHES)


@pytest.mark.parametrize("wrong", [np.eye(3), CUT])
def test_names_of_operators(wrong):
    settings = {"k": 2, "key": KEY}
    with pytest.raises((TypeError, ValueError), match=r"^`other` must be"):
        tx.trace_difference(EYE, wrong, tx.Exp(), num_steps=2, **settings)
    with pytest.raises((TypeError, ValueError), match=r"^`operators\[1\]` must be"):
        tx.frobenius_products([EYE, wrong], **settings)
