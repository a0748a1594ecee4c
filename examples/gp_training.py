"""Gaussian process regression, trained without a factorisation of the kernel matrix.

The logarithm of the marginal likelihood of a Gaussian process,

    -(y^T A^-1 y + log det A + n log 2 pi) / 2,    A = amplitude^2 K + noise^2 I,

needs a linear solve and a log-determinant. Here the first is by conjugate gradients and
the second by `traceax.logdet`: both see A through products with vectors alone, and share
one preconditioner. From the same start and with the same optimiser, the same training by
Cholesky factorisations, to see whether the noise of the estimates matters.

Two data sets of scikit-learn, which comes with them:

- diabetes: the progress of the disease in 442 patients from 10 features, standardised.
- digits: one pixel near the centre of a handwritten digit from the 63 others, for 1000 of
  the 1797 images. Not a regression that the set was made for, but a real one. Only the
  target is standardised; the other pixels are scaled to between 0 and 1.

The kernel is K_ij = exp(-|x_i - x_j|^2 / (2 lengthscale^2)); everything is in float64.
Both matrices are small enough to be stored, or there would be nothing to compare with.

Run with `python examples/gp_training.py [directory of the plot]`; it takes about a
minute.
"""

import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import pairwise_distances

import traceax as tx


jax.config.update("jax_enable_x64", True)

NUM_UPDATES = 120
NAMES = ["lengthscale", "amplitude", "noise"]  # `params` are their logarithms


def standardise(x):
    return (x - x.mean(axis=0)) / x.std(axis=0)


def diabetes():
    features, target = load_diabetes(return_X_y=True)
    return standardise(features), standardise(target)


def digits():
    images, _ = load_digits(return_X_y=True)
    images = np.random.default_rng(0).permutation(images)[:1000]
    pixel = 8 * 4 + 4
    return np.delete(images, pixel, axis=1) / 16, standardise(images[:, pixel])


def covariance(params, squares):
    """A, from the squared distances of the points, and the variance of the noise."""
    lengthscale, amplitude, noise = jnp.exp(params)
    kernel = amplitude**2 * jnp.exp(-squares / (2 * lengthscale**2))
    return kernel + noise**2 * jnp.eye(len(squares)), noise**2


def log_likelihood(quadratic, logdet, n):
    return -(quadratic + logdet + n * jnp.log(2 * jnp.pi)) / 2


@jax.jit
def by_cholesky(params, squares, y, key=None):
    matrix, _ = covariance(params, squares)
    factor = jnp.linalg.cholesky(matrix)
    half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    return log_likelihood(half @ half, 2 * jnp.sum(jnp.log(jnp.diag(factor))), y.size)


@jax.jit
def by_products(params, squares, y, key):
    matrix, noise = covariance(params, squares)
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    key1, key2 = jr.split(key)
    preconditioner = tx.nystrom_preconditioner(operator, 100, key=key1, shift=noise)
    options = {"preconditioner": preconditioner.inverse()}
    solver = lx.CG(rtol=1e-6, atol=1e-6)
    solved = lx.linear_solve(operator, y, solver, options=options)
    logdet = tx.logdet(
        operator, k=10, num_steps=20, key=key2, preconditioner=preconditioner
    )
    return log_likelihood(y @ solved.value, logdet.value, y.size)


def train(likelihood, squares, y):
    """The hyperparameters before, between and after the updates, the likelihood that each
    update saw, and the seconds that one took."""
    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, NUM_UPDATES))

    def loss(params, key):
        return -likelihood(params, squares, y, key) / y.size

    @jax.jit
    def update(params, state, key):
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, -y.size * value

    params = jnp.zeros(3)
    state = optimiser.init(params)
    jax.block_until_ready(update(params, state, jr.key(0)))  # compiles
    trajectory, seen = [params], []
    start = time.perf_counter()
    for i in range(NUM_UPDATES):
        params, state, value = update(params, state, jr.fold_in(jr.key(1), i))
        trajectory.append(params)
        seen.append(value)
    jax.block_until_ready(params)
    seconds = (time.perf_counter() - start) / NUM_UPDATES
    return jnp.stack(trajectory), jnp.stack(seen), seconds


def compare(title, x, y, axes):
    """Train both ways, print a table, and draw into two axes."""
    squares = jnp.asarray(pairwise_distances(x, metric="sqeuclidean"))
    y = jnp.asarray(y)
    print(f"\n{title}: n = {y.size}, {x.shape[1]} features, {NUM_UPDATES} updates")
    print(f"{'':<22}" + "".join(f"{name:>13}" for name in NAMES), end="")
    print(f"{'log likelihood':>17}{'seconds/update':>17}")

    ends = []
    left, right = axes
    for likelihood, name, line in [
        (by_cholesky, "Cholesky", {"alpha": 0.4, "linewidth": 4}),
        (by_products, "CG and traceax.logdet", {"color": "black", "linestyle": "--"}),
    ]:
        trajectory, seen, seconds = train(likelihood, squares, y)
        exact = jnp.stack([by_cholesky(params, squares, y) for params in trajectory])
        ends.append(jnp.append(jnp.exp(trajectory[-1]), exact[-1]))
        print(f"{name:<22}" + "".join(f"{each:>13.5f}" for each in ends[-1][:3]), end="")
        print(f"{exact[-1]:>17.4f}{seconds:>17.3f}")
        left.plot(exact, label=f"exact, updates by {name}", **line)
        right.set_prop_cycle(None)
        for values, hyperparameter in zip(jnp.exp(trajectory.T), NAMES, strict=True):
            label = hyperparameter if likelihood is by_cholesky else None
            right.plot(values, label=label, **line)

    difference = jnp.abs(ends[1] / ends[0] - 1)
    print(f"{'relative difference':<22}", end="")
    print("".join(f"{each:>13.5f}" for each in difference[:3]), end="")
    print(f"{difference[3]:>17.1e}")
    error = jnp.sqrt(jnp.mean((seen - exact[:-1]) ** 2))
    print(f"The likelihoods that the updates saw were off by {error:.2f} (rms).")

    left.plot(seen, ".", color="tab:red", markersize=4, label="estimates", zorder=0)
    left.set(title=title, xlabel="update", ylabel="log marginal likelihood")
    right.set(title=title, xlabel="update", ylabel="hyperparameter", yscale="log")
    left.legend()
    right.legend(loc="center right", title="lines as on the left")


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    compare("diabetes", *diabetes(), axes[0])
    compare("digits", *digits(), axes[1])
    path = pathlib.Path(directory) / "gp_training.png"
    figure.savefig(path, dpi=120)
    print(f"\nThe trajectories are drawn in {path}")


if __name__ == "__main__":
    main()
