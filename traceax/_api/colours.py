"""Colours of the points of a grid, or of the vertices of a graph, such that points of the
same colour are far from each other.

On a grid the colour of the point x is `m . x mod p` for p colours: points of one colour
make a lattice, whose shortest vector the multiplier m is to make long. On a graph
vertices are coloured greedily, those with the most neighbours first.

References: Tang and Saad, A probing method for computing the diagonal of a matrix
inverse, Numer. Linear Algebra Appl. 19, 2012, for colours of graphs; arXiv:2606.00394,
for multipliers.
"""

import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from .._core.checks import check_positive


# Where there are more multipliers than this, as many are tried, drawn at random.
_MAX_MULTIPLIERS = 2**16


def grid_colours(
    shape: tuple[int, ...], num_colours: int, *, periodic: bool = False
) -> np.ndarray:
    """Colour the points of a grid, so that points of the same colour are far apart.

    !!! Example

        ```python
        import traceax as tx

        print(tx.grid_colours((4, 4), 4))
        ```

    **Arguments:**

    - `shape`: the numbers of points along the axes, Python integers.
    - `num_colours`: p, a Python integer.
    - `periodic`: whether the grid is a torus. Then a p that divides the shape keeps
        points apart across its ends.

    **Returns:**

    An integer array of the given shape, with entries from 0 to p - 1. It takes a few
    seconds at most, for a thousand colours in three dimensions.

    **Raises:**

    `TypeError` or `ValueError` if an argument is not a Python integer of 1 or more, or
    `num_colours` is larger than the grid.
    """
    shape = tuple(check_positive("shape", size) for size in shape)
    num_colours = check_positive("num_colours", num_colours)
    if not shape or num_colours > np.prod(shape):
        raise ValueError(
            "`num_colours` must be at most the number of points of the grid. Found "
            f"{num_colours} colours for the shape {shape}."
        )
    multiplier = _best_multiplier(shape, num_colours, periodic)
    points = np.indices(shape, dtype=np.int64)
    return np.tensordot(multiplier, points, 1).astype(np.int32) % num_colours


def _best_multiplier(shape: tuple[int, ...], p: int, periodic: bool) -> np.ndarray:
    """The multiplier with the fewest pairs of points of one colour at the smallest
    distance, of these the one with the fewest at the next distance, and so on."""
    found = _multipliers(len(shape), p)
    for vectors in _by_length(len(shape), p):
        pairs = np.zeros(len(found))
        for vector in vectors:
            pairs += _same_colour(found, np.array(vector), shape, p, periodic)
        found = found[pairs <= pairs.min() + 1e-9]
    return found[0]


def _multipliers(ndim: int, p: int) -> np.ndarray:
    """Vectors modulo p whose first entry is 1."""
    if p ** (ndim - 1) <= _MAX_MULTIPLIERS:
        others = np.array(list(itertools.product(range(p), repeat=ndim - 1)), int)
    else:
        random = np.random.default_rng(0)
        others = random.integers(p, size=(_MAX_MULTIPLIERS, ndim - 1))
    return np.insert(others, 0, 1, axis=1)


def _by_length(ndim: int, p: int) -> Iterator[list[tuple[int, ...]]]:
    """Vectors of integers, one of each pair v and -v, in lists of equal lengths. In a
    box of more than p points two have the same colour, so these vectors are enough."""
    reach = int(np.ceil(p ** (1 / ndim))) + 1
    box = itertools.product(range(-reach, reach + 1), repeat=ndim)
    half = [v for v in box if v > (0,) * ndim]
    size = lambda v: sum(x * x for x in v)  # noqa: E731
    for _, group in itertools.groupby(sorted(half, key=size), key=size):
        yield list(group)


def _same_colour(
    multipliers: np.ndarray,
    vector: np.ndarray,
    shape: tuple[int, ...],
    p: int,
    periodic: bool,
) -> np.ndarray:
    """For each multiplier, the share of the points x for which x and x + v have the same
    colour. On a torus some of these pairs lie across its ends."""
    share = np.abs(vector) / np.array(shape)
    total = np.zeros(len(multipliers))
    ends = [(0, np.sign(v)) if periodic and v else (0,) for v in vector]
    for across in itertools.product(*ends):
        across = np.array(across)
        weight = np.prod(np.where(across != 0, share, np.maximum(1 - share, 0)))
        step = vector - across * np.array(shape)
        total += weight * (multipliers @ step % p == 0)
    return total


