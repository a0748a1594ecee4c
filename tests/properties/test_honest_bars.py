"""Error bars and estimates in the cases that are hardest for them: traces that cancel,
ranks just below the number of probes, budgets that end after small rounds, few samples.

Exact traces are those of the matrices in float64. `assert_covers` is a binomial test over
keys: it fails with probability `FALSE_ALARM` or less where the interval covers what is
asked, or more. Seeds are fixed.
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

from ..helpers import diagonals_of_matrices, hermitian, PSD, rms, traces_of_matrix


FALSE_ALARM = 1e-5
DTYPES = [np.float32, np.float64]


def errors_and_bars(matrix, estimator, k, num_keys, tags=()):
    """Errors, error bars, and half-widths of 95% intervals, for each of many keys."""
    keys = jr.split(jr.key(20261121), num_keys)
    values, bars, others = traces_of_matrix(matrix, estimator, keys, k=k, tags=tags)
    number = np.sum(np.isfinite(others["samples"]), axis=1)
    exact = np.trace(np.asarray(matrix, np.float64))
    quantiles = stats.t.ppf(0.975, number - 1)
    return np.asarray(values, np.float64) - exact, bars, quantiles * np.asarray(bars)


def assert_covers(errors, widths, probability):
    covered = np.sum(np.abs(errors) <= widths)
    assert covered >= stats.binom.ppf(FALSE_ALARM, len(errors), probability)


# Rounding.

N = 64


def off_diagonal_block():
    """Rank 2, eigenvalues 32 and -32."""
    block = np.zeros((N, N))
    block[: N // 2, N // 2 :] = 1
    return block + block.T


def nilpotent():
    """Rank 1, no eigenvalue but zero, no zero entry."""
    a, b = np.linalg.qr(np.random.default_rng(0).standard_normal((N, 2)))[0].T
    return np.outer(a, b)


ROUNDS = tx.Adaptive(atol=0.1, max_k=32, round_size=8)


@pytest.mark.slow(but="HutchPlusPlus*-24-*")
@pytest.mark.parametrize(
    ("cls", "k", "dtype"),
    [
        (tx.HutchPlusPlusEstimator, 24, np.float32),
        (tx.HutchPlusPlusEstimator, ROUNDS, np.float32),
        (tx.XTraceEstimator, 24, np.float32),
        (tx.XTraceEstimator, 24, np.float64),
        (tx.XTraceEstimator, ROUNDS, np.float32),
    ],
)
def test_rounding_where_the_trace_cancels(cls, k, dtype):
    """The trace is zero and a sketch wider than the rank exact, so that all error is
    rounding. It is covered, by bars that are of its size."""
    for matrix in (off_diagonal_block(), 1e4 * nilpotent()):
        errors, bars, widths = errors_and_bars(matrix.astype(dtype), cls(), k, 100)
        assert_covers(errors, widths, 0.95)
        assert np.max(bars) < 1e3 * np.finfo(dtype).eps * np.linalg.norm(matrix)


ONE_ROUND = tx.Adaptive(atol=0.1, max_k=16, round_size=16)


@pytest.mark.slow(but=("float32-fixed", "float64-rounds"))
@pytest.mark.parametrize(
    ("estimator", "k"),
    [
        (tx.HutchinsonEstimator(), 16),
        (tx.HutchinsonEstimator(), ROUNDS),
        (tx.HutchPlusPlusEstimator(tx.RademacherSampler()), ONE_ROUND),
    ],
    ids=["fixed", "rounds", "one round of Hutch++"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_where_all_samples_are_equal(estimator, k, dtype):
    """With random signs, diagonal matrices leave no sampling error. What rounding leaves
    of terms that cancel is covered, at any scale; by Hutch++ too, where it has no round
    to sketch in."""
    entries = np.random.default_rng(0).standard_normal(N)
    for scale in (1e-15, 1, 1e15):
        row = scale * np.concatenate([entries, -entries[::-1]])
        row = np.asarray(row * (1 + np.arange(2 * N) / 1e6), dtype)
        errors, bars, widths = errors_and_bars(np.diag(row), estimator, k, 100)
        assert_covers(errors, widths, 0.95)
        assert np.max(bars) < 1e2 * np.finfo(dtype).eps * np.linalg.norm(row)


@pytest.mark.slow
def test_rounding_in_leaves_and_products():
    """The same for traces of leaves, and for inner products of two operators."""
    row = np.random.default_rng(1).standard_normal((2, N)).astype(np.float32)
    row[:, -1] -= np.sum(row, axis=1, dtype=np.float64)
    ones, structure = jnp.ones(N, np.float32), jax.eval_shape(lambda: list(row))
    both = lx.FunctionLinearOperator(
        lambda v: [x * y for x, y in zip(v, row, strict=True)], structure
    )
    pair = [lx.DiagonalLinearOperator(jnp.asarray(x)) for x in (ones, row[0])]
    keys = jr.split(jr.key(0), 50)

    @eqx.filter_jit
    def errors(keys):
        def one(key):
            leaves = tx.leaf_traces(both, tx.HutchinsonEstimator(), k=8, key=key)
            products = tx.frobenius_products(pair, k=8, key=key)
            values = [*leaves.value, products.value[0, 1]]
            return values, [*leaves.std_err, products.std_err[0, 1]]

        return jax.lax.map(one, keys)

    values, bars = np.asarray(errors(keys), np.float64)
    exact = np.sum(row[[0, 1, 0]], axis=1, dtype=np.float64)
    for value, bar, truth in zip(values, bars, exact, strict=True):
        assert_covers(value - truth, 2 * bar, 0.95)
        assert np.max(bar) < 1e2 * np.finfo(np.float32).eps * np.linalg.norm(row)


# Probes that are essential.

RANK_FIVE = [1.0] * 5 + [0.0] * 59


@pytest.mark.slow(but="float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sketch_one_probe_wider_than_the_rank(dtype):
    """Exact, whatever the probes: 6 of them for rank 5. In one of five draws one probe is
    orthogonal to the null vector to 2%, in float32 once was taken for essential there."""
    matrix = hermitian(3, RANK_FIVE, dtype)
    errors, _, widths = errors_and_bars(matrix, tx.XTraceEstimator(), 12, 400)
    assert np.max(np.abs(errors)) < 500 * np.finfo(dtype).eps
    assert_covers(errors, widths, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "dtype"), [(6, np.float32), (7, np.float32), (6, np.float64)]
)
def test_xnystrace_wider_than_the_rank(k, dtype):
    """One or two probes wider than rank 5: exact but for what rounding becomes where the
    others are nearly dependent, and so are nearly all bars."""
    matrix, estimator = hermitian(3, RANK_FIVE, dtype), tx.XNysTraceEstimator()
    errors, bars, widths = errors_and_bars(matrix, estimator, k, 400, PSD)
    assert_covers(errors, widths, 0.95)
    eps = float(np.finfo(dtype).eps)
    assert np.median(np.abs(errors)) < 1e4 * eps
    assert np.median(bars) < 3e4 * eps


@pytest.mark.slow
@pytest.mark.parametrize("cls", [tx.XNysTraceEstimator, tx.XNysDiagEstimator])
def test_diagonal_one_probe_wider_than_the_rank(cls):
    """The same for all entries of the diagonal."""
    matrix, keys = hermitian(3, RANK_FIVE), jr.split(jr.key(20261121), 100)
    args = matrix[None], np.zeros(100, int), cls(), keys
    values, bars = map(np.asarray, diagonals_of_matrices(*args, k=6)[:2])
    eps = float(np.finfo(float).eps)
    errors = np.abs(values - np.diagonal(matrix))
    assert np.median(np.max(errors, axis=1)) < 1e4 * eps
    assert np.median(np.max(bars, axis=1)) < 3e4 * eps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "k", "tags"), [(tx.XTraceEstimator, 10, ()), (tx.XNysTraceEstimator, 5, PSD)]
)
def test_as_many_probes_as_the_rank(cls, k, tags):
    """Five samples, each of which misses one eigenvalue, the same part of it. The root
    mean square of bars is 2.15 times that of errors, with a spread of 0.03 over keys."""
    matrix = hermitian(3, RANK_FIVE, np.float32)
    errors, bars, widths = errors_and_bars(matrix, cls(), k, 4000, tags)
    assert_covers(errors, widths, 0.915)
    assert rms(bars) < 2.5 * rms(errors)


# Small rounds.


@pytest.mark.slow
@pytest.mark.parametrize("round_size", [2, 4])
def test_small_rounds(round_size):
    """One or two probes more at a time, and a look after each: the interval covers, and
    the bias is less than 0.3 standard deviations."""
    matrix = hermitian(3, 0.7 ** np.arange(1, 101), np.float32)
    k = tx.Adaptive(rtol=0.03, max_k=64, round_size=round_size)
    errors, _, widths = errors_and_bars(matrix, tx.XTraceEstimator(), k, 500)
    assert_covers(errors, widths, 0.93)
    bias = np.mean(errors) / np.std(errors)
    assert abs(bias) < 0.3 + stats.norm.isf(FALSE_ALARM) / 500**0.5


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("round_size", [2, 4])
def test_equal_samples_are_no_reason_to_stop(round_size):
    """A sample of this one is 20 or -20 beside the trace: four in a row are equal for one
    key of eight, eight for one of 128. The root mean square of bars is about that of
    errors, with a spread of 0.1 over keys."""
    matrix = jnp.eye(50).at[0, 1].set(10.0).at[1, 0].set(10.0)
    k = tx.Adaptive(rtol=0.1, max_k=48, round_size=round_size, min_samples=4)
    errors, bars, widths = errors_and_bars(matrix, tx.HutchinsonEstimator(), k, 500)
    assert_covers(errors, widths, 0.95)
    assert rms(bars) < 2 * rms(errors)


@pytest.mark.slow
def test_bars_of_parts_that_fall_fast_with_each_probe():
    """Those of leaf traces, of which a single leaf is the trace."""
    structure = {
        name: jax.ShapeDtypeStruct((size,), float)
        for name, size in (("first", 20), ("second", 44))
    }
    eigenvalues = 0.3 ** np.arange(N)
    matrix = hermitian(0, eigenvalues)

    @jax.jit
    def leaves(matrix, keys):
        def product(v):
            flat = matrix @ jnp.concatenate([v["first"], v["second"]])
            return {"first": flat[:20], "second": flat[20:]}

        operator = lx.FunctionLinearOperator(product, structure, PSD)

        def one(key):
            found = tx.leaf_traces(operator, tx.XNysTraceEstimator(), k=20, key=key)
            return found.value, found.std_err

        return jax.lax.map(one, keys)

    values, bars = leaves(matrix, jr.split(jr.key(20261125), 1000))
    diagonal, quantile = np.diag(matrix), stats.t.ppf(0.975, 19)
    for name, exact in (
        ("first", np.sum(diagonal[:20])),
        ("second", np.sum(diagonal[20:])),
    ):
        errors = np.asarray(values[name]) - exact
        assert_covers(errors, quantile * np.asarray(bars[name]), 0.96)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_error_that_falls_fast_with_each_probe(rate):
    """Covered in most draws, and not in the mean alone, where a few bars are large."""
    matrix = jnp.asarray(hermitian(3, rate ** np.arange(N)))
    estimator, keys = tx.XNysTraceEstimator(), 1000
    errors, bars, widths = errors_and_bars(matrix, estimator, 20, keys, PSD)
    assert_covers(errors, widths, 0.96)
    assert np.median(bars) < 6 * np.median(np.abs(errors))
