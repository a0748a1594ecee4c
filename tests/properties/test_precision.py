"""Values that the rounding errors of products have spoilt are flagged, and right ones are
not, in each dtype, fixed and adaptive, exact, on a mesh, with a preconditioner."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, rms


N = 200
LOST = tx.RESULTS.precision_lost
HALF, BRAIN = jnp.float16, jnp.bfloat16
LOG, INVERSE = tx.Log(), tx.Inverse()
KEYS = jr.split(jr.key(20261122), 12)
ADAPTIVE = tx.Adaptive(rtol=1e-9, max_k=64)  # in rounds


def low_rank(condition):
    """X X^T + I with 40 columns, eigenvalues from 1 to `condition`."""
    x = np.random.default_rng(1).standard_normal((N, 40))
    x *= np.sqrt(condition - 1) / np.linalg.norm(x, 2)
    return x @ x.T + np.eye(N)


def decaying(condition):
    return hermitian(0, np.append(np.geomspace(1, condition, 60), np.ones(N - 60)))


def even(condition):
    return hermitian(0, np.geomspace(1, condition, N))


def one_large(size):
    return hermitian(0, np.append(size, np.zeros(N - 1)))


@eqx.filter_jit
def estimates(matrix, function, keys, num_steps):
    """Error bar, bracket, interval and whether it was flagged for each key."""

    def one(key):
        settings = {"k": 10, "num_steps": num_steps, "key": key, "throw": False}
        operator = matrix_free(matrix, PSD)
        solution = tx.trace_of_function(operator, function, **settings)
        flagged = solution.result != tx.RESULTS.successful
        return solution.std_err, solution.stats["bracket"], solution.interval(), flagged

    return jax.lax.map(one, keys)


def reference(matrix, function):
    """Of the matrix as it is in its dtype, by float64."""
    eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
    return np.sum(jax.jit(function)(np.maximum(eigenvalues, 1e-300)))


# With these it takes 60 steps to see that precision is lost.
MORE_STEPS = [(jnp.float32, INVERSE), (jnp.float64, LOG)]


def run(kind, condition, dtype, function):
    """For twelve keys: which are within four error bars of the bracket, for which the
    interval has the truth in it, that of the matrix before it was rounded to its dtype
    too, and which are flagged."""
    whole = kind(condition)
    matrix = whole.astype(dtype)
    num_steps = 60 if (dtype, function) in MORE_STEPS else 20
    found = estimates(matrix, function, KEYS, num_steps)
    std_err, bracket, (low, high), flagged = jax.tree.map(np.asarray, found)
    exact, before = reference(matrix, function), reference(whole, function)
    covered = bracket[:, 0] - 4 * std_err <= exact
    covered &= exact <= bracket[:, 1] + 4 * std_err
    inside = (low <= min(exact, before)) & (max(exact, before) <= high)
    return covered, inside, flagged


# Of all of these the value was far off and the result successful as long as Ritz values
# were raised to the unit roundoff times the largest.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "condition", "dtype", "function"),
    [
        (low_rank, 4e2, BRAIN, LOG),
        (low_rank, 4e2, BRAIN, INVERSE),
        (low_rank, 4e3, HALF, LOG),
        (low_rank, 1e4, HALF, LOG),
        (low_rank, 4e6, jnp.float32, LOG),
        (low_rank, 1e8, jnp.float32, LOG),
        (decaying, 4e2, BRAIN, LOG),
        (decaying, 5e3, HALF, LOG),
        (decaying, 5e7, jnp.float32, LOG),
    ],
)
def test_no_confident_wrong_value(kind, condition, dtype, function):
    covered, inside, flagged = run(kind, condition, dtype, function)
    assert np.all(covered & inside | flagged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "dtype", "function"),
    [
        (4e2, BRAIN, INVERSE),
        (1e4, HALF, LOG),
        (1e8, jnp.float32, LOG),
        (1e7, jnp.float32, INVERSE),
        (1e16, jnp.float64, LOG),
    ],
)
def test_lost_precision_is_flagged(condition, dtype, function):
    assert np.all(run(low_rank, condition, dtype, function)[-1])


@eqx.filter_jit
def exponentials(matrix, estimator, keys):
    """Interval and whether precision was lost for each key."""

    def one(key):
        settings = {"k": 8, "num_steps": 20, "key": key, "throw": False}
        operator = matrix_free(matrix, lx.symmetric_tag)
        solution = tx.trace_of_function(operator, tx.Exp(), estimator, **settings)
        return solution.interval(0.999), solution.result == LOST

    return jax.lax.map(one, keys)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, BRAIN])
@pytest.mark.parametrize("cls", [tx.SLQEstimator, tx.KrylovAwareEstimator])
def test_exponential_of_large_negative_numbers(cls, dtype):
    """Errors of eigenvalues are relative to the largest, on which the trace does not
    depend at all."""
    spread = np.append(0.0, -np.linspace(1e3, 1e4, N - 1))
    outlier = np.append(-1e4, -np.linspace(0, 3, N - 1))
    keys = jr.split(jr.key(20261123), 20)
    for eigenvalues in (spread, outlier):
        matrix = hermitian(0, eigenvalues).astype(dtype)
        exact = np.sum(np.exp(np.linalg.eigvalsh(matrix.astype(np.float64))))
        ends, lost = jax.tree.map(np.asarray, exponentials(matrix, cls(), keys))
        assert np.all((ends[0] <= exact) & (exact <= ends[1]) | lost)


@eqx.filter_jit
def steep(diagonal, function, estimator, keys):
    """Value, error bar, interval and whether precision was lost for each key."""

    def one(key):
        vector = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
        operator = lx.FunctionLinearOperator(lambda v: diagonal * v, vector, PSD)
        settings = {"k": 20, "num_steps": 8, "key": key, "throw": False}
        solution = tx.trace_of_function(operator, function, estimator, **settings)
        lost = solution.result == LOST
        return solution.value, solution.std_err, solution.interval(0.999), lost

    return jax.lax.map(one, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [tx.Inverse(1e-11), tx.Inverse(1e-3), tx.Power(0.5), tx.Exp(-1e7)]
)
@pytest.mark.parametrize("cls", [tx.SLQEstimator, tx.KrylovAwareEstimator])
def test_functions_that_are_steep_near_zero(cls, function):
    """Nodes there come out the same each time, and so look as if they were accurate: a
    little below zero, say, and then all count as zero."""
    keys = jr.split(jr.key(20261126), 20)
    for small in (0.0, 1e-9, 1e-4):
        diagonal = np.append(1, np.full(N // 2 - 1, small))
        exact = np.sum(np.asarray(jax.jit(function)(diagonal)))
        single = jnp.asarray(diagonal, jnp.float32)
        found = jax.tree.map(np.asarray, steep(single, function, cls(), keys))
        value, std_err, (low, high), lost = found
        assert np.all((low <= exact) & (exact <= high) | lost)
        assert np.all((np.abs(value - exact) <= 4 * std_err) | lost)


@pytest.mark.slow
def test_products_less_accurate_than_their_dtype_are_seen():
    """As those of float32 are on some accelerators, and an inner solve's."""
    matrix = jnp.asarray(low_rank(400))

    def result(rounded):
        def mv(v):
            if not rounded:
                return matrix.astype(v.dtype) @ v
            return (matrix.astype(BRAIN) @ v.astype(BRAIN)).astype(v.dtype)

        vector = jax.ShapeDtypeStruct((N,), jnp.float32)
        operator = lx.FunctionLinearOperator(mv, vector, PSD)
        settings = {"k": 10, "num_steps": 60, "key": jr.key(0), "throw": False}
        return tx.trace_of_function(operator, INVERSE, **settings).result

    assert result(rounded=True) == LOST
    assert result(rounded=False) == tx.RESULTS.successful


