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
