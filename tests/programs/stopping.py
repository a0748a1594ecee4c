"""Adaptive budgets on four devices: all leave the loop together, with the answer of one
device, where they would disagree if they decided alone."""

import contextlib
import io
import sys

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from common import (
    close,
    collectives,
    positive_definite,
    PSD,
    say,
    some_key,
    value_and_grad,
)

import traceax as tx


N = 120
MESH = tx.probe_mesh()
SHARDED, LOCAL = tx.Sharded(MESH), tx.Local()
BUDGET = tx.Adaptive(rtol=0.1, max_k=96, round_size=16, min_samples=8)
ESTIMATORS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "Nystrom++": tx.NystromPlusPlusEstimator(),
}


def decaying():
    q, _ = jnp.linalg.qr(jr.normal(jr.key(1), (N, N)))
    return (q * jnp.arange(1.0, N + 1) ** -1.0) @ q.T


def trace(matrix, estimator, execution, budget=BUDGET):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.trace(operator, estimator, k=budget, **settings)


def answers():
    for name, estimator in ESTIMATORS.items():
        both = [
            value_and_grad(lambda x, e=estimator, where=where: trace(x, e, where))(
                decaying()
            )
            for where in (LOCAL, SHARDED)
        ]
        (local, slope), (found, other) = both
        made = int(local.stats["num_matvecs"])
        assert found.stats["num_matvecs"] == made, f"{name}: {found.stats}"
        close(name, (found.value, found.std_err), (local.value, local.std_err), 1e-11)
        close(f"{name}, gradient", other, slope, 1e-11)
        say(f"{name}: {made} products, {float(found.value):.4f}")


def logdets():
    def logdet(execution):
        operator = lx.MatrixLinearOperator(positive_definite(N), PSD)
        budget = tx.Adaptive(atol=2.0, max_k=64, round_size=8)
        settings = {"key": some_key(), "execution": execution}
        return tx.logdet(operator, k=budget, num_steps=8, **settings)

    local, found = logdet(LOCAL), logdet(SHARDED)
    close("logdet", found.value, local.value, 1e-12)
    assert found.stats["num_matvecs"] == local.stats["num_matvecs"]
    say(f"{found.value} +- {found.std_err}, {found.stats['num_matvecs']} products")


def disagreement():
    """A quadratic form with two values: a device whose probes agree in the first round
    sees no spread, and would stop there."""
    matrix = jnp.eye(N).at[0, 1].set(30.0).at[1, 0].set(30.0)
    operator = lx.MatrixLinearOperator(matrix)
    alone = jnp.zeros(4, bool)
    for seed in range(20):
        found = tx.trace(
            operator,
            tx.HutchinsonEstimator(),
            k=BUDGET,
            key=jr.key(seed),
            execution=SHARDED,
            throw=False,
        )
        shares = found.stats["samples"][: BUDGET.round_size].reshape(4, -1)
        alone = jnp.ptp(shares, axis=1) == 0
        if jnp.any(alone) and not jnp.all(alone):
            break
    print(f"seed {seed}: would stop alone after a round: {alone}")
    assert jnp.any(alone)
    assert not jnp.all(alone)
    assert found.stats["num_matvecs"] > BUDGET.round_size


def inner_loop():
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
        )(decaying())

    (local, slope), (found, other) = call(LOCAL), call(SHARDED)
    assert found.stats["num_matvecs"] == local.stats["num_matvecs"]
    close("inverse", found.value, local.value, 1e-8)
    close("inverse, gradient", other, slope, 1e-6)
    say(f"{found.value} +- {found.std_err}, {found.stats['num_matvecs']} products")


def progress():
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
        trace(decaying(), tx.HutchinsonEstimator(), SHARDED, budget)
        jax.effects_barrier()
    assert [int(x[0]) for x in calls] == [16, 32, 48, 64], calls
    assert len(lines.getvalue().split()) == 5, lines.getvalue()
    say(lines.getvalue().split())


def one_collective():
    """In the loop, and no other beside the samples of a round."""

    def value(matrix):
        return trace(matrix, tx.HutchinsonEstimator(), SHARDED).value

    found = collectives(jax.jit(value).lower(decaying()).compile())
    assert found == [("all-reduce", (4, 5))], found


if __name__ == "__main__":
    tasks = answers, logdets, disagreement, inner_loop, progress, one_collective
    {each.__name__: each for each in tasks}[sys.argv[1]]()
