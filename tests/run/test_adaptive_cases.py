"""Adaptive budgets at the edge: dtypes, ranks and scales, sizes, wrong arguments."""

import functools as ft
import math

import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, traces_of_matrix, z_score
from .adaptive import (
    budget,
    DECAY,
    estimate,
    HUTCHINSON,
    HUTCHPP,
    KEY,
    MAX,
    N,
    name,
    num_probes,
    NYSTROMPP,
    PREDICTABLE,
    SLQ,
    STEPS,
    succeeded,
    trace,
    TRACES,
    XNYS,
    XTRACE,
)


EVERY = pytest.mark.parametrize("estimator", TRACES, ids=name)
AS_FIXED = pytest.mark.parametrize("estimator", PREDICTABLE, ids=name)
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.complex64])
SPECTRA = {
    "decay": 1 / np.arange(1, N + 1),
    "flat": np.linspace(1, 2, N),
    "low": np.array([2] * 3 + [0] * (N - 3)),
    "indefinite": np.linspace(-1, 2, N),
}


# --- dtypes, ranks and scales: one program for each estimator and dtype ---


@pytest.mark.slow
@AS_FIXED
def test_same_as_fixed_budget(estimator):
    """Value, standard error, samples and gradient, for spectra of every kind and rank."""
    everything, dtype = budget(atol=1e-38, rtol=0.0), np.complex64
    for kind, eigenvalues in SPECTRA.items():
        if kind == "indefinite" and estimator is XNYS:
            continue
        matrix = hermitian(3, eigenvalues, dtype)
        grown, slopes = estimate(matrix, estimator, everything)
        fixed, expected = estimate(matrix, estimator, MAX)
        assert grown.value.dtype == fixed.value.dtype, kind
        assert grown.std_err.dtype == fixed.std_err.dtype
        assert grown.stats["num_matvecs"] == fixed.stats["num_matvecs"]
        assert grown.stats["num_matvecs"] == MAX * (STEPS if estimator is SLQ else 1)
        eps = float(np.finfo(dtype).eps)
        tolerance = 300 * eps * np.sum(np.abs(eigenvalues))
        assert np.abs(grown.value - fixed.value) <= tolerance, kind
        assert np.abs(grown.std_err - fixed.std_err) <= tolerance, kind
        samples = grown.stats["samples"]
        assert samples.dtype == fixed.stats["samples"].dtype
        assert np.max(np.abs(samples - fixed.stats["samples"])) <= 10 * tolerance, kind
        for entry in ("jackknife_std_err", "independent_std_err", "ritz_values"):
            if entry in fixed.stats:
                difference = np.abs(grown.stats[entry] - fixed.stats[entry])
                assert np.max(difference) <= 10 * tolerance, (kind, entry)
        if kind == "low" and estimator in (XTRACE, XNYS):
            # Beyond the rank, rounding decides which directions a sketch has found.
            values, vectors = np.linalg.eigh(matrix)
            inside = vectors[:, values > 1].conj()
            slopes, expected = (
                [inside.conj().T @ x @ inside for x in each if np.ndim(x) == 2]
                for each in (slopes, expected)
            )
            assert len(expected) == 1
            assert np.linalg.norm(expected[0]) > 1
        for one, other in zip(slopes, expected, strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e3 * eps * np.max(abs(other)))


@ft.partial(jax.jit, static_argnums=(0, 2))
def _probes_of(sampler, indices, dtype):
    keys = jax.vmap(lambda index: jax.random.fold_in(KEY, index))(indices)
    return jax.vmap(lambda key: sampler.sample(key, N, dtype))(keys)


