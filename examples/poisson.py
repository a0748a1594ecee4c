# %% [markdown]
# # Solve a differential equation in 100 dimensions
#
# This tutorial trains a network on a differential equation, with Laplacians from a few
# random directions instead of all.
#
# The equation is Poisson's, $-\Delta u = f$ in the unit ball of 100 dimensions, with
# $u = 0$ on the boundary. A grid is out of the question. But a network $u_\theta$ can
# be trained until its residual $\Delta u_\theta + f$ is small at random points. The
# exact Laplacian takes 100 directions at each point. `tx.laplacian` takes a few random
# ones, as Hu, Shi, Karniadakis and Kawaguchi did (arXiv 2312.14499, 2023), and never
# forms a Hessian.

# %%
import functools as ft
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import optax

import traceax as tx


dimension, num_points, num_updates = 100, 64, 900

# %% [markdown]
# ## The problem
#
# The solution is known, so that errors can be measured: $u = (1 - |x|^2) \sum_i c_i
# \sin(x_i + \cos x_{i+1} + x_{i+1} \cos x_i)$, with random $c_i$. Its Laplacian gives
# $f$ at 20,000 random points with uniform radius.

# %%
coefficients = jr.normal(jr.key(0), (dimension - 1,)) / dimension**0.5


def solution(x):
    left, right = x[:-1], x[1:]
    waves = jnp.sin(left + jnp.cos(right) + right * jnp.cos(left))
    return (1 - x @ x) * (coefficients @ waves)


def source(x):
    return -tx.laplacian(solution, x)[2].value


def draw_points(key, count):
    key1, key2 = jr.split(key)
    normal = jr.normal(key1, (count, dimension))
    directions = normal / jnp.linalg.norm(normal, axis=1, keepdims=True)
    return directions * jr.uniform(key2, (count, 1))


pool = draw_points(jr.key(1), 20_000)
sources = jax.jit(lambda x: jax.lax.map(source, x, batch_size=100))(pool)


def approximation(network, x):
    """A network that is zero on the boundary."""
    return (1 - x @ x) * network(x)


# %% [markdown]
# ## The loss
#
# The square of an estimated residual is biased: on average it is too large by the
# variance of the estimate. The product of two independent estimates is not. So we draw
# the directions twice, with two keys. The mean of the products is an unbiased estimate
# of the mean squared residual, and its gradient is unbiased too.


# %%
def loss(network, points, sources, key, k):
    """The mean squared residual, from twice k random directions, or exact."""
    fn = ft.partial(approximation, network)

    def residual(x, source, key):
        return tx.laplacian(fn, x, k=k, key=key)[2].value + source

    def residuals(key):
        return jax.vmap(residual)(points, sources, jr.split(key, len(points)))

    key1, key2 = jr.split(key)
    return jnp.mean(residuals(key1) * residuals(key2))


# %% [markdown]
# ## Training
#
# Adam takes 64 points in each update, with 4 + 4 directions or with all 100.


# %%
test_points = draw_points(jr.key(2), 2000)
exact = jax.vmap(solution)(test_points)


def test_error(network):
    """Relative, in the two-norm."""
    found = jax.vmap(ft.partial(approximation, network))(test_points)
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, num_updates))


@eqx.filter_jit
def train(network, state, keys, k):
    """One update for each key."""
    arrays, static = eqx.partition(network, eqx.is_inexact_array)

    def update(carry, key):
        arrays, state = carry
        key1, key2 = jr.split(key)
        chosen = jr.choice(key1, len(pool), (num_points,), replace=False)
        points = pool[chosen], sources[chosen]
        gradient = jax.grad(lambda a: loss(eqx.combine(a, static), *points, key2, k))
        updates, state = optimiser.update(gradient(arrays), state)
        return (optax.apply_updates(arrays, updates), state), None

    (arrays, state), _ = jax.lax.scan(update, (arrays, state), keys)
    network = eqx.combine(arrays, static)
    return network, state, test_error(network)


# %%
start = eqx.nn.MLP(dimension, "scalar", 128, 3, jnp.tanh, key=jr.key(3))
keys = jr.split(jr.key(4), (30, num_updates // 30))
curves, trained = {}, {}
for name, k in {"4 + 4 random directions": 4, "all 100 directions": None}.items():
    network, state = start, optimiser.init(eqx.filter(start, eqx.is_inexact_array))
    jax.block_until_ready(train(network, state, keys[0], k))  # compiles
    seconds, errors, begin = [], [], time.perf_counter()
    for some in keys:
        network, state, error = train(network, state, some, k)
        errors.append(float(error))
        seconds.append(time.perf_counter() - begin)
    curves[name], trained[name] = (seconds, errors), network
    print(f"{name:<24} error {errors[-1]:.4f} after {seconds[-1]:.0f} s")

# %%
figure, (left, right) = plt.subplots(1, 2, layout="constrained", figsize=(9, 3.8))
for name, (seconds, errors) in curves.items():
    left.semilogy(seconds, errors, label=name)
left.set(xlabel="seconds", ylabel="relative error")
left.legend()
network = trained["4 + 4 random directions"]
found = jax.vmap(ft.partial(approximation, network))(test_points)
right.plot(exact, found, ".", markersize=2)
right.axline((0, 0), slope=1, color="k", linestyle="--")
right.set(xlabel="exact solution", ylabel="4 + 4 random directions")
plt.show()

# %% [markdown]
# Both trainings end at about the same error: the gradient is noisy anyway, from 64
# random points, and the random directions do no further harm. They take a fraction of
# the time. With `k=4` only the cost of the first layer depends on the dimension, so
# they save more in higher dimensions.
