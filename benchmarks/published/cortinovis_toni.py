"""Log-determinants for few matvecs: Cortinovis and Toni (arXiv 2601.05778).

    PYTHONPATH=benchmarks python benchmarks/published/cortinovis_toni.py [spectrum ...]

`log det(A + I)` for six spectra, n = 4000, float64. Theirs are the means of 100 stored
runs in their repository, dantoni2000/log-det, `methods_comparison`, for fixed numbers of
matvecs: their own method, and the best of the six others that they compare. Ours is a
call with the same total, which chooses rank, steps and probes by itself. Both know that
no eigenvalue is below 1. Their matrices are diagonal; ours have random orthogonal
eigenvectors, since random signs would see a diagonal matrix without an error. The last
columns are the standard error that ours reports, in the mean, and the share of the calls
whose 95% interval contains the exact number.
"""

import sys

import jax
import jax.numpy as jnp
import jax.scipy.fft as jf
import lineax as lx
import numpy as np
import scipy.sparse as sp
from tables import head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
N = 4000
# Matvecs, and our runs.
BUDGETS = {110: 20, 310: 6, 510: 3, 1010: 1}
# Theirs, and the best of the others.
THEIRS = {
    "Alg": (
        (6.5e-3, 9.1e-4, 3.7e-4, 7.3e-5),
        ("funNystrom++", "Krylov-aware", "Krylov-aware", "Krylov-aware"),
        (6.3e-3, 8.2e-4, 3.1e-4, 1.0e-4),
    ),
    "Geom": (
        (1.9e-2, 3.5e-8, 2.5e-9, 3.0e-10),
        ("one sample", "Krylov-aware", "one sample", "half samples"),
        (1.9e-2, 2.8e-8, 3.1e-9, 4.9e-10),
    ),
    "Gaps": (
        (2.1, 1.6e-2, 1.3e-3, 4.8e-7),
        ("low rank", "one sample", "one sample", "one sample"),
        (0.59, 1.7e-2, 1.3e-3, 6.0e-7),
    ),
    "RBF": (
        (0.26, 0.10, 2.4e-2, 8.0e-5),
        ("quadrature", "funNystrom++", "funNystrom++", "one sample"),
        (3.2e-2, 1.5e-2, 1.2e-2, 7.9e-5),
    ),
    "Matern-1/2": (
        (6.0e-2, 7.3e-3, 4.8e-3, 2.2e-3),
        ("funNystrom++", "half samples", "half samples", "half samples"),
        (2.8e-2, 1.0e-2, 3.6e-3, 1.9e-3),
    ),
    "Matern-3/2": (
        (1.9e-2, 1.5e-3, 2.2e-4, 1.6e-5),
        ("half samples", "Krylov-aware", "Krylov-aware", "Krylov-aware"),
        (1.9e-2, 1.6e-3, 1.6e-4, 7.3e-6),
    ),
}


def algebraic(rng):
    return 100 / np.arange(1, N + 1) ** 2.0


def geometric(rng):
    return 1e6 * np.exp(-0.1 * np.arange(1, N + 1))


def gaps(rng):
    vectors = sp.random(N, N, density=0.01, random_state=rng, format="csc")
    weights = np.repeat([100, 1, 0.01, 1e-6], [200, 200, 200, N - 600])
    weights = weights / np.arange(1, N + 1) ** 2
    return 1e6 * np.linalg.eigvalsh((vectors.multiply(weights) @ vectors.T).toarray())


def kernel(rng, function):
    x = rng.standard_normal(N)
    return np.linalg.eigvalsh(function(np.abs(x[:, None] - x)))


SPECTRA = {
    "Alg": algebraic,
    "Geom": geometric,
    "Gaps": gaps,
    "RBF": lambda rng: kernel(rng, lambda r: 100 * np.exp(-((r / 0.01) ** 2))),
    "Matern-1/2": lambda rng: kernel(rng, lambda r: 100 * np.pi * np.exp(-r)),
    "Matern-3/2": lambda rng: kernel(
        rng, lambda r: 1e4 * np.pi / 2 * (1 + r) * np.exp(-r)
    ),
}


def shifted(eigenvalues) -> lx.AbstractLinearOperator:
    """`A + I` with random eigenvectors: signs, a cosine transform and signs."""
    signs = jax.random.rademacher(jax.random.key(1), (2, N), eigenvalues.dtype)

    def product(v):
        x = jf.dct(signs[0] * jf.dct(signs[1] * v, norm="ortho"), norm="ortho")
        y = jf.idct((1 + eigenvalues) * x, norm="ortho")
        return signs[1] * jf.idct(signs[0] * y, norm="ortho")

    structure = jax.ShapeDtypeStruct((N,), eigenvalues.dtype)
    return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)


def make(budget: int):
    """A compiled call with this total."""

    @jax.jit
    def run(eigenvalues, key):
        found = tx.logdet(
            shifted(eigenvalues),
            k=tx.Matvecs(budget),
            preconditioner=tx.AutoPreconditioner(shift=1.0),
            key=key,
        )
        sizes = found.stats["num_samples"], found.stats["num_steps"]
        return found.value, found.std_err, *found.interval(), found.matvecs, *sizes

    return run


def main(names) -> None:
    head(
        *("spectrum", "matvecs", "runs", "theirs", "best other", "its error"),
        *("ours", "ratio to theirs", "to the best", "our matvecs", "probes", "steps"),
        *("std_err", "covered"),
    )
    calls = {budget: make(budget) for budget in BUDGETS}
    for name in names:
        eigenvalues = np.maximum(SPECTRA[name](np.random.default_rng(0)), 0)
        exact = np.sum(np.log1p(eigenvalues))
        for budget, theirs, other, best in zip(BUDGETS, *THEIRS[name], strict=True):
            keys = jax.random.split(jax.random.key(budget), BUDGETS[budget])
            found = [calls[budget](jnp.asarray(eigenvalues), key) for key in keys]
            values, bars, low, high, spent, *sizes = np.array(jax.device_get(found)).T
            error = np.mean(np.abs(values / exact - 1))
            probes, steps = np.median(sizes, axis=1)
            row(
                *(name, str(budget), str(len(keys))),
                *(f"{theirs:.1e}", other, f"{best:.1e}", f"{error:.1e}"),
                *(f"{error / theirs:.2f}", f"{error / min(theirs, best):.2f}"),
                *(f"{max(spent):.0f}", f"{probes:.0f}", f"{steps:.0f}"),
                f"{np.mean(bars) / exact:.1e}",
                f"{np.mean((low <= exact) & (exact <= high)):.2f}",
            )


if __name__ == "__main__":
    main(sys.argv[1:] or SPECTRA)
