"""Products to a tolerance for a nuclear norm: Chen and Hallman (arXiv 2205.01736).

    PYTHONPATH=benchmarks python benchmarks/published/krylov_aware.py [keys]

The trace of the square root of a matrix with eigenvalues `i**-1.5`, n = 2500, to a
relative tolerance of `2**-p` with 95% confidence. Theirs are the means of 100 stored runs
in their repository, tchen-research/krylov_aware_trace, `fig_adaptive_synth.ipynb`, with
blocks of two vectors and 50 steps: Krylov-aware deflation, and adaptive Hutch++ on the
square root. Ours have blocks of two vectors and 20 steps, which are enough here. The
matrix is diagonal in both, but ours know it as a function only.
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from tables import head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, STEPS, EXACT = 2500, 20, 24.844400003368424
# By p: products of Krylov-aware deflation and of adaptive Hutch++.
THEIRS = {
    2: (266, 516),
    3: (335, 719),
    4: (479, 1322),
    5: (747, 3012),
    6: (1270, 6881),
    7: (2199, 15941),
}


def ours(eigenvalues, rtol, keys):
    structure = jax.ShapeDtypeStruct(eigenvalues.shape, eigenvalues.dtype)
    operator = lx.FunctionLinearOperator(
        lambda v: eigenvalues * v, structure, lx.positive_semidefinite_tag
    )
    k = tx.Adaptive(rtol=rtol, max_k=64, round_size=8, min_samples=8)

    def one(key):
        settings = {"k": k, "num_steps": STEPS, "key": key, "throw": False}
        found = tx.trace_of_function(
            operator, tx.Power(0.5), tx.KrylovAwareEstimator(), **settings
        )
        met = found.result == tx.RESULTS.successful
        return found.value, found.stats["num_matvecs"], met

    return jax.lax.map(one, keys)


def main(num_keys: int) -> None:
    eigenvalues = jnp.arange(1.0, N + 1) ** -1.5
    run = jax.jit(ours)
    print(f"{num_keys} keys\n")
    head("p", "adaptive Hutch++", "theirs", "ours", "range", "ratio", "missed", "failed")
    for p, (theirs, hutchpp) in THEIRS.items():
        keys = jax.random.split(jax.random.key(p), num_keys)
        values, spent, met = run(eigenvalues, 2.0**-p, keys)
        missed = np.mean(np.abs(values / EXACT - 1) > 2.0**-p)
        mean = np.mean(spent)
        cells = f"{mean:.0f}", f"{min(spent)} to {max(spent)}", f"{mean / theirs:.2f}"
        last = f"{missed:.2f}", f"{1 - np.mean(met):.2f}"
        row(str(p), str(hutchpp), str(theirs), *cells, *last)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
