"""Coverage of error bars of traces, by estimator and number of samples.

    python benchmarks/run.py calibration

How often the 95% interval (Student's quantile for m - 1 degrees of freedom, m samples)
covers the exact trace; in brackets the mean standard error over the root-mean-square
error: 1 is exact, more is cautious. The published error bars of XTrace and XNysTrace are
`std(samples) / sqrt(m)`.
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
from scipy.stats import t as student
from spectra import ESTIMATORS, matrix_with, spectra

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, PROBES = 300, (3, 5, 10, 20, 30, 60)
BARS = {"std.err": "", "jackknife_std_err": ", jackknife"}
BARS |= {"independent_std_err": ", published"}


def estimate(estimator, k):
    """`(matrix, keys) -> (values, stats)`"""

    def one(matrix, key):
        structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
        tag = lx.positive_semidefinite_tag
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)
        solution = tx.trace(operator, estimator, k=k, key=key, throw=False)
        return solution.value, solution.stats

    return jax.jit(lambda a, keys: jax.lax.map(lambda key: one(a, key), keys))


def main(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(3), num_keys)
    matrices = {name: matrix_with(each) for name, each in spectra(N).items()}
    rows = {name: {} for name in matrices}
    for name, (estimator, factor) in ESTIMATORS.items():
        for m in PROBES:
            run, quantile = estimate(estimator, factor * m), student.ppf(0.975, m - 1)
            for spectrum, matrix in matrices.items():
                values, stats = run(matrix, keys)
                error = jnp.abs(values - jnp.sum(spectra(N)[spectrum]))
                for bar, label in BARS.items():
                    if bar in stats:
                        covered = jnp.mean(error <= quantile * stats[bar])
                        ratio = jnp.mean(stats[bar]) / jnp.sqrt(jnp.mean(error**2))
                        cell = f"{covered:.2f} ({ratio:.2f})"
                        rows[spectrum].setdefault(name + label, []).append(cell)
    for spectrum, table in rows.items():
        print(f"\n{spectrum}, n = {N}, {num_keys} keys; number of samples:\n")
        print("| |" + "".join(f" {m} |" for m in PROBES))
        print("|---|" + "---|" * len(PROBES))
        for label, cells in table.items():
            print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
