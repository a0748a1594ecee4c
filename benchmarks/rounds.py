"""Time of adaptive rounds over that of a fixed budget.

    python benchmarks/rounds.py [n]

128 products with a dense float32 operator, in rounds of 16 and of 32, against `k=128` at
once, and for Hutchinson against `k=128` in blocks of as many probes too. A dense product
takes longer for each column if there are fewer of them, so compare the rounds of
Hutchinson with blocks of the same size.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
from timing import interleaved, spread

import traceax as tx


K, ROUNDS = 128, (16, 32)


def main(n: int) -> None:
    x = jax.random.normal(jax.random.key(0), (n, 50), jnp.float32)
    matrix = x @ x.T / n + jnp.eye(n, dtype=jnp.float32)

    def call(estimator, k, execution, matrix, key):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        settings = {"key": key, "execution": execution, "throw": False}
        solution = tx.trace(operator, estimator, k=k, **settings)
        return solution.value, solution.std_err, solution.stats["num_matvecs"]

    functions = {}
    for estimator in (
        tx.HutchinsonEstimator(),
        tx.HutchPlusPlusEstimator(),
        tx.NystromPlusPlusEstimator(),
        tx.XTraceEstimator(),
        tx.XNysTraceEstimator(),
    ):
        name = estimator.name
        cases = {f"{name}, at once": (K, tx.Local())}
        for size in ROUNDS:
            budget = tx.Adaptive(rtol=1e-30, max_k=K, round_size=size)
            cases[f"{name}, rounds of {size}"] = (budget, tx.Local())
            if isinstance(estimator, tx.HutchinsonEstimator):
                cases[f"{name}, blocks of {size}"] = (K, tx.Local(block_size=size))
        for case, (k, execution) in cases.items():
            run = jax.jit(partial(call, estimator, k, execution))
            functions[case] = partial(run, matrix, jax.random.key(1))
    times = interleaved(functions)
    print(f"n = {n}, {K} products:\n")
    print("| | time over that at once |")
    print("|---|---|")
    for case, each in times.items():
        base = times[f"{case.split(',')[0]}, at once"][0]
        print(f"| {case} | {spread(each, base)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
