"""Hutchinson, k = 100, on a diagonal float32 operator: time and temporary memory.

    python benchmarks/diagonal.py [n ...]

Where a peer needs more than 12 GB of temporaries it is compiled, not run.
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


def make_operator(diagonal):
    # A function operator: no estimator is told that it is diagonal.
    return lx.FunctionLinearOperator(
        lambda v: diagonal * v,
        jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype),
        lx.positive_semidefinite_tag,
    )


def ours(diagonal, key):
    operator = make_operator(diagonal)
    estimator = tx.HutchinsonEstimator()
    solution = tx.trace(operator, estimator, k=K, key=key, throw=False)
    return solution.value, solution.std_err


def main(n: int) -> None:
    key = jax.random.key(0)
    diagonal = jax.random.uniform(key, (n,), jnp.float32)
    peers = peer_functions(make_operator, lambda v, d: d * v, n, K)
    gradient = jax.grad(lambda diagonal, key: ours(diagonal, key)[0])
    functions = {"traceax 2.0": ours, "traceax 2.0, gradient": gradient}
    functions |= {peer: each["Hutchinson"] for peer, each in peers.items()}
    runnable, temporaries = {}, {}
    for name, function in functions.items():
        compiled = jax.jit(function).lower(diagonal, key).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore
        if temporaries[name] < 12e9:
            runnable[name] = partial(compiled, diagonal, key)
    times = interleaved(runnable, rounds=5)
    base = times["traceax 2.0"][0]
    print(f"\nn = {n:.0e}, k = {K}; a vector is {4 * n / 1e6:.0f} MB, ours take")
    print(f"{base:.3f} s:\n")
    print("| | temporaries | time over ours |")
    print("|---|---|---|")
    for name, memory in temporaries.items():
        time = spread(times[name], base) if name in times else "not run"
        print(f"| {name} | {memory / 1e6:.1f} MB | {time} |", flush=True)


if __name__ == "__main__":
    for n in [int(float(each)) for each in sys.argv[1:]] or [10**6, 10**7]:
        main(n)
