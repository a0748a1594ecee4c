"""Spectral densities: Gauss rules for what each probe sees, unbiased over probes, and
right where an operator is degenerate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from .helpers import matrix_free, spectrum_matrix, z_score


SYMMETRIC = lx.symmetric_tag
KEY = jr.key(3)
N = 40
SPECTRA = {
    "flat": jnp.linspace(-1, 2, N),
    "decaying": 0.7 ** jnp.arange(N),
    "two clusters": jnp.where(jnp.arange(N) < 15, 0.0, 3.0) + jnp.linspace(0, 0.5, N),
    "rank deficient": jnp.maximum(jnp.arange(N) - 30.0, 0),
}
every_spectrum = pytest.mark.parametrize("name", SPECTRA)


def hermitian(matrix):
    tag = tx.hermitian_tag if jnp.iscomplexobj(matrix) else SYMMETRIC
    return lx.MatrixLinearOperator(matrix, tag)


def density_of(operator, *, k=6, num_steps=8, key=KEY, **settings):
    return tx.spectral_density(operator, k=k, num_steps=num_steps, key=key, **settings)


def seen_by_probes(matrix, k):
    """Eigenvalues, and the mass that each of the first k probes of KEY gives to them."""
    values, vectors = jnp.linalg.eigh(matrix)
    probes = tx.RademacherSampler()(KEY, matrix.shape[0], k).astype(matrix.dtype)
    return values, jnp.abs(vectors.conj().T @ probes).T ** 2 / matrix.shape[0]


def close(first, second, tolerance):
    """Whether two measures have the same nodes, and the same masses at them."""
    return (
        jnp.allclose(first.nodes, second.nodes, rtol=0, atol=tolerance)
        and jnp.allclose(first.weights, second.weights, rtol=0, atol=tolerance)
        and first.num_matvecs == second.num_matvecs
    )


def gaussian(distance, width):
    return jnp.exp(-((distance / width) ** 2) / 2) / (width * (2 * jnp.pi) ** 0.5)


# --- what it estimates ---


@every_spectrum
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
def test_each_row_is_a_gauss_rule(name, dtype):
    """Of the measure of its probe: all moments below `2 num_steps`, which for power 0 is
    that weights sum to 1, and the inequalities of Chebyshev, Markov and Stieltjes."""
    matrix = spectrum_matrix(jr.key(1), SPECTRA[name], dtype)
    values, masses = seen_by_probes(matrix, 6)
    found = density_of(hermitian(matrix))
    assert found.nodes.shape == found.weights.shape == (6, 8)
    assert found.nodes.dtype == found.weights.dtype == jnp.float64
    assert found.num_matvecs == 48
    assert jnp.all(jnp.diff(found.nodes) >= 0)
    assert jnp.all(found.weights >= 0)
    unit = jnp.max(jnp.abs(values))
    powers = jnp.arange(16)
    moments = found.weights[..., None] * (found.nodes[..., None] / unit) ** powers
    exact = masses @ (values[:, None] / unit) ** powers
    assert jnp.allclose(jnp.sum(moments, axis=1), exact, rtol=1e-11)
    slack = 1e-9
    for nodes, weights, mass in zip(found.nodes, found.weights, masses, strict=True):
        above, total = nodes[:, None] + slack * unit, jnp.cumsum(weights)
        below = nodes[:, None] - slack * unit
        assert jnp.all(total - weights <= jnp.sum(mass * (values < above), 1) + slack)
        assert jnp.all(jnp.sum(mass * (values <= below), 1) <= total + slack)


SAMPLERS = [
    (tx.RademacherSampler(), jnp.float64),
    (tx.SphereSampler(), jnp.float64),
    (tx.NormalSampler(), jnp.float64),
    (tx.RademacherSampler(), jnp.complex128),
    (tx.SteinhausSampler(), jnp.complex128),
]


@pytest.mark.parametrize(("sampler", "dtype"), SAMPLERS)
def test_moments_are_unbiased(sampler, dtype):
    """`tr(A^p) / n` for p up to 3, and with 4 steps for p = 6: 300 keys, false alarm 6e-5
    each."""
    values = SPECTRA["flat"]
    operator = hermitian(spectrum_matrix(jr.key(2), values, dtype))

    def moments(key):
        found = density_of(operator, k=4, num_steps=4, key=key, sampler=sampler)
        powers = found.nodes[..., None] ** jnp.array([1, 2, 3, 6])
        return jnp.mean(jnp.sum(found.weights[..., None] * powers, axis=1), axis=0)

    keys = jr.split(jr.key(20261121), 300)
    found = jax.jit(lambda keys: jax.lax.map(moments, keys))(keys)
    for samples, power in zip(found.T, (1, 2, 3, 6), strict=True):
        assert z_score(samples, jnp.mean(values**power)) < 4


def test_standard_errors_are_calibrated():
    """Against the spread over 300 keys; and once steps are as many as n, density and
    distribution function are unbiased, false alarm 6e-5 each."""
    values = SPECTRA["two clusters"]
    operator = hermitian(spectrum_matrix(jr.key(4), values, jnp.float64))
    points, width = jnp.array([0.1, 0.33, 3.2]), 0.2

    def run(key):
        found = density_of(operator, k=8, num_steps=N, key=key)
        return found(points, width), found.cumulative(points)

    keys = jr.split(jr.key(20261121), 300)
    found = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    distance = points[:, None] - values
    exact = jnp.mean(gaussian(distance, width), axis=1), jnp.mean(distance >= 0, axis=1)
    for (mean, std_err), expected in zip(found, exact, strict=True):
        for i in range(3):
            assert z_score(mean[:, i], expected[i]) < 4
            ratio = jnp.sqrt(jnp.mean(std_err[:, i] ** 2)) / jnp.std(mean[:, i])
            assert 0.9 < ratio < 2


@pytest.mark.parametrize("name", ["flat", "two clusters", "rank deficient"])
def test_distance_of_the_distribution_function(name):
    """Kolmogorov's, from the exact one: three standard errors. Steps are as many as n, so
    that there is no error of the quadrature."""
    values = SPECTRA[name]
    matrix = spectrum_matrix(jr.key(5), values, jnp.float64)
    found = density_of(hermitian(matrix), k=30, num_steps=N)
    t = jnp.concatenate([values - 1e-6, values + 1e-6])
    fraction, std_err = found.cumulative(t)
    exact = jnp.mean(values <= t[:, None], axis=1)
    assert jnp.all(jnp.abs(fraction - exact) <= 3 * std_err + 1e-9)
    assert jnp.max(std_err) < 0.05


@pytest.mark.parametrize("name", ["flat", "two clusters", "rank deficient"])
def test_what_a_rule_resolves(name):
    """The error of the quadrature, at a width of the range over the number of steps, is
    below a thousandth of the peak."""
    n, steps = 200, 16
    values = jnp.interp(jnp.linspace(0, 1, n), jnp.linspace(0, 1, N), SPECTRA[name])
    matrix = spectrum_matrix(jr.key(6), values, jnp.float64)
    width = (jnp.max(values) - jnp.min(values)) / steps
    t = jnp.linspace(jnp.min(values) - 4 * width, jnp.max(values) + 4 * width, 300)
    values, masses = seen_by_probes(matrix, 6)
    exact = gaussian(t[:, None] - values, width) @ jnp.mean(masses, axis=0)
    density, std_err = density_of(hermitian(matrix), num_steps=steps)(t, width)
    assert jnp.max(jnp.abs(density - exact)) < 1e-3 * jnp.max(exact)
    assert jnp.allclose(jnp.trapezoid(density, t), 1, atol=1e-4)
    assert jnp.max(std_err) > jnp.max(jnp.abs(density - exact))


# --- degenerate operators, sizes and scales ---


def test_exact_with_as_many_steps_as_eigenvalues():
    values = jnp.repeat(jnp.array([0.5, 2.0, 3.0, 7.0]), N // 4)
    matrix = spectrum_matrix(jr.key(7), values, jnp.float64)
    eigenvalues, masses = seen_by_probes(matrix, 6)
    for steps in (4, 8, 3 * N):
        found = density_of(hermitian(matrix), num_steps=steps)
        assert found.nodes.shape == (6, min(steps, N))
        assert jnp.all((found.nodes > 0.5 - 1e-9) & (found.nodes < 7 + 1e-9))
        assert jnp.allclose(jnp.sum(found.weights, axis=1), 1)
        for value in (0.5, 2.0, 3.0, 7.0):
            at_node = jnp.abs(found.nodes - value) < 1e-9
            mass = jnp.sum(jnp.where(at_node, found.weights, 0), axis=1)
            at_value = jnp.abs(eigenvalues - value) < 1e-9
            assert jnp.allclose(mass, masses @ at_value, atol=1e-9)


DEGENERATE = {
    "zero": (jnp.zeros(N), 0.0),
    "identity": (jnp.ones(N), 1.0),
    "negative": (-3 * jnp.ones(N), -3.0),
    "one by one": (2 * jnp.ones(1), 2.0),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128])
@pytest.mark.parametrize("name", DEGENERATE)
def test_breakdown_in_the_first_step(name, dtype):
    """One node has all of the weight: with a diagonal matrix nothing is rounded but the
    probe. With a dense one, products differ from those by rounding, and then nodes that
    do so share it."""
    values, value = DEGENERATE[name]
    eps = float(jnp.finfo(dtype).eps)
    dense = spectrum_matrix(jr.key(8), values, dtype)
    for matrix in (jnp.diag(values).astype(dtype), dense):
        found = density_of(hermitian(matrix))
        assert found.nodes.shape == (6, min(8, values.size))
        assert jnp.allclose(found.nodes, value, rtol=0, atol=50 * eps * abs(value))
        assert jnp.allclose(jnp.sum(found.weights, axis=1), 1, atol=20 * eps)
        if matrix is not dense:
            assert jnp.allclose(jnp.max(found.weights, axis=1), 1, atol=20 * eps)
        density, std_err = found(value, 0.5)
        assert jnp.allclose(density, gaussian(0.0, 0.5), rtol=1e-5)
        assert std_err < 1e-5
        fraction, _ = found.cumulative(jnp.array([value - 0.1, value + 0.1]))
        assert jnp.allclose(fraction, jnp.array([0.0, 1.0]), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale(dtype, scale):
    values = SPECTRA["flat"]
    matrix = spectrum_matrix(jr.key(10), values, dtype)
    one = density_of(hermitian(matrix))
    other = density_of(hermitian(scale * matrix))
    tolerance = 2e3 * float(jnp.finfo(dtype).eps)
    assert jnp.allclose(other.nodes / scale, one.nodes, atol=tolerance)
    assert jnp.allclose(other.weights, one.weights, atol=tolerance)
    t = jnp.linspace(-1.5, 2.5, 9, dtype=dtype)
    pairs = zip(one(t, 0.3), other(scale * t, 0.3 * scale), strict=True)
    for expected, found in pairs:
        assert jnp.allclose(found * scale, expected, atol=tolerance)
    assert jnp.allclose(other.cumulative(scale * t)[0], one.cumulative(t)[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lower_precision(dtype):
    matrix = spectrum_matrix(jr.key(11), SPECTRA["two clusters"], jnp.float64)
    matrix = matrix.astype(dtype)
    found = density_of(hermitian(matrix))
    exact = density_of(hermitian(matrix.astype(jnp.float64)))
    assert found.nodes.dtype == found.weights.dtype == jnp.float32
    t = jnp.linspace(-1, 4.5, 12)
    (density, std_err), (expected, _) = found(t, 0.5), exact(t, 0.5)
    assert density.dtype == std_err.dtype == jnp.float32
    error = jnp.max(jnp.abs(density - expected))
    assert error < 10 * float(jnp.finfo(dtype).eps) * jnp.max(expected)


def test_window():
    """Without reorthogonalisation copies of an eigenvalue share its weight, and the
    measure is the same."""
    matrix = spectrum_matrix(jr.key(12), jnp.geomspace(1e-6, 1, N), jnp.float64)
    whole = density_of(hermitian(matrix), num_steps=N)
    t = jnp.linspace(-0.2, 1.2, 30)
    for window in (0, 2):
        found = density_of(hermitian(matrix), num_steps=N, window=window)
        assert not close(found, whole, 1e-8)
        assert jnp.allclose(found(t, 0.1)[0], whole(t, 0.1)[0], atol=1e-6)


# --- operators, transformations, execution ---


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
def test_pytrees(dtype):
    matrix = spectrum_matrix(jr.key(13), SPECTRA["flat"], dtype)

    def mv(tree):
        flat = matrix @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": flat[:12].reshape(3, 4), "b": flat[12:]}

    shapes = {"a": (3, 4), "b": (N - 12,)}
    structure = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in shapes.items()}
    operator = lx.FunctionLinearOperator(mv, structure, tx.hermitian_tag)
    if dtype == jnp.float64:
        operator = lx.TaggedLinearOperator(operator, SYMMETRIC)
    assert close(density_of(operator), density_of(hermitian(matrix)), 1e-10)


def test_jit_and_vmap():
    matrix = spectrum_matrix(jr.key(14), SPECTRA["flat"], jnp.float64)
    keys = jr.split(KEY, 3)
    run = lambda key: density_of(hermitian(matrix), key=key)  # noqa: E731
    one = [run(key) for key in keys]
    batch = jax.vmap(run)(keys)
    assert batch.nodes.shape == (3, 6, 8)
    assert batch.num_matvecs == 48
    each = lambda density: density(0.3, 0.2)  # noqa: E731
    means, std_errs = jax.vmap(each)(batch)
    for i, expected in enumerate(one):
        assert close(jax.tree.map(lambda x: x[i], batch), expected, 1e-9)  # noqa: B023
        assert jnp.allclose(means[i], each(expected)[0])
        assert jnp.allclose(std_errs[i], each(expected)[1])
    assert close(jax.jit(run)(keys[0]), one[0], 1e-9)
    smooth = jax.jit(lambda t, width: run(keys[0])(t, width))
    assert jnp.allclose(smooth(0.3, 0.2)[0], means[0])
    scaled = lambda s: density_of(hermitian(s * matrix)).nodes  # noqa: E731
    scales = jnp.array([1.0, -2.0])
    stacked = jnp.stack([scaled(s) for s in scales])
    assert jnp.allclose(jax.vmap(scaled)(scales), stacked)


@pytest.mark.parametrize("block_size", [None, 4])
def test_executions(block_size):
    matrix = spectrum_matrix(jr.key(15), SPECTRA["flat"], jnp.float64)
    expected = density_of(hermitian(matrix))
    mesh = tx.probe_mesh(jax.devices()[:1])
    for execution in (tx.Local(block_size), tx.Sharded(mesh, block_size=block_size)):
        found = density_of(hermitian(matrix), execution=execution)
        assert close(found, expected, 1e-10)
    inside = jax.jit(lambda x: density_of(hermitian(x), execution=execution))
    assert close(inside(matrix), expected, 1e-10)


def test_number_of_products():
    calls = []

    def mv(v):
        jax.debug.callback(lambda _: calls.append(1), v)
        return jnp.linspace(1, 2, N) * v

    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    found = density_of(lx.FunctionLinearOperator(mv, structure, SYMMETRIC))
    jax.block_until_ready(found.nodes)
    jax.effects_barrier()
    assert len(calls) == found.num_matvecs == 48


def test_constant_to_derivatives():
    matrix = spectrum_matrix(jr.key(16), SPECTRA["flat"], jnp.float64)

    def value(matrix, width):
        density, std_err = density_of(hermitian(matrix))(0.4, width)
        return density + std_err

    slope, in_width = jax.grad(value, (0, 1))(matrix, 0.3)
    assert jnp.all(slope == 0)
    difference = value(matrix, 0.3 + 1e-6) - value(matrix, 0.3 - 1e-6)
    assert jnp.allclose(in_width, difference / 2e-6, rtol=1e-6)


def test_strict_modes():
    matrix = spectrum_matrix(jr.key(17), SPECTRA["flat"], jnp.float32)
    expected = density_of(hermitian(matrix))(0.3, 0.2)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = density_of(hermitian(matrix))
        assert jnp.allclose(found(0.3, 0.2)[0], expected[0])
        assert found.cumulative(jnp.zeros((2, 3)))[0].shape == (2, 3)


@pytest.mark.parametrize(
    "t", [0.5, 1, [0.0, 1.0], np.arange(6).reshape(2, 3), jnp.zeros((2, 0))], ids=str
)
def test_points_of_any_shape(t):
    found = density_of(hermitian(jnp.diag(SPECTRA["flat"])))
    for answer in (*found(t, 0.2), *found.cumulative(t)):
        assert answer.shape == np.shape(t)
        assert answer.dtype == jnp.float64


def test_one_probe():
    found = density_of(hermitian(jnp.diag(SPECTRA["flat"])), k=1)
    for mean, std_err in (found(0.5, 0.2), found.cumulative(0.5)):
        assert jnp.isfinite(mean)
        assert std_err == jnp.inf


def test_products_that_are_not_finite():
    matrix = jnp.diag(SPECTRA["flat"]).at[2, 2].set(jnp.nan)
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        density_of(hermitian(matrix))
    found = density_of(hermitian(matrix), throw=False)
    assert found.result == tx.RESULTS.nonfinite_product
    assert jnp.isnan(found(0.0, 0.1)[0])


# --- wrong input ---


@pytest.fixture
def as_users_call():
    """Without the run-time checks of annotations, which would come before ours."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def check(exception, parts, call):
    with pytest.raises(exception) as error:
        call()
    for part in parts:
        assert part in str(error.value)


