"""The trace of a network's Hessian through training, at a few products a step.

A small network learns scikit-learn's digits. After every step of Adam the trace of the
Hessian of the loss, a measure of sharpness, is estimated in two ways with as many
products: afresh by Hutchinson's estimator, and by `traceax.DynamicTrace`, which estimates
the change and carries the rest along. Every twentieth step is compared with the exact
trace.

Run with `python examples/dynamic_trace.py [directory]`; it takes about a minute, and
saves a plot there.
"""

import sys
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import traceax as tx


NUM_STEPS, EVERY, PROBES = 200, 20, (2, 4, 8, 16)


def make_problem(key):
    data, target = load_digits(return_X_y=True)
    images = jnp.asarray(data[:500] / 16, jnp.float32)
    labels = jnp.asarray(target[:500])
    network = eqx.nn.MLP(64, 10, 8, 1, jax.nn.tanh, key=key)
    parameters, static = eqx.partition(network, eqx.is_inexact_array)

    def loss(parameters):
        logits = jax.vmap(eqx.combine(parameters, static))(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return loss, parameters


def train(loss, parameters, num_probes, key):
    """The parameters after each step, and both estimates."""
    optimiser = optax.adam(3e-3)
    dynamic = tx.DynamicTrace(lambda p: tx.hessian(loss, p), num_probes=num_probes)
    key1, key2 = jr.split(key)
    first = dynamic.init(parameters, key=key1, k=100)

    def step(carry, key):
        parameters, moments, state = carry
        updates, moments = optimiser.update(jax.grad(loss)(parameters), moments)
        parameters = optax.apply_updates(parameters, updates)
        followed = dynamic.update(state, parameters)
        afresh = tx.trace(
            tx.hessian(loss, parameters),
            tx.HutchinsonEstimator(),
            k=2 * num_probes,
            key=key,
        )
        seen = (parameters, followed.value, followed.std_err, afresh.value)
        return (parameters, moments, followed.state), seen

    start = (parameters, optimiser.init(parameters), first.state)
    keys = jr.split(key2, NUM_STEPS)
    return jax.jit(lambda start: jax.lax.scan(step, start, keys)[1])(start)


def main():
    loss, parameters = make_problem(jr.key(0))
    size = sum(x.size for x in jax.tree.leaves(parameters))

    @jax.jit
    def exact(parameters):
        operator = tx.hessian(loss, parameters)
        return tx.trace(operator, tx.ExactTraceEstimator(), k=size).value

    runs = {m: train(loss, parameters, m, jr.key(m)) for m in PROBES}
    marks = np.arange(EVERY - 1, NUM_STEPS, EVERY)
    trained = runs[PROBES[0]][0]
    truth = np.array([exact(jax.tree.map(lambda x, i=i: x[i], trained)) for i in marks])

    def error(values):
        return np.sqrt(np.mean((values[marks] / truth - 1) ** 2))

    _, followed, bars, afresh = runs[4]
    print(f"8 products a step, n = {size}")
    print("step    exact   followed            afresh")
    for i, value in zip(marks, truth, strict=True):
        both = f"{followed[i]:8.2f} +- {bars[i]:5.2f} {afresh[i]:11.2f}"
        print(f"{i + 1:4d} {value:8.2f} {both}")
    errors = np.array([[error(run[1]), error(run[3])] for run in runs.values()])
    print("products a step   error followed   error afresh")
    for m, (one, other) in zip(PROBES, errors, strict=True):
        print(f"{2 * m:15d} {one:16.1%} {other:14.1%}")

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, NUM_STEPS + 1)
    left.plot(steps, afresh, ".", ms=3, color="0.7", label="afresh")
    left.fill_between(steps, followed - 2 * bars, followed + 2 * bars, alpha=0.3)
    left.plot(steps, followed, label="DynamicTrace, 2 standard errors")
    left.plot(marks + 1, truth, "k+", ms=9, label="exact")
    left.set(xlabel="step of Adam", ylabel="trace of the Hessian")
    left.set_title("8 products a step")
    left.legend()
    for column, name in enumerate(("DynamicTrace", "afresh")):
        right.loglog(2 * np.array(PROBES), errors[:, column], "o-", label=name)
    right.set(xlabel="products a step", ylabel="relative error, root mean square")
    right.legend()
    directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = Path(directory) / "dynamic_trace.png"
    figure.savefig(path, dpi=120)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
