"""Derivatives of `f(A) v`, and of what is estimated of `f(A)`, in the operator.

Exact ones are from divided differences in an eigenbasis, by NumPy in float64."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._functions.action import Action
from traceax._operators.door import flatten
from traceax._quadrature.tridiagonal import Compression, tridiagonal

from ..helpers import hermitian, matrix_free


N, PSD = 32, lx.positive_semidefinite_tag
SPECTRUM = np.linspace(0.5, 4.0, N)
FUNCTIONS = {
    "exp": (tx.Exp(-0.7), lambda x: np.exp(-0.7 * x), lambda x: -0.7 * np.exp(-0.7 * x)),
    "log": (tx.Log(), np.log, lambda x: 1 / x),
    "inverse": (tx.Inverse(), lambda x: 1 / x, lambda x: -1 / x**2),
    "callable": (jnp.sqrt, np.sqrt, lambda x: 0.5 / np.sqrt(x)),
}


CHOSEN = tx.AdaptiveSteps(share=1e-5)


def direction(dtype):
    """Hermitian, of norm about one."""
    generator = np.random.default_rng(1)
    matrix = generator.standard_normal((N, N))
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * generator.standard_normal((N, N))
    return ((matrix + matrix.conj().T) / N**0.5 / 2).astype(dtype)


def vectors(dtype):
    generator = np.random.default_rng(2)
    pair = generator.standard_normal((2, N))
    if np.issubdtype(dtype, np.complexfloating):
        pair = pair + 1j * generator.standard_normal((2, N))
    return pair.astype(dtype)


def exact_derivative(name, matrix, along):
    """Of f(A) in a direction."""
    _, function, slope = FUNCTIONS[name]
    nodes, basis = np.linalg.eigh(matrix.astype(np.complex128))
    gaps = nodes[:, None] - nodes
    same = np.eye(N, dtype=bool)
    quotients = (function(nodes)[:, None] - function(nodes)) / np.where(same, 1, gaps)
    differences = np.where(same, slope(nodes), quotients)
    inside = basis.conj().T @ along @ basis
    return basis @ (differences * inside) @ basis.conj().T


def applied(matrix, along, function, vector, t, num_steps=20):
    operator = lx.MatrixLinearOperator(matrix + t * along, PSD)
    return tx.function_of(operator, function, num_steps).mv(vector)


@pytest.mark.slow(but="log-complex128-20")
@pytest.mark.parametrize("num_steps", [20, CHOSEN], ids=["20", "chosen"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("exp", np.float32),
        ("exp", np.float64),
        ("log", np.complex128),
        ("inverse", np.float64),
        ("callable", np.complex128),
    ],
)
def test_derivative_in_the_operator(name, dtype, num_steps):
    """In forward and in reverse mode."""
    matrix, along = hermitian(0, SPECTRUM, dtype), direction(dtype)
    u, v = vectors(dtype)
    exact = exact_derivative(name, matrix, along) @ v

    @jax.jit
    def both(matrix, along, u, v):
        def mv(t):
            return applied(matrix, along, FUNCTIONS[name][0], v, t, num_steps)

        zero = jnp.zeros((), matrix.real.dtype)
        _, tangent = jax.jvp(mv, (zero,), (jnp.ones_like(zero),))
        return tangent, jax.grad(lambda t: jnp.vdot(u, mv(t)).real)(zero)

    tangent, slope = both(matrix, along, u, v)
    size = np.linalg.norm(exact)
    rtol = 1e-3 if dtype == np.float32 or num_steps is CHOSEN else 1e-6
    assert np.linalg.norm(tangent - exact) < rtol * size
    assert abs(slope - np.vdot(u, exact).real) < rtol * size * np.linalg.norm(u)


@ft.partial(jax.jit, static_argnums=(1, 3))
def product_of(matrix, name, vectors, max_steps=None):
    """Products with several vectors, by numbers of steps that they choose."""
    operator = lx.MatrixLinearOperator(matrix, PSD)
    steps = tx.AdaptiveSteps(max_steps, share=1e-5)
    return jax.vmap(tx.function_of(operator, FUNCTIONS[name][0], steps).mv)(vectors)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_chosen_steps_are_enough_or_say_so(name, dtype):
    """Of random vectors, zero, and one that has next to nothing of the smallest
    eigenvalue. No step too few is silent; with room for them all products are right."""
    eps, n, function = float(np.finfo(dtype).eps), 200, FUNCTIONS[name][1]
    spectra = {4.0: np.linspace(1, 4, n), 1e2: np.geomspace(0.1, 10, n)}
    spectra[1e6] = np.append(1e-6, np.linspace(0.5, 1, n - 1))
    for condition, spectrum in spectra.items():
        matrix = hermitian(0, spectrum, dtype)
        wide = np.promote_types(dtype, np.float64)
        nodes, basis = np.linalg.eigh(matrix.astype(wide))
        nodes = np.maximum(nodes, spectrum[0])
        random = np.random.default_rng(1).standard_normal((3, n)).astype(dtype)
        random[1], lowest = 0, basis[:, 0].astype(dtype)
        random[2] -= lowest * (lowest.conj() @ random[2] - 1e-3)
        exact = (basis * function(nodes)) @ basis.conj().T @ random.T
        for max_steps in (5, n):
            found = np.asarray(product_of(matrix, name, random, max_steps))
            errors = np.linalg.norm(found.T - exact, axis=0)
            sizes = np.linalg.norm(exact, axis=0)
            rounding = 10 * eps * (1 if name in ("exp", "callable") else condition)
            right = errors <= (1e-5 + rounding) * sizes
            assert np.all(right | np.isnan(errors))
            assert right[1]
            assert max_steps < n or np.all(right)
        if condition == 4.0:  # The default largest number of steps is enough.
            found = np.asarray(product_of(matrix, name, random))
            errors = np.linalg.norm(found.T - exact, axis=0)
            assert np.all(errors <= (1e-5 + rounding) * sizes)


@pytest.mark.slow(but="exp-1.5")
@pytest.mark.parametrize(("name", "factor"), [("exp", 1.5), ("log", 4)])
def test_not_many_more_steps_are_made_than_needed(name, factor):
    """The estimate is twice the change, and comes at most a third of the steps late. For
    the logarithm it takes steps to see that no eigenvalue is much smaller."""
    matrix = hermitian(0, np.geomspace(0.1, 10, 300))
    function, exact, _ = FUNCTIONS[name]
    flat, vector = flatten(lx.MatrixLinearOperator(matrix, PSD)), jnp.ones(300)

    @jax.jit
    def run(share):
        chosen = tx.AdaptiveSteps(200, share)
        action = Action(flat, function=function, most=200, steps=chosen)
        _, steps, converged = action.advanced(vector)
        return steps, converged

    @jax.jit
    def after(steps):
        return Action(flat, function=function, most=200, steps=steps)(vector)

    nodes, basis = np.linalg.eigh(matrix)
    product = basis @ (exact(nodes) * (basis.T @ vector))
    for share in (1e-2, 1e-5, 1e-8):
        steps, converged = run(share)
        errors = [np.linalg.norm(after(s) - product) for s in range(1, int(steps) + 1)]
        needed = 1 + np.argmax(np.array(errors) <= share * np.linalg.norm(product))
        assert converged
        assert needed <= steps <= factor * needed + 2


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [6, 12])
def test_forward_and_reverse_mode_agree_to_the_accuracy_of_the_run(num_steps):
    matrix, along = hermitian(0, np.geomspace(0.1, 1, N)), direction(np.float64)

    @jax.jit
    def both(matrix, along, weights):
        def value(t):
            operator = lx.MatrixLinearOperator(matrix + t * along, PSD)
            settings = {"k": 12, "num_steps": num_steps, "key": jr.key(0)}
            estimator = tx.HutchinsonEstimator()
            found = tx.diagonal_of_function(operator, tx.Log(), estimator, **settings)
            return weights @ found.value, found.stats["gradient_residual"]

        slope, residual = jax.grad(value, has_aux=True)(0.0)
        return slope, jax.jvp(lambda t: value(t)[0], (0.0,), (1.0,))[1], residual

    weights = np.random.default_rng(3).standard_normal(N)
    reverse, forward, residual = both(matrix, along, weights)
    assert 0 < abs(reverse / forward - 1) < residual < 0.2


def test_derivative_in_the_function():
    matrix, v = hermitian(0, SPECTRUM), vectors(np.float64)[1]

    @jax.jit
    @jax.grad
    def slope(scale):
        return v @ applied(matrix, 0 * matrix, tx.Exp(scale), v, 0.0)

    nodes, basis = np.linalg.eigh(matrix)
    exact = np.sum((basis.T @ v) ** 2 * nodes * np.exp(-0.7 * nodes))
    assert np.isclose(slope(-0.7), exact, rtol=1e-8)


def test_derivative_in_the_vector_is_the_product():
    matrix, (u, v) = hermitian(0, SPECTRUM), vectors(np.float64)

    @jax.jit
    def run(matrix, u, v):
        mv = ft.partial(applied, matrix, 0 * matrix, tx.Log(), t=0.0)
        return jax.grad(lambda v: u @ mv(v))(v), mv(u)

    slope, product = run(matrix, u, v)
    assert np.allclose(slope, product, rtol=1e-6, atol=1e-8)


@jax.jit
def slopes_of_diagonals(matrix, along, weights, keys):
    """Of a weighted sum of diagonals: the exact one, and estimates."""

    def value(t, k, key):
        operator = lx.MatrixLinearOperator(matrix + t * along, PSD)
        function = tx.function_of(operator, tx.Log(), 20)
        settings = {"k": k, "key": key, "throw": False}
        diagonal = tx.diagonal(function, tx.XDiagEstimator(), **settings).value
        return jnp.sum(weights * diagonal)

    estimates = jax.lax.map(lambda key: jax.grad(value)(0.0, 12, key), keys)
    return jax.grad(value)(0.0, N, keys[0]), estimates


@pytest.mark.slow
def test_diagonal_of_a_function():
    """All products exactly; by XDiag unbiased: z-test over 200 keys, false alarm 6e-5."""
    matrix, along = hermitian(0, SPECTRUM), direction(np.float64)
    weights = np.random.default_rng(3).standard_normal(N)
    keys = jr.split(jr.key(0), 200)
    found, estimates = map(np.asarray, slopes_of_diagonals(matrix, along, weights, keys))
    exact = np.sum(weights * np.diag(exact_derivative("log", matrix, along)).real)
    assert np.isclose(found, exact, rtol=1e-5)
    assert abs(np.mean(estimates) - exact) < 4 * np.std(estimates) / 200**0.5


@jax.jit
def tangent(matrix, along, v):
    mv = lambda t: applied(matrix, along, tx.Exp(), v, t, 8)  # noqa: E731
    return jax.jvp(mv, (0.0,), (1.0,))[1]


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_breakdown_and_zero_vector(scale):
    """Where Lanczos ends early: the derivative of `exp(A) v` at c I is `exp(c) dA v`."""
    matrix, along = scale * np.eye(N), direction(np.float64)
    _, v = vectors(np.float64)
    assert np.allclose(tangent(matrix, along, v), np.exp(scale) * along @ v, rtol=1e-8)
    assert np.all(tangent(matrix, along, 0 * v) == 0)


def test_second_and_mixed_derivatives_are_refused():
    matrix, along = hermitian(0, SPECTRUM), direction(np.float64)
    u, v = vectors(np.float64)

    def form(t, v):
        return u @ applied(matrix, along, tx.Log(), v, t, 4)

    mixed = jax.grad(lambda t: jnp.sum(jax.grad(form, 1)(t, v)))
    other = jax.grad(lambda v: jax.grad(form, 0)(0.0, v))
    calls = (lambda: jax.hessian(form)(0.0, v), lambda: mixed(0.0), lambda: other(v))
    for call in calls:
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            call()


@ft.partial(jax.jit, static_argnames="steps")
def lower_ends(matrix, probes, steps):
    """The least that is taken to be possible for an eigenvalue, from each probe."""
    action = Action(flatten(matrix_free(matrix, PSD)), tx.Inverse(), steps, steps)

    def one(probe):
        run, nodes, vectors = action.run(probe)
        small = tridiagonal(run.alpha, run.beta)
        coupling = run.beta[-1:, None]
        compression = Compression(small, coupling, run.last, nodes, vectors)
        return action.lower_end(compression, 0.03)

    return jax.lax.map(one, probes)


@pytest.mark.parametrize("steps", [5, 8, 30])
@pytest.mark.parametrize(
    "spectrum",
    [np.linspace(1, 100, 100), np.geomspace(1e-4, 1, 100), np.append(1e-5, SPECTRUM)],
)
def test_lower_end_of_the_spectrum(spectrum, steps):
    """It is above the smallest eigenvalue only if a probe hides its eigenvector, which
    one in seven do; and near it once the run has found it."""
    matrix = hermitian(0, spectrum)
    probes = np.random.default_rng(0).choice([-1.0, 1.0], (200, len(spectrum)))
    floor, ends = map(np.asarray, lower_ends(matrix, probes, steps))
    assert np.mean(ends > spectrum[0]) < 0.2
    assert np.all(ends >= floor)
    if steps == 30 and spectrum[-1] != 1:
        assert np.mean(ends > 0.3 * spectrum[0]) > 0.95
