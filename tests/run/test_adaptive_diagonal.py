"""Adaptive budgets for diagonals: until the error, in a norm, is below the tolerance; and
that a large diagonal needs no memory beyond a block of probes."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, NUM_KEYS = 60, 200
INDEX = np.arange(1, N + 1)
KEYS = jr.split(jr.key(20261121), NUM_KEYS)
FLAT, DECAY = hermitian(1, INDEX / N + 1), hermitian(2, 0.7**INDEX)
HUTCHINSON, XDIAG = tx.HutchinsonEstimator(), tx.XDiagEstimator()
XNYSDIAG, AUTO = tx.XNysDiagEstimator(), tx.AutoDiagonalEstimator()
CASES = [
    (HUTCHINSON, (), FLAT, 0.15),
    (XDIAG, (), DECAY, 0.1),
    (XNYSDIAG, PSD, DECAY, 0.1),
    (AUTO, (), DECAY, 0.1),
    (AUTO, PSD, FLAT, 0.15),
]
NAMES = ["signs", "XDiag", "XNysDiag", "Auto", "Auto, tagged"]
arguments = "estimator", "tags", "matrix", "rtol"
every_case = pytest.mark.parametrize(arguments, CASES, ids=NAMES)


def largest(tree):
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))


def budget(**settings):
    default = {"max_k": 48, "round_size": 8, "min_samples": 4, "history": True}
    return tx.Adaptive(**(default | settings))


@eqx.filter_jit
def run(matrix, estimator, keys, tags, k):
    def one(key):
        operator = matrix_free(matrix, tags)
        solution = tx.diagonal(operator, estimator, k=k, key=key, throw=False)
        return solution, solution.result == tx.RESULTS.successful

    return jax.lax.map(one, keys)


@pytest.mark.slow(but="signs")
@every_case
def test_reaches_the_tolerance(estimator, tags, matrix, rtol):
    """In the two-norm, with at least 93% of 200 keys but for a chance of 1e-5; and the
    history tells the truth."""
    solution, successful = run(matrix, estimator, KEYS, tags, budget(rtol=rtol))
    made = np.asarray(solution.stats["num_matvecs"])
    error = np.linalg.norm(solution.value - np.diag(matrix), axis=1)
    reached = error <= rtol * np.linalg.norm(solution.value, axis=1)
    assert np.mean(successful) > 0.9
    count = np.sum(successful)
    assert np.sum(reached[successful]) >= stats.binom.ppf(1e-5, count, 0.93)
    assert np.all(made <= 48)

    history = np.asarray(solution.stats["history"])
    rounds = made // 8
    for i in range(20):
        rows = history[i]
        assert np.array_equal(rows[: rounds[i], 0], 8 * np.arange(1, rounds[i] + 1))
        assert np.all(np.isinf(rows[rounds[i] :]))
        last = rows[rounds[i] - 1]
        assert np.isclose(last[1], np.linalg.norm(solution.value[i]), rtol=1e-9)
        assert np.isclose(last[2], np.linalg.norm(solution.std_err[i]), rtol=1e-6)


@pytest.mark.slow(but="signs")
@pytest.mark.parametrize(
    arguments, [CASES[i] for i in (0, 1, 4)], ids=[NAMES[i] for i in (0, 1, 4)]
)
def test_other_norm_and_gradient(estimator, tags, matrix, rtol):
    """By the largest entry, under `jit`, with the derivative of a fixed budget."""
    weights = np.random.default_rng(0).standard_normal(N)

    @eqx.filter_jit
    def both(matrix, k, key):
        def loss(matrix):
            operator = matrix_free(matrix, tags)
            solution = tx.diagonal(operator, estimator, k=k, key=key, throw=False)
            return jnp.sum(weights * solution.value), solution

        return eqx.filter_grad(loss, has_aux=True)(matrix)

    k = budget(atol=rtol, norm=largest, round_size=16)
    slope, solution = both(matrix, k, KEYS[0])
    made = int(solution.stats["num_matvecs"])
    assert solution.result == tx.RESULTS.successful
    row = solution.stats["history"][made // 16 - 1]
    assert np.isclose(row[1], np.max(np.abs(solution.value)))
    assert np.isclose(row[2], np.max(solution.std_err), rtol=1e-6)
    assert np.max(np.abs(solution.value - np.diag(matrix))) <= 1.5 * rtol
    if estimator is not AUTO:
        expected, fixed = both(matrix, made, KEYS[0])
        assert np.allclose(fixed.value, solution.value, rtol=1e-8, atol=1e-10)
        assert np.allclose(slope, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.slow(but="XNysDiag")
@every_case
def test_single_precision_stays(estimator, tags, matrix, rtol):
    """No array with an entry for each row is in double precision, of the derivative's
    either."""
    k, matrix = budget(rtol=rtol), jnp.asarray(matrix, jnp.float32)

    def norm(matrix):
        operator = matrix_free(matrix, tags)
        solution = tx.diagonal(operator, estimator, k=k, key=KEYS[0], throw=False)
        return jnp.sum(solution.value**2)

    traced = str(jax.make_jaxpr(jax.grad(norm))(matrix))
    assert f"f32[{N}]" in traced
    assert not re.search(rf"f64\[(\d+,)*{N}[,\]]", traced)


def matrix_norm(tree):
    return jnp.abs(jax.tree.leaves(tree)[0])[None]


def failing(tree):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ("max", "`norm` must be a function"),
        (matrix_norm, "a function that returns"),
        (failing, "which raised RuntimeError for a pair of vectors: no"),
        (lambda tree: 1.0, "`norm` must be a function"),
        (lambda tree: jnp.zeros((), jnp.complex64), "a function that returns"),
        (None, "`norm` must be a function"),
    ],
)
def test_bad_norms(norm, message):
    with pytest.raises(TypeError, match=message):
        tx.Adaptive(rtol=0.1, max_k=10, norm=norm)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "tags"), [(HUTCHINSON, ()), (AUTO, PSD)])
def test_resumed_run_is_one_longer_run(estimator, tags):
    operator = matrix_free(jnp.asarray(DECAY), tags)
    limits = {"rtol": 1e-12, "round_size": 8, "min_samples": 4}

    @eqx.filter_jit
    def runs(operator, key):
        """A short run, one that goes on from it, and a longer one."""
        settings = {"key": key, "throw": False}
        short, long = (tx.Adaptive(max_k=k, **limits) for k in (16, 32))
        first = tx.diagonal(operator, estimator, k=short, **settings)
        resumed, whole = (
            tx.diagonal(operator, estimator, k=long, state=state, **settings)
            for state in (first.state, None)
        )
        return first, resumed, whole

    first, resumed, whole = runs(operator, KEYS[0])
    assert first.result == tx.RESULTS.max_matvecs_reached
    assert resumed.stats["num_matvecs"] == whole.stats["num_matvecs"] == 32
    assert np.allclose(resumed.value, whole.value, rtol=1e-10, atol=1e-14)
    assert np.allclose(resumed.std_err, whole.std_err, rtol=1e-6, atol=1e-14)
    call = {"k": tx.Adaptive(max_k=32, **limits), "key": KEYS[0], "state": first.state}
    with pytest.raises(ValueError, match="same estimator"):
        tx.trace(operator, estimator, **call)


@pytest.mark.slow(but="signs")
@pytest.mark.parametrize("estimator", [HUTCHINSON, AUTO], ids=["signs", "Auto"])
def test_budget_above_n_ends_exact(estimator):
    """Where the tolerance is out of reach, n products that were kept back."""
    operator = matrix_free(jnp.asarray(FLAT))
    k = tx.Adaptive(rtol=1e-9, max_k=2 * N, round_size=8)
    solution = tx.diagonal(operator, estimator, k=k, key=KEYS[0])
    assert solution.result == tx.RESULTS.successful
    assert np.allclose(solution.value, np.diag(FLAT), rtol=1e-12)
    assert np.max(solution.std_err) < 1e-12
    assert N <= solution.stats["num_matvecs"] <= 2 * N


@pytest.mark.slow
def test_default_stops_early_whatever_the_budget():
    """It takes the exact answer at once only where a round is enough for that."""
    operator = matrix_free(jnp.asarray(FLAT), PSD)
    solution = tx.diagonal(operator, k=budget(rtol=0.3, max_k=3 * N), key=KEYS[0])
    assert solution.result == tx.RESULTS.successful
    assert solution.stats["num_matvecs"] < N
    known = lx.MatrixLinearOperator(jnp.asarray(FLAT))
    assert tx.diagonal(known, k=budget(rtol=0.3), key=KEYS[0]).stats["num_matvecs"] == 0


def test_exact_estimator_may_spend_what_is_kept_back():
    operator = matrix_free(jnp.asarray(FLAT))
    k = tx.Adaptive(rtol=0.1, max_k=N + 20)
    solution = tx.trace(operator, tx.ExactTraceEstimator(), k=k)
    assert np.allclose(solution.value, np.trace(FLAT), rtol=1e-12)


def test_estimator_that_does_not_grow():
    operator = matrix_free(jnp.asarray(FLAT))
    with pytest.raises(ValueError, match="needs a fixed budget"):
        tx.diagonal(operator, tx.DiagPlusPlusEstimator(), k=budget(rtol=0.1), key=KEYS[0])


@pytest.mark.slow
def test_memory_of_signs():
    """One block of probes at a time, in the backward pass too."""
    n, k = 200_000, 256

    def loss(scale, key):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * v + 0.1 * jnp.roll(v, 1),
            jax.ShapeDtypeStruct((n,), jnp.float32),
        )
        value = tx.diagonal(operator, HUTCHINSON, k=k, key=key, throw=False).value
        return jnp.sum(jnp.sin(value))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(jnp.ones(n, jnp.float32), KEYS[0])
    compiled = lowered.compile({"xla_backend_optimization_level": 1})
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used <= n * k * 4 / 4


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_scale_does_not_matter(scale):
    """Squares of errors underflow or overflow; the tolerance is out of reach."""
    matrix = np.asarray(scale * FLAT, np.float32)
    k = tx.Adaptive(rtol=1e-6, max_k=48, round_size=16)
    solution, _ = run(matrix, HUTCHINSON, KEYS[:1], (), k)
    assert np.all(solution.result == tx.RESULTS.max_matvecs_reached)
    assert solution.stats["num_matvecs"].tolist() == [48]
    error = np.abs(solution.value[0] - np.diag(matrix)) / scale
    assert np.max(error) < 8 * np.max(solution.std_err) / scale < 8
