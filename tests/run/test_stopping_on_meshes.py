"""Adaptive budgets on four devices: all leave the loop together, with the answer of one
device, where they would disagree if they decided alone."""

import contextlib
import io

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian
from ..programs.common import (
    close,
    collectives,
    positive_definite,
    PSD,
    some_key,
    value_and_grad,
)


N = 120
DECAYING = hermitian(1, np.arange(1.0, N + 1) ** -1.0)
SHARDED, LOCAL = tx.Sharded(tx.probe_mesh(jax.devices()[:4])), tx.Local()
BUDGET = tx.Adaptive(rtol=0.1, max_k=96, round_size=16, min_samples=8)


def trace(matrix, estimator, execution, budget=BUDGET):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.trace(operator, estimator, k=budget, **settings)


def agree(found, local):
    made = int(local.stats["num_matvecs"])
    assert 0 < made == found.stats["num_matvecs"], found.stats
    close("estimate", (found.value, found.std_err), (local.value, local.std_err), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [tx.HutchinsonEstimator(), tx.XTraceEstimator()])
def test_value_and_gradient(estimator):
    (local, slope), (found, other) = (
        value_and_grad(lambda x, where=where: trace(x, estimator, where))(DECAYING)
        for where in (LOCAL, SHARDED)
    )
    agree(found, local)
    close("gradient", other, slope, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", [tx.XNysTraceEstimator(), tx.HutchPlusPlusEstimator()]
)
def test_value(estimator):
    """The gradient is made of frames, by the same code for all sketches."""
    local, found = (
        trace(jnp.asarray(DECAYING), estimator, where) for where in (LOCAL, SHARDED)
    )
    agree(found, local)


@pytest.mark.slow
def test_log_determinant():
    def logdet(execution):
        operator = lx.MatrixLinearOperator(positive_definite(N), PSD)
        budget = tx.Adaptive(atol=2.0, max_k=64, round_size=8)
        settings = {"key": some_key(), "execution": execution}
        return tx.logdet(operator, k=budget, num_steps=8, **settings)

    local, found = logdet(LOCAL), logdet(SHARDED)
    close("logdet", found.value, local.value, 1e-12)
    assert found.stats["num_matvecs"] == local.stats["num_matvecs"]


def test_devices_that_would_disagree():
    """A quadratic form with two values: a device whose probes agree in the first round
    sees no spread, and would stop there."""
    matrix = np.eye(N)
    matrix[0, 1] = matrix[1, 0] = 30.0
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    settings = {"k": BUDGET, "execution": SHARDED, "throw": False}
    for seed in range(20):
        key = jax.random.key(seed)
        found = tx.trace(operator, tx.HutchinsonEstimator(), key=key, **settings)
        samples = np.asarray(found.stats["samples"])[: BUDGET.round_size]
        alone = np.ptp(samples.reshape(4, -1), axis=1) == 0
        if np.any(alone) and not np.all(alone):
            break
    assert np.any(alone)
    assert not np.all(alone)
    assert found.stats["num_matvecs"] > BUDGET.round_size


@pytest.mark.slow
def test_loop_in_the_product():
    """A product that iterates itself, by CG, for a number of steps that depends on the
    vector; with a derivative."""

    def inverse(matrix):
        inner = lx.MatrixLinearOperator(matrix + 0.1 * jnp.eye(N), PSD)
        solver = lx.CG(rtol=1e-10, atol=1e-10)
        return lx.FunctionLinearOperator(
            lambda v: lx.linear_solve(inner, v, solver).value,
            jax.ShapeDtypeStruct((N,), jnp.float64),
            PSD,
        )

    def call(execution):
        budget = tx.Adaptive(rtol=0.01, max_k=96, round_size=16)
        settings = {"key": some_key(), "execution": execution, "throw": False}
        return value_and_grad(
            lambda x: tx.trace(inverse(x), tx.HutchinsonEstimator(), k=budget, **settings)
        )(DECAYING)

    (local, slope), (found, other) = call(LOCAL), call(SHARDED)
    assert found.stats["num_matvecs"] == local.stats["num_matvecs"]
    close("inverse", found.value, local.value, 1e-8)
    close("inverse, gradient", other, slope, 1e-6)


def test_progress():
    """One line and one call for each round, not for each device."""
    calls, lines = [], io.StringIO()
    budget = tx.Adaptive(
        rtol=1e-9,
        max_k=64,
        round_size=16,
        progress=eqxi.TextProgressMeter(),
        callback=lambda *x: calls.append(x),
    )
    with contextlib.redirect_stdout(lines):
        trace(jnp.asarray(DECAYING), tx.HutchinsonEstimator(), SHARDED, budget)
        jax.effects_barrier()
    assert [int(x[0]) for x in calls] == [16, 32, 48, 64], calls
    assert len(lines.getvalue().split()) == 5, lines.getvalue()


def test_one_collective():
    """In the loop, and no other beside the samples of a round."""

    def value(matrix):
        return trace(matrix, tx.HutchinsonEstimator(), SHARDED).value

    found = collectives(jax.jit(value).lower(DECAYING).compile())
    assert found == [("all-reduce", (4, 6))], found
