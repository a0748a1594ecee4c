"""Coverage of error bars of the entries of a diagonal.

    pip install matfree
    python benchmarks/calibration_diagonals.py [n] [keys]

How often the 95% interval (Student's quantile for m - 1 degrees of freedom) covers an
entry, mean over entries, for m = 10 and 30 samples; in brackets the root mean square of
the error bars over that of the errors.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matfree import stochtrace
from scipy.stats import t as student
from spectra import matrix_with, spectra

import traceax as tx


jax.config.update("jax_enable_x64", True)
SAMPLES = 10, 30
OURS = {
    "Hutchinson": (tx.HutchinsonEstimator(), 1),
    "Diag++": (tx.DiagPlusPlusEstimator(), 3),
    "XDiag": (tx.XDiagEstimator(), 2),
    "XNysDiag": (tx.XNysDiagEstimator(), 1),
}
PEERS = {
    "matfree XDiag": stochtrace.leave_one_out_xdiag(),
    "matfree XNysDiag": stochtrace.leave_one_out_xnysdiag(),
}


def ours(estimator, k, matrix, key):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    tag = lx.positive_semidefinite_tag
    operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)
    solution = tx.diagonal(operator, estimator, k=k, key=key, throw=False)
    return solution.value, solution.std_err


def theirs(integrand, m, matrix, key):
    signs = stochtrace.sampler_signs(jnp.ones_like(matrix[0]), num=m)
    estimate = stochtrace.estimator_leave_one_out_mean_and_sem(integrand, signs)
    return estimate(lambda v: matrix @ v, key)


def cell(function, m, matrix, num_keys):
    keys = jax.random.split(jax.random.key(5), num_keys)
    run = jax.jit(lambda matrix: jax.lax.map(partial(function, matrix), keys))
    value, std_err = run(matrix)
    error = jnp.abs(value - jnp.diag(matrix))
    covered = jnp.mean(error <= student.ppf(0.975, m - 1) * std_err)
    return covered, jnp.linalg.norm(std_err) / jnp.linalg.norm(error)


def main(n: int, num_keys: int) -> None:
    samples = " / ".join(map(str, SAMPLES))
    print(f"**n = {n}, {num_keys} keys, m = {samples} samples**\n")
    print("| | " + " | ".join(spectra(n)) + " |")
    print("|---" * (1 + len(spectra(n))) + "|")
    rows = {
        f"traceax {name}": [partial(ours, each, factor * m) for m in SAMPLES]
        for name, (each, factor) in OURS.items()
    }
    for name, each in PEERS.items():
        rows[name] = [partial(theirs, each, m) for m in SAMPLES]
    for name, functions in rows.items():
        row = []
        for eigenvalues in spectra(n).values():
            matrix = matrix_with(eigenvalues)
            pairs = zip(functions, SAMPLES, strict=True)
            found = np.array([cell(f, m, matrix, num_keys) for f, m in pairs])
            texts = [" / ".join(f"{x:.2f}" for x in column) for column in found.T]
            row.append(f"{texts[0]} ({texts[1]})")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    arguments = [int(each) for each in sys.argv[1:]]
    main(*arguments, *(300, 400)[len(arguments) :])