@eqx.filter_jit
def exactly(matrix, function):
    operator = matrix_free(matrix, PSD)
    return tx.trace_of_function(operator, function, k=N, num_steps=5, throw=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "condition", "dtype", "function", "lost"),
    [
        (even, 5e6, jnp.float32, INVERSE, True),
        (even, 1e5, jnp.float32, INVERSE, False),
        (even, 5e6, jnp.float32, LOG, True),
        (even, 1e6, jnp.float32, LOG, False),
        (even, 2e15, jnp.float64, INVERSE, True),
        (low_rank, 4e2, BRAIN, INVERSE, False),
        (one_large, 1e11, jnp.float32, tx.Inverse(0.1), True),
        (one_large, 1e3, jnp.float32, tx.Inverse(0.1), False),
    ],
)
def test_exact_answers(kind, condition, dtype, function, lost):
    """Here the products are those with unit vectors, and exact. Where they are not
    flagged, the values are right to a percent."""
    matrix = kind(condition).astype(dtype)
    solution = exactly(matrix, function)
    assert (solution.result != tx.RESULTS.successful) == lost
    if not lost:
        assert np.allclose(solution.value, reference(matrix, function), rtol=1e-2)


@pytest.mark.slow
def test_exact_answers_of_matrices_with_negative_eigenvalues():
    """Which rounding to bfloat16 leaves: what is of their size is unknown."""
    matrix = even(1e6).astype(BRAIN) / 2**20
    eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
    smallest = float(eigenvalues[0])
    assert smallest < 0
    near, far = (exactly(matrix, tx.Inverse(-x * smallest)) for x in (1.01, 100.0))
    assert near.result == LOST
    assert far.result == tx.RESULTS.successful
    low, high = far.interval()
    assert low <= np.sum(1 / (eigenvalues - 100 * smallest)) <= high


