# %% [markdown]
# # Train a Gaussian process and fill in a photograph
#
# The likelihood of a Gaussian process contains the log-determinant of a kernel matrix.
# This tutorial estimates it with matrix-vector products, reads its two errors, adds a
# preconditioner, and trains the hyperparameters with gradients of the estimates. Exact
# training by Cholesky factorisation shows at the end whether the noise of the estimates
# mattered.
#
# ## The model
#
# A zero-mean Gaussian process with a squared exponential kernel and independent noise
# has, for observations $y$ at the points $x_1, \dots, x_n$, the log marginal likelihood
#
# $$-\tfrac12 \left( y^T A^{-1} y + \log\det A + n \log 2 \pi \right), \qquad
#   A_{ij} = a^2 e^{-|x_i - x_j|^2 / 2 \ell^2} + \sigma^2 \delta_{ij},$$
#
# with the length scale $\ell$, the amplitude $a$ and the noise $\sigma$ to be learned.
#
# The data come from a photograph in scikit-learn
# ([source](https://www.flickr.com/photos/vultilion/6056698931/), [CC BY
# 2.0](https://creativecommons.org/licenses/by/2.0/)), cropped and reduced to 60 by 60
# pixels. Of its 3600 grey levels 1000 are observed, and the process fills in the rest.
# Lengths are in pixels; observations are standardised.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_sample_image

import traceax as tx


jax.config.update("jax_enable_x64", True)

photo = load_sample_image("flower.jpg").mean(axis=2)[:426, :636] / 255
photo = photo.reshape(71, 6, 106, 6).mean(axis=(1, 3))[5:65, 30:90]
positions = np.indices(photo.shape).reshape(2, -1).T
order = np.random.default_rng(0).permutation(photo.size)
observed, hidden = order[:1000], order[1000:]

n = len(observed)
x = jnp.asarray(positions[observed], float)
grey = jnp.asarray(photo.ravel()[observed])
centre, scale = jnp.mean(grey), jnp.std(grey)
y = (grey - centre) / scale


# %%
def squared_distances(x1, x2):
    return jnp.sum((x1[:, None] - x2) ** 2, axis=-1)


squares = squared_distances(x, x)


def covariance(params):
    """A as a lineax operator, and the variance of the noise."""
    length_scale, amplitude, noise = jnp.exp(params)
    kernel = amplitude**2 * jnp.exp(-squares / (2 * length_scale**2))
    matrix = kernel + noise**2 * jnp.eye(n)
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag), noise**2


# %% [markdown]
# The hyperparameters are positive, so we train their logarithms. $A$ is stored here
# only to have an exact answer; the estimates need nothing but its products.
#
# ## One log-determinant, two errors
#
# [`logdet`](../docs/logdet.md) takes the number of probes `k` and the number of Lanczos
# steps per probe. The hyperparameters are near the trained ones.

# %%
params = jnp.log(jnp.array([3.3, 0.8, 0.3]))
operator, variance = covariance(params)
exact = jnp.linalg.slogdet(operator.as_matrix())[1]
slq = tx.SLQEstimator(lower_bound=variance)


def report(solution):
    low, high = solution.stats["bracket"]
    print(f"{solution.value:8.1f} +- {solution.std_err:4.1f}, bracket", end=" ")
    print(f"{low:8.1f} to {high:8.1f}, {solution.stats['num_matvecs']} products")


print(f"{exact:8.1f} exactly")
for num_steps in (5, 20):
    report(tx.logdet(operator, slq, k=10, num_steps=num_steps, key=jr.key(0)))

# %% [markdown]
# The standard error measures sampling with ten probes. It hardly changes with the
# number of steps, and cannot tell that five steps are too few. The bracket can: with
# enough steps the value for these probes would lie inside it. One end of the bracket
# needs a lower bound of the spectrum, here the noise variance.
#
# If the bracket is wider than the error bar, take more steps. With 20 steps it is
# closed, and only more probes would help.
#
# ## A preconditioner
#
# A matrix $P \approx A$ of known determinant leaves less to estimate, since
# $\log\det A = \log\det P + \mathrm{tr}\log(P^{-1/2} A P^{-1/2})$. A randomised Nyström
# approximation of rank 200, plus the noise, costs 200 products:

# %%
preconditioner = tx.nystrom_preconditioner(
    operator, rank=200, key=jr.key(1), shift=variance
)
solution = tx.logdet(
    operator, slq, k=10, num_steps=10, key=jr.key(0), preconditioner=preconditioner
)
report(solution)

# %% [markdown]
# The bracket closes in fewer steps, because the preconditioned matrix is better
# conditioned. The standard error is several times smaller, because that matrix is
# closer to the identity. Probes alone would have to increase by the square of that
# factor.
#
# The next figure shows the root-mean-square error over ten keys, with the root mean
# squares of the reported standard errors and bracket widths.


