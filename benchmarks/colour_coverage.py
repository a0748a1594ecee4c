"""Coverage of intervals from a few sweeps of coloured probes.

    python benchmarks/run.py colour_coverage

The share of 95% intervals that cover the trace and, after the comma, the entries of the
diagonal; in brackets the root mean square of the standard error of the trace over its
root-mean-square error.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
SIDE, SWEEPS = 24, (2, 3)
BASES = {"signs": tx.RademacherSampler(), "normal": tx.NormalSampler()}


def function_of(fn, matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * fn(values) @ vectors.T


def operators():
    """The matrices and their colours."""
    ring = 2 * np.eye(SIDE) - np.roll(np.eye(SIDE), 1, 0) - np.roll(np.eye(SIDE), -1, 0)
    grid = np.kron(ring, np.eye(SIDE)) + np.kron(np.eye(SIDE), ring)
    eye = np.eye(SIDE**2)
    few, many = (tx.grid_colours((SIDE, SIDE), p, periodic=True).ravel() for p in (4, 16))
    yield "log(-Laplace + 0.1), 16 colours", function_of(np.log, grid + 0.1 * eye), many
    yield "log(-Laplace + 1), 4 colours", function_of(np.log, grid + eye), few
    yield "inverse of -Laplace + 0.1, 16 colours", np.linalg.inv(grid + 0.1 * eye), many
    points = np.sort(np.random.default_rng(0).uniform(size=400))
    distance = 3**0.5 * 20 * np.abs(points[:, None] - points)
    kernel = (1 + distance) * np.exp(-distance) + 0.01 * np.eye(400)
    yield (
        "log of a Matern-3/2 kernel, 32 colours",
        function_of(np.log, kernel),
        (np.arange(400) % 32),
    )


@eqx.filter_jit
def measure(matrix, estimator, k, keys):
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)

    def covers(solution, exact):
        low, high = solution.interval()
        return (low <= exact + 1e-12) & (exact - 1e-12 <= high)

    def one(key):
        trace = tx.trace(operator, estimator, k=k, key=key)
        diagonal = tx.diagonal(operator, estimator, k=k, key=key)
        entries = jnp.diag(matrix)
        shares = covers(trace, jnp.sum(entries)), jnp.mean(covers(diagonal, entries))
        return *shares, trace.std_err**2, (trace.value - jnp.sum(entries)) ** 2

    return jax.lax.map(one, keys, batch_size=20)


def main(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(7), num_keys)
    columns = [(base, sweeps) for base in BASES for sweeps in SWEEPS]
    print(f"\n{num_keys} keys:\n")
    print("| |" + "".join(f" {base}, {sweeps} sweeps |" for base, sweeps in columns))
    print("|---|" + "---|" * len(columns))
    for name, matrix, colours in operators():
        cells = []
        for base, sweeps in columns:
            sampler = tx.ColouredSampler(colours, BASES[base])
            estimator, k = tx.HutchinsonEstimator(sampler), sweeps * sampler.num_colours
            values = measure(jnp.asarray(matrix), estimator, k, keys)
            trace, entries, bar, error = map(jnp.mean, values)
            cells.append(f"{trace:.2f}, {entries:.2f} ({jnp.sqrt(bar / error):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
