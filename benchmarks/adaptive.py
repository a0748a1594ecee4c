"""Stopping at a tolerance: how often the error is within it, and the cost.

    python benchmarks/adaptive.py [n] [keys]

For each estimator, spectrum and relative tolerance, at 95% confidence:

- `within`: the share of keys with an error below the tolerance, of those that reached it;
- `products`: their mean number of products;
- `best fixed budget`: the smallest, in rounds of 16 products, with which 95% of all keys
  have an error below the tolerance.

Cases in which fewer than half of the keys reached the tolerance within n / 2 products are
left out. The rounds of a run do not depend on the tolerance, so one run with `history`
has all of them; Hutch++ and Nystrom++, which plan for the tolerance, run for each.
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from spectra import matrix_with, spectra

import traceax as tx


jax.config.update("jax_enable_x64", True)
TOLERANCES = (1e-2, 1e-3, 1e-4)
ROUND = 16
# An estimator and its samples for each product; None where it depends on the run.
ESTIMATORS = {
    "Hutchinson": (tx.HutchinsonEstimator(), 1.0),
    "XTrace": (tx.XTraceEstimator(), 0.5),
    "XNysTrace": (tx.XNysTraceEstimator(), 1.0),
    "Hutch++": (tx.HutchPlusPlusEstimator(), None),
    "Nystrom++": (tx.NystromPlusPlusEstimator(), None),
}


def histories(matrix, estimator, rtol, keys):
    """For each key the products, value and standard error after each round, and whether
    the last one met the tolerance."""
    budget = tx.Adaptive(
        rtol=rtol, max_k=len(matrix) // 2, round_size=ROUND, history=True
    )
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

    def one(key):
        solution = tx.trace(
            lx.FunctionLinearOperator(
                operator.mv, operator.in_structure(), lx.positive_semidefinite_tag
            ),
            estimator,
            k=budget,
            key=key,
            throw=False,
        )
        return solution.stats["history"], solution.result == tx.RESULTS.successful

    return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)


def stops(history, samples_for_product, rtol):
    """The rounds after which a run with this tolerance ends, and whether it met it."""
    spent, value, std_err = (history[..., i] for i in range(3))
    budget = tx.Adaptive(rtol=rtol, max_k=1)
    met = budget.satisfied(value, std_err, spent * samples_for_product)
    return jnp.argmax(met, axis=1), jnp.any(met, axis=1)


def main(n: int, num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(5), num_keys)
    print(f"n = {n}, {num_keys} keys\n")
    print("| estimator | spectrum | rtol | within | products | best fixed budget |")
    print("|---|---|---|---|---|---|")
    for name, (estimator, samples_for_product) in ESTIMATORS.items():
        for spectrum, eigenvalues in spectra(n).items():
            matrix, exact = matrix_with(eigenvalues), jnp.sum(eigenvalues)
            history = None
            for rtol in TOLERANCES:
                if samples_for_product is None:
                    history, met = histories(matrix, estimator, rtol, keys)
                    made = jnp.sum(jnp.isfinite(history[..., 0]), axis=1)
                    last = made - 1
                else:
                    if history is None:
                        history, _ = histories(matrix, estimator, 1e-15, keys)
                    last, met = stops(history, samples_for_product, rtol)
                if jnp.mean(met) < 0.5:
                    continue
                final = history[jnp.arange(num_keys), last][met]
                error = (final[:, 1] - exact) / exact
                within = jnp.mean(jnp.abs(error) <= rtol)
                products = jnp.mean(final[:, 0])
                row = [name, spectrum, f"{rtol:.0e}", f"{within:.3f}", f"{products:.0f}"]
                best = ""
                if samples_for_product is not None:
                    off = jnp.abs(history[..., 1] - exact) / exact
                    good = np.mean(np.asarray(off <= rtol), axis=0) >= 0.95
                    if good.any():
                        best = str(ROUND * (int(np.argmax(good)) + 1))
                print("| " + " | ".join([*row, best]) + " |", flush=True)


if __name__ == "__main__":
    arguments = [int(each) for each in sys.argv[1:]]
    main(*arguments, *(400, 1000)[len(arguments) :])
