"""The derivative of a log-determinant, against that of matfree.

    pip install matfree
    python benchmarks/function_gradients.py

RBF kernel matrices, in float64, 16 probes of 30 steps; the derivative in the length
scale. Errors are root mean squares over keys, relative to the exact derivative; times are
those of value and gradient together: CPU seconds, medians over the keys.
"""

import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matfree import decomp, funm, stochtrace

import traceax as tx


jax.config.update("jax_enable_x64", True)
PSD = lx.positive_semidefinite_tag
K, STEPS = 16, 30


def matfree_logdet(n):
    integrand = funm.monte_carlo_funm_sym_logdet(
        decomp.tridiag_sym(STEPS, reortho="full")
    )
    sampler = stochtrace.sampler_signs(jnp.ones(n), num=K)
    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
    return lambda matrix, key: estimate(lambda v, a: a @ v, key, matrix)[0]


def traceax_logdet(gradient):
    def logdet(matrix, key):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        settings = {"k": K, "num_steps": STEPS, "key": key, "gradient": gradient}
        return tx.logdet(operator, throw=False, **settings).value

    return logdet


def compare(n, dimension, length, noise, num_keys):
    x = np.random.default_rng(0).uniform(size=(n, dimension))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    smooth = np.exp(-square / (2 * length**2))
    slope, matrix = smooth * square / length**3, smooth + noise * np.eye(n)
    exact = np.sum(np.linalg.inv(matrix) * slope)
    matrix, slope = jnp.asarray(matrix), jnp.asarray(slope)
    functions = {
        f"traceax, columns={c}": traceax_logdet(tx.LanczosGradient(columns=c))
        for c in (1, 2, 4, 8)
    }
    functions["matfree"] = matfree_logdet(n)
    print(
        f"\nn = {n}, dimension {dimension}, length {length}, noise {noise}; "
        f"{num_keys} keys:\n"
    )
    print("| | gradient error | CPU seconds | to compile |\n|---|---|---|---|")
    for name, function in functions.items():

        def both(matrix, slope, key, function=function):
            value, gradient = jax.value_and_grad(function)(matrix, key)
            return value, jnp.sum(gradient * slope)

        start = time.process_time()
        run = jax.jit(both).lower(matrix, slope, jax.random.key(0)).compile()
        compiling, errors, seconds = time.process_time() - start, [], []
        for key in jax.random.split(jax.random.key(1), num_keys):
            start = time.process_time()
            _, found = jax.block_until_ready(run(matrix, slope, key))
            seconds.append(time.process_time() - start)
            errors.append(float(found) / exact - 1)
        error = np.mean(np.square(errors)) ** 0.5
        print(
            f"| {name} | {error:.3f} | {np.median(seconds):.2f} | {compiling:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    compare(2500, 3, 0.3, 0.05, 12)
    compare(2500, 2, 0.1, 0.1, 12)
