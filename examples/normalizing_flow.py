# %% [markdown]
# # Train normalizing flows with estimated log-determinants
#
# A normalizing flow maps data $x$ to standard normal $z$, and the density of $x$
# contains the determinant of a Jacobian. This tutorial trains two flows on
# scikit-learn's handwritten digits by maximum likelihood, under `jax.vmap` over images.
# A residual flow needs $\log|\det J|$ of a nonsymmetric matrix in each layer. A
# continuous flow needs the trace of a Jacobian along a path. Both are trained twice:
# with a few random probes per image, and with dense Jacobians.
#
# The data are the first 16 principal components of the images, scaled to variance 1. In
# so few dimensions dense Jacobians are cheap, and serve for comparison. In hundreds of
# dimensions each would take hundreds of products, for every image and layer.

# %%
import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import traceax as tx


dimension, num_layers, num_updates = 16, 10, 250
pixels, _ = load_digits(return_X_y=True)
pca = PCA(dimension, whiten=True).fit(pixels)
data = jnp.asarray(pca.transform(pixels), jnp.float32)
data = jr.permutation(jr.key(0), data)
data, test = data[:1500], data[1500:]

# %% [markdown]
# ## A residual flow
#
# It has ten layers $z = x + g(x)$, where each $g$ is a network with two weight matrices
# scaled to a spectral norm of at most 0.95. The Lipschitz constant of $g$ is then at
# most $0.95^2$, so each layer is invertible. The log-density of $x$ is the normal
# log-density at the last $z$, plus $\log|\det(I + g'(x))|$ of each layer.
#
# This Jacobian is a [general square operator](../docs/logdet.md) without a tag:
# `logdet` takes products from both sides. Its singular values are at least
# $1 - 0.95^2$, a bound that makes the bracket of the quadrature error tight.


# %%
def contractive(mlp):
    """The network with every weight matrix scaled to a spectral norm of at most 0.95."""
    return eqx.tree_at(
        lambda mlp: [layer.weight for layer in mlp.layers],
        mlp,
        replace_fn=lambda w: w / jnp.maximum(jnp.linalg.norm(w, ord=2) / 0.95, 1),
    )


def residual_layer(mlp, x):
    """z = x + g(x), and its Jacobian."""
    g = contractive(mlp)
    return x + g(x), lx.JacobianLinearOperator(lambda x, _: x + g(x), x)


# %%
def residual_layers(mlps, x, key, functional):
    """The last z, and `functional(jacobian, key)` of each layer; `mlps` is one network
    whose arrays have an axis for the layers."""
    arrays, static = eqx.partition(mlps, eqx.is_array)

    def step(x, layer):
        arrays, key = layer
        z, jacobian = residual_layer(eqx.combine(arrays, static), x)
        return z, functional(jacobian, key)

    return jax.lax.scan(step, x, (arrays, jr.split(key, num_layers)))


def residual_flow(mlps, x, key, log_det):
    """log p(x)"""
    z, log_dets = residual_layers(mlps, x, key, log_det)
    return jnp.sum(norm.logpdf(z)) + jnp.sum(log_dets)


# %% [markdown]
# ## A continuous flow
#
# Diffrax integrates the path $dx/dt = f(t, x)$ from the data at $t = 0$ to $z$ at
# $t = 1$. Along it the log-density gathers the divergence of $f$, so $\log p(x) = \log
# \mathcal N(z) + \int_0^1 \mathrm{tr}(\partial f / \partial x)\, dt$. `tx.divergence`
# returns $f$ and its divergence from one evaluation. With the same probes at all times,
# as in FFJORD (Grathwohl et al., 2019), the integrand is a smooth function of time,
# which a solver of order five needs.


# %%
def integrate(derivative, state, start=0.0, end=1.0):
    """The state at `end`, by five steps of Tsitouras' method."""
    term, solver = diffrax.ODETerm(derivative), diffrax.Tsit5()
    step = (end - start) / 5
    solution = diffrax.diffeqsolve(term, solver, start, end, step, state)
    return jax.tree.map(lambda states: states[0], solution.ys)


def field(mlp, t, x):
    return mlp(jnp.append(x, t))


# %%
def continuous_flow(mlp, x, key, divergence, num_paths=1):
    """log p(x); one for each sample, where `divergence` gives several."""

    def derivative(t, state, _):
        position, _ = state
        return divergence(lambda x: field(mlp, t, x), position, key)

    z, gathered = integrate(derivative, (x, jnp.zeros(num_paths)))
    return jnp.sum(norm.logpdf(z)) + gathered.squeeze()


