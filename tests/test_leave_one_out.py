"""The leave-one-out kernels against their meaning: doing it again without a probe."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx
from traceax._kernel.dense import thin_svd, thin_svd_gram
from traceax._kernel.leave_one_out import (
    jackknife,
    leave_one_out,
    Pairs,
    sample_covariance,
)
from traceax._moments import Moments

from .helpers import spectrum_matrix, z_score


DTYPES = [jnp.float64, jnp.complex128]
EPS = float(jnp.finfo(jnp.float64).eps)


def projector(x):
    q, _ = np.linalg.qr(x)
    return q @ q.conj().T


def without(x, *columns):
    return np.delete(x, columns, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("svd", [lambda x: thin_svd(x, EPS), thin_svd_gram])
def test_thin_svd(getkey, dtype, svd):
    x = jr.normal(getkey(), (40, 6), dtype)
    q, s, vh = svd(x)
    assert jnp.allclose((q * s) @ vh, x, atol=1e-12)
    assert jnp.allclose(q.conj().T @ q, jnp.eye(6), atol=1e-12)
    assert jnp.allclose(vh @ vh.conj().T, jnp.eye(6), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("svd", [lambda x: thin_svd(x, 8 * EPS), thin_svd_gram])
def test_thin_svd_dependent_columns(getkey, dtype, svd):
    x = jr.normal(getkey(), (40, 4), dtype)
    x = jnp.concatenate([x, x[:, :2]], axis=1)
    q, s, vh = svd(x)
    assert int(jnp.sum(s > 0)) == 4
    assert jnp.allclose((q * s) @ vh, x, atol=1e-12)
    assert jnp.allclose(q @ q.conj().T, projector(x[:, :4]), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_leave_one_column_out(getkey, dtype):
    x = jr.normal(getkey(), (40, 6), dtype)
    q, s, vh = thin_svd(x, EPS)
    loo = leave_one_out(s, vh, EPS)
    assert int(loo.rank) == 6
    assert bool(jnp.all(loo.essential))
    for i in range(6):
        direction = q @ loo.directions[:, i : i + 1]
        inside = q @ q.conj().T - direction @ direction.conj().T
        others = projector(without(x, i))
        assert jnp.allclose(inside, others, atol=1e-10)
        outside = x[:, i] - others @ x[:, i]
        assert jnp.allclose(loo.distance[i], jnp.linalg.norm(outside), rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_directions_dependent_columns(getkey, scale):
    x = jr.normal(getkey(), (40, 4))
    x = scale * jnp.concatenate([x, x[:, :1]], axis=1)
    _, s, vh = thin_svd(x, 8 * EPS)
    loo = leave_one_out(s, vh, EPS)
    assert int(loo.rank) == 4
    assert loo.essential.tolist() == [False, True, True, True, False]
    assert float(jnp.max(jnp.abs(loo.directions[:, jnp.array([0, 4])]))) == 0
    assert float(jnp.max(loo.distance[jnp.array([0, 4])])) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs(getkey, dtype):
    u = jr.normal(getkey(), (9, 5), dtype)
    u = u / jnp.linalg.norm(u, axis=0)[None, :]
    h, w = jr.normal(getkey(), (9, 9), dtype), jr.normal(getkey(), (9, 5), dtype)
    pairs = Pairs.of(u.conj().T @ u)
    trace = pairs.trace(u.conj().T @ h @ u)
    alpha, beta = pairs.coefficients(u.conj().T @ w)
    for i in range(5):
        for j in range(5):
            if i != j:
                p = projector(u[:, jnp.array([i, j])])
                assert jnp.allclose(trace[i, j], jnp.trace(p @ h), atol=1e-11)
                inside = alpha[i, j] * u[:, i] + beta[i, j] * u[:, j]
                assert jnp.allclose(inside, p @ w[:, j], atol=1e-11)


def naive_xtrace(matrix, probes, improved):
    """The definition: Hutch++ for each left-out probe, with all the work done again."""
    n, m = probes.shape
    samples = []
    for i in range(m):
        inside = projector(matrix @ without(probes, i))
        v = probes[:, i] - inside @ probes[:, i]
        c = (n - m + 1) / np.linalg.norm(v) ** 2 if improved else 1.0
        samples.append(np.trace(inside @ matrix) + c * np.vdot(v, matrix @ v))
    return np.stack(samples)


def naive_xnystrace(matrix, probes, improved):
    n, m = probes.shape
    samples = []
    for i in range(m):
        rest, probe = without(probes, i), probes[:, i]
        y = matrix @ rest
        approximation = y @ np.linalg.pinv(rest.conj().T @ y) @ y.conj().T
        v = probe - projector(rest) @ probe
        c = (n - m + 1) / np.linalg.norm(v) ** 2 if improved else 1.0
        form = np.vdot(probe, (matrix - approximation) @ probe)
        samples.append(np.trace(approximation) + c * form)
    return np.stack(samples)


CASES = [
    (tx.XTraceEstimator, naive_xtrace, 2),
    (tx.XNysTraceEstimator, naive_xnystrace, 1),
]


def run_sketch(estimator, matrix, probes, factor):
    """Samples, standard errors in the operator's units."""
    k = factor * probes.shape[1]
    sketch = estimator.sketch(lambda x: matrix @ x, probes, k, EPS)
    parts = sketch.samples, sketch.std_err, sketch.extra
    return jax.tree.map(lambda x: x * sketch.scale, parts)


