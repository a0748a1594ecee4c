"""The types that pyright finds for the fields of solutions: it checks this file."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


def test_types_of_a_scalar():
    solution = tx.trace(lx.DiagonalLinearOperator(jnp.ones(3)), k=3)
    assert_type(solution, tx.Solution[jax.Array])
    assert isinstance(assert_type(solution.value, jax.Array), jax.Array)
    assert isinstance(assert_type(solution.std_err, jax.Array), jax.Array)
    assert isinstance(assert_type(solution.successful, jax.Array), jax.Array)
    assert isinstance(assert_type(solution.matvecs, int | jax.Array), int)
    low, high = solution.interval()
    assert low == float(solution.value) == high == 3.0


def test_types_of_other_calls():
    operator = lx.DiagonalLinearOperator(jnp.ones(3))
    assert_type(tx.diagonal(operator, k=3), tx.Solution[Any])
    assert_type(tx.logdet(operator, k=3), tx.Solution[jax.Array])
    assert_type(tx.frobenius_norm(operator, k=3).value, jax.Array)
    _, _, solution = tx.laplacian(lambda x: jnp.sum(x**2), jnp.ones(3))
    assert_type(solution.value, jax.Array)
    assert solution.value == 6
