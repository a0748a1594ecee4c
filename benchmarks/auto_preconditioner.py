"""Preconditioners chosen automatically and by hand, for log-determinants.

    python benchmarks/auto_preconditioner.py

Products to a relative tolerance with 95% confidence, for RBF kernels of random points
plus noise, in float64. By hand: the rank, probes and steps with the fewest products for
which 95% of the keys are within the tolerance, chosen with the exact value, which a user
does not have. Automatic: `AutoPreconditioner` with the noise and `Adaptive` with the
tolerance; mean and range over the keys.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
PSD = lx.positive_semidefinite_tag
KEYS = jax.random.split(jax.random.key(0), 12)
# n, dimension, length scale, noise, tolerance, ranks by hand
CASES = [
    (4000, 2, 0.2, 1e-2, 1e-6, (120, 128, 136)),
    (2000, 2, 0.2, 1e-4, 1e-6, (152, 160, 168)),
    (2000, 3, 0.5, 1e-2, 1e-6, (168, 176, 184)),
    (2000, 2, 0.2, 1e-2, 1e-3, (48, 56, 64)),
]


def rbf(n, dimension, length, noise):
    x = np.random.default_rng(0).uniform(size=(n, dimension))
    square = np.sum(x**2, axis=1)
    square = np.maximum(square[:, None] + square - 2 * x @ x.T, 0)
    return np.exp(-square / (2 * length**2)) + noise * np.eye(n)


def by_hand(matrix, noise, rtol, exact, ranks, steps=(1, 2, 3), most=16):
    """The fewest products, and rank, probes and steps of that call."""

    def samples(matrix, key, rank, steps):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        key1, key2 = jax.random.split(key)
        outer = tx.nystrom_preconditioner(operator, rank, key=key1, shift=noise)
        settings = {"num_steps": steps, "preconditioner": outer, "key": key2}
        return tx.logdet(operator, k=most, **settings).stats["samples"]

    samples = jax.jit(samples, static_argnums=(2, 3))
    best = (np.inf,)
    for rank in ranks:
        for number in steps:
            each = np.stack([samples(matrix, key, rank, number) for key in KEYS])
            means = np.cumsum(each, axis=1) / np.arange(1, most + 1)
            errors = np.quantile(np.abs(means / exact - 1), 0.95, axis=0)
            enough = np.flatnonzero(errors <= rtol)
            if len(enough):
                k = int(enough[0]) + 1
                best = min(best, (rank + k * number, rank, k, number))
    return best


def main():
    print("| n, dimension, length, noise | tolerance | by hand", end=" | ")
    print("automatic | range | ratio | within |\n" + "|---" * 7 + "|")
    for *problem, rtol, ranks in CASES:
        matrix, noise = rbf(*problem), problem[-1]
        exact = np.linalg.slogdet(matrix)[1]

        @jax.jit
        def automatic(matrix, key, noise=noise, rtol=rtol):
            solution = tx.logdet(
                lx.MatrixLinearOperator(matrix, PSD),
                k=tx.Adaptive(rtol=rtol, max_k=320),
                preconditioner=tx.AutoPreconditioner(noise),
                key=key,
            )
            return solution.value, solution.stats["num_matvecs"]

        matrix = jnp.asarray(matrix)
        total, rank, k, steps = by_hand(matrix, noise, rtol, exact, ranks)
        found = np.array([automatic(matrix, key) for key in KEYS])
        values, products = found.T
        within = np.mean(np.abs(values / exact - 1) <= rtol)
        print(
            f"| {', '.join(map(str, problem))} | {rtol:.0e} | {rank} + {k} x {steps} = "
            f"{total} | {products.mean():.0f} | {products.min():.0f} to "
            f"{products.max():.0f} | {products.mean() / total:.2f} | {within:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