# %%
@eqx.filter_jit
def repeat(params, num_steps, rank, keys):
    """Errors, standard errors and widths of the bracket, one row for each key."""
    operator, variance = covariance(params)
    slq = tx.SLQEstimator(lower_bound=variance)

    def run(key):
        key1, key2 = jr.split(key)
        preconditioner = None
        if rank > 0:
            preconditioner = tx.nystrom_preconditioner(
                operator, rank, key=key1, shift=variance
            )
        solution = tx.logdet(
            operator,
            slq,
            k=10,
            num_steps=num_steps,
            key=key2,
            preconditioner=preconditioner,
        )
        low, high = solution.stats["bracket"]
        return jnp.array([solution.value - exact, solution.std_err, high - low])

    return jax.lax.map(run, keys)


# %%
settings = {
    "no preconditioner": (0, [3, 6, 12, 24], "C0"),
    "preconditioner": (200, [3, 6, 12], "C1"),
}
measured = {}
figure, axes = plt.subplots(layout="constrained", figsize=(7, 4))
for name, (rank, depths, color) in settings.items():
    runs = [
        repeat(params, num_steps, rank, jr.split(jr.key(2), 10)) for num_steps in depths
    ]
    error, std_err, width = np.sqrt(np.mean(np.square(runs), axis=1)).T
    measured[name] = std_err, width
    products = [rank + 10 * num_steps for num_steps in depths]
    axes.plot(products, error, "o-", color=color, label=f"error, {name}")
    axes.plot(products, std_err, "--", color=color, label="standard error")
    axes.plot(products, width, ":", color=color, label="width of the bracket")
axes.set(xlabel="products", ylabel="error of the log-determinant")
axes.set(yscale="log", ylim=(1, 1000))
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Where the dotted line is above the dashed one, quadrature may be the larger error.
# Beyond their crossing only the sampling error is left, and more steps do not help. The
# next cell prints how much smaller the preconditioner makes that error, and what the
# same gain would cost with probes alone.

# %%
steps, bars = {}, {}
for name, (std_err, width) in measured.items():
    closed, *_ = np.flatnonzero(width < std_err)  # the first depth with less width
    steps[name], bars[name] = settings[name][1][closed], std_err[closed]
gain = bars["no preconditioner"] / bars["preconditioner"]
with_it = 200 + 10 * steps["preconditioner"]
without = 10 * gain**2 * steps["no preconditioner"]
print(f"error bar {gain:.1f} times smaller; probes alone: {gain**2:.0f} times as many,")
print(f"{without:.0f} products instead of {with_it}")

# %% [markdown]
# ## Training
#
# [`gaussian_log_prob`](../docs/logdet.md) estimates the whole likelihood. The gradient
# of the log-determinant reuses the Lanczos runs of its value, and the quadratic term
# takes one solve by conjugate gradients for value and gradient, started from the
# solution of the last update.
#
# Adam maximises the likelihood with new probes in each update: once with ten probes and
# the preconditioner, once with as few probes as a rule allows, and once with exact
# likelihoods for comparison.


# %%
def by_products(k, num_steps, rank=None, solver=None):
    def likelihood(params, key, initial):
        operator, variance = covariance(params)
        key1, key2 = jr.split(key)
        preconditioner = None
        if rank is not None:
            preconditioner = tx.nystrom_preconditioner(
                operator, rank, key=key1, shift=variance
            )
        solution = tx.gaussian_log_prob(
            operator,
            y,
            k=k,
            num_steps=num_steps,
            key=key2,
            preconditioner=preconditioner,
            solver=solver,
            initial=initial,
        )
        return solution.value, (solution.stats["solve"], solution.stats["num_matvecs"])

    return likelihood


def by_cholesky(params, key=None, initial=None):
    factor = jnp.linalg.cholesky(covariance(params)[0].as_matrix())
    half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    log_det = 2 * jnp.sum(jnp.log(jnp.diag(factor)))
    return -(half @ half + log_det + n * jnp.log(2 * jnp.pi)) / 2, (initial, 0)


# %% [markdown]
# ### As few probes as the optimiser needs
#
# The rule needs the variance $s^2$ of a gradient from one probe, so each update takes
# at least two. Adam keeps running means $m$ of the gradients and $v$ of their squares,
# and moves each hyperparameter by $\alpha m / \sqrt v$ with the step size $\alpha$. If
# $m$ is the gradient, the likelihood gains about $\alpha \sum m^2 / \sqrt v$. Averaging
# $k$ probes leaves noise that mimics a gain of $\alpha \sum s^2 / k \sqrt v$. The rule
# picks $k$ for the next update so that this is at most 30% of the gain, or 0.05 if the
# gain is small, since smaller differences of log-likelihoods do not matter.


# %%
schedule = optax.cosine_decay_schedule(0.1, 60)


