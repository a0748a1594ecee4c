"""Adaptive budgets that allow for the exact answer besides: they cannot run out."""

import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD
from .adaptive import (
    budget,
    DECAY,
    estimate,
    HUTCHINSON,
    KEY,
    N,
    name,
    SIZE,
    succeeded,
    trace,
    XTRACE,
)


# One that does not know its diagonal.
OPERATOR = matrix_free(jax.numpy.asarray(DECAY), PSD)
GENEROUS = {"max_k": 200, "rtol": 1e-9}  # more than n, for what no estimator reaches


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=name)
def test_value_and_gradient_are_exact(estimator):
    solution, (slope, _) = estimate(DECAY, estimator, budget(**GENEROUS))
    assert succeeded(solution)
    assert solution.std_err == 0
    np.testing.assert_allclose(solution.value, np.trace(DECAY), rtol=1e-13)
    np.testing.assert_allclose(slope, np.eye(N), atol=1e-12)
    assert N < solution.stats["num_matvecs"] <= 2 * N
    samples = solution.stats["samples"]
    np.testing.assert_array_equal(samples, np.full_like(samples, solution.value))


@pytest.mark.slow
def test_independent_samples_that_are_hopeless_are_soon_given_up():
    """After `min_samples`, rather than after n of them."""
    solution, _ = estimate(DECAY, HUTCHINSON, budget(**GENEROUS, min_samples=10))
    assert solution.stats["num_matvecs"] == N + 2 * SIZE


@pytest.mark.slow(but="48-48-True")
@pytest.mark.parametrize(
    ("max_k", "products", "exact"),
    [(N + SIZE - 1, N, False), (N + SIZE, N + SIZE, True)],
)
def test_the_budget_is_never_exceeded(max_k, products, exact):
    solution = trace(OPERATOR, XTRACE, budget(rtol=1e-12, max_k=max_k))
    assert solution.stats["num_matvecs"] == products
    assert succeeded(solution) == exact


@pytest.mark.slow
def test_every_key_of_a_batch_and_complex_operators():
    matrix = hermitian(3, 1 / np.arange(1, N + 1), np.complex128)
    operator = lx.MatrixLinearOperator(jax.numpy.asarray(matrix), PSD)

    @jax.jit
    @jax.vmap
    def run(key):
        return trace(operator, HUTCHINSON, budget(max_k=200, rtol=1e-3), key=key)

    solution = run(jax.random.split(KEY, 4))
    assert np.all(np.asarray(solution.std_err) == 0)
    np.testing.assert_allclose(solution.value, np.trace(matrix), rtol=1e-13)


@pytest.mark.slow
def test_on_a_mesh():
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:4]))
    settings = {"k": budget(**GENEROUS), "key": KEY, "execution": execution}
    solution = tx.trace(OPERATOR, XTRACE, **settings)
    np.testing.assert_allclose(solution.value, np.trace(DECAY), rtol=1e-13)
    assert solution.std_err == 0


@pytest.mark.slow
@pytest.mark.parametrize("tags", [PSD, ()], ids=["Lanczos", "Golub-Kahan"])
def test_log_determinants(tags):
    """The bracket and the Ritz values are those of the exact answer too."""
    operator = lx.MatrixLinearOperator(jax.numpy.asarray(DECAY), tags)
    solution = tx.logdet(operator, k=budget(**GENEROUS), num_steps=5, key=KEY)
    exact = np.linalg.slogdet(DECAY)[1]
    np.testing.assert_allclose(solution.value, exact, rtol=1e-12)
    np.testing.assert_allclose(solution.stats["bracket"], [exact, exact], rtol=1e-12)
    np.testing.assert_allclose(solution.stats["ritz_values"], [1 / N, 1], rtol=1e-9)


def test_a_failed_product_is_still_a_failure():
    bad = DECAY.copy()
    bad[0, 0] = np.nan
    solution, _ = estimate(bad, HUTCHINSON, budget(**GENEROUS))
    assert solution.result == tx.RESULTS.nonfinite_product


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "products"), [(N + 2 * SIZE, N), (N + 5 * SIZE, N + 5 * SIZE)]
)
def test_going_on_with_a_budget_beyond_n(more, products):
    """The exact answer is taken where the budget is enough for it besides the first."""
    first, _ = estimate(DECAY, XTRACE, budget(rtol=1e-12, max_k=5 * SIZE), gradient=False)
    again = budget(rtol=1e-12, max_k=more)
    again, _ = estimate(DECAY, XTRACE, again, gradient=False, state=first.state)
    assert again.stats["num_matvecs"] == products
    assert succeeded(again) == (products > N)


@pytest.mark.slow
def test_going_on_from_a_run_that_took_the_exact_answer():
    first, _ = estimate(DECAY, XTRACE, budget(**GENEROUS))
    again = budget(**GENEROUS)
    again, _ = estimate(DECAY, XTRACE, again, gradient=False, state=first.state)
    assert again.value == first.value
    assert succeeded(again)
