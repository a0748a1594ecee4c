# %% [markdown]
# # Stop at a tolerance, and check that it is kept
#
# With `k=tx.Adaptive(rtol=...)` a run adds products until the error bar is small
# enough. This tutorial looks at one run, measures over many keys how often the true
# error is within the tolerance and how many products the best fixed budget would take,
# resumes a run that ended too soon, shows how the cost grows as the tolerance shrinks,
# and ends with a log-determinant.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import t as student
from sklearn.datasets import load_digits

import traceax as tx


jax.config.update("jax_enable_x64", True)

# %% [markdown]
# ## An operator with a known trace
#
# The covariance of a stationary process on a ring of $n$ points is circulant, and a
# Fourier transform makes it diagonal. So a product costs two FFTs, and the trace is the
# sum of the spectrum, which gives the exact errors below. Frequency $f$ has the
# eigenvalue $(1 + |f|)^{-p}$: larger $p$ means a smoother process, with more of the
# trace in few directions.

# %%
n = 1000
frequency = jnp.abs(jnp.fft.fftfreq(n, 1 / n))
ROUGH, SMOOTH = 0.5, 2.0


def covariance(p):
    spectrum = (1 + frequency[: n // 2 + 1]) ** -p
    return lx.FunctionLinearOperator(
        lambda v: jnp.fft.irfft(spectrum * jnp.fft.rfft(v), n),
        jax.ShapeDtypeStruct((n,), float),
        lx.positive_semidefinite_tag,
    )


def exact_trace(p):
    return jnp.sum((1 + frequency) ** -p)


# %% [markdown]
# ## One run
#
# This run asks for an error below 0.2% with a confidence of 95%. It spends products in
# rounds of 16, and stops after the first tested round with
#
# $$
# q\,\mathrm{std\_err} \le \mathrm{rtol}\,|\mathrm{value}|,
# $$
#
# where $q$ is the quantile of Student's t. `max_k` bounds the budget and sets the size
# of the buffers. XTrace and XNysTrace leave out more and more tests after 8 rounds.
# `history=True` records every round, also those without a test.

# %%
budget = tx.Adaptive(rtol=2e-3, max_k=160, history=True)
key = jax.random.key(0)
xtrace = tx.XTraceEstimator()
solution = tx.trace(covariance(SMOOTH), xtrace, k=budget, key=key)
exact = exact_trace(SMOOTH)
print(f"{solution.value:.5f} +- {solution.std_err:.5f}, exact {exact:.5f}")
print(f"after {solution.stats['num_matvecs']} of at most {budget.max_k} products")
print(f"relative error {abs(solution.value / exact - 1):.1e}, requested 2e-03")

# %% [markdown]
# On the left is the value after each round, on the right the same run on a logarithmic
# scale. The standard error is *estimated* from the samples so far, and the true error
# is one draw from the distribution that it describes, so the two need not fall
# together. The run ends when the half-width of the interval falls below the tolerance.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
tx.plot.convergence(solution, exact=exact, ax=left, label="XTrace")
spent, value, std_err = solution.stats["history"].T
half_width = student.ppf(0.975, spent / 2 - 1) * std_err
right.semilogy(spent, half_width / exact, "o-", label="half-width of the 95% interval")
right.semilogy(spent, abs(value / exact - 1), "s-", label="true error")
right.axhline(2e-3, color="k", lw=1, ls="--", label="tolerance")
right.set(xlabel="budget spent, $k$", ylabel="relative to the trace")
right.legend()
plt.show()

# %% [markdown]
# ## Is the tolerance kept?
#
# A rule that checks again and again stops slightly more often where the error bar
# happens to be too small. No theorem says that the confidence survives this, so we
# measure it over many keys, for four pairs of estimator and operator.
#
# The rounds of a run depend neither on the tolerance nor on the confidence, which only
# decide when to stop. So one run with a tolerance that is never met contains the rounds
# of all the others. `rtol` may be traced, so one compiled function serves both.

# %%
KEYS = jax.random.split(jax.random.key(1), 400)


def many_runs(estimator, max_k):
    """Returns a function of p, the tolerance and the keys that gives histories."""

    @jax.jit
    def run(p, rtol, keys):
        budget = tx.Adaptive(rtol=rtol, max_k=max_k, history=True)

        def one(key):
            settings = {"k": budget, "key": key, "throw": False}
            return tx.trace(covariance(p), estimator, **settings).stats["history"]

        return jax.lax.map(one, keys)

    return run


hutchinson = many_runs(tx.HutchinsonEstimator(), 512)
sketches = {
    "XTrace": many_runs(xtrace, 144),
    "XNysTrace": many_runs(tx.XNysTraceEstimator(), 112),
}
# Name: p, tolerance, samples for each product, and 400 or 120 histories.
cases = {
    "Hutchinson, rough": (ROUGH, 1e-2, 1, hutchinson(ROUGH, 1e-15, KEYS)),
    "Hutchinson, smooth": (SMOOTH, 2e-1, 1, hutchinson(SMOOTH, 1e-15, KEYS)),
    "XTrace, smooth": (SMOOTH, 3e-3, 0.5, sketches["XTrace"](SMOOTH, 1e-15, KEYS[:120])),
    "XNysTrace, smooth": (
        SMOOTH,
        3e-3,
        1,
        sketches["XNysTrace"](SMOOTH, 1e-15, KEYS[:120]),
    ),
}

# %% [markdown]
# Here is the same rule in NumPy: the first round with at least 10 samples
# (`min_samples`) whose interval is within the tolerance. We check on real runs that the
# compiled loop stops there too. Real runs of XTrace and XNysTrace, which have fewer
# tests, stop there or, now and then, a round or two later.


# %%
def stop(case, confidence):
    """For each key, the products and the relative error when a run would stop."""
    p, rtol, samples_per_product, history = case
    spent, value, std_err = np.moveaxis(np.asarray(history), -1, 0)
    samples = spent * samples_per_product
    half_width = student.ppf((1 + confidence) / 2, samples - 1) * std_err
    met = (half_width <= rtol * abs(value)) & (samples >= 10)
    assert met.any(axis=1).all(), "a run ended before its tolerance"
    rows, last = np.arange(len(met)), met.argmax(axis=1)
    return spent[rows, last], value[rows, last] / exact_trace(p) - 1


real = hutchinson(ROUGH, 1e-2, KEYS)
products, _ = stop(cases["Hutchinson, rough"], 0.95)
made = np.isfinite(real[..., 0])
same = np.mean(np.max(real[..., 0], axis=1, where=made, initial=0) == products)
print(f"{same:.1%} of the real runs stop after the same number of products")

# %% [markdown]
# The table has three numbers for each case. *Within* is the fraction of runs whose true
# error is below the tolerance. *Best fixed* is the smallest budget, in whole rounds,
# that keeps 95% of the keys below the tolerance; nobody knows it without the exact
# trace. *Bias* is the mean error over its standard deviation.

# %%
print("                     rtol  within  products  best fixed   bias")
for name, case in cases.items():
    p, rtol, _, history = case
    products, error = stop(case, 0.95)
    below = np.mean(abs(history[..., 1] / exact_trace(p) - 1) <= rtol, axis=0) >= 0.95
    best = 16 * (below.argmax() + 1)
    within, bias = np.mean(abs(error) <= rtol), error.mean() / error.std()
    print(f"{name:18s} {rtol:6g} {within:7.3f} {products.mean():9.0f}", end="")
    print(f" {best:11d} {bias:+6.2f}")

# %% [markdown]
# The runs keep the tolerance, and cost up to about a third more than the best fixed
# budget. The fractions have an error of about one percentage point for 400 keys, and
# two for 120.
#
# Hutchinson's estimates are biased by about a tenth of the spread of a run. Samples
# that are close together end a run early, and where the distribution is skewed those
# are the small ones. This shows over hundreds of keys, not in one run. For the other
# two estimators 120 keys are too few to tell a bias from zero. To average over many
# keys, use a fixed `k`.
#
# Here are the errors at the end:

# %%
figure, axes = plt.subplots(
    1, 4, figsize=(10, 3), sharex=True, sharey=True, layout="constrained"
)
for ax, (name, case) in zip(axes, cases.items(), strict=True):
    _, error = stop(case, 0.95)
    ax.hist(error / case[1], bins=np.linspace(-2, 2, 33), density=True, color="0.6")
    for side in (-1, 1):
        ax.axvline(
            side, color="C3", lw=1, ls="--", label="tolerance" if side > 0 else None
        )
    ax.set(title=name, xlabel="true error / tolerance")
axes[0].set_ylabel("density over keys")
axes[0].legend(loc="upper right", fontsize="small")
plt.show()

# %% [markdown]
# ## Other confidences
#
# The default is 95%; set `confidence` for another. Below the diagonal a rule is
# overconfident, above it is cautious. For comparison we add a naive rule: look at
# Hutchinson's samples one at a time from the fourth on, and stop as soon as
# $1.96\, s / \sqrt{m}$, or the corresponding number for another confidence, is within
# the tolerance. It uses the same probes, because probe $i$ depends only on the key and
# on $i$.

# %%
confidences = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])


