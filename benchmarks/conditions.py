"""Up to which condition numbers log-determinants and inverses are known, in each dtype.

    python benchmarks/run.py conditions

The largest power of ten up to which no call was flagged, and the smallest at which half
of them were; and how often an interval of 95% held the truth or the call was flagged, the
least of all conditions up to the eighth part of the reciprocal of the unit roundoff. n =
100, three kinds of spectra, 12 keys each, 20 and 60 steps.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, STEPS = 100, (20, 60)
KEYS = jax.random.split(jax.random.key(0), 12)
FUNCTIONS = {"logarithm": (tx.Log(), np.log), "inverse": (tx.Inverse(), lambda x: 1 / x)}


def matrices(condition) -> Iterator[np.ndarray]:
    """Low rank over the identity, decaying to it, and evenly spread."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((N, N)))
    for top in (1, 30, N):
        eigenvalues = np.ones(N)
        eigenvalues[:top] = np.geomspace(condition, 1, top) if top > 1 else condition
        yield (basis * eigenvalues) @ basis.T


def estimates(function, num_steps):
    """Whether the truth is in the interval, and whether the call was flagged, by key."""

    @jax.jit
    def run(matrix, exact):
        def one(key):
            structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
            operator = lx.FunctionLinearOperator(
                lambda v: matrix @ v, structure, lx.positive_semidefinite_tag
            )
            settings = {"k": 10, "num_steps": num_steps, "key": key, "throw": False}
            solution = tx.trace_of_function(operator, function, **settings)
            low, high = solution.interval()
            return (low <= exact) & (
                exact <= high
            ), solution.result != tx.RESULTS.successful

        return jax.lax.map(one, KEYS)

    return run


def measure(dtype, conditions, function, reference):
    """By condition, how many were flagged, and how many of them or of those that hold."""
    runs = [estimates(function, num_steps) for num_steps in STEPS]
    flagged, told = [], []
    for condition in conditions:
        cells = []
        for matrix in matrices(condition):
            rounded = jnp.asarray(matrix).astype(dtype)
            eigenvalues = np.linalg.eigvalsh(np.asarray(rounded.astype(float)))
            exact = np.sum(reference(np.maximum(eigenvalues, 1e-300)))
            cells += [run(rounded, exact) for run in runs]
        inside, found = (np.stack(each) for each in zip(*cells, strict=True))
        flagged.append(np.mean(found))
        told.append(np.mean(inside | found))
    return np.array(flagged), np.array(told)


def main() -> None:
    columns = [
        f"{name}: {what}"
        for name in FUNCTIONS
        for what in ("no flag up to", "half flagged")
    ]
    print(f"| | limit | {' | '.join(columns)} | held or flagged |")
    print("|---" * (3 + len(columns)) + "|")
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        limit = 8 / float(jnp.finfo(dtype).eps)
        conditions = 10.0 ** np.arange(1, np.log10(limit) + 1.5)
        cells, least = [f"{limit:.0e}"], 1.0
        for function, reference in FUNCTIONS.values():
            flagged, told = measure(dtype, conditions, function, reference)
            unflagged = conditions[: np.argmax(flagged > 0) or None]
            half = conditions[flagged >= 0.5]
            cells += [f"{unflagged[-1]:.0e}", f"{half[0]:.0e}" if len(half) else "above"]
            least = min(least, *told[conditions <= limit])
        name = jnp.dtype(dtype).name
        print(f"| {name} | {' | '.join(cells)} | {least:.2f} |", flush=True)


if __name__ == "__main__":
    main()
