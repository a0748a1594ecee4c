"""Preconditioners against dense linear algebra, and in a solve."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..functions.estimates import compiled, KEY, logdet, N, PSD, rbf
from ..helpers import hermitian


def three_preconditioners(matrix):
    """With their inverses and log-determinants; and a log-determinant by the first."""
    operator = lx.MatrixLinearOperator(matrix, PSD)
    made = (
        tx.nystrom_preconditioner(operator, 12, key=KEY, shift=0.1),
        tx.pivoted_cholesky_preconditioner(operator, 12, shift=0.1),
        tx.nystrom_preconditioner(operator, 12, key=KEY),
    )
    found = [(x, x.inverse().as_matrix(), x.logdet) for x in made]
    settings = {"k": 4, "num_steps": 5, "key": KEY, "preconditioner": made[0]}
    return found, logdet(matrix, **settings)


@pytest.mark.slow(but="complex128")
@pytest.mark.parametrize("dtype", [np.complex128, np.float32])
def test_preconditioner(dtype):
    """P, its inverse and log-determinant against dense algebra; exact for a matrix of low
    rank plus a multiple of the identity."""
    values = np.geomspace(1, 1e3, N) * (np.arange(N) >= N - 9)
    matrix = hermitian(14, values, dtype) + 0.1 * np.eye(N, dtype=dtype)
    tolerance = 1e3 * float(np.finfo(dtype).eps) * float(np.linalg.norm(matrix))
    three, solution = compiled(three_preconditioners, matrix)
    names = ("nystrom", "cholesky", "estimated")
    for name, (preconditioner, inverse, log) in zip(names, three, strict=True):
        u, values = np.asarray(preconditioner.vectors), np.asarray(preconditioner.values)
        dense = (u * values) @ u.conj().T + np.asarray(preconditioner.shift) * np.eye(N)
        assert np.allclose(inverse @ dense, np.eye(N), atol=tolerance), name
        _, expected = np.linalg.slogdet(dense)
        assert np.allclose(log, expected, atol=tolerance), name
        assert preconditioner.num_matvecs == 12
        if name != "estimated":
            assert np.allclose(dense, matrix, atol=tolerance), name
    exact = np.linalg.slogdet(matrix)[1]
    assert np.allclose(solution.value, exact, atol=tolerance)
    assert solution.stats["num_matvecs"] == 32


@pytest.mark.slow
def test_cg_with_the_preconditioner():
    """The same preconditioner in a solve: an order of magnitude fewer steps."""
    matrix = rbf(300, 1e-3, np.float64)
    right = np.random.default_rng(15).standard_normal(300)

    @jax.jit
    def solves(matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        preconditioner = tx.nystrom_preconditioner(operator, 90, key=KEY, shift=1e-3)
        solver = lx.CG(rtol=1e-8, atol=1e-8, max_steps=2000)
        found = []
        for options in ({}, {"preconditioner": preconditioner.inverse()}):
            solution = lx.linear_solve(
                operator, right, solver, options=options, throw=False
            )
            found.append((solution.value, solution.stats["num_steps"]))
        return found

    plain, fast = solves(matrix)
    for solution, _ in (plain, fast):
        assert np.linalg.norm(matrix @ solution - right) < 1e-5
    assert fast[1] < plain[1] / 10


# Noise variances over three decades, in no order.
NOISE = np.random.default_rng(1).permutation(np.geomspace(1e-3, 1.0, N))


def scaled_preconditioners(matrix, noise):
    """By both makers with a vector of shifts, on PyTrees; P^-1 and `W^-1 A W^-*`."""
    structure = jax.eval_shape(split, noise.astype(matrix.dtype))

    def product(tree):
        return split(matrix @ jnp.concatenate([tree["a"].ravel(), tree["b"]]))

    operator = lx.FunctionLinearOperator(product, structure, PSD)
    settings = {"shift": split(noise)}
    made = (
        tx.nystrom_preconditioner(operator, 12, key=KEY, **settings),
        tx.pivoted_cholesky_preconditioner(
            operator, 12, diagonal=jnp.diag(matrix), **settings
        ),
    )
    eye = jnp.eye(N, dtype=matrix.dtype)
    return [
        (
            x.inverse().as_matrix(),
            x.logdet,
            x.whiten(matrix) @ x.whiten_adjoint(eye),
            x.power(1.0, eye),
            x.diagonal_of_power(-1.0),
            x.num_matvecs,
        )
        for x in made
    ]


def split(vector):
    return {"a": vector[:6].reshape(2, 3), "b": vector[6:]}


@pytest.mark.slow(but="complex128")
@pytest.mark.parametrize("dtype", [np.complex128, np.float32])
def test_a_vector_of_shifts(dtype):
    """Exact for a matrix of low rank plus that diagonal."""
    values = np.geomspace(1, 1e2, N) * (np.arange(N) >= N - 9)
    matrix = hermitian(14, values, dtype) + np.diag(NOISE).astype(dtype)
    noise = NOISE.astype(matrix.real.dtype)
    tolerance = 300 * float(np.finfo(dtype).eps) * float(np.linalg.norm(matrix))
    exact = np.linalg.inv(matrix.astype(np.complex128))
    for inverse, log, whitened, dense, diagonal, num_matvecs in compiled(
        scaled_preconditioners, matrix, noise
    ):
        # Its largest entry is 1 / min(NOISE).
        assert np.allclose(inverse @ matrix, np.eye(N), atol=10 * tolerance)
        assert np.allclose(whitened, np.eye(N), atol=tolerance)
        assert np.allclose(dense, matrix, atol=tolerance)
        assert np.allclose(diagonal, np.diag(exact).real, rtol=tolerance)
        assert np.allclose(log, np.linalg.slogdet(matrix)[1], rtol=tolerance)
        assert num_matvecs == 12


@eqx.filter_jit
def heteroscedastic(kernel, noise, shift):
    operator = lx.MatrixLinearOperator(kernel, PSD) + lx.DiagonalLinearOperator(noise)
    outer = tx.nystrom_preconditioner(operator, 40, key=KEY, shift=shift)
    assert isinstance(outer, tx.ScaledPreconditioner) == (jnp.ndim(shift) == 1)
    settings = {"k": 10, "num_steps": 10, "key": jax.random.key(0), "throw": False}
    return tx.logdet(operator, preconditioner=outer, **settings)


def test_noise_over_three_decades():
    """A vector of shifts against the best of several scalars, for as many matvecs."""
    n = 200
    noise = np.random.default_rng(1).permutation(np.geomspace(1e-3, 1.0, n))
    kernel = rbf(n, 0.0, np.float64)
    exact = np.linalg.slogdet(kernel + np.diag(noise))[1]
    solution = heteroscedastic(kernel, noise, jnp.asarray(noise))
    scalars = [heteroscedastic(kernel, noise, jnp.asarray(x)) for x in (1e-3, 0.03, 1.0)]
    widths = [float(np.diff(x.stats["bracket"])[0]) for x in (solution, *scalars)]
    assert widths[0] < 1e-4 < 100 < min(widths[1:])
    assert abs(solution.value - exact) < 4 * solution.std_err
    assert solution.std_err < min(x.std_err for x in scalars) / 2
    for x in (solution, *scalars):
        assert x.result == tx.RESULTS.successful
        assert x.stats["num_matvecs"] == 140


@pytest.mark.slow
def test_calls_with_a_vector_of_shifts():
    """A density, its derivative, a difference, and the diagonal of an inverse."""
    kernel, right = rbf(N, 0.0, np.float64), np.linspace(-1.0, 1.0, N)
    settings = {"k": 8, "num_steps": 10, "key": jax.random.key(0), "throw": False}
    direction = np.diag(NOISE) + 0.1 * kernel

    @eqx.filter_jit
    def solve(noise):
        def operator(t):
            tag = lx.TaggedLinearOperator
            return tag(lx.MatrixLinearOperator(kernel + jnp.diag(noise) + t), PSD)

        outer = tx.nystrom_preconditioner(operator(0.0), 8, key=KEY, shift=noise)
        with_outer = settings | {"preconditioner": outer}

        def density(t):
            shifted = operator(t * direction)
            found = tx.gaussian_log_prob(shifted, jnp.asarray(right), **with_outer)
            return found.value, found

        difference = tx.trace_difference(
            operator(0.0), operator(0.01 * direction), tx.Log(), **with_outer
        )
        diagonal = tx.diagonal_of_function(operator(0.0), tx.Inverse(), **with_outer)
        return jax.value_and_grad(density, has_aux=True)(0.0), difference, diagonal

    ((_, density), slope), difference, diagonal = solve(jnp.asarray(NOISE))
    matrix = kernel + np.diag(NOISE)
    inverse, exact = np.linalg.inv(matrix), np.linalg.slogdet(matrix)[1]
    expected = -(right @ inverse @ right + exact + N * np.log(2 * np.pi)) / 2
    assert abs(density.value - expected) < 4 * density.std_err
    image = inverse @ right
    expected = (image @ direction @ image - np.trace(inverse @ direction)) / 2
    assert np.isclose(slope, expected, rtol=0.05)
    expected = exact - np.linalg.slogdet(matrix + 0.01 * direction)[1]
    assert abs(difference.value - expected) < 4 * difference.std_err
    errors = (np.diag(inverse) - diagonal.value) / diagonal.std_err
    assert np.mean(np.abs(errors) < 2) > 0.8
    for solution in (density, difference, diagonal):
        assert solution.result == tx.RESULTS.successful


@pytest.mark.parametrize(
    ("shift", "error", "message"),
    [
        (np.ones(N - 1), ValueError, "have the structure of the vectors"),
        ([0.1] * N, ValueError, "have the structure of the vectors"),
        (np.ones(N) + 0j, TypeError, "must be real"),
        (np.zeros(N), ValueError, "must have positive, finite entries"),
        (-0.1, ValueError, "0 or more"),
        ("large", TypeError, "must be a"),
    ],
)
def test_shifts_that_do_not_fit(shift, error, message):
    operator = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), np.float64))
    for make in (
        lambda **x: tx.nystrom_preconditioner(operator, 4, key=KEY, **x),
        lambda **x: tx.pivoted_cholesky_preconditioner(operator, 4, **x),
    ):
        with pytest.raises(error, match=message):
            make(shift=shift)


def test_other_powers_of_a_scaled_preconditioner():
    operator = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), np.float64))
    outer = jax.eval_shape(
        lambda x: tx.nystrom_preconditioner(operator, 4, key=KEY, shift=x), NOISE
    )
    with pytest.raises(ValueError, match="use `whiten`"):
        outer.power(-0.5, jnp.ones(N))
