"""The leave-one-out kernels against their meaning: doing it again without a probe."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx
from traceax._core.moments import Moments
from traceax._numerics.dense import thin_svd, thin_svd_gram
from traceax._numerics.leave_one_out import (
    change_without,
    jackknife,
    leave_one_out,
    Pairs,
    sample_covariance,
)

from ..helpers import hermitian, z_score


DTYPES = [np.float64, np.complex128]
EPS = float(jnp.finfo(jnp.float64).eps)


def normal(seed, shape, dtype):
    generator = np.random.default_rng(seed)
    if dtype is np.complex128:
        real, imaginary = generator.standard_normal((2, *shape))
        return (real + 1j * imaginary) / 2**0.5
    return generator.standard_normal(shape)


def projector(x):
    q, _ = np.linalg.qr(x)
    return q @ q.conj().T


def without(x, *columns):
    return np.delete(x, columns, axis=1)


@jax.jit
def householder(x):
    return thin_svd(x, 8 * EPS)


gram = jax.jit(thin_svd_gram)
directions = jax.jit(lambda x: leave_one_out(*householder(x)[1:], EPS))


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("svd", [householder, gram])
def test_thin_svd(dtype, svd):
    x = normal(0, (40, 6), dtype)
    q, s, vh = numpy(svd(x))
    assert np.allclose((q * s) @ vh, x, atol=1e-12)
    assert np.allclose(q.conj().T @ q, np.eye(6), atol=1e-12)
    assert np.allclose(vh @ vh.conj().T, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("svd", [householder, gram])
def test_thin_svd_dependent_columns(dtype, svd):
    x = normal(1, (40, 4), dtype)
    x = np.concatenate([x, x[:, :2]], axis=1)
    q, s, vh = numpy(svd(x))
    assert np.sum(s > 0) == 4
    assert np.allclose((q * s) @ vh, x, atol=1e-12)
    assert np.allclose(q @ q.conj().T, projector(x[:, :4]), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_leave_one_column_out(dtype):
    x = normal(2, (40, 6), dtype)
    q, _, _ = numpy(householder(x))
    loo = numpy(directions(x))
    assert loo.rank == 6
    assert np.all(loo.essential)
    for i in range(6):
        direction = q @ loo.directions[:, i : i + 1]
        inside = q @ q.conj().T - direction @ direction.conj().T
        others = projector(without(x, i))
        assert np.allclose(inside, others, atol=1e-10)
        outside = x[:, i] - others @ x[:, i]
        assert np.allclose(loo.distance[i], np.linalg.norm(outside), rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_directions_dependent_columns(scale):
    x = normal(3, (40, 5), np.float64)
    loo = numpy(directions(scale * np.concatenate([x, x[:, :1]], axis=1)))
    assert loo.rank == 5
    assert loo.essential.tolist() == [False, True, True, True, True, False]
    assert np.all(loo.directions[:, [0, 5]] == 0)
    assert np.all(loo.distance[[0, 5]] == 0)


@jax.jit
def pair_parts(gram, form, inner):
    pairs = Pairs.of(gram)
    return pairs.trace(form), *pairs.coefficients(inner)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs(dtype):
    u = normal(4, (9, 5), dtype)
    u = u / np.linalg.norm(u, axis=0)
    h, w = normal(5, (9, 9), dtype), normal(6, (9, 5), dtype)
    inner = [u.conj().T @ x for x in (u, h @ u, w)]
    trace, alpha, beta = numpy(pair_parts(*inner))
    for i in range(5):
        for j in range(5):
            if i != j:
                p = projector(u[:, [i, j]])
                assert np.allclose(trace[i, j], np.trace(p @ h), atol=1e-11)
                inside = alpha[i, j] * u[:, i] + beta[i, j] * u[:, j]
                assert np.allclose(inside, p @ w[:, j], atol=1e-11)


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


def sketch_of(estimator, matrix, probes, k):
    """Samples, standard errors in the operator's units."""
    sketch = estimator.sketch(lambda x: matrix @ x, probes, k, EPS)
    parts = sketch.samples, sketch.std_err, sketch.extra
    return jax.tree.map(lambda x: x * sketch.scale, parts)


compiled_sketch_of = eqx.filter_jit(sketch_of)


NAIVE = [
    (tx.XTraceEstimator, naive_xtrace, 2),
    (tx.XNysTraceEstimator, naive_xnystrace, 1),
]
SIZES = [
    (20, np.float64, True),
    (20, np.complex128, True),
    (2, np.complex128, True),
    (1, np.complex128, True),
    (20, np.complex128, False),
    (1, np.complex128, False),
]
SPECTRA = [0.8 ** np.arange(30), np.arange(1, 31) ** -1.0]


def case(cls, factor, m, dtype, improved, matrix):
    """What a sketch of the matrix gives, and the probes."""
    probes = normal(7, (len(matrix), m), dtype)
    found = compiled_sketch_of(cls(improved=improved), matrix, probes, factor * m)
    return *numpy(found), probes


