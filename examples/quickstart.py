# %% [markdown]
# # Estimate a trace, and choose an estimator
#
# A trace of a matrix that is never stored takes one call of `tx.trace`, with `k`
# matrix-vector products. This tutorial estimates three traces from scikit-learn's
# handwritten digits, compares the estimators, and ends with a rule for choosing one.
# The exact traces are known, which shows whether the error bars are right.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import traceax as tx


pixels, labels = load_digits(return_X_y=True)
images = jnp.asarray(pixels[:1000] / 16, jnp.float32)
labels = jnp.asarray(labels[:1000])
n = len(images)

# %% [markdown]
# ## A kernel matrix and its inverse
#
# The kernel matrix of the images, $K_{ij} = \exp(-|x_i - x_j|^2 / 2 \ell^2)$, has ones
# on its diagonal, so its trace is $n$. The estimators see only its products
# $v \mapsto K v$, computed from 250 rows at a time.
#
# The second operator is $(K + \lambda I)^{-1}$. Its trace gives the effective degrees
# of freedom of kernel ridge regression with the penalty $\lambda$:
#
# $$\mathrm{df}(\lambda) = \mathrm{tr}\, K (K + \lambda I)^{-1}
#   = n - \lambda\, \mathrm{tr}\, (K + \lambda I)^{-1}.$$
#
# A product with the inverse is a linear solve, here by conjugate gradients.

# %%
length_scale = 2.0  # the images are about 3 from each other
norms = jnp.sum(images**2, axis=1)
vector = jax.ShapeDtypeStruct((n,), images.dtype)


def kernel_row(image):
    """The kernel of one image with all of them."""
    squares = norms + image @ image - 2 * images @ image
    return jnp.exp(-squares / (2 * length_scale**2))


def multiply(v):
    """K v, without K."""
    return jax.lax.map(lambda image: kernel_row(image) @ v, images, batch_size=250)


def regularised_inverse(penalty):
    """(K + penalty I)^-1, by conjugate gradients."""
    tag = lx.positive_semidefinite_tag
    system = lx.FunctionLinearOperator(lambda v: multiply(v) + penalty * v, vector, tag)
    cg = lx.CG(rtol=1e-4, atol=1e-4)
    return lx.FunctionLinearOperator(
        lambda v: lx.linear_solve(system, v, cg).value, vector, tag
    )


kernel = lx.FunctionLinearOperator(multiply, vector, lx.positive_semidefinite_tag)
inverse = regularised_inverse(1.0)

# %% [markdown]
# `tx.trace` returns a solution with a value and an error bar. The tag says that the
# operator is positive semidefinite, so the default estimator is
# [XNysTrace](../docs/choose_estimator.md).

# %%
solution = tx.trace(kernel, k=60, key=jr.key(0))
print(f"The kernel matrix K, exact trace {n}")
print(solution)

# %% [markdown]
# We store $K$ once to compute its eigenvalues. Those of $K$ decay: a few carry most of
# the trace. Those of the inverse are flat: most lie between 0.5 and 1.

# %%
dense = np.asarray(jax.lax.map(kernel_row, images, batch_size=250), np.float64)
eigenvalues = np.linalg.eigvalsh(dense)[::-1]
of_inverse = 1 / (eigenvalues + 1)
exact_inverse = np.sum(of_inverse)
print("Eigenvalues")
print(f"  K: the 20 largest are {np.sum(eigenvalues[:20]) / n:.0%} of the trace")
print(f"  (K + I)^-1: {np.mean(of_inverse > 0.5):.0%} are between 0.5 and 1")

figure, axes = plt.subplots(layout="constrained", figsize=(6, 3.5))
index = np.arange(1, n + 1)
axes.loglog(index, eigenvalues, label=r"$K$")
axes.loglog(index, of_inverse[::-1], label=r"$(K + I)^{-1}$")
axes.set(xlabel="index", ylabel="eigenvalue")
axes.legend()
plt.show()

