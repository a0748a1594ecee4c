# %% [markdown]
# # Estimate heritability from a file of genotypes
#
# This tutorial estimates traces of products of matrices from data in a file, saves a
# long run, and resumes it.
#
# Which part of the genome explains how much of the variance of a trait? Haseman-Elston
# regression answers with traces of products of relationship matrices
# $K_c = Z_c Z_c^T / m_c$, one for each component of the genome. In a biobank the
# genotypes do not fit in memory, let alone the matrices $K_c$. With random probes the
# traces take a few passes over the file (Wu and Sankararaman, Bioinformatics 34, 2018;
# Pazokitoroudi et al., Nature Communications 11, 2020).

# %%
import os
import resource
import tempfile
from pathlib import Path

import equinox as eqx
import equinox.internal as eqxi
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import traceax as tx


n, m = map(int, os.environ.get("HERITABILITY_SIZE", "2000 10000").split())
truth = np.array([0.3, 0.2, 0.1, 0.0])
num_blocks = 40  # ten for each component

# %% [markdown]
# ## The data
#
# Genotypes of `n` individuals, 0, 1 or 2 at each of `m` variants, are stored in int8,
# variant after variant, as in PLINK files. We simulate them, and a trait of whose
# variance the four components explain 30, 20, 10 and 0 percent.

# %%
folder = Path(tempfile.mkdtemp(dir=os.environ.get("HERITABILITY_FOLDER")))
rng = np.random.default_rng(0)
component = np.repeat(np.arange(4), m // 4)  # of each variant
breeding = np.zeros(n, np.float32)
with open(folder / "genotypes", "wb") as file:
    for variants in np.split(component, m // 250):
        frequency = rng.integers(13, 129, (250, 1), dtype=np.uint8)  # of 256
        alleles = rng.integers(0, 256, (2, 250, n), dtype=np.uint8) < frequency
        counts = alleles.sum(axis=0, dtype=np.int8)
        counts.tofile(file)
        z = counts - counts.mean(axis=1, keepdims=True, dtype=np.float32)
        z /= z.std(axis=1, keepdims=True)
        effects = rng.normal(size=250) * np.sqrt(truth[variants] / (m // 4))
        breeding += effects.astype(np.float32) @ z
trait = breeding + rng.normal(size=n) * np.sqrt(1 - truth.sum())
trait = jnp.asarray(trait - trait.mean(), jnp.float32)
print(f"{(folder / 'genotypes').stat().st_size / 1e6:.0f} MB")

# %% [markdown]
# ## The operators
#
# There is one for each of 40 blocks of variants, because the error bars below leave out
# blocks. `tx.data_gram` reads the file in chunks and standardises variants on the fly,
# after a first pass for their means and standard deviations. The file has variants as
# rows, and the operator takes them as columns: the `.T` moves no data.

# %%
genotypes = np.memmap(folder / "genotypes", np.int8, "r", shape=(m, n)).T
operators = [
    tx.data_gram(genotypes[:, start : start + m // num_blocks], standardise=True)
    for start in range(0, m, m // num_blocks)
]
forms = np.array([trait @ operator.mv(trait) for operator in operators])

# %% [markdown]
# All blocks have the same shape, so one compiled program makes their 40 products with
# the trait, in one pass over the file.
#
# ## Traces of products
#
# `tx.frobenius_products` estimates $\mathrm{tr}(A_a A_b)$ for all pairs of blocks, from
# products of each with the same probes. A round of 16 probes, held at once
# (`block_size`), is one pass over the file. Each call makes two rounds, and then we
# save its state.

# %%
meter = eqxi.TextProgressMeter()


def traces(calls, state=None):
    k = tx.Adaptive(rtol=1e-3, max_k=32 * calls, round_size=16, progress=meter)
    call = {"key": jr.key(1), "execution": tx.Local(block_size=16), "throw": False}
    return tx.frobenius_products(operators, k=k, state=state, **call)


first = traces(1)
eqx.tree_serialise_leaves(folder / "state.eqx", first.state)

# %% [markdown]
# If the process ends here, a new one can resume from the file. `filter_eval_shape`
# gives the shapes of the arrays in the file without computing anything.

# %%
like = eqx.filter_eval_shape(lambda: traces(1).state)
state = eqx.tree_deserialise_leaves(folder / "state.eqx", like)
second = traces(2, state)
for solution in (first, second):
    error = jnp.linalg.norm(solution.std_err) / jnp.linalg.norm(solution.value)
    print(f"{solution.stats['num_matvecs']} probes: relative error {error:.4f}")

# %% [markdown]
# ## The regression
#
# If the trait has covariance $\sum_c \sigma_c^2 K_c + \sigma_e^2 I$, the mean of
# $y^T K_c y$ is $\sum_d \sigma_d^2 \, \mathrm{tr}(K_c K_d) + \sigma_e^2 \, \mathrm{tr}
# K_c$, which gives linear equations for the variances. $K_c$ is the mean of its blocks,
# and $\mathrm{tr} K_c = n$ because variants are standardised. So the equations without
# a block follow from the same numbers, and the jackknife over blocks, which gives the
# error bars, needs no further pass.


# %%
def regress(products, kept):
    """The share of each component in the variance, from some of the blocks."""
    weights = kept * np.kron(np.eye(4), np.ones(num_blocks // 4))
    weights /= weights.sum(axis=1, keepdims=True)
    left = np.full((5, 5), n, float)
    left[:4, :4] = weights @ products @ weights.T
    left[4, 4] = n - 1  # the trait is centred
    variances = np.linalg.solve(left, [*(weights @ forms), trait @ trait])
    return variances[:4] / variances.sum()


def jackknife(products):
    estimate = regress(products, np.ones(num_blocks))
    without = np.array([regress(products, row) for row in 1 - np.eye(num_blocks)])
    spread = (num_blocks - 1) * np.mean((without - without.mean(axis=0)) ** 2, axis=0)
    total = (num_blocks - 1) * np.var(without.sum(axis=1))
    return estimate, np.sqrt(spread), np.sqrt(total)


for solution in (first, second):
    estimate, errors, total_error = jackknife(np.asarray(solution.value, float))
    total = f"total {estimate.sum():.3f} +- {total_error:.3f}"
    each = ", ".join(f"{x:.3f} +- {s:.3f}" for x, s in zip(estimate, errors, strict=True))
    print(f"{solution.stats['num_matvecs']} probes: {total}; {each}")

# %%
figure, axes = plt.subplots(layout="constrained", figsize=(6, 3.6))
positions = np.arange(4)
axes.bar(positions, truth, color="0.85", label="simulated")
axes.errorbar(positions, estimate, 2 * errors, fmt="o", label="estimate, 2 std. errors")
axes.set(xticks=positions, xlabel="component", ylabel="share of the variance")
axes.legend()
plt.show()

# %%
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(f"peak memory of this process: {peak:.0f} MB")