def enough_probes(moments, noise):
    """The number of probes for the next update, from Adam's moments and the variance of
    one probe, all running means that start at zero."""
    t = moments.count
    rates = schedule(t) / jnp.sqrt(moments.nu / (1 - 0.999**t))
    gain = jnp.sum(rates * (moments.mu / (1 - 0.9**t)) ** 2)
    feigned = jnp.sum(rates * noise / (1 - 0.9**t))
    return jnp.ceil(feigned / jnp.maximum(0.3 * gain, 0.05)).astype(int)


def train(likelihood, most=1):
    """For each update: the hyperparameters before it, its estimate of the likelihood,
    the number of probes averaged (at most `most`) and the number of products."""
    optimiser, least = optax.adam(schedule), min(most, 2)
    slope = jax.value_and_grad(likelihood, has_aux=True)

    def update(carry, key):
        params, state, initial, noise, count = carry

        def add(i, carry):
            sums, solve = carry
            key_i = jr.fold_in(key, i)
            (value, (solve, products)), gradient = slope(params, key_i, solve)
            found = value, gradient, gradient**2, products
            return jax.tree.map(jnp.add, sums, found), solve

        zeros = jnp.zeros(()), jnp.zeros(3), jnp.zeros(3), 0
        sums, solve = jax.lax.fori_loop(0, count, add, (zeros, initial))
        value, gradient, squares, products = sums
        value, gradient = value / count, gradient / count
        variance = (squares - count * gradient**2) / jnp.maximum(count - 1, 1)
        noise = 0.9 * noise + 0.1 * variance
        updates, state = optimiser.update(-gradient, state)
        after = optax.apply_updates(params, updates), state, solve, noise
        following = jnp.clip(enough_probes(state[0], noise), least, most)
        return (*after, following), (params, value, count, products)

    params = jnp.log(jnp.array([2.0, 1.0, 1.0]))
    start = params, optimiser.init(params), jnp.zeros(n), jnp.zeros(3), least
    keys = jr.split(jr.key(3), 60)
    return jax.jit(lambda: jax.lax.scan(update, start, keys)[1])()


rough = lx.CG(rtol=1e-2, atol=1e-2, stabilise_every=None)
one_probe = by_products(k=1, num_steps=25, solver=rough)
path, seen, _, products = train(by_products(k=10, num_steps=20, rank=200))
few_path, few_seen, few, few_products = train(one_probe, most=16)
exact_path, exact_seen, *_ = train(by_cholesky)
exactly = jax.jit(lambda path: jax.lax.map(lambda params: by_cholesky(params)[0], path))
along_path, few_along_path = exactly(path), exactly(few_path)

# %%
names = "length scale", "amplitude", "noise", "likelihood", "products"
print(" " * 14 + "".join(f"{name:>13}" for name in names))
for name, params, value, count in [
    ("10 probes", path[-1], along_path[-1], jnp.sum(products)),
    ("by the rule", few_path[-1], few_along_path[-1], jnp.sum(few_products)),
    ("Cholesky", exact_path[-1], exact_seen[-1], "-"),
]:
    numbers = "".join(f"{number:13.4f}" for number in (*jnp.exp(params), value))
    print(f"{name:<14}{numbers}{count!s:>13}")
print(f"products by the rule: {jnp.sum(few_products) / jnp.sum(products):.0%}")
print(f"probes by the rule: {jnp.min(few)} to {jnp.max(few)}, mean {jnp.mean(few):.1f}")
for name, found, truth in [
    ("10 probes", seen, along_path),
    ("by the rule", few_seen, few_along_path),
]:
    error = jnp.sqrt(jnp.mean((found - truth) ** 2))
    print(f"error of the estimated likelihoods, {name}: {error:.1f} (rms)")

# %%
figure, (left, middle, right) = plt.subplots(1, 3, layout="constrained", figsize=(13, 4))
left.plot(few_seen, ".", color="C2", ms=3, label="estimates, by the rule")
left.plot(seen, ".", color="C1", label="estimates, 10 probes")
left.plot(few_along_path, color="C2", label="exact, at the same hyperparameters")
left.plot(along_path, color="C1", label="exact, at the same hyperparameters")
left.plot(exact_seen, "k--", label="exact training")
left.set(xlabel="update", ylabel="log marginal likelihood", ylim=(-1050, -400))
left.legend()
for i, name in enumerate(["length scale", "amplitude", "noise"]):
    middle.plot(jnp.exp(path[:, i]), label=f"{name}, 10 probes")
    middle.plot(jnp.exp(few_path[:, i]), f"C{i}:", lw=2)
    middle.plot(jnp.exp(exact_path[:, i]), "k--")
