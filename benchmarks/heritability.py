"""Time of a pass over a file of 2 GB.

    python benchmarks/heritability.py [FOLDER]

The data of the tutorial on heritability, 20,000 individuals and 100,000 variants, beside
loops written by hand that read and multiply, in NumPy and with a compiled product.
Medians of three runs, in turns. The file stays in the cache of the system. The script
also measures the memory of the tutorial.
"""

import contextlib
import os
import runpy
import statistics
import sys
import time
from pathlib import Path


os.environ.setdefault("HERITABILITY_SIZE", "20000 100000")
os.environ.setdefault("MPLBACKEND", "Agg")
if len(sys.argv) > 1:
    os.environ["HERITABILITY_FOLDER"] = sys.argv[1]

import jax
import numpy as np

import traceax as tx


example = Path(__file__).parents[1] / "examples" / "heritability.py"
with contextlib.redirect_stdout(sys.stderr):
    names = runpy.run_path(str(example))
n, m, folder = names["n"], names["m"], names["folder"]
size, num_probes = m // 120, 16
vectors = np.random.default_rng(1).standard_normal((n, num_probes)).astype(np.float32)
counts = np.memmap(folder / "genotypes", np.int8, "r", shape=(m, n))[:size]
mean, std = counts.mean(axis=1, keepdims=True), counts.std(axis=1, keepdims=True)
mean, std = mean.astype(np.float32), std.astype(np.float32)


def by_numpy(standardise):
    total = np.zeros((n, num_probes), np.float32)
    with open(folder / "genotypes", "rb") as file:
        for _ in range(m // size):
            x = np.fromfile(file, np.int8, size * n).reshape(size, n)
            x = x.astype(np.float32)
            if standardise:
                x -= mean
                x /= std
            total += x.T @ (x @ vectors)


@jax.jit
def add(total, x):
    x = (x.astype(np.float32) - mean) / std
    return total + x.T @ (x @ vectors)


def by_compiled_product():
    total = jax.numpy.zeros((n, num_probes), np.float32)
    with open(folder / "genotypes", "rb") as file:
        for _ in range(m // size):
            x = np.fromfile(file, np.int8, size * n).reshape(size, n)
            total = add(total, x)
    jax.block_until_ready(total)


def by_blocks():
    settings = {"k": num_probes, "key": jax.random.key(2)}
    jax.block_until_ready(tx.frobenius_products(names["operators"], **settings).value)


whole = tx.data_gram(names["genotypes"], standardise=True)


def by_one_operator():
    settings = {"k": num_probes, "key": jax.random.key(2)}
    jax.block_until_ready(tx.frobenius_norm(whole, **settings).value)


runs = {
    "by hand in NumPy: `numpy.fromfile`, cast, two products": lambda: by_numpy(False),
    "the same, standardising": lambda: by_numpy(True),
    "by hand, the product compiled by JAX, standardising": by_compiled_product,
    "`data_gram`": by_one_operator,
    "40 `data_gram` of parts, with the traces of their products": by_blocks,
}
walls, cpus = {name: [] for name in runs}, {name: [] for name in runs}
for _ in range(4):  # the first one compiles
    for name, run in runs.items():
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls[name].append(time.perf_counter() - wall)
        cpus[name].append(time.process_time() - cpu)
print("| one pass | CPU time | wall time |\n|---|---|---|")
for name in runs:
    wall, cpu = statistics.median(walls[name][1:]), statistics.median(cpus[name][1:])
    print(f"| {name} | {cpu:.1f} s | {wall:.0f} s |")
