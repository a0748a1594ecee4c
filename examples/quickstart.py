"""Traces of matrices that are never stored, on scikit-learn's handwritten digits.

First a kernel matrix and its regularised inverse, of which only products with vectors
are known; then the Hessian of the loss of a small neural network. Each problem is small
enough that the exact trace can be had, to see how far off the estimates are and whether
the standard errors tell.

Run with `python examples/quickstart.py`; it takes about a minute.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
from sklearn.datasets import load_digits

import traceax as tx


ANY = [tx.HutchinsonEstimator(), tx.HutchPlusPlusEstimator(), tx.XTraceEstimator()]
SEMIDEFINITE = [tx.NystromPlusPlusEstimator(), tx.XNysTraceEstimator()]


def compare(title, operator, k, exact):
    """Estimate one trace by every estimator that applies, and print a table."""
    estimators = [*ANY, tx.AutoTraceEstimator()]
    if lx.is_positive_semidefinite(operator):
        estimators = [*ANY, *SEMIDEFINITE, tx.AutoTraceEstimator()]

    print(f"\n{title}: n = {operator.in_size()}")
    print(f"{'estimator':<28}{'k':>5}{'estimate':>12}{'std err':>10}", end="")
    print(f"{'exact':>12}{'error/std err':>15}{'seconds':>9}")
    for estimator in estimators:
        solution = tx.trace(operator, estimator, k=k, key=jr.key(0))  # compiles
        start = time.perf_counter()
        solution = tx.trace(operator, estimator, k=k, key=jr.key(1))
        value, std_err = float(solution.value), float(solution.std_err)
        seconds = time.perf_counter() - start

        name = type(estimator).__name__
        if isinstance(estimator, tx.AutoTraceEstimator):
            chosen = type(tx.select_trace_estimator(operator, k)).__name__
            name = f"Auto: {chosen}"
        print(f"{name:<28}{k:>5}{value:>12.4f}{std_err:>10.4f}", end="")
        print(f"{exact:>12.4f}{(value - exact) / std_err:>15.2f}{seconds:>9.2f}")


def kernel_matrices(images, noise=1.0):
    """The RBF kernel matrix K of the images, and (K + noise I)^{-1}."""
    n = images.shape[0]
    vector = jax.ShapeDtypeStruct((n,), images.dtype)
    norms = jnp.sum(images**2, axis=1)

    def row(image):
        """One row of K, of length scale 2: images are about 3 from each other."""
        squares = norms + image @ image - 2 * images @ image
        return jnp.exp(-squares / (2 * 2.0**2))

    def multiply(v):
        """K v, from 256 rows at a time: K itself is not stored."""
        return jax.lax.map(lambda image: row(image) @ v, images, batch_size=256)

    kernel = lx.FunctionLinearOperator(multiply, vector, lx.positive_semidefinite_tag)
    regularised = lx.FunctionLinearOperator(
        lambda v: multiply(v) + noise * v, vector, lx.positive_semidefinite_tag
    )
    # A product with the inverse is the solution of a linear system, here by conjugate
    # gradients, which need nothing but products either.
    cg = lx.CG(rtol=1e-4, atol=1e-4)
    inverse = lx.FunctionLinearOperator(
        lambda v: lx.linear_solve(regularised, v, cg).value,
        vector,
        lx.positive_semidefinite_tag,
    )

    dense = np.asarray(jax.lax.map(row, images, batch_size=256), np.float64)
    compare("RBF kernel matrix K", kernel, 60, np.trace(dense))
    exact = np.trace(np.linalg.inv(dense + noise * np.eye(n)))
    # Nearly the identity: on a flat spectrum like this one, plain Hutchinson is best.
    compare("Regularised inverse (K + I)^-1", inverse, 60, exact)


def network_hessian(images, labels):
    """The Hessian of the loss of a trained network, whose parameters are a PyTree."""

    def loss(model):
        logits = jax.vmap(model)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    model = eqx.nn.MLP(64, 10, width_size=16, depth=1, key=jr.key(2))
    optimiser = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss)(model)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(100):
        model, state = step(model, state)

    hessian = tx.hessian(loss, model)
    # With a budget of n products or more, any estimator gives the exact trace.
    exact = tx.trace(hessian, k=hessian.in_size()).value
    compare("Hessian of the loss of a 64-16-10 MLP", hessian, 60, float(exact))


def main():
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.asarray(pixels / 16, jnp.float32)
    kernel_matrices(images)
    network_hessian(images, jnp.asarray(labels))


if __name__ == "__main__":
    main()
