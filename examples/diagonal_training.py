# %% [markdown]
# # Train a network with the diagonal of its curvature
#
# Adam divides each step by the size of past gradients. Sophia and AdaHessian divide by
# the curvature of the loss in each direction, an entry of the diagonal of its Hessian.
# This tutorial estimates that diagonal with error bars, builds an
# [optax](https://optax.readthedocs.io) optimiser with it, compares cost and result with
# Adam, and shows how the curvature is shared among the layers. A small network learns
# scikit-learn's digits.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.stats import t
from sklearn.datasets import load_digits

import traceax as tx


# %% [markdown]
# ## A network and its curvature
#
# A Hessian may have negative entries on its diagonal, and dividing by one makes a step
# uphill. The generalised Gauss-Newton operator (GGN) leaves out the part of the Hessian
# that can be negative, so it is semidefinite. `tx.ggn` takes the network and the loss
# of its outputs. One product costs about two gradients.

# %%
pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images = jnp.asarray(pixels[order] / 16, jnp.float32)
labels = jnp.asarray(digits[order])
train = images[:1200], labels[:1200]
test = images[1200:], labels[1200:]

network = eqx.nn.MLP(64, 10, 24, 2, jax.nn.tanh, key=jr.key(0))
initial, static = eqx.partition(network, eqx.is_inexact_array)
size = sum(x.size for x in jax.tree.leaves(initial))


def logits(parameters, images):
    return jax.vmap(eqx.combine(parameters, static))(images)


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def loss(parameters, batch):
    images, labels = batch
    return cross_entropy(logits(parameters, images), labels)


def curvature(parameters, batch):
    images, labels = batch
    return tx.ggn(
        lambda parameters: logits(parameters, images),
        lambda outputs: cross_entropy(outputs, labels),
        parameters,
    )


# %% [markdown]
# ## The diagonal, with error bars
#
# `tx.diagonal` estimates all entries at once, from 20 products. The tag says that the
# operator is semidefinite, and the default estimator chooses between a basis and plain
# random signs [at run time](../docs/quantities.md). Values and error bars have the
# structure of the parameters. For comparison, as many products as parameters give the
# exact diagonal.

# %%
operator = curvature(initial, train)
solution = tx.diagonal(operator, k=20, key=jr.key(1))
exact = tx.diagonal(operator, k=size).value

flat = {
    name: np.asarray(ravel_pytree(tree)[0])
    for name, tree in (
        ("exact", exact),
        ("estimate", solution.value),
        ("bar", solution.std_err),
    )
}
freedom = int(solution.stats["num_samples"]) - 1
half = t.ppf(0.975, freedom) * flat["bar"]
within = np.mean(np.abs(flat["estimate"] - flat["exact"]) <= half)
print(f"{size} parameters; {within:.1%} of the 95% intervals cover the exact entry")

