"""Error bars and 95% intervals of Hutchinson from few samples.

    python benchmarks/run.py few_samples

With normal probes a sample is a chi-squared variable with one degree of freedom where one
eigenvalue outweighs all others, and nearly normal where n = 400 are equal.
"""

import jax
import jax.numpy as jnp
import lineax as lx
from scipy.stats import t as student

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, SAMPLES, DRAWS = 400, (2, 3, 4, 5, 6, 8, 10, 20, 30), 40000
OPERATORS = {
    "one eigenvalue": lambda v: v * (jnp.arange(N) == 0),
    "equal ones": lambda v: v / N,
}


def found(mv, m):
    """The coverage, and the mean of the bar over the standard deviation."""
    operator = lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), jnp.float64))
    estimator = tx.HutchinsonEstimator(tx.NormalSampler())

    def one(key):
        solution = tx.trace(operator, estimator, k=m, key=key)
        return solution.value, solution.std_err

    keys = jax.random.split(jax.random.key(0), DRAWS)
    values, bars = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=100))(keys)
    covered = jnp.abs(values - 1) <= student.ppf(0.975, m - 1) * bars
    return jnp.mean(covered), jnp.mean(bars) / jnp.std(values)


def main() -> None:
    print(f"{DRAWS} keys; number of samples:\n")
    print("| |" + "".join(f" {m} |" for m in SAMPLES))
    print("|---|" + "---|" * len(SAMPLES))
    for name, mv in OPERATORS.items():
        coverage, ratio = zip(*[found(mv, m) for m in SAMPLES], strict=True)
        for label, cells in (("coverage", coverage), ("bar over deviation", ratio)):
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {name}: {label} | {row} |", flush=True)


if __name__ == "__main__":
    main()
