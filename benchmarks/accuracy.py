"""Mean relative error at 30, 90, 150 and 300 products, n = 1000, as a markdown table.

python benchmarks/accuracy.py [keys]
"""

import sys

import jax
import jax.numpy as jnp
from spectra import ESTIMATORS, matrix_with, spectra, trace_many


jax.config.update("jax_enable_x64", True)
BUDGETS = (30, 90, 150, 300)


def main(num_keys: int) -> None:
    print("| spectrum | " + " | ".join(ESTIMATORS) + " |")
    print("|---" * (1 + len(ESTIMATORS)) + "|")
    for name, eigenvalues in spectra(1000).items():
        matrix, exact = matrix_with(eigenvalues), jnp.sum(eigenvalues)
        cells = []
        for estimator, _ in ESTIMATORS.values():
            errors = []
            for k in BUDGETS:
                value, _, _ = trace_many(matrix, estimator, k, num_keys)
                errors.append(float(jnp.mean(jnp.abs(value - exact)) / exact))
            cells.append(" / ".join(f"{error:.1e}" for error in errors))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
