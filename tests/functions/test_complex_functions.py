"""Functions with complex values of Hermitian operators: against dense linear algebra, in
the trace, the diagonal, products and their derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, z_score


N, NUM_KEYS, TIME = 24, 400, 1.7
VALUES = np.linspace(-2, 1, N)
MATRICES = {dtype: hermitian(0, VALUES, dtype) for dtype in (np.float64, np.complex128)}
TAGS = {np.float64: lx.symmetric_tag, np.complex128: tx.hermitian_tag}
DIRECTION = np.diag(np.linspace(0, 1, N))
KEYS = jr.split(jr.key(20261128), NUM_KEYS)
every_dtype = pytest.mark.parametrize("dtype", MATRICES)


def exact(dtype, t=TIME):
    """exp(i t A), and the derivatives of its trace in t and in A along `DIRECTION`."""
    values, vectors = np.linalg.eigh(MATRICES[dtype])
    evolved = (vectors * np.exp(1j * t * values)) @ vectors.conj().T
    in_time = np.sum(1j * values * np.exp(1j * t * values))
    return evolved, in_time, np.trace(1j * t * evolved @ DIRECTION)


def operator_of(matrix, shift):
    tag = TAGS[matrix.dtype.type]
    return lx.MatrixLinearOperator(matrix + shift * DIRECTION, tag)


@eqx.filter_jit
def trace(matrix, t, shift, key, *, k, num_steps):
    """The value and its derivatives, and what follows it."""

    def value(t, shift):
        operator, settings = operator_of(matrix, shift), {"k": k, "num_steps": num_steps}
        function = tx.Exp(1j * t)
        found = tx.trace_of_function(operator, function, key=key, throw=False, **settings)
        return found.value, (found.std_err, found.interval(), found.stats["bracket"])

    found, in_time, rest = jax.jvp(lambda t: value(t, shift), (t,), (1.0,), has_aux=True)
    _, in_shift = jax.jvp(lambda s: value(t, s)[0], (shift,), (1.0,))
    return found, in_time, in_shift, rest


@every_dtype
def test_exact_trace(dtype):
    evolved, *slopes = exact(dtype)
    *found, (std_err, ends, _) = trace(MATRICES[dtype], TIME, 0.0, None, k=N, num_steps=1)
    assert np.allclose(found, [np.trace(evolved), *slopes], rtol=0, atol=1e-12)
    assert std_err == 0
    assert np.allclose(ends, np.trace(evolved), rtol=0, atol=1e-11)


@pytest.mark.slow
@every_dtype
def test_trace(dtype):
    """Unbiased, with its derivatives; the error bar and both parts of the interval are
    those of the errors."""
    evolved, *slopes = exact(dtype)
    true = np.trace(evolved)

    @jax.jit
    def over_keys(matrix):
        def one(key):
            *found, rest = trace(matrix, TIME, 0.0, key, k=8, num_steps=18)
            return *found, *rest

        return jax.lax.map(one, KEYS)

    found = over_keys(MATRICES[dtype])
    values, in_time, in_shift, std_err, (low, high), _ = map(jax.device_get, found)
    for samples, expected in zip(
        (values, in_time, in_shift), (true, *slopes), strict=True
    ):
        assert z_score(samples, expected) < 5
    # Bars from 8 skewed samples are widened.
    assert 0.9 < np.sqrt(np.mean(std_err**2)) / np.std(values) < 1.6
    for part in (np.real, np.imag):
        inside = (part(low) <= part(true)) & (part(true) <= part(high))
        assert np.mean(inside) > 0.93


@pytest.mark.slow
def test_quadrature_error():
    """The half width of the bracket is at least the modulus of the error."""
    matrix, key = MATRICES[np.float64], KEYS[0]
    converged, *_ = trace(matrix, TIME, 0.0, key, k=4, num_steps=20)
    for num_steps in (3, 5):
        found, *_, (*_, bracket) = trace(matrix, TIME, 0.0, key, k=4, num_steps=num_steps)
        error, (low, high) = np.abs(found - converged), bracket
        assert 1e-6 < error < (high - low) / 2 < 100 * error
        assert np.isclose((low + high) / 2, found.real)


@pytest.mark.slow(but="float64")
@every_dtype
def test_evolution(dtype):
    """`exp(i t A) v` of a complex vector, its transpose, and its derivatives; unitary."""
    matrix, (evolved, *_) = MATRICES[dtype], exact(dtype)
    vector = np.asarray(jr.normal(KEYS[0], (N,), complex))

    @jax.jit
    def run(matrix, vector):
        def product_at(shift):
            operator = tx.function_of(operator_of(matrix, shift), tx.Exp(1j * TIME), 20)
            return operator.mv(vector)

        product, tangent = jax.jvp(product_at, (0.0,), (1.0,))
        weight = jnp.arange(N) + 1j
        loss = lambda shift: jnp.vdot(weight, product_at(shift)).real  # noqa: E731
        operator = tx.function_of(operator_of(matrix, 0.0), tx.Exp(1j * TIME), 20)
        transposed = operator.transpose().mv(vector)
        return (product, transposed), tangent, jax.grad(loss)(0.0)

    (product, transposed), tangent, slope = run(matrix, vector)
    assert product.dtype == np.complex128
    assert np.allclose(product, evolved @ vector, rtol=0, atol=1e-10)
    assert np.allclose(transposed, evolved.T @ vector, rtol=0, atol=1e-10)
    assert np.isclose(np.linalg.norm(product), np.linalg.norm(vector))
    step = 1e-5
    ends = []
    for shift in (step, -step):
        values, vectors = np.linalg.eigh(matrix + shift * DIRECTION)
        ends.append((vectors * np.exp(1j * TIME * values)) @ vectors.conj().T @ vector)
    expected = (ends[0] - ends[1]) / (2 * step)
    assert np.allclose(tangent, expected, rtol=0, atol=1e-7)
    weight = np.arange(N) + 1j
    assert np.allclose(slope, np.vdot(weight, expected).real, rtol=1e-6)


@pytest.mark.slow
@every_dtype
def test_diagonal(dtype):
    """Exact, and by two estimators."""
    evolved, *_ = exact(dtype)

    @eqx.filter_jit
    def diagonal(matrix, key, estimator, k):
        operator, function = operator_of(matrix, 0.0), tx.Exp(1j * TIME)
        settings = {"k": k, "num_steps": 20, "key": key, "throw": False}
        found = tx.diagonal_of_function(operator, function, estimator, **settings)
        return found.value, found.std_err, found.stats["num_matvecs"]

    matrix = MATRICES[dtype]
    value, *_ = diagonal(matrix, KEYS[0], tx.HutchinsonEstimator(), N)
    assert np.allclose(value, np.diag(evolved), rtol=0, atol=1e-12)
    for estimator in (tx.HutchinsonEstimator(), tx.AutoDiagonalEstimator()):
        found = [diagonal(matrix, key, estimator, 12) for key in KEYS[:12]]
        values, std_errs, (num_matvecs, *_) = map(np.asarray, zip(*found, strict=True))
        scores = (values - np.diag(evolved)) / std_errs
        assert 0.7 < np.sqrt(np.mean(np.abs(scores) ** 2)) < 1.5
        assert num_matvecs == (2 if dtype == np.float64 else 1) * 13 * 20


@pytest.mark.slow
def test_resolvent():
    """The Green's function `1 / (A + s)`, with a shift that is an argument."""
    matrix = hermitian(3, np.linspace(0, 2, N))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

    def value(shift, k):
        settings = {"k": k, "num_steps": 20, "key": KEYS[1]}
        return tx.trace_of_function(operator, tx.Inverse(shift), **settings)

    shift = jnp.asarray(0.5 + 0.3j)
    true = np.sum(1 / (np.linspace(0, 2, N) + 0.5 + 0.3j))
    assert np.allclose(value(shift, N).value, true)
    found = value(shift, 20)
    assert np.abs(found.value - true) < 4 * found.std_err


@pytest.mark.usefixtures("as_users_call")
def test_refused():
    operator, settings = operator_of(MATRICES[np.float64], 0.0), {"k": 4, "key": KEYS[0]}
    function = tx.Exp(1j)
    for call in (
        lambda: tx.trace_difference(operator, operator, function, **settings),
        lambda: tx.diagonal_of_product(operator, operator, function, **settings),
        lambda: tx.trace_of_function(
            operator, function, tx.KrylovAwareEstimator(), **settings
        ),
    ):
        with pytest.raises(TypeError, match="`function` must be real on real numbers"):
            call()
