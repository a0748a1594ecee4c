# %% [markdown]
# # Measure a network's curvature over batches of data
#
# The curvature of a loss over all the training data says which layers can be stored in
# few bits, which weights can be removed, and how strong the prior of the weights should
# be. A convolutional network learns scikit-learn's digits. This tutorial makes the
# operator of its curvature from batches, and estimates the trace of each layer, the
# diagonal and a log-determinant.

# %%
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import traceax as tx


# %% [markdown]
# ## A network, and data in batches
#
# Batches are a leading axis of the arrays, here 12 batches of 100 images. The network
# is trained on them as usual.

# %%
pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images = jnp.asarray(pixels[order] / 16, jnp.float32).reshape(-1, 1, 8, 8)
labels = jnp.asarray(digits[order])
batches = {
    "images": images[:1200].reshape(12, 100, 1, 8, 8),
    "labels": labels[:1200].reshape(12, 100),
}
unseen = {"images": images[1200:], "labels": labels[1200:]}


class Network(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 6, 3, stride=2, padding=1, key=keys[0])
        self.second = eqx.nn.Conv2d(6, 8, 3, stride=2, padding=1, key=keys[1])
        self.last = eqx.nn.Linear(32, 10, key=keys[2])

    def __call__(self, image):
        hidden = jax.nn.gelu(self.second(jax.nn.gelu(self.first(image))))
        return self.last(hidden.reshape(-1))


def logits(network, batch):
    return jax.vmap(network)(batch["images"])


def cross_entropy(outputs, batch):
    labels = batch["labels"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, labels))


def loss(network, batch):
    return cross_entropy(logits(network, batch), batch)


optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, 100 * 12))


@jax.jit
def train(network):
    def step(carry, batch):
        network, state = carry
        updates, state = optimiser.update(jax.grad(loss)(network, batch), state)
        return (optax.apply_updates(network, updates), state), None

    def epoch(carry, _):
        return jax.lax.scan(step, carry, batches)

    start = network, optimiser.init(network)
    return jax.lax.scan(epoch, start, length=100)[0][0]


@jax.jit
def loss_of_all(network):
    return jnp.mean(jax.lax.map(lambda batch: loss(network, batch), batches))


@jax.jit
def accuracy(network):
    return jnp.mean(jnp.argmax(logits(network, unseen), axis=1) == unseen["labels"])


network = train(eqx.filter(Network(jr.key(0)), eqx.is_array))
flat, unravel = ravel_pytree(network)
print(f"{flat.size} parameters, loss {loss_of_all(network):.4f},", end=" ")
print(f"accuracy on unseen images {accuracy(network):.1%}")

# %% [markdown]
# ## The operator
#
# The generalised Gauss-Newton operator $G$ is the curvature of the loss without the
# part that can be negative. Given the batches, `tx.ggn` loops over them in each
# product, with one in memory at a time. For comparison the matrix is formed here, from
# the Jacobian of each image.

# %%
operator = tx.ggn(logits, cross_entropy, network, batches)


@jax.jit
def formed():
    def of_image(image):
        outputs = lambda flat: unravel(flat)(image)  # noqa: E731
        jacobian = jax.jacrev(outputs)(flat)
        p = jax.nn.softmax(outputs(flat))
        return jacobian.T @ (p[:, None] * jacobian - jnp.outer(p, p @ jacobian))

    def of_batch(total, batch):
        return total + jnp.mean(jax.vmap(of_image)(batch["images"]), axis=0), None

    zero = jnp.zeros((flat.size, flat.size))
    return jax.lax.scan(of_batch, zero, batches)[0] / 12


matrix = np.asarray(formed(), np.float64)
exact = unravel(jnp.asarray(np.diag(matrix), jnp.float32))

# %% [markdown]
# ## Which layers can be stored in few bits
#
# Rounding the weights of a layer to multiples of $\Delta$ adds errors of variance
# $\Delta^2 / 12$. At a minimum this raises the loss by half the trace of that layer's
# block of the curvature, times the variance. `tx.leaf_traces` estimates the traces of
# all blocks from the same products, with an error bar for each.

# %%
traces = tx.leaf_traces(operator, k=60, key=jr.key(1))
layers = {
    "first, weight": lambda tree: tree.first.weight,
    "first, bias": lambda tree: tree.first.bias,
    "second, weight": lambda tree: tree.second.weight,
    "second, bias": lambda tree: tree.second.bias,
    "last, weight": lambda tree: tree.last.weight,
    "last, bias": lambda tree: tree.last.bias,
}
print("layer            parameters    trace              exact     per parameter")
for name, leaf in layers.items():
    value, bar = leaf(traces.value), leaf(traces.std_err)
    size = leaf(network).size
    print(f"{name:16} {size:10} {value:9.3f} +- {bar:5.3f}", end="")
    print(f" {jnp.sum(leaf(exact)):9.3f} {value / size:18.2g}")

# %% [markdown]
# Now round the weights of one layer at a time, and compare the rise of the loss with
# the prediction.


# %%
def rounded(weights, bits, key):
    """Rounds to `2**bits` levels, with a random offset to average over."""
    step = 2 * jnp.max(jnp.abs(weights)) / 2**bits
    offset = jr.uniform(key)
    return step * (jnp.round(weights / step + offset) - offset), step


@ft.partial(jax.jit, static_argnames="layer")
def rise(layer, bits, keys):
    def one(key):
        coarse, _ = rounded(layers[layer](network), bits, key)
        return loss_of_all(eqx.tree_at(layers[layer], network, coarse))

    return jnp.mean(jax.lax.map(one, keys)) - loss_of_all(network)


figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
print("measured rise / predicted rise, for 3, 4, 5 and 6 bits")
for name in ("first, weight", "second, weight", "last, weight"):
    weights = layers[name](network)
    predicted, found = [], []
    for bits in (3.0, 4.0, 5.0, 6.0):
        _, step = rounded(weights, bits, jr.key(0))
        predicted.append(layers[name](traces.value) * step**2 / 24)
        found.append(rise(name, bits, jr.split(jr.key(2), 20)))
    ratios = np.array(found) / np.array(predicted)
    print(f"{name:16}", "".join(f"{ratio:8.2f}" for ratio in ratios))
    axis.loglog(predicted, found, "o-", label=name)
ends = np.array(axis.get_xlim())
axis.plot(ends, ends, "k", lw=0.8)
axis.set(xlabel="rise of the loss, predicted from the trace", ylabel="measured")
axis.set_title("weights of one layer in 3 to 6 bits")
axis.legend()
plt.show()

# %% [markdown]
# With few bits the weights move so far that the loss is no longer quadratic. From 5
# bits on the prediction is within a factor of two, over two orders of magnitude of the
# rise.
#
# ## Which weights can be removed
#
# Removing the weight $w_i$ raises the loss by about $h_{ii} w_i^2 / 2$, where $h_{ii}$
# is the diagonal entry: *optimal brain damage* (LeCun, Denker and Solla, 1989). The
# simpler criterion is the size of the weight.

# %%
diagonal = tx.diagonal(operator, k=60, key=jr.key(3))
entries = np.asarray(ravel_pytree(diagonal.value)[0])
error = np.linalg.norm(entries - np.diag(matrix)) / np.linalg.norm(np.diag(matrix))
print(f"diagonal of {flat.size} entries, by 60 products: error {error:.1%}")


@jax.jit
def without(removed):
    return loss_of_all(unravel(jnp.where(removed, 0, flat)))


fractions = np.linspace(0, 0.7, 15)
criteria = {
    "size of the weight": np.abs(flat),
    "diagonal, 60 products": np.maximum(entries, 0) * np.asarray(flat) ** 2,
    "exact diagonal": np.diag(matrix) * np.asarray(flat) ** 2,
}
styles = iter(("C1s-", "C0o-", "k--"))
figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
for name, criterion in criteria.items():
    ranks = np.argsort(np.argsort(criterion))
    found = [without(ranks < fraction * flat.size) for fraction in fractions]
    axis.semilogy(100 * fractions, found, next(styles), ms=4, label=name)
axis.set(xlabel="weights removed, in percent", ylabel="loss")
axis.legend()
plt.show()

# %% [markdown]
# ## How strong the prior should be
#
# Suppose that the weights are drawn from a normal distribution of variance $1/\delta$.
# Laplace's approximation of the evidence, with N log-likelihoods and the curvature
# $N G + \delta I$ at the trained weights, is
#
# $$\log Z(\delta) = -N\,\mathrm{loss} - \frac\delta2 \lVert w \rVert^2
#   + \frac P2 \log\delta - \frac12 \log\det(N G + \delta I) ,$$
#
# and its maximum chooses $\delta$ without validation data (MacKay, 1992). The
# log-determinant is the trace of a function of $G$ with the parameter $\delta$, and
# `vmap` over parameters of a function [needs no further products](../docs/logdet.md).

# %%
examples = batches["labels"].size
deltas = jnp.logspace(-1.5, 1, 21)


@jax.jit
@jax.vmap
def half_logdet(delta):
    solution = tx.trace_of_function(
        operator,
        # Rounding puts eigenvalues that are zero at some 1e-6.
        lambda x: jnp.log(examples * jnp.maximum(x, 0) + delta) / 2,
        k=10,
        num_steps=40,
        key=jr.key(4),
        throw=False,
    )
    return solution.value, jnp.stack(solution.interval(0.95))


def evidence(delta, half_logdet):
    prior = flat.size * jnp.log(delta) / 2 - delta * jnp.sum(flat**2) / 2
    return prior - examples * loss_of_all(network) - half_logdet


values, ends = half_logdet(deltas)
eigenvalues = np.maximum(np.linalg.eigvalsh(matrix), 0)
truth = np.log(examples * eigenvalues + np.asarray(deltas)[:, None]).sum(axis=1) / 2

found, low, high = (evidence(deltas, x) for x in (values, ends[:, 1], ends[:, 0]))
exactly = evidence(deltas, truth)
figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
axis.fill_between(deltas, low, high, alpha=0.3, label="95% interval")
axis.semilogx(deltas, found, label="10 probes, 40 steps")
axis.semilogx(deltas, exactly, "k--", label="exact")
axis.set(xlabel="precision of the prior, $\\delta$", ylabel="logarithm of the evidence")
axis.legend()
plt.show()
best, truly = deltas[jnp.argmax(found)], deltas[jnp.argmax(exactly)]
print(f"the evidence is largest at {best:.2f}, exact {truly:.2f}")

# %% [markdown]
# All 21 values come from the same 400 products. So the curve is smooth, and its maximum
# is known better than its height.
#
# ## What to take with you
#
# - Pass data to `tx.ggn`, `tx.hessian` and `tx.empirical_fisher` in batches: memory is
#   that of one batch, and new data or parameters of the same shapes compile nothing.
# - `tx.leaf_traces`, `tx.diagonal` and `tx.trace_of_function` take the same operator,
#   and each has error bars.
# - On several devices, [split the batches, the probes, or both](../docs/scaling.md).