# %% [markdown]
# ## The estimates, and what they replace
#
# Each image gets four probes. The log-determinant takes six steps of Golub-Kahan
# bidiagonalisation with each. The divergence uses Hutchinson's estimator, as the
# Jacobians are not known to have a decaying spectrum and `k` is small.


# %%
def exact_log_det(jacobian, key):
    return jnp.linalg.slogdet(jacobian.as_matrix())[1]


slq = tx.SLQEstimator(lower_bound=1 - 0.95**2)


def estimated_log_det(jacobian, key):
    return tx.logdet(jacobian, slq, k=4, num_steps=6, key=key).value


def exact_divergence(fn, x, key):
    value, solution = tx.divergence(fn, x)
    return value, solution.value[None]


def estimated_divergence(fn, x, key):
    value, solution = tx.divergence(fn, x, k=4, key=key)
    return value, solution.value[None]


def log_densities(log_density, flow, images, key, functional):
    """log p of each image, each with a key of its own."""
    keys = jr.split(key, len(images))
    return jax.vmap(lambda x, key: log_density(flow, x, key, functional))(images, keys)


# %% [markdown]
# ## Training
#
# Adam takes batches of 64 images, with new probes in each. The batches are the same for
# both ways of computing the likelihoods, so the curves can be compared point by point.


# %%
@eqx.filter_jit
def train(log_density, flow, functional, learning_rate):
    """The trained flow, and the mean log-likelihood of each batch before its update."""
    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, num_updates))
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)

    def update(carry, key):
        arrays, state = carry
        key1, key2 = jr.split(key)
        batch = jr.choice(key1, data, (64,), replace=False)

        def loss(arrays):
            flow = eqx.combine(arrays, static)
            return -jnp.mean(log_densities(log_density, flow, batch, key2, functional))

        value, gradient = jax.value_and_grad(loss)(arrays)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(arrays, updates), state), -value

    keys = jr.split(jr.key(1), num_updates)
    start = arrays, optimiser.init(arrays)
    (arrays, _), curve = jax.lax.scan(update, start, keys)
    return eqx.combine(arrays, static), curve


# %%
def layer(key):
    return eqx.nn.MLP(dimension, dimension, 64, 1, jnp.tanh, key=key)


residual = eqx.filter_vmap(layer)(jr.split(jr.key(2), num_layers))
continuous = eqx.nn.MLP(dimension + 1, dimension, 64, 2, jnp.tanh, key=jr.key(3))
dense, probes = "dense Jacobians", "probes"
runs = {
    ("residual", dense): (residual_flow, residual, exact_log_det, 1e-2),
    ("residual", probes): (residual_flow, residual, estimated_log_det, 1e-2),
    ("continuous", dense): (continuous_flow, continuous, exact_divergence, 2e-2),
    ("continuous", probes): (continuous_flow, continuous, estimated_divergence, 2e-2),
}
trained = {name: train(*arguments) for name, arguments in runs.items()}

# %%
normal = jnp.mean(jnp.sum(norm.logpdf(test), axis=1))
print("mean log-likelihood of the test images, computed exactly")
print(f"{'standard normal distribution':<32}{normal:>8.2f}")
figure, axes = plt.subplots(1, 2, layout="constrained", figsize=(9, 3.5))
for (name, way), (flow, curve) in trained.items():
    log_density, _, exact, _ = runs[name, dense]
    value = jnp.mean(log_densities(log_density, flow, test, jr.key(0), exact))
    print(f"{name + ' flow, ' + way:<32}{value:>8.2f}")
    each = axes[int(name == "continuous")]
    each.plot(np.convolve(curve, np.ones(20) / 20, "valid"), label=way)
    each.set(
        title=f"{name} flow", xlabel="update", ylabel="log-likelihood, mean of 20 batches"
    )
    each.legend()
plt.show()

# %% [markdown]
# The test images are more likely under both flows than under the normal distribution,
# which has the right means and variances. The residual flow trains as well with probes
# as with dense Jacobians. In the continuous flow the noise of four probes costs a small
# part of the gain.
#
# ## How accurate is $\log|\det J|$?
#
# For the whole residual flow it is a sum over the layers. They have different keys, so
# their errors are independent and the squares of their standard errors add up. One call
# under `vmap` makes the estimates for all test images.


# %%
def log_dets(functional):
    """Sums over the layers, for all test images: values, standard errors, brackets."""

    def total(x, key):
        value, std_err, width = residual_layers(flow, x, key, functional)[1]
        return jnp.sum(value), jnp.sqrt(jnp.sum(std_err**2)), jnp.sum(width)

    return jax.jit(jax.vmap(total))(test, jr.split(jr.key(4), len(test)))


