"""Diagonals: figure 16.1 of Epperly's thesis (arXiv 2512.15929).

    PYTHONPATH=benchmarks python benchmarks/published/thesis_diagonals.py [runs]

The largest relative error of an entry, median over runs, with as many products: n = 1000,
random orthogonal eigenvectors, random signs, float64. The figure is a picture without
numbers, so theirs are NumPy functions written anew after the formulas of the thesis. The
last row of each group has the best of their four beside our default, which does not know
which one that is.
"""

import sys

import jax
import lineax as lx
import numpy as np
from spectra import diagonal_many, matrix_with, thesis_spectra
from tables import beside, head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, BUDGETS = 1000, (60, 120)
TAG = lx.positive_semidefinite_tag


def signs(n, k, rng):
    return rng.choice([-1.0, 1.0], size=(n, k))


def plain(a, k, rng):
    omega = signs(len(a), k, rng)
    return np.mean(omega * (a @ omega), axis=1)


def diagpp(a, k, rng):
    m = k // 3
    q, _ = np.linalg.qr(a @ signs(len(a), m, rng))
    omega = signs(len(a), k - 2 * m, rng)
    image = a @ omega
    rest = image - q @ (q.T @ image)
    return np.sum(q * (a.T @ q), axis=1) + np.mean(omega * rest, axis=1)


def xdiag(a, k, rng):
    omega = signs(len(a), k // 2, rng)
    y = a @ omega
    q, r = np.linalg.qr(y)
    z = a.T @ q
    s = np.linalg.inv(r).T
    s = s / np.linalg.norm(s, axis=0)
    qs, zs, images = q @ s, z @ s, z.T @ omega
    rest = omega * (y - q @ images + qs * np.sum(s * images, axis=0))
    return np.sum(q * z, axis=1) + np.mean(rest - qs * zs, axis=1)


def xnysdiag(a, k, rng):
    n = len(a)
    omega = signs(n, k, rng)
    y = a @ omega
    shift = np.finfo(float).eps * np.linalg.norm(y) / n**0.5
    y = y + shift * omega
    inner = omega.T @ y
    inverse = np.linalg.inv(np.linalg.cholesky((inner + inner.T) / 2)).T
    factor = y @ inverse
    own = inverse.T / np.linalg.norm(inverse.T, axis=0)
    z = factor @ own
    rest = omega * z * np.sum(z * omega, axis=0)
    return np.sum(factor**2, axis=1) + np.mean(rest - z**2, axis=1) - shift


METHODS = {
    "plain signs": (plain, tx.HutchinsonEstimator(), ()),
    "Diag++, unbiased": (diagpp, tx.DiagPlusPlusEstimator(), ()),
    "XDiag": (xdiag, tx.XDiagEstimator(), ()),
    "XNysDiag": (xnysdiag, tx.XNysDiagEstimator(), (TAG,)),
}


def main(runs: int) -> None:
    keys = jax.random.split(jax.random.key(3), runs)
    print(f"n = {N}, {runs} runs each\n")
    head("eigenvalues", "products", "estimator", "theirs", "ours", "ratio")
    for name, eigenvalues in thesis_spectra(N).items():
        matrix = matrix_with(eigenvalues)
        a, exact = np.asarray(matrix), np.diag(matrix)

        def error(diagonals, exact=exact):
            relative = np.abs(np.asarray(diagonals) / exact - 1)
            return np.median(np.max(relative, axis=1))

        for k in BUDGETS:
            best = np.inf
            for method, (function, estimator, tags) in METHODS.items():
                rng = np.random.default_rng(0)
                theirs = error([function(a, k, rng) for _ in range(runs)])
                ours = error(diagonal_many(estimator, k, tags, matrix, keys))
                row(name, str(k), method, *beside(theirs, ours))
                best = min(best, theirs)
            settings = tx.AutoDiagonalEstimator(), k, (TAG,)
            ours = error(diagonal_many(*settings, matrix, keys))
            row(name, str(k), "best, and our default", *beside(best, ours))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
