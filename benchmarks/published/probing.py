"""The variance of probing by colours: exact formula and measured.

    PYTHONPATH=benchmarks python benchmarks/published/probing.py

p plain signs have the variance `2/p sum |b_ij|^2` over pairs i != j, and a sweep over p
colours `2 sum |b_ij|^2` over pairs of one colour. The gain is their ratio at the same
number of products. Functions of the periodic grids are applied exactly, by FFT, and those
of graphs and kernels are dense matrices, so that only sampling is measured: the mean
square error of 40 keys, and the standard error of its ratio. Colours of grids are
multipliers, arXiv 2606.00394.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse as sp
from tables import head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
KEYS = 40


class Case(NamedTuple):
    """`squares` are the sums of |b_ij|^2 over all pairs and over those of one colour;
    `estimate(sampler, k, key)` is one of `exact`."""

    name: str
    colours: Any
    squares: tuple[float, float]
    exact: float
    estimate: Callable


def inverse(x):
    return 1 / x


def eigenvalues_on_torus(side, ndim, shift):
    """Of -Laplace + shift, for all frequencies."""
    ring = 2 - 2 * np.cos(2 * np.pi * np.arange(side) / side)
    return sum(np.meshgrid(*[ring] * ndim, indexing="ij")) + shift


def by_fft(eigenvalues, tag=lx.symmetric_tag) -> lx.AbstractLinearOperator:
    shape = eigenvalues.shape
    half = jnp.asarray(eigenvalues[..., : shape[-1] // 2 + 1])

    def product(v):
        return jnp.fft.irfftn(half * jnp.fft.rfftn(v), shape)

    structure = jax.ShapeDtypeStruct(shape, half.dtype)
    return lx.FunctionLinearOperator(product, structure, tag)


def trace(operator, sampler, k, key, deflation=None):
    estimator = tx.HutchinsonEstimator(sampler)
    return tx.trace(operator, estimator, k=k, key=key, deflation=deflation).value


def logdet(operator, sampler, k, key):
    estimator = tx.SLQEstimator(sampler)
    return tx.logdet(operator, estimator, k=k, num_steps=30, key=key).value


def squares_on_torus(eigenvalues, colours):
    """From one row, as all rows are equal but for a shift, and colours a lattice."""
    squares = np.fft.ifftn(eigenvalues).real ** 2
    squares[(0,) * squares.ndim] = 0
    return squares.size * squares.sum(), squares.size * squares[colours == 0].sum()


def squares_of(matrix, colours):
    squares = matrix**2 * ~np.eye(len(matrix), dtype=bool)
    return squares.sum(), squares[np.equal.outer(colours, colours)].sum()


def grid(side, ndim, shift, function, p, quadrature=False) -> Case:
    eigenvalues = eigenvalues_on_torus(side, ndim, shift)
    values = function(eigenvalues)
    colours = tx.grid_colours(values.shape, p, periodic=True)
    estimate = partial(trace, by_fft(values))
    if quadrature:
        estimate = partial(logdet, by_fft(eigenvalues, lx.positive_semidefinite_tag))
    name = f"{side}^{ndim}, -Laplace + {shift}, {function.__name__}"
    name += ", by `tx.logdet`" if quadrature else ""
    squares = squares_on_torus(values, colours)
    return Case(name, colours, squares, values.sum(), estimate)


def function_of(function, matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * function(values) @ vectors.T


def dense(name, matrix, colours, exact=None) -> Case:
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
    exact = np.trace(matrix) if exact is None else exact
    squares = squares_of(matrix, colours)
    offset = exact - np.trace(matrix)  # what a preconditioner knows

    def estimate(sampler, k, key):
        return offset + trace(operator, sampler, k, key)

    return Case(name, colours, squares, exact, estimate)


def graph(n: int = 1000) -> Case:
    """Three random cycles through all vertices: degree 6."""
    rng = np.random.default_rng(0)
    edges = sp.csr_array((n, n))
    for order in (rng.permutation(n) for _ in range(3)):
        edges += sp.csr_array((np.ones(n), (order, np.roll(order, 1))), (n, n))
    adjacency = ((edges + edges.T) > 0).astype(float)
    matrix = np.diag(adjacency.sum(axis=1) + 1) - adjacency.toarray()
    colours = tx.graph_colours(adjacency, 3)
    name = "random graph of degree 6, L + 1, log, distance 3"
    return dense(name, function_of(np.log, matrix), colours)


def in_morton_order(points, bits: int = 10):
    """The bits of all coordinates, by turns, are the place in the order."""
    cells = (points * 2**bits).astype(int)
    digits = (cells[:, None] >> np.arange(bits)[:, None]) & 1
    place = digits.reshape(len(points), -1) @ 2 ** np.arange(digits[0].size)
    return points[np.argsort(place)]


def kernels(ndim, length, n: int = 1000, noise: float = 0.01):
    """Matern-3/2 for random points, without and with preconditioners."""
    points = in_morton_order(np.random.default_rng(0).uniform(size=(n, ndim)))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    scaled = 3**0.5 * distances / length
    kernel = (1 + scaled) * np.exp(-scaled) + noise * np.eye(n)
    exact, colours = np.linalg.slogdet(kernel)[1], np.arange(n) % 32
    name = f"Matern-3/2 of length {length}, {ndim}D, log"
    yield dense(name, function_of(np.log, kernel), colours)
    operator = lx.MatrixLinearOperator(jnp.asarray(kernel), lx.positive_semidefinite_tag)
    for rank in (60, 100):
        made = tx.nystrom_preconditioner(
            operator, rank, key=jax.random.key(0), shift=noise
        )
        root = np.asarray(made.power(-0.5, jnp.eye(n)))
        whitened = function_of(np.log, root @ kernel @ root)
        yield dense(f"the same, Nystrom, rank {rank}", whitened, colours, exact)


def square_errors(estimate, exact, sampler, k):
    """Relative ones."""

    @jax.jit
    def values(keys):
        return jax.lax.map(partial(estimate, sampler, k), keys)

    found = values(jax.random.split(jax.random.key(0), KEYS))
    return (np.asarray(found) / exact - 1) ** 2


def plain(x, digits) -> str:
    """Rounded, and without a power of ten up to a million."""
    return f"{float(f'{x:.{digits}g}'):g}"


def gains(cases) -> None:
    print(f"Relative standard deviations and gains in variance, {KEYS} keys:\n")
    head(
        *("operator and function", "p", "signs", "measured"),
        *("colours", "measured", "gain", "measured"),
    )
    for case in cases:
        p = int(case.colours.max()) + 1
        expected = np.array(case.squares) * (2 / p, 2) / case.exact**2
        samplers = tx.RademacherSampler(), tx.ColouredSampler(case.colours)
        estimate = partial(square_errors, case.estimate, case.exact)
        errors = np.array([estimate(sampler, p) for sampler in samplers])
        found, luck = errors.mean(axis=1), errors.var(axis=1, ddof=1) / KEYS
        gain = found[0] / found[1]
        noise = gain * np.sum(luck / found**2) ** 0.5
        pairs = np.sqrt(np.stack([expected, found], axis=1))
        cells = (f"{x:.1e}" for x in pairs.ravel())
        exact_gain = plain(expected[0] / expected[1], 3)
        row(
            case.name,
            str(p),
            *cells,
            exact_gain,
            f"{plain(gain, 2)} +- {plain(noise, 1)}",
        )


def fourier_modes(side, count):
    """Real eigenvectors of the smallest eigenvalues of -Laplace, ten at most."""
    x, y = np.indices((side, side)) * 2 * np.pi / side
    waves = [x, y, x + y, x - y]
    modes = [np.ones_like(x), *map(np.cos, waves), *map(np.sin, waves), np.cos(2 * x)]
    return np.stack(modes[:count])


def deflated(side: int = 32, shift: float = 0.01, count: int = 10) -> None:
    """The entries of this inverse hardly decay: its smooth eigenvectors are deflated."""
    values = inverse(eigenvalues_on_torus(side, 2, shift))
    operator, exact = by_fft(values), values.sum()
    modes = fourier_modes(side, count)
    unit = modes.reshape(count, -1) / np.linalg.norm(modes, axis=(1, 2))[:, None]
    matrix = np.asarray(operator.as_matrix())
    rest = matrix - unit.T @ (unit @ matrix @ unit.T) @ unit
    print(f"\n{side}^2, -Laplace + {shift}, inverse, {count} Fourier modes:\n")
    head("probes", "products", "standard deviation", "measured")
    for label, left, vectors, spent in (
        ("", matrix, None, 0),
        (", deflated", rest, modes, count),
    ):
        for kind, p in (("signs", 28 - spent), ("colours", 8), ("colours", 28 - spent)):
            colours = tx.grid_colours((side, side), p, periodic=True)
            all_pairs, same_colour = squares_of(left, colours.ravel())
            variance = 2 * (all_pairs / p if kind == "signs" else same_colour)
            sampler = tx.ColouredSampler(colours)
            if kind == "signs":
                sampler = tx.RademacherSampler()
            estimate = partial(trace, operator, deflation=vectors)
            errors = square_errors(estimate, exact, sampler, p + spent)
            cells = f"{variance**0.5 / exact:.1e}", f"{np.mean(errors) ** 0.5:.1e}"
            row(f"{p} {kind}{label}", str(p + spent), *cells)


def main() -> None:
    cases = [
        grid(256, 2, 0.1, np.log, 16),
        grid(64, 2, 0.1, np.log, 16, quadrature=True),
        grid(256, 2, 0.1, np.log, 64),
        grid(256, 2, 1, np.log, 64),
        grid(64, 3, 0.1, np.log, 64),
        grid(256, 2, 0.1, inverse, 128),
        graph(),
        *kernels(ndim=1, length=0.05),
        *kernels(ndim=2, length=0.2),
    ]
    gains(cases)
    deflated()


if __name__ == "__main__":
    main()
