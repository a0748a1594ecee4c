"""Keys and numbers that users give."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N, KEY = 40, jr.key(20261125)
MATRIX = hermitian(0, np.linspace(1.0, 4.0, N)).astype(np.float32)
OPERATOR = lx.MatrixLinearOperator(jnp.asarray(MATRIX), PSD)
HUTCHINSON = tx.HutchinsonEstimator()


@pytest.mark.parametrize("size", [1, 3])
def test_words_that_are_no_key(size):
    with pytest.raises(TypeError, match="`key` must be one JAX PRNG key"):
        tx.trace(OPERATOR, HUTCHINSON, k=4, key=jnp.zeros(size, np.uint32))


def test_raw_keys_where_new_ones_are_the_default():
    raw = jnp.array([0, 1], np.uint32)
    with jax.enable_custom_prng(), pytest.warns(FutureWarning, match="Raw arrays"):
        inside = tx.trace(OPERATOR, HUTCHINSON, k=4, key=raw)
    assert inside.value == tx.trace(OPERATOR, HUTCHINSON, k=4, key=raw).value


@pytest.mark.parametrize(
    "make",
    [
        lambda: tx.Exp(np.nan),
        lambda: tx.SLQEstimator(lower_bound=np.nan),
        lambda: tx.Adaptive(rtol=np.nan, max_k=8),
    ],
)
def test_parameters_that_are_no_numbers(make):
    with pytest.raises(ValueError, match="nan"):
        make()


def test_raw_keys_of_another_generator():
    with jax.default_prng_impl("rbg"):
        key = jr.PRNGKey(0)
        assert key.shape == (4,)
        assert np.isfinite(tx.trace(OPERATOR, HUTCHINSON, k=4, key=key).value)
