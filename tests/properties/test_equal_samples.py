"""Few samples from random signs that are equal by chance have an error bar, and those of
a diagonal operator, which are equal because it is diagonal, have none.

A sample of a block of equal entries, `(+-1 +-1 +-1)^2`, is 1 with probability 3/4. Right
values are those of the matrices; seeds are fixed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import matrix_free


N, KEYS = 24, jr.split(jr.key(20261129), 600)
ROWS = np.arange(N)


def graph():
    """The adjacency matrix of a 3-regular graph."""
    matrix = np.zeros((N, N))
    for shift in (1, -1, N // 2):
        matrix[ROWS, (ROWS + shift) % N] = 1
    return matrix


def block(size):
    return np.where((size > ROWS)[:, None] & (size > ROWS), 1.0, 0.0)


def noise(seed, size):
    entries = size * np.random.default_rng(seed).standard_normal((N, N))
    return (entries + entries.T) / 2


DIAGONAL = np.diag(1.0 + ROWS)
SYMMETRIC = lx.symmetric_tag


@eqx.filter_jit
def found(call, matrix, tags, k):
    def one(key):
        solution = call(matrix_free(matrix, tags), k=k, key=key, throw=False)
        return solution.value, solution.std_err

    return jax.lax.map(one, KEYS, batch_size=100)


def coverage(call, matrix, exact, k, tags=()):
    value, std_err = map(np.asarray, found(call, jnp.asarray(matrix), tags, k))
    quantile = stats.t.ppf(0.975, k - 1)
    return np.mean(np.abs(value - exact) <= quantile * std_err + 1e-9)


def trace(operator, **settings):
    return tx.trace(operator, tx.HutchinsonEstimator(), **settings)


def leaf_traces(operator, **settings):
    return tx.leaf_traces(operator, tx.HutchinsonEstimator(), **settings)


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("k", [4, 6, 8, 10, 12])
def test_row_norms_of_a_regular_graph(k):
    """0.68, 0.82, 0.90, 0.94 and 0.97 without a floor. Weights need not be equal."""
    weights = graph() * (1 + noise(0, 0.01))
    for matrix in (graph(), weights):
        exact = np.linalg.norm(matrix, axis=1)
        assert coverage(tx.row_norms, matrix, exact, k) >= 0.95


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("k", [4, 6, 10])
def test_traces_of_a_block(k):
    """The same, of trace and leaf trace, beside a diagonal and other small entries."""
    small = noise(1, 0.005)
    for size in (3, 5):
        matrix = block(size) + DIAGONAL + small
        assert coverage(trace, matrix, np.trace(matrix), k, SYMMETRIC) >= 0.95
        matrix = block(size) + DIAGONAL
        assert coverage(trace, matrix, np.trace(matrix), k) >= 0.95
        assert coverage(leaf_traces, matrix, np.trace(matrix), k) >= 0.95


def test_frobenius_norm_of_a_block():
    assert coverage(tx.frobenius_norm, block(3), 3.0, 6) >= 0.95


def test_products_of_blocks():
    """Their entries beside those of the identity, which are known."""
    identity = lx.MatrixLinearOperator(jnp.eye(N))

    @jax.jit
    def products(matrix, keys):
        def one(key):
            operators = [lx.MatrixLinearOperator(matrix), identity]
            solution = tx.frobenius_products(operators, k=6, key=key)
            return solution.value, solution.std_err

        return jax.lax.map(one, keys, batch_size=100)

    value, std_err = map(np.asarray, products(jnp.asarray(block(3)), KEYS))
    inside = np.abs(value - [[9, 3], [3, N]]) <= stats.t.ppf(0.975, 5) * std_err
    assert np.mean(inside[:, 0, 0]) >= 0.95
    assert np.mean(inside[:, 0, 1]) >= 0.95
    assert np.all(std_err[:, 1, 1] < 1e-9)


@pytest.mark.slow
def test_small_rounds():
    """Of an adaptive budget that may end after four samples."""
    k = tx.Adaptive(rtol=0.2, max_k=12, round_size=4, min_samples=4)
    matrix = block(3) + 0.1 * np.eye(N)

    @jax.jit
    def ends(matrix, keys):
        def one(key):
            return trace(matrix_free(matrix), k=k, key=key, throw=False).interval()

        return jax.lax.map(one, keys, batch_size=100)

    low, high = ends(jnp.asarray(matrix), KEYS)
    exact = np.trace(matrix)
    assert np.mean((low <= exact) & (exact <= high)) >= 0.95


@pytest.mark.slow(but="frobenius_norm-float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize(
    "call",
    [trace, leaf_traces, tx.row_norms, tx.frobenius_norm],
    ids=lambda x: x.__name__,
)
def test_diagonal_operators_keep_their_zero_bars(call, dtype):
    """But for rounding; as products of which nothing is known."""
    entries = np.random.default_rng(0).standard_normal(N)
    if dtype == np.complex64:
        entries = entries * np.exp(1j * ROWS)
    matrix = jnp.asarray(np.diag(entries).astype(dtype))
    for k in (2, 10):
        _, std_err = found(call, matrix, (), k)
        limit = 20 * np.finfo(dtype).eps * np.linalg.norm(entries)
        assert np.all(np.asarray(std_err) < limit)


def test_sixteen_equal_samples_are_no_chance():
    """The trace of a skew-symmetric matrix is 0 in each sample: few do not tell."""
    matrix = np.triu(noise(2, 1.0), 1)
    matrix = jnp.asarray(matrix - matrix.T)
    assert np.all(np.asarray(found(trace, matrix, (), 10)[1]) > 1)
    assert np.all(np.asarray(found(trace, matrix, (), 16)[1]) < 1e-9)


def test_samples_of_dense_matrices_are_as_before():
    """Their bars from five samples are not those of marks, in 99% of the draws."""
    matrix = jnp.asarray(noise(3, 1.0))

    @eqx.filter_jit
    def both(matrix):
        def one(key):
            solution = trace(matrix_free(matrix, SYMMETRIC), k=5, key=key)
            samples = solution.stats["samples"]
            return solution.std_err, jnp.std(samples, ddof=1) / 5**0.5

        return jax.lax.map(one, KEYS)

    std_err, plain = map(np.asarray, both(matrix))
    assert np.mean(std_err < 3 * plain) > 0.99
