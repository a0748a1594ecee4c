"""Programs that would wait forever if devices met in different orders, or if batched
factorisations took all threads."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from common import close, positive_definite, PSD, say, some_key, value_and_grad

import traceax as tx


SHARDED, LOCAL = tx.Sharded(tx.probe_mesh()), tx.Local()
MATRIX = positive_definite(40)
OPERATOR = lx.MatrixLinearOperator(MATRIX, PSD)
KEYS = jr.split(jr.key(5), 4)


def logdet(operator, key, execution, k):
    return tx.logdet(
        operator, k=k, num_steps=8, key=key, execution=execution, throw=False
    )


def many_probes(execution):
    def call(x):
        return logdet(lx.MatrixLinearOperator(x, PSD), some_key(), execution, 64)

    # Beyond n probes the answer is exact.
    return value_and_grad(call)(positive_definite(80))


def sketches(execution):
    def one(key):
        solution = tx.trace(
            OPERATOR,
            tx.XTraceEstimator(),
            k=16,
            key=key,
            execution=execution,
            throw=False,
        )
        return solution.value, solution.std_err

    return jax.jit(jax.vmap(one))(KEYS)


def logdets(execution):
    def one(key):
        solution = logdet(OPERATOR, key, execution, 16)
        return solution.value, solution.std_err, solution.stats["bracket"]

    return jax.jit(jax.vmap(one))(KEYS)


for task in (many_probes, sketches, logdets):
    expected = task(LOCAL)
    say(f"{task.__name__} on one device")
    found = task(SHARDED)
    for _ in range(3):
        jax.block_until_ready(task(SHARDED) if task is not many_probes else found)
    leaves = jax.tree.leaves(expected)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves), task.__name__
    close(task.__name__, found, expected, 1e-12)
    say(task.__name__)
