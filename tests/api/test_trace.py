"""`tx.trace` over every estimator: exact cases, edge cases, dtypes, scales, execution.

Most tests look at one table: each estimator's solutions for all `MATRICES`, which one
compiled call makes."""

import functools as ft
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import (
    Case,
    CASES,
    hermitian,
    matrix_free,
    PSD,
    rms,
    trace_of_matrix,
    traces_of_matrices,
    traces_of_matrix,
    VARIANTS,
    z_score,
)


N, K = 40, 18
INDEX = np.arange(1, N + 1)
SCALE = 2.0**66  # a power of two: nothing is rounded
KEYS = jr.split(jr.key(20261121), 400)
HUTCHINSON, XTRACE = CASES[0], CASES[3]
EXACT = Case(tx.ExactTraceEstimator(), 1)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", VARIANTS, ids=str)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def tags_for(case):
    return PSD if case.semidefinite else ()


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


def not_hermitian(dtype):
    """The complex trace is far from real."""
    generator = np.random.default_rng(0)
    normal, imaginary = generator.standard_normal((2, N, N))
    if np.issubdtype(dtype, np.complexfloating):
        return (normal + 1j * imaginary + (2 + 3j) * np.eye(N)).astype(dtype)
    return (normal + 2 * np.eye(N)).astype(dtype)


# How many keys each matrix gets, and the matrix.
MATRICES = {
    "decaying": (400, lambda dtype: hermitian(0, INDEX**-1.0, dtype)),
    "not Hermitian": (400, not_hermitian),
    "rank 4": (50, lambda dtype: hermitian(1, (INDEX <= 4) * 1.0 * INDEX, dtype)),
    "zero": (4, lambda dtype: np.zeros((N, N), dtype)),
    "identity": (4, lambda dtype: np.eye(N, dtype=dtype)),
    "steep": (4, lambda dtype: hermitian(2, INDEX**-2.0, dtype)),
    "huge": (4, lambda dtype: hermitian(2, INDEX**-2.0, dtype) * dtype(SCALE)),
    "tiny": (4, lambda dtype: hermitian(2, INDEX**-2.0, dtype) / dtype(SCALE)),
}


class Solved(NamedTuple):
    """The solutions for one matrix and the first keys, stacked."""

    value: np.ndarray
    std_err: np.ndarray
    stats: dict
    successful: np.ndarray
    exact: complex


@ft.cache
def solved(case, dtype):
    """`Solved` for each of the `MATRICES` that the estimator takes."""
    made = {
        name: (count, make(dtype))
        for name, (count, make) in MATRICES.items()
        if not (case.semidefinite and name == "not Hermitian")
    }
    counts = [count for count, _ in made.values()]
    stack = np.stack([matrix for _, matrix in made.values()])
    which = np.repeat(np.arange(len(made)), counts)
    data = np.asarray(jr.key_data(KEYS))
    keys = jr.wrap_key_data(data[np.concatenate([np.arange(n) for n in counts])])
    args = stack, which, case.estimator, keys
    table = numpy(traces_of_matrices(*args, k=K, tags=tags_for(case)))
    answers, ends = {}, np.cumsum(counts)
    for (name, (count, matrix)), end in zip(made.items(), ends, strict=True):
        rows = jax.tree.map(lambda x: x[end - count : end], table)  # noqa: B023
        exact = np.trace(matrix.astype(np.complex128))
        answers[name] = Solved(*rows, exact)
    return answers


TABLE = [
    *((case, dtype) for case in CASES for dtype in (np.float64, np.float32)),
    *((case, np.complex128) for case in VARIANTS),
]


# One program each: the others are slow.
QUICK = {
    *((str(case), np.float64) for case in CASES),
    *(("XTrace-Sphere", np.float32), ("XNysTrace-Normal", np.complex128)),
}


def over(table):
    entries = [
        pytest.param(
            *(case, dtype),
            id=f"{case}-{dtype.__name__}",
            marks=() if (str(case), dtype) in QUICK else pytest.mark.slow,
        )
        for case, dtype in table
    ]
    return pytest.mark.parametrize(("case", "dtype"), entries)


every_entry = over(TABLE)


# --- unbiased ---


