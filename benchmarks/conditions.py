"""Condition numbers that log-determinants and inverses can bear, by dtype.

    python benchmarks/run.py conditions

The largest power of ten up to which no call was flagged; the smallest at which half of
the calls were; and how often a 95% interval covered the true value or the call was
flagged, the lowest over all condition numbers up to an eighth of the reciprocal of the
unit roundoff. n = 100, six kinds of spectra, 60 keys each, 5, 20 and 60 steps. The true
value is that of the matrix rounded to the dtype, by Cholesky in NumPy's extended
precision; matrices that rounding makes indefinite are left out.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, STEPS = 100, (5, 20, 60)
KEYS = jax.random.split(jax.random.key(0), 60)
FUNCTIONS = {
    "logarithm": (tx.Log(), lambda x: x.log_det),
    "inverse": (tx.Inverse(), lambda x: x.trace_of_inverse),
    "root": (tx.Power(0.5), lambda x: x.trace_of_root),
}
KINDS = ("one large", "30 large", "evenly in the logarithm", "half", "one small", "even")


class Reference:
    """Of a symmetric matrix, or `ValueError` if it is not positive definite."""

    def __init__(self, matrix: np.ndarray):
        rest = matrix.astype(np.longdouble)
        factor = np.zeros_like(rest)
        for j in range(len(rest)):
            if rest[j, j] <= 0:
                raise ValueError
            factor[j:, j] = rest[j:, j] / np.sqrt(rest[j, j])
            rest = rest - np.outer(factor[:, j], factor[:, j])
        inverse = np.zeros_like(factor)
        for j in range(len(rest)):
            unit = np.arange(len(rest)) == j
            inverse[j] = (unit - factor[j, :j] @ inverse[:j]) / factor[j, j]
        self.log_det = float(2 * np.sum(np.log(np.diag(factor))))
        self.trace_of_inverse = float(np.sum(inverse**2))
        self.trace_of_root = np.sum(np.sqrt(np.abs(np.linalg.eigvalsh(matrix))))


def matrices(condition: float, dtype) -> Iterator[tuple[jax.Array, Reference]]:
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((N, N)))
    for kind in KINDS:
        eigenvalues = {
            "one large": np.where(np.arange(N) == 0, condition, 1),
            "30 large": np.append(np.geomspace(condition, 1, 30), np.ones(N - 30)),
            "evenly in the logarithm": np.geomspace(condition, 1, N),
            "half": np.where(np.arange(N) < N // 2, condition, 1),
            "one small": np.where(np.arange(N) == 0, 1, condition),
            "even": np.linspace(1, condition, N),
        }[kind]
        rounded = jnp.asarray((basis * eigenvalues) @ basis.T / condition).astype(dtype)
        try:
            yield rounded, Reference(np.asarray(rounded.astype(float)))
        except ValueError:
            continue


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
            inside = (low <= exact) & (exact <= high)
            return inside, solution.result != tx.RESULTS.successful

        return jax.lax.map(one, KEYS)

    return run


def measure(dtype, conditions, function, reference):
    """By condition, whether runs held the truth, and whether they were flagged; up to
    where rounding leaves no matrix positive definite."""
    runs = [estimates(function, num_steps) for num_steps in STEPS]
    found = []
    for condition in conditions:
        cells = [
            run(matrix, reference(known))
            for matrix, known in matrices(condition, dtype)
            for run in runs
        ]
        if not cells:
            break
        found.append(np.stack([np.ravel(each) for each in zip(*cells, strict=True)]))
    return found


def main() -> None:
    columns = [
        f"{name}: {what}"
        for name in FUNCTIONS
        for what in ("no flag up to", "half flagged at", "held or flagged")
    ]
    print(f"| | limit | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    counts = {name: np.zeros(3, int) for name in FUNCTIONS}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        limit = 8 / float(jnp.finfo(dtype).eps)
        conditions = 10.0 ** np.arange(1, np.log10(limit) + 1.5)
        cells = [f"{limit:.0e}"]
        for name, (function, reference) in FUNCTIONS.items():
            found = measure(dtype, conditions, function, reference)
            tried = conditions[: len(found)]
            flagged = np.array([np.mean(each[1]) for each in found])
            told = np.array([np.mean(each[0] | each[1]) for each in found])
            below = np.concatenate([*found[: np.sum(tried <= limit)]], axis=1)
            inside, bad = below
            counts[name] += [np.sum(bad), np.sum(bad & inside), len(bad)]
            unflagged = tried[np.cumsum(flagged) == 0]
            half = tried[flagged >= 0.5]
            cells.append(f"{unflagged[-1]:.0e}" if len(unflagged) else "none")
            cells.append(f"{half[0]:.0e}" if len(half) else "above")
            cells.append(f"{min(told[tried <= limit]):.2f}")
        print(f"| {jnp.dtype(dtype).name} | {' | '.join(cells)} |", flush=True)
    print("\nRuns up to the limit:\n")
    for name, (flagged, held, all_runs) in counts.items():
        print(
            f"- {name}: {flagged} of {all_runs} flagged, of which {held} held the truth"
        )


if __name__ == "__main__":
    main()
