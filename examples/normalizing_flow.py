"""Normalizing flows, whose densities need a log-determinant or a trace of a Jacobian.

A flow maps data x to z, which is to be standard normal. Two of them:

- A residual flow z = x + g(x), four times over, each g a contraction, so that every block
  is invertible. log p(x) has the log-determinant of each block's Jacobian, which is not
  symmetric: `traceax.logdet` gives log |det| by Golub-Kahan.
- A continuous flow dx/dt = f(t, x), t from 0 to 1: log p(x) has the integral of the
  divergence tr(df/dx), by `traceax.trace` with the same probes at all times (FFJORD).

Each is trained by maximum likelihood twice from the same start, once with 4 probes for
each image and once with dense Jacobians. The data are the first 16 principal components
of scikit-learn's 1797 digits, scaled to variance 1; training is on 1198 of the images.
In so few dimensions dense Jacobians are cheap: they are here to compare with.

Run with `python examples/normalizing_flow.py`; it takes one to two minutes.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import optax
from jax.scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import traceax as tx


DIMENSION = 16
NUM_BLOCKS = 4


def contractive(mlp):
    """The MLP with all weights scaled to a spectral norm of 0.95 at most."""
    return eqx.tree_at(
        lambda mlp: [layer.weight for layer in mlp.layers],
        mlp,
        replace_fn=lambda w: w / jnp.maximum(jnp.linalg.norm(w, ord=2) / 0.95, 1),
    )


def residual_block(mlp, x):
    """z = x + g(x), and its Jacobian."""
    g = contractive(mlp)
    return x + g(x), lx.JacobianLinearOperator(lambda x, _: x + g(x), x)


def residual_flow(mlps, x, key, log_det):
    """log p(x), with `log_det(operator, key)`; `mlps` is one MLP with stacked arrays."""
    arrays, static = eqx.partition(mlps, eqx.is_array)

    def step(x, layer):
        arrays, key = layer
        z, jacobian = residual_block(eqx.combine(arrays, static), x)
        return z, log_det(jacobian, key)

    z, log_dets = jax.lax.scan(step, x, (arrays, jr.split(key, NUM_BLOCKS)))
    return jnp.sum(norm.logpdf(z)) + jnp.sum(log_dets)


def runge_kutta(f, y, num_steps=4):
    """y(1) for dy/dt = f(t, y) from y(0) by the classical rule of order 4."""
    h = 1 / num_steps

    def step(y, t):
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h / 2 * k1)
        k3 = f(t + h / 2, y + h / 2 * k2)
        k4 = f(t + h, y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    y, _ = jax.lax.scan(step, y, h * jnp.arange(num_steps))
    return y


def continuous_flow(mlp, x, key, trace, num_traces=1):
    """log p(x), with `trace(operator, key)`, which may give several values."""

    def derivative(t, state):
        f = lambda x, _: mlp(jnp.append(x, t))  # noqa: E731
        x = state[:DIMENSION]
        jacobian = lx.JacobianLinearOperator(f, x)
        # One key, and so the same probes, for all times.
        return jnp.append(f(x, None), trace(jacobian, key))

    state = runge_kutta(derivative, jnp.append(x, jnp.zeros(num_traces)))
    return jnp.sum(norm.logpdf(state[:DIMENSION])) + state[DIMENSION:].squeeze()


def exact_log_det(operator, key):
    return jnp.linalg.slogdet(operator.as_matrix())[1]


def estimated_log_det(operator, key):
    return tx.logdet(operator, k=4, num_steps=6, key=key).value


def exact_trace(operator, key):
    return jnp.trace(operator.as_matrix())


def estimated_trace(operator, key):
    return tx.trace(operator, tx.HutchinsonEstimator(), k=4, key=key).value


def log_densities(flow, images, key, log_density, functional):
    """log p of each image, each with a key of its own."""
    keys = jr.split(key, len(images))
    return jax.vmap(lambda x, key: log_density(flow, x, key, functional))(images, keys)


def train(flow, images, log_density, functional, num_updates=200):
    """The trained flow, and the seconds for an update."""
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, num_updates))

    @eqx.filter_jit
    def update(flow, state, key):
        key1, key2 = jr.split(key)
        batch = jr.choice(key1, images, (128,), replace=False)

        def loss(flow):
            return -jnp.mean(log_densities(flow, batch, key2, log_density, functional))

        updates, state = optimiser.update(eqx.filter_grad(loss)(flow), state)
        return eqx.apply_updates(flow, updates), state

    state = optimiser.init(eqx.filter(flow, eqx.is_inexact_array))
    jax.block_until_ready(update(flow, state, jr.key(0))[1])  # compiles
    start = time.perf_counter()
    for i in range(num_updates):
        flow, state = update(flow, state, jr.fold_in(jr.key(1), i))
    jax.block_until_ready(state)
    return flow, (time.perf_counter() - start) / num_updates


def compare_training(title, flow, images, test, log_density, exact, estimated):
    """Train both ways and print exact log-likelihoods; return the last flow."""
    evaluate = eqx.filter_jit(
        lambda flow, x: jnp.mean(log_densities(flow, x, jr.key(0), log_density, exact))
    )
    print(f"\n{title}: mean exact log-likelihood, d = {DIMENSION}")
    print(f"{'':<20}{'training':>10}{'test':>10}{'seconds/update':>17}")
    print(f"{'before training':<20}{evaluate(flow, images):>10.4f}", end="")
    print(f"{evaluate(flow, test):>10.4f}")
    for name, functional in [("estimates", estimated), ("dense Jacobians", exact)]:
        trained, seconds = train(flow, images, log_density, functional)
        print(f"{name:<20}{evaluate(trained, images):>10.4f}", end="")
        print(f"{evaluate(trained, test):>10.4f}{seconds:>17.4f}")
    return trained


def print_estimates(title, rows, exact):
    """`rows`: a name, and estimates and their standard errors for all test images."""
    print(f"\n{title:<28}{'first image':>13}{'std err':>9}{'exact':>9}", end="")
    print(f"{'all: rms error':>17}{'rms std err':>13}")
    for name, values, std_errs in rows:
        error = jnp.sqrt(jnp.mean((values - exact) ** 2))
        std_err = jnp.sqrt(jnp.mean(std_errs**2))
        print(f"{name:<28}{values[0]:>13.4f}{std_errs[0]:>9.4f}{exact[0]:>9.4f}", end="")
        print(f"{error:>17.4f}{std_err:>13.4f}")


def compare_log_dets(flow, images):
    """Of the Jacobian of the first block. The standard errors are traceax's own, which
    are cautious about few probes: wider than the textbook's, twofold for two."""
    mlp = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, flow)
    keys = jr.split(jr.key(4), len(images))
    exact = jax.vmap(lambda x: exact_log_det(residual_block(mlp, x)[1], None))(images)
    rows = []
    for k, num_steps in [(4, 2), (4, 6), (8, 6), (DIMENSION, 6)]:

        @jax.vmap
        def estimate(x, key, k=k, num_steps=num_steps):
            _, jacobian = residual_block(mlp, x)
            return tx.logdet(jacobian, k=k, num_steps=num_steps, key=key)

        solution = estimate(images, keys)
        rows.append((f"k={k}, num_steps={num_steps}", solution.value, solution.std_err))
    print_estimates("log |det J| of one block", rows, exact)


