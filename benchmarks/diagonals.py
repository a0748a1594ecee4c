"""Error and time of diagonals, by package.

    pip install matfree skerch curvlinops-for-pytorch
    python benchmarks/diagonals.py [keys]

The largest relative error of an entry, median over keys, for the matrices of figure 16.1
of Epperly's thesis (arXiv 2512.15929): n = 1000, random orthogonal eigenvectors, float64.
Then the time of our diagonals over that of our traces with as many products, float32.
"""

import os
import sys
from functools import partial

import curvlinops
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import torch
from curvlinops.diagonal.epperly2024xtrace import xdiag
from curvlinops.diagonal.hutchinson import hutchinson_diag
from matfree import stochtrace
from skerch.algorithms import hutch, xhutchpp
from spectra import diagonal_many, matrix_with, operator_of, thesis_spectra
from timing import interleaved, spread

import traceax as tx


assert curvlinops  # the package of the two functions
N, BUDGETS = 1000, (60, 120)
TAG = lx.positive_semidefinite_tag


def matfree(integrand, num, wrap, matrix, keys):
    signs = stochtrace.sampler_signs(jnp.ones_like(matrix[0]), num=num)
    estimate = wrap(integrand, signs)
    run = lambda matrix, keys: jax.lax.map(  # noqa: E731
        lambda key: estimate(lambda v: matrix @ v, key), keys
    )
    return jax.jit(run)(matrix, keys)


def by_torch(function, matrix, keys):
    matrix = torch.from_numpy(np.array(matrix))
    return np.stack([function(matrix, i).numpy() for i in range(len(keys))])


def curvlinops_of(estimate, k, matrix, i):
    torch.manual_seed(i)
    return estimate(matrix, k)


