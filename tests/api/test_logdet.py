"""Log-determinants with adaptive budgets."""

import equinox as eqx
import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import PSD
from ..run.adaptive import (
    budget,
    DECAY,
    FLAT,
    KEY,
    MAX,
    N,
    quantile,
    SIZE,
    STEPS,
    succeeded,
)


SETTINGS = {"num_steps": STEPS, "key": KEY, "throw": False}


@eqx.filter_jit
def logdet(matrix, shift, k, preconditioned, tags=PSD):
    """Of A + shift I, with its slope in the shift."""

    def value(shift):
        operator = lx.MatrixLinearOperator(matrix + shift * np.eye(N), tags)
        settings, known = dict(SETTINGS), 0.0
        if preconditioned:
            nystrom = tx.nystrom_preconditioner
            found = nystrom(operator, rank=8, key=jax.random.key(7), shift=shift)
            settings["preconditioner"], known = found, found.logdet
        solution = tx.logdet(operator, k=k, **settings)
        return solution.value, (solution, known)

    slope, (solution, known) = jax.grad(value, has_aux=True)(shift)
    return solution, slope, known


@pytest.mark.slow(but="plain")
@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "Nystrom"])
def test_logdet(preconditioned):
    """The tolerance is relative to the whole, of which a preconditioner knows most: the
    part that is estimated need not be known as well. Value, error bar and gradient are
    those of the fixed budget, control variate and all."""
    matrix, shift = (DECAY @ DECAY, 0.05) if preconditioned else (DECAY, 0.5)
    rtol = 0.02 if preconditioned else 0.1
    k = budget(rtol=rtol, history=True)
    solution, slope, known = logdet(matrix, np.asarray(shift), k, preconditioned)
    products = int(solution.stats["num_matvecs"]) - 8 * preconditioned
    probes = products // STEPS
    assert succeeded(solution)
    assert SIZE < probes < MAX
    history = solution.stats["history"]
    assert np.isclose(history[probes // SIZE - 1, 1], solution.value, rtol=1e-12)
    half_width = quantile(probes) * solution.std_err
    assert half_width <= rtol * np.abs(solution.value)
    if preconditioned:
        assert half_width > rtol * np.abs(solution.value - known)
    found = logdet(matrix, np.asarray(shift), probes, preconditioned)
    fixed, expected, _ = found
    assert np.isclose(solution.value, fixed.value, rtol=1e-12)
    assert np.isclose(solution.std_err, fixed.std_err, rtol=1e-9)
    assert np.allclose(solution.stats["bracket"], fixed.stats["bracket"])
    samples = solution.stats["samples"]
    assert np.allclose(samples[:probes], fixed.stats["samples"])
    assert solution.stats["num_matvecs"] == fixed.stats["num_matvecs"]
    exact = np.trace(np.linalg.inv(matrix + shift * np.eye(N)))
    assert np.isclose(slope, exact, rtol=0.1)
    assert np.isclose(slope, expected, rtol=1e-9)


def test_logdet_that_does_not_exist():
    singular = FLAT - 1.5 * np.eye(N)
    solution, _, _ = logdet(
        singular, np.asarray(0.0), budget(rtol=0.05, history=True), False
    )
    assert solution.result == tx.RESULTS.not_positive_definite


def test_infinite_samples_of_a_fixed_number_count():
    """With steps left to the call, too."""
    operator = lx.MatrixLinearOperator(np.zeros((N, N)), PSD)
    solution = tx.logdet(operator, k=10, key=KEY, throw=False)
    assert solution.result == tx.RESULTS.not_positive_definite
    assert solution.stats["num_samples"] == 10


@pytest.mark.slow
def test_logdet_by_golub_kahan():
    """For an operator that is not known to be definite."""
    noise = np.random.default_rng(4).standard_normal((N, N))
    operator = lx.MatrixLinearOperator(FLAT + 0.1 * noise)
    grown = tx.logdet(operator, k=budget(rtol=0.02), **SETTINGS)
    probes = int(grown.stats["num_matvecs"]) // (2 * STEPS)
    fixed = tx.logdet(operator, k=probes, **SETTINGS)
    assert np.isclose(grown.value, fixed.value, rtol=1e-12)
    assert np.isclose(grown.std_err, fixed.std_err, rtol=1e-9)
    assert np.allclose(grown.stats["bracket"], fixed.stats["bracket"])
