# %% [markdown]
# # Which estimator, and how many products?
#
# The trace of a matrix that is never stored, from `k` products with random vectors: this
# tutorial compares the estimators on three real problems made from scikit-learn's
# handwritten digits, shows how their errors fall with `k`, and ends with a rule for
# choosing. Each problem is small enough for the exact trace, which shows whether the
# error bars are right.

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
# The kernel matrix of the images, $K_{ij} = \exp(-|x_i - x_j|^2 / 2 \ell^2)$, has ones on
# its diagonal, so its trace is $n$. That is a check on the estimators, which see only the
# products $v \mapsto K v$, made from 250 rows at a time.
#
# The inverse of $K + \lambda I$ is less obvious. Kernel ridge regression with the penalty
# $\lambda$ fits the data with
#
# $$\mathrm{df}(\lambda) = \mathrm{tr}\, K (K + \lambda I)^{-1}
#   = n - \lambda\, \mathrm{tr}\, (K + \lambda I)^{-1}$$
#
# effective degrees of freedom, which the choice of $\lambda$ needs. A product with the
# inverse is the solution of a linear system, here by conjugate gradients, which need only
# products, too.

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
# One call estimates a trace. The tag says that the operator is positive semidefinite, and
# the default estimator is chosen from it: [XNysTrace](../choose_estimator.md).

# %%
print(tx.select_trace_estimator(kernel, k=60))
solution = tx.trace(kernel, k=60, key=jr.key(0))
print(f"trace of K: {solution.value:.1f} +- {solution.std_err:.1f}, exactly {n}")

# %% [markdown]
# To compute the true eigenvalues, $K$ is stored after all. They show that the two
# operators are of different kinds. Those of $K$ decay: a few carry most of the trace.
# Those of the inverse are flat: most are between 0.5 and 1.

# %%
dense = np.asarray(jax.lax.map(kernel_row, images, batch_size=250), np.float64)
eigenvalues = np.linalg.eigvalsh(dense)[::-1]
of_inverse = 1 / (eigenvalues + 1)
exact_inverse = np.sum(of_inverse)
print(f"20 largest of K: {np.sum(eigenvalues[:20]) / n:.0%} of the trace")
print(f"of the inverse: {np.mean(of_inverse > 0.5):.0%} between 0.5 and 1")

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
# 60 products for each. XTrace and XNysTrace, and before them Hutch++ and Nystrom++, find
# the large eigenvalues by a sketch and count them exactly; only the rest is sampled.
# Hutchinson's estimator samples everything.

# %%
any_operator = [
    tx.HutchinsonEstimator(),
    tx.HutchPlusPlusEstimator(),
    tx.XTraceEstimator(),
]
semidefinite = [*any_operator, tx.NystromPlusPlusEstimator(), tx.XNysTraceEstimator()]


def short_name(estimator):
    return type(estimator).__name__.removesuffix("Estimator")


def compare(title, operator, estimators, exact, k=60):
    print(f"{title}: n = {operator.in_size()}, k = {k}, exactly {exact:.3f}")
    print(f"{'':<17}{'estimate':>10}{'std err':>10}{'error':>10}{'error/std err':>15}")
    for estimator in estimators:
        solution = tx.trace(operator, estimator, k=k, key=jr.key(1))
        value, std_err = float(solution.value), float(solution.std_err)
        print(f"{short_name(estimator):<17}{value:>10.3f}{std_err:>10.3f}", end="")
        print(f"{value - exact:>10.3f}{(value - exact) / std_err:>15.2f}")


compare("Kernel matrix K", kernel, semidefinite, n)

# %%
two = [tx.HutchinsonEstimator(), tx.XNysTraceEstimator()]
compare("Inverse of K + I", inverse, two, exact_inverse)