def skerch_xdiag(k, matrix, i):
    settings = {"x_dims": k // 2, "seed": 1000 * i}
    return xhutchpp(matrix, "cpu", matrix.dtype, **settings)["diag"]


def skerch_diagpp(k, matrix, i):
    """As the docstring of `skerch.algorithms.hutch` says: deflate by a basis."""
    m = k // 3
    generator = torch.Generator().manual_seed(i)
    signs = torch.randint(0, 2, (len(matrix), m), generator=generator)
    basis, _ = torch.linalg.qr(matrix @ (2 * signs - 1).to(matrix.dtype))
    settings = {"seed": 1000 * i, "defl_Q": basis}
    rest = hutch(matrix, "cpu", matrix.dtype, k - 2 * m, **settings)["diag"]
    return rest + torch.sum(basis * (matrix.T @ basis), dim=1)


def functions(k):
    """`(matrix, keys) -> diagonals` by package and estimator."""
    leave_one_out = stochtrace.estimator_leave_one_out
    xnysdiag, xdiag_of = stochtrace.leave_one_out_xnysdiag, stochtrace.leave_one_out_xdiag
    signs = stochtrace.monte_carlo_diagonal()
    monte_carlo = stochtrace.estimator_monte_carlo
    auto = tx.AutoDiagonalEstimator()
    torch_functions = {
        "curvlinops Hutchinson": partial(curvlinops_of, hutchinson_diag, k),
        "curvlinops XDiag": partial(curvlinops_of, xdiag, k),
        "skerch Hutchinson": lambda a, i: hutch(a, "cpu", a.dtype, k, 1000 * i)["diag"],
        "skerch Diag++": partial(skerch_diagpp, k),
        "skerch XDiag": partial(skerch_xdiag, k),
    }
    return {
        "traceax Hutchinson": partial(diagonal_many, tx.HutchinsonEstimator(), k, ()),
        "traceax Diag++": partial(diagonal_many, tx.DiagPlusPlusEstimator(), k, ()),
        "traceax XDiag": partial(diagonal_many, tx.XDiagEstimator(), k, ()),
        "traceax XNysDiag": partial(diagonal_many, tx.XNysDiagEstimator(), k, (TAG,)),
        "traceax default, no tag": partial(diagonal_many, auto, k, ()),
        "traceax default, semidefinite": partial(diagonal_many, auto, k, (TAG,)),
        "matfree Hutchinson": partial(matfree, signs, k, monte_carlo),
        "matfree XDiag": partial(matfree, xdiag_of(), k // 2, leave_one_out),
        "matfree XNysDiag": partial(matfree, xnysdiag(), k, leave_one_out),
    } | {name: partial(by_torch, each) for name, each in torch_functions.items()}


def accuracy(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(3), num_keys)
    rows = {}
    for eigenvalues in thesis_spectra(N).values():
        matrix = matrix_with(eigenvalues)
        exact = np.diag(matrix)
        for k in BUDGETS:
            for name, function in functions(k).items():
                error = np.abs(np.asarray(function(matrix, keys)) - exact) / np.abs(exact)
                rows.setdefault(name, []).append(np.median(np.max(error, axis=1)))
    print(f"Largest relative error of an entry, n = {N}, median of {num_keys} keys:\n")
    print("| |" + "".join(f" {s}, {k} |" for s in thesis_spectra(N) for k in BUDGETS))
    print("|---|" + "---|" * len(BUDGETS) * len(thesis_spectra(N)))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(f"{x:.1e}" for x in cells) + " |", flush=True)


def seconds(cases, k, data, make_operator, key):
    """The time of each diagonal beside the trace that it is compared with."""
    functions = {}
    for name, (call, estimator, tags) in cases.items():

        def run(data, key, call=call, estimator=estimator, tags=tags):
            operator = make_operator(data, *tags)
            solution = call(operator, estimator, k=k, key=key, throw=False)
            return solution.value, solution.std_err

        functions[name] = partial(jax.jit(run), data, key)
    return interleaved(functions, rounds=25)


def times(n: int = 4000, k: int = 120) -> None:
    key = jax.random.key(0)
    x = jax.random.normal(key, (n, 100), jnp.float32) / jnp.arange(1, 101)
    matrix = x @ x.T + jnp.eye(n, dtype=jnp.float32)
    auto = tx.AutoDiagonalEstimator()
    pairs = {
        "Hutchinson": (tx.HutchinsonEstimator(), tx.HutchinsonEstimator(), ()),
        "XDiag": (tx.XDiagEstimator(), tx.XTraceEstimator(), ()),
        "XNysDiag": (tx.XNysDiagEstimator(), tx.XNysTraceEstimator(), (TAG,)),
        "default, no tag": (auto, tx.XTraceEstimator(), ()),
        "default, semidefinite": (auto, tx.XNysTraceEstimator(), (TAG,)),
    }
    cases = {}
    for name, (estimator, of_trace, tags) in pairs.items():
        cases[name] = tx.diagonal, estimator, tags
        cases[f"trace, {of_trace.name}, {tags}"] = tx.trace, of_trace, tags
    dense = seconds(cases, k, matrix, operator_of, key)
    print(f"\nTime of a diagonal over that of a trace, k = {k}, dense, n = {n}:\n")
    print("| diagonal | trace | ratio |")
    print("|---|---|---|")
    for name, (_, of_trace, tags) in pairs.items():
        base, _, _ = dense[f"trace, {of_trace.name}, {tags}"]
        trace = of_trace.name.removesuffix("Estimator")
        print(f"| {name} | {trace} | {spread(dense[name], base)} |", flush=True)


def times_of_cheap_products(n: int = 10**6, k: int = 64) -> None:
    key = jax.random.key(0)
    weights = jax.random.uniform(key, (n,), jnp.float32)

    def make_operator(weights):
        structure = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        return lx.FunctionLinearOperator(
            lambda v: weights * v + jnp.roll(v, 1) + jnp.roll(v, -1), structure
        )

    hutchinson = tx.HutchinsonEstimator()
    cases = {
        "trace": (tx.trace, hutchinson, ()),
        "diagonal": (tx.diagonal, hutchinson, ()),
        "leaf_traces": (tx.leaf_traces, hutchinson, ()),
        "frobenius_norm": (tx.frobenius_norm, hutchinson, ()),
        "row_norms": (tx.row_norms, hutchinson, ()),
    }
    cheap = seconds(cases, k, weights, make_operator, key)
    base, _, _ = cheap["trace"]
    print(f"\nHutchinson, k = {k}, a tridiagonal function, n = {n:.0e}; the trace takes")
    print(f"{base:.3f} s:\n")
    print("| | time over the trace |")
    print("|---|---|")
    for name, each in cheap.items():
        print(f"| {name} | {spread(each, base)} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    accuracy(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    jax.config.update("jax_enable_x64", False)
    load = os.getloadavg()[0]
    times()
    times_of_cheap_products()
    print(f"\nLoad of the machine before the timing: {load:.1f}.")
