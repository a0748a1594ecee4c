"""Settings of adaptive budgets, and budgets that end at once."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free


N, KEY = 40, jr.key(20261125)
MATRIX = hermitian(0, np.linspace(1.0, 4.0, N)).astype(np.float32)
HUTCHINSON = tx.HutchinsonEstimator()


def budget(**settings):
    return tx.Adaptive(**({"rtol": 1e-7, "max_k": 16, "round_size": 8} | settings))


@pytest.mark.parametrize("estimator", [tx.XTraceEstimator(), tx.HutchPlusPlusEstimator()])
def test_operator_smaller_than_the_least_budget(estimator):
    """What is left beside n products is not enough for a single sample."""
    matrix = jnp.asarray(MATRIX[:3, :3])
    k = tx.Adaptive(rtol=0.1, max_k=50, round_size=2)
    found = tx.frobenius_norm(matrix_free(matrix), estimator, k=k, key=KEY)
    np.testing.assert_allclose(found.value, np.linalg.norm(matrix), rtol=1e-6)
    assert found.std_err == 0
    assert found.stats["num_matvecs"] == 3


def test_adaptive_where_transfers_are_forbidden():
    with jax.transfer_guard("disallow"):
        assert tx.Adaptive(rtol=0.1, max_k=30).max_k == 30


def test_infinite_tolerance_of_the_zero_operator():
    zero = matrix_free(jnp.zeros((N, N)))
    k = tx.Adaptive(rtol=np.inf, max_k=32, round_size=8)
    found = tx.trace(zero, HUTCHINSON, k=k, key=KEY)
    assert found.value == found.std_err == 0


def test_no_error_bar_of_an_exact_answer():
    """In small buffers of an estimate that the exact answer has replaced."""
    flat = matrix_free(jnp.asarray(MATRIX))
    found = tx.trace(
        flat, tx.XTraceEstimator(), k=budget(max_k=N + 8), key=KEY, throw=False
    )
    assert found.std_err == 0
    for name in ("std.err", "jackknife_std_err", "independent_std_err"):
        assert found.stats[name] == 0, name


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"progress": "yes"}, TypeError, "`progress` must be True, False or a"),
        ({"progress": eqxi.TextProgressMeter}, TypeError, "`progress` must be"),
        ({"callback": 5}, TypeError, "`callback` must be a function"),
        ({"history": "no"}, TypeError, "`history` must be True or False"),
        ({"confidence": 1 - 1e-16}, ValueError, "`confidence` must be a known number"),
    ],
)
def test_settings_of_adaptive(settings, error, match):
    with pytest.raises(error, match=match):
        budget(**settings)


def test_confidence_near_one():
    k = budget(rtol=10.0, confidence=1 - 1e-15, min_samples=8)
    found = tx.trace(matrix_free(jnp.asarray(MATRIX)), HUTCHINSON, k=k, key=KEY)
    assert np.isfinite(found.value)


def test_prints_as_the_call_that_makes_it():
    assert repr(tx.Adaptive()) == "Adaptive()"
    assert repr(tx.Adaptive(rtol=1e-3, max_k=64)) == "Adaptive(rtol=0.001, max_k=64)"
    traced = []
    jax.eval_shape(lambda x: traced.append(repr(tx.Adaptive(atol=x))), jnp.float32(1))
    assert traced == ["Adaptive(rtol=0.0, atol=f32[])"]