@jax.jit
def samples_of(key):
    operator, k = covariance(SMOOTH), 512
    return tx.trace(operator, tx.HutchinsonEstimator(), k=k, key=key).stats["samples"]


samples = np.asarray(jax.lax.map(samples_of, KEYS))
count = np.arange(1, samples.shape[1] + 1)
mean = np.cumsum(samples, axis=1) / count
square = np.cumsum(samples**2, axis=1) / count
naive_err = np.sqrt(np.maximum(square - mean**2, 0) / np.maximum(count - 1, 1))


def naive(confidence, rtol=2e-1):
    normal = student.ppf((1 + confidence) / 2, np.inf)
    met = (normal * naive_err <= rtol * mean) & (count >= 4)
    error = mean[np.arange(len(mean)), met.argmax(axis=1)] / exact_trace(SMOOTH) - 1
    return np.mean(abs(error) <= rtol)


figure, ax = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
for name, case in cases.items():
    within = [np.mean(abs(stop(case, c)[1]) <= case[1]) for c in confidences]
    ax.plot(confidences, within, "o-", label=name)
ax.plot(confidences, [naive(c) for c in confidences], "kx:", label="naive rule, smooth")
ax.plot(confidences, confidences, "k--", lw=1, label="requested")
ax.set(xlabel="requested confidence", ylabel="fraction of runs within the tolerance")
ax.legend()
plt.show()
print(f"requested 95%: the naive rule reaches {naive(0.95):.1%}")

