# %% [markdown]
# # Write your own sampler, estimator and matrix function
#
# Each is a class with one short method. The library takes care of keys, blocks of
# probes, compilation, derivatives, several devices, tolerances and argument checks.
# This tutorial writes all three and tests each over a thousand keys against the exact
# answer. The rules for such classes are in [Writing your own](../docs/api/custom.md).

# %%
from typing import ClassVar

import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import traceax as tx
import traceax.internal as txi


# %% [markdown]
# The operator is a kernel matrix of 400 handwritten digits from scikit-learn,
# $a_{ij} = (1 + s\, x_i^T x_j)^2$, with centred images of mean squared norm one and
# $s = 1$. It is small, so thousands of estimates are cheap and the exact answer is
# known.

# %%
images = jnp.asarray(load_digits().data[:400], jnp.float32)
images = images - jnp.mean(images, axis=0)
images = images / jnp.sqrt(jnp.mean(jnp.sum(images**2, axis=1)))
n = len(images)


def kernel(scale):
    matrix = (1 + scale * images @ images.T) ** 2
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


A = kernel(1.0)
exact = jnp.trace(A.matrix)
eigenvalues = np.linalg.eigvalsh(np.asarray(A.matrix, np.float64))
print(f"trace {exact:.1f}, largest eigenvalues", eigenvalues[:-4:-1].round(1))

# %% [markdown]
# ## The test
#
# Over many keys the mean must be the trace, up to its own standard error: `z` should be
# between about -3 and 3. The reported standard error must match the spread of the
# values: `bar / spread` should be about 1, or slightly more, since error bars of few
# samples are cautious. And about 95% of the values should be `within two` standard
# errors.


# %%
keys = jax.random.split(jax.random.key(0), 1000)
spreads = {}


@jax.jit
def over_keys(estimator):
    def one(key):
        solution = tx.trace(A, estimator, k=40, key=key)
        return solution.value, solution.std_err

    return jax.lax.map(one, keys, batch_size=50)


def test(name, estimator):
    values, bars = over_keys(estimator)
    error, spread = values - exact, jnp.std(values)
    z = jnp.mean(error) / spread * len(keys) ** 0.5
    within = jnp.mean(jnp.abs(error) < 2 * bars)
    print(f"{name:24} {spread / exact:7.2%} {z:6.2f}", end=" ")
    print(f"{jnp.mean(bars) / spread:12.2f} {within:10.1%}")
    spreads[name] = spread


print("40 products              spread      z bar / spread within two")
test("Hutchinson", tx.HutchinsonEstimator())

# %% [markdown]
# ## A sampler
#
# A sampler draws one probe $z$ from one key, with $E[z z^T] = I$. Ours has random signs
# at a fraction $p$ of the entries, scaled to $1 / \sqrt p$, and zeros elsewhere. It
# suits operators with cheap products for sparse vectors. `rotation_invariant` says
# whether the distribution is the same in every orthonormal basis; this one is not.


# %%
class SparseSigns(tx.AbstractSampler):
    """Random signs at random places."""

    density: jax.Array | float = 0.1
    dtype: None = None
    rotation_invariant: ClassVar[bool] = False

    def sample(self, key, n, dtype):
        key1, key2 = jax.random.split(key)
        signs = jax.random.rademacher(key1, (n,), dtype)
        present = jax.random.bernoulli(key2, self.density, (n,))
        return jnp.where(present, signs / jnp.sqrt(self.density).astype(dtype), 0)


test("sparse signs, p = 0.1", tx.HutchinsonEstimator(SparseSigns()))

# %% [markdown]
# What do the zeros cost? For independent entries with $E z_i^4 = 1/p$ and a symmetric
# matrix, the variance of one sample $z^T A z$ is
#
# $$2 \sum_{i \ne j} a_{ij}^2 + \left(\frac1p - 1\right) \sum_i a_{ii}^2 .$$
#
# For $p = 1$ the diagonal adds nothing. The density is an array in the sampler, which
# is a PyTree, so `jax.vmap` can go over densities and keys.

# %%
densities = jnp.array([0.01, 0.03, 0.1, 0.3, 1.0])


@jax.jit
@jax.vmap
def spread_at(density):
    estimator = tx.HutchinsonEstimator(SparseSigns(density))
    values = jax.lax.map(
        lambda key: tx.trace(A, estimator, k=40, key=key).value, keys, batch_size=50
    )
    return jnp.std(values)


diagonal = jnp.sum(jnp.diag(A.matrix) ** 2)
rest = jnp.sum(A.matrix**2) - diagonal
p = jnp.geomspace(0.01, 1, 100)
_, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
theory = jnp.sqrt((2 * rest + (1 / p - 1) * diagonal) / 40) / exact
ax.semilogx(p, 100 * theory, color="0.6", label="formula")
ax.semilogx(densities, 100 * spread_at(densities) / exact, "o", label="1,000 keys")
ax.set(xlabel="density $p$ of the probes", ylabel="spread of the estimate / trace, %")
ax.set_ylim(0, None)
ax.legend()
plt.show()