@pytest.mark.slow(
    but=(
        "Hutchinson-Rademacher-float64",
        "HutchPlusPlus-Sphere-float64",
        "XTrace-Sphere-float64",
    )
)
@every_entry
def test_unbiased(case, dtype):
    """400 keys; false alarms 6e-5 each (4 standard errors; two parts if complex)."""
    answers = solved(case, dtype)
    for name in {"decaying", "not Hermitian"} & set(answers):
        value, exact = answers[name].value, answers[name].exact
        assert value.dtype == dtype
        exact = exact if np.iscomplexobj(value) else exact.real
        assert z_score(value, exact) < 4, name


@pytest.mark.slow
def test_variance_of_signs_and_phases():
    """The variances that the samplers' documentation gives, for a complex Hermitian
    matrix: 400 keys, ratios within 5 of their standard errors, sqrt(2 / 399)."""
    matrix = hermitian(0, INDEX**-1.0, np.complex128)
    off = matrix - np.diag(np.diag(matrix))
    phases = tx.HutchinsonEstimator(tx.SteinhausSampler())
    values = {
        2 * np.sum(off.real**2): solved(HUTCHINSON, np.complex128)["decaying"].value,
        np.sum(np.abs(off) ** 2): traces_of_matrix(matrix, phases, KEYS, k=K)[0],
    }
    for variance, value in values.items():
        assert z_score(value, np.trace(matrix)) < 4
        assert abs(np.var(np.real(value), ddof=1) / (variance / K) - 1) < 0.35


# --- exact, degenerate, scaled ---


@pytest.mark.slow(but=("NystromPlusPlus-Sphere-float64", "XTrace-Sphere-float32"))
@every_entry
def test_zero_operator(case, dtype):
    zero = solved(case, dtype)["zero"]
    assert np.all(zero.successful)
    assert np.all(zero.value == 0)
    assert np.all(zero.std_err == 0)


@over([(case, dtype) for case, dtype in TABLE if case in (CASES[0], *CASES[3:])])
def test_identity_is_exact(case, dtype):
    identity = solved(case, dtype)["identity"]
    assert np.all(identity.successful)
    assert np.all(np.abs(identity.value - N) <= N * 8 * eps(dtype))
    assert np.all(identity.std_err <= N * 40 * eps(dtype))


@every_entry
def test_low_rank_is_exact(case, dtype):
    """Rank 4, exact zeros below, sketch of more than 4 columns: the trace to rounding."""
    low = solved(case, dtype)["rank 4"]
    assert np.all(low.successful)
    if case.rank_exact:
        assert np.max(np.abs(low.value - low.exact)) <= 10 * 30 * eps(dtype)
        assert np.max(low.std_err) <= 10 * 100 * eps(dtype)


@every_entry
def test_scale_invariance(case, dtype):
    answers = solved(case, dtype)
    one = answers["steep"]
    for name, scale in (("huge", SCALE), ("tiny", 1 / SCALE)):
        other = answers[name]
        assert np.all(other.successful)
        assert np.all(one.std_err > 0), "what is compared is not zero"
        assert np.allclose(other.value / scale, one.value, rtol=1e-6, atol=0), name
        assert np.allclose(other.std_err / scale, one.std_err, rtol=1e-5, atol=0), name


@every_entry
def test_samples_have_the_value_as_mean(case, dtype):
    value, std_err, stats, successful, _ = solved(case, dtype)["decaying"]
    assert np.all(successful)
    rtol = 1e-12 if dtype != np.float32 else 1e-5
    assert stats["samples"].ndim == 2
    assert np.allclose(np.mean(stats["samples"], axis=1), value, rtol=rtol, atol=0)
    # One number, but the compiler may compute it once for each output.
    assert np.allclose(stats["std.err"], std_err, rtol=8 * eps(dtype), atol=0)


@every_entry
def test_no_dtype_drift_under_x64(case, dtype):
    value, std_err, stats, _, _ = solved(case, dtype)["decaying"]
    assert value.dtype == dtype
    check_real_or(dtype, std_err, stats)


def check_real_or(dtype, std_err, stats):
    real = jnp.finfo(dtype).dtype
    assert std_err.dtype == real
    for name, entry in stats.items():
        if name in ("num_samples", "num_steps"):
            assert entry.dtype == np.int32
        elif name not in ("num_matvecs", "exact"):
            assert entry.dtype in (dtype, real)


