"""The standard error is honest: over 400 keys, for every estimator, on five spectra.

The 95% interval is `value +- q std_err` with Student's quantile q for one degree of
freedom fewer than there are samples. Of 75 cases, each fails by chance with probability
below 1e-5 if its interval covers 93% and the mean of `std_err` is the root-mean-square
error; `benchmarks/calibration.py` prints the tables for n = 300.
"""

import functools as ft

import jax
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from ..helpers import CASES, hermitian, trace_of_matrix


N, NUM_KEYS, FALSE_ALARM = 200, 400, 1e-5
INDEX = np.arange(1, N + 1)
SPECTRA = {
    "flat": np.linspace(3.0, 1.0, N),
    "poly": INDEX**-2.0,
    "exp": 0.7**INDEX,
    "step": np.where(INDEX <= 50, 1.0, 1e-3),
    "i^-1/2": INDEX**-0.5,
}
MATRICES = np.stack([hermitian(7, each) for each in SPECTRA.values()])


# Here, and only here, it is not compilation that takes the time: all matrices of a key
# meet the same probes, which are drawn and factorised once.
@ft.partial(
    jax.jit,
    static_argnames=("estimator", "k"),
    compiler_options={"xla_backend_optimization_level": 1},
)
def optimised_traces(matrices, estimator, keys, k):
    """Values and error bars, `[j, i]` of key j and matrix i."""

    def one(matrix, key):
        solution = trace_of_matrix(matrix, estimator, key, k=k)
        return solution.value, solution.std_err

    return jax.lax.map(lambda key: jax.vmap(one, (0, None))(matrices, key), keys)


@pytest.mark.slow(but="Hutchinson-Rademacher-10")
@pytest.mark.parametrize("m", [10, 30, 60])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_standard_error_is_honest(case, m):
    keys = jr.split(jr.key(20261121), NUM_KEYS)
    k = case.products_per_probe * m
    values, std_errs = optimised_traces(MATRICES, case.estimator, keys, k)
    error = np.abs(values - np.trace(MATRICES, axis1=1, axis2=2))
    for i, spectrum in enumerate(SPECTRA):
        check(error[:, i], np.asarray(std_errs)[:, i], m, spectrum)


def check(error, std_err, m, spectrum):
    covered = np.sum(error <= stats.t.ppf(0.975, m - 1) * std_err)
    assert covered >= stats.binom.ppf(FALSE_ALARM, NUM_KEYS, 0.93), spectrum

    # The ratio's own standard error, from those of the mean and of the mean square.
    rms = np.sqrt(np.mean(error**2))
    ratio = np.mean(std_err) / rms
    spread = np.hypot(
        np.std(std_err) / np.mean(std_err), np.std(error**2) / np.mean(error**2) / 2
    ) / np.sqrt(NUM_KEYS)
    assert ratio >= 1 - stats.norm.isf(FALSE_ALARM) * spread, spectrum
    assert ratio <= 2, spectrum
