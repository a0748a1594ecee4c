"""The standard error is honest: over 400 keys, for every estimator, on five spectra.

The 95% interval is `value +- q std_err` with Student's quantile q for one degree of
freedom fewer than there are samples. Of 75 cases, each fails by chance with probability
below 1e-5 if its interval covers 93% and the mean of `std_err` is the root-mean-square
error; `benchmarks/calibration.py` prints the table for n = 300 and 1000.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from .helpers import ESTIMATORS, spectrum_matrix, trace_many


N, NUM_KEYS, FALSE_ALARM = 300, 400, 1e-5
INDEX = jnp.arange(1, N + 1)
SPECTRA = {
    "flat": jnp.linspace(3.0, 1.0, N),
    "poly": INDEX**-2.0,
    "exp": 0.7**INDEX,
    "step": jnp.where(INDEX <= 50, 1.0, 1e-3),
    "i^-1/2": INDEX**-0.5,
}


@pytest.mark.parametrize("m", [10, 30, 60])
@pytest.mark.parametrize(
    ("estimator", "factor"), ESTIMATORS, ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_standard_error_is_honest(spectrum, estimator, factor, m):
    matrix = spectrum_matrix(jr.key(7), SPECTRA[spectrum], jnp.float64)
    value, std_err, _ = trace_many(matrix, estimator, factor * m, NUM_KEYS)
    error = np.abs(np.asarray(value) - float(jnp.trace(matrix)))
    covered = np.sum(error <= stats.t.ppf(0.975, m - 1) * np.asarray(std_err))
    assert covered >= stats.binom.ppf(FALSE_ALARM, NUM_KEYS, 0.93)

    # The ratio's own standard error, from those of the mean and of the mean square.
    rms = np.sqrt(np.mean(error**2))
    ratio = np.mean(std_err) / rms
    spread = np.hypot(
        np.std(std_err) / np.mean(std_err), np.std(error**2) / np.mean(error**2) / 2
    ) / np.sqrt(NUM_KEYS)
    assert ratio >= 1 - stats.norm.isf(FALSE_ALARM) * spread
    assert ratio <= 3