def matrices_for(cls, dtype):
    """The last one is not Hermitian, and its complex samples are not real."""
    matrices = [hermitian(8, spectrum, dtype) for spectrum in SPECTRA]
    return [*matrices, normal(9, (30, 30), dtype)][
        : 3 if cls is tx.XTraceEstimator else 2
    ]


@pytest.mark.slow(
    but=(
        "XTraceEstimator-naive_xtrace-2-1-complex128-False",
        "XNysTraceEstimator-naive_xnystrace-1-1-complex128-True",
        "XNysTraceEstimator-naive_xnystrace-1-1-complex128-False",
    )
)
@pytest.mark.parametrize(("m", "dtype", "improved"), SIZES)
@pytest.mark.parametrize(("cls", "naive", "factor"), NAIVE)
def test_samples_are_the_definition(cls, naive, factor, m, dtype, improved):
    for i, matrix in enumerate(matrices_for(cls, dtype)):
        samples, _, _, probes = case(cls, factor, m, dtype, improved, matrix)
        expected = naive(matrix, probes, improved)
        assert np.allclose(samples, expected, rtol=1e-9, atol=1e-9), i


@jax.jit
def error_parts(samples, pairs):
    valid = jnp.ones(len(samples), bool)
    change = change_without(samples, pairs, valid)
    covariance = sample_covariance(change, jnp.asarray(len(samples), samples.real.dtype))
    std_err = Moments.of(samples).std_err(covariance)
    return jackknife(samples, change, valid), covariance, std_err


@pytest.mark.slow(
    but=(
        "XTraceEstimator-naive_xtrace-2-20-complex128-False",
        "XNysTraceEstimator-naive_xnystrace-1-20-complex128-False",
    )
)
@pytest.mark.parametrize(
    ("m", "dtype", "improved"), [each for each in SIZES if each[0] > 1]
)
@pytest.mark.parametrize(("cls", "naive", "factor"), NAIVE)
def test_errors_are_those_of_brute_force(cls, naive, factor, m, dtype, improved):
    """Leaving two probes out needs no product: it equals m runs with m - 1 probes."""
    for matrix in matrices_for(cls, dtype)[1:]:
        found = case(cls, factor, m, dtype, improved, matrix)
        samples, std_err, errors, probes = found
        rows = [naive(matrix, without(probes, i), improved) for i in range(m)]
        pairs = np.stack([np.insert(row, i, 0) for i, row in enumerate(rows)])
        jackknifed, estimated, widened = error_parts(samples, pairs)

        whole = np.stack([np.mean(row) for row in rows])
        variance = (m - 1) / m * np.sum(np.abs(whole - np.mean(whole)) ** 2)
        assert np.allclose(errors["jackknife_std_err"], np.sqrt(variance), rtol=1e-7)
        assert np.allclose(jackknifed, np.sqrt(variance), rtol=1e-7)

        published = np.std(samples, ddof=1) / m**0.5
        assert np.allclose(errors["independent_std_err"], published, rtol=1e-7)

        change = samples[None, :] - pairs  # [i, j]: t_j less t_j without i
        products = (change * change.conj().T).real
        covariance = np.mean(products[~np.eye(m, dtype=bool)])
        assert np.allclose(estimated, covariance, rtol=1e-7)
        assert np.allclose(std_err, np.maximum(widened, jackknifed / 5), rtol=1e-6)


@pytest.mark.slow(but="XNysTrace*")
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
    matrix = hermitian(1, np.arange(1, n + 1) ** -1.0)

    @jax.jit
    def run(matrix, keys):
        def one(key):
            probes = tx.SphereSampler(jnp.float64)(key, n, m)
            k = 2 * m if cls is tx.XTraceEstimator else m
            samples, root, _ = sketch_of(cls(), matrix, probes, k)
            return jnp.mean(samples), jnp.sign(root) * root**2

        return jax.lax.map(one, keys)

    value, variance = numpy(run(matrix, jr.split(jr.key(2), num_keys)))
    excess = variance - (value - np.trace(matrix)) ** 2
    assert z_score(excess, 0.0) < 4


@jax.jit
def without_one(x):
    eps = float(jnp.finfo(x.dtype).eps)
    _, s, vh = thin_svd(x, 4 * eps)
    return leave_one_out(s, vh, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [1.0, 0.1])
def test_essential_columns(dtype, decay):
    """Of columns of decreasing size, one of which is repeated, or is a combination of
    the others in which one has a small part, those are essential that take no part."""
    mixtures = np.array([[1, 0, 0, 0, 0], [1, 1e-3, 0, 0, 0], [1, 0, -1, 1e-2, 0]])
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((30, 5))
        x = np.linalg.qr(x)[0] * decay ** np.arange(5)
        for mixture in mixtures:
            loo = without_one(np.c_[x, x @ mixture].astype(dtype))
            assert loo.rank == 5
            assert loo.essential.tolist() == [*(mixture == 0), False]
