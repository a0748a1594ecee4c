"""Spectral densities: Gauss rules for what each probe sees, unbiased over probes, and
right where an operator is degenerate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, z_score


SYMMETRIC = lx.symmetric_tag
KEY = jr.key(3)
N = 40
SPECTRA = {
    "flat": np.linspace(-1, 2, N),
    "decaying": 0.7 ** np.arange(N),
    "two clusters": np.where(np.arange(N) < 15, 0.0, 3.0) + np.linspace(0, 0.5, N),
    "rank deficient": np.maximum(np.arange(N) - 30.0, 0),
}
every_spectrum = pytest.mark.parametrize("name", SPECTRA)


def operator_of(matrix):
    tag = tx.hermitian_tag if matrix.dtype.kind == "c" else SYMMETRIC
    return lx.MatrixLinearOperator(matrix, tag)


def density_of(operator, *, k=6, num_steps=8, key=KEY, **settings):
    return tx.spectral_density(operator, k=k, num_steps=num_steps, key=key, **settings)


@eqx.filter_jit
def sampled(sampler, key, n, k):
    return sampler(key, n, k)


def seen_by_probes(matrix, k):
    """Eigenvalues, and the mass that each of the first k probes of KEY gives to them."""
    values, vectors = np.linalg.eigh(matrix)
    probes = np.asarray(sampled(tx.RademacherSampler(), KEY, len(matrix), k))
    return values, np.abs(vectors.conj().T @ probes).T ** 2 / len(matrix)


def close(first, second, tolerance):
    """Whether two measures have the same nodes, and the same masses at them."""
    return (
        np.allclose(first.nodes, second.nodes, rtol=0, atol=tolerance)
        and np.allclose(first.weights, second.weights, rtol=0, atol=tolerance)
        and first.num_matvecs == second.num_matvecs
    )


def over_keys(function):
    keys = jr.split(jr.key(20261121), 300)
    found = jax.jit(lambda keys: jax.lax.map(function, keys))(keys)
    return jax.tree.map(np.asarray, found)


def gaussian(distance, width):
    return np.exp(-((distance / width) ** 2) / 2) / (width * (2 * np.pi) ** 0.5)


# --- what it estimates ---


@pytest.mark.slow(but="complex128-*")
@every_spectrum
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_each_row_is_a_gauss_rule(name, dtype):
    """Of the measure of its probe: all moments below `2 num_steps`, which for power 0 is
    that weights sum to 1, and the inequalities of Chebyshev, Markov and Stieltjes."""
    matrix = hermitian(1, SPECTRA[name], dtype)
    values, masses = seen_by_probes(matrix, 6)
    found = density_of(operator_of(matrix))
    assert found.nodes.shape == found.weights.shape == (6, 8)
    assert found.nodes.dtype == found.weights.dtype == np.float64
    assert found.num_matvecs == 48
    nodes, weights = np.asarray(found.nodes), np.asarray(found.weights)
    assert np.all(np.diff(nodes) >= 0)
    assert np.all(weights >= 0)
    unit = np.max(np.abs(values))
    powers = np.arange(16)
    moments = weights[..., None] * (nodes[..., None] / unit) ** powers
    exact = masses @ (values[:, None] / unit) ** powers
    assert np.allclose(np.sum(moments, axis=1), exact, rtol=1e-11)
    slack = 1e-9
    for node, weight, mass in zip(nodes, weights, masses, strict=True):
        above, total = node[:, None] + slack * unit, np.cumsum(weight)
        below = node[:, None] - slack * unit
        assert np.all(total - weight <= np.sum(mass * (values < above), 1) + slack)
        assert np.all(np.sum(mass * (values <= below), 1) <= total + slack)


SAMPLERS = [
    (tx.RademacherSampler(), np.float64),
    (tx.SphereSampler(), np.float64),
    (tx.NormalSampler(), np.float64),
    (tx.RademacherSampler(), np.complex128),
    (tx.SteinhausSampler(), np.complex128),
]


@pytest.mark.slow(but=("sampler0-*", "sampler4-*"))
@pytest.mark.parametrize(("sampler", "dtype"), SAMPLERS)
def test_moments_are_unbiased(sampler, dtype):
    """`tr(A^p) / n` for p up to 3, and with 4 steps for p = 6: 300 keys, false alarm 6e-5
    each."""
    values = SPECTRA["flat"]
    operator, powers = operator_of(hermitian(2, values, dtype)), (1, 2, 3, 6)

    def rules(key):
        settings = {"k": 4, "num_steps": 4, "throw": False}
        settings["estimator"] = tx.SLQEstimator(sampler)
        found = density_of(operator, key=key, **settings)
        return found.nodes, found.weights

    nodes, weights = over_keys(rules)
    for power in powers:
        samples = np.mean(np.sum(weights * nodes**power, axis=2), axis=1)
        assert z_score(samples, np.mean(values**power)) < 4, power


@pytest.mark.slow
def test_standard_errors_are_calibrated():
    """Against the spread over 300 keys; and once steps are as many as n, density and
    distribution function are unbiased, false alarm 6e-5 each."""
    values = SPECTRA["two clusters"]
    operator = operator_of(hermitian(4, values, np.float64))
    points, width = np.array([0.1, 0.33, 3.2]), 0.2

    def run(key):
        found = density_of(operator, k=8, num_steps=N, key=key, throw=False)
        return found(points, width), found.cumulative(points)

    found = over_keys(run)
    distance = points[:, None] - values
    exact = np.mean(gaussian(distance, width), axis=1), np.mean(distance >= 0, axis=1)
    for (mean, std_err), expected in zip(found, exact, strict=True):
        for i in range(3):
            assert z_score(mean[:, i], expected[i]) < 4
            ratio = np.sqrt(np.mean(std_err[:, i] ** 2)) / np.std(mean[:, i])
            assert 0.9 < ratio < 2


@pytest.mark.parametrize("name", ["flat", "two clusters", "rank deficient"])
def test_distance_of_the_distribution_function(name):
    """Kolmogorov's, from the exact one: three standard errors. Steps are as many as n, so
    that there is no error of the quadrature."""
    values = SPECTRA[name]
    matrix = hermitian(5, values, np.float64)
    found = density_of(operator_of(matrix), k=30, num_steps=N)
    t = np.concatenate([values - 1e-6, values + 1e-6])
    fraction, std_err = found.cumulative(t)
    exact = np.mean(values <= t[:, None], axis=1)
    assert np.all(np.abs(fraction - exact) <= 3 * std_err + 1e-9)
    assert np.max(std_err) < 0.05


@pytest.mark.parametrize("name", ["flat", "two clusters", "rank deficient"])
def test_what_a_rule_resolves(name):
    """The error of the quadrature, at a width of the range over the number of steps, is
    below a thousandth of the peak."""
    n, steps = 200, 16
    values = np.interp(np.linspace(0, 1, n), np.linspace(0, 1, N), SPECTRA[name])
    matrix = hermitian(6, values, np.float64)
    width = (np.max(values) - np.min(values)) / steps
    t = np.linspace(np.min(values) - 4 * width, np.max(values) + 4 * width, 300)
    values, masses = seen_by_probes(matrix, 6)
    exact = gaussian(t[:, None] - values, width) @ np.mean(masses, axis=0)
    density, std_err = density_of(operator_of(matrix), num_steps=steps)(t, width)
    assert np.max(np.abs(density - exact)) < 1e-3 * np.max(exact)
    assert np.allclose(np.trapezoid(density, t), 1, atol=1e-4)
    assert np.max(std_err) > np.max(np.abs(density - exact))


# --- degenerate operators, sizes and scales ---


def test_exact_with_as_many_steps_as_eigenvalues():
    values = np.repeat(np.array([0.5, 2.0, 3.0, 7.0]), N // 4)
    matrix = hermitian(7, values, np.float64)
    eigenvalues, masses = seen_by_probes(matrix, 6)
    for steps in (4, 8, 3 * N):
        found = density_of(operator_of(matrix), num_steps=steps)
        nodes, weights = np.asarray(found.nodes), np.asarray(found.weights)
        assert nodes.shape == (6, min(steps, N))
        assert np.all((nodes > 0.5 - 1e-9) & (nodes < 7 + 1e-9))
        assert np.allclose(np.sum(weights, axis=1), 1)
        for value in (0.5, 2.0, 3.0, 7.0):
            at_node = np.abs(nodes - value) < 1e-9
            mass = np.sum(np.where(at_node, weights, 0), axis=1)
            at_value = np.abs(eigenvalues - value) < 1e-9
            assert np.allclose(mass, masses @ at_value, atol=1e-9)


DEGENERATE = {
    "zero": (np.zeros(N), 0.0),
    "identity": (np.ones(N), 1.0),
    "negative": (-3 * np.ones(N), -3.0),
    "one by one": (2 * np.ones(1), 2.0),
}


@pytest.mark.slow(but=("zero-complex128", "one by one-complex128"))
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("name", DEGENERATE)
def test_breakdown_in_the_first_step(name, dtype):
    """One node has all of the weight: with a diagonal matrix nothing is rounded but the
    probe. With a dense one, products differ from those by rounding, and then nodes that
    do so share it."""
    values, value = DEGENERATE[name]
    eps = float(np.finfo(dtype).eps)
    dense = hermitian(8, values, dtype)
    for matrix in (np.diag(values).astype(dtype), dense):
        found = density_of(operator_of(matrix))
        assert found.nodes.shape == (6, min(8, values.size))
        assert np.allclose(found.nodes, value, rtol=0, atol=50 * eps * abs(value))
        assert np.allclose(np.sum(found.weights, axis=1), 1, atol=20 * eps)
        if matrix is not dense:
            assert np.allclose(np.max(found.weights, axis=1), 1, atol=20 * eps)
        density, std_err = found(value, 0.5)
        assert np.allclose(density, gaussian(0.0, 0.5), rtol=1e-5)
        assert std_err < 1e-5
        fraction, _ = found.cumulative(np.array([value - 0.1, value + 0.1]))
        assert np.allclose(fraction, np.array([0.0, 1.0]), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale(dtype, scale):
    values = SPECTRA["flat"]
    matrix = hermitian(10, values, dtype)
    one = density_of(operator_of(matrix))
    other = density_of(operator_of(matrix * dtype(scale)))
    tolerance = 2e3 * float(np.finfo(dtype).eps)
    nodes = np.asarray(other.nodes) / dtype(scale)
    assert np.allclose(nodes, one.nodes, atol=tolerance)
    assert np.allclose(other.weights, one.weights, atol=tolerance)
    t = np.linspace(-1.5, 2.5, 9, dtype=dtype)
    far = t * dtype(scale)
    for expected, found in zip(one(t, 0.3), other(far, 0.3 * scale), strict=True):
        assert np.allclose(np.asarray(found) * dtype(scale), expected, atol=tolerance)
    assert np.allclose(other.cumulative(far)[0], one.cumulative(t)[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_lower_precision(dtype):
    matrix = hermitian(11, SPECTRA["two clusters"], np.float64)
    matrix = matrix.astype(dtype)
    found = density_of(operator_of(matrix))
    exact = density_of(operator_of(matrix.astype(np.float64)))
    assert found.nodes.dtype == found.weights.dtype == np.float32
    t = np.linspace(-1, 4.5, 12)
    (density, std_err), (expected, _) = found(t, 0.5), exact(t, 0.5)
    assert density.dtype == std_err.dtype == np.float32
    error = np.max(np.abs(np.asarray(density) - np.asarray(expected)))
    assert error < 10 * float(jnp.finfo(dtype).eps) * np.max(expected)


def test_window():
    """Without reorthogonalisation copies of an eigenvalue share its weight, and the
    measure is the same."""
    matrix = hermitian(12, np.geomspace(1e-6, 1, N), np.float64)
    whole = density_of(operator_of(matrix), num_steps=N)
    t = np.linspace(-0.2, 1.2, 30)
    for window in (0, 2):
        estimator = tx.SLQEstimator(krylov=tx.Lanczos(window))
        found = density_of(operator_of(matrix), num_steps=N, estimator=estimator)
        assert not close(found, whole, 1e-8)
        assert np.allclose(found(t, 0.1)[0], whole(t, 0.1)[0], atol=1e-6)


CHOSEN = {
    "identity": (np.ones(200), 2),
    "zero": (np.zeros(200), 2),
    "five eigenvalues": (np.repeat(np.arange(1.0, 6), 40), 10),
    "noise and a kernel": (1e-3 + np.append(10.0 ** -np.arange(8), np.zeros(192)), 13),
    "flat": (np.linspace(-1, 1, 200), 128),
}


@pytest.mark.slow(but="five eigenvalues-float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_steps(name, dtype):
    """As few as the eigenvalues call for, with the measure of as many given steps, to
    within a share of its sampling error."""
    spectrum, most = CHOSEN[name]
    operator = operator_of(hermitian(3, spectrum, dtype))
    found = density_of(operator, k=10, num_steps=tx.AdaptiveSteps())
    assert 1 <= found.num_steps <= most
    assert found.num_matvecs == 11 * found.num_steps
    assert np.allclose(np.sum(found.weights, axis=1), 1, atol=1e-5)
    given = density_of(operator, k=10, num_steps=int(found.num_steps))
    whole = density_of(operator, k=10, num_steps=200)
    ends = np.min(spectrum), np.max(spectrum)
    points = np.linspace(ends[0] - 0.1, ends[1] + 0.1, 2000)
    fractions = [np.asarray(x.cumulative(points)[0]) for x in (found, given, whole)]
    step = points[1] - points[0]
    # Rounding moves nodes to the other side of a point, where many are the same.
    assert np.sum(np.abs(fractions[0] - fractions[1])) * step < 2 * step
    exact = np.mean(spectrum <= points[:, None], axis=1)
    sampling = np.sum(np.sqrt(2 * exact * (1 - exact) / (200 * 10))) * step
    if found.num_steps < 128:
        truncation = np.sum(np.abs(fractions[0] - fractions[2])) * step
        assert truncation < 0.3 * sampling + 2 * step


# --- operators, transformations, execution ---


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_pytrees(dtype):
    matrix = hermitian(13, SPECTRA["flat"], dtype)

    def mv(tree):
        flat = matrix @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": flat[:12].reshape(3, 4), "b": flat[12:]}

    shapes = {"a": (3, 4), "b": (N - 12,)}
    structure = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in shapes.items()}
    operator = lx.FunctionLinearOperator(mv, structure, tx.hermitian_tag)
    if dtype == np.float64:
        operator = lx.TaggedLinearOperator(operator, SYMMETRIC)
    assert close(density_of(operator), density_of(operator_of(matrix)), 1e-10)


def test_jit_and_vmap():
    matrix = hermitian(14, SPECTRA["flat"], np.float64)
    keys = jr.split(KEY, 3)
    run = lambda key: density_of(operator_of(matrix), key=key)  # noqa: E731
    one = [run(key) for key in keys]
    batch = jax.tree.map(np.asarray, jax.vmap(run)(keys))
    assert batch.nodes.shape == (3, 6, 8)
    assert np.all(batch.num_matvecs == 48)
    each = lambda density: density(0.3, 0.2)  # noqa: E731
    means, std_errs = jax.vmap(each)(batch)
    for i, expected in enumerate(one):
        assert close(jax.tree.map(lambda x: x[i], batch), expected, 1e-9)  # noqa: B023
        assert np.allclose(means[i], each(expected)[0])
        assert np.allclose(std_errs[i], each(expected)[1])
    assert close(jax.jit(run)(keys[0]), one[0], 1e-9)
    smooth = jax.jit(lambda t, width: run(keys[0])(t, width))
    assert np.allclose(smooth(0.3, 0.2)[0], means[0])
    scaled = lambda s: density_of(operator_of(s * matrix)).nodes  # noqa: E731
    scales = np.array([1.0, -2.0])
    stacked = np.stack([scaled(s) for s in scales])
    assert np.allclose(jax.vmap(scaled)(scales), stacked)


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("block_size", [None, 4])
def test_executions(block_size):
    matrix = hermitian(15, SPECTRA["flat"], np.float64)
    expected = density_of(operator_of(matrix))
    mesh = tx.probe_mesh(jax.devices()[:1])
    for execution in (tx.Local(block_size), tx.Sharded(mesh, block_size=block_size)):
        found = density_of(operator_of(matrix), execution=execution)
        assert close(found, expected, 1e-10)
    inside = jax.jit(lambda x: density_of(operator_of(x), execution=execution))
    assert close(inside(matrix), expected, 1e-10)


def test_number_of_products():
    calls = []

    def mv(v):
        jax.debug.callback(lambda _: calls.append(1), v)
        return np.linspace(1, 2, N) * v

    structure = jax.ShapeDtypeStruct((N,), np.float64)
    found = density_of(lx.FunctionLinearOperator(mv, structure, SYMMETRIC))
    jax.block_until_ready(found.nodes)
    jax.effects_barrier()
    assert len(calls) == found.num_matvecs == 48


def test_constant_to_derivatives():
    matrix = hermitian(16, SPECTRA["flat"], np.float64)

    def value(matrix, width):
        density, std_err = density_of(operator_of(matrix))(0.4, width)
        return density + std_err

    slope, in_width = jax.grad(value, (0, 1))(matrix, 0.3)
    assert np.all(slope == 0)
    difference = value(matrix, 0.3 + 1e-6) - value(matrix, 0.3 - 1e-6)
    assert np.allclose(in_width, difference / 2e-6, rtol=1e-6)


def test_strict_modes():
    matrix = hermitian(17, SPECTRA["flat"], np.float32)
    expected = density_of(operator_of(matrix))(0.3, 0.2)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = density_of(operator_of(matrix))
        assert np.allclose(found(0.3, 0.2)[0], expected[0])
        assert found.cumulative(np.zeros((2, 3)))[0].shape == (2, 3)


@pytest.mark.parametrize(
    "t", [0.5, 1, [0.0, 1.0], np.arange(6).reshape(2, 3), np.zeros((2, 0))], ids=str
)
def test_points_of_any_shape(t):
    found = density_of(operator_of(np.diag(SPECTRA["flat"])))
    for answer in (*found(t, 0.2), *found.cumulative(t)):
        assert answer.shape == np.shape(t)
        assert answer.dtype == np.float64


def test_one_probe():
    eigenvalues, width = SPECTRA["flat"], 0.2
    found = density_of(operator_of(np.diag(eigenvalues)), k=1)
    bumps = np.exp(-(((0.5 - eigenvalues) / width) ** 2) / 2)
    exact = np.mean(bumps) / (width * np.sqrt(2 * np.pi)), np.mean(eigenvalues <= 0.5)
    answers = found(0.5, width), found.cumulative(0.5)
    for (mean, std_err), expected in zip(answers, exact, strict=True):
        # Signs sample a diagonal matrix without error. 8 nodes are 0.4 apart, and leave
        # a quadrature error for bumps of half that width.
        assert abs(mean - expected) < 0.1
        assert std_err == np.inf


def test_products_that_are_not_finite():
    matrix = np.diag(np.where(np.arange(N) == 2, np.nan, SPECTRA["flat"]))
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        density_of(operator_of(matrix))
    found = density_of(operator_of(matrix), throw=False)
    assert found.result == tx.RESULTS.nonfinite_product
    assert np.isnan(found(0.0, 0.1)[0])


# --- wrong input ---


def check(exception, parts, call):
    with pytest.raises(exception) as error:
        call()
    for part in parts:
        assert part in str(error.value)


MATRIX = np.diag(np.arange(1.0, N + 1))
TAGGED = matrix_free(MATRIX, SYMMETRIC)


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize(
    ("settings", "exception", "parts"),
    [
        ({"k": 0}, ValueError, ["`k` must be at least 1", "Found 0"]),
        ({"k": 2.0}, TypeError, ["`k` must be an integer", "int(2.0)"]),
        ({"k": tx.Adaptive(rtol=1, max_k=9)}, ValueError, ["Adaptive", "an integer"]),
        ({"num_steps": -1}, ValueError, ["`num_steps` must be at least 1"]),
        ({"num_steps": True}, TypeError, ["`num_steps` must be an integer"]),
        ({"key": None}, ValueError, ["`key` is missing", "jax.random.key(0)"]),
        ({"key": 0}, TypeError, ["`key` must be one JAX PRNG key"]),
        ({"key": jr.split(KEY, 3)}, TypeError, ["`key`", "shape (3,)", "jax.vmap"]),
        ({"estimator": tx.Lanczos()}, TypeError, ["`estimator`", "SLQEstimator"]),
        (
            {"estimator": tx.KrylovAwareEstimator()},
            TypeError,
            ["`estimator` must be", "KrylovAwareEstimator"],
        ),
        (
            {"estimator": tx.SLQEstimator(krylov=tx.Arnoldi())},
            TypeError,
            ["`estimator.krylov` must be", "Lanczos(window=0)", "Arnoldi"],
        ),
        (
            {"estimator": tx.SLQEstimator(tx.SteinhausSampler())},
            ValueError,
            ["RademacherSampler"],
        ),
        (
            {"estimator": tx.SLQEstimator(tx.NormalSampler(complex))},
            ValueError,
            ["complex operator"],
        ),
        ({"execution": 3}, TypeError, ["`execution`", "traceax.Sharded(mesh)"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_wrong_settings(settings, exception, parts):
    check(exception, parts, lambda: density_of(TAGGED, **settings))


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize(
    ("operator", "exception", "parts"),
    [
        (MATRIX[0], TypeError, ["`operator`", "must be a matrix"]),
        (lambda v: v, TypeError, ["`operator`", "traceax.as_operator(function, like)"]),
        (lx.MatrixLinearOperator(MATRIX[:5]), ValueError, ["must be square"]),
        (matrix_free(MATRIX), ValueError, ["Hermitian", "lineax.symmetric_tag"]),
        (
            matrix_free(MATRIX.astype(complex), SYMMETRIC),
            ValueError,
            ["Hermitian", "traceax.hermitian_tag"],
        ),
    ],
    ids=["array", "function", "rectangular", "untagged", "complex-symmetric"],
)
def test_wrong_operators(operator, exception, parts):
    check(exception, parts, lambda: density_of(operator))


@pytest.mark.parametrize("name", ["k", "num_steps"])
def test_traced_integers(name):
    parts = [f"`{name}` must be a Python integer", f"static_argnames='{name}'"]
    check(TypeError, parts, lambda: jax.jit(lambda x: density_of(TAGGED, **{name: x}))(4))


@pytest.mark.parametrize(
    ("t", "width", "exception", "parts"),
    [
        (0.0, 0.0, ValueError, ["`width` must be one positive number", "Found 0.0"]),
        (0.0, -1, ValueError, ["`width` must be one positive number", "Found -1.0"]),
        (0.0, np.nan, ValueError, ["`width`", "Found nan"]),
        (0.0, np.ones(2), ValueError, ["`width`", "one positive number"]),
        (0.0, 1j, TypeError, ["`width` must be real", "complex128"]),
        (0.0, None, TypeError, ["`width` must be real", "NoneType"]),
        (np.ones(2) * 1j, 0.1, TypeError, ["`t` must be real", "complex128"]),
        ("0", 0.1, TypeError, ["`t` must be real", "str"]),
    ],
)
@pytest.mark.usefixtures("as_users_call")
def test_wrong_points(t, width, exception, parts):
    check(exception, parts, lambda: density_of(TAGGED)(t, width))


def test_batch_of_measures():
    batch = jax.vmap(lambda key: density_of(TAGGED, key=key))(jr.split(KEY, 3))
    for call in (lambda: batch(0.0, 0.1), lambda: batch.cumulative(0.0)):
        check(ValueError, ["batch of measures", "(3, 6, 8)", "jax.vmap"], call)


def test_extreme_ritz_values():
    """Those of a spectrum with two ends that stand apart; from inside, up to rounding."""
    spectrum = np.concatenate([[-5.0], np.linspace(-1, 1, 58), [7.0]])
    operator = lx.MatrixLinearOperator(
        jnp.asarray(hermitian(3, spectrum)), lx.symmetric_tag
    )
    settings = {"k": 3, "num_steps": 25}
    found = tx.spectral_density(operator, key=jr.key(0), **settings)
    np.testing.assert_allclose(found.largest, 7, atol=1e-9)
    np.testing.assert_allclose(found.smallest, -5, atol=1e-9)
    few = tx.spectral_density(operator, k=3, num_steps=3, key=jr.key(0))
    assert -5 < few.smallest < few.largest < 7
    batch = jax.vmap(lambda key: tx.spectral_density(operator, key=key, **settings))(
        jr.split(jr.key(0), 2)
    )
    assert batch.largest.shape == batch.smallest.shape == (2,)