def graph_colours(
    matrix: Any, distance: int | None = None, *, num_colours: int | None = None
) -> np.ndarray:
    """Colour the rows of a sparse matrix, so that rows of the same colour are more than
    `distance` edges apart in its graph.

    !!! Example

        ```python
        import scipy.sparse as sp
        import traceax as tx

        path = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(10, 10))
        print(tx.graph_colours(path, 2))  # [1 2 0 1 2 0 1 2 0 1]
        print(tx.graph_colours(path, num_colours=5).max() + 1)  # 5
        ```

    **Arguments:**

    - `matrix`: a square sparse matrix of SciPy, a BCOO or BCSR, or a graph of networkx,
        of n rows. Its nonzero entries are the edges, in both directions; values do not
        matter.
    - `distance`: a Python integer.
    - `num_colours`: instead of `distance`: the largest distance that needs at most this
        many colours is taken.

    **Returns:**

    An integer array of shape `(n,)`, with entries from 0 to the number of colours less 1.
    It is computed on the host, from the vertices within the distance of each one: n times
    their number is held in memory. A million rows with six neighbours each take about a
    minute at distance 3.

    **Raises:**

    - `TypeError`: `matrix` is none of these; a number is not a Python integer.
    - `ValueError`: `matrix` is not square; a number is below 1; neither `distance` nor
        `num_colours` is given, or both; even distance 1 needs more colours.
    """
    graph = _graph_of(matrix)
    if (distance is None) == (num_colours is None):
        raise ValueError(
            "`distance` or `num_colours` must be given, and not both. Found "
            f"distance={distance} and num_colours={num_colours}."
        )
    if distance is not None:
        return _greedy(_power(graph, check_positive("distance", distance)))
    return _affordable(graph, check_positive("num_colours", num_colours))


def _affordable(graph: Any, num_colours: int) -> np.ndarray:
    """The colours of the largest distance that takes at most so many."""
    found, reach = None, graph
    while True:
        colours = _greedy(reach)
        if colours.max(initial=-1) >= num_colours:
            break
        further = _joined(reach @ graph)
        found = colours
        if further.nnz == reach.nnz:
            break
        reach = further
    if found is None:
        raise ValueError(
            f"`num_colours` must be at least {colours.max() + 1} for this graph, even at "
            f"distance 1. Found {num_colours}."
        )
    return found


def _graph_of(matrix: Any) -> Any:
    """The pattern of `I + A + A^T` as a CSR matrix of ones."""
    sparse = import_module("scipy.sparse")
    if hasattr(matrix, "adj") and hasattr(matrix, "nodes"):
        matrix = import_module("networkx").to_scipy_sparse_array(matrix)
    is_sparse = hasattr(matrix, "todense") and hasattr(matrix, "indices")
    if is_sparse and not sparse.issparse(matrix):  # BCOO or BCSR
        matrix = matrix.to_bcoo() if hasattr(matrix, "to_bcoo") else matrix
        inside = np.all(np.asarray(matrix.indices) < matrix.shape, axis=1)
        entries = np.asarray(matrix.data)[inside]
        places = tuple(np.asarray(matrix.indices)[inside].T)
        matrix = sparse.coo_array((entries, places), shape=matrix.shape)
    if not sparse.issparse(matrix):
        raise TypeError(
            "`matrix` must be a sparse matrix of SciPy or JAX, or a graph of networkx. "
            f"Found an object of type {type(matrix).__name__}."
        )
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"`matrix` must be square. Found the shape {matrix.shape}.")
    entries = sparse.csr_array(matrix)
    entries.eliminate_zeros()
    entries.data = np.ones(entries.nnz, np.int32)
    eye = sparse.eye_array(entries.shape[0], dtype=np.int32)
    return _joined(entries + entries.T + eye)


def _joined(matrix: Any) -> Any:
    """The pattern of a matrix with nonnegative entries."""
    matrix = matrix.tocsr()
    matrix.data = np.ones(matrix.nnz, np.int32)
    return matrix


def _power(graph: Any, distance: int) -> Any:
    """The pattern of the pairs within a distance."""
    reach = graph
    for _ in range(distance - 1):
        reach = _joined(reach @ graph)
    return reach


def _greedy(graph: Any) -> np.ndarray:
    """Each vertex in turn gets the first colour that none of its neighbours has."""
    starts, neighbours = graph.indptr.tolist(), graph.indices.tolist()
    colours = [-1] * graph.shape[0]
    for i in np.argsort(-np.diff(graph.indptr), kind="stable").tolist():
        taken = {colours[j] for j in neighbours[starts[i] : starts[i + 1]]}
        colour = 0
        while colour in taken:
            colour += 1
        colours[i] = colour
    return np.array(colours, np.int32)
