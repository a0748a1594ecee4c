"""Derivatives: unbiased for every estimator, of first and second order, real and complex,
and finite where factorisations have no derivative."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx

from .helpers import ESTIMATORS, matrix_free, spectrum_matrix, z_score


PSD = lx.positive_semidefinite_tag
ALL = [estimator for estimator, _ in ESTIMATORS]
EVERY = pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
N = 24


def family(dtype):
    """A curve of positive definite Hermitian matrices: `theta -> A(theta)`."""
    base = spectrum_matrix(jr.key(0), jnp.arange(1, N + 1) ** -1.0, dtype)
    direction = spectrum_matrix(jr.key(1), jnp.arange(1.0, N + 1.0) / N, dtype)

    def matrix(theta):
        theta = jnp.asarray(theta, dtype)
        return (1 + theta**2) * base + jnp.exp(theta) * direction

    return matrix


def estimate(matrix, estimator, key, k=9):
    operator = matrix_free(matrix, PSD)
    return tx.trace(operator, estimator, k=k, key=key, throw=False).value.real


def over_keys(function, num_keys=300):
    keys = jr.split(jr.key(5), num_keys)
    return jax.jit(lambda keys: jax.lax.map(function, keys))(keys)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@EVERY
def test_first_and_second_derivatives_are_unbiased(estimator, dtype):
    """300 keys, at theta = 0.3; false alarms 6e-5 for each of 2 derivatives."""
    matrix = family(dtype)

    def run(key):
        function = lambda theta: estimate(matrix(theta), estimator, key)  # noqa: E731
        return jax.grad(function)(0.3), jax.grad(jax.grad(function))(0.3)

    first, second = over_keys(run)
    exact = lambda theta: jnp.trace(matrix(theta)).real  # noqa: E731
    assert z_score(first, jax.grad(exact)(0.3)) < 4
    assert z_score(second, jax.grad(jax.grad(exact))(0.3)) < 4


@EVERY
def test_gradient_in_the_matrix_is_unbiased(estimator):
    """`d tr A / dA = I`, entry by entry: 300 keys, the largest of 576 z-scores below 5
    (false alarms 3e-4)."""
    matrix = family(jnp.float64)(0.3)
    run = jax.grad(lambda a, key: estimate(a, estimator, key))
    gradients = over_keys(lambda key: run(matrix, key))
    mean, spread = jnp.mean(gradients, 0), jnp.std(gradients, 0, ddof=1) / 300**0.5
    error = jnp.abs(mean - jnp.eye(N)) - 1e-12
    assert float(jnp.max(error / jnp.maximum(spread, 1e-12))) < 5


def test_complex_parameter():
    """The gradient in a complex parameter z of `Re tr A(z)`, A not Hermitian."""
    base = jr.normal(jr.key(0), (N, N), jnp.complex128)

    def function(z, key):
        operator = matrix_free(base * z**2 + jnp.eye(N) * jnp.exp(z))
        return tx.trace(operator, tx.XTraceEstimator(), k=9, key=key).value.real

    z = 0.4 + 0.7j
    gradients = over_keys(lambda key: jax.grad(function)(z, key))
    exact = lambda z: jnp.trace(base * z**2 + jnp.eye(N) * jnp.exp(z)).real  # noqa: E731
    assert z_score(gradients, jax.grad(exact)(z)) < 4


@EVERY
def test_forward_equals_reverse(estimator):
    matrix = family(jnp.float64)
    function = lambda theta: estimate(matrix(theta), estimator, jr.key(0))  # noqa: E731
    value, tangent = jax.jvp(function, (0.3,), (1.0,))
    assert jnp.allclose(value, function(0.3), rtol=1e-13)
    assert jnp.allclose(tangent, jax.grad(function)(0.3), rtol=1e-12)
    forward_reverse = jax.jvp(jax.grad(function), (0.3,), (1.0,))[1]
    reverse_forward = jax.grad(lambda t: jax.jvp(function, (t,), (1.0,))[1])(0.3)
    assert jnp.allclose(forward_reverse, reverse_forward, rtol=1e-12)


@EVERY
def test_vmap_of_grad(estimator):
    matrix = family(jnp.float64)
    run = jax.grad(lambda theta, key: estimate(matrix(theta), estimator, key))
    thetas, keys = jnp.linspace(0.1, 0.5, 3), jr.split(jr.key(0), 3)
    together = jax.jit(jax.vmap(run))(thetas, keys)
    alone = jnp.stack([run(theta, key) for theta, key in zip(thetas, keys, strict=True)])
    assert jnp.allclose(together, alone, rtol=1e-10)


@EVERY
def test_linear_scaling_has_the_estimate_as_derivative(estimator):
    """`tr(s A)` is linear in s. Hutchinson, Hutch++ and XTrace are linear in A for frozen
    coefficients, so their derivative at s = 1 is the estimate itself."""
    matrix = family(jnp.float64)(0.3)
    run = lambda s: estimate(s * matrix, estimator, jr.key(0))  # noqa: E731
    value, slope = jax.value_and_grad(run)(1.0)
    if isinstance(estimator, tx.NystromPlusPlusEstimator | tx.XNysTraceEstimator):
        assert jnp.allclose(slope, value, rtol=0.2)
    else:
        assert jnp.allclose(slope, value, rtol=1e-11)


@pytest.mark.parametrize("rank", [0, 1, 3])
@EVERY
def test_gradient_at_rank_deficient_operators(estimator, rank):
    """Where QR and Cholesky have no derivative. Unbiased: 300 keys, false alarms 6e-5."""
    eigenvalues = jnp.where(jnp.arange(N) < rank, 1.0, 0.0)
    base = spectrum_matrix(jr.key(0), eigenvalues, jnp.float64)
    direction = spectrum_matrix(jr.key(1), jnp.arange(1.0, N + 1.0), jnp.float64)
    run = jax.grad(lambda s, key: estimate(base + s * direction, estimator, key, k=12))
    gradients = over_keys(lambda key: run(0.0, key))
    assert z_score(gradients, jnp.trace(direction)) < 4


def test_only_the_value_has_a_derivative():
    def function(scale):
        operator = matrix_free(scale * jnp.diag(jnp.arange(1.0, 9.0)), PSD)
        estimator = tx.XNysTraceEstimator()
        solution = tx.trace(operator, estimator, k=4, key=jr.key(0), throw=False)
        return solution.std_err + jnp.sum(solution.stats["samples"])

    assert jax.grad(function)(1.0) == 0


@pytest.mark.parametrize("order", [1, 2])
def test_hessian_operator(order):
    """The trace of a Hessian in PyTree parameters, differentiated once and twice."""

    def loss(params):
        return jnp.sum(jnp.tanh(params["w"]) @ jnp.sin(params["b"])) ** 2 / 2

    params = {"w": jr.normal(jr.key(0), (3, 4)), "b": jr.normal(jr.key(1), (4,))}

    def sharpness(scale, key):
        scaled = jax.tree.map(lambda x: x * scale, params)
        return tx.trace(tx.hessian(loss, scaled), k=8, key=key, throw=False).value

    def exact(scale):
        scaled = jax.tree.map(lambda x: x * scale, params)
        return jnp.trace(tx.hessian(loss, scaled).as_matrix())

    derivative = jax.grad if order == 1 else lambda f: jax.grad(jax.grad(f))
    gradients = over_keys(lambda key: derivative(lambda s: sharpness(s, key))(1.0))
    assert z_score(gradients, derivative(exact)(1.0)) < 4


def test_function_that_closes_over_what_is_differentiated():
    matrix = family(jnp.float64)(0.3)

    def function(scale):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * (matrix @ v),
            jax.ShapeDtypeStruct((N,), matrix.dtype),
            PSD,
            closure_convert=False,
        )
        return tx.trace(operator, tx.XTraceEstimator(), k=9, key=jr.key(0)).value

    value, slope = jax.value_and_grad(function)(1.0)
    assert jnp.allclose(slope, value, rtol=1e-11)


@pytest.mark.parametrize("gradient", [False, True])
def test_streaming_memory(gradient):
    """Hutchinson holds a block of probes at a time, in the backward pass too: with one
    probe per block, fewer than 6 vectors of temporaries for 64 probes."""
    n = 100_000

    def run(diagonal, key):
        operator = lx.FunctionLinearOperator(
            lambda v: diagonal * jnp.sin(diagonal) * v,
            jax.ShapeDtypeStruct((n,), jnp.float32),
        )
        execution = tx.Local(block_size=1)
        estimator = tx.HutchinsonEstimator()
        solution = tx.trace(
            operator, estimator, k=64, key=key, execution=execution, throw=False
        )
        return solution.value

    function = jax.grad(run) if gradient else run
    diagonal = jnp.ones(n, jnp.float32)
    compiled = jax.jit(function).lower(diagonal, jr.key(0)).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 6 * 4 * n


@EVERY
def test_no_factorisation_is_added_by_the_gradient(estimator):
    """The compiled gradient calls LAPACK no more often than frames need: the value's
    factorisations and at most one QR with the SVD of its R."""

    def calls(function):
        text = jax.jit(function).lower(jnp.eye(N)).compile().as_text()
        return text.count("lapack") + text.count("ProductOfElementaryHouseholder")

    value = lambda a: estimate(a, estimator, jr.key(0))  # noqa: E731
    if isinstance(estimator, tx.HutchinsonEstimator):
        assert calls(jax.grad(value)) == 0
    elif isinstance(estimator, tx.HutchPlusPlusEstimator | tx.XTraceEstimator):
        assert calls(jax.grad(value)) <= calls(value)


@pytest.mark.parametrize(
    "estimator", [tx.NystromPlusPlusEstimator(), tx.XNysTraceEstimator()]
)
def test_gradient_of_a_negative_semidefinite_operator(estimator):
    matrix = family(jnp.float64)

    def negative(theta):
        operator = matrix_free(-matrix(theta), lx.negative_semidefinite_tag)
        return tx.trace(operator, estimator, k=9, key=jr.key(0)).value

    positive = jax.grad(lambda t: estimate(matrix(t), estimator, jr.key(0)))(0.3)
    assert jnp.allclose(jax.grad(negative)(0.3), -positive, rtol=1e-11)
