"""The derivative of the estimate of a function: the form that it has, its mean and its
variance, and what a callable costs to compile."""

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._numerics.frechet import divided_differences, few_pairs

from ..helpers import hermitian, matrix_free, z_score
from ..programs.common import PSD
from .test_slq import compiled, KEY, over_keys, trace_of


N, K = 24, 3
WHOLE = tx.LanczosGradient(columns=N)
DIRECTION = np.random.default_rng(5).standard_normal((2, N, N))


def direction_of(dtype):
    if np.issubdtype(dtype, np.complexfloating):
        return DIRECTION[0] + 1j * DIRECTION[1]
    return DIRECTION[0].astype(dtype)


def exact_differences(function, slope, nodes):
    """Divided differences by Gauss-Legendre quadrature of the slope."""
    points, weights = np.polynomial.legendre.leggauss(40)
    middle, gap = (nodes[:, None] + nodes) / 2, nodes[:, None] - nodes
    parts = zip(points, weights, strict=True)
    near = sum(w / 2 * slope(middle + x / 2 * gap) for x, w in parts)
    size = np.maximum(np.abs(nodes)[:, None], np.abs(nodes))
    far = np.abs(gap) > np.maximum(0.1 * size, 1e-9 * np.max(size))
    quotients = (function(nodes)[:, None] - function(nodes)) / np.where(far, gap, 1)
    return np.where(far, quotients, near)


PAIRS = {
    "log": (tx.Log(), np.log, lambda x: 1 / x),
    "exp": (tx.Exp(-1.0), lambda x: np.exp(-x), lambda x: -np.exp(-x)),
    "sqrt": (tx.Power(0.5), np.sqrt, lambda x: 0.5 / np.sqrt(x)),
}


@pytest.mark.slow(but="*-log")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-4), (np.float64, 1e-10)])
def test_divided_differences(name, dtype, bound):
    """For wide spectra with clusters of all widths."""
    generator = np.random.default_rng(0)
    nodes = 10 ** generator.uniform(-4, 1, 100)
    nodes = np.append(nodes, nodes * (1 + 10 ** generator.uniform(-9, -1, 100)))
    nodes = np.sort(np.append(nodes, nodes[:5])).astype(dtype)
    function, *reference = PAIRS[name]
    exact = exact_differences(*reference, nodes.astype(np.float64))
    of = lambda x: divided_differences(x, function(x), function.derivative(x))  # noqa: E731
    found = jax.jit(of)(nodes)
    assert np.max(np.abs(found / exact - 1)) < bound


def test_few_pairs():
    """The diagonal is right for any number; the whole converges fast, also where there
    is nothing left to eliminate."""
    nodes, weights = np.geomspace(1e-3, 1, 20), np.linspace(1, -1, 20)
    differences = exact_differences(*PAIRS["log"][1:], nodes)
    whole, errors = weights[:, None] * differences * weights, []
    for count in (1, 2, 4, 8, 30):
        left, right = map(np.asarray, compiled(few_pairs, differences, weights, count))
        found = left.T @ right
        assert left.shape == right.shape == (min(count, 20), 20)
        assert np.allclose(np.diag(found), np.diag(whole), rtol=1e-9, atol=0)
        errors.append(np.linalg.norm(found - whole) / np.linalg.norm(whole))
    assert errors[2] < 0.1
    assert errors[3] < 1e-3
    assert errors[4] < 1e-12
    for constant in (0.0, 2.0):
        ones = np.full((20, 20), constant)
        left, right = map(np.asarray, compiled(few_pairs, ones, np.ones(20), 4))
        assert np.array_equal(left.T @ right, ones)


def slope_along(matrix, direction, key, function, gradient, tags, krylov=None):
    settings = {"k": K, "num_steps": N, "key": key, "gradient": gradient, "tags": tags}
    estimator = tx.SLQEstimator(krylov=krylov)

    def value(t):
        return trace_of(matrix + t * direction, function, estimator, **settings).value

    return jax.grad(value)(0.0)


SPECTRA = {
    "wide": np.geomspace(1e-3, 1, N),
    "low rank": np.append(np.zeros(N - 5), [1, 2, 2, 2, 5]),
    "identity": np.ones(N),
}


