"""Models and batches that are no operator."""

import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx


POINT = np.ones(3)
BATCHES = np.ones((2, 4, 3))


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
def test_chunk_size_needs_batches(make):
    with pytest.raises(ValueError, match=r"`chunk_size` is how.*=2 without `batches`"):
        make(chunk_size=2)
    make(chunk_size=1)


def test_parts_of_stacked_batches():
    """Are a tuple, or any PyTree but a list, which is one of batches."""
    weights = {"weight": np.ones(2)}
    parts = lambda w, batch: batch[1]["weight"] * loss(w, batch[0])  # noqa: E731
    operator = tx.hessian(parts, POINT, (BATCHES, weights))
    np.testing.assert_allclose(operator.mv(POINT), 24 * POINT)
    with pytest.raises(ValueError, match=r"images and labels, as a tuple"):
        tx.hessian(parts, POINT, [BATCHES, weights])


def test_outputs_that_are_no_floating_point_numbers():
    rounded = lambda x: (jnp.sin(x), jnp.round(x).astype(np.int32))  # noqa: E731
    message = r"must return an array.*Found leaves of \[.*'int32'\]"
    with pytest.raises(TypeError, match=f"`fn` {message}"):
        tx.jacobian_gram(rounded, POINT)
    with pytest.raises(TypeError, match=f"`model` {message}"):
        tx.ggn(rounded, lambda y: jnp.sum(y[0] ** 2), POINT)
    with pytest.raises(TypeError, match=f"`model` {message}"):
        tx.ggn(lambda x, b: rounded(x), lambda y, b: jnp.sum(y[0]), POINT, BATCHES)
