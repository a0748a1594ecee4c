# %% [markdown]
# # Follow the Hessian of a network through training
#
# The Hessian of a loss measures how curved it is where training has arrived. While a
# small network learns scikit-learn's digits, this tutorial follows the trace of its
# Hessian with `DynamicTrace`, at a few products per step, compares that with estimates
# from scratch, and computes the spectrum and the sharpness (the largest eigenvalue).

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import traceax as tx


# %% [markdown]
# ## A network and its Hessian
#
# The parameters of a network are a PyTree. `tx.hessian` makes an operator of the loss;
# one product costs about two gradients. With 610 parameters the exact answers are
# affordable, for comparison.

# %%
data, target = load_digits(return_X_y=True)
images, labels = jnp.asarray(data[:500] / 16, jnp.float32), jnp.asarray(target[:500])
network = eqx.nn.MLP(64, 10, 8, 1, jax.nn.tanh, key=jax.random.key(0))
initial, static = eqx.partition(network, eqx.is_inexact_array)
size = sum(x.size for x in jax.tree.leaves(initial))


def loss(parameters):
    logits = jax.vmap(eqx.combine(parameters, static))(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def hessian(parameters):
    return tx.hessian(loss, parameters)


solution = tx.trace(hessian(initial), k=60, key=jax.random.key(1))
exact = tx.trace(hessian(initial), k=size).value
print(f"{size} parameters, trace {solution.value:.2f} +- {solution.std_err:.2f}", end="")
print(f", exact {exact:.2f}")

# %% [markdown]
# ## Following the trace
#
# A training step changes the Hessian $H_t$ a little. An estimate from scratch throws
# away what was known before. `DynamicTrace` keeps it: with probes $\omega_i$ it
# estimates the trace of the change,
#
# $$T_t = (1 - \gamma)\, T_{t-1} + \frac1m \sum_{i=1}^m
#   \omega_i^T \bigl(H_t - (1 - \gamma) H_{t-1}\bigr)\, \omega_i ,$$
#
# where $\gamma$ balances the error of the fading old estimate against the error of the
# new samples. An update costs $2m$ products, $m$ with each Hessian. For comparison,
# Hutchinson's estimator spends as many products per step on the current Hessian alone.
#
# Everything, training included, runs in one `jax.lax.scan`. `jax.vmap` repeats it for
# five keys, and for twenty where the error bars are checked below.

# %%
num_steps = 200
optimiser = optax.adam(3e-3)


def train(num_probes, key):
    """For each step: parameters, the followed trace, its bar, and one from scratch."""
    dynamic = tx.DynamicTrace(hessian, num_probes=num_probes)
    key1, key2 = jax.random.split(key)
    first = dynamic.init(initial, key=key1, k=100)

    def step(carry, key):
        parameters, moments, state = carry
        updates, moments = optimiser.update(jax.grad(loss)(parameters), moments)
        parameters = optax.apply_updates(parameters, updates)
        followed = dynamic.update(state, parameters)
        afresh = tx.trace(
            hessian(parameters), tx.HutchinsonEstimator(), k=2 * num_probes, key=key
        )
        seen = (parameters, followed.value, followed.std_err, afresh.value)
        return (parameters, moments, followed.state), seen

    start = (initial, optimiser.init(initial), first.state)
    keys = jax.random.split(key2, num_steps)
    return jax.lax.scan(step, start, keys)[1]


keys = jax.random.split(jax.random.key(2), 20)
runs = {
    m: jax.jit(jax.vmap(lambda key, m=m: train(m, key)))(keys[:num_keys])
    for m, num_keys in ((2, 5), (4, 20), (8, 5), (16, 5))
}

# %% [markdown]
# The exact trace at every tenth step takes as many products as there are parameters:

# %%
marks = np.arange(9, num_steps, 10)
trained = jax.tree.map(lambda x: x[0], runs[4][0])
visited = jax.tree.map(lambda x: x[marks], trained)
truth = jax.jit(
    lambda visited: jax.lax.map(lambda p: tx.trace(hessian(p), k=size).value, visited)
)(visited)


def error(values):
    return np.sqrt(np.mean((values[:, marks] / truth - 1) ** 2))


_, followed, bars, afresh = runs[4]
within = np.mean(np.abs(followed[:, marks] - truth) < 2 * bars[:, marks])
print(f"{within:.0%} of the estimates are within two standard errors (8 products)")
print("products a step   error, DynamicTrace   error, scratch")
errors = np.array([[error(run[1]), error(run[3])] for run in runs.values()])
for m, (one, other) in zip(runs, errors, strict=True):
    print(f"{2 * m:15d} {one:21.1%} {other:15.1%}")

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(3, 2)
)
steps = np.arange(1, num_steps + 1)
followed, bars, afresh = followed[0], bars[0], afresh[0]
left.plot(steps, afresh, ".", ms=3, color="0.6", label="from scratch")
left.fill_between(steps, followed - 2 * bars, followed + 2 * bars, alpha=0.3)
left.plot(steps, followed, label="DynamicTrace ± 2 standard errors")
left.plot(marks + 1, truth, "k+", ms=7, label="exact")
left.set(xlabel="step of Adam", ylabel="trace of the Hessian")
left.set(title="one key, 8 products a step", ylim=(0, None))
left.legend()
products = 2 * np.array(list(runs))
for column, name in enumerate(("DynamicTrace", "from scratch")):
    right.loglog(products, 100 * errors[:, column], "o-", label=name)