flow, _ = trained["residual", probes]
exact, _, _ = log_dets(lambda jacobian, key: (exact_log_det(jacobian, key), 0.0, 0.0))
print(
    f"{'probes':>6}{'steps':>7}{'rms error':>11}{'rms std err':>13}{'mean bracket':>14}"
)
for k, num_steps in [(4, 2), (4, 6), (8, 6)]:

    def estimate(jacobian, key, k=k, num_steps=num_steps):
        solution = tx.logdet(jacobian, slq, k=k, num_steps=num_steps, key=key)
        low, high = solution.stats["bracket"]
        return solution.value, solution.std_err, high - low

    value, std_err, width = log_dets(estimate)
    error, bar = (jnp.sqrt(jnp.mean(a**2)) for a in (value - exact, std_err))
    print(f"{k:>6}{num_steps:>7}{error:>11.3f}{bar:>13.3f}{jnp.mean(width):>14.4f}")

# %% [markdown]
# With enough steps each value would lie inside its bracket; the mean width is printed.
# With two steps it is more than half as wide as a standard error, although the error is
# hardly larger than with six: the bracket is a bound, not an estimate. With six steps
# it is negligible, because the Jacobians are well conditioned. What is left is
# sampling, which more probes reduce. The standard errors are larger than the errors on
# purpose, as [with few samples](../docs/error_bars.md).

# %%
figure, axes = plt.subplots(layout="constrained", figsize=(5, 4.2))
axes.errorbar(exact[:60], value[:60], std_err[:60], fmt="o", markersize=4, alpha=0.6)
axes.axline((1, 1), slope=1, color="k", linestyle="--", label="exact")
axes.set(xlabel=r"exact $\log|\det J|$", ylabel=r"8 probes, 6 steps, $\pm$ std err")
axes.legend()
plt.show()

# %% [markdown]
# ## How accurate is a log-density?
#
# Along the path of the continuous flow the same probes are used at all times, so errors
# are correlated and the error bars cannot be combined. But `stats["samples"]` has the
# sample of each probe, and each can be integrated along the path by itself. The spread
# of the integrals gives the error of their mean.

# %%
flow, _ = trained["continuous", probes]
exact = log_densities(continuous_flow, flow, test, jr.key(5), exact_divergence)
print(f"{'probes':>6}{'rms error':>11}{'rms std err':>13}")
for k in (4, 8):

    def samples(fn, x, key, k=k):
        value, solution = tx.divergence(fn, x, k=k, key=key)
        return value, solution.stats["samples"]

    def log_density(mlp, x, key, divergence, k=k):
        return continuous_flow(mlp, x, key, divergence, num_paths=k)

    values = log_densities(log_density, flow, test, jr.key(6), samples)
    error = jnp.sqrt(jnp.mean((jnp.mean(values, axis=1) - exact) ** 2))
    std_err = jnp.sqrt(jnp.mean(jnp.var(values, axis=1, ddof=1) / k))
    print(f"{k:>6}{error:>11.3f}{std_err:>13.3f}")

# %% [markdown]
# ## Samples
#
# Both flows can be inverted: a residual layer by the fixed-point iteration
# $x \leftarrow z - g(x)$, which converges because $g$ is a contraction, and the
# continuous flow by going back in time.


# %%
def invert_residual(mlps, z):
    arrays, static = eqx.partition(mlps, eqx.is_array)

    def undo(z, arrays):
        g = contractive(eqx.combine(arrays, static))
        return jax.lax.fori_loop(0, 100, lambda _, x: z - g(x), z), None

    return jax.lax.scan(undo, z, arrays, reverse=True)[0]


def invert_continuous(mlp, z):
    return integrate(lambda t, x, _: field(mlp, t, x), z, 1.0, 0.0)


def invert_all(invert, name):
    flow, _ = trained[name, probes]
    return jax.vmap(lambda z: invert(flow, z))(z)


# %%
z = jr.normal(jr.key(7), (12, dimension))
rows = {
    "data": test[:12],
    "normal": z,
    "residual flow": invert_all(invert_residual, "residual"),
    "continuous flow": invert_all(invert_continuous, "continuous"),
}
figure, axes = plt.subplots(4, 12, layout="constrained", figsize=(10, 3.6))
for row, (name, points) in zip(axes, rows.items(), strict=True):
    for each, image in zip(row, pca.inverse_transform(np.asarray(points)), strict=True):
        each.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
        each.set(xticks=[], yticks=[])
    row[0].set_ylabel(name, rotation=0, horizontalalignment="right")
plt.show()

# %% [markdown]
# All three rows of samples start from the same normal vectors. With networks this small
# neither flow is a good generator, but the strokes of the continuous flow are clearer
# than those of the normal distribution.
