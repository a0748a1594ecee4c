# %% [markdown]
# # Fill gaps in a satellite image of a million cells
#
# This tutorial computes the log-likelihood and the marginal variances of a Gaussian
# Markov random field with a million cells, using coloured probes.
#
# An image of a smooth field $u$ has clouds. The prior is a Gaussian Markov random field
# with the sparse precision $Q = \tau (\kappa^2 - \Delta)$ on a grid, the discrete form
# of the stochastic differential equation of Lindgren, Rue and Lindström (2011). A
# visible cell adds $1 / \sigma^2$ to the diagonal of the posterior precision. The
# variance of each cell is a diagonal entry of the inverse, and the likelihood of
# $\kappa$, $\tau$ and $\sigma$ needs two log-determinants.

# %%
import functools
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.sparse.linalg import cg
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import splu

import traceax as tx


# In float32 the rounding of a sum of a million terms would be more than the bars below.
jax.config.update("jax_enable_x64", True)
side, kappa, tau, sigma = 1000, 0.35, 4.0, 0.3

# %% [markdown]
# ## The field
#
# Products are stencils. The prior lives on a torus, where a Fourier transform draws
# samples; nothing else below needs that.


# %%
def laplacian(u):
    shifts = (-1, 0), (1, 0), (0, -1), (0, 1)
    return 4 * u - sum(jnp.roll(u, shift, (0, 1)) for shift in shifts)


def precision(seen):
    """The precision of the field, given the cells that are seen; seen = 0: the prior."""

    def mv(u):
        return tau * (kappa**2 * u + laplacian(u)) + seen / sigma**2 * u

    structure = jax.ShapeDtypeStruct(seen.shape, seen.dtype)
    return lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)


def draw_field(key, side):
    waves = 2 - 2 * jnp.cos(2 * jnp.pi * jnp.fft.fftfreq(side))
    root = jnp.sqrt(tau * (kappa**2 + waves[:, None] + waves))
    return jnp.fft.ifft2(jnp.fft.fft2(jr.normal(key, (side, side))) / root).real


def draw_clouds(key, side, count):
    x, y = jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij")
    clear = jnp.ones((side, side))
    for centre in side * jr.uniform(key, (count, 2)):
        distance = jnp.hypot(x - centre[0], y - centre[1])
        clear = jnp.where(distance < 0.05 * side, 0.0, clear)
    return clear


key1, key2, key3 = jr.split(jr.key(0), 3)
field, clear = draw_field(key1, side), draw_clouds(key2, side, 30)
image = clear * (field + sigma * jr.normal(key3, field.shape))
prior, posterior = precision(jnp.zeros_like(clear)), precision(clear)

# %% [markdown]
# ## Colours
#
# Entries of $Q^{-1}$ and of $\log Q$ decay with the distance between cells. So a probe
# whose nonzero entries are far apart sees almost only the diagonal. `grid_colours`
# spreads each colour over the grid, and a sweep is one probe per colour. With 16
# colours the nearest cells of one colour are 4 apart, with 64 they are 8 apart.

# %%
few, many = (tx.grid_colours((side, side), p, periodic=True) for p in (16, 64))
figure, axes = plt.subplots(1, 2, figsize=(8, 4))
for axis, colours in zip(axes, (few, many), strict=True):
    axis.imshow(colours[:24, :24] == 0, cmap="Greys")
    axis.set_title(f"One of {colours.max() + 1} colours")
    axis.set_axis_off()

# %% [markdown]
# ## The likelihood
#
# $2 \log p(y) = \log |Q| - \log |Q + S / \sigma^2| - m \log(2 \pi \sigma^2) - |y|^2 /
# \sigma^2 + b^* \mu$, with $m$ visible cells, $b = y / \sigma^2$ and the posterior mean
# $\mu$, which takes one solve. We compare two sweeps of 16 colours with as many random
# signs.


# %%
def log_determinant(operator, sampler):
    # Without reorthogonalisation a run keeps three vectors; blocks of one probe.
    estimator = tx.SLQEstimator(sampler, tx.Lanczos(window=0))
    settings = {"k": 32, "num_steps": 20, "key": jr.key(1)}
    return tx.logdet(operator, estimator, execution=tx.Local(1), **settings)


