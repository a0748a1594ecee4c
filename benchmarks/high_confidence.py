"""Coverage of 99% and 99.9% intervals of skewed samples.

    python benchmarks/run.py high_confidence

The lowest coverage over four spectra: an eigenvalue of 50 beside ones, flat, i^-2 and
0.7^i. The last row is the width of the interval over that of Student's, for a flat
spectrum and Hutchinson's estimator.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from scipy.stats import t as student

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS, SAMPLES, LEVELS = 120, 4000, (4, 10, 20, 40), (0.99, 0.999)
INDICES = np.arange(1, N + 1)
SPECTRA = (
    np.append(50.0, np.ones(N - 1)),
    np.linspace(3, 1, N),
    INDICES**-2.0,
    0.7**INDICES,
)
FLAT = 1


def trace(estimator, products_per_probe):
    def call(operator, m, key):
        return tx.trace(operator, estimator, k=products_per_probe * m, key=key)

    return call


def log_determinant(operator, m, key):
    shifted = lx.TaggedLinearOperator(
        operator + lx.IdentityLinearOperator(operator.in_structure()),
        lx.positive_semidefinite_tag,
    )
    return tx.logdet(shifted, k=m, num_steps=20, key=key)


CALLS = {
    "Hutchinson": trace(tx.HutchinsonEstimator(), 1),
    "Hutch++": trace(tx.HutchPlusPlusEstimator(), 3),
    "XTrace": trace(tx.XTraceEstimator(), 2),
    "XNysTrace": trace(tx.XNysTraceEstimator(), 1),
    "log-determinant, SLQ": log_determinant,
}


@eqx.filter_jit
def solve(call, matrices, m):
    """The ends of all intervals of each key and matrix, and its error bar."""

    def one(matrix, key):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        solution = call(operator, m, key)
        return [jnp.stack(solution.interval(x)) for x in LEVELS], solution.std_err

    along_keys = lambda key: jax.vmap(one, (0, None))(matrices, key)  # noqa: E731
    return jax.lax.map(along_keys, jr.split(jr.key(0), KEYS))


def main() -> None:
    normal = np.random.default_rng(0).standard_normal((N, N))
    basis = np.linalg.qr(normal)[0]
    matrices = jnp.asarray(np.stack([(basis * x) @ basis.T for x in SPECTRA]))
    exact = {name: np.array([np.sum(x) for x in SPECTRA]) for name in CALLS}
    exact["log-determinant, SLQ"] = np.array([np.sum(np.log1p(x)) for x in SPECTRA])
    print(f"{KEYS} keys, n = {N}, 99% / 99.9%; number of samples:\n")
    print("| |" + "".join(f" {m} |" for m in SAMPLES))
    print("|---|" + "---|" * len(SAMPLES))
    widths = []
    for name, call in CALLS.items():
        cells = []
        for m in SAMPLES:
            if name == "Hutch++" and 3 * m >= N:
                cells.append("-")
                continue
            ends, std_err = solve(call, matrices, m)
            low, high = np.moveaxis(np.stack(ends), 3, 0)
            inside = (low <= exact[name]) & (exact[name] <= high)
            least = np.min(np.mean(inside, axis=1), axis=1)
            cells.append(" / ".join(f"{x:.3f}" for x in least))
            if name == "Hutchinson":
                quantiles = student.ppf((1 + np.array(LEVELS)) / 2, m - 1)
                usual = 2 * quantiles[:, None] * np.asarray(std_err)[:, FLAT]
                ratios = np.mean((high - low)[..., FLAT] / usual, axis=1)
                widths.append(" / ".join(f"{x:.2f}" for x in ratios))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print("| width, flat | " + " | ".join(widths) + " |")


if __name__ == "__main__":
    main()