@pytest.mark.slow(but=("complex128-low rank", "complex128-identity"))
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_derivative_of_the_form(spectrum, dtype):
    """`z* Df(A)[dA] z` for the probes themselves, by dense eigenvectors, with all
    columns; for matrices whose Krylov spaces end early too."""
    matrix, direction = hermitian(1, SPECTRA[spectrum], dtype), direction_of(dtype)
    direction = (direction + direction.conj().T) / 2
    real = not np.issubdtype(dtype, np.complexfloating)
    tags = lx.symmetric_tag if real else tx.hermitian_tag
    probes = np.asarray(compiled(tx.RademacherSampler(), KEY, N, K))
    nodes, vectors = np.linalg.eigh(matrix)
    weights = vectors.conj().T @ probes
    inner = vectors.conj().T @ direction @ vectors
    inner = inner * exact_differences(*PAIRS["exp"][1:], nodes)
    exact = np.sum(weights.conj() * (inner @ weights)).real / K
    arguments = matrix, direction, KEY, PAIRS["exp"][0]
    found = compiled(slope_along, *arguments, WHOLE, tags)
    assert np.isclose(found, exact, rtol=1e-9, atol=0)


def norm_along(matrix, direction, key, gradient):
    """The derivative of the sum of the logarithms of the singular values."""

    def value(t):
        operator = matrix_free(matrix + t * direction)
        settings = {"num_steps": N, "key": key, "gradient": gradient}
        return tx.logdet(operator, k=K, throw=False, **settings).value

    return jax.grad(value)(0.0)


@pytest.mark.slow(but="float64")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_derivative_of_the_form_of_singular_values(dtype):
    """Of `z* log(A* A) z / 2`, by dense eigenvectors."""
    matrix = direction_of(dtype) + 3 * np.eye(N)
    direction = np.random.default_rng(6).standard_normal((N, N)).astype(dtype)
    probes = np.asarray(compiled(tx.RademacherSampler(), KEY, N, K))
    square = direction.conj().T @ matrix + matrix.conj().T @ direction
    nodes, vectors = np.linalg.eigh(matrix.conj().T @ matrix)
    weights = vectors.conj().T @ probes
    inner = vectors.conj().T @ square @ vectors
    inner = inner * exact_differences(*PAIRS["log"][1:], nodes) / 2
    exact = np.sum(weights.conj() * (inner @ weights)).real / K
    assert np.isclose(compiled(norm_along, matrix, direction, KEY, WHOLE), exact)


def along_keys(key, matrix, direction, function, columns, tags, krylov):
    """By each of several numbers of columns, in one program."""
    gradients = [tx.LanczosGradient(columns=each) for each in columns]
    settings = tags, krylov
    return [
        slope_along(matrix, direction, key, function, each, *settings)
        for each in gradients
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "krylov"), [(np.float64, tx.Lanczos(window=0)), (np.float32, None)]
)
def test_unbiased_with_any_number_of_columns(dtype, krylov):
    """The mean does not depend on the number of columns: 300 keys, false alarm 6e-5
    each. The variance falls to that of all columns. It is that of `z* Df(A)[dA] z`."""
    values = np.geomspace(1e-2, 1, N)
    matrix, tags = hermitian(2, values, dtype), lx.positive_semidefinite_tag
    eigenvalues, vectors = np.linalg.eigh(matrix.astype(np.float64))
    # Large where the matrix is, as derivatives of kernels are.
    outer = np.sqrt(values) * DIRECTION[0] * np.sqrt(values)[:, None]
    direction = vectors @ (outer + outer.T + np.diag(values)) @ vectors.T
    exact = np.sum(np.einsum("ji,jk,ki->i", vectors, direction, vectors) / eigenvalues)
    arguments = matrix, direction.astype(dtype), tx.Log(), (1, 4, N), tags, krylov
    slopes = over_keys(along_keys, *arguments)
    for found in slopes:
        assert z_score(found, exact) < 4
    one, four, whole = map(np.std, slopes)
    assert four < 0.8 * one
    assert abs(four / whole - 1) < 0.02


@pytest.mark.slow
def test_derivative_in_a_parameter_of_the_derivative():
    """Equal to a central difference of the derivatives that are reported."""
    matrix = hermitian(3, np.linspace(0, 2, N))
    direction = DIRECTION[0] + DIRECTION[0].T

    def slope(scale):
        arguments = KEY, tx.Exp(scale), tx.LanczosGradient(), lx.symmetric_tag
        return slope_along(matrix, direction, *arguments)

    both = jax.jit(jax.value_and_grad(slope))
    difference = (both(-0.7 + 1e-5)[0] - both(-0.7 - 1e-5)[0]) / 2e-5
    assert np.isclose(both(-0.7)[1], difference, rtol=1e-6, atol=0)


