"""Stopping at a tolerance: how often the error is within it, and the cost.

    python benchmarks/adaptive.py [n] [keys]

For each estimator, spectrum and relative tolerance, at 95% confidence:

- `within`: the share of keys with an error below the tolerance, of those that reached it;
- `products`: their mean number of products;
- `best fixed budget`: the smallest, in rounds of 16 products, with which 95% of all keys
  have an error below the tolerance.

Cases in which fewer than half of the keys reached the tolerance within n / 2 products are
left out. Every tolerance has runs of its own, since it decides which rounds are tested.
Without the plans of Hutch++ and Nystrom++ the estimates after each round do not depend on
it, and those of the best fixed budget are from runs that no test ends.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from spectra import matrix_with, spectra

import traceax as tx


jax.config.update("jax_enable_x64", True)
# Arrays, of which all tolerances share a program.
TOLERANCES = np.array([1e-2, 1e-3, 1e-4])
ROUND = 16
# An estimator, and whether its estimates depend on the tolerance, for which it plans.
ESTIMATORS = {
    "Hutchinson": (tx.HutchinsonEstimator(), False),
    "XTrace": (tx.XTraceEstimator(), False),
    "XNysTrace": (tx.XNysTraceEstimator(), False),
    "Hutch++": (tx.HutchPlusPlusEstimator(), True),
    "Nystrom++": (tx.NystromPlusPlusEstimator(), True),
}


@eqx.filter_jit
def runs(matrix, estimator, rtol, keys, history=False):
    """The solutions for all keys."""
    budget = tx.Adaptive(
        rtol=rtol, max_k=len(matrix) // 2, round_size=ROUND, history=history
    )
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

    def one(key):
        # A function, of which no estimator is told the diagonal.
        function = lx.FunctionLinearOperator(
            operator.mv, operator.in_structure(), lx.positive_semidefinite_tag
        )
        return tx.trace(function, estimator, k=budget, key=key, throw=False)

    return jax.lax.map(one, keys)


def best_fixed_budgets(matrix, exact, estimator, keys):
    """For each tolerance the smallest budget with which 95% of all keys are within it, or
    an empty string."""
    solution = runs(matrix, estimator, np.array(1e-15), keys, history=True)
    off = jnp.abs(solution.stats["history"][..., 1] - exact) / exact
    good = [np.mean(np.asarray(off <= rtol), axis=0) >= 0.95 for rtol in TOLERANCES]
    return [
        str(ROUND * (int(np.argmax(each)) + 1)) if each.any() else "" for each in good
    ]


def main(n: int, num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(5), num_keys)
    print(f"n = {n}, {num_keys} keys\n")
    print("| estimator | spectrum | rtol | within | products | best fixed budget |")
    print("|---|---|---|---|---|---|")
    for name, (estimator, plans) in ESTIMATORS.items():
        for spectrum, eigenvalues in spectra(n).items():
            matrix, exact = matrix_with(eigenvalues), jnp.sum(eigenvalues)
            best = [""] * len(TOLERANCES)
            if not plans:
                best = best_fixed_budgets(matrix, exact, estimator, keys)
            for rtol, best_budget in zip(TOLERANCES, best, strict=True):
                solution = runs(matrix, estimator, rtol, keys)
                met = np.asarray(solution.result == tx.RESULTS.successful)
                if np.mean(met) < 0.5:
                    continue
                error = (solution.value[met] - exact) / exact
                within = np.mean(np.abs(error) <= rtol)
                products = np.mean(solution.stats["num_matvecs"][met])
                row = [name, spectrum, f"{rtol:.0e}", f"{within:.3f}", f"{products:.0f}"]
                print("| " + " | ".join([*row, best_budget]) + " |", flush=True)


if __name__ == "__main__":
    arguments = [int(each) for each in sys.argv[1:]]
    main(*arguments, *(400, 1000)[len(arguments) :])
