"""Colours of grids and graphs: exact variances of coloured probes, and distances."""

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from jax.experimental.sparse import BCOO, BCSR
from scipy.sparse.csgraph import dijkstra

import traceax as tx


def gain(colours, shift, function):
    """The variance of as many plain signs over that of one sweep of coloured ones, for a
    function of the Laplacian of a torus: both are sums of squares of its entries."""
    shape, p = colours.shape, colours.max() + 1
    axes = [2 - 2 * np.cos(2 * np.pi * np.arange(n) / n) for n in shape]
    row = np.fft.ifftn(function(sum(np.ix_(*axes)) + shift)).real
    squares = row**2
    squares[(0,) * len(shape)] = 0
    plain, coloured = colours.size * squares.sum() / p, 0
    for colour in range(p):
        spectrum = np.fft.fftn(colours == colour)
        pairs = np.fft.ifftn(np.abs(spectrum) ** 2).real
        coloured += np.sum(pairs * squares)
    return plain / coloured


@pytest.mark.parametrize(
    ("shape", "num_colours", "shift", "function", "expected"),
    [
        ((256, 256), 16, 0.1, np.log, 75),
        ((256, 256), 64, 0.1, np.log, 2840),
        ((256, 256), 128, 0.1, np.reciprocal, 175),
        ((64, 64, 64), 64, 0.1, np.log, 321),
    ],
)
def test_gain_on_a_torus(shape, num_colours, shift, function, expected):
    """At least 97% of the gain of the best multipliers known."""
    colours = tx.grid_colours(shape, num_colours, periodic=True)
    assert colours.shape == shape
    assert set(np.unique(colours)) == set(range(num_colours))
    assert gain(colours, shift, function) > 0.97 * expected


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4)])
def test_few_points(shape):
    size = int(np.prod(shape))
    for periodic in (False, True):
        one = tx.grid_colours(shape, 1, periodic=periodic)
        assert np.all(one == 0)
        every = tx.grid_colours(shape, size, periodic=periodic)
        assert np.all((every >= 0) & (every < size))
    line = tx.grid_colours((size,), size)
    assert len(set(line)) == size


def random_graph(n=120):
    graph = sp.random_array((n, n), density=2 / n, rng=np.random.default_rng(0))
    graph.data[:] = -1.0
    return graph.tocsr()


def smallest_distance(graph, colours):
    """Between two rows of the same colour."""
    hops = dijkstra(graph, directed=False, unweighted=True)
    np.fill_diagonal(hops, np.inf)
    return np.min(hops[colours[:, None] == colours])


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_rows_of_a_colour_are_far_from_each_other(distance):
    graph = abs(random_graph())
    colours = tx.graph_colours(graph, distance)
    assert colours.shape == (graph.shape[0],)
    assert smallest_distance(graph, colours) > distance
    assert set(np.unique(colours)) == set(range(colours.max() + 1))


def test_as_many_colours_as_are_affordable():
    graph = abs(random_graph())
    counts = [tx.graph_colours(graph, d).max() + 1 for d in (1, 2, 3)]
    assert counts == sorted(set(counts))
    for distance, count in enumerate(counts, start=1):
        found = tx.graph_colours(graph, num_colours=count)
        np.testing.assert_array_equal(found, tx.graph_colours(graph, distance))
    path = sp.diags_array([1.0], offsets=[1], shape=(6, 6))
    assert tx.graph_colours(path, num_colours=10).max() == 5, "all are connected"


def test_every_form_of_a_graph():
    """Of one triangle and values that cancel, with entries that fill arrays up."""
    graph = random_graph()
    expected = tx.graph_colours(graph, 2)
    dense = jnp.asarray(graph.toarray())
    for form in (
        graph.tocoo(),
        sp.csc_matrix(graph),
        BCOO.fromdense(dense, nse=graph.nnz + 3),
        BCSR.fromdense(dense),
        nx.from_scipy_sparse_array(abs(graph + graph.T)),
        graph - 2 * graph.T,
    ):
        np.testing.assert_array_equal(tx.graph_colours(form, 2), expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: tx.grid_colours((3, 3), 10),
            ValueError,
            "`num_colours` must be at most",
        ),
        (
            lambda: tx.grid_colours((3, 3), 0),
            ValueError,
            "`num_colours` must be at least",
        ),
        (lambda: tx.grid_colours((3, 0), 1), ValueError, "`shape` must be at least"),
        (lambda: tx.grid_colours((3.0,), 1), TypeError, "`shape` must be an integer"),
        (lambda: tx.graph_colours(np.eye(3), 1), TypeError, "`matrix` must be a sparse"),
        (lambda: tx.graph_colours(sp.eye_array(3, 4), 1), ValueError, "must be square"),
        (lambda: tx.graph_colours(sp.eye_array(3)), ValueError, "must be given, and not"),
        (lambda: tx.graph_colours(sp.eye_array(3), 0), ValueError, "`distance` must be"),
        (
            lambda: tx.graph_colours(sp.csr_array(np.ones((3, 3))), num_colours=2),
            ValueError,
            "`num_colours` must be at least 3",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
