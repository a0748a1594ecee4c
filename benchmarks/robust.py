"""Traces of zero, low-rank and tiny operators, by package.

    python benchmarks/run.py robust

Relative error, absolute for the zero operator, and in brackets the standard error
likewise: medians over 100 keys, and how many of them gave NaN, if any did. float32,
n = 200, k = 40.
"""

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import functions


N, K = 200, 40
KEYS = jax.random.split(jax.random.key(0), 100)


def matrices() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    low_rank = generator.standard_normal((N, 5))
    full = generator.standard_normal((N, N)) / np.arange(1, N + 1)
    found = {
        "zero": np.zeros((N, N)),
        "rank 5": low_rank @ low_rank.T,
        "times 1e-8": 1e-8 * full @ full.T,
    }
    return {name: matrix.astype(np.float32) for name, matrix in found.items()}


def cell(function, matrix) -> str:
    exact = np.trace(matrix, dtype=np.float64)
    size = exact or 1.0
    try:
        value, std_err = map(np.asarray, function(jnp.asarray(matrix), KEYS))
    except RuntimeError:  # of PyTorch
        return "error"
    lost = 100 * np.mean(np.isnan(value))
    if lost == 100:
        return "NaN"
    text = f"{np.nanmedian(np.abs(value - exact)) / size:.0e}"
    if not np.all(np.isnan(std_err)):
        text += f" ({np.nanmedian(std_err) / size:.0e})"
    return text + (f", NaN in {lost:.0f}%" if lost else "")


def main() -> None:
    found = matrices()
    print("| | " + " | ".join(found) + " |")
    print("|---" * (1 + len(found)) + "|")
    for estimator, function in functions(N, K, jnp.float32).items():
        cells = [cell(function, matrix) for matrix in found.values()]
        print(f"| {' '.join(estimator)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
