"""Derivatives of a log-determinant: traceax, matfree and PTSS.

    pip install matfree
    python benchmarks/function_gradients.py

The derivative in the length scale of RBF kernel matrices, float64. Matvecs are those of
value and gradient together: matfree makes 16 x 30 for the value, and as many in reverse.
Ours count products with the derivative of the matrix, one for each column of the frames,
and a preconditioner its sketch. Errors are root mean squares over keys, relative to the
exact derivative; times are CPU seconds of value and gradient, medians over the keys.

PTSS (Xu, Cai, Huang, Chow and Xi, arXiv:2510.24587) is our port, made from the abstract,
since the authors' code was not at hand. It has our preconditioner and control variate,
and the matvecs of its value are not counted.
"""

import time
from typing import ClassVar

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matfree import decomp, funm, stochtrace

import traceax as tx
from traceax.internal import AbstractFrame


jax.config.update("jax_enable_x64", True)
PSD = lx.positive_semidefinite_tag
# `K` probes have 60 matvecs each, or after a preconditioner and its derivative 40.
K, STEPS, RANK, FEWER = 16, 60, 160, 40


def matfree_logdet(n):
    integrand = funm.monte_carlo_funm_sym_logdet(
        decomp.tridiag_sym(STEPS // 2, reortho="full")
    )
    sampler = stochtrace.sampler_signs(jnp.ones(n), num=K)
    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
    made = K * STEPS // 2
    return lambda matrix, key: (estimate(lambda v, a: a @ v, key, matrix)[0], made)


def nystrom(matrix, noise, key):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    return tx.nystrom_preconditioner(operator, RANK, key=key, shift=noise)


def traceax_logdet(gradient, num_steps, noise=None, k=K):
    def logdet(matrix, key):
        key1, key2, key3 = jax.random.split(key, 3)
        solution = tx.logdet(
            lx.MatrixLinearOperator(matrix, PSD),
            k=k,
            num_steps=num_steps,
            key=key2,
            preconditioner=None if noise is None else nystrom(matrix, noise, key1),
            gradient=PTSS(key3) if gradient is PTSS else gradient,
            throw=False,
        )
        return solution.value, solution.stats["num_matvecs"]

    return logdet


def value_and_slope(logdet):
    def both(matrix, slope, key):
        both = jax.value_and_grad(logdet, has_aux=True)
        (_, num_matvecs), gradient = both(matrix, key)
        return num_matvecs, jnp.sum(gradient * slope)

    return both


class SampledSolves(AbstractFrame):
    """`A^-1 R` by conjugate gradients, as it is after `first + most` steps in the mean:
    after `first` of them, and one of the increments that follow over its probability."""

    right: jax.Array
    key: jax.Array
    first: int = FEWER - 2
    most: int = 10
    linear: ClassVar[bool] = False

    def left(self, operator):
        odds = 0.5 ** jnp.arange(self.most)
        odds = odds / jnp.sum(odds)

        def solve(z, key):
            drawn = jax.random.choice(key, self.most, p=odds)

            def step(index, carry):
                x, residual, direction, size = carry
                image = operator.fn(direction)
                length = size / jnp.vdot(direction, image)
                chosen = jnp.where(index == self.first + drawn, 1 / odds[drawn], 0)
                weight = jnp.where(index < self.first, 1, chosen)
                x = x + weight * length * direction
                residual = residual - length * image
                after = jnp.vdot(residual, residual)
                return x, residual, residual + after / size * direction, after

            start = jnp.zeros_like(z), z, z, jnp.vdot(z, z)
            return jax.lax.fori_loop(0, self.first + drawn + 1, step, start)[0]

        keys = jax.random.split(self.key, self.right.shape[1])
        return jax.vmap(solve, (1, 0), 1)(self.right, keys)


class PTSS(tx.AbstractFunctionGradient):
    key: jax.Array
    columns: ClassVar[int] = 1

    def frame(self, function, left, right, probes):
        return SampledSolves(probes, self.key)


def fixed_solves(num_steps):
    """Solves of as many steps, so that the products are known."""
    return tx.SolveGradient(lx.CG(rtol=0.0, atol=0.0, max_steps=num_steps))


def rows(n, noise):
    """Names, functions of the matrix, its derivative and a key, and the matvecs of the
    derivative."""
    lanczos = tx.LanczosGradient
    for c in (1, 4, 8):
        name = f"traceax, {STEPS - c} steps, columns={c}"
        yield name, traceax_logdet(lanczos(c), STEPS - c), K * c
    more = traceax_logdet(lanczos(), 44, k=20)
    yield "traceax, 20 probes of 44 steps, columns=4", more, 20 * 4
    chosen = traceax_logdet(lanczos(), tx.AdaptiveSteps())
    yield "traceax, steps left to the call", chosen, K * 4
    yield f"matfree, {STEPS // 2} steps", matfree_logdet(n), K * STEPS // 2
    half = STEPS // 2
    solved = traceax_logdet(fixed_solves(half), half)
    yield f"traceax, {half} steps, solves of {half}", solved, K * half
    for c in (4, 8):
        name = f"traceax, rank {RANK}, {FEWER - c} steps, columns={c}"
        yield name, traceax_logdet(lanczos(c), FEWER - c, noise), RANK + K * c
    half = FEWER // 2
    solved = traceax_logdet(fixed_solves(half), half, noise)
    name = f"traceax, rank {RANK}, {half} steps, solves of {half}"
    yield name, solved, RANK + K * half
    sampled = traceax_logdet(PTSS, 1, noise)
    name = f"PTSS (our port), rank {RANK}, {FEWER} steps in the mean"
    yield name, sampled, RANK + K * (FEWER - 1)


def compare(n, dimension, length, noise, num_keys):
    x = np.random.default_rng(0).uniform(size=(n, dimension))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    smooth = np.exp(-square / (2 * length**2))
    slope, matrix = smooth * square / length**3, smooth + noise * np.eye(n)
    exact = np.sum(np.linalg.inv(matrix) * slope)
    matrix, slope = jnp.asarray(matrix), jnp.asarray(slope)
    print(
        f"\nn = {n}, dimension {dimension}, length {length}, noise {noise}; "
        f"{num_keys} keys:\n"
    )
    print("| | matvecs | gradient error | CPU seconds | to compile |")
    print("|---|---|---|---|---|")
    for name, logdet, further in rows(n, noise):
        start = time.process_time()
        run = (
            jax.jit(value_and_slope(logdet))
            .lower(matrix, slope, jax.random.key(0))
            .compile()
        )
        compiling, errors, seconds = time.process_time() - start, [], []
        for key in jax.random.split(jax.random.key(1), num_keys):
            start = time.process_time()
            made, found = jax.block_until_ready(run(matrix, slope, key))
            seconds.append(time.process_time() - start)
            errors.append(float(found) / exact - 1)
        error = np.mean(np.square(errors)) ** 0.5
        print(
            f"| {name} | {int(made) + further} | {error:.4f} "
            f"| {np.median(seconds):.2f} | {compiling:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    compare(2500, 3, 0.3, 0.05, 12)