def preconditioned_slopes(key, theta, square, rank, columns):
    """In the length scale and the noise of a kernel matrix, by each of several numbers of
    columns."""

    def value(theta, columns):
        kernel = jnp.exp(-square / (2 * theta[0] ** 2)) + theta[1] * jnp.eye(len(square))
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        preconditioner = tx.nystrom_preconditioner(
            operator, rank, key=jr.fold_in(key, 1), shift=theta[1]
        )
        settings = {"gradient": tx.LanczosGradient(columns=columns), "throw": False}
        settings |= {"k": 2, "num_steps": 20, "preconditioner": preconditioner}
        return tx.logdet(operator, key=key, **settings).value

    return [jax.grad(value)(theta, each) for each in columns]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "factor"), [(4, 0.75), (25, 1.05)])
def test_variance_with_a_preconditioner(rank, factor):
    """Of a low rank, which couples what it knows to what it does not, and of one that
    leaves nothing to do. Both derivatives by z-test, 300 keys, false alarm 6e-5 each."""
    theta = np.array([0.2, 0.01])
    x = np.random.default_rng(0).uniform(size=(60, 2))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    smooth = np.exp(-square / (2 * theta[0] ** 2))
    inverse = np.linalg.inv(smooth + theta[1] * np.eye(60))
    exact = np.sum(inverse * smooth * square) / theta[0] ** 3, np.trace(inverse)
    slopes = over_keys(preconditioned_slopes, theta, square, rank, (1, 4))
    one, four = map(np.asarray, slopes)
    for i in range(2):
        assert z_score(four[:, i], exact[i]) < 4
    assert np.std(four[:, 0]) < factor * np.std(one[:, 0])


@eqx.filter_jit
def solved_slopes(scale, matrix, function, rtol):
    """Value and derivative in the logarithm of a scale; of a logarithm the next two."""

    def estimate(t):
        operator = lx.MatrixLinearOperator(scale * jnp.exp(t) * matrix, PSD)
        settings = {"k": 4, "num_steps": 12, "key": KEY, "throw": False}
        settings["gradient"] = tx.SolveGradient(lx.CG(rtol=rtol, atol=rtol))
        return tx.trace_of_function(operator, function, **settings).value

    if function == tx.Log():
        return jax.value_and_grad(jax.grad(estimate))(0.0)
    return jax.value_and_grad(estimate)(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1e-4), (np.float64, 1e-9)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_solves_of_any_scale(dtype, rtol, scale):
    """`lineax.CG` breaks down where all eigenvalues are much below one."""
    square = DIRECTION[0, :, :8].astype(dtype)
    matrix, scale = square @ square.T + np.eye(N, dtype=dtype), dtype(scale)
    first, second = solved_slopes(scale, matrix, tx.Log(), rtol)
    np.testing.assert_allclose(first, N, rtol=30 * rtol)
    np.testing.assert_allclose(second, 0, atol=30 * rtol * N)
    value, first = solved_slopes(scale, matrix, tx.Inverse(), rtol)
    np.testing.assert_allclose(first, -value, rtol=30 * rtol, equal_nan=False)


def calls(make, values):
    """How many programs are compiled for calls with `make(value)`, the first aside."""
    matrix = hermitian(4, np.linspace(1, 2, N))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    settings = {"k": 2, "num_steps": 3, "key": KEY, "throw": False}
    found, names = [], []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, *_, **__: names.append(name)
    )
    try:
        for value in values:
            function = make(value)
            names.clear()
            solution = tx.trace_of_function(operator, function, **settings)
            found.append(float(solution.value))
            compiled = sum("backend_compile" in name for name in names)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return compiled, found


@pytest.mark.slow
def test_callables_with_the_same_code_compile_once():
    """A number that code closes over is part of it, an array is an argument."""
    compiled, found = calls(lambda _: lambda x: jnp.exp(-x) + 1, range(2))
    assert compiled == 0
    assert found[0] == found[1]
    compiled, found = calls(lambda s: lambda x: jnp.exp(s * x), jnp.array([-1.0, -2.0]))
    assert compiled == 0
    assert found[0] != found[1]
    compiled, found = calls(lambda s: lambda x: jnp.exp(s * x), [-1.0, -3.0])
    assert compiled == 1
    assert found[0] != found[1]


@pytest.mark.slow
def test_callables_with_derivative_rules_of_a_module_compile_once():
    compiled, _ = calls(lambda _: jax.nn.relu, range(2))
    assert compiled == 0
    compiled, _ = calls(lambda _: lambda x: 2 * jax.nn.relu(x), range(2))
    assert compiled == 0
