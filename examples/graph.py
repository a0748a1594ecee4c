# %% [markdown]
# # Count triangles and estimate the Estrada index of a graph
#
# Two numbers that describe a network are traces of functions of its adjacency matrix
# $A$: the number of triangles, $\mathrm{tr}(A^3) / 6$, and the Estrada index,
# $\mathrm{tr}\, e^A$. This tutorial estimates both from products with a sparse matrix,
# shows which estimator suits which graph, and gets the contribution of every edge to
# the index from one gradient.

# %%
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from jax.experimental import sparse
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

import traceax as tx


jax.config.update("jax_enable_x64", True)

# %% [markdown]
# ## Three graphs
#
# - `novel`: which characters of *Les Misérables* appear together, from networkx. It has
#   77 nodes, so everything can be checked.
# - `digits`: the 1,797 handwritten digits of scikit-learn. Two are joined if one is
#   among the ten nearest neighbours of the other.
# - `hubs`: 20,000 nodes grown by preferential attachment with triangles (Holme and
#   Kim), a model of social networks. A few nodes have hundreds of neighbours.

# %%
neighbours = kneighbors_graph(load_digits().data, 10)
graphs = {
    "novel": nx.les_miserables_graph(),
    "digits": nx.from_scipy_sparse_array(neighbours.maximum(neighbours.T)),
    "hubs": nx.powerlaw_cluster_graph(20_000, 5, 0.3, seed=0),
}
triangles = {
    name: sum(nx.triangles(graph).values()) // 3 for name, graph in graphs.items()
}
print("graph    nodes   edges  largest degree  triangles")
for name, graph in graphs.items():
    degree = max(degree for _, degree in graph.degree)
    print(f"{name:7} {len(graph):6} {graph.number_of_edges():7}", end="")
    print(f" {degree:15} {triangles[name]:10}")

# %% [markdown]
# Only products with the sparse adjacency matrix are needed. The operator takes the
# weights of the edges, all one for now, so that we can differentiate with respect to
# them later. The tag says that it is symmetric, which estimators for functions of the
# eigenvalues require.


# %%
def adjacency(weights, edges, n):
    both = jnp.concatenate([edges, edges[:, ::-1]])
    matrix = sparse.BCOO((jnp.concatenate([weights, weights]), both), shape=(n, n))
    vector = jax.ShapeDtypeStruct((n,), weights.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, vector, lx.symmetric_tag)


def edges_of(graph):
    return jnp.asarray(nx.convert_node_labels_to_integers(graph).edges)


def operator_of(graph):
    edges = edges_of(graph)
    return adjacency(jnp.ones(len(edges)), edges, len(graph))


operators = {name: operator_of(graph) for name, graph in graphs.items()}

# %% [markdown]
# ## Counting triangles
#
# A closed walk of three steps goes round a triangle, from one of its three nodes in one
# of two directions. $(A^3)_{ii}$ counts these walks from node $i$, so
# $\mathrm{tr}(A^3)$ counts every triangle six times. There are three ways to estimate
# it:
#
# - **Hutchinson** on the operator $A^3$: the mean of $z^T A^3 z$ over random signs $z$.
#   Lineax composes operators with `@`; a product with $A^3$ is three with $A$.
# - **XTrace** on $A^3$ finds the dominant eigenspace first and takes its part of the
#   trace exactly, so probes sample only the rest.
# - **Quadrature**: `trace_of_function` with $f(x) = x^3$. Two Lanczos steps are exact
#   for polynomials of degree three, so each probe costs two products instead of three.
#   Indeed $z^T A^3 z = (Az)^T A (Az)$.
#
# Each gets 360 products with $A$.