@pytest.mark.parametrize("case", [*VARIANTS, EXACT], ids=lambda case: str(case.estimator))
def test_no_dtype_drift_in_single_precision(case):
    """Of the traced program, complex, which is not run; and for the exact trace."""
    matrix = jax.ShapeDtypeStruct((N, N), np.complex64)
    k = N if case is EXACT else K
    call = ft.partial(trace_of_matrix, k=k)
    solution = eqx.filter_eval_shape(call, matrix, case.estimator, KEYS[0])
    assert solution.value.dtype == np.complex64
    check_real_or(np.dtype(np.complex64), solution.std_err, solution.stats)


@eqx.filter_jit
def exactly(matrix, estimators, budgets):
    operator = matrix_free(matrix, PSD)
    return [tx.trace(operator, each, k=k) for each in estimators for k in budgets]


@pytest.mark.slow(but="2")
@pytest.mark.parametrize("n", [1, 2, 7])
def test_budget_of_n_or_more_is_exact(n):
    """Without a key, for every estimator, of a matrix of which the product is known."""
    estimators = [*(case.estimator for case in VARIANTS), tx.AutoTraceEstimator()]
    matrix = hermitian(n, np.arange(1.0, n + 1.0))
    for solution in exactly(matrix, estimators, (n, n + 1)):
        assert np.isclose(solution.value, n * (n + 1) / 2, rtol=1e-14, atol=0)
        assert solution.std_err == 0
        assert solution.stats["num_matvecs"] == n
        assert solution.result == tx.RESULTS.successful


@pytest.mark.slow(but="XTrace-Sphere")
@pytest.mark.parametrize("case", [*CASES, VARIANTS[5], VARIANTS[7]], ids=str)
def test_tiny(case):
    """The smallest operator that there is an estimate of, from one sample, whose error
    is not known; and one of size 5, where Rademacher probes repeat, so that sketches are
    rank deficient. Unbiased: 100 keys; false alarms 1e-4 each (4 standard errors)."""
    least = case.estimator.min_matvecs
    repeat = isinstance(case.estimator.sampler, tx.RademacherSampler)
    for n in (least + 1, 5) if repeat else (least + 1,):
        matrix = hermitian(n, np.arange(1.0, n + 1.0), np.float32)[None]
        args = matrix, np.zeros(100, int), case.estimator, KEYS[:100]
        value, std_err, stats, successful = traces_of_matrices(*args, k=n - 1)
        assert np.all(successful), n
        assert np.all(stats["num_matvecs"] <= n - 1), n
        assert np.all(np.abs(value) <= n * n * 3), n  # the largest quadratic form
        assert z_score(value, n * (n + 1) / 2) < 4, n
        assert np.all(np.isinf(std_err) if n == least + 1 else np.isfinite(std_err)), n


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.estimator.min_matvecs > 1], ids=str
)
def test_budget_below_the_least(case):
    """Too small, unless it is enough for the exact trace."""
    for k in range(1, case.estimator.min_matvecs):
        operator = lx.MatrixLinearOperator(jnp.asarray(np.eye(k + 1)), PSD)
        with pytest.raises(ValueError, match="at least"):
            tx.trace(operator, case.estimator, k=k, key=KEYS[0])


JUST_BELOW = [
    *((case, 39, np.float32) for case in (*CASES[1:], VARIANTS[7])),
    *((case, 38, np.complex64) for case in CASES if case.semidefinite),
]


def check_width(std_err, error, value, dtype):
    """The bars are no more than three times as large as the errors and the documented
    floor for rounding."""
    floor = 2 * eps(dtype) + N**0.5 * eps(np.float32)
    assert np.all(np.isfinite(std_err))
    assert rms(std_err) <= 3 * rms(error) + 3 * floor * rms(np.abs(value))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "k", "dtype"), JUST_BELOW)
def test_budget_just_below_n(case, k, dtype):
    """Nearly square, ill-conditioned probes; within 6 standard errors for 20 keys (the
    rounding of the matrix itself set aside), and the bar no wider than it must be."""
    matrix = hermitian(0, 0.7 ** np.arange(N), dtype)
    args = matrix, case.estimator, KEYS[:20]
    value, std_err, _ = numpy(traces_of_matrix(*args, k=k))
    error = np.abs(value - np.trace(matrix.astype(np.complex128)))
    assert np.all(error <= 6 * std_err + 10 * eps(dtype))
    check_width(std_err, error, value, dtype)


# --- dtypes, structures ---


