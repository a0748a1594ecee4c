"""`tx.trace` over every estimator: exact cases, edge cases, dtypes, scales, execution."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from .helpers import ESTIMATORS, matrix_free, spectrum_matrix, trace_many, z_score


PSD = lx.positive_semidefinite_tag
VARIANTS = [
    *[estimator for estimator, _ in ESTIMATORS],
    tx.XTraceEstimator(tx.RademacherSampler(), improved=False),
    tx.XNysTraceEstimator(tx.NormalSampler()),
    tx.XNysTraceEstimator(tx.RademacherSampler(), improved=False),
]
DTYPES = [jnp.float32, jnp.complex128]


def dense(matrix, tags=PSD):
    """A matrix operator: a call compiled once serves all matrices of a shape."""
    return lx.MatrixLinearOperator(matrix, tags)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def needs_semidefinite(estimator):
    return isinstance(estimator, tx.NystromPlusPlusEstimator | tx.XNysTraceEstimator)


def label(value):
    if isinstance(value, tx.AbstractTraceEstimator):
        name = type(value).__name__.removesuffix("Estimator")
        return f"{name}-{type(value.sampler).__name__.removesuffix('Sampler')}"
    return None


# --- unbiased ---


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_unbiased_hermitian(estimator, dtype):
    """400 keys; false alarms 6e-5 each (4 standard errors; two parts if complex)."""
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1, 41) ** -1.0, dtype)
    value, _, _ = trace_many(matrix, estimator, 12, 400)
    assert value.dtype == dtype
    assert z_score(value, jnp.trace(matrix)) < 4


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@pytest.mark.parametrize(
    "estimator", [e for e in VARIANTS if not needs_semidefinite(e)], ids=label
)
def test_unbiased_not_hermitian(estimator, dtype):
    """400 keys; false alarms 6e-5 each. The complex trace is far from real."""
    shift = 2 + 3j if dtype == jnp.complex128 else 2.0
    matrix = jr.normal(jr.key(0), (40, 40), dtype) + shift * jnp.eye(40, dtype=dtype)
    value, _, _ = trace_many(matrix, estimator, 12, 400, tags=())
    assert z_score(value, jnp.trace(matrix)) < 4


def test_variance_of_signs_and_phases():
    """The variances that the samplers' documentation gives, for a complex Hermitian
    matrix: 400 keys, ratios within 5 of their standard errors, sqrt(2 / 399)."""
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 41.0), jnp.complex128)
    off = matrix - jnp.diag(jnp.diag(matrix))
    cases = {
        tx.RademacherSampler(): 2 * jnp.sum(off.real**2),
        tx.SteinhausSampler(): jnp.sum(jnp.abs(off) ** 2),
    }
    for sampler, variance in cases.items():
        estimator = tx.HutchinsonEstimator(sampler)
        value, _, _ = trace_many(matrix, estimator, 4, 400)
        assert z_score(value, jnp.trace(matrix)) < 4
        assert abs(float(jnp.var(value.real, ddof=1) / (variance / 4)) - 1) < 0.35


# --- exact, degenerate, scaled ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_zero_operator(estimator, dtype):
    operator = dense(jnp.zeros((20, 20), dtype))
    solution = tx.trace(operator, estimator, k=9, key=jr.key(0))
    assert solution.value == 0
    assert solution.std_err == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "estimator", [tx.HutchinsonEstimator(), tx.XTraceEstimator(), tx.XNysTraceEstimator()]
)
def test_identity_is_exact(estimator, dtype):
    operator = dense(jnp.eye(20, dtype=dtype))
    solution = tx.trace(operator, estimator, k=9, key=jr.key(0))
    assert abs(solution.value - 20) <= 20 * 8 * eps(dtype)
    assert solution.std_err <= 20 * 40 * eps(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "estimator",
    [e for e in VARIANTS if not isinstance(e, tx.HutchinsonEstimator)],
    ids=label,
)
def test_low_rank_is_exact(estimator, dtype):
    """Rank 4, exact zeros below, sketch of more than 4 columns: the trace to rounding."""
    eigenvalues = jnp.where(jnp.arange(60) < 4, jnp.arange(60) + 1.0, 0.0)
    matrix = spectrum_matrix(jr.key(0), eigenvalues, dtype)
    value, std_err, _ = trace_many(matrix, estimator, 24, 50)
    exact = np.trace(np.asarray(matrix, np.complex128))
    assert float(np.max(np.abs(value - exact))) <= 10 * 30 * eps(dtype)
    assert float(jnp.max(std_err)) <= 10 * 100 * eps(dtype)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_scale_invariance(estimator, scale):
    scale = 2.0 ** round(np.log2(scale))  # a power of two: nothing is rounded
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1, 51) ** -2.0, jnp.float32)
    operator, scaled = dense(matrix), dense(matrix * scale)
    one = tx.trace(operator, estimator, k=20, key=jr.key(1))
    other = tx.trace(scaled, estimator, k=20, key=jr.key(1))
    assert jnp.allclose(other.value / scale, one.value, rtol=1e-6, atol=0)
    assert jnp.allclose(other.std_err / scale, one.std_err, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (1, 2, 3, 5) for k in range(1, 6)])
def test_tiny(n, k):
    """Every budget on every tiny operator: an estimate, the exact trace, or ValueError.

    Rademacher probes repeat here, so that sketches are rank deficient.
    """
    operator = dense(spectrum_matrix(jr.key(n), jnp.arange(1.0, n + 1.0), jnp.float32))
    for estimator in VARIANTS:
        if k < min(n, estimator.min_matvecs):
            with pytest.raises(ValueError, match="at least"):
                tx.trace(operator, estimator, k=k, key=jr.key(0))
            continue
        solution = tx.trace(operator, estimator, k=k, key=jr.key(0))
        assert solution.stats["num_matvecs"] <= k
        assert abs(solution.value) <= n * n * 3  # the largest quadratic form
        if k >= n:
            assert jnp.allclose(solution.value, n * (n + 1) / 2, rtol=1e-5)
            assert solution.std_err == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("k", [58, 59])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_budget_just_below_n(estimator, k, dtype):
    """Nearly square, ill-conditioned probes; within 6 standard errors for 20 keys (the
    rounding of the matrix itself set aside)."""
    matrix = spectrum_matrix(jr.key(0), 0.7 ** jnp.arange(60), dtype)
    value, std_err, _ = trace_many(matrix, estimator, k, 20)
    exact = np.trace(np.asarray(matrix, np.complex128))
    error = np.abs(np.asarray(value) - exact)
    assert np.all(error <= 6 * np.asarray(std_err) + 10 * eps(dtype))


@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_one_sample_has_infinite_error(estimator):
    operator = dense(jnp.eye(9))
    solution = tx.trace(operator, estimator, k=estimator.min_matvecs, key=jr.key(0))
    assert solution.std_err == jnp.inf
    assert solution.result == tx.RESULTS.successful


@pytest.mark.parametrize("k", [7, 30])
@pytest.mark.parametrize("estimator", [*VARIANTS, tx.AutoTraceEstimator()])
def test_budget_of_n_is_exact(estimator, k):
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 8.0), jnp.float64)
    solution = tx.trace(matrix_free(matrix, PSD), estimator, k=k)
    assert jnp.allclose(solution.value, jnp.trace(matrix), rtol=1e-14, atol=0)
    assert solution.std_err == 0
    assert solution.stats["num_matvecs"] == 7


# --- dtypes, structures ---


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_low_precision(estimator, dtype):
    """Applied in its dtype, summed in float32; within the error bar for 50 keys at six
    standard errors, and no bias that the bar does not cover."""
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1, 61) ** -1.0, jnp.float64)
    matrix = matrix.astype(dtype)
    value, std_err, _ = trace_many(matrix, estimator, 20, 50)
    assert value.dtype == std_err.dtype == jnp.float32
    exact = np.trace(np.asarray(matrix, np.float64))
    error = np.asarray(value, np.float64) - exact
    assert np.all(np.abs(error) <= 6 * np.asarray(std_err))
    assert abs(np.mean(error)) <= np.mean(std_err)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("estimator", [*VARIANTS, tx.ExactTraceEstimator()])
def test_no_dtype_drift_under_x64(estimator, dtype):
    operator = dense(jnp.eye(20, dtype=dtype))
    solution = tx.trace(operator, estimator, k=9, key=jr.key(0))
    real = jnp.finfo(dtype).dtype
    assert solution.value.dtype == dtype
    assert solution.std_err.dtype == real
    for name, entry in solution.stats.items():
        if name != "num_matvecs":
            assert entry.dtype in (dtype, real)


def tree_operator(matrix):
    """The 12 x 12 matrix as an operator on a PyTree with a matrix and a vector leaf."""

    def mv(tree):
        flat = matrix @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": flat[:8].reshape(2, 4), "b": flat[8:]}

    struct = jax.eval_shape(
        lambda: {"a": jnp.zeros((2, 4), matrix.dtype), "b": jnp.zeros(4, matrix.dtype)}
    )
    return lx.FunctionLinearOperator(mv, struct, PSD)


@pytest.mark.parametrize("estimator", [*VARIANTS, tx.ExactTraceEstimator()])
def test_pytree_operator(estimator):
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 13.0), jnp.float64)
    k = 12 if isinstance(estimator, tx.ExactTraceEstimator) else 6
    flat = tx.trace(dense(matrix), estimator, k=k, key=jr.key(1))
    tree = tx.trace(tree_operator(matrix), estimator, k=k, key=jr.key(1))
    assert jnp.allclose(flat.value, tree.value, rtol=1e-12, atol=0)
    assert jnp.allclose(flat.std_err, tree.std_err, rtol=1e-9, atol=0)


@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_negative_semidefinite(estimator):
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 13.0), jnp.float64)
    positive = tx.trace(dense(matrix), estimator, k=6, key=jr.key(1))
    operator = dense(-matrix, lx.negative_semidefinite_tag)
    negative = tx.trace(operator, estimator, k=6, key=jr.key(1))
    assert jnp.allclose(positive.value, -negative.value, rtol=1e-12, atol=0)
    assert jnp.allclose(positive.std_err, negative.std_err, rtol=1e-9, atol=0)
    samples = negative.stats["samples"]
    assert jnp.allclose(jnp.mean(samples), negative.value, rtol=1e-12)


# --- budget, execution, statistics ---


@pytest.mark.parametrize(("k", "block_size"), [(7, None), (11, 3), (12, 1)])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_products_are_counted(estimator, k, block_size):
    """The products seen at run time are those reported, and at most k."""
    seen = []

    def mv(v):
        jax.debug.callback(lambda _: seen.append(1), v[0])
        return 2 * v

    operator = lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((40,), float), PSD)
    execution = tx.Local(block_size)
    solution = tx.trace(operator, estimator, k=k, key=jr.key(0), execution=execution)
    jax.block_until_ready(solution.value)
    jax.effects_barrier()
    assert len(seen) == solution.stats["num_matvecs"]
    assert len(seen) in (k, k - 1)


@pytest.mark.parametrize("estimator", [*VARIANTS, tx.ExactTraceEstimator()])
def test_block_size_does_not_matter(estimator):
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 31.0), jnp.float64)
    operator = matrix_free(matrix, PSD)  # of which Exact makes products too
    k = 30 if isinstance(estimator, tx.ExactTraceEstimator) else 11
    values = [
        tx.trace(operator, estimator, k=k, key=jr.key(0), execution=tx.Local(size)).value
        for size in (None, 1, 4)
    ]
    assert np.allclose(values, values[0], rtol=1e-12)


@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_samples_have_the_value_as_mean(estimator):
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 31.0), jnp.float64)
    solution = tx.trace(dense(matrix), estimator, k=12, key=jr.key(0))
    samples = solution.stats["samples"]
    assert samples.ndim == 1
    assert jnp.allclose(jnp.mean(samples), solution.value, rtol=1e-12)
    assert solution.stats["std.err"] == solution.std_err


def test_first_samples_do_not_depend_on_the_budget():
    operator = dense(spectrum_matrix(jr.key(0), jnp.arange(1.0, 31.0), jnp.float64))
    few, many = (
        tx.trace(operator, tx.HutchinsonEstimator(), k=k, key=jr.key(0)).stats["samples"]
        for k in (5, 20)
    )
    assert jnp.allclose(few, many[:5], rtol=1e-12)


def test_select_trace_estimator():
    matrix = jnp.eye(9)

    def pick(operator, k):
        return type(tx.select_trace_estimator(operator, k))

    assert pick(lx.MatrixLinearOperator(matrix), 1) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix), 9) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix, lx.diagonal_tag), 1) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix, PSD), 4) is tx.XNysTraceEstimator
    assert pick(-matrix_free(matrix, PSD), 4) is tx.XNysTraceEstimator
    assert pick(matrix_free(matrix), 4) is tx.XTraceEstimator
    assert pick(matrix_free(matrix), 1) is tx.HutchinsonEstimator


def test_auto_is_the_estimator_it_picks():
    matrix = spectrum_matrix(jr.key(0), jnp.arange(1.0, 31.0), jnp.float64)
    for tags, k in [(PSD, 8), ((), 8), ((), 1)]:
        operator = matrix_free(matrix, tags)
        auto = tx.trace(operator, k=k, key=jr.key(0))
        picked = tx.select_trace_estimator(operator, k)
        assert auto.value == tx.trace(operator, picked, k=k, key=jr.key(0)).value


def test_known_diagonal_costs_no_product():
    solution = tx.trace(lx.DiagonalLinearOperator(jnp.arange(5.0)), k=1)
    assert solution.value == 10
    assert solution.stats["num_matvecs"] == 0


def test_solution_fields_and_messages():
    solution = tx.trace(matrix_free(jnp.eye(9), PSD), k=4, key=jr.key(0))
    assert set(solution.stats) >= {"num_matvecs", "samples", "std.err"}
    assert solution.state is None
    assert tx.RESULTS[solution.result] == ""
    assert issubclass(tx.RESULTS, lx.RESULTS)


@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_traced_once_for_each_budget(estimator):
    operator = dense(jnp.eye(20))

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def run(operator, k, key):
        return tx.trace(operator, estimator, k=k, key=key).value

    for k in (6, 9, 6, 9):
        for seed in (0, 1):
            run(operator, k, jr.key(seed))


@pytest.mark.parametrize("spectrum", ["decaying", "rank 5"])
@pytest.mark.parametrize("estimator", VARIANTS, ids=label)
def test_products_less_accurate_than_their_dtype(estimator, spectrum):
    """float32 products rounded as an accelerator's TF32 does: the RMS error is
    within three standard errors plus a tenth of a rounding of the trace, 40 keys."""

    def tf32(x):
        return jax.lax.reduce_precision(x, 8, 10)

    n = 200
    decaying = 0.7 ** jnp.arange(n)
    eigenvalues = decaying if spectrum == "decaying" else (jnp.arange(n) < 5) * 1.0
    matrix = spectrum_matrix(jr.key(0), eigenvalues, jnp.float32)
    structure = jax.ShapeDtypeStruct((n,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: tf32(matrix) @ tf32(v), structure, PSD)

    @jax.jit
    @jax.vmap
    def run(key):
        solution = tx.trace(operator, estimator, k=60, key=key, throw=False)
        return solution.value, solution.std_err, solution.result == tx.RESULTS.successful

    value, std_err, successful = run(jr.split(jr.key(1), 40))
    exact = float(jnp.sum(eigenvalues))
    error = np.sqrt(np.mean((np.asarray(value) - exact) ** 2))
    assert np.all(successful)
    assert error <= 3 * np.sqrt(np.mean(np.asarray(std_err) ** 2)) + 1e-4 * exact
