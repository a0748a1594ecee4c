"""Control variates in traces of functions and log-determinants, against NumPy."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, NUM_KEYS, STEPS = 40, 400, 12
KEY = jr.key(20261130)
KEYS = jr.split(KEY, NUM_KEYS)
CONTROL = hermitian(1, np.linspace(0.5, 3, N))
MATRIX = CONTROL + hermitian(2, np.linspace(0, 0.2, N))
KNOWN = np.linalg.slogdet(CONTROL)[1]
EXACT = np.linalg.slogdet(MATRIX)[1]


def logdet(matrix, control, known, *, tags=PSD, **settings):
    operator, other = (matrix_free(jnp.asarray(x), tags) for x in (matrix, control))
    return tx.logdet(operator, control=(other, known), **settings)


@ft.cache
def compiled(k):
    def one(key):
        settings = {"k": k, "num_steps": STEPS, "key": key, "throw": False}
        solution = logdet(MATRIX, CONTROL, KNOWN, **settings)
        plain = tx.logdet(matrix_free(jnp.asarray(MATRIX), PSD), **settings)
        bound = solution.stats["bounds"][:, 0]
        return solution.value, solution.interval(), bound, plain.value

    return jax.jit(jax.vmap(one))


@pytest.mark.parametrize(
    "k", [8, *(pytest.param(x, marks=pytest.mark.slow) for x in (4, 20))]
)
def test_unbiased_with_bars_that_cover(k):
    values, (low, high), bounds, plain = compiled(k)(KEYS)
    values, plain = np.asarray(values), np.asarray(plain)
    z = (values.mean() - EXACT) / values.std() * NUM_KEYS**0.5
    assert abs(z) < stats.norm.isf(0.0005)
    assert np.mean((low <= EXACT) & (high >= EXACT)) > 0.93
    assert np.all(bounds[:, 0] <= values)
    assert np.all(values <= bounds[:, 1])
    if k > 4:
        assert values.var() < plain.var() / 10


def test_chosen_steps_and_adaptive_budgets():
    rule = tx.Adaptive(atol=0.5, max_k=24, round_size=8)
    solution = logdet(MATRIX, CONTROL, KNOWN, k=rule, key=KEY)
    low, high = solution.interval()
    assert low < EXACT < high
    assert solution.stats["correlation_with_control"] > 0.9
    # One more run with each operator chooses the steps.
    steps, samples = (int(solution.stats[x]) for x in ("num_steps", "num_samples"))
    assert solution.matvecs == solution.stats["num_control_matvecs"]
    assert solution.matvecs == steps * (samples + 1)


def test_derivative():
    """Of `tr log`, by the same probes: with the coefficients constant it is the mean of
    the derivatives of the samples."""
    direction = jnp.asarray(hermitian(3, np.linspace(-1, 1, N)))

    def value(t):
        settings = {"k": 8, "num_steps": STEPS, "key": KEY}
        known = jnp.linalg.slogdet(CONTROL + t * direction)[1]
        return logdet(MATRIX + t * direction, CONTROL + t * direction, known, **settings)

    derivative = jax.grad(lambda t: value(t).value)(0.0)
    exact = np.trace(np.linalg.solve(MATRIX, np.asarray(direction)))
    plain = jax.grad(
        lambda t: (
            tx.logdet(
                matrix_free(jnp.asarray(MATRIX) + t * direction, PSD),
                k=8,
                num_steps=STEPS,
                key=KEY,
            ).value
        )
    )(0.0)
    assert abs(derivative - exact) < abs(plain - exact) / 2


def test_other_operators_and_functions():
    # Without a tag: singular values, by Golub-Kahan.
    settings = {"k": 8, "num_steps": 20, "key": KEY}
    solution = logdet(MATRIX, CONTROL, KNOWN, tags=(), **settings)
    low, high = solution.interval()
    assert low < EXACT < high
    # The structure of a diagonal control gives its log-determinant.
    operator = matrix_free(jnp.asarray(MATRIX), PSD)
    diagonal = np.diag(np.diag(MATRIX))
    solution = tx.logdet(operator, control=diagonal, **settings)
    low, high = solution.interval()
    assert low < EXACT < high
    other, known = (
        matrix_free(jnp.asarray(CONTROL), PSD),
        np.sum(np.exp(-np.linalg.eigvalsh(CONTROL))),
    )
    solution = tx.trace_of_function(
        operator, tx.Exp(-1.0), control=(other, known), k=8, num_steps=STEPS, key=KEY
    )
    low, high = solution.interval()
    assert low < np.sum(np.exp(-np.linalg.eigvalsh(MATRIX))) < high
    exact = tx.logdet(operator, control=(other, KNOWN), k=N, key=KEY)
    np.testing.assert_allclose(exact.value, EXACT)
    assert exact.stats["num_control_matvecs"] == 0


def test_bad_input():
    operator = matrix_free(jnp.asarray(MATRIX), PSD)
    control = matrix_free(jnp.asarray(CONTROL), PSD)
    settings = {"k": 8, "num_steps": STEPS, "key": KEY}
    solution = logdet(MATRIX, CONTROL, KNOWN + 500, throw=False, **settings)
    assert solution.result == tx.RESULTS.inconsistent_control
    pair = control, KNOWN
    for name in ("null_space", "deflation"):
        with pytest.raises(ValueError, match="exclude each other"):
            tx.logdet(operator, control=pair, **settings, **{name: jnp.ones((N, 1))})
    preconditioner = tx.AutoPreconditioner()
    with pytest.raises(ValueError, match="exclude each other"):
        tx.logdet(operator, control=pair, preconditioner=preconditioner, **settings)
    with pytest.raises(ValueError, match="KrylovAware"):
        tx.logdet(operator, tx.KrylovAwareEstimator(), control=pair, **settings)
    with pytest.raises(ValueError, match="operator alone"):
        tx.logdet(operator, control=control, **settings)
    with pytest.raises(ValueError, match="structure of the value"):
        tx.logdet(operator, control=(control, np.ones(2)), **settings)