right.set_xticks(products, products)
right.set_yticks([1, 3, 10, 30], ["1%", "3%", "10%", "30%"])
right.minorticks_off()
right.set(xlabel="products a step", ylabel="relative error, root mean square")
right.legend()
plt.show()

# %% [markdown]
# Both errors fall with the number of products, and `DynamicTrace` is more accurate for
# each. Its estimates are smooth, since each builds on the one before. So errors are
# correlated between steps, and a deviation lasts for a while.
#
# ## The spectrum, before and after
#
# `spectral_density` shows where all eigenvalues are, from 600 products in ten Lanczos
# runs. Most are near zero, so the density has a logarithmic scale. Exact eigenvalues
# are marked below.


# %%
@jax.jit
def dense(parameters):
    return hessian(parameters).as_matrix()


final = jax.tree.map(lambda x: x[-1], trained)
densities, spectra = {}, {}
for name, parameters in (("before training", initial), ("after training", final)):
    densities[name] = tx.spectral_density(
        hessian(parameters), k=10, num_steps=60, key=jax.random.key(2)
    )
    spectra[name] = np.linalg.eigvalsh(dense(parameters))

figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for axis, (name, density) in zip(axes, densities.items(), strict=True):
    tx.plot.spectral_density(density, ax=axis, label="estimate")
    marks_at = np.full(size, 2e-4)
    axis.plot(spectra[name], marks_at, "k|", ms=6, label="exact eigenvalues")
    axis.set(yscale="log", ylim=(1e-4, None), title=name)
    axis.legend()
plt.show()

# %% [markdown]
# An isolated eigenvalue shows as a bump, as wide as the smoothing. It has $1/610$ of
# the mass, which ten probes estimate with much noise, as the band shows. Its *position*
# is sharp, because Lanczos converges to the ends of the spectrum first. So the smallest
# and the largest node approximate the extreme eigenvalues, at no extra cost:

# %%
for name, density in densities.items():
    low, high, values = density.smallest, density.largest, spectra[name]
    print(f"{name:15}: eigenvalues from {low:.4f} to {high:.4f}", end="")
    print(f", exact {values[0]:.4f} to {values[-1]:.4f}")
    below, bar = density.cumulative(0.1)
    print(f"{'':15}  above 0.1: {1 - below:.1%} +- {bar:.1%}", end="")
    print(f", exact {np.mean(values > 0.1):.1%}")

# %% [markdown]
# Training leaves some large eigenvalues, about as many as there are classes, and moves
# the others towards zero. The most negative one shrinks to about a tenth.
#
# ## Sharpness through training
#
# `eigsh` finds the largest eigenvalues, with vectors and an interval for each. After
# training:

# %%
print(tx.eigsh(hessian(final), 10, key=jax.random.key(3)))

# %% [markdown]
# The sharpness needs one eigenvalue, here at each tenth step:


# %%
@jax.jit
def sharpness(parameters):
    pairs = tx.eigsh(hessian(parameters), 1, key=jax.random.key(3))
    return pairs.values[0], pairs.interval(), pairs.stats["num_matvecs"]


largest, (low, high), matvecs = jax.lax.map(sharpness, visited)
exact = jax.lax.map(lambda p: jnp.linalg.eigvalsh(dense(p))[-1], visited)
gap = np.max(np.abs(largest / exact - 1))
print(f"largest relative error {gap:.0e}, from {matvecs.max()} products at most")
width = np.max((high - low)[:, 0] / largest)
print(f"the widest interval is {width:.0e} of the eigenvalue")

_, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ax.plot(marks + 1, exact, color="0.6", label="exact")
ax.plot(marks + 1, largest, ".", ms=8, label="eigsh")
ax.set(xlabel="step of Adam", ylabel="largest eigenvalue", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# The sharpness rises and falls with the trace, because here the large eigenvalues
# dominate it. [Stop at a tolerance](../docs/adaptive.md) has more on operators that
# change.
