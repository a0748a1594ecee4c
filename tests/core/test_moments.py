"""Moments of samples, and the error bars that are made of them."""

import jax
import numpy as np
import pytest
from scipy import stats

from traceax._core.moments import Moments


FALSE_ALARM = 1e-5


def assert_covers(errors, widths, probability):
    covered = np.sum(np.abs(errors) <= widths)
    assert covered >= stats.binom.ppf(FALSE_ALARM, len(errors), probability)


@pytest.mark.parametrize("m", [2, 3, 6, 10])
def test_few_samples_of_one_large_eigenvalue(m):
    """A quadratic form of rank one, chi-squared of one degree of freedom: the most skewed
    there is."""
    samples = np.random.default_rng(m).standard_normal((20_000, m)) ** 2
    bars = jax.jit(jax.vmap(lambda x: Moments.of(x).std_err()))(samples)
    errors, quantile = np.mean(samples, axis=1) - 1, stats.t.ppf(0.975, m - 1)
    assert_covers(errors, quantile * bars, 0.91)


@pytest.mark.parametrize(("m", "ratio"), [(10, 1.3), (20, 1.13), (60, 1.05)])
def test_bars_of_many_samples_are_tight(m, ratio):
    """Normal samples: the mean of the bar over the standard deviation of the mean, which
    is one over the root of m, with a spread of 1e-3 over these draws."""
    samples = np.random.default_rng(m).standard_normal((50_000, m))
    bars = jax.jit(jax.vmap(lambda x: Moments.of(x).std_err()))(samples)
    assert 1 < np.mean(bars) * m**0.5 < ratio


@pytest.mark.parametrize("m", [5, 20])
def test_moments_of_long_samples(m):
    """A few are combined one after another, and many in a loop. Third moments
    are those of the real and of the imaginary parts, added as squares."""
    x = np.random.default_rng(m).standard_normal((2, m, 5000)) ** 3
    samples = x[0] + 1j * x[1]
    valid = np.arange(m) != 3
    moments = jax.jit(Moments.of)(samples, valid)
    kept = samples[valid]
    deviations = kept - np.mean(kept, axis=0)
    square = np.sum(np.abs(deviations) ** 2, axis=0)
    cubes = (np.sum(part**3, axis=0) for part in (deviations.real, deviations.imag))
    skewness = (m - 1) ** 0.5 * np.hypot(*cubes) / square**1.5
    variance = square / ((m - 1) * (m - 2))
    assert np.allclose(moments.mean, np.mean(kept, axis=0))
    assert np.allclose(moments.independent_std_err, np.sqrt(variance))
    assert np.allclose(moments.skewness, skewness)


@pytest.mark.parametrize("scale", [1e-33, 1.0, 1e37])
@pytest.mark.parametrize(("first", "invalid"), [(40, []), (40, [0, 5, 49]), (50, [0])])
def test_moments_merge_at_any_scale(scale, first, invalid):
    """In float32, near the smallest and the largest number, of more samples than are
    added in one piece; the last one or two sets of them are empty."""
    samples = np.random.default_rng(0).standard_normal(50) ** 2 - 2
    samples = (scale * samples).astype(np.float32)
    index = np.arange(50)
    valid = ~np.isin(index, invalid)
    sets = np.stack([valid & (index < first), valid & (index >= first), index < 0])

    @jax.jit
    def merged(samples, sets):
        return Moments.merge(jax.vmap(lambda some: Moments.of(samples, some))(sets))

    moments, kept = merged(samples, sets), samples[valid].astype(float)
    m, deviations = len(kept), (kept - np.mean(kept)) / scale
    square, cube = np.sum(deviations**2), np.sum(deviations**3)
    std_err = scale * (square / (m * (m - 1))) ** 0.5
    assert moments.count == m
    assert np.allclose(moments.mean, np.mean(kept), rtol=1e-5, atol=1e-5 * scale)
    assert np.allclose(moments.independent_std_err, std_err, rtol=1e-5, atol=0)
    assert np.allclose(moments.skewness, m**0.5 * np.abs(cube) / square**1.5, rtol=1e-4)
