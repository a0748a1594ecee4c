"""Log-determinants of a kernel matrix with preconditioners, and their derivatives."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import z_score
from .estimates import (
    KEY,
    logdet,
    N,
    over_keys,
    PSD,
)


SQUARE = (np.linspace(0, 1, N)[:, None] - np.linspace(0, 1, N)) ** 2
THETA = np.array([0.1, 0.05])


def kernel(theta):
    noise = theta[1] * jnp.eye(N)
    return jnp.exp(-SQUARE / (2 * theta[0] ** 2)) + noise


def exact_derivatives(theta):
    """Value, gradient and Hessian of the log-determinant of the kernel."""
    length, noise = theta
    smooth, zero = np.exp(-SQUARE / (2 * length**2)), np.zeros((N, N))
    matrix = smooth + noise * np.eye(N)
    first = [smooth * SQUARE / length**3, np.eye(N)]
    in_length = smooth * (SQUARE**2 / length**6 - 3 * SQUARE / length**4)
    second = [[in_length, zero], [zero, zero]]
    first_solved, second_solved = (np.linalg.solve(matrix, x) for x in (first, second))
    products = np.einsum("aij,bji->ab", first_solved, first_solved)
    slope, traces = (
        np.trace(x, axis1=-2, axis2=-1) for x in (first_solved, second_solved)
    )
    return np.linalg.slogdet(matrix)[1], slope, traces - products


def with_nystrom(theta, operator, key):
    key = jr.fold_in(key, 1)
    return tx.nystrom_preconditioner(operator, 16, key=key, shift=theta[1])


def with_estimated_shift(theta, operator, key):
    return tx.nystrom_preconditioner(operator, 16, key=jr.fold_in(key, 1))


def with_cholesky(theta, operator, key):
    return tx.pivoted_cholesky_preconditioner(operator, 16, shift=theta[1])


def without(theta, operator, key):
    return None


PRECONDITIONERS = [without, with_nystrom, with_estimated_shift, with_cholesky]


def gp_logdet(theta, key, preconditioner=without, **settings):
    matrix = kernel(theta)
    if preconditioner in PRECONDITIONERS:
        operator = lx.MatrixLinearOperator(matrix, PSD)
        preconditioner = preconditioner(theta, operator, key)
    settings |= {"k": 4, "num_steps": 25, "key": key}
    return logdet(matrix, preconditioner=preconditioner, **settings).value


def gp_value_and_slope(key, theta, preconditioner):
    value, slope = jax.value_and_grad(gp_logdet)(theta, key, preconditioner)
    return jnp.append(value, slope)


@ft.cache
def gp_samples(preconditioner):
    return np.asarray(over_keys(gp_value_and_slope, THETA, preconditioner))


def check_value_and_slope(samples):
    value, slope, _ = exact_derivatives(THETA)
    for column, exact in zip(samples.T, [value, *slope], strict=True):
        assert z_score(column, exact) < 4


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_gradient_of_a_log_determinant(preconditioner):
    """Value and both derivatives by z-test, 300 keys, false alarm 6e-5 each; and the
    preconditioner lowers the spread of all three."""
    found = gp_samples(preconditioner)
    check_value_and_slope(found)
    if preconditioner is not without:
        share = 1 / 3 if preconditioner is with_estimated_shift else 1 / 20
        most = share * np.std(gp_samples(without), axis=0)
        assert np.all(np.std(found, axis=0) < most)


def krylov_aware_gp(key, theta):
    estimator = tx.KrylovAwareEstimator()

    def value(theta):
        return gp_logdet(theta, key, with_nystrom, estimator=estimator)

    return jnp.append(*jax.value_and_grad(value)(theta))


@pytest.mark.slow
def test_preconditioned_krylov_aware():
    """What the control variate replaces is told by the estimator's own probes; 300 keys,
    false alarm 6e-5."""
    found = np.asarray(over_keys(krylov_aware_gp, THETA))
    check_value_and_slope(found)
    assert np.all(np.std(found, axis=0) < np.std(gp_samples(without), axis=0) / 100)


@pytest.mark.slow
def test_preconditioner_is_constant():
    """One that is a leaf of what is differentiated, in a log-determinant and a solve."""

    @eqx.filter_jit
    def slopes(theta):
        matrix = kernel(theta)
        operator = lambda x: lx.MatrixLinearOperator(x * matrix, PSD)  # noqa: E731
        made = with_nystrom(theta, operator(1.0), KEY)

        def value(both):
            scale, preconditioner = both
            settings = {"k": 4, "num_steps": 8, "preconditioner": preconditioner}
            determinant = tx.logdet(operator(scale), key=KEY, **settings).value
            options = {"preconditioner": preconditioner.inverse()}
            solver, ones = lx.CG(rtol=1e-9, atol=1e-9), jnp.ones(N)
            solved = lx.linear_solve(operator(scale), ones, solver, options=options)
            return determinant + jnp.sum(solved.value)

        slope, others = eqx.filter_grad(value)((jnp.array(1.0), made))
        return slope, jax.grad(lambda x: value((x, made)))(1.0), others

    slope, along, others = slopes(THETA)
    assert np.isclose(slope, along, rtol=1e-9)
    arrays = jax.tree.leaves(eqx.filter(others, eqx.is_inexact_array))
    assert arrays
    assert not any(np.any(x) for x in arrays)


@pytest.mark.slow
def test_preconditioner_of_another_matrix_is_unbiased():
    """As in training, where one is kept for some steps; 300 keys, false alarm 6e-5."""

    @jax.jit
    def old(theta):
        operator = lx.MatrixLinearOperator(kernel(theta), PSD)
        return tx.nystrom_preconditioner(operator, 8, key=KEY, shift=0.06)

    samples = over_keys(gp_value_and_slope, THETA, old(1.2 * THETA))
    check_value_and_slope(np.asarray(samples))


def gp_hessian(key, theta):
    gradient = tx.SolveGradient(lx.CG(rtol=1e-10, atol=1e-10))
    return jax.hessian(lambda theta: gp_logdet(theta, key, gradient=gradient))(theta)


@pytest.mark.slow
def test_hessian_by_solves():
    """All second derivatives, 300 keys, false alarm 6e-5 each."""
    found, exact = np.asarray(over_keys(gp_hessian, THETA)), exact_derivatives(THETA)[2]
    for i in range(2):
        for j in range(2):
            assert z_score(found[:, i, j], exact[i, j]) < 4, (i, j)
