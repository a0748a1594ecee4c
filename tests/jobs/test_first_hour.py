"""What new users come for, typed as they would: each job is a function of at most ten
lines, compared with dense matrices of NumPy."""

import inspect

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import PSD


KEY = jr.key(0)


def lines(*functions):
    """How many lines are in the bodies of these functions."""
    sources = (inspect.getsource(function).splitlines() for function in functions)
    return sum(len(list(filter(str.strip, source))) - 1 for source in sources)


# --- a network with a data loader ---


def outputs(params, batch):
    return jnp.tanh(batch[0] @ params["in"]) @ params["out"]


def loss(outputs, batch):
    return jnp.mean((outputs - batch[1]) ** 2)


def curvature_of_layers(params, loader):
    operator = tx.ggn(outputs, loss, params, loader)
    return tx.leaf_traces(operator, key=KEY)


def curvature_spectrum(params, loader):
    operator = tx.ggn(outputs, loss, params, loader)
    return tx.spectral_density(operator, k=30, key=KEY)


EXAMPLES, INPUTS, HIDDEN = 130, 4, 10
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((EXAMPLES, INPUTS))
Y = np.sin(X.sum(axis=1))
PARAMS = {
    "in": RANDOM.standard_normal((INPUTS, HIDDEN)) / 2,
    "out": RANDOM.standard_normal(HIDDEN) / 3,
}


def loader():
    """Batches of 32 examples, and a last one of 2."""
    return ((X[i : i + 32], Y[i : i + 32]) for i in range(0, EXAMPLES, 32))


def gauss_newton_matrix():
    """Of all examples, with the entries of "in" before those of "out"."""
    hidden = np.tanh(X @ PARAMS["in"])
    inner = X[:, :, None] * ((1 - hidden**2) * PARAMS["out"])[:, None]
    jacobian = np.hstack([inner.reshape(EXAMPLES, -1), hidden])
    return 2 * jacobian.T @ jacobian / EXAMPLES


def test_curvature_of_layers():
    assert lines(curvature_of_layers) <= 10
    layers = curvature_of_layers(PARAMS, loader())
    parts = np.split(np.diag(gauss_newton_matrix()), [INPUTS * HIDDEN])
    for name, part in zip(("in", "out"), parts, strict=True):
        bar, exact = layers.std_err[name], part.sum()
        assert abs(layers.value[name] - exact) < 4 * bar < 0.2 * exact


def test_curvature_spectrum():
    assert lines(curvature_spectrum) <= 10
    density = curvature_spectrum(PARAMS, loader())
    thresholds = np.array([1e-3, 0.03, 1.0])
    fraction, bar = density.cumulative(thresholds)
    eigenvalues = np.linalg.eigvalsh(gauss_newton_matrix())
    counted = (eigenvalues <= thresholds[:, None]).mean(axis=1)
    np.testing.assert_array_less(np.abs(fraction - counted), 4 * bar + 0.01)
    np.testing.assert_array_less(bar, 0.05)


# --- a Gaussian process with a kernel of one's own ---


def kernel(x1, x2, params):
    return jnp.exp(-jnp.sum((x1 - x2) ** 2, axis=-1) / (2 * params["length"] ** 2))


def covariance(params, x):
    row = jax.checkpoint(lambda point, v: kernel(point, x, params) @ v)

    def product(v):
        rows = jax.lax.map(lambda point: row(point, v), x, batch_size=500)
        return rows + params["noise"] * v

    return tx.as_operator(product, like=x[:, 0], tags=PSD)


def log_likelihood(params, x, y):
    operator = covariance(params, x)
    near = tx.nystrom_preconditioner(operator, 60, key=KEY, shift=params["noise"])
    solution = tx.gaussian_log_prob(operator, y, k=8, key=KEY, preconditioner=near)
    return solution.value, solution


def predictive_variance(params, x, new):
    operator, cross = covariance(params, x), kernel(new[:, None], x, params)
    near = tx.nystrom_preconditioner(operator, 60, key=KEY, shift=params["noise"])
    options, cg = {"preconditioner": near.inverse()}, lx.CG(rtol=1e-4, atol=1e-4)
    solve = lambda b: lx.linear_solve(operator, b, cg, options=options).value  # noqa: E731
    return 1 - jnp.sum(cross * jax.vmap(solve)(cross), axis=1)


def observations(n):
    random = np.random.default_rng(1)
    x = random.random((n, 2))
    return x, np.sin(6 * x[:, 0]) + x[:, 1] ** 2 + 0.3 * random.standard_normal(n)


HYPERPARAMETERS = {"length": 0.3, "noise": 0.1}


def kernel_and_slope(x1, x2):
    """The kernel by NumPy, and its derivative in the length."""
    length = HYPERPARAMETERS["length"]
    squares = ((x1[:, None] - x2) ** 2).sum(axis=-1)
    smooth = np.exp(-squares / (2 * length**2))
    return smooth, smooth * squares / length**3


def test_gaussian_process():
    """850 points, which are more than one block of 500 rows."""
    assert lines(covariance, log_likelihood) <= 10
    assert lines(covariance, predictive_variance) <= 10
    x, y = observations(850)
    slope = jax.jit(jax.grad(log_likelihood, has_aux=True))
    gradient, solution = slope(HYPERPARAMETERS, x, y)

    (smooth, by_length), identity = kernel_and_slope(x, x), np.eye(len(x))
    matrix = smooth + HYPERPARAMETERS["noise"] * identity
    inverse, (_, logdet) = np.linalg.inv(matrix), np.linalg.slogdet(matrix)
    exact = -(y @ inverse @ y + logdet + len(x) * np.log(2 * np.pi)) / 2
    assert abs(solution.value - exact) < 4 * solution.std_err < 1
    for name, change in {"length": by_length, "noise": identity}.items():
        exact = (y @ inverse @ change @ inverse @ y - np.sum(inverse * change)) / 2
        assert gradient[name] == pytest.approx(exact, rel=0.02)

    new = np.random.default_rng(2).random((20, 2))
    cross, _ = kernel_and_slope(new, x)
    exact = 1 - np.sum(cross @ inverse * cross, axis=1)
    found = jax.jit(predictive_variance)(HYPERPARAMETERS, x, new)
    np.testing.assert_allclose(found, exact, rtol=0.01)


# --- ridge regression ---


def degrees_of_freedom(x, ridge):
    gram = tx.as_operator(lambda v: x.T @ (x @ v), like=x[0], tags=PSD)
    return tx.trace_of_function(gram, lambda g: g / (g + ridge), key=KEY)


def standard_errors(x, ridge, noise):
    gram = tx.as_operator(lambda v: x.T @ (x @ v), like=x[0], tags=PSD)
    variances = tx.diagonal_of_function(gram, lambda g: g / (g + ridge) ** 2, key=KEY)
    return noise * jnp.sqrt(variances.value)


def test_ridge_regression():
    assert max(map(lines, (degrees_of_freedom, standard_errors))) <= 10
    x = np.random.default_rng(2).standard_normal((300, 100)) * np.logspace(0, -1, 100)
    hat = np.linalg.solve(x.T @ x + 5 * np.eye(100), x.T)
    solution = degrees_of_freedom(x, 5.0)
    exact = np.trace(x @ hat)
    assert abs(solution.value - exact) < 4 * solution.std_err + 1e-9 < 0.1 * exact
    exact = 0.3 * np.linalg.norm(hat, axis=1)
    error = standard_errors(x, 5.0, 0.3) / exact - 1
    assert np.sqrt(np.mean(error**2)) < 0.05
