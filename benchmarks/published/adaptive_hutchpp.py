"""Adaptive Hutch++: figure 4 and table 1 of Persson, Cortinovis, Kressner (SIMAX, 2022).

    PYTHONPATH=benchmarks python benchmarks/published/adaptive_hutchpp.py [keys]

Matrices with eigenvalues `i**-c`, n = 5000. Theirs are from the stored results in their
repository, davpersson/A-Hutch-: the products of figure 4 (means of 100 runs, 5% failures;
`results/algebraic_c=*.mat`; c = 2 is not in the figure), and the failures of table 1, a
fraction of 100,000 runs (`results/failure_probabilities.mat`). Normal and spherical
probes are invariant under rotations, so our matrix is diagonal.

The rounds of XTrace and XNysTrace do not depend on the tolerance, so one run with
`history` has all of them. Hutch++ plans for the tolerance, and is run for each.
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from tables import head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
N = 5000
HUTCHPP = tx.HutchPlusPlusEstimator(tx.NormalSampler())
# An estimator, its samples for each product, and its largest budget.
OURS = {
    "XTrace": (tx.XTraceEstimator(), 0.5, 512),
    "XNysTrace": (tx.XNysTraceEstimator(), 1.0, 256),
}
# By c: products for a relative tolerance of 1/16, 1/64 and 1/256.
TOLERANCES = (16, 64, 256)
PRODUCTS = {
    0.1: (11.0, 29.0, 237.7),
    0.5: (13.1, 46.9, 424.3),
    1.0: (36.0, 120.0, 436.8),
    2.0: (23.8, 43.5, 79.5),
    3.0: (14.2, 20.9, 30.3),
}
# By c: for each tolerance, failures where 10%, 5% and 1% are allowed.
ALLOWED, COARSENESS = (0.1, 0.05, 0.01), (10, 100, 200)
FAILURES = {
    0.1: ((0, 0, 0), (0.00285, 0.00076, 5e-5), (0.00686, 0.00244, 0.00015)),
    0.5: ((0, 0, 0), (0.00484, 0.00126, 0.0001), (0.00855, 0.00331, 0.00032)),
    1.0: ((0.00026, 2e-5, 0), (0.00607, 0.00186, 0.00018), (0.00804, 0.0025, 0.0003)),
    2.0: ((0, 1e-5, 0), (0.00062, 8e-5, 0), (0.00128, 0.00026, 0)),
    3.0: ((0, 0, 0), (2e-5, 0, 0), (6e-5, 0, 0)),
}


def runner(estimator, confidence, largest, round_size):
    """A function of the diagonal, the tolerance and keys: for each key the history, and
    whether the tolerance was met."""
    settings = {"max_k": largest, "round_size": round_size, "history": True}

    def one(diagonal, rtol, key):
        structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
        operator = lx.FunctionLinearOperator(
            lambda v: diagonal * v, structure, lx.positive_semidefinite_tag
        )
        budget = tx.Adaptive(rtol=rtol, confidence=confidence, **settings)
        found = tx.trace(operator, estimator, k=budget, key=key, throw=False)
        return found.stats["history"], found.result == tx.RESULTS.successful

    def many(diagonal, rtol, keys):
        return jax.lax.map(lambda key: one(diagonal, rtol, key), keys)

    compiled = jax.jit(many)
    return lambda *data: jax.device_get(compiled(*data))


class Stops:
    """Where runs with a tolerance end, and the failures among those that do."""

    def __init__(self, history, last, met, rtol, exact):
        final = history[np.arange(len(history)), last][met]
        self.reached = np.mean(met) >= 0.95
        self.products = np.mean(final[:, 0]) if self.reached else np.nan
        self.failed = np.mean(np.abs(final[:, 1] / exact - 1) > rtol)


def planned(run, diagonal, rtol, keys) -> Stops:
    history, met = run(diagonal, rtol, keys)
    last = np.sum(np.isfinite(history[..., 0]), axis=1) - 1
    return Stops(history, last, met, rtol, np.sum(diagonal))


def stops(name, history, rtol, failure, exact) -> Stops:
    budget = tx.Adaptive(rtol=rtol, max_k=1, confidence=1 - failure)
    products, values, std_errs = np.moveaxis(history, -1, 0)
    met = budget.satisfied(values, std_errs, products * OURS[name][1])
    met = np.asarray(met & np.isfinite(products))
    return Stops(history, np.argmax(met, axis=1), np.any(met, axis=1), rtol, exact)


def cells(found: Stops, theirs: float) -> tuple[str, str]:
    if not found.reached:
        return "-", "-"
    return f"{found.products:.0f} ({found.failed:.2f})", f"{found.products / theirs:.2f}"


def main(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(0), num_keys)
    diagonals = {c: jnp.arange(1.0, N + 1) ** -c for c in PRODUCTS}
    # Down to the tightest tolerance that is asked for, with the highest confidence.
    found = {c: {} for c in diagonals}
    for name, (estimator, _, largest) in OURS.items():
        run = runner(estimator, 0.99, largest, 16)
        for c, diagonal in diagonals.items():
            found[c][name], _ = run(diagonal, 1 / TOLERANCES[-1], keys)
    run = runner(HUTCHPP, 0.95, 512, 4)
    print(f"Products for 5% failures, and in brackets the failures of {num_keys} keys:\n")
    names = [each for name in ("Hutch++", *OURS) for each in (name, "ratio")]
    head("c", "tolerance", "theirs", *names)
    for c, diagonal in diagonals.items():
        exact = np.sum(diagonal)
        for inverse, theirs in zip(TOLERANCES, PRODUCTS[c], strict=True):
            ours = [planned(run, diagonal, 1 / inverse, keys)]
            for name, history in found[c].items():
                ours.append(stops(name, history, 1 / inverse, 0.05, exact))
            listed = [each for one in ours for each in cells(one, theirs)]
            row(str(c), f"1/{inverse}", f"{theirs:.0f}", *listed)
    print(f"\nFailures, of 100,000 runs and of {num_keys} keys:\n")
    names = [f"{x}: theirs" for x in ALLOWED]
    head("c", "tolerance", *(each for x in names for each in (x, *OURS)))
    for c, diagonal in diagonals.items():
        exact = np.sum(diagonal)
        for inverse, failures in zip(COARSENESS, FAILURES[c], strict=True):
            listed = []
            for allowed, theirs in zip(ALLOWED, failures, strict=True):
                listed.append(f"{theirs:.2g}")
                for name, history in found[c].items():
                    each = stops(name, history, 1 / inverse, allowed, exact)
                    listed.append(f"{each.failed:.2f}" if each.reached else "-")
            row(str(c), f"1/{inverse}", *listed)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
