"""Traces of functions and log-determinants: unbiased within what they report, exact where
they must be, and with the right derivatives."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, z_score
from .estimates import (
    compiled,
    exactly_and_over_keys,
    KEY,
    logdet,
    N,
    over_keys,
    PSD,
    rbf,
    seen_by,
    slope_along,
    trace_of,
    value_and_slope,
)


def laplacian(side, dtype):
    line = 2 * np.eye(side) - np.eye(side, k=1) - np.eye(side, k=-1)
    return (np.kron(line, np.eye(side)) + np.kron(np.eye(side), line)).astype(dtype)


def random_spd(condition, dtype):
    return hermitian(1, np.geomspace(1, condition, 144), dtype)


PROBLEMS = {
    "rbf, noise 1e-2": lambda: rbf(144, 1e-2, np.float64),
    "rbf, noise 1e-4": lambda: rbf(144, 1e-4, np.float64),
    "rbf, noise 1e-2, float32": lambda: rbf(144, 1e-2, np.float32),
    "rbf, noise 1e-4, float32": lambda: rbf(144, 1e-4, np.float32),
    "laplacian": lambda: laplacian(12, np.float64),
    "condition 1e2": lambda: random_spd(1e2, np.float64),
    "condition 1e8": lambda: random_spd(1e8, np.float64),
    "complex": lambda: random_spd(1e3, np.complex128),
}


def log_and_bracket(key, matrix, window):
    estimator = tx.SLQEstimator(krylov=tx.Lanczos(window))
    solution = logdet(matrix, estimator, k=10, num_steps=20, key=key)
    return solution.value, solution.std_err, solution.stats["bracket"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "window"), [*((name, None) for name in PROBLEMS), ("rbf, noise 1e-4", 0)]
)
def test_error_is_covered(name, window):
    """Three standard errors and the bracket, for 99% of 200 keys, at a depth that is far
    too small for some of these; the bracket's ends are on both sides of the value."""
    matrix = PROBLEMS[name]()
    _, exact = np.linalg.slogdet(matrix.astype(np.promote_types(matrix.dtype, float)))
    found = over_keys(log_and_bracket, matrix, window, num_keys=200)
    value, std_err, (low, high) = *map(np.asarray, found[:2]), np.asarray(found[2]).T
    assert np.all((low <= value) & (value <= high))
    covered = (low - 3 * std_err <= exact) & (exact <= high + 3 * std_err)
    assert np.mean(covered) >= 0.99


def sample_brackets(matrix, function, lower_bound, num_steps):
    estimator = tx.SLQEstimator(lower_bound=lower_bound)
    settings = {"k": 12, "num_steps": num_steps, "key": KEY}
    return trace_of(matrix, function, estimator, **settings).stats["sample_brackets"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "exact"),
    [(tx.Log(), np.log), (tx.Entropy(), lambda x: -x * np.log(x))],
    ids=["log", "entropy"],
)
def test_brackets_hold_for_each_probe_and_tighten(function, exact):
    """Against `z* f(A) z` from an eigendecomposition."""
    matrix = rbf(100, 1e-2, np.float64)
    values, vectors = np.linalg.eigh(matrix)
    exact = exact(values) @ (vectors.T @ seen_by(100, 12)) ** 2
    slack, widths = 1e-10 * np.max(np.abs(exact)), []
    for lower_bound, steps in ((0.0, 12), (0.009, 12), (0.009, 40)):
        lower_bound = np.asarray(lower_bound)
        found = compiled(sample_brackets, matrix, function, lower_bound, steps)
        low, high = np.asarray(found).T
        assert np.all((low <= exact + slack) & (exact <= high + slack))
        widths.append(np.mean(high - low))
    assert widths[0] >= widths[1] > 10 * widths[2]


class Monomial(eqx.Module):
    """With a degree that is an argument of the program."""

    degree: np.ndarray

    def __call__(self, x):
        return jnp.power(x, self.degree)


def samples_of(matrix, function, num_steps):
    settings = {"k": 6, "num_steps": num_steps, "key": KEY, "tags": lx.symmetric_tag}
    return trace_of(matrix, function, **settings).stats["samples"]


def test_exact_for_polynomials():
    matrix, steps = hermitian(2, np.linspace(-1, 2, N)), 4
    probes = seen_by(N, 6)
    for degree in (0, 2 * steps - 1, 2 * steps):
        power = np.linalg.matrix_power(matrix, degree)
        exact = np.sum(probes * (power @ probes), axis=0)
        samples = compiled(samples_of, matrix, Monomial(np.asarray(degree)), steps)
        assert np.allclose(samples, exact, rtol=1e-11) == (degree < 2 * steps), degree


