"""The log-determinant of a chain of up to 2^25 points, by imate.

    PYTHONPATH=benchmarks python benchmarks/published/bidiagonal.py [log2 of n ...]

The matrix is B^T B with B bidiagonal, 2 on its diagonal and 1 beside it, so that its
log-determinant is 2 n log 2. Theirs are the numbers in their repository, ameli/imate,
`compare_methods_analytic_matrix_logdet`: 200 probes of 30 Lanczos steps, on 20 threads,
and the seconds of a sparse Cholesky factorisation. Ours are two sweeps over 12 colours
along the chain, of 12 steps. Then -Laplace + 1 on periodic grids of three dimensions, two
sweeps over 64 colours of 15 steps, beside a sparse LU factorisation by SciPy.
"""

import resource
import sys
import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from tables import head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
# log2 of n: their mean relative error, their seconds, those of Cholesky; our runs.
PUBLISHED = {
    15: (2.0e-4, 0.11, 0.009, 10),
    20: (4.7e-5, 11.2, 0.35, 3),
    25: (1.0e-5, 413, 16.5, 1),
}
PRODUCTS = 200 * 30


def logdet(operator, colours, num_steps, exact, runs):
    """Mean relative error and standard error, products, seconds after compilation."""
    sampler = tx.ColouredSampler(colours)
    estimator = tx.SLQEstimator(sampler, krylov=tx.Lanczos(window=0))

    @jax.jit
    def estimate(key):
        found = tx.logdet(
            operator,
            estimator,
            k=2 * sampler.num_colours,
            num_steps=num_steps,
            key=key,
            execution=tx.Local(block_size=1),
        )
        return found.value, found.std_err, found.matvecs

    keys = jax.random.split(jax.random.key(0), runs)
    compiled = estimate.lower(keys[0]).compile()
    start = time.perf_counter()
    found = np.array([jax.device_get(compiled(key)) for key in keys])
    seconds = (time.perf_counter() - start) / runs
    values, bars, products = found.T
    error = np.mean(np.abs(values / exact - 1))
    return error, np.mean(bars) / exact, int(products[0]), seconds


def chain(n: int) -> lx.AbstractLinearOperator:
    def product(v):
        image = 2 * v + jnp.pad(v[1:], (0, 1))
        return 2 * image + jnp.pad(image[:-1], (1, 0))

    structure = jax.ShapeDtypeStruct((n,), jnp.float64)
    return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)


def chains(exponents) -> None:
    head(
        *("n", "products: theirs", "ours", "error: theirs", "ours", "ours, expected"),
        *("ratio", "seconds: theirs", "ours", "Cholesky", "GiB at most"),
    )
    for exponent in exponents:
        n, (theirs, their_seconds, cholesky, runs) = 2**exponent, PUBLISHED[exponent]
        colours = tx.grid_colours((n,), 12)
        error, bar, products, seconds = logdet(
            chain(n), colours, 12, 2 * n * np.log(2), runs
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        label = f"2^{exponent} ({runs} run{'s' * (runs > 1)})"
        errors = f"{theirs:.1e}", f"{error:.1e}", f"{bar:.1e}", f"{error / theirs:.1e}"
        ours = f"{float(f'{seconds:.2g}'):g}"
        times = f"{their_seconds:g}", ours, f"{cholesky:g}", f"{peak:.1f}"
        row(label, str(PRODUCTS), str(products), *errors, *times)


def torus(side: int) -> lx.AbstractLinearOperator:
    def product(u):
        return 7 * u - sum(jnp.roll(u, s, axis) for s in (-1, 1) for axis in range(3))

    structure = jax.ShapeDtypeStruct((side,) * 3, jnp.float64)
    return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)


def seconds_of_factorisation(side: int) -> float:
    ring = sp.diags_array(
        [1.0] * 4, offsets=[1 - side, -1, 1, side - 1], shape=(side,) * 2
    )
    eye = sp.eye_array(side)
    plane = sp.kron(ring, eye) + sp.kron(eye, ring)
    neighbours = sp.kron(plane, eye) + sp.kron(sp.eye_array(side**2), ring)
    matrix = sp.csc_array(7 * sp.eye_array(side**3) - neighbours)
    start = time.perf_counter()
    spla.splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return time.perf_counter() - start


def grids() -> None:
    print("\n-Laplace + 1 in three dimensions, one run each:\n")
    head("n", "products", "error", "expected", "seconds", "seconds of LU")
    for side, factorised in ((16, True), (24, True), (64, False)):
        ring = 2 - 2 * np.cos(2 * np.pi * np.arange(side) / side)
        exact = np.sum(np.log(ring[:, None, None] + ring[:, None] + ring + 1))
        colours = tx.grid_colours((side,) * 3, 64, periodic=True)
        error, bar, products, seconds = logdet(torus(side), colours, 15, exact, 1)
        lu = f"{seconds_of_factorisation(side):.2g}" if factorised else "-"
        cells = f"{error:.1e}", f"{bar:.1e}", f"{seconds:.2g}"
        row(f"{side}^3", str(products), *cells, lu)


if __name__ == "__main__":
    chains([int(each) for each in sys.argv[1:]] or PUBLISHED)
    grids()
