"""Divergences in flows beside code written by hand.

    pip install -e '.[examples]'
    python benchmarks/derivatives.py

A training step (value and gradient) of a continuous normalizing flow in diffrax: Tsit5,
ten steps or a PID controller, batch of 256, one probe, a network with two hidden layers
of 64, float32. CPU seconds, medians of alternating runs in one process; for first calls
the median of three, with nothing in the caches of JAX.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import alternate

import traceax as tx


ADJOINTS = {
    "default": diffrax.RecursiveCheckpointAdjoint(),
    "direct": diffrax.DirectAdjoint(),
    "backsolve": diffrax.BacksolveAdjoint(),
}


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


if __name__ == "__main__":
    print(
        "Time of a training step over that by `jax.vjp`; first calls over the faster:\n"
    )
    flows()
