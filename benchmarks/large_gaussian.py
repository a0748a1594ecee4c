"""A Gaussian process on 50,000 pixels of a photograph.

    python benchmarks/large_gaussian.py [n]

The kernel matrix is never formed. Beside it is a process on as many pixels as Cholesky
takes in the same memory. Hyperparameters come from exact training on 1500 of the pixels.
For all pixels: the log-likelihood with its error bar and gradient, the error at 5000
other pixels, time and peak memory.
"""

import resource
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
from sklearn.datasets import load_sample_image

import traceax as tx


ROWS = 250  # of the kernel matrix at a time
FEW, HIDDEN = 5000, 5000
RANK, PROBES, STEPS = 300, 8, 15


def kernel(x1, x2, length_scale, amplitude):
    """Matern, of smoothness 3/2."""
    squares = sum((x1[:, None, i] - x2[:, i]) ** 2 for i in range(x1.shape[1]))
    r = jnp.sqrt(3 * jnp.maximum(squares, 1e-12)) / length_scale
    return amplitude**2 * (1 + r) * jnp.exp(-r)


def product(x1, x2, params, v):
    """`kernel(x1, x2) @ v`, some rows at a time, forward and in reverse."""

    @jax.checkpoint
    def some(rows):
        return kernel(rows, x2, params[0], params[1]) @ v

    return jax.lax.map(some, x1.reshape(-1, ROWS, 2)).reshape(len(x1))


def covariance(x, params):
    structure = jax.ShapeDtypeStruct((len(x),), x.dtype)

    def mv(v):
        return product(x, x, params, v) + params[2] ** 2 * v

    return lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)


def exact(params, x, y):
    """Minus the log-likelihood, and the solution, by a Cholesky factorisation."""
    length_scale, amplitude, noise = jnp.exp(params)
    matrix = kernel(x, x, length_scale, amplitude) + noise**2 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(matrix)
    solution = jax.scipy.linalg.cho_solve((factor, True), y)
    log_det = 2 * jnp.sum(jnp.log(jnp.diag(factor)))
    return (y @ solution + log_det + len(x) * jnp.log(2 * jnp.pi)) / 2, solution


def train(x, y):
    optimiser = optax.adam(0.1)
    slope = jax.grad(exact, has_aux=True)

    def step(carry, _):
        params, state = carry
        updates, state = optimiser.update(slope(params, x, y)[0], state)
        return (optax.apply_updates(params, updates), state), None

    params = jnp.log(jnp.array([5.0, 1.0, 0.3]))
    start = params, optimiser.init(params)
    return jax.jit(lambda: jax.lax.scan(step, start, length=60)[0][0])()


@jax.jit
def value_and_slope(params, x, y, key):
    def log_prob(params):
        operator = covariance(x, jnp.exp(params))
        key1, key2 = jr.split(key)
        settings = {"shift": jnp.exp(2 * params[2]), "execution": tx.Local(RANK)}
        near = tx.nystrom_preconditioner(operator, RANK, key=key1, **settings)
        solver = lx.CG(rtol=1e-3, atol=1e-3, max_steps=500)
        settings = {"k": PROBES, "num_steps": STEPS, "key": key2, "throw": False}
        settings |= {"preconditioner": near, "solver": solver}
        solution = tx.gaussian_log_prob(operator, y, **settings)
        return solution.value, solution

    return jax.value_and_grad(log_prob, has_aux=True)(params)


def timed(fn: Callable, *args):
    """The result, and wall and CPU seconds, with those to compile."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = jax.block_until_ready(fn(*args))
    seconds = f"{time.perf_counter() - wall:.0f} s, {time.process_time() - cpu:.0f} s"
    return found, seconds


def main(n: int) -> None:
    photo = load_sample_image("china.jpg").mean(axis=2) / 255
    order = np.random.default_rng(0).permutation(photo.size)
    positions = np.indices(photo.shape).reshape(2, -1).T
    grey = (photo.ravel() - photo.mean()) / photo.std()
    x, y = (jnp.asarray(each[order], jnp.float32) for each in (positions, grey))
    few, seen, hidden = slice(0, FEW), slice(0, n), slice(n, n + HIDDEN)
    params = jax.block_until_ready(train(x[:1500], y[:1500]))

    def error(observed, solution):
        mean = product(x[hidden], x[observed], jnp.exp(params), solution)
        return jnp.sqrt(jnp.mean((mean - y[hidden]) ** 2))

    (cost, solution), seconds = timed(jax.jit(exact), params, x[few], y[few])
    length, amplitude, noise = jnp.exp(params)
    print(f"Length scale {length:.0f} pixels, amplitude {amplitude:.2f}, ", end="")
    print(f"noise {noise:.2f}:\n")
    print("| pixels | by | log-likelihood | error at others | wall, CPU time |")
    print("|---|---|---|---|---|")
    print(
        f"| {FEW} | Cholesky, no gradient | {-cost:.0f} | {error(few, solution):.3f} |",
        seconds,
        "|",
    )
    ((value, found), _), seconds = timed(
        value_and_slope, params, x[seen], y[seen], jr.key(0)
    )
    told = f"{value:.0f} +- {found.std_err:.0f} | {error(seen, found.stats['solve']):.3f}"
    print(f"| {n} | products, with the gradient | {told} |", seconds, "|\n")
    low, high = found.interval()
    steps, residual = found.stats["solve_steps"], found.stats["solve_residual"]
    print(f"Rank {RANK}, {PROBES} probes of {STEPS} steps, {steps} steps of the solve,")
    print(f"whose residual is {residual:.0e};")
    print(f"{found.stats['num_matvecs']} products, interval {low:.0f} to {high:.0f}.")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"Peak memory {memory:.2f} GB; the matrix would take {4 * n**2 / 2**30:.0f} GB."
    )


if __name__ == "__main__":
    main(*[int(each) for each in sys.argv[1:]] or [50_000])