start = time.perf_counter()
coloured = [log_determinant(q, tx.ColouredSampler(few)) for q in (prior, posterior)]
print(f"{time.perf_counter() - start:.0f} s")
signs = log_determinant(prior, tx.RademacherSampler())
waves = 2 - 2 * np.cos(2 * np.pi * np.arange(side) / side)
exact = np.log(tau * (kappa**2 + waves[:, None] + waves)).sum()
for name, solution in (("colours", coloured[0]), ("signs", signs)):
    print(f"{name:8} {solution.value:.1f} +- {solution.std_err:.1f}")
print(f"{'exact':8} {exact:.1f}")


# %%
@jax.jit
def solve(seen, b):
    return cg(precision(seen).mv, b, tol=1e-4)[0]


mean = solve(clear, image / sigma**2)
quadratic = jnp.sum(image**2) / sigma**2 - jnp.sum(image / sigma**2 * mean)
seen = jnp.sum(clear)
log_dets = coloured[0].value - coloured[1].value
log_likelihood = (log_dets - seen * jnp.log(2 * jnp.pi * sigma**2) - quadratic) / 2
bar = jnp.hypot(coloured[0].std_err, coloured[1].std_err) / 2
print(f"log-likelihood {log_likelihood:.1f} +- {bar:.1f}")

# %% [markdown]
# ## Marginal variances
#
# The inverse is an operator whose products are solves by conjugate gradients. Two
# sweeps of 64 colours estimate its diagonal, with an error bar for each cell.


# %%
def covariance(seen):
    structure = jax.ShapeDtypeStruct(seen.shape, seen.dtype)
    product = functools.partial(solve, seen)
    return lx.FunctionLinearOperator(product, structure, lx.symmetric_tag)


start = time.perf_counter()
estimator = tx.HutchinsonEstimator(tx.ColouredSampler(many))
variances = tx.diagonal(
    covariance(clear), estimator, k=128, key=jr.key(2), execution=tx.Local(1)
)
print(f"{time.perf_counter() - start:.0f} s")
print(variances)

# %%
deviations = jnp.sqrt(variances.value)
figure, axes = plt.subplots(1, 3, figsize=(12, 4))
window = slice(300, 600), slice(300, 600)
panels = {
    "Image with clouds": jnp.where(clear > 0, image, jnp.nan),
    "Posterior mean": mean,
    "Posterior standard deviation": deviations,
}
for axis, (title, panel) in zip(axes, panels.items(), strict=True):
    drawn = axis.imshow(np.asarray(panel[window]))
    figure.colorbar(drawn, ax=axis, shrink=0.8)
    axis.set_title(title)
    axis.set_axis_off()

# %% [markdown]
# ## Against the exact inverse
#
# On a grid of 64 by 64 cells SciPy can factorise the precision. If a sparse matrix can
# be factorised, do it: for chains and planar grids of this size `splu` is exact and
# faster. But the factors of a planar grid fill in as $n \log n$, those of a
# three-dimensional grid as $n^{4/3}$, and soon they do not fit in memory. Products
# always do.

# %%
small = 64
clear = draw_clouds(key2, small, 5)
operator = precision(clear)
basis = jnp.eye(small**2).reshape(-1, small, small)
matrix = np.asarray(jax.vmap(operator.mv)(basis), float).reshape(small**2, -1)
exact = np.diag(splu(csc_matrix(matrix)).solve(np.eye(small**2)))
colours = tx.grid_colours((small, small), 64, periodic=True)
for sampler in (tx.ColouredSampler(colours), tx.RademacherSampler()):
    estimate = tx.diagonal(
        covariance(clear), tx.HutchinsonEstimator(sampler), k=128, key=jr.key(3)
    )
    error = np.asarray(estimate.value).ravel() / exact - 1
    print(f"{type(sampler).__name__:18} relative error {np.sqrt(np.mean(error**2)):.1e}")