# %%
def hutchinson(A, k, key):
    return tx.trace(A @ A @ A, tx.HutchinsonEstimator(), k=k // 3, key=key)


def xtrace(A, k, key):
    return tx.trace(A @ A @ A, tx.XTraceEstimator(), k=k // 3, key=key)


def quadrature(A, k, key):
    return tx.trace_of_function(A, tx.Power(3), k=k // 2, num_steps=2, key=key)


methods = {"Hutchinson": hutchinson, "XTrace": xtrace, "quadrature": quadrature}
solutions = {
    name: method(operators["hubs"], 360, jax.random.key(0))
    for name, method in methods.items()
}
print(f"hubs, exact {triangles['hubs']} triangles")
for name, solution in solutions.items():
    print(f"{name:10} {solution.value / 6:7.0f} +- {solution.std_err / 6:.0f}")

_, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
tx.plot.compare(solutions, exact=6 * triangles["hubs"], ax=ax)
ax.set_xlabel("closed walks of three steps in hubs, ± 2 standard errors")
plt.show()

# %% [markdown]
# XTrace is the most accurate here. To see whether it always is, run each method with
# twenty keys, on `digits` and on a smaller graph like `hubs`.
#
# Samples of Hutchinson and of the quadrature are independent, so the mean of the first
# few is the answer of a smaller budget, and one run serves all budgets. Samples of
# XTrace share a basis, so every budget needs its own run.


# %%
def on_all_keys(method, A, k):
    def one(key):
        solution = method(A, int(k), key)
        return solution.value, solution.std_err, solution.stats["samples"]

    keys = jax.random.split(jax.random.key(1), 20)
    return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)


def relative_errors(method, A, exact):
    """Relative errors for each budget and key, and relative bars for the last budget."""
    if method is xtrace:
        runs = [on_all_keys(method, A, k) for k in budgets]
        values, bars = [run[0] for run in runs], runs[-1][1]
    else:
        _, bars, samples = on_all_keys(method, A, budgets[-1])
        counts = samples.shape[1] * budgets // budgets[-1]
        values = [jnp.mean(samples[:, :count], axis=1) for count in counts]
    return np.array(values) / exact - 1, np.array(bars) / exact


# %%
graphs["small hubs"] = nx.powerlaw_cluster_graph(2_000, 5, 0.3, seed=0)
triangles["small hubs"] = sum(nx.triangles(graphs["small hubs"]).values()) // 3
operators["small hubs"] = operator_of(graphs["small hubs"])
budgets = np.array([60, 180, 540])
spreads = {}
print("540 products            error  standard error  within two")
for name in ("digits", "small hubs"):
    for label, method in methods.items():
        errors, bars = relative_errors(method, operators[name], 6 * triangles[name])
        spreads[name, label] = np.sqrt(np.mean(errors**2, axis=1))
        within = np.mean(np.abs(errors[-1]) < 2 * bars)
        print(f"{name:10} {label:10} {spreads[name, label][-1]:7.1%}", end="")
        print(f" {np.mean(bars):15.1%} {within:11.0%}")

# %%
spectra = {}
for name in ("digits", "small hubs"):
    matrix = nx.to_numpy_array(graphs[name], weight=None)
    spectra[name] = np.linalg.eigvalsh(matrix)

figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axis, name in zip(axes, spectra, strict=False):
    for label in methods:
        axis.loglog(budgets, 100 * spreads[name, label], "o-", label=label)
    axis.set(title=name, xlabel="products with $A$", ylim=(0.5, 40))
    axis.set_xticks(budgets, budgets)
    axis.set_yticks([1, 3, 10, 30], ["1%", "3%", "10%", "30%"])
    axis.minorticks_off()
axes[0].set_ylabel("relative error, root mean square")
axes[0].legend()
for name, values in spectra.items():
    cubes = np.sort(np.abs(values) ** 3)[::-1]
    axes[2].loglog(np.arange(1, len(cubes) + 1), cubes, label=name)
axes[2].set(title="spectra", xlabel="rank", ylabel="absolute eigenvalue of $A^3$")
axes[2].set(ylim=(1, None))
axes[2].legend()
plt.show()

# %% [markdown]
# The best method depends on the graph and the budget. Hutchinson's error comes from the
# off-diagonal entries of $A^3$, in the Frobenius norm. With hubs, one eigenvalue stands
# far above the rest, and XTrace removes it even with the smallest budget. Handwritten
# digits form many clusters of similar size, each with its own eigenvalue. A basis
# explains little until it covers most of them; with smaller budgets products are better
# spent on samples.
#
# The error bars tell the cases apart without the exact answer. See [Error
# bars](../docs/error_bars.md) and [Choose an estimator](../docs/choose_estimator.md).
#
# ## The Estrada index
#
# $\mathrm{tr}\, e^A = \sum_l \mathrm{tr}(A^l) / l!$ counts closed walks of every length
# $l$, with smaller weights for longer ones. Since $f(x) = e^x$ is no polynomial, the
# number of Lanczos steps matters too. Again two estimators share a budget of 400
# products with 20 steps:
#
# - **SLQ**, the default of `trace_of_function`: Lanczos quadrature with 20 probes.
# - **Krylov-aware** spends half of the budget on the dominant eigenspace, by block
#   Lanczos, and samples the rest.
#
# For `digits` we have all eigenvalues, and the exact answer. For `hubs` we compute the
# 30 largest eigenvalues with SciPy's `eigsh`. The others add less than
# $n e^{\lambda_{30}}$, which is negligible.


# %%
def estrada(A, estimator, key):
    return tx.trace_of_function(A, tx.Exp(), estimator, k=20, num_steps=20, key=key)


sparse_hubs = nx.to_scipy_sparse_array(graphs["hubs"], weight=None, dtype=float)
top, top_vectors = eigsh(sparse_hubs, 30, which="LA")
spectra["hubs"] = top
exact = {name: np.sum(np.exp(values)) for name, values in spectra.items()}
left_out = len(graphs["hubs"]) * np.exp(top.min()) / exact["hubs"]
print(f"left out for hubs: less than {left_out:.0e} of the index")
estimators = {"SLQ": tx.SLQEstimator(), "Krylov-aware": tx.KrylovAwareEstimator()}
for name in ("digits", "hubs"):
    for label, estimator in estimators.items():
        solution = estrada(operators[name], estimator, jax.random.key(2))
        value, bar = solution.value / exact[name], solution.std_err / exact[name]
        print(f"{name:6} {label:12} / exact: {value:.10f} +- {bar:.1e}")

# %% [markdown]
# For `hubs` the index is almost $e^{\lambda_1}$ alone. That is the worst case for SLQ:
# the answer depends on the components of twenty random probes along one eigenvector.
# The Krylov-aware estimator finds that eigenvector and samples only the rest, which
# gives about nine digits. On `digits`, with its many large eigenvalues, it gains less.
#
# The error bars measure sampling. For $e^x$ there is no proven bracket of the
# quadrature error (see [Log-determinants](../docs/logdet.md)). `solution.interval()`
# adds an estimate, which is very cautious where a few eigenvalues dominate the sum, so
# check whether more steps change the answer. On `hubs`, where the sampling error is
# tiny, the quadrature error is visible:

# %%
for num_steps in (4, 8, 16):
    solution = tx.trace_of_function(
        operators["hubs"],
        tx.Exp(),
        tx.KrylovAwareEstimator(),
        k=4,
        num_steps=num_steps,
        key=jax.random.key(3),
    )
    error, bar = solution.value / exact["hubs"] - 1, solution.std_err / exact["hubs"]
    print(f"{num_steps:3} steps: error {error:8.1e}, standard error {bar:.1e}")

# %% [markdown]
# The error falls with the number of steps, and stays above the standard error: so few
# steps are not enough, however narrow the error bar.
#
# ## What every edge contributes
#
# The derivative of $\mathrm{tr}\, e^A$ in the weight $w_{ij}$ of an edge is
# $2 (e^A)_{ij}$, twice the communicability of its ends. One gradient gives it for all
# edges. The gradient of $\log \mathrm{tr}\, e^A$ is the relative change of the index
# with each weight. The novel is small enough to check it and to draw it. (Four probes
# and 12 steps are 48 products for 77 nodes.)


# %%
def contributions(graph, num_steps, key):
    def log_estrada(weights):
        A = adjacency(weights, edges, len(graph))
        estimator = tx.KrylovAwareEstimator()
        solution = tx.trace_of_function(
            A, tx.Exp(), estimator, k=4, num_steps=num_steps, key=key
        )
        return jnp.log(solution.value)

    edges = edges_of(graph)
    return edges, jax.jit(jax.grad(log_estrada))(jnp.ones(len(edges)))


def exactly(edges, values, vectors, index):
    i, j = edges.T
    return 2 * (vectors[i] * vectors[j]) @ np.exp(values) / index


novel = graphs["novel"]
edges, found = contributions(novel, 12, jax.random.key(4))
values, vectors = np.linalg.eigh(nx.to_numpy_array(novel, weight=None))
reference = exactly(edges, values, vectors, np.sum(np.exp(values)))
names = list(novel)
for edge in np.argsort(-found)[:5]:
    i, j = edges[edge]
    print(f"{found[edge]:.4f}, exact {reference[edge]:.4f}: {names[i]} and {names[j]}")

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(2, 1)
)
positions = nx.kamada_kawai_layout(novel)
nx.draw_networkx_nodes(novel, positions, node_size=15, node_color="0.4", ax=left)
nx.draw_networkx_edges(
    novel, positions, width=np.array(20 * found), edge_color="C0", ax=left
)
often = [name for name, degree in novel.degree if degree >= 15]
nx.draw_networkx_labels(
    novel, positions, {name: name for name in often}, font_size=8, ax=left
)
left.set(title="novel: width as the contribution of an edge")
left.set_axis_off()
right.loglog(reference, found, ".")
ends = [reference.min(), reference.max()]
right.plot(ends, ends, color="0.5", lw=1, label="equal")
right.set(xlabel="exact contribution", ylabel="estimated contribution", title="edges")
right.legend()
plt.show()

# %% [markdown]
# All contributions are accurate relative to the largest ones. Here is the same gradient
# for the 99,950 edges of `hubs`, compared with the 30 eigenvectors from above:

# %%
edges, found = contributions(graphs["hubs"], 15, jax.random.key(4))
reference = exactly(edges, top, top_vectors, exact["hubs"])
print(f"{len(edges)} edges, the strongest {found.max():.4f}", end=", ")
print(f"largest error {np.max(np.abs(found - reference)):.0e}")

# %% [markdown]
# ## Where the eigenvalues are
#
# `spectral_density` draws the whole spectrum from Lanczos runs, with error bars. For
# `digits` it agrees with the histogram of all eigenvalues. The mean of the eigenvalues
# is zero for a graph without loops, and the mean of their cubes is six times the number
# of triangles over $n$, so the density leans to the right. For `hubs`, which has no
# histogram, the scale is logarithmic. Its upper tail shows a single eigenvalue among
# 20,000, the one that makes the Estrada index.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for axis, name in zip(axes, ("digits", "hubs"), strict=True):
    density = tx.spectral_density(
        operators[name], k=10, num_steps=50, key=jax.random.key(5)
    )
    tx.plot.spectral_density(density, ax=axis, label="estimate")
    axis.set_title(f"{name}: {density.num_matvecs} products")
axes[0].hist(spectra["digits"], 60, density=True, color="0.8", label="all eigenvalues")
axes[0].legend()
axes[1].set(yscale="log", ylim=(1e-7, 1))
plt.show()
