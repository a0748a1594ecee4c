"""A trace for each leaf: they sum to the trace, and each has an error bar of its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import hermitian, PSD


N, K, NUM_KEYS = 30, 12, 400
TREE = {"a": jnp.zeros((2, 5)), "b": (jnp.zeros(19), jnp.zeros(()))}
LEAVES = [slice(0, 10), slice(10, 29), slice(29, 30)]
KEYS = jr.split(jr.key(20261121), NUM_KEYS)
CASES = [
    (tx.HutchinsonEstimator(), ()),
    (tx.XTraceEstimator(), ()),
    (tx.XDiagEstimator(), ()),
    (tx.DiagPlusPlusEstimator(), ()),
    (tx.HutchPlusPlusEstimator(), ()),
    (tx.NystromPlusPlusEstimator(), PSD),
    (tx.XNysTraceEstimator(), PSD),
    (tx.XNysDiagEstimator(), PSD),
    (tx.AutoDiagonalEstimator(), ()),
]
every_case = pytest.mark.parametrize(
    ("estimator", "tags"), CASES, ids=lambda x: type(x).__name__
)


def matrices():
    return np.stack(
        [hermitian(1, np.linspace(1, 3, N)), hermitian(2, 1.0 / np.arange(1, N + 1))]
    )


def exact(matrix):
    return np.array([np.trace(matrix[part, part]) for part in LEAVES])


def as_tree(matrix, tags):
    _, unravel = jax.flatten_util.ravel_pytree(TREE)

    def mv(tree):
        return unravel(matrix @ jax.flatten_util.ravel_pytree(tree)[0])

    structure = jax.eval_shape(lambda: TREE)
    return lx.FunctionLinearOperator(mv, structure, tags)


@eqx.filter_jit
def both(matrices, which, keys, estimator, tags, weights):
    """Traces of leaves, their error bars, the gradient of a weighted sum of them, the
    number of samples; the trace and its gradient."""

    def one(pair):
        i, key = pair
        settings = {"k": K, "key": key, "throw": False}

        def leaves(matrix):
            operator = as_tree(matrix, tags)
            solution = tx.leaf_traces(operator, estimator, **settings)
            values = jnp.stack(jax.tree.leaves(solution.value))
            return jnp.sum(weights * values), (values, solution)

        def trace(matrix):
            return tx.trace(as_tree(matrix, tags), estimator, **settings).value

        slope, (values, solution) = eqx.filter_grad(leaves, has_aux=True)(matrices[i])
        std_err = jnp.stack(jax.tree.leaves(solution.std_err))
        count = jnp.asarray(solution.stats["num_samples"])
        return values, std_err, slope, count, trace(matrices[i])

    return jax.lax.map(one, (which, keys))


@pytest.mark.slow(but="HutchinsonEstimator-tuple")
@every_case
def test_traces_of_leaves(estimator, tags):
    """400 keys and two matrices: they sum to `traceax.trace`; each interval covers 93%
    but for chance (1e-5 each, of 6 for each estimator), with bars of less than three
    times the errors (2.4 at most, with a spread of 0.1 over keys); the gradient is right
    in the mean (1e-5 for each estimator)."""
    weights = np.array([1.0, -2.0, 3.0])
    which = np.repeat([0, 1], NUM_KEYS)
    args = jnp.asarray(which), jnp.tile(KEYS, 2), estimator, tags, weights
    found = both(jnp.asarray(matrices()), *args)
    values, std_errs, slopes, counts, traces = map(np.asarray, found)
    assert np.allclose(np.sum(values, axis=1), traces, rtol=1e-9)
    quantile = stats.t.ppf(0.975, counts - 1)[:, None]
    expected = np.zeros(N)
    for weight, part in zip(weights, LEAVES, strict=True):
        expected[part] = weight
    for i, matrix in enumerate(matrices()):
        mine = which == i
        errors = np.abs(values[mine] - exact(matrix))
        covered = errors <= (quantile * std_errs)[mine]
        least = stats.binom.ppf(1e-5, NUM_KEYS, 0.93)
        assert np.all(np.sum(covered, axis=0) >= least)
        error, bar = (np.sqrt(np.mean(x**2, axis=0)) for x in (errors, std_errs[mine]))
        assert np.all(bar < 3 * error)
        spread = np.std(slopes[mine], axis=0, ddof=1) / NUM_KEYS**0.5
        distance = np.abs(np.mean(slopes[mine], axis=0) - np.diag(expected))
        assert np.all(distance <= 5.5 * spread + 1e-12)


def test_exact_and_structure():
    matrix = matrices()[1]
    operator = as_tree(jnp.asarray(matrix), ())
    solution = tx.leaf_traces(operator, k=N)
    assert jax.tree.structure(solution.value) == jax.tree.structure(TREE)
    assert np.allclose(jax.tree.leaves(solution.value), exact(matrix), rtol=1e-12)
    assert jax.tree.leaves(solution.std_err) == [0, 0, 0]
    assert solution.stats["num_matvecs"] == N
    known = lx.DiagonalLinearOperator({"a": jnp.arange(3.0), "b": jnp.ones(4)})
    solution = tx.leaf_traces(known, k=1)
    assert solution.value == {"a": 3, "b": 4}
    assert solution.stats["num_matvecs"] == 0


@pytest.mark.slow(but="estimator0")
@pytest.mark.parametrize("estimator", [tx.HutchinsonEstimator(), tx.XTraceEstimator()])
def test_adaptive(estimator):
    """All errors together are within the tolerance in the two-norm."""
    matrix, rtol = matrices()[1], 0.3
    k = tx.Adaptive(rtol=rtol, max_k=28, round_size=4, min_samples=4)
    operator = as_tree(jnp.asarray(matrix), ())
    solution = tx.leaf_traces(operator, estimator, k=k, key=KEYS[0])
    error = np.array(jax.tree.leaves(solution.value)) - exact(matrix)
    assert solution.result == tx.RESULTS.successful
    assert np.linalg.norm(error) <= rtol * np.linalg.norm(exact(matrix))
    assert 4 <= solution.stats["num_matvecs"] < N


@pytest.mark.parametrize(
    "estimator", [tx.HutchPlusPlusEstimator(), tx.NystromPlusPlusEstimator()]
)
def test_estimators_without_it(estimator):
    """In rounds, these two keep no more than the trace needs."""
    operator = as_tree(jnp.asarray(matrices()[0]), PSD)
    k = tx.Adaptive(rtol=0.1, max_k=N - 1, round_size=8)
    with pytest.raises(ValueError, match=r"`LeafTraces`, .* only with a number `k`"):
        tx.leaf_traces(operator, estimator, k=k, key=KEYS[0])
