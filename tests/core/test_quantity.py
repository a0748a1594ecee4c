"""Linear quantities that users write, which depend on more than the diagonal, against
NumPy."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
import traceax.internal as txi

from ..helpers import hermitian, PSD, z_score


N, RUNS = 24, 100
ESTIMATORS = [
    tx.AutoTraceEstimator(),
    tx.AutoDiagonalEstimator(),
    tx.HutchinsonEstimator(),
    tx.HutchPlusPlusEstimator(),
    tx.NystromPlusPlusEstimator(),
    tx.XTraceEstimator(),
    tx.XNysTraceEstimator(),
    tx.XDiagEstimator(),
    tx.XNysDiagEstimator(),
    tx.DiagPlusPlusEstimator(),
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda x: x.name)


class SumOfEntries(txi.AbstractQuantity):
    """As in the docs."""

    def read(self, left, image):
        return jnp.sum(image) * jnp.sum(left).conj()


class RowSums(txi.AbstractQuantity):
    def read(self, left, image):
        return image * jnp.sum(left).conj()


def measured(quantity, operator, estimator, **settings):
    return txi.measure(quantity, operator, estimator, **settings)


@ft.cache
def example():
    """The matrix, and the direction of a derivative, which is not symmetric."""
    matrix = hermitian(0, 5 * np.linspace(3, 1, N) * 0.8 ** np.arange(N))
    return matrix, np.random.default_rng(1).standard_normal((N, N))


def test_the_trace_reads_nan():
    ones, bad = jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])
    assert tx.Trace().read(ones, 2 * ones) == 6
    assert jnp.isnan(tx.Trace().read(ones, bad))
    assert jnp.isnan(tx.Trace().read(bad, ones))


@pytest.mark.slow(but="HutchinsonEstimator")
@every_estimator
def test_unbiased(estimator):
    """Values, error bars and derivatives, of a matrix whose diagonal lineax knows."""

    @eqx.filter_jit
    def run(matrix, direction, keys):
        def one(key):
            def value(t):
                operator = lx.MatrixLinearOperator(matrix + t * direction, PSD)
                settings = {"k": 10, "key": key, "throw": False}
                total = measured(SumOfEntries(), operator, estimator, **settings)
                rows = measured(RowSums(), operator, estimator, **settings)
                return (total.value, rows.value), (total.std_err, rows.std_err)

            values, slopes, bars = jax.jvp(value, (0.0,), (1.0,), has_aux=True)
            return values, bars, slopes

        return jax.lax.map(one, keys)

    matrix, direction = example()
    found = run(matrix, direction, jr.split(jr.key(2), RUNS))
    values, bars, slopes = jax.tree.map(np.asarray, found)
    for x, (total, rows) in ((matrix, values), (direction, slopes)):
        assert z_score(total, np.sum(x)) < 4
        assert np.max(z_scores(rows, np.sum(x, axis=1))) < 4.5
    exact = np.sum(matrix), np.sum(matrix, axis=1)
    for entries, bar, truth in zip(values, bars, exact, strict=True):
        assert np.mean(np.abs(entries - truth) < 1.96 * bar) > 0.85
        assert np.std(entries) > 0.3 * np.mean(bar)


def z_scores(samples, exact):
    return np.array([z_score(x, y) for x, y in zip(samples.T, exact, strict=True)])


@every_estimator
@pytest.mark.parametrize("k", [N, N + 5])
def test_budget_of_n_or_more(estimator, k):
    matrix, _ = example()
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    solution = measured(SumOfEntries(), operator, estimator, k=k, key=jr.key(0))
    assert np.allclose(solution.value, np.sum(matrix), rtol=1e-12)
    assert solution.stats["num_matvecs"] == N
    assert solution.std_err == 0


def test_exact_estimator():
    matrix, _ = example()
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    estimator = tx.ExactTraceEstimator()
    with pytest.raises(ValueError, match=f"needs k={N} matrix-vector products"):
        measured(RowSums(), operator, estimator, k=N - 1)
    rows = measured(RowSums(), operator, estimator, k=N).value
    assert np.allclose(rows, np.sum(matrix, axis=1), rtol=1e-12)


@pytest.mark.slow(but="HutchinsonEstimator")
@pytest.mark.parametrize(
    "estimator", [tx.AutoTraceEstimator(), tx.HutchinsonEstimator()], ids=lambda x: x.name
)
def test_adaptive_budget(estimator):
    """It ends at its tolerance, or with the exact answer."""
    matrix, _ = example()

    @eqx.filter_jit
    def run(matrix, keys, atol):
        def one(key):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            k = tx.Adaptive(atol=atol, max_k=2 * N, round_size=6)
            settings = {"k": k, "key": key, "throw": False}
            solution = measured(SumOfEntries(), operator, estimator, **settings)
            successful = solution.result == tx.RESULTS.successful
            return solution.value, solution.std_err, successful

        return jax.lax.map(one, keys)

    keys, exact = jr.split(jr.key(2), RUNS), np.sum(matrix)
    value, std_err, successful = run(matrix, keys, 50.0)
    assert np.all(successful)
    assert np.mean(np.abs(value - exact) < 1.96 * std_err + 1e-9) > 0.85
    value, std_err, successful = run(matrix, keys, 1e-6)
    assert np.all(successful)
    assert np.allclose(value, exact, rtol=1e-7)
