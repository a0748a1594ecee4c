"""Time of a trace over the time of its products, dense float32 operator.

    python benchmarks/run.py dense

Every estimator makes k = 100 products (99 for Hutch++), compared with one matrix-matrix
product. All functions take turns in one process. A ratio below 1 is possible, because the
layout of the probes affects the speed of the product. The largest matrix has 1 GB; on a
machine with room for 4 GB, add 32000.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import torch
from peers import peer_functions
from spectra import ESTIMATORS
from timing import interleaved, spread
from torch_peers import torch_functions

import traceax as tx


K = 100


def make_operator(matrix):
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


def ours(estimator, matrix, key):
    solution = tx.trace(make_operator(matrix), estimator, k=K, key=key, throw=False)
    return solution.value, solution.std_err


def times(n: int):
    key = jax.random.key(0)
    x = jax.random.normal(key, (n, 50), jnp.float32)
    matrix = jax.jit(lambda x: x @ x.T / n + jnp.eye(n, dtype=jnp.float32))(x)
    block = jax.random.normal(key, (n, K), jnp.float32)
    functions = {
        "A @ block": partial(jax.jit(jnp.matmul), matrix, block),
        "vmap(A @ row)": partial(
            jax.jit(lambda a, rows: jax.vmap(lambda v: a @ v)(rows)), matrix, block.T
        ),
        "QR of block": partial(jax.jit(jnp.linalg.qr), block),
    }
    mine = {name: partial(ours, each) for name, (each, _) in ESTIMATORS.items()}
    peers = peer_functions(make_operator, lambda v, a: a @ v, n, K)
    for package, estimators in ({"traceax 2.0": mine} | peers).items():
        for name, function in estimators.items():
            functions[f"{package} {name}"] = partial(jax.jit(function), matrix, key)
    shared = torch.from_dlpack(matrix)
    for package, estimators in torch_functions(K).items():
        for name, function in estimators.items():
            functions[f"{package} {name}"] = partial(function, shared, 0)
    return interleaved(functions, rounds=7 if n <= 10000 else 5)


def main(sizes: list[int]) -> None:
    columns = {n: times(n) for n in sizes}
    print(f"k = {K}:\n")
    print("| |" + "".join(f" n = {n} |" for n in sizes))
    print("|---|" + "---|" * len(sizes))
    base = {n: each["A @ block"][0] for n, each in columns.items()}
    cells = [f"{seconds:.1e} s" for seconds in base.values()]
    print("| A @ block, seconds | " + " | ".join(cells) + " |")
    for name in columns[sizes[0]]:
        cells = [spread(each[name], base[n]) for n, each in columns.items()]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [1000, 4000, 16000])
