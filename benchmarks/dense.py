"""Time of one call over the time of its products as one GEMM, dense float32 operator.

    python benchmarks/dense.py [n ...]

Every estimator makes k = 100 products (99 for Hutch++). All functions take turns in one
process. A ratio below 1 is possible, because the layout of the probes affects the speed
of the product.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
from peers import peer_functions
from timing import interleaved, spread

import traceax as tx


K = 100
OURS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "Nystrom++": tx.NystromPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}


def make_operator(matrix):
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


def ours(estimator, matrix, key):
    solution = tx.trace(make_operator(matrix), estimator, k=K, key=key, throw=False)
    return solution.value, solution.std_err


def main(n: int) -> None:
    key = jax.random.key(0)
    x = jax.random.normal(key, (n, 50), jnp.float32)
    matrix = x @ x.T / n + jnp.eye(n, dtype=jnp.float32)
    block = jax.random.normal(key, (n, K), jnp.float32)
    functions = {
        "A @ block": partial(jax.jit(jnp.matmul), matrix, block),
        "vmap(A @ row)": partial(
            jax.jit(lambda a, rows: jax.vmap(lambda v: a @ v)(rows)), matrix, block.T
        ),
        "QR of block": partial(jax.jit(jnp.linalg.qr), block),
    }
    for name, estimator in OURS.items():
        function = jax.jit(partial(ours, estimator))
        functions[f"traceax 2.0 {name}"] = partial(function, matrix, key)
    peers = peer_functions(make_operator, lambda v, a: a @ v, n, K)
    for peer, estimators in peers.items():
        for name, function in estimators.items():
            functions[f"{peer} {name}"] = partial(jax.jit(function), matrix, key)
    times = interleaved(functions)
    base = times["A @ block"][0]
    print(f"\nn = {n}, k = {K}; `A @ block` takes {base * 1e3:.1f} ms:\n")
    print("| | time over `A @ block` |")
    print("|---|---|")
    for name, each in times.items():
        print(f"| {name} | {spread(each, base)} |", flush=True)


if __name__ == "__main__":
    for n in [int(each) for each in sys.argv[1:]] or [4000, 10000]:
        main(n)