middle.plot([], [], "k:", lw=2, label="by the rule")
middle.plot([], [], "k--", label="exact training")
middle.set(xlabel="update", ylabel="hyperparameter (length scale: pixels)", ylim=(0, 7))
middle.legend(loc="upper right")
right.plot(products, color="C1", label="10 probes, preconditioned")
right.plot(few_products, color="C2", label="by the rule")
right.set(xlabel="update", ylabel="products", ylim=(0, 500))
right.legend()
plt.show()

# %% [markdown]
# The ten-probe training ends near the exact hyperparameters and likelihood, though each
# likelihood that it estimates has the error printed above. Errors of the gradients are
# independent from update to update, and the optimiser averages over them.
#
# The rule saves more. Training takes the printed fraction of the products and ends at
# nearly the same likelihood, with errors several times larger. Two probes are enough
# for most updates; the rule takes more where gains become small.
#
# Two other savings matter more. A solve that starts from the last one and stops at an
# error well below the noise takes few steps. And no preconditioner is made: at the
# final hyperparameters it makes values accurate, but [hardly
# gradients](../docs/how_to/gaussian_processes.md). The next cell shows the spread of
# one-probe gradients in the logarithm of the length scale for several ranks:


# %%
@eqx.filter_jit
def spread(likelihood, params, keys):
    """The standard deviation of the gradient over the keys."""
    slope = jax.grad(likelihood, has_aux=True)
    gradients = jax.lax.map(lambda key: slope(params, key, jnp.zeros(n))[0], keys)
    return jnp.std(gradients, axis=0, ddof=1)


for rank in (None, 50, 100, 200):
    likelihood = by_products(k=1, num_steps=25, rank=rank, solver=rough)
    length_scale, *_ = spread(likelihood, path[-1], jr.split(jr.key(5), 40))
    print(f"rank {rank or 0:3d}: standard deviation {length_scale:.0f}")

# %% [markdown]
# Without a preconditioner the gradient also needs fewer products with the derivatives
# of $A$, which the table does not count: four per probe, where a preconditioner adds
# its rank. A preconditioner pays where it saves many steps, with smaller noise or more
# points.
#
# If you need one accurate likelihood, for example to compare models, spend the products
# at the end.
#
# ## The fit
#
# The mean of the process at all pixels takes one linear solve with $A$. The variance
# takes one solve per pixel, here for 300 hidden ones.

# %%
operator, variance = covariance(path[-1])
length_scale, amplitude, _ = jnp.exp(path[-1])
preconditioner = tx.nystrom_preconditioner(operator, 200, key=jr.key(4), shift=variance)


@jax.vmap
def solve(right_hand_side):
    options = {"preconditioner": preconditioner.inverse()}
    cg = lx.CG(rtol=1e-6, atol=1e-6)
    return lx.linear_solve(operator, right_hand_side, cg, options=options).value


pixels = jnp.asarray(positions, float)
cross = amplitude**2 * jnp.exp(-squared_distances(pixels, x) / (2 * length_scale**2))
mean = centre + scale * cross @ solve(y[None])[0]
some = hidden[:300]
explained = jnp.sum(cross[some] * solve(cross[some]), axis=1)
deviation = scale * jnp.sqrt(amplitude**2 + variance - explained)
error = mean[some] - photo.ravel()[some]
print(f"standard deviation of the grey levels: {scale:.3f}")
print(f"rms error at hidden pixels: {jnp.sqrt(jnp.mean(error**2)):.3f}")
print(
    f"inside their 95% interval: {100 * jnp.mean(jnp.abs(error) < 1.96 * deviation):.0f}%"
)

# %% tags=["photograph"]
figure, axes = plt.subplots(1, 4, layout="constrained", figsize=(12, 3))
seen_pixels = np.full(photo.size, np.nan)
seen_pixels[observed] = grey
for each, title, image in [
    (axes[0], "photograph", photo),
    (axes[1], "observed pixels (not blue)", seen_pixels.reshape(photo.shape)),
    (axes[2], "mean of the process", mean.reshape(photo.shape)),
]:
    each.imshow(image, cmap="gray", vmin=0, vmax=1)
    each.set(title=title, xticks=[], yticks=[], facecolor="lightblue")
truth = photo.ravel()[some]
axes[3].errorbar(truth, mean[some], 1.96 * deviation, fmt=".", alpha=0.3)
axes[3].plot([0, 1], [0, 1], "k--")
axes[3].set(xlabel="grey level (0 to 1)", ylabel="prediction, 95% interval")
plt.show()

# %% [markdown]
# The intervals cover fewer pixels than 95%, because a photograph with edges is not a
# sample of a stationary Gaussian process.
#
# ## When to do this
#
# For a dense matrix of this size, use a Cholesky factorisation. Estimates are for
# matrices that do not fit in memory, for products that are faster than dense ones, and
# for larger $n$: [Log-determinants](../docs/logdet.md) has measured times, and covers
# brackets, gradients and their residuals.
