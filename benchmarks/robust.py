"""Operators that are zero, of low rank, or tiny, in float32: ours and the JAX peers.

    python benchmarks/run.py robust

Relative error, and in brackets the standard error relative to the trace, medians over
keys; how many of a hundred keys gave NaN, if any did. n = 200, k = 40.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import by_jax, make_operator, ours
from peers import peer_functions
from spectra import ESTIMATORS


N, K = 200, 40
KEYS = jax.random.split(jax.random.key(0), 100)


def matrices() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    low_rank = generator.standard_normal((N, 5))
    full = generator.standard_normal((N, N)) / np.arange(1, N + 1)
    return {
        "zero": np.zeros((N, N)),
        "rank 5": low_rank @ low_rank.T,
        "times 1e-8": 1e-8 * full @ full.T,
    }


def cell(value, std_err, exact) -> str:
    value, std_err = np.asarray(value, float), np.asarray(std_err, float)
    lost = 100 * np.mean(np.isnan(value))
    if lost == 100:
        return "NaN"
    size = exact or 1.0
    error = np.nanmedian(np.abs(value - exact)) / size
    bar = np.nanmedian(std_err) / size
    text = f"{error:.0e} ({bar:.0e})".replace("0e+00", "0").replace(" (nan)", "")
    return text + (f", NaN in {lost:.0f}" if lost else "")


def main() -> None:
    functions = {name: partial(ours, each, K) for name, (each, _) in ESTIMATORS.items()}
    peers = peer_functions(make_operator, lambda v, a: a @ v, N, K)
    found = matrices()
    print("| | " + " | ".join(found) + " |")
    print("|---" * (1 + len(found)) + "|")
    for package, estimators in ({"traceax 2.0": functions} | peers).items():
        for name, function in estimators.items():
            run = by_jax(function)
            cells = []
            for matrix in found.values():
                matrix = matrix.astype(np.float32)
                exact = float(np.trace(matrix.astype(np.float64)))
                cells.append(cell(*run(jnp.asarray(matrix), KEYS), exact))
            print(f"| {package} {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
