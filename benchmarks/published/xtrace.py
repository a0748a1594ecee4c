"""Error and time of traces: figure 1 of Epperly, Tropp and Webber (arXiv 2301.07825).

    python benchmarks/run.py published/xtrace

The mean relative error for the matrices of the figure, n = 1000, random orthogonal
eigenvectors, float64. The figure is a picture without numbers, and the authors'
repository, eepperly/XTrace, stores none. So theirs are NumPy functions written anew after
the paper and that repository: with random signs, as in the figure, but XTrace and
XNysTrace with the normalised vectors of section 2.3, which the repository recommends and
ours have as well. Then times of one call beside each other, after the first, n = 4000,
both on one core (on Linux).
"""

import os
from functools import partial

import jax
import lineax as lx
import numpy as np
from spectra import ESTIMATORS, matrix_with, operator_of, published_spectra, trace_many
from tables import beside, head, row
from timing import interleaved

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, BUDGETS = 1000, (60, 120, 300)
EPS = np.finfo(float).eps


def signs(n, m, rng):
    return rng.choice([-1.0, 1.0], size=(n, m))


def sphere(n, m, rng):
    omega = rng.standard_normal((n, m))
    return n**0.5 * omega / np.linalg.norm(omega, axis=0)


def hutchinson(a, k, rng):
    omega = signs(len(a), k, rng)
    return np.sum(omega * (a @ omega)) / k


def hutchpp(a, k, rng):
    m = k // 3
    q, _ = np.linalg.qr(a @ signs(len(a), m, rng))
    omega = signs(len(a), k - 2 * m, rng)
    omega = omega - q @ (q.T @ omega)
    return np.sum(q * (a @ q)) + np.sum(omega * (a @ omega)) / omega.shape[1]


def nystrompp(a, k, rng):
    n, m = len(a), k // 2
    omega, psi = signs(n, m, rng), signs(n, k - m, rng)
    y = a @ omega
    shift = n**0.5 * np.spacing(np.linalg.norm(y, 2))
    y = y + shift * omega
    factor = np.linalg.solve(np.linalg.cholesky(omega.T @ y), y.T).T
    u, s, _ = np.linalg.svd(factor, full_matrices=False)
    weights = np.maximum(s**2 - shift, 0)
    known = np.sum(weights[:, None] * (u.T @ psi) ** 2)
    return np.sum(weights) + (np.sum(psi * (a @ psi)) - known) / psi.shape[1]


def left_out(n, q, r, omega):
    """For each vector of `omega`: the unit vector s, orthogonal to all other columns of
    `r`; the coefficients in `q` of its part in their range; and the scale of section 2.3
    for what is left of it."""
    s = np.linalg.inv(r).T
    s = s / np.linalg.norm(s, axis=0)
    w = q.T @ omega
    x = w - s * np.sum(s * w, axis=0)
    return s, x, (n - omega.shape[1] + 1) / (n - np.sum(x**2, axis=0))


def xtrace(a, k, rng):
    n = len(a)
    omega = sphere(n, k // 2, rng)
    y = a @ omega
    q, r = np.linalg.qr(y)
    z = a @ q
    s, x, scale = left_out(n, q, r, omega)
    inner = q.T @ z
    rest = np.sum((omega - q @ x) * (y - z @ x), axis=0)
    return np.trace(inner) + np.mean(scale * rest - np.sum(s * (inner @ s), axis=0))


def xnystrace(a, k, rng):
    n = len(a)
    omega = sphere(n, k, rng)
    y = a @ omega
    shift = EPS * np.linalg.norm(y) / n**0.5
    y = y + shift * omega
    inner = omega.T @ y
    inverse = np.linalg.inv(np.linalg.cholesky((inner + inner.T) / 2))
    own = inverse / np.linalg.norm(inverse, axis=0)
    factor = y @ inverse.T
    z = factor @ own
    *_, scale = left_out(n, *np.linalg.qr(omega), omega)
    samples = scale * np.sum(z * omega, axis=0) ** 2 - np.sum(z**2, axis=0)
    return np.sum(factor**2) + np.mean(samples) - shift * n


THEIRS = {
    "Hutchinson": hutchinson,
    "Hutch++": hutchpp,
    "Nystrom++": nystrompp,
    "XTrace": xtrace,
    "XNysTrace": xnystrace,
}


def errors(runs: int) -> None:
    print(f"Mean relative error, {runs} runs each: theirs, ours, ratio\n")
    head("eigenvalues", "products", *THEIRS)
    for name, eigenvalues in published_spectra(N).items():
        matrix, exact = matrix_with(eigenvalues), np.sum(eigenvalues)
        a = np.asarray(matrix)
        for k in BUDGETS:
            cells = []
            for method, function in THEIRS.items():
                rng = np.random.default_rng(0)
                values = np.array([function(a, k, rng) for _ in range(runs)])
                theirs = np.mean(np.abs(values / exact - 1))
                values, *_ = trace_many(matrix, ESTIMATORS[method][0], k, runs)
                ours = np.mean(np.abs(values / exact - 1))
                cells.append(", ".join(beside(theirs, ours, ".1e")))
            row(name, str(k), *cells)


def times(n: int = 4000, k: int = 120) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 100)) / np.arange(1, 101)
    a = x @ x.T + np.eye(n)
    matrix, key = jax.numpy.asarray(a), jax.random.key(0)

    def ours(estimator, matrix, key):
        operator = operator_of(matrix, lx.positive_semidefinite_tag)
        found = tx.trace(operator, estimator, k=k, key=key, throw=False)
        return found.value, found.std_err

    functions = {}
    for method, function in THEIRS.items():
        compiled = jax.jit(partial(ours, ESTIMATORS[method][0]))
        functions[f"theirs, {method}"] = partial(function, a, k, rng)
        functions[f"ours, {method}"] = partial(compiled, matrix, key)
    found = interleaved(functions)
    print(f"\nMilliseconds of a call, dense, n = {n}, {k} products, medians of 7:\n")
    head("estimator", "theirs", "ours", "ratio")
    for method in THEIRS:
        pair = (1e3 * found[f"{who}, {method}"][0] for who in ("theirs", "ours"))
        row(method, *beside(*pair, ".0f"))


if __name__ == "__main__":
    # Before the first array: XLA makes as many threads as there are cores to use.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    errors(runs=40)
    times()
