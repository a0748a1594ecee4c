"""Time and memory of Hutchinson on a diagonal operator.

    python benchmarks/run.py diagonal

k = 100, float32. Where a package needs more than 12 GB of temporaries, the program is
compiled and not run.
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


def measure(n: int):
    """The median seconds of ours, and the ratio and temporaries of each."""
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
    times = interleaved(runnable, rounds=5 if n <= 10**7 else 1)
    base = times["traceax 2.0"][0]
    cells = {"traceax 2.0, seconds": f"{base:.1e} s"}
    for name, memory in temporaries.items():
        time = spread(times[name], base) if name in times else "not run"
        cells[name] = f"{time}, {memory / 1e6:.0f} MB"
    return cells


def main(sizes: list[int]) -> None:
    columns = [measure(n) for n in sizes]
    print(f"k = {K}; time over ours, and temporaries:\n")
    print("| |" + "".join(f" n = {n:.0e} |" for n in sizes))
    print("|---|" + "---|" * len(sizes))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main([int(float(n)) for n in sys.argv[1:]] or [10**5, 10**6, 10**7, 10**8])