# %% [markdown]
# The rules differ in three ways: the quantile of Student's t, the correction for few
# and skewed samples in the [error bar](../docs/error_bars.md), and checks after rounds
# rather than after each sample. At low confidences the surplus has another reason: the
# least that a run spends, 16 products or 10 samples, is more than it needs.

# %% [markdown]
# ## A run that ended too soon
#
# A budget may be too small. With `throw=True`, the default, that raises an error. With
# `throw=False` the estimate is returned with its usual error bar, and `result` says
# what happened. `state` keeps what has been spent: the next call resumes from it, with
# the same operator, estimator and key.

# %%
small = tx.Adaptive(rtol=2e-3, max_k=64)
first = tx.trace(covariance(SMOOTH), xtrace, k=small, key=key, throw=False)
print(tx.RESULTS[first.result].splitlines()[0])
print(f"{first.value:.5f} +- {first.std_err:.5f}, {first.stats['num_matvecs']} products")

larger = tx.Adaptive(rtol=2e-3, max_k=160)
second = tx.trace(covariance(SMOOTH), xtrace, k=larger, key=key, state=first.state)
total = second.stats["num_matvecs"]
print(f"{second.value:.5f} +- {second.std_err:.5f}, {total} products in total")
print(f"one run without a break differs by {abs(second.value - solution.value):.0e}")

# %% [markdown]
# The state is a PyTree of arrays. Write it to a file with
# `equinox.tree_serialise_leaves`, and it outlives the process.

# %%
arrays = [x for x in jax.tree.leaves(first.state) if eqx.is_array(x)]
print(f"{len(arrays)} arrays, {sum(x.nbytes for x in arrays) / 1e6:.1f} MB")

# %% [markdown]
# ## What a smaller tolerance costs
#
# The tolerance may be traced, so `jax.vmap` over tolerances gives the price list of an
# operator in one call. Independent samples (Hutchinson) have an error of $k^{-1/2}$, so
# $k \propto \mathrm{rtol}^{-2}$: one more digit costs a hundred times the products.
#
# XTrace and XNysTrace remove a subspace that grows with $k$. On eigenvalues $i^{-p}$
# the rest has Frobenius norm about $k^{1/2 - p}$, and averaging over about $k$ samples
# gains another $k^{-1/2}$. So the error is about $k^{-p}$, and
# $k \propto \mathrm{rtol}^{-1/p}$, here $\mathrm{rtol}^{-1/2}$: one more digit costs
# about three times the products.


# %%
@eqx.filter_jit
def price_list(estimator, tolerances, keys, max_k):
    """The mean number of products for each tolerance."""

    def one(rtol, key):
        budget = tx.Adaptive(rtol=rtol, max_k=max_k)
        operator = covariance(SMOOTH)
        solution = tx.trace(operator, estimator, k=budget, key=key, throw=False)
        reached = solution.result == tx.RESULTS.successful
        return jnp.where(reached, solution.stats["num_matvecs"], jnp.nan)

    over_keys = jax.vmap(one, in_axes=(None, 0))
    return jnp.mean(jax.vmap(over_keys, in_axes=(0, None))(tolerances, keys), axis=1)