def probes_of(sampler, indices, dtype):
    """Those of the key, as columns."""
    return np.asarray(_probes_of(sampler, indices, dtype)).T


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("kind", ["decay", "low"])
def test_nystrompp_by_its_definition(dtype, kind):
    """tr(A_hat) + c w* (A - A_hat) w, A_hat from the probes of the deflating rounds; c
    gives w the length outside their span that it has in the mean."""
    sampler = tx.NormalSampler()  # complex, where the operator is
    estimator = tx.NystromPlusPlusEstimator(sampler)
    matrix = hermitian(3, SPECTRA[kind], dtype)
    solution, _ = estimate(matrix, estimator, budget(rtol=1e-2), PSD, gradient=False)
    samples = solution.stats["samples"]
    deflated = int(np.argmax(np.isfinite(samples)))
    assert 0 < deflated < N // 2
    made = int(solution.stats["num_matvecs"])

    probes = probes_of(sampler, np.arange(made), dtype).astype(np.complex128)
    basis, rest = probes[:, :deflated], probes[:, deflated:]
    core = np.linalg.pinv(basis.conj().T @ matrix @ basis, rcond=1e-10, hermitian=True)
    approximation = matrix @ basis @ core @ basis.conj().T @ matrix
    forms = np.sum(rest.conj() * ((matrix - approximation) @ rest), axis=0)
    outside = rest - basis @ np.linalg.lstsq(basis, rest, rcond=None)[0]
    lengths = np.sum(np.abs(outside) ** 2, axis=0)
    expected = np.trace(approximation) + forms * (N - deflated) / lengths
    tolerance = 300 * np.finfo(dtype).eps * np.trace(matrix).real
    assert np.max(np.abs(samples[deflated:made] - expected)) <= tolerance
    assert np.abs(solution.value - np.mean(expected)) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "dtype"),
    [(each, np.complex64) for each in (HUTCHINSON, HUTCHPP, XTRACE, XNYS)]
    + [(each, np.float32) for each in (NYSTROMPP, XTRACE)],
    ids=lambda x: x.__name__ if isinstance(x, type) else name(x),
)
def test_zero_low_rank_and_scaled_operators(estimator, dtype):
    """The zero operator; one of low rank, whose trace is then known to rounding; and
    scales near the ends of float32: powers of two, so that nothing is rounded."""

    # With the gradient where the program is that of the tests above.
    gradient = dtype == np.complex64 and estimator in PREDICTABLE

    def run(matrix, rtol):
        k = budget(rtol=rtol, atol=0.0)
        return estimate(matrix, estimator, k, gradient=gradient)[0]

    decay, low = (hermitian(3, SPECTRA[kind], dtype) for kind in ("decay", "low"))
    zero = run(0 * decay, 0.05)
    assert zero.value == 0
    assert zero.std_err == 0
    assert succeeded(zero)

    if estimator is not HUTCHINSON:
        solution = run(low, 1e-3 if estimator is HUTCHPP else 1e-4)
        assert succeeded(solution)
        assert np.abs(solution.value - 6) <= 1000 * np.finfo(dtype).eps

    one = run(decay, 0.06)
    for exponent in (-100, 100):
        scale = dtype(2.0**exponent)
        other = run(scale * decay, 0.06)
        assert other.stats["num_matvecs"] == one.stats["num_matvecs"]
        assert np.allclose(other.value / scale, one.value, rtol=1e-5)
        assert np.allclose(other.std_err / scale.real, one.std_err, rtol=1e-4)
        assert succeeded(other) == succeeded(one)


# --- small budgets, small and structured operators ---


@pytest.mark.slow(but="NystromPlusPlus")
@EVERY
def test_budget_below_a_round(estimator):
    """One round, as small as the budget. The error is below 6 bars, but for 3% of keys at
    three samples, and these are below three errors of six independent forms."""
    k = tx.Adaptive(rtol=0.5, max_k=6, min_samples=4)
    assert k.round_size == 6
    solution, _ = estimate(DECAY, estimator, k, gradient=False)
    assert num_probes(solution, estimator) == 6
    assert not succeeded(solution) or solution.std_err * 2 < 0.5 * solution.value
    assert np.abs(solution.value - np.trace(DECAY)) < 6 * solution.std_err
    assert solution.std_err < 3 * (2 / 6) ** 0.5 * np.linalg.norm(DECAY)
    if estimator is HUTCHINSON:
        probes = probes_of(estimator.sampler, np.arange(6), np.float64)
        forms = np.sum(probes * (DECAY @ probes), axis=0)
        assert np.isclose(solution.value, np.mean(forms), rtol=1e-12)