# %% [markdown]
# ## The same budget for all estimators
#
# Each estimator gets 60 products. Hutchinson's estimator samples everything. The others
# find the large eigenvalues with a sketch, count them exactly, and sample the rest.

# %%
any_operator = [tx.HutchinsonEstimator(), tx.XTraceEstimator()]
semidefinite = [*any_operator, tx.XNysTraceEstimator()]


def short_name(estimator):
    return type(estimator).__name__.removesuffix("Estimator")


def compare(title, operator, estimators, exact, k=60):
    print(f"{title}, n = {operator.in_size()}, k = {k}, exact trace {exact:.3f}")
    print(f"  {'':<15}{'estimate':>10}{'std err':>10}{'error':>10}{'error/std err':>15}")
    for estimator in estimators:
        solution = tx.trace(operator, estimator, k=k, key=jr.key(1))
        value, std_err = float(solution.value), float(solution.std_err)
        print(f"  {short_name(estimator):<15}{value:>10.3f}{std_err:>10.3f}", end="")
        print(f"{value - exact:>10.3f}{(value - exact) / std_err:>15.2f}")


compare("The kernel matrix K", kernel, semidefinite, n)

# %%
two = [tx.HutchinsonEstimator(), tx.XNysTraceEstimator()]
compare("The inverse of K + I", inverse, two, exact_inverse)

# %% [markdown]
# On the decaying spectrum the sketches are far ahead. On the flat one a sketch gains
# nothing, and XNysTrace is about as good as Hutchinson's estimator. Every error is of
# the size of its standard error: the last column is seldom beyond 2 or -2.
#
# ## How the error falls
#
# The next cell computes root-mean-square errors over 20 keys, and mean error bars. The
# matrices are stored here, as arguments of a compiled function that loops over the
# keys, so it is compiled once for each estimator and budget.


# %%
@eqx.filter_jit
def repeat(matrices, estimator, k, keys):
    """Values and error bars, for each matrix and each key."""

    def run(matrix, key):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        solution = tx.trace(operator, estimator, k=k, key=key)
        return solution.value, solution.std_err

    return jax.lax.map(lambda m: jax.lax.map(lambda key: run(m, key), keys), matrices)


matrices = jnp.asarray([dense, np.linalg.inv(dense + np.eye(n))], jnp.float32)
exact = np.array([[n], [exact_inverse]])
budgets, keys = np.array([10, 40, 160]), jr.split(jr.key(2), 20)
curves = {}
for estimator in two:
    runs = [repeat(matrices, estimator, int(k), keys) for k in budgets]
    errors = [np.sqrt(np.mean((value - exact) ** 2, axis=1)) for value, _ in runs]
    bars = [np.mean(std_err, axis=1) for _, std_err in runs]
    curves[short_name(estimator)] = np.array([errors, bars]) / exact[:, 0]

# %%
figure, axes = plt.subplots(1, 2, layout="constrained", figsize=(9, 4))
for i, title in enumerate(["$K$, decaying spectrum", "$(K + I)^{-1}$, flat spectrum"]):
    for name, (errors, bars) in curves.items():
        (line,) = axes[i].loglog(budgets, errors[:, i], "o-", label=name)
        axes[i].loglog(budgets, bars[:, i], "--", color=line.get_color())
    axes[i].plot([], [], "--", color="gray", label="mean error bar")
    axes[i].set(title=title, xlabel="products", ylabel="error / trace")
    axes[i].set_xticks(budgets, labels=[str(k) for k in budgets])
    axes[i].set_xticks([], minor=True)
axes[1].set_ylim(5e-4, 2e-2)
axes[1].legend()
plt.show()