def case(getkey, cls, factor, m, dtype, improved, eigenvalues):
    """The sketch of a Hermitian matrix, jitted, and the inputs in numpy."""
    matrix = spectrum_matrix(getkey(), eigenvalues, dtype)
    probes = tx.NormalSampler(dtype)(getkey(), matrix.shape[0], m)
    run = jax.jit(lambda *args: run_sketch(cls(improved=improved), *args, factor))
    return run(matrix, probes), np.asarray(matrix), np.asarray(probes)


@pytest.mark.parametrize("improved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 20])
@pytest.mark.parametrize(("cls", "naive", "factor"), CASES)
def test_samples_are_the_definition(getkey, cls, naive, factor, m, dtype, improved):
    (samples, _, _), matrix, probes = case(
        getkey, cls, factor, m, dtype, improved, 0.8 ** jnp.arange(30)
    )
    expected = naive(matrix, probes, improved)
    assert np.allclose(samples, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("improved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_xtrace_samples_not_hermitian(getkey, dtype, improved):
    matrix = jr.normal(getkey(), (30, 30), dtype)
    probes = tx.NormalSampler(dtype)(getkey(), 30, 7)
    samples, _, _ = run_sketch(tx.XTraceEstimator(improved=improved), matrix, probes, 2)
    expected = naive_xtrace(np.asarray(matrix), np.asarray(probes), improved)
    assert np.allclose(samples, expected, rtol=1e-9)


@pytest.mark.parametrize("improved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [2, 12])
@pytest.mark.parametrize(("cls", "naive", "factor"), CASES)
def test_errors_are_those_of_brute_force(getkey, cls, naive, factor, m, dtype, improved):
    """Leaving two probes out needs no product: it equals m runs with m - 1 probes."""
    (samples, std_err, errors), matrix, probes = case(
        getkey, cls, factor, m, dtype, improved, jnp.arange(1, 31) ** -1.0
    )
    rows = [naive(matrix, without(probes, i), improved) for i in range(m)]
    pairs = np.stack([np.insert(row, i, 0) for i, row in enumerate(rows)])

    whole = np.stack([np.mean(row) for row in rows])
    variance = (m - 1) / m * np.sum(np.abs(whole - np.mean(whole)) ** 2)
    assert np.allclose(errors["jackknife_std_err"], np.sqrt(variance), rtol=1e-7)
    assert np.allclose(
        jackknife(jnp.asarray(pairs), jnp.ones(len(pairs), bool)),
        np.sqrt(variance),
        rtol=1e-7,
    )

    published = np.std(samples, ddof=1) / m**0.5
    assert np.allclose(errors["independent_std_err"], published, rtol=1e-7)

    change = np.asarray(samples)[None, :] - pairs  # [i, j]: t_j less t_j without i
    products = [
        (change[j, i] * np.conj(change[i, j])).real
        for i in range(m)
        for j in range(m)
        if i != j
    ]
    covariance = np.mean(products)
    estimated = sample_covariance(samples, jnp.asarray(pairs), jnp.ones(len(pairs), bool))
    assert np.allclose(estimated, covariance, rtol=1e-7)
    expected = Moments.of(samples).std_err(covariance)
    assert np.allclose(std_err, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("cls", "m"), [(tx.XTraceEstimator, 4), (tx.XNysTraceEstimator, 6)]
)
def test_variance_estimate_is_unbiased(monkeypatch, cls, m):
    """`s^2 / m + covariance` against the squared error, 4000 keys. False alarms: 6e-5
    each (4 standard errors)."""
    n, num_keys = 24, 4000

    def bare(moments, covariance):
        variance = moments.independent_std_err**2 + covariance
        return jnp.sign(variance) * jnp.sqrt(jnp.abs(variance))

    monkeypatch.setattr(Moments, "std_err", bare)
    matrix = spectrum_matrix(jr.key(1), jnp.arange(1, n + 1) ** -1.0, jnp.float64)

    @jax.jit
    def run(key):
        probes = tx.SphereSampler(jnp.float64)(key, n, m)
        samples, root, _ = run_sketch(cls(), matrix, probes, 2 if m == 4 else 1)
        return jnp.mean(samples), jnp.sign(root) * root**2

    value, variance = jax.lax.map(run, jr.split(jr.key(2), num_keys))
    excess = variance - (value - jnp.trace(matrix)) ** 2
    assert z_score(excess, 0.0) < 4