MATRIX = jnp.diag(jnp.arange(1.0, N + 1))
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
        ({"window": -1}, ValueError, ["`window`", "0 or more", "Found -1"]),
        ({"window": 1.0}, ValueError, ["`window`", "Found 1.0"]),
        ({"window": "all"}, ValueError, ["`window`", "None", "Found 'all'"]),
        (
            {"sampler": tx.RademacherSampler},
            TypeError,
            ["`sampler`", "the class RademacherSampler"],
        ),
        ({"sampler": tx.SteinhausSampler()}, ValueError, ["RademacherSampler"]),
        ({"sampler": tx.NormalSampler(complex)}, ValueError, ["complex operator"]),
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
        (MATRIX, TypeError, ["`operator`", "lineax.MatrixLinearOperator(matrix)"]),
        (lambda v: v, TypeError, ["`operator`", "lineax.FunctionLinearOperator("]),
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
        (0.0, jnp.nan, ValueError, ["`width`", "Found nan"]),
        (0.0, jnp.ones(2), ValueError, ["`width`", "one positive number"]),
        (0.0, 1j, TypeError, ["`width` must be real", "complex128"]),
        (0.0, None, TypeError, ["`width` must be real", "NoneType"]),
        (jnp.ones(2) * 1j, 0.1, TypeError, ["`t` must be real", "complex128"]),
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