CALLS = {
    "adaptive": {"k": tx.Adaptive(rtol=5e-2, max_k=64)},
    "mesh": {"k": 10, "execution": tx.Sharded(tx.probe_mesh())},
    "deflated": {"k": 12, "estimator": tx.KrylovAwareEstimator()},
    "no reorthogonalisation": {
        "k": 10,
        "estimator": tx.SLQEstimator(krylov=tx.Lanczos(window=0)),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call(name):
    settings = {"num_steps": 20, "key": jr.key(0), "throw": False} | CALLS[name]

    @jax.jit
    def result(matrix):
        operator = matrix_free(matrix, PSD)
        return tx.trace_of_function(operator, INVERSE, **settings).result

    # Rounding may also leave Ritz values that are not positive.
    flagged = result(low_rank(400).astype(BRAIN))
    assert flagged == LOST or flagged == tx.RESULTS.not_positive_definite
    assert result(low_rank(30).astype(BRAIN)) == tx.RESULTS.successful


@pytest.mark.slow
def test_a_preconditioner_restores_precision():
    """Where it leaves larger errors of sampling than those of rounding. By chance the
    error is above four bars with a probability of 0.003; the key is fixed."""

    @jax.jit
    def logdets(matrix):
        operator, settings = matrix_free(matrix, PSD), {"k": 10, "num_steps": 60}
        settings |= {"key": jr.key(0), "throw": False}
        made = tx.nystrom_preconditioner(operator, 40, key=jr.key(1), shift=1.0)
        return [tx.logdet(operator, preconditioner=x, **settings) for x in (None, made)]

    matrix = decaying(1e7).astype(np.float32)
    plain, helped = logdets(matrix)
    assert plain.result != tx.RESULTS.successful
    assert helped.result == tx.RESULTS.successful
    assert np.abs(helped.value - reference(matrix, LOG)) < 4 * helped.std_err
    assert helped.std_err < plain.std_err / 3
    # Of this the rest is nearly the identity, and what is left is rounding, which is in
    # the bar or flagged.
    matrix = low_rank(4e6).astype(np.float32)
    plain, helped = logdets(matrix)
    assert plain.result != tx.RESULTS.successful
    covered = np.abs(helped.value - reference(matrix, LOG)) < 4 * helped.std_err
    assert helped.result == LOST or (covered and helped.std_err > 0.2)


@pytest.mark.slow
def test_general_operators():
    """By Golub-Kahan: covered, or flagged."""
    left, right = (np.linalg.qr(low_rank(seed))[0] for seed in (2.0, 3.0))
    spectrum = np.append(np.geomspace(1, 900, 60), np.ones(N - 60))
    matrix = (left * spectrum) @ right.T

    @jax.jit
    def one(matrix):
        settings = {"k": 10, "num_steps": 60, "key": jr.key(0), "throw": False}
        solution = tx.logdet(matrix_free(matrix), **settings)
        bracket, result = solution.stats["bracket"], solution.result
        return bracket, solution.std_err, result == tx.RESULTS.successful

    for dtype in (BRAIN, jnp.float32):
        low = matrix.astype(dtype)
        exact = np.linalg.slogdet(low.astype(np.float64))[1]
        (lower, upper), std_err, successful = jax.tree.map(np.asarray, one(low))
        covered = (lower - 4 * std_err <= exact) & (exact <= upper + 4 * std_err)
        assert covered | ~successful
        assert successful | (dtype == BRAIN)


@pytest.mark.slow
def test_perturbations_that_leave_the_domain_of_a_general_operator():
    """Half of the eigenvalues are below what products in low precision tell from zero."""
    vectors = np.eye(20) + 0.1 * np.random.default_rng(1).standard_normal((20, 20))
    values = np.where(np.arange(20) < 10, 1, 1e-3)
    dense = (vectors * values) @ np.linalg.inv(vectors)
    matrix = jnp.asarray(dense.astype(BRAIN))

    @eqx.filter_jit
    def one(key, k):
        settings = {"k": k, "num_steps": 6, "key": key, "throw": False}
        function = tx.Power(0.5)
        solution = tx.trace_of_function(matrix_free(matrix), function, **settings)
        lost = solution.result == LOST
        finite = jnp.isfinite(solution.value) & jnp.isfinite(solution.std_err)
        return finite, lost, solution.interval(), solution.result == tx.RESULTS.successful

    finite, lost, ends, successful = jax.vmap(lambda key: one(key, 8))(
        jr.split(KEYS[0], 100)
    )
    assert np.all(np.isfinite(ends)[:, successful])
    assert np.sum(finite & lost) > 50
    finite, lost, (low, high), _ = one(KEYS[0], 20)
    assert finite
    assert lost
    assert low == -np.inf
    assert high == np.inf


@pytest.mark.slow
def test_it_raises():
    matrix = low_rank(400).astype(BRAIN)
    operator = matrix_free(matrix, PSD)
    with pytest.raises(RuntimeError, match="Rounding errors of the products"):
        tx.trace_of_function(operator, INVERSE, k=10, num_steps=20, key=jr.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "condition", "dtype", "function"),
    [
        (low_rank, 30, BRAIN, LOG),
        (low_rank, 30, BRAIN, INVERSE),
        (low_rank, 3e2, HALF, LOG),
        (low_rank, 1e5, jnp.float32, LOG),
        (low_rank, 1e4, jnp.float32, INVERSE),
        (low_rank, 1e12, jnp.float64, LOG),
        (decaying, 3e2, BRAIN, LOG),
        (decaying, 1e3, HALF, LOG),
        (even, 1, jnp.float32, LOG),  # of the identity, in another basis: 0
        (even, 1, jnp.float64, LOG),
        (even, 1e3, BRAIN, tx.Entropy()),
        (low_rank, 1e9, jnp.float32, tx.Power(0.5)),
    ],
)
def test_right_values_are_not_flagged(kind, condition, dtype, function):
    covered, _, flagged = run(kind, condition, dtype, function)
    assert np.all(covered)
    assert not np.any(flagged)


BF16, F16 = (BRAIN, 1.0, 1.0), (HALF, 1.0, 8.0)
F32 = (jnp.float32, 1.0, 5e4)
XTRACE = tx.XTraceEstimator(), 60, ()
XTRACE_ROUNDS = tx.XTraceEstimator(), ADAPTIVE, ()
XNYSTRACE_ROUNDS = tx.XNysTraceEstimator(), ADAPTIVE, PSD
XDIAG = tx.XDiagEstimator(), 60, ()
XDIAG_ROUNDS = tx.XDiagEstimator(), ADAPTIVE, ()


@eqx.filter_jit
def dominated(estimator, k, tags, dtype, tail, size, keys):
    """Traces of `tail I + size 1 1*`, by some keys: of the whole, and of its one leaf."""

    def one(key):
        structure = jax.ShapeDtypeStruct((400,), dtype)
        operator = lx.FunctionLinearOperator(
            lambda v: tail * v + size * jnp.sum(v), structure, tags
        )
        settings = {"k": k, "key": key, "throw": False}
        both = [f(operator, estimator, **settings) for f in (tx.trace, tx.leaf_traces)]
        return [(solution.value, solution.std_err) for solution in both]

    return jax.lax.map(one, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (XTRACE, BF16),
        (XTRACE, F16),
        (XTRACE_ROUNDS, BF16),
        (XTRACE_ROUNDS, F32),
        (XNYSTRACE_ROUNDS, BF16),
        (XNYSTRACE_ROUNDS, F16),
        (XDIAG, BF16),
        (XDIAG, F32),
        (XDIAG_ROUNDS, BF16),
    ],
    ids=[
        "XTrace-bf16",
        "XTrace-f16",
        "XTrace, rounds-bf16",
        "XTrace, rounds-f32",
        "XNysTrace, rounds-bf16",
        "XNysTrace, rounds-f16",
        "XDiag-bf16",
        "XDiag-f32",
        "XDiag, rounds-bf16",
    ],
)
def test_eigenvalues_below_the_precision_of_the_largest(call, operator):
    """They are most of the trace, or many bars of it. A mean of 16 keys is five standard
    deviations off with a chance below 1e-6."""
    _, tail, size = operator
    truth = 400 * (tail + size)
    found = dominated(*call, *operator, jr.split(jr.key(3), 16))
    for values, bars in jax.tree.map(lambda x: np.asarray(x, float), found):
        assert abs(np.mean(values) - truth) < 5 * rms(bars) / 4
        check_width(bars, values - truth, truth, operator[0])


def check_width(bars, errors, value, dtype):
    """The bars are no more than three times as large as the errors and the documented
    floor for rounding, with n = 400."""
    floor = 2 * float(jnp.finfo(dtype).eps) + 20 * float(jnp.finfo(jnp.float32).eps)
    assert rms(bars) <= 3 * rms(errors) + 3 * floor * value


@pytest.mark.slow
def test_diagonal_below_the_precision_of_the_largest_eigenvalue():
    structure = jax.ShapeDtypeStruct((400,), jnp.bfloat16)
    operator = lx.FunctionLinearOperator(lambda v: 2 * v + jnp.sum(v), structure)
    for k in (200, ADAPTIVE):
        solution = tx.diagonal(operator, k=k, key=jr.key(0), throw=False)
        value, bar = (np.asarray(x, float) for x in (solution.value, solution.std_err))
        assert abs(np.mean(value) - 3) < 5 * np.mean(bar) / 20 + 0.05
        check_width(bar, value - 3, 3, BRAIN)
