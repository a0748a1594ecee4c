"""Error of traces and their error bars, by package and number of products.

    python benchmarks/run.py accuracy

Mean relative error and, in brackets, the mean standard error over the root-mean-square
error: 1 is exact, and less is overconfident. One table for each spectrum, n = 1000,
float64.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import torch
from peers import peer_functions
from spectra import ESTIMATORS, matrix_with, spectra
from torch_peers import torch_functions

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, BUDGETS = 1000, (10, 20, 30, 60, 90, 150, 300)


def make_operator(matrix):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)


def ours(estimator, k, matrix, key):
    solution = tx.trace(make_operator(matrix), estimator, k=k, key=key, throw=False)
    return solution.value, solution.std_err


def by_jax(function):
    return jax.jit(lambda matrix, keys: jax.lax.map(partial(function, matrix), keys))


def by_torch(function):
    def run(matrix, keys):
        matrix = torch.from_numpy(np.array(matrix))
        values = [function(matrix, seed) for seed in range(len(keys))]
        return np.array(values), np.full(len(keys), np.nan)

    return run


def functions(n, k, dtype):
    """`(matrix, keys) -> (values, std_errs)` by package and estimator."""
    mine = {name: partial(ours, each, k) for name, (each, _) in ESTIMATORS.items()}
    peers = peer_functions(make_operator, lambda v, a: a @ v, n, k, dtype)
    return {
        (package, name): wrap(function)
        for packages, wrap in (
            ({"traceax 2.0": mine} | peers, by_jax),
            (torch_functions(k), by_torch),
        )
        for package, estimators in packages.items()
        for name, function in estimators.items()
    }


def cell(value, std_err, exact) -> str:
    error = np.asarray(value) - exact
    ratio = np.mean(std_err) / np.sqrt(np.mean(error**2))
    text = f"{np.mean(np.abs(error)) / exact:.1e}"
    return text if np.isnan(ratio) else f"{text} ({ratio:.2f})"


def main(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(3), num_keys)
    matrices = {name: matrix_with(each) for name, each in spectra(N).items()}
    rows = {name: {} for name in matrices}
    for k in BUDGETS:
        for estimator, function in functions(N, k, jnp.float64).items():
            for name, matrix in matrices.items():
                exact = float(jnp.sum(spectra(N)[name]))
                found = cell(*function(matrix, keys), exact)
                rows[name].setdefault(" ".join(estimator), []).append(found)
    for name, table in rows.items():
        print(f"\n{name}, {num_keys} keys\n")
        print("| |" + "".join(f" {k} |" for k in BUDGETS))
        print("|---|" + "---|" * len(BUDGETS))
        for label, cells in table.items():
            print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