# %%
ranked = np.argsort(flat["exact"])[::-1]
some = ranked[:: size // 120]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
left.errorbar(
    np.arange(len(some)),
    flat["estimate"][some],
    half[some],
    fmt=".",
    ms=4,
    lw=0.8,
    label="20 products, 95% interval",
)
left.plot(np.arange(len(some)), flat["exact"][some], "k", lw=1.2, label="exact")
left.set(xlabel="some parameters, by their curvature", ylabel="diagonal of the GGN")
left.set(yscale="log", ylim=(1e-5, 0.3))
left.legend()
for k in (10, 40, 160):
    estimate = tx.diagonal(operator, k=k, key=jr.key(1)).value
    estimate = np.asarray(ravel_pytree(estimate)[0])
    error = np.sqrt(np.mean((estimate - flat["exact"]) ** 2))
    right.plot(
        flat["exact"], estimate, ".", ms=2, label=f"{k} products, error {error:.0e}"
    )
ends = [0, flat["exact"].max()]
right.plot(ends, ends, "k", lw=0.8)
right.set(xlabel="exact", ylabel="estimate", title="root-mean-square errors")
right.legend(markerscale=4)
plt.show()

# %% [markdown]
# Twenty products determine the large entries well. The small ones, to the right, have
# bars that reach down to zero (the axis is logarithmic), and some estimates are
# negative. With four times the products the error falls by much more than half, because
# a few eigenvalues are large and most are small.
#
# ## An optimiser with it
#
# As in Sophia, the step is the mean of past gradients divided by the curvature, with
# each component clipped to the learning rate:
#
# $$ u = \mathrm{clip}\Bigl(\frac{\bar g}{\max(\gamma \bar h, \varepsilon)},\,
#   \pm 1\Bigr) .$$
#
# $\bar h$ averages estimates of the diagonal, one every ten steps from a few products
# each. Where the estimated curvature is small, or negative by chance, clipping makes a
# step of constant length.
#
# An optax transformation takes extra arguments by name: here a function that makes the
# operator when it is needed, and a key.


# %%
def scale_by_curvature(k, every, gamma, b1=0.9, b2=0.9, eps=1e-8):
    def init(parameters):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return 0, zeros, zeros

    def update(gradients, state, parameters=None, *, operator, key):
        count, mean, diagonal = state

        def estimate():
            new = tx.diagonal(operator(), k=k, key=key, throw=False).value
            return optax.incremental_update(new, diagonal, 1 - b2)

        diagonal = jax.lax.cond(count % every == 0, estimate, lambda: diagonal)
        mean = optax.incremental_update(gradients, mean, 1 - b1)
        # Averages that start at zero are too small at first, as in Adam.
        m_scale = 1 - b1 ** (count + 1.0)
        h_scale = 1 - b2 ** (count // every + 1.0)

        def step(g, h):
            h = jnp.maximum(gamma * h / h_scale, eps)
            return jnp.clip(g / m_scale / h, -1, 1)

        return jax.tree.map(step, mean, diagonal), (count + 1, mean, diagonal)

    return optax.GradientTransformationExtraArgs(init, update)


# %% [markdown]
# Both optimisers train on the same batches of 100 images. Each gets four learning
# rates, and the one with the smallest final loss counts.

# %%
num_steps, batch_size, k, every = 600, 100, 4, 10
rates = jnp.array([1e-3, 3e-3, 1e-2, 3e-2])


def train_with(direction, needs_curvature):
    def run(rate, key):
        def step(carry, key):
            parameters, state = carry
            key1, key2 = jr.split(key)
            index = jr.choice(key1, len(train[0]), (batch_size,), replace=False)
            batch = train[0][index], train[1][index]
            gradients = jax.grad(loss)(parameters, batch)
            extra = {}
            if needs_curvature:
                extra = {"operator": lambda: curvature(parameters, batch), "key": key2}
            updates, state = direction.update(gradients, state, parameters, **extra)
            updates = jax.tree.map(lambda x: -rate * x, updates)
            parameters = optax.apply_updates(parameters, updates)
            return (parameters, state), loss(parameters, train)

        start = (initial, direction.init(initial))
        (parameters, _), losses = jax.lax.scan(step, start, jr.split(key, num_steps))
        right = jnp.argmax(logits(parameters, test[0]), axis=1) == test[1]
        return losses, jnp.mean(right), parameters

    each = jax.jit(lambda key: jax.lax.map(lambda rate: run(rate, key), rates))
    return each(jr.key(2))


runs = {
    "Adam": train_with(optax.scale_by_adam(), False),
    "curvature": train_with(scale_by_curvature(k, every, gamma=0.05), True),
}

# %%
colors = {"Adam": "C0", "curvature": "C1"}
per_step = {"Adam": 1, "curvature": 1 + 2 * k / every}
best = {}
print("              rate  steps to a loss of 0.05   loss at the end   test accuracy")
for name, (losses, accuracies, _) in runs.items():
    best[name] = int(jnp.argmin(losses[:, -1]))
    for rate, curve, accuracy in zip(rates, losses, accuracies, strict=True):
        reached = np.flatnonzero(np.asarray(curve) < 0.05)
        steps = str(reached[0] + 1) if len(reached) else "-"
        print(f"{name:10}{rate:8.4f}{steps:>25}{curve[-1]:18.4f}{accuracy:16.1%}")

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 3.8), layout="constrained", sharey=True
)
same = 1  # which learning rate
steps = np.arange(1, num_steps + 1)
for name, (losses, _, _) in runs.items():
    label = f"{name}, rate {rates[same]:.3f}"
    left.semilogy(steps, losses[same], color=colors[name], label=label)
    label = f"{name}, rate {rates[best[name]]:.3f}"
    right.semilogy(
        per_step[name] * steps, losses[best[name]], color=colors[name], label=label
    )
left.set(xlabel="steps", ylabel="loss on all of the training data")
left.set(title="the same learning rate")
right.set(xlabel="cost, in gradients", title="each with its best learning rate")
left.legend()
right.legend()
plt.show()

# %% [markdown]
# At the same small learning rate the curvature is ahead of Adam in steps: it makes
# large steps where the loss is flat. But it does not tolerate the large learning rates
# that Adam does, Adam's best loss is lower, and each of its steps costs 1.8 gradients
# instead of one: four products every ten steps, at about two gradients each.
#
# On this small problem **Adam is the better choice**. That is no judgement on the
# method, which was made for large language models and has settings that were not tuned
# here ($\gamma$, `k`, `every`, the averages). To compare fairly, tune each method and
# count products.
#
# The diagonal is useful elsewhere too: in a Laplace approximation, to prune weights, or
# as a [preconditioner](../docs/quantities.md).
#
# ## Curvature by layer
#
# `tx.leaf_traces` estimates the trace of each leaf's block from the same products as
# the total. Here are the weights and biases of each layer, before and after training
# with Adam at its best rate.


# %%
trained = jax.tree.map(lambda x: x[best["Adam"]], runs["Adam"][2])
paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(initial)]
names = [jax.tree_util.keystr(path).removeprefix(".layers") for path in paths]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
for axis, (title, parameters) in zip(
    axes, {"before training": initial, "after training": trained}.items(), strict=True
):
    operator = curvature(parameters, train)
    solution = tx.leaf_traces(operator, k=60, key=jr.key(3))
    traces = np.array(jax.tree.leaves(solution.value))
    bars = np.array(jax.tree.leaves(solution.std_err))
    exact = jax.tree.map(jnp.sum, tx.diagonal(operator, k=size).value)
    exact = np.array(jax.tree.leaves(exact))
    label = "60 products ± 2 standard errors"
    axis.bar(names, traces, yerr=2 * bars, capsize=4, label=label)
    axis.plot(names, exact, "k_", ms=20, label="exact")
    axis.set(title=title, ylabel="trace of the block")
    axis.tick_params(axis="x", labelrotation=20)
    axis.legend()
    print(f"{title}: {traces.sum():.4f} in total, exact {exact.sum():.4f};", end=" ")
    print(
        f"largest deviation {np.max(np.abs(traces - exact) / bars):.1f} standard errors"
    )
plt.show()

# %% [markdown]
# One product serves all leaves, so the traces of a hundred layers cost as much as one.
# [What can be estimated](../docs/quantities.md) has other quantities.