@jax.jit
def by_one_round(matrix):
    k, operator = tx.Adaptive(rtol=1e-9, max_k=32), matrix_free(matrix, PSD)
    estimators = HUTCHINSON, XNYS, tx.AutoTraceEstimator()
    found = [tx.trace(operator, each, k=k, throw=True) for each in estimators]
    return found, trace(lx.MatrixLinearOperator(matrix, PSD), SLQ, k)


@pytest.mark.parametrize("size", [1, 7])
def test_no_larger_than_a_round_is_exact(size):
    matrix = DECAY[:size, :size]
    found, of_function = by_one_round(matrix)
    for solution in found:
        assert np.isclose(solution.value, np.trace(matrix), rtol=1e-12)
        assert solution.std_err == 0
        assert solution.stats["num_matvecs"] == size
        assert succeeded(solution)
    exact = np.sum(np.exp(-np.linalg.eigvalsh(matrix)))
    assert np.isclose(of_function.value, exact, rtol=1e-12)


@pytest.mark.slow
def test_pytree_operator():
    def mv(tree):
        flat = jax.numpy.concatenate([tree["a"].reshape(-1), tree["b"]])
        product = DECAY @ flat
        return {"a": product[:30].reshape(5, 6), "b": product[30:]}

    shapes = {"a": (5, 6), "b": (10,)}
    structure = {x: jax.ShapeDtypeStruct(shape, float) for x, shape in shapes.items()}
    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    tree = trace(operator, HUTCHPP, budget(rtol=0.05))
    flat = trace(matrix_free(DECAY, PSD), HUTCHPP, budget(rtol=0.05))
    assert np.isclose(tree.value, flat.value, rtol=1e-11)
    assert tree.stats["num_matvecs"] == flat.stats["num_matvecs"]


# --- the estimator that picks one ---


@pytest.mark.slow
def test_auto_estimator():
    """By the tag and the largest budget, of which n or more is not spent where less is
    enough; exactly where the diagonal is stored."""
    auto = tx.AutoTraceEstimator()
    for tags, estimator, max_k in ((PSD, XNYS, 10 * N), (lx.symmetric_tag, XTRACE, MAX)):
        operator, k = matrix_free(DECAY, tags), budget(rtol=0.2, max_k=max_k)
        found, expected = trace(operator, auto, k), trace(operator, estimator, k)
        assert np.isclose(found.value, expected.value, rtol=1e-11)
        assert found.stats["num_matvecs"] == expected.stats["num_matvecs"] < N
    stored = trace(lx.MatrixLinearOperator(DECAY, PSD), auto, budget(rtol=0.05))
    assert stored.stats["num_matvecs"] == 0
    assert np.isclose(stored.value, np.trace(DECAY))
    assert succeeded(stored)


# --- wrong arguments ---


class OneBlock(tx.AbstractSketchEstimator):
    """Hutch++ as somebody else might write it, without rounds."""

    sampler: tx.AbstractSampler = tx.RademacherSampler()
    min_matvecs = 3
    semidefinite = False

    def num_probes(self, k):
        return HUTCHPP.num_probes(k)

    def sketch(self, matmat, probes, k, eps):
        return HUTCHPP.sketch(matmat, probes, k, eps)


def test_estimators_without_rounds():
    with pytest.raises(ValueError, match="needs") as caught:
        trace(lx.MatrixLinearOperator(DECAY, PSD), OneBlock(), budget(rtol=0.1))
    message = str(caught.value)
    assert "Adaptive" in message
    assert "Pass an integer, or use `traceax." in message