# %% [markdown]
# Hutchinson's error falls as $1/\sqrt k$: four times the products for half the error.
# On the decaying spectrum the error of XNysTrace falls faster, since more products
# leave less to sample.
#
# The error bars (dashed) follow the errors, which 20 keys determine to about 15%. With
# few products the bars are deliberately cautious: see [Error
# bars](../docs/error_bars.md).
#
# ## The Hessian of a network
#
# An operator may act on a PyTree, such as the parameters of an Equinox module. Here it
# is the Hessian of the loss of a small network after 100 training steps.

# %%
model = eqx.nn.MLP(64, 10, width_size=16, depth=1, key=jr.key(3))
optimiser = optax.adam(1e-2)


def loss(model):
    logits = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@eqx.filter_jit
def step(model, state):
    updates, state = optimiser.update(eqx.filter_grad(loss)(model), state)
    return eqx.apply_updates(model, updates), state


state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
for _ in range(100):
    model, state = step(model, state)

# %% [markdown]
# A Hessian may have eigenvalues of both signs, so it carries no tag, and estimators
# that need one refuse it. With `k >= n` every estimate is exact.

# %%
hessian = tx.hessian(loss, model)
exact_hessian = tx.trace(hessian, k=hessian.in_size()).value
compare("The Hessian of a network", hessian, any_operator, float(exact_hessian))

# %% [markdown]
# The sketch is ahead again, because a few directions of high curvature dominate.
# XTrace, the default for operators without a tag, is the right choice.
#
# ## How many products?
#
# Start with a few tens of products and read the error bar. Or name a tolerance:
# products are then added in one compiled loop until the error bar is small enough. See
# [Stop at a tolerance](../docs/adaptive.md).

# %%
budget = tx.Adaptive(rtol=0.01, max_k=320)
print("The kernel matrix K, to 1%")
print(tx.trace(kernel, k=budget, key=jr.key(4)))

# %% [markdown]
# ## Under `jit` and `grad`
#
# Estimates can be compiled, and differentiated with respect to the arrays in the
# operator. This function computes the effective degrees of freedom and their derivative
# in the penalty. It is compiled once for all penalties, linear solves included. The
# derivative is an unbiased estimate too, without an error bar.


# %%
def degrees_of_freedom(penalty, key):
    operator = regularised_inverse(penalty)
    solution = tx.trace(operator, tx.HutchinsonEstimator(), k=60, key=key)
    return n - penalty * solution.value, penalty * solution.std_err


value_and_slope = jax.jit(jax.value_and_grad(degrees_of_freedom, has_aux=True))
print("Effective degrees of freedom, and their slope in the penalty")
print(f"{'penalty':>9}{'df':>7}{'std err':>9}{'exact':>8}{'slope':>10}{'exact':>9}")
for penalty in (0.3, 1.0, 3.0):
    (value, std_err), slope = value_and_slope(penalty, jr.key(5))
    exact_value = np.sum(eigenvalues / (eigenvalues + penalty))
    exact_slope = -np.sum(eigenvalues / (eigenvalues + penalty) ** 2)
    print(f"{penalty:>9}{value:>7.1f}{std_err:>9.1f}{exact_value:>8.1f}", end="")
    print(f"{slope:>10.2f}{exact_slope:>9.2f}")

# %% [markdown]
# ## A rule for choosing
#
# 1. If the operator is positive semidefinite, tag it and take the default, XNysTrace.
# 2. Otherwise take the default too, XTrace. Take Hutchinson's estimator if the spectrum
#    is known to be flat, or if `k` vectors do not fit in memory.
# 3. Start with `k` of 30 to 60 and read `std_err`, or pass a tolerance. If doubling the
#    products cuts the error bar by only 30%, the spectrum is flat, and each further
#    digit costs a hundred times as much.
# 4. If `n` products are affordable, spend them: the answer is exact.
#
# [Choose an estimator](../docs/choose_estimator.md) has the costs in memory and
# operations. Next: [train a Gaussian process](gp_training.ipynb) by log-determinants.