# %% [markdown]
# On the decaying spectrum the estimators that sketch are far ahead of Hutchinson's. On
# the flat one a sketch gains nothing, since no small number of directions carries most of
# the trace: XNysTrace is about even with Hutchinson's estimator there.
#
# In all rows the error is of the size of the standard error, as it should be: the last
# column is seldom above 2 or below -2.
#
# ## How the error falls
#
# One run shows one error. The next cell has the root-mean-square error over 20 keys, and
# beside it the mean of the error bars. For so many runs the two matrices are stored. They
# are arguments of a compiled function, and the keys are looped over inside it, so that it
# is compiled once for each estimator and budget.


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
for estimator in (*two, tx.XTraceEstimator()):
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
# Hutchinson's error falls as $1/\sqrt k$ on both: four times the products for half the
# error. The errors of the others fall faster on the decaying spectrum, because with more
# products a smaller remainder is left to be sampled. On the flat one XTrace is behind,
# since it spends half of its products on a basis that explains little; every product of
# XNysTrace serves both purposes.
#
# The error bars (dashed) follow the errors, which 20 keys determine to about 15%. With
# few products they are too large rather than too small, on purpose: see
# [Error bars](../error_bars.md).
#
# ## The Hessian of a network
#
# An operator may act on a PyTree, such as the parameters of an Equinox module. Here it is
# the Hessian of the loss of a small network, after 100 steps of training.

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
# It may have eigenvalues of both signs, so it carries no tag, and the estimators that
# need one refuse it. The exact trace takes `k = n` products: with a budget of `n` or
# more, every estimator is exact.

# %%
hessian = tx.hessian(loss, model)
exact_hessian = tx.trace(hessian, k=hessian.in_size())
print(f"exact: {exact_hessian.value:.3f} +- {exact_hessian.std_err:.3f}")
compare("Hessian", hessian, any_operator, float(exact_hessian.value))

# %% [markdown]
# The estimators that sketch are ahead again: a few directions of high curvature dominate.
# The default for an operator without a tag, XTrace, is the right choice.
#
# ## How many products?
#
# Run with a few tens of products, and read the error bar. Or name a tolerance, and the
# run goes on until the error bar is small enough, in one compiled loop: see
# [Stopping at a tolerance](../adaptive.md).

# %%
budget = tx.Adaptive(rtol=0.01, max_k=320)
for name, operator, estimator in [
    ("K", kernel, tx.XNysTraceEstimator()),
    ("(K + I)^-1", inverse, tx.HutchinsonEstimator()),
]:
    solution = tx.trace(operator, estimator, k=budget, key=jr.key(4))
    print(f"{name:<11}{solution.value:.1f} +- {solution.std_err:.1f}", end="")
    print(f" after {solution.stats['num_matvecs']} products")

# %% [markdown]
# ## Under `jit` and `grad`
#
# Estimates can be compiled, and differentiated with respect to the arrays that the
# operator is made of. The next function computes the effective degrees of freedom, from
# the inverse, and their derivative in the penalty. It is compiled once for all penalties,
# linear solves included. The derivative is an unbiased estimate as well, without an error
# bar of its own.


# %%
def degrees_of_freedom(penalty, key):
    operator = regularised_inverse(penalty)
    solution = tx.trace(operator, tx.HutchinsonEstimator(), k=60, key=key)
    return n - penalty * solution.value, penalty * solution.std_err


value_and_slope = jax.jit(jax.value_and_grad(degrees_of_freedom, has_aux=True))
print(f"{'penalty':>7}{'df':>7}{'std err':>9}{'exact':>8}{'slope':>10}{'exact':>9}")
for penalty in (0.3, 1.0, 3.0):
    (value, std_err), slope = value_and_slope(penalty, jr.key(5))
    exact_value = np.sum(eigenvalues / (eigenvalues + penalty))
    exact_slope = -np.sum(eigenvalues / (eigenvalues + penalty) ** 2)
    print(f"{penalty:>7}{value:>7.1f}{std_err:>9.1f}{exact_value:>8.1f}", end="")
    print(f"{slope:>10.2f}{exact_slope:>9.2f}")

# %% [markdown]
# ## A rule for choosing
#
# 1. If the operator is positive semidefinite, tag it, and take the default, XNysTrace. It
#    is the most accurate where the spectrum decays, and nearly so where it is flat.
# 2. If it is not, take the default too, XTrace, unless the spectrum is known to be flat:
#    then take Hutchinson's estimator. Take that also if `k` vectors do not fit in memory.
# 3. Start with `k` of 30 to 60 and read `std_err`, or pass a tolerance. If twice the
#    products take only about 30% off the error bar, the spectrum is flat, and one more
#    digit costs a hundred times as much. If they take off more than half, go on.
# 4. If `n` products are affordable, spend them: the answer is exact.
#
# [Choosing an estimator](../choose_estimator.md) has the costs in memory and operations.
# Next: [log-determinants, by training a Gaussian process](gp_training.py).
