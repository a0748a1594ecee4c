"""Derivatives: unbiased for every estimator, of first and second order, real and complex,
and finite where factorisations have no derivative."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import CASES, hermitian, matrix_free, PSD, z_score


N, K = 24, 9
THETA, THETAS = 0.3, (0.1, 0.3, 0.5)
KEYS = jr.split(jr.key(5), 300)
INDEX = np.arange(1, N + 1)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def estimate(matrix, estimator, key, k=K, tags=PSD):
    operator = matrix_free(matrix, tags)
    return tx.trace(operator, estimator, k=k, key=key, throw=False).value.real


# --- in a scalar ---


def ends(dtype):
    """Of a curve of positive definite Hermitian matrices, `A(theta)` of `curve`."""
    return hermitian(0, 1.0 / INDEX, dtype), hermitian(1, INDEX / N, dtype)


def curve(ends, theta):
    theta = jnp.asarray(theta, ends[0].dtype)
    return (1 + theta**2) * ends[0] + jnp.exp(theta) * ends[1]


def trace_of_curve(ends, estimator, theta, key):
    return estimate(curve(ends, theta), estimator, key)


def reverse(function, theta):
    """Value and derivatives of first and second order, reverse over reverse."""

    def first(theta):
        value, slope = jax.value_and_grad(function)(theta)
        return slope, (value, slope)

    second, (value, slope) = jax.grad(first, has_aux=True)(theta)
    return value, slope, second


@eqx.filter_jit
def by_reverse(ends, estimator, thetas, keys):
    def one(pair):
        theta, key = pair
        return reverse(lambda t: trace_of_curve(ends, estimator, t, key), theta)

    return jax.lax.map(one, (thetas, keys))


@eqx.filter_jit
def by_forward(ends, estimator, thetas, keys):
    """Under `vmap`: the value, its slope by reverse and by forward mode; and second
    derivatives, forward over reverse and reverse over forward."""

    def one(theta, key):
        function = lambda theta: trace_of_curve(ends, estimator, theta, key)  # noqa: E731
        forward = lambda theta: jax.jvp(function, (theta,), (1.0,))[1]  # noqa: E731
        both = jax.jvp(jax.value_and_grad(function), (theta,), (1.0,))
        (value, slope), (tangent, forward_reverse) = both
        return value, slope, tangent, forward_reverse, jax.grad(forward)(theta)

    return jax.vmap(one)(thetas, keys)


@ft.cache
def derivatives(case, dtype):
    """Value and derivatives for all keys, and `THETAS` besides for the first ones."""
    thetas = np.full(len(KEYS), THETA)
    thetas[: len(THETAS)] = THETAS
    found = by_reverse(ends(dtype), case.estimator, jnp.asarray(thetas), KEYS)
    return [np.asarray(x) for x in found]


@pytest.mark.slow(but=("Hutchinson-Rademacher-float64", "XTrace-Sphere-float64"))
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@every_case
def test_first_and_second_derivatives_are_unbiased(case, dtype):
    """297 keys, at theta = 0.3; false alarms 6e-5 for each of 2 derivatives."""
    traces = [np.trace(end).real for end in ends(dtype)]
    _, first, second = (x[len(THETAS) :] for x in derivatives(case, dtype))
    assert z_score(first, 2 * THETA * traces[0] + np.exp(THETA) * traces[1]) < 4
    assert z_score(second, 2 * traces[0] + np.exp(THETA) * traces[1]) < 4


@pytest.mark.slow(but="Hutchinson-Rademacher")
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_forward_equals_reverse_and_vmap_the_loop(case):
    """By one rule for all sketches."""
    value, first, second = (x[: len(THETAS)] for x in derivatives(case, np.float64))
    args = ends(np.float64), case.estimator, np.asarray(THETAS), KEYS[: len(THETAS)]
    again, slope, tangent, forward_reverse, reverse_forward = by_forward(*args)
    assert np.allclose(again, value, rtol=1e-12, atol=0)
    assert np.allclose(slope, first, rtol=1e-12, atol=0)
    assert np.allclose(tangent, first, rtol=1e-12, atol=0)
    assert np.allclose(forward_reverse, reverse_forward, rtol=1e-12, atol=0)
    assert np.allclose(forward_reverse, second, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_complex_parameter():
    """The gradient in a complex parameter z of `Re tr A(z)`, A not Hermitian."""
    normal, imaginary = np.random.default_rng(0).standard_normal((2, N, N))
    base, z = normal + 1j * imaginary, 0.4 + 0.7j

    @jax.jit
    def gradients(base, z, keys):
        def function(z, key):
            operator = matrix_free(base * z**2 + np.eye(N) * jnp.exp(z))
            settings = {"k": K, "key": key, "throw": False}
            return tx.trace(operator, tx.XTraceEstimator(), **settings).value.real

        return jax.lax.map(lambda key: jax.grad(function)(z, key), keys)

    # JAX's gradient of the real part of a holomorphic function is its derivative.
    exact = 2 * z * np.trace(base) + N * np.exp(z)
    assert z_score(gradients(base, z, KEYS), exact) < 4


# --- in the matrix ---


@eqx.filter_jit
def value_and_gradient(matrices, estimator, keys, tags=PSD):
    """For each matrix and key: the estimate and its gradient in the matrix."""
    run = jax.value_and_grad(lambda a, key: estimate(a, estimator, key, 12, tags))

    def every_key(matrix):
        return jax.lax.map(lambda key: run(matrix, key), keys)

    return jax.lax.map(every_key, matrices)


RANKS = (0, 1, 3)
# Positive definite; and of low rank, where QR and Cholesky have no derivative.
MATRICES = np.stack(
    [
        hermitian(0, 1.0 / INDEX) + hermitian(1, INDEX / N),
        *(hermitian(0, (np.arange(N) < rank) * 1.0) for rank in RANKS),
    ]
)


@ft.cache
def gradients(case):
    found = value_and_gradient(MATRICES, case.estimator, KEYS)
    return [np.asarray(x) for x in found]


@pytest.mark.slow(but="Nystrom*")
@every_case
def test_gradient_in_the_matrix_is_unbiased(case):
    """`d tr A / dA = I`, entry by entry: 300 keys, the largest of 576 z-scores below 5
    (false alarms 3e-4)."""
    gradient = gradients(case)[1][0]
    mean, spread = np.mean(gradient, 0), np.std(gradient, 0, ddof=1) / 300**0.5
    error = np.abs(mean - np.eye(N)) - 1e-12
    assert np.max(error / np.maximum(spread, 1e-12)) < 5


@pytest.mark.slow(but="XNysTrace-*")
@every_case
def test_gradient_at_rank_deficient_operators(case):
    """Along one direction, unbiased: 300 keys, false alarms 6e-5."""
    direction = hermitian(1, 1.0 * INDEX)
    for rank, gradient in zip(RANKS, gradients(case)[1][1:], strict=True):
        slopes = np.sum(gradient * direction, axis=(1, 2))
        assert z_score(slopes, np.trace(direction)) < 4, f"rank {rank}"


@pytest.mark.slow(but="HutchPlusPlus-*")
@every_case
def test_linear_scaling_has_the_estimate_as_derivative(case):
    """`tr(s A)` is linear in s. Hutchinson, Hutch++ and XTrace are linear in A for frozen
    coefficients, so their derivative at s = 1 is the estimate itself."""
    value, gradient = (x[0] for x in gradients(case))
    slope = np.sum(gradient * MATRICES[0], axis=(1, 2))
    rtol = 0.2 if case.semidefinite else 1e-11
    assert np.allclose(slope, value, rtol=rtol, atol=0)


@pytest.mark.slow(but="XNysTrace-*")
@pytest.mark.parametrize("case", [case for case in CASES if case.semidefinite], ids=str)
def test_gradient_of_a_negative_semidefinite_operator(case):
    tag = lx.negative_semidefinite_tag
    args = -MATRICES[:1], case.estimator, KEYS[:3]
    value, gradient = value_and_gradient(*args, tags=tag)
    positive = [x[0, :3] for x in gradients(case)]
    assert np.allclose(value[0], -positive[0], rtol=1e-11, atol=0)
    assert np.allclose(gradient[0], positive[1], rtol=1e-11, atol=1e-12)


@pytest.mark.slow(but="case0")
@pytest.mark.parametrize("case", [case for case in CASES if not case.semidefinite])
def test_no_factorisation_is_added_by_the_gradient(case):
    """The compiled gradient calls LAPACK no more often than the value does."""

    def calls(function):
        text = jax.jit(function).lower(MATRICES[0], KEYS[0]).compile().as_text()
        return text.count("lapack") + text.count("ProductOfElementaryHouseholder")

    value = lambda a, key: estimate(a, case.estimator, key)  # noqa: E731
    factorisations = calls(value)
    assert (factorisations == 0) == isinstance(case.estimator, tx.HutchinsonEstimator)
    assert calls(jax.grad(value)) <= factorisations


# --- what a derivative sees ---


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_only_the_value_has_a_derivative(case):
    """Of a streaming estimator, and of a sketch."""

    @jax.jit
    @jax.grad
    def slope(scale, diagonal, key):
        operator = matrix_free(scale * jnp.diag(diagonal) + 0.1, PSD)
        solution = tx.trace(operator, case.estimator, k=4, key=key, throw=False)
        return solution.std_err + jnp.sum(solution.stats["samples"])

    assert slope(1.0, INDEX[:8] * 1.0, KEYS[0]) == 0


@pytest.mark.slow
def test_hessian_operator():
    """The trace of a Hessian in PyTree parameters, differentiated once and twice."""
    generator = np.random.default_rng(0)
    params = {
        "w": generator.standard_normal((3, 4)),
        "b": generator.standard_normal(4),
    }

    def hessian(scale, params):
        def loss(params):
            return jnp.sum(jnp.tanh(params["w"]) @ jnp.sin(params["b"])) ** 2 / 2

        return tx.hessian(loss, jax.tree.map(lambda x: x * scale, params))

    @jax.jit
    def sharpness(params, keys):
        def one(key):
            def function(scale):
                return tx.trace(hessian(scale, params), k=8, key=key, throw=False).value

            return reverse(function, 1.0)

        return jax.lax.map(one, keys)

    @jax.jit
    def exact(params):
        return reverse(lambda s: jnp.trace(hessian(s, params).as_matrix()), 1.0)

    found = zip(sharpness(params, KEYS), exact(params), strict=True)
    for order, (estimates, expected) in enumerate(found):
        assert z_score(estimates, expected) < 4, f"order {order}"


def test_function_that_closes_over_what_is_differentiated():
    @jax.jit
    @jax.value_and_grad
    def run(scale, matrix, key):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * (matrix @ v),
            jax.ShapeDtypeStruct((N,), matrix.dtype),
            PSD,
            closure_convert=False,
        )
        estimator = tx.XTraceEstimator()
        return tx.trace(operator, estimator, k=K, key=key, throw=False).value

    value, slope = run(1.0, MATRICES[0], KEYS[0])
    assert np.isclose(slope, value, rtol=1e-11, atol=0)


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
    diagonal = np.ones(n, np.float32)
    compiled = jax.jit(function).lower(diagonal, KEYS[0]).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 6 * 4 * n