# %% [markdown]
# ## A streaming estimator
#
# A streaming estimator makes one unbiased estimate from one probe and one product.
# Apart from a constant, the estimate must be linear in the product. The samples are
# independent, and the library makes value, error bar and tolerances from them.
#
# Ours has a control variate: an operator $C \approx A$ with known trace. It samples
# $\mathrm{tr}(C) + z^T (A - C) z$, so only the difference contributes to the error.


# %%
class Controlled(tx.AbstractStreamingEstimator):
    """Hutchinson on the difference from an operator of known trace."""

    control: lx.AbstractLinearOperator
    known: jax.Array
    sampler: tx.AbstractSampler = tx.RademacherSampler()
    min_matvecs: ClassVar[int] = 1

    def sample(self, mv, probe):
        difference = mv(probe) - self.control.mv(probe)
        return self.known + jnp.vdot(probe, difference)


# %% [markdown]
# $C$ is a Nyström approximation from 40 columns of $A$. The control variate combines
# with any sampler:

# %%
columns = A.matrix[:, :40]
core = jnp.linalg.cholesky(columns[:40] + 1e-4 * jnp.eye(40))
factor = jax.scipy.linalg.solve_triangular(core, columns.T, lower=True)
C = lx.MatrixLinearOperator(factor.T @ factor)
known = jnp.sum(factor**2)
print(f"trace of C / trace of A: {known / exact:.0%}")
test("controlled", Controlled(C, known))
test("controlled, sparse signs", Controlled(C, known, SparseSigns()))

# %% [markdown]
# Without the control variate, sparse signs cost little, because off-diagonal entries
# made most of the variance. The control variate has removed that part, so now the
# diagonal of $A - C$ matters.
#
# ## A sketch estimator
#
# A sampler draws each probe without knowing the others. If probes should depend on each
# other, write a sketch estimator, which gets all of them as the columns of an array.
# Ours makes them orthonormal. For $q_1, \dots, q_m$ in a random direction the samples
# are $n\, q_i^T A q_i$, and their mean over a whole basis would be the trace itself.
# This is sampling without replacement: the variance of the mean has the factor
# $(n - m) / (n - 1)$.
#
# A sketch also returns a *frame*, arrays $L, R$ with
# $E[\sum L \circ (dA\, R)] = d\,\mathrm{tr}(A)$, which gives the derivatives. Here
# $L = \frac nm Q$ and $R = Q$. Use `txi.qr` for the factorisation: it is safe under
# `vmap` on CPU, where `jnp.linalg.qr` [may deadlock](../docs/devdocs/jax_versions.md).


# %%
class Orthogonal(tx.AbstractSketchEstimator):
    """Hutchinson with orthogonal probes."""

    sampler: tx.AbstractSampler = tx.NormalSampler()
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = False

    def num_probes(self, k):
        return k

    def sketch(self, matmat, probes, k, eps):
        n, m = probes.shape
        q, _ = txi.qr(probes)
        samples = n * jnp.sum(q.conj() * matmat(q), axis=0)
        std_err = jnp.std(samples, ddof=1) * ((n - m) / (n * m)) ** 0.5
        return tx.Sketch(samples, std_err, (q * (n / m), q), num_matvecs=m)


test("orthogonal", Orthogonal())
test("sphere", tx.HutchinsonEstimator(tx.SphereSampler()))

# %% [markdown]
# The fair comparison is with independent probes that are uniform on the sphere. The
# gain is small for 40 of 400 directions, and large where the probes span most
# directions:

# %%
budgets = np.array([100, 200, 380])
measured = []
for k in budgets:

    def value(key, k=int(k)):
        return tx.trace(A, Orthogonal(), k=k, key=key).value

    values = jax.jit(lambda keys, f=value: jax.lax.map(f, keys, batch_size=10))(
        keys[:200]
    )
    measured.append(np.std(values))
