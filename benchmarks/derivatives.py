"""Divergences in flows and Laplacians of networks against code written by hand.

    pip install -e '.[examples]'
    python benchmarks/derivatives.py

CPU seconds, medians of runs that alternate, in one process. A flow: a training step
(value and gradient) of a continuous normalizing flow by diffrax, Tsit5, ten steps or a
PID controller, batch of 256, one probe, a network with two hidden layers of 64, float32.
A Laplacian: a network of layers 50-768-768-512-512-1 with tanh, 16 points, float64.
"""

import functools as ft
import itertools
import time

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import traceax as tx


ADJOINTS = {
    "default": diffrax.RecursiveCheckpointAdjoint(),
    "direct": diffrax.DirectAdjoint(),
    "backsolve": diffrax.BacksolveAdjoint(),
}


def alternate(functions, *args, rounds=9):
    """For each, the median CPU seconds of a call, and those of the first one."""
    first, seconds, compiled = {}, {name: [] for name in functions}, {}
    for name, fn in functions.items():
        compiled[name] = eqx.filter_jit(fn)
        start = time.process_time()
        jax.block_until_ready(compiled[name](*args))
        first[name] = time.process_time() - start
    for _ in range(rounds):
        for name, fn in compiled.items():
            start = time.process_time()
            jax.block_until_ready(fn(*args))
            seconds[name].append(time.process_time() - start)
    return {name: float(np.median(x)) for name, x in seconds.items()}, first


def by_vjp(fn, x, key):
    probe = jr.rademacher(key, x.shape, x.dtype)
    value, pullback = jax.vjp(fn, x)
    return value, jnp.sum(pullback(probe)[0] * probe)


def by_jvp(fn, x, key):
    probe = jr.rademacher(key, x.shape, x.dtype)
    value, tangent = jax.jvp(fn, (x,), (probe,))
    return value, jnp.sum(tangent * probe)


def by_traceax(fn, x, key):
    value, solution = tx.divergence(fn, x, k=1, key=key)
    return value, solution.value


def flow_step(divergence, adjoint, controller):
    def log_density(network, x, key):
        def derivative(t, state, args):
            network, key = args
            return divergence(lambda x: network(jnp.append(x, t)), state[0], key)

        term, solver = diffrax.ODETerm(derivative), diffrax.Tsit5()
        settings = {"stepsize_controller": controller, "adjoint": adjoint}
        settings |= {"max_steps": 64, "args": (network, key)}
        start = (x, jnp.zeros(()))
        path = diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, start, **settings)
        z, gathered = path.ys
        return -jnp.sum(z[0] ** 2) / 2 + gathered[0]

    def loss(network, points, keys):
        each = jax.vmap(log_density, in_axes=(None, 0, 0))
        return -jnp.mean(each(network, points, keys))

    return eqx.filter_value_and_grad(loss)


def flows():
    print("| adjoint, steps | D | jvp | ours | first call, ours |")
    print("|---|---|---|---|---|")
    ways = {"vjp": by_vjp, "jvp": by_jvp, "ours": by_traceax}
    controllers = {
        "fixed": diffrax.ConstantStepSize(),
        "PID": diffrax.PIDController(rtol=1e-3, atol=1e-3),
    }
    for name, adjoint in ADJOINTS.items():
        for steps, controller in controllers.items():
            for size in (2, 8, 64):
                network = eqx.nn.MLP(size + 1, size, 64, 2, jnp.tanh, key=jr.key(0))
                points = jr.normal(jr.key(1), (256, size))
                keys = jr.split(jr.key(2), 256)
                functions = {
                    w: flow_step(d, adjoint, controller) for w, d in ways.items()
                }
                seconds, first = alternate(functions, network, points, keys)
                best, soonest = seconds["vjp"], min(first["vjp"], first["jvp"])
                print(
                    f"| {name}, {steps} | {size} | {seconds['jvp'] / best:.2f} | "
                    f"{seconds['ours'] / best:.2f} | {first['ours'] / soonest:.2f} |",
                    flush=True,
                )


def nested(fn, x, directions):
    def product(v):
        return jax.jvp(jax.grad(fn), (x,), (v,))[1]

    return jnp.sum(jax.vmap(product)(directions) * directions)


def network(params, x):
    for weight, bias in params[:-1]:
        x = jnp.tanh(weight @ x + bias)
    weight, bias = params[-1]
    return (weight @ x + bias)[0]


def laplacians():
    sizes = [50, 768, 768, 512, 512, 1]
    pairs = itertools.pairwise(sizes)
    params = [
        (jr.normal(jr.fold_in(jr.key(0), i), (b, a)) / a**0.5, jnp.zeros(b))
        for i, (a, b) in enumerate(pairs)
    ]
    points, key = jr.normal(jr.key(1), (16, 50)), jr.key(2)
    signs = jr.rademacher(key, (16, 50), points.dtype)

    def of_trace(fn, x, k):
        estimator = tx.HutchinsonEstimator()
        return tx.trace(tx.hessian(fn, x), estimator, k=k, key=key).value

    print("\n| directions | | seconds, nested | ours | `tx.trace` of `tx.hessian` |")
    print("|---|---|---|---|---|")
    for label, k, directions in (("50, exact", 50, jnp.eye(50)), ("16", 16, signs)):
        ways = {
            "nested": lambda fn, x, d=directions: nested(fn, x, d),
            "ours": lambda fn, x, k=k: tx.laplacian(fn, x, k=k, key=key)[2].value,
            "trace": lambda fn, x, k=k: of_trace(fn, x, k),
        }

        def values(params, points, way):
            return jax.vmap(ft.partial(way, ft.partial(network, params)))(points)

        def loss(params, points, way):
            return jnp.mean(values(params, points, way) ** 2)

        for what, fn in (("value", values), ("gradient", jax.grad(loss))):
            functions = {
                name: lambda params, points, fn=fn, way=way: fn(params, points, way)
                for name, way in ways.items()
            }
            seconds, _ = alternate(functions, params, points)
            ratios = [seconds[x] / seconds["nested"] for x in ("ours", "trace")]
            print(
                f"| {label} | {what} | {seconds['nested']:.3f} | "
                + " | ".join(f"{x:.2f}" for x in ratios)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    print(
        "Time of a training step over that by `jax.vjp`; first calls over the faster:\n"
    )
    flows()
    print("\nTime over that of nested derivatives:")
    jax.config.update("jax_enable_x64", True)
    laplacians()
