"""Traces from minibatches: probes and batches have error bars of their own."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

import traceax as tx


N = 20
FACTOR = np.diag(np.linspace(0.2, 2, N)) @ (
    np.eye(N) + np.random.default_rng(0).standard_normal((N, N)) / 9
)


def gram(batches, w=None):
    """The mean of x x^T over examples, a Gauss-Newton matrix."""
    model, loss = lambda w, x: x @ w, lambda z, _: jnp.mean(z**2) / 2
    return tx.ggn(model, loss, jnp.zeros(N) if w is None else w, batches)


def draw(key, examples):
    return jr.normal(key, (examples, N)) @ FACTOR


@ft.partial(jax.jit, static_argnums=(1, 2))
def answers(keys, k, sizes):
    """Values, intervals, and both errors, for batches of these sizes drawn from data
    without end."""

    def one(key):
        x = jnp.split(draw(key, sum(sizes)), np.cumsum(sizes)[:-1])
        settings = {"k": k, "key": jr.fold_in(key, 1), "throw": False}
        solution = tx.minibatch_trace(gram(x), **settings)
        names = "probe_std_err", "batch_std_err"
        of_batches = sum(n * jnp.sum(b**2) / n for n, b in zip(sizes, x, strict=True))
        stats = [solution.stats[name] for name in names]
        return solution.value, solution.interval(), *stats, of_batches / sum(sizes)

    return jax.lax.map(one, keys)


@pytest.mark.parametrize(
    ("k", "sizes"),
    [
        (8, (6,) * 8),
        pytest.param(20, (8,) * 4, marks=pytest.mark.slow),
        pytest.param(3, (2,) * 24, marks=pytest.mark.slow),
        pytest.param(10, (4, 4, 4, 12, 2, 2, 9, 9), marks=pytest.mark.slow),
        pytest.param(N, (5, 5, 5, 3), marks=pytest.mark.slow),
    ],
)
def test_coverage_and_variances(k, sizes):
    """95% intervals cover the trace for all data in 93% or more of 400 draws. Variances
    are those of the draws: the probes' for these batches, the batches' for all data."""
    truth = np.sum(FACTOR**2)
    found = answers(jr.split(jr.key(4), 400), k, sizes)
    value, (low, high), probes, batches, exact = jax.tree.map(np.asarray, found)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93
    assert np.abs(np.mean(value) - truth) < 4 * np.std(value) / len(value) ** 0.5
    ratios = {"batches": (np.mean(batches**2), np.var(exact))}
    if k < N:
        ratios["probes"] = np.mean(probes**2), np.mean((value - exact) ** 2)
    else:
        assert np.all(probes == 0)
        np.testing.assert_allclose(value, exact)
    for name, (found, expected) in ratios.items():
        # Bars are widened for few and skewed samples.
        least, most = (0.9, 3) if min(k, len(sizes)) > 4 else (0.9, 12)
        assert least < found / expected < most, (name, found / expected)


def test_value_and_error_of_these_batches():
    """Are those of Hutchinson's estimator; also split over devices, and derivatives."""
    x = jnp.stack([draw(jr.key(i), 4) for i in range(6)])
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("probes", "data"), axis_types=kinds)

    def both(scale, execution):
        settings = {"k": 6, "key": jr.key(0), "throw": False, "execution": execution}
        operator = gram(scale * x)
        trace = tx.trace(operator, tx.HutchinsonEstimator(), **settings)
        solution = tx.minibatch_trace(operator, **settings)
        pair = solution.value, solution.stats["probe_std_err"]
        return solution.value, (pair, (trace.value, trace.std_err))

    for execution in (tx.Local(), tx.Local(4), tx.Sharded(mesh)):
        fn = lambda scale: both(scale, execution)  # noqa: B023, E731
        (value, (found, expected)), slope = jax.jit(jax.value_and_grad(fn, has_aux=True))(
            jnp.ones(())
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(slope, 2 * value, rtol=1e-12)


def test_batches_that_are_alike():
    """Only probes differ."""
    x = jnp.stack([draw(jr.key(0), 4)] * 3)
    solution = tx.minibatch_trace(gram(x), k=5, key=jr.key(1))
    assert solution.stats["batch_std_err"] == 0
    assert solution.std_err == pytest.approx(solution.stats["probe_std_err"])
    assert "from 3 minibatches" in str(solution)


def test_differences_and_half_precision():
    """Error bars count the errors of products."""
    x = jnp.stack([draw(jr.key(i), 4) for i in range(3)]).astype(np.float32)
    fn = lambda w, b: jnp.mean(jnp.cosh(b @ w))  # noqa: E731
    w = jnp.full(N, 0.1, np.float32)
    operator = tx.hessian(fn, w, x, product="difference")
    exact = tx.trace(tx.hessian(fn, w, x), k=N).value
    same = tx.hessian(fn, w, jnp.stack([x[0]] * 2), product="difference")
    solution = tx.minibatch_trace(same, k=N)
    assert solution.stats["batch_std_err"] < 1e-5 * solution.value < solution.std_err
    found = tx.minibatch_trace(operator, k=N)
    assert abs(found.value - exact) < 1e-3 * exact
    half = tx.hessian(fn, w.astype(np.float16), x.astype(np.float16))
    settings = {"k": 4, "key": jr.key(0)}
    value = tx.minibatch_trace(half, **settings).value
    expected = tx.trace(half, tx.HutchinsonEstimator(), **settings).value
    assert float(value) == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (lambda x: gram(x) + gram(x), {"k": 5}, TypeError, "must be a mean over batches"),
        (lambda x: np.eye(3), {"k": 5}, TypeError, "Found an object of type ndarray"),
        (lambda x: gram(x[:1]), {"k": 5}, ValueError, "at least two batches.*Found one"),
        (gram, {"k": 1}, ValueError, "needs at least k=2.*`traceax.trace`"),
        (gram, {"k": tx.Adaptive()}, ValueError, "`k` must be a number"),
        (gram, {"k": 5, "key": None}, ValueError, "`key` is missing"),
    ],
)
def test_bad_input(make, settings, error, message):
    with pytest.raises(error, match=message):
        tx.minibatch_trace(make(jnp.ones((3, 2, N))), **{"key": jr.key(0)} | settings)