def compare_divergences(flow, images):
    """log p, from the integrals for the single probes, and their textbook standard error:
    errors at different times, of the same probes, are not independent."""
    exact = log_densities(flow, images, jr.key(5), continuous_flow, exact_trace)
    rows = []
    for estimator, k in [
        (tx.HutchinsonEstimator(), 2),
        (tx.HutchinsonEstimator(), 8),
        (tx.XTraceEstimator(), 8),
    ]:

        def samples(operator, key, estimator=estimator, k=k):
            return tx.trace(operator, estimator, k=k, key=key).stats["samples"]

        m = k if isinstance(estimator, tx.HutchinsonEstimator) else k // 2
        flow_of = lambda *args, m=m: continuous_flow(*args, num_traces=m)  # noqa: E731
        values = log_densities(flow, images, jr.key(6), flow_of, samples)
        std_err = jnp.std(values, axis=1, ddof=1) / m**0.5
        name = f"{type(estimator).__name__}, k={k}"
        rows.append((name, jnp.mean(values, axis=1), std_err))
    print_estimates("log p, continuous flow", rows, exact)


def main():
    pixels, _ = load_digits(return_X_y=True)
    components = PCA(DIMENSION, whiten=True).fit_transform(pixels)
    images = jr.permutation(jr.key(0), jnp.asarray(components, jnp.float32))
    images, test = images[:1198], images[1198:]

    def block(key):
        return eqx.nn.MLP(DIMENSION, DIMENSION, 64, 1, jnp.tanh, key=key)

    flow = eqx.filter_vmap(block)(jr.split(jr.key(2), NUM_BLOCKS))
    settings = (residual_flow, exact_log_det, estimated_log_det)
    flow = compare_training("Residual flow", flow, images, test, *settings)
    compare_log_dets(flow, test)

    flow = eqx.nn.MLP(DIMENSION + 1, DIMENSION, 64, 2, jnp.tanh, key=jr.key(3))
    settings = (continuous_flow, exact_trace, estimated_trace)
    flow = compare_training("Continuous flow", flow, images, test, *settings)
    compare_divergences(flow, test)


if __name__ == "__main__":
    main()
