"""Rows of a basis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from traceax._numerics.gram_schmidt import put_row


@pytest.mark.parametrize("sizes", [(7,), (4, 3)])
def test_rows_of_a_batch(sizes):
    """In the same row, which takes no scatter, or in a row each; in buffers that are
    mapped or not."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, sum(sizes), 5))
    new, rank = rng.standard_normal((3, 5)), np.arange(3)
    split = lambda x: tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-2))  # noqa: E731
    put = lambda *args: jnp.concatenate(put_row(*args))  # noqa: E731
    for index in (np.array(5), np.array([0, 3, 6])):
        expected = rows.copy()
        expected[rank, index] = new
        batched = jax.jit(jax.vmap(put, in_axes=(0, 0, 0 if index.ndim else None)))
        np.testing.assert_array_equal(batched(split(rows), new, index), expected)
        scattered = "scatter" in batched.lower(split(rows), new, index).as_text()
        assert scattered == (index.ndim > 0)
    parts = [jnp.asarray(part) for part in split(rows[0])]
    shared = jax.vmap(lambda row: put(tuple(parts), row, 2))(new)
    expected = np.stack([rows[0]] * 3)
    expected[:, 2] = new
    np.testing.assert_array_equal(shared, expected)