m = np.arange(20, 400)
independent = spreads["sphere"] * (40 / m) ** 0.5
theory = independent * ((n - m) / (n - 1)) ** 0.5
_, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ax.plot(
    m, 100 * independent / exact, color="C1", label="sphere: at 40, then $1/\\sqrt{k}$"
)
ax.plot(m, 100 * theory / exact, color="0.6", label="orthogonal, by the formula")
ax.plot(budgets, 100 * np.array(measured) / exact, "o", label="orthogonal, 200 keys")
ax.set(xlabel="products $k$", ylabel="spread of the estimate / trace, %", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# ## A matrix function
#
# The effective dimension of kernel ridge regression is $\mathrm{tr}\, A (A + \mu
# I)^{-1} = \sum_i \lambda_i / (\lambda_i + \mu)$, the number of eigenvalues that are
# large compared with $\mu$. Any callable works as the function. A class can say more:
# its domain, and that its derivatives from the second on alternate in sign on positive
# numbers. Then Gauss and Gauss-Radau rules bracket each quadratic form, and
# `stats["bracket"]` measures the error of stopping Lanczos early.


# %%
class EffectiveDimension(tx.AbstractSpectralFunction):
    """x / (x + mu), for semidefinite operators."""

    mu: jax.Array | float
    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True

    def __call__(self, x):
        return x / (x + jnp.asarray(self.mu, x.dtype))


def dimension(mu, num_steps=30):
    return tx.trace_of_function(
        A, EffectiveDimension(mu), k=20, num_steps=num_steps, key=jax.random.key(1)
    )


truth = np.sum(eigenvalues / (eigenvalues + 1))
for num_steps in (5, 10, 30):
    solution = dimension(1.0, num_steps)
    low, high = solution.stats["bracket"]
    print(f"{num_steps:2} steps: {solution.value:.2f} +- {solution.std_err:.2f}", end="")
    print(f", quadrature from {low:.2f} to {high:.2f}, exact {truth:.2f}")

# %% [markdown]
# $\mu$ is an array of the function, so estimates can be differentiated in it, and
# `jax.vmap` can go over it. The second function is a plain callable, a smoothed count
# of the eigenvalues above a threshold.


# %%
def count(threshold):
    def step(x):
        return jax.nn.sigmoid((jnp.log(jnp.maximum(x, 1e-6)) - jnp.log(threshold)) / 0.3)

    return tx.trace_of_function(A, step, k=20, num_steps=30, key=jax.random.key(2))


positions = jnp.geomspace(0.1, 100, 25)
x = np.maximum(eigenvalues, 1e-6)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for ax, function, values, label in (
    (axes[0], dimension, x / (x + positions), "$\\mu$"),
    (axes[1], count, 1 / (1 + (positions / x) ** (1 / 0.3)), "threshold"),
):
    found = jax.jit(jax.vmap(lambda p, f=function: f(p)))(positions)
    bars = 2 * found.std_err
    ax.plot(positions, np.sum(values, axis=0), color="0.6", label="exact")
    ax.errorbar(positions, found.value, bars, fmt=".", label="± 2 standard errors")
    ax.set(xscale="log", xlabel=label)
    ax.legend()
axes[0].set_ylabel("effective dimension")
axes[1].set_ylabel("eigenvalues above, smoothed")
plt.show()

# %%
derivative = jax.jit(jax.grad(lambda mu: dimension(mu).value))(1.0)
truth = -np.sum(eigenvalues / (eigenvalues + 1) ** 2)
print(f"derivative in mu {derivative:.1f}, exact {truth:.1f}")

# %% [markdown]
# ## What comes for free
#
# **Derivatives** with respect to the operator, which are unbiased too. Here is the
# derivative in the scale $s$ of the kernel, over the keys of the test:

# %%
estimators = {
    "sparse signs": tx.HutchinsonEstimator(SparseSigns()),
    "controlled": Controlled(C, known),
    "orthogonal": Orthogonal(),
}


@jax.jit
def slopes_at(scale, estimator):
    def value(scale, key):
        return tx.trace(kernel(scale), estimator, k=40, key=key).value

    return jax.lax.map(lambda key: jax.grad(value)(scale, key), keys)


truth = jax.grad(lambda scale: jnp.trace(kernel(scale).matrix))(1.0)
for name, estimator in estimators.items():
    slopes = slopes_at(1.0, estimator)
    z = (jnp.mean(slopes) - truth) / jnp.std(slopes) * len(keys) ** 0.5
    print(f"{name:13} {jnp.mean(slopes):.1f}, exact {truth:.1f}, z = {z:.2f}")

# %% [markdown]
# **Several devices**: the devices of a mesh, here all there are, share the probes, and
# the answer stays the same. See [Scaling out](../docs/scaling.md).

# %%
mesh = tx.probe_mesh()
for execution in (tx.Local(), tx.Sharded(mesh)):
    solution = tx.trace(A, Orthogonal(), k=40, key=keys[0], execution=execution)
    print(f"{type(execution).__name__:8} {solution.value:.3f} +- {solution.std_err:.3f}")
print(f"devices: {mesh.size}")

# %% [markdown]
# **Tolerances**, for streaming estimators. To grow in rounds, a sketch estimator needs
# the methods of [`AbstractGrowingEstimator`](../docs/api/custom.md). See [Stopping at a
# tolerance](../docs/adaptive.md).

# %%
budget = tx.Adaptive(rtol=0.06, max_k=384)
for estimator in (tx.HutchinsonEstimator(), Controlled(C, known)):
    solution = tx.trace(A, estimator, k=budget, key=keys[0], throw=False)
    print(f"{type(estimator).__name__:20} {solution.value:.1f} +- {solution.std_err:.1f}")
    print(f"{'':20} after {solution.stats['num_matvecs']} products")