def test_missing_tag():
    with pytest.raises(ValueError, match="tagged as positive or negative"):
        trace(lx.MatrixLinearOperator(DECAY), XNYS, budget(rtol=0.05))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rtol": -0.1}, "`rtol` must not be negative"),
        ({"rtol": math.nan}, "`rtol` must be a number"),
        ({"atol": -1}, "`atol` must not be negative"),
        ({"atol": np.float32(-1)}, "`atol` must not be negative"),
        ({"rtol": jax.numpy.asarray(-0.1)}, "`rtol` must not be negative"),
        ({"rtol": jax.numpy.zeros(())}, "needs a tolerance"),
        ({"atol": 0.0}, "needs a tolerance"),
        ({"rtol": 0.1, "max_k": 0}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "max_k": 3.0}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "max_k": True}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "round_size": 1}, "`round_size` must be a Python integer, 2"),
        ({"rtol": 0.1, "round_size": 2.5}, "`round_size` must be a Python integer"),
        ({"rtol": 0.1, "min_samples": 3}, "`min_samples` must be a Python integer, 4"),
        ({"rtol": 0.1, "min_samples": None}, "`min_samples` must be a Python integer"),
        ({"rtol": 0.1, "confidence": 0.0}, "`confidence` must be a known number"),
        ({"rtol": 0.1, "confidence": 1.0}, "`confidence` must be a known number"),
        ({"rtol": 0.1, "confidence": 95}, "`confidence` must be a known number"),
    ],
    ids=lambda x: (
        None if isinstance(x, dict) else x.split("`")[1] if "`" in x else "none"
    ),
)
def test_bad_arguments(settings, match):
    with pytest.raises(ValueError, match=match) as caught:
        budget(**settings)
    assert "Found" in str(caught.value)


def test_tolerances_are_scalars():
    with pytest.raises(TypeError, match=r"`rtol` must be a real number.*jax\.vmap"):
        budget(rtol=np.full(3, 0.1))


def test_the_smallest_budget_is_one():
    k = tx.Adaptive(rtol=0.1, max_k=1)
    solution = trace(lx.MatrixLinearOperator(DECAY, PSD), HUTCHINSON, k, throw=False)
    assert solution.stats["num_matvecs"] == 1
    assert solution.result == tx.RESULTS.max_matvecs_reached


def test_keywords_are_required():
    with pytest.raises(TypeError, match="positional"):
        tx.Adaptive(0.1, max_k=8)  # pyright: ignore


def test_too_small_for_the_estimator():
    with pytest.raises(ValueError, match="needs at least k=3"):
        trace(
            lx.MatrixLinearOperator(DECAY, PSD), HUTCHPP, tx.Adaptive(rtol=0.1, max_k=2)
        )


def test_key_is_needed():
    with pytest.raises(ValueError, match="`key`"):
        trace(lx.MatrixLinearOperator(DECAY, PSD), HUTCHINSON, budget(rtol=0.1), key=None)


def test_traced_budget_names_adaptive():
    with pytest.raises(TypeError, match=r"traceax\.Adaptive"):
        jax.jit(
            lambda k: trace(lx.MatrixLinearOperator(DECAY, PSD), HUTCHINSON, k).value
        )(8)


# --- statistics ---


@pytest.mark.slow(but="Hutchinson")
@pytest.mark.parametrize(
    ("estimator", "eigenvalues"),
    [(HUTCHINSON, np.arange(1, 101)), (XTRACE, 1 / np.arange(1, 101))],
    ids=["Hutchinson", "XTrace"],
)
def test_error_is_within_the_tolerance(estimator, eigenvalues):
    """200 keys at 95%: at least 90% of them, and no bias."""
    matrix = hermitian(8, eigenvalues)
    k = tx.Adaptive(rtol=0.05, max_k=96, round_size=8)
    keys = jax.random.split(jax.random.key(20261121), 200)
    value, _, stats = traces_of_matrix(matrix, estimator, keys, k=k)
    value, made = np.asarray(value), np.asarray(stats["num_matvecs"])
    exact = np.trace(matrix)
    assert np.mean(np.abs(value - exact) <= 0.05 * exact) >= 0.9
    assert z_score(value, exact) < 5
    assert np.mean(made) < 90
    assert len(set(made.tolist())) > 1