EXACT = {
    "identity": 2.5 * np.ones(N),
    "repeated eigenvalues": np.repeat([0.5, 2.0, 3.0, 7.0], N // 4),
    "rank one plus identity": np.where(np.arange(N) == 3, 50.0, 1.0),
}


@pytest.mark.slow(
    but=("repeated eigenvalues-complex128", "rank one plus identity-complex128")
)
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("name", EXACT)
def test_exact_after_an_early_breakdown(name, dtype):
    """Few distinct eigenvalues: the quadrature is exact, also in what it reports."""
    matrix = hermitian(4, EXACT[name], dtype)
    values, vectors = np.linalg.eigh(matrix.astype(np.promote_types(dtype, float)))
    exact = np.log(values) @ np.abs(vectors.conj().T @ seen_by(N, 5)) ** 2
    solution = compiled(logdet, matrix, k=5, num_steps=N, key=KEY)
    tolerance = 100 * float(np.finfo(dtype).eps) * N
    assert np.allclose(solution.stats["samples"], exact, rtol=1e-12, atol=tolerance)
    low, high = solution.stats["bracket"]
    assert high - low < tolerance
    if name == "identity":
        assert np.abs(solution.value - N * np.log(2.5)) < tolerance
        assert solution.std_err < tolerance


@pytest.mark.slow
def test_exact_after_n_steps():
    """At condition number 1e4."""
    matrix = hermitian(1, np.geomspace(1, 1e4, N))
    solution = compiled(logdet, matrix, k=5, num_steps=N, key=KEY)
    values, vectors = np.linalg.eigh(matrix)
    exact = np.log(values) @ (vectors.T @ seen_by(N, 5)) ** 2
    assert np.allclose(solution.stats["samples"], exact, rtol=1e-9)


def tanh_fraction(x):
    return jnp.tanh(x) / (1 + x)


# With their derivatives.
FUNCTIONS = {
    "log": (tx.Log(), lambda x: 1 / x),
    "inverse": (tx.Inverse(), lambda x: -1 / x**2),
    "square root": (tx.Power(0.5), lambda x: 0.5 / np.sqrt(x)),
    "cube": (tx.Power(3), lambda x: 3 * x**2),
    "exp": (tx.Exp(-0.5), lambda x: -0.5 * np.exp(-0.5 * x)),
    "entropy": (tx.Entropy(), lambda x: -np.log(x) - 1),
    "callable": (
        tanh_fraction,
        lambda x: 1 / np.cosh(x) ** 2 / (1 + x) - np.tanh(x) / (1 + x) ** 2,
    ),
}


MATRIX = hermitian(5, np.linspace(1, 3, N))
DIRECTION = hermitian(6, np.linspace(-1, 2, N))


def slope_of(key, k, matrix, direction, function):
    call = ft.partial(trace_of, function=function, k=k, num_steps=14)
    return value_and_slope(key, matrix, direction, call)[1]


def exact_slopes(matrix, direction, functions):
    return [slope_of(None, N, matrix, direction, each) for each in functions]


@pytest.mark.slow
def test_exact_derivative_of_each_function():
    """With `k >= n`, of all functions in one program."""
    functions, derivatives = zip(*FUNCTIONS.values(), strict=True)
    found = compiled(exact_slopes, MATRIX, DIRECTION, functions)
    for name, slope, derivative in zip(FUNCTIONS, found, derivatives, strict=True):
        exact = slope_along(*np.linalg.eigh(MATRIX), derivative, DIRECTION)
        assert np.isclose(slope, exact, rtol=1e-9, atol=0), name


@pytest.mark.slow(but="log")
@pytest.mark.parametrize("name", ["log", "entropy", "callable"])
def test_derivative_of_an_estimate(name):
    """Lanczos has converged at 14 steps; one direction; false alarm 6e-5. The rule is one
    for all functions, whose own derivatives are tested above."""
    function, derivative = FUNCTIONS[name]
    exact = slope_along(*np.linalg.eigh(MATRIX), derivative, DIRECTION)
    samples = over_keys(slope_of, 4, MATRIX, DIRECTION, function)
    assert z_score(samples, exact) < 4


SQUARE = (np.linspace(0, 1, N)[:, None] - np.linspace(0, 1, N)) ** 2


def slope_in_matrix(matrix, function, gradient):
    settings = {"k": 5, "num_steps": N, "key": KEY, "gradient": gradient}
    return jax.grad(lambda x: trace_of(x, function, **settings).value)(matrix)


@pytest.mark.slow
@pytest.mark.parametrize("function", [tx.Log(), tx.Power(-2)])
def test_gradient_by_solves_equals_that_by_lanczos(function):
    """With one column; with more, of the logarithm, in directions commuting with A."""
    matrix = np.exp(-SQUARE / (2 * 0.1**2)) + 0.3 * np.eye(N)
    solver = lx.CG(1e-12, 1e-12)
    slope = ft.partial(compiled, slope_in_matrix, matrix, function)
    solved, one = slope(tx.SolveGradient(solver)), slope(tx.LanczosGradient(columns=1))
    assert np.allclose(one, solved, rtol=1e-6, atol=1e-6 * np.max(np.abs(one)))
    if function == tx.Log():
        four = slope(tx.LanczosGradient())
        for direction in (np.eye(N), matrix, matrix @ matrix):
            exact, found = np.sum(solved * direction), np.sum(four * direction)
            assert np.isclose(found, exact, rtol=1e-9)


def second_by_solves(matrix, direction, scale):
    gradient = tx.SolveGradient(lx.CG(rtol=1e-6, atol=1e-6))
    settings = {"k": 5, "num_steps": N, "key": KEY, "gradient": gradient}

    def value(t):
        moved = scale * (matrix + t * direction)
        return trace_of(moved, tx.Inverse(), **settings).value

    return jax.grad(jax.grad(value))(0.0)


@pytest.mark.slow
def test_second_derivative_by_solves_at_any_scale():
    """By reverse mode over reverse mode, with solves for cotangents of any size, against
    the derivative of `z* f'(A) dA z` in `f'(A)` alone."""
    matrix = hermitian(11, np.linspace(1, 4, N))
    direction = hermitian(12, np.linspace(1, 2, N))
    found = [
        scale * np.asarray(compiled(second_by_solves, matrix, direction, scale))
        for scale in map(np.asarray, (1.0, 1e6, 1e12))
    ]
    assert np.allclose(found, found[0], rtol=1e-5)
    inverse = np.linalg.inv(matrix)
    square = inverse @ inverse
    slope = inverse @ direction @ square + square @ direction @ inverse
    probes = seen_by(N, 5)
    exact = np.mean(np.sum(probes * (slope @ direction @ probes), axis=0))
    assert np.isclose(found[0], exact, rtol=1e-5)


def general(seed, n=16):
    normal = np.random.default_rng(seed).standard_normal((2, n, n))
    return (normal[0] + 1j * normal[1]) / 2**0.5


def free_logdet(matrix, **settings):
    return tx.logdet(matrix_free(matrix), throw=False, **settings)


def value_and_slope_of_general(key, k, matrix, direction, gradient):
    call = ft.partial(free_logdet, k=k, num_steps=12, gradient=gradient)
    return value_and_slope(key, matrix, direction, call)


@pytest.mark.slow
@pytest.mark.parametrize("by_solves", [False, True])
def test_general_square(by_solves):
    """log|det| and its derivative in one direction, 300 keys, false alarm 6e-5 each."""
    matrix = general(7) / 4 + 2 * np.eye(16)
    # Close to what left and right singular vectors differ by, to tell them apart.
    direction = matrix - 2 * np.eye(16) + general(8) / 4
    solver = lx.GMRES(rtol=1e-10, atol=1e-10, restart=16)
    gradient = tx.SolveGradient(solver) if by_solves else tx.LanczosGradient()
    value = np.linalg.slogdet(matrix)[1]
    slope = np.trace(np.linalg.solve(matrix, direction)).real
    arguments = 16, 4, matrix, direction, gradient
    function = value_and_slope_of_general
    found, (values, slopes, _) = exactly_and_over_keys(function, *arguments)
    assert np.allclose(found, [value, slope, 0])
    assert z_score(values, value) < 4
    assert z_score(slopes, slope) < 4


def scaled_exp(scale):
    return lambda x: jnp.exp(scale * x)


def value_and_slope_in_scale(scale, matrix, k, function):
    def value(scale):
        settings = {"k": k, "num_steps": 12, "key": KEY, "tags": lx.symmetric_tag}
        return trace_of(matrix, function(scale), **settings).value

    return jax.value_and_grad(value)(scale)


@pytest.mark.slow(but="Exp")
@pytest.mark.parametrize("function", [tx.Exp, scaled_exp])
def test_derivative_in_the_parameters_of_a_function(function):
    values = np.linspace(0, 2, N)
    matrix = hermitian(11, values)

    def run(scale, k):
        scale = np.asarray(scale)
        return compiled(value_and_slope_in_scale, scale, matrix, k, function)

    _, slope = run(-0.7, N)
    assert np.allclose(slope, np.sum(values * np.exp(-0.7 * values)))
    difference = run(-0.7 + 1e-6, 4)[0] - run(-0.7 - 1e-6, 4)[0]
    assert np.allclose(run(-0.7, 4)[1], difference / 2e-6)


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("gradient", [False, True])
def test_number_of_products(gradient):
    """A derivative adds those that it is of, and their tangents: one for each column of
    each probe."""
    calls = []

    def mv(v):
        jax.debug.callback(lambda _: calls.append(1), v)
        return np.linspace(1, 2, N) * v

    def value(t):
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        operator = lx.FunctionLinearOperator(lambda v: t * mv(v), structure, PSD)
        solution = tx.logdet(operator, k=4, num_steps=6, key=KEY)
        assert solution.stats["num_matvecs"] == 24
        return solution.value

    jax.block_until_ready((jax.grad(value) if gradient else value)(1.0))
    jax.effects_barrier()
    assert len(calls) == 24 + 4 * 8 * gradient


def inverse_of(matrix):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    return tx.function_of(operator, tx.Inverse(), N)


def products(matrix, vector):
    inverse = inverse_of(matrix)
    along = jax.jvp(inverse.mv, (vector,), (vector,))[1]
    transposed = inverse.transpose().mv(vector)
    zero = inverse.mv(jnp.zeros_like(vector))
    dense = inverse.as_matrix(), lx.diagonal(inverse)
    return inverse.mv(vector), transposed, along, zero, *dense


def trace_of_inverse(matrix, estimator):
    return tx.trace(inverse_of(matrix), estimator, k=24, key=KEY, throw=False)


@pytest.mark.slow
def test_function_of():
    """f(A) as an operator: products, traces of it by other estimators, its diagonal."""
    matrix = hermitian(12, np.geomspace(0.1, 10, N), np.complex128)
    dense = np.linalg.inv(matrix)
    vector = general(13, N)[0]
    product, transposed, along, zero, found, diagonal = compiled(products, matrix, vector)
    assert np.allclose(product, dense @ vector)
    assert np.allclose(transposed, dense.T @ vector)
    assert np.allclose(along, dense @ vector)
    assert np.all(zero == 0)
    assert np.allclose(found, dense)
    assert np.allclose(diagonal, np.diagonal(dense))
    for estimator in (tx.XTraceEstimator(), tx.XNysTraceEstimator()):
        solution = compiled(trace_of_inverse, matrix, estimator)
        error = np.abs(solution.value - np.trace(dense))
        assert error < 6 * solution.std_err, estimator
    operator = lx.MatrixLinearOperator(matrix, PSD)
    assert not lx.is_positive_semidefinite(tx.function_of(operator, tx.Log(), 5))


def test_custom_function():
    class Softplus(tx.AbstractSpectralFunction):
        sharpness: jax.Array
        semidefinite_domain: bool = False
        singular_at_zero: bool = False
        bracketed: bool = False
        nonnegative: bool = True

        def __call__(self, x):
            return jax.nn.softplus(self.sharpness * x)

    matrix, function = hermitian(16, np.linspace(-1, 1, N)), Softplus(jnp.asarray(2.0))
    exact = np.sum(np.logaddexp(0, 2 * np.linspace(-1, 1, N)))
    settings = {"tags": lx.symmetric_tag, "key": KEY}
    all_of_it = compiled(trace_of, matrix, function, k=N, num_steps=1, **settings)
    assert np.allclose(all_of_it.value, exact)
    solution = compiled(trace_of, matrix, function, k=8, num_steps=12, **settings)
    assert np.abs(solution.value - exact) < 6 * solution.std_err
    assert eqx.tree_equal(solution.result, tx.RESULTS.successful)


class Reciprocal(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return self.scale / x


@eqx.filter_jit
def with_a_pole(scale, matrix, estimator):
    def value(scale):
        operator = matrix_free(matrix, lx.symmetric_tag)
        call = {"k": 8, "num_steps": 10, "key": KEY, "throw": False}
        function = Reciprocal(scale)
        solution = tx.trace_of_function(operator, function, estimator, **call)
        return solution.value, solution

    return jax.value_and_grad(value, has_aux=True)(scale)


SIGNS = np.repeat([1.0, -1.0], 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "matrix", "bars"),
    [
        (tx.SLQEstimator(), np.diag(SIGNS), 0),
        (tx.KrylovAwareEstimator(), hermitian(0, SIGNS), 4),
        (tx.KrylovAwareEstimator(), hermitian(0, np.linspace(1, 2, 16)), 0),
    ],
    ids=["SLQ", "deflated", "nothing left"],
)
def test_a_pole_that_no_eigenvalue_meets(estimator, matrix, bars):
    """After a breakdown, or where nothing is left, no function value is asked for, nor a
    derivative of one. Rounding decides whether that deflation is of the whole space."""
    (value, solution), slope = with_a_pole(jnp.asarray(2.0), matrix, estimator)
    error = np.abs(value - 2 * np.trace(np.linalg.inv(matrix)))
    assert solution.result == tx.RESULTS.successful
    assert error <= bars * solution.std_err + 1e-10
    assert np.allclose(2 * slope, value, atol=1e-10)
