"""Calls whose programs JAX's persistent cache keeps. Prints how many programs were
compiled and not read from there."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx

import traceax as tx


N, KEY = 40, jr.key(0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))


def operator(matrix):
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)


def logdet(matrix):
    settings = {"k": 4, "num_steps": 5, "key": KEY, "throw": False}
    return tx.logdet(operator(matrix), **settings).value


matrix = jnp.diag(jnp.linspace(1, 2, N)) + 0.01
adaptive = tx.Adaptive(rtol=0.1, max_k=20)
tx.trace(operator(matrix), tx.HutchinsonEstimator(), k=adaptive, key=KEY)
tx.trace(operator(matrix), tx.XTraceEstimator(), k=10, key=KEY)
jax.block_until_ready(jax.jit(jax.grad(logdet))(matrix))

names = [event.rpartition("/")[2] for event in events]
print(names.count("compile_requests_use_cache") - names.count("cache_hits"))