@pytest.mark.slow(but=("Hutchinson-*-float16", "XNysTrace-*"))
@over(
    [
        *((case, jnp.bfloat16) for case in CASES),
        *((case, jnp.float16) for case in (HUTCHINSON, XTRACE)),
    ]
)
def test_low_precision(case, dtype):
    """Applied in its dtype, summed in float32; within the error bar for 50 keys at six
    standard errors, and no bias that the bar does not cover."""
    matrix = hermitian(0, INDEX**-1.0).astype(dtype)
    args = jnp.asarray(matrix), case.estimator, KEYS[:50]
    value, std_err, _ = numpy(traces_of_matrix(*args, k=K))
    assert value.dtype == std_err.dtype == np.float32
    error = value.astype(np.float64) - np.trace(matrix.astype(np.float64))
    assert np.all(np.abs(error) <= 6 * std_err)
    assert abs(np.mean(error)) <= np.mean(std_err)
    check_width(std_err, error, value, dtype)


@eqx.filter_jit
def trace_of_tree(matrix, estimator, key, *, k):
    """The matrix as an operator on a PyTree with a matrix and a vector leaf."""

    def mv(tree):
        flat = matrix @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": flat[:32].reshape(4, 8), "b": flat[32:]}

    shapes = {"a": (4, 8), "b": (8,)}
    structure = {
        name: jax.ShapeDtypeStruct(shape, matrix.dtype) for name, shape in shapes.items()
    }
    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    return tx.trace(operator, estimator, k=k, key=key, throw=False)


@pytest.mark.parametrize(
    "case", [HUTCHINSON, XTRACE, EXACT], ids=lambda x: str(x.estimator)
)
def test_pytree_operator(case):
    matrix = hermitian(0, INDEX**-1.0)
    if case is EXACT:
        value, std_err = np.trace(matrix), 0
    else:
        flat = solved(case, np.float64)["decaying"]
        value, std_err = flat.value[0], flat.std_err[0]
    k = N if case is EXACT else K
    tree = trace_of_tree(matrix, case.estimator, KEYS[0], k=k)
    assert np.isclose(tree.value, value, rtol=1e-12, atol=0)
    assert np.isclose(tree.std_err, std_err, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case.semidefinite], ids=str)
def test_negative_semidefinite(case):
    positive = solved(case, np.float64)["decaying"]
    matrix, tag = -hermitian(0, INDEX**-1.0), lx.negative_semidefinite_tag
    negative = trace_of_matrix(matrix, case.estimator, KEYS[0], k=K, tags=tag)
    assert negative.result == tx.RESULTS.successful
    assert np.isclose(negative.value, -positive.value[0], rtol=1e-12, atol=0)
    assert np.isclose(negative.std_err, positive.std_err[0], rtol=1e-9, atol=0)
    samples = np.asarray(negative.stats["samples"])
    assert np.isclose(np.mean(samples), negative.value, rtol=1e-12, atol=0)


# --- budget, execution, statistics ---


