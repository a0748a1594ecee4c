"""Preconditioners against dense linear algebra, and in a solve."""

import jax
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