prices = {}
for name, estimator, low, high, num_keys, max_k in (
    ("Hutchinson", tx.HutchinsonEstimator(), 0.05, 0.15, 16, 992),
    ("XTrace", xtrace, 2e-3, 2e-2, 4, 176),
    ("XNysTrace", tx.XNysTraceEstimator(), 2e-3, 2e-2, 4, 144),
):
    tolerances = jnp.geomspace(low, high, 5)
    products = price_list(estimator, tolerances, KEYS[:num_keys], max_k)
    prices[name] = tolerances, products
    slope, _ = np.polyfit(*(np.log(x) for x in prices[name]), 1)
    pairs = zip(*prices[name], strict=True)
    listed = ", ".join(f"{price:.0f} at {rtol:.1%}" for rtol, price in pairs)
    print(f"{name:10s} products ~ rtol^{slope:.2f}: {listed}")

# %%
figure, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
for name, (tolerances, products) in prices.items():
    ax.loglog(tolerances, products, "o-", label=name)
guide = jnp.array([0.05, 0.15])
ax.loglog(guide, 900 * (guide / 0.05) ** -2.0, "k--", lw=1, label="slope -2")
guide = jnp.array([2e-3, 2e-2])
ax.loglog(guide, 80 * (guide / 2e-3) ** -0.5, "k:", lw=1, label="slope -1/2")
ax.set(xlabel="relative tolerance", ylabel="products until the run ends")
ax.set_yticks([30, 100, 300, 1000], ["30", "100", "300", "1000"])
ax.set_yticks([], minor=True)
ax.legend()
plt.show()

# %% [markdown]
# Measured slopes differ somewhat from the theory, since [error
# bars](../docs/error_bars.md) of few samples are wider, and budgets come in rounds of
# 16.
#
# Under `vmap` all lanes of a batch wait for the slowest, so each takes as long as the
# longest run. `jax.lax.map`, as above, does not wait.

# %% [markdown]
# ## A log-determinant
#
# The same budget works for `tx.logdet`, where it counts probes; each costs `num_steps`
# products. But a log-determinant has [two errors](../docs/logdet.md), and the tolerance
# covers only the sampling error. With too few Lanczos steps the estimate converges to a
# wrong number. So look at `stats["bracket"]`: with enough steps the value would lie
# inside it. It is tight where the smallest eigenvalue is known, here bounded below by
# the noise variance, 0.01.
#
# We take a kernel matrix of 600 handwritten digits with 5 steps, with 40, and with 10
# and a preconditioner, whose 100 products are counted:

# %%
images = load_digits().data[:600] / 16
square = jnp.sum((images[:, None] - images) ** 2, axis=-1)
kernel = jnp.exp(-square / 20) + 1e-2 * jnp.eye(len(images))
operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
exact = jnp.linalg.slogdet(kernel)[1]
key1, key2 = jax.random.split(jax.random.key(2))
preconditioner = tx.nystrom_preconditioner(operator, rank=100, key=key1, shift=1e-2)
slq = tx.SLQEstimator(lower_bound=1e-2)
budget = tx.Adaptive(rtol=1e-2, max_k=256)

print(f"exact {exact:.1f}, tolerance {abs(exact) * 1e-2:.1f}")
print("steps  probes  products    value +- std_err   error       bracket")
for num_steps, outer in ((5, None), (40, None), (10, preconditioner)):
    settings = {"num_steps": num_steps, "preconditioner": outer, "key": key2}
    solution = tx.logdet(operator, slq, k=budget, **settings)
    products, (low, high) = solution.stats["num_matvecs"], solution.stats["bracket"]
    probes = (products - (0 if outer is None else outer.num_matvecs)) // num_steps
    print(f"{num_steps:5d} {probes:7d} {products:9d} {solution.value:8.1f} +- ", end="")
    print(f"{solution.std_err:<7.1f} {solution.value - exact:+7.1f}", end="")
    print(f"   {low:.0f} to {high:.0f}")

# %% [markdown]
# All three runs report success. With 5 steps the value is off by many times the
# tolerance, and the bracket, far wider than the error bar, shows it: raise `num_steps`,
# not `max_k`. In the other two rows the bracket is narrower than the tolerance, and
# sampling makes the error. The preconditioner needs fewer steps and leaves less to
# sample, so that run ends after one round.
#
# ## What to remember
#
# - The tolerance applies to the error bar when the run stops. Here and in [larger
#   measurements](../docs/adaptive.md) at least the requested fraction of runs keeps it,
#   within a percentage point. That is an observation, not a theorem.
# - Products come in rounds, and there is a minimum. Where 16 products are enough, a
#   fixed `k` is as good.
# - Choose the estimator first: in the price list above, XTrace at 0.4% is cheaper than
#   Hutchinson at 8.7%.
# - `max_k` costs memory, and for XTrace and XNysTrace time, even if it is not reached:
#   the small matrices of every test have the size of the budget.
# - For a log-determinant, look at the bracket.