@pytest.mark.slow(but=("case1-*", "case3-*"))
@pytest.mark.parametrize(
    ("case", "k", "block_size"),
    [*((case, K, 5) for case in CASES), (XTRACE, 11, 1)],
)
def test_products_are_counted(case, k, block_size):
    """The products seen at run time are those reported, and at most k; their blocks do
    not change the answer."""
    seen = []
    matrix = jnp.asarray(hermitian(0, INDEX**-1.0))

    def mv(v):
        jax.debug.callback(lambda _: seen.append(1), v[0])
        return matrix @ v

    operator = lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), float), PSD)
    settings = {"k": k, "key": KEYS[0], "execution": tx.Local(block_size)}
    solution = tx.trace(operator, case.estimator, **settings)
    jax.block_until_ready(solution.value)
    jax.effects_barrier()
    assert len(seen) == solution.stats["num_matvecs"]
    assert len(seen) in (k, k - 1)
    if k == K:
        value = solved(case, np.float64)["decaying"].value[0]
        assert np.isclose(solution.value, value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("quantity", [tx.trace, tx.diagonal])
def test_equal_blocks_are_one_program(quantity):
    """What is left over by blocks that are not is compiled once more."""

    def places(k):
        mv, structure = jnp.flip, jax.ShapeDtypeStruct((N,), float)
        operator = lx.FunctionLinearOperator(mv, structure, PSD)
        settings = {"k": k, "key": KEYS[0], "execution": tx.Local(8)}
        call = lambda: quantity(operator, HUTCHINSON.estimator, **settings).value  # noqa: E731
        return str(jax.make_jaxpr(call)()).count(" rev[")

    assert places(16) == places(10) == places(14) < places(11)


@pytest.mark.parametrize("block_size", [1, 5])
def test_block_size_of_the_exact_trace_does_not_matter(block_size):
    matrix, execution = hermitian(0, INDEX**-1.0), tx.Local(block_size)
    args = matrix, tx.ExactTraceEstimator(), None
    value = trace_of_matrix(*args, k=N, execution=execution).value
    assert np.isclose(value, np.trace(matrix), rtol=1e-12, atol=0)


def test_first_samples_do_not_depend_on_the_budget():
    matrix = hermitian(0, INDEX**-1.0)
    few = trace_of_matrix(matrix, HUTCHINSON.estimator, KEYS[0], k=5).stats["samples"]
    many = solved(HUTCHINSON, np.float64)["decaying"].stats["samples"][0]
    assert np.allclose(few, many[:5], rtol=1e-12, atol=0)


@pytest.mark.slow
def test_auto_is_the_estimator_it_picks():
    matrix, auto = hermitian(0, INDEX**-1.0), tx.AutoTraceEstimator()
    for tags, k in [(PSD, K), ((), K), ((), 1)]:
        picked = tx.select_trace_estimator(matrix_free(matrix, tags), k)
        values = [
            trace_of_matrix(matrix, each, KEYS[0], k=k, tags=tags).value
            for each in (auto, picked)
        ]
        assert values[0] == values[1]


def test_known_diagonal_costs_no_product():
    diagonal = jnp.asarray(np.arange(5.0))
    solution = tx.trace(lx.DiagonalLinearOperator(diagonal), k=1)
    assert solution.value == 10
    assert solution.stats["num_matvecs"] == 0


def test_solution_fields_and_messages():
    matrix = hermitian(0, INDEX**-1.0)
    solution = trace_of_matrix(matrix, tx.AutoTraceEstimator(), KEYS[0], k=K)
    assert set(solution.stats) >= {"num_matvecs", "samples", "std.err"}
    assert solution.state is None
    assert tx.RESULTS[solution.result] == ""
    assert issubclass(tx.RESULTS, lx.RESULTS)


@pytest.mark.slow(but=("Hutchinson-*", "XNysTrace-Sphere"))
@every_variant
def test_traced_once_for_each_budget(case):
    """Whatever the key, and for an estimator that is made anew."""
    leaves, structure = jax.tree.flatten(case.estimator)
    matrix = np.eye(20)

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def run(matrix, estimator, key, k):
        return tx.trace(matrix_free(matrix, PSD), estimator, k=k, key=key).value

    for k in (6, 9, 6, 9):
        for seed in (0, 1):
            estimator = jax.tree.unflatten(structure, leaves)
            eqx.filter_eval_shape(run, matrix, estimator, KEYS[seed], k)


@eqx.filter_jit
def traces_of_coarse_products(matrices, estimator, keys):
    """Solutions for each matrix and key, the products rounded as an accelerator's TF32
    does."""

    def tf32(x):
        return jax.lax.reduce_precision(x, 8, 10)

    def one(matrix, key):
        structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
        product = lambda v: tf32(matrix) @ tf32(v)  # noqa: E731
        operator = lx.FunctionLinearOperator(product, structure, PSD)
        solution = tx.trace(operator, estimator, k=60, key=key, throw=False)
        return solution.value, solution.std_err, solution.result == tx.RESULTS.successful

    def every_key(matrix):
        return jax.lax.map(lambda key: one(matrix, key), keys)

    return jax.lax.map(every_key, matrices)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, VARIANTS[7]], ids=str)
def test_products_less_accurate_than_their_dtype(case):
    """Decaying, and of rank 5: the RMS error is within three standard errors plus a
    tenth of a rounding of the trace, 40 keys."""
    n = 100
    spectra = 0.7 ** np.arange(n), (np.arange(n) < 5) * 1.0
    matrices = np.stack([hermitian(0, spectrum, np.float32) for spectrum in spectra])
    found = numpy(traces_of_coarse_products(matrices, case.estimator, KEYS[:40]))
    for spectrum, value, std_err, successful in zip(spectra, *found, strict=True):
        exact = np.sum(spectrum)
        error = np.sqrt(np.mean((value - exact) ** 2))
        assert np.all(successful)
        assert error <= 3 * np.sqrt(np.mean(std_err**2)) + 1e-4 * exact
