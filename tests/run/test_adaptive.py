"""`k=tx.Adaptive(...)`: rounds until the error bar is small enough, watched at work."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, z_score
from .adaptive import (
    as_numpy,
    budget,
    DECAY,
    estimate,
    FLAT,
    HUTCHINSON,
    HUTCHPP,
    KEY,
    LOW,
    MAX,
    N,
    name,
    num_probes,
    PLANNING,
    PREDICTABLE,
    quantile,
    SEMIDEFINITE,
    SIZE,
    SLQ,
    solution_and_gradient,
    STEPS,
    succeeded,
    tags_of,
    trace,
    TRACES,
    XNYS,
    XTRACE,
)


EVERY = pytest.mark.parametrize("estimator", TRACES, ids=name)
ALL = pytest.mark.parametrize("estimator", [*TRACES, SLQ], ids=name)
AS_FIXED = pytest.mark.parametrize("estimator", PREDICTABLE, ids=name)
PRODUCTS, ROUNDS, TRACED = [], [], []  # what was made, told and traced


def counted(matrix, tags):
    """`matrix`, which counts its products, without an effect that would keep unused ones
    alive."""

    def note(_):
        PRODUCTS.append(1)
        return np.zeros(1)

    def mv(v):
        first = jax.lax.stop_gradient(v[:1])
        return matrix @ v + jax.pure_callback(
            note, first, first, vmap_method="sequential"
        )

    return lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), float), tags)


def watched_budget(**settings):
    return budget(history=True, callback=told, **settings)


def told(*seen):
    ROUNDS.append(seen)


class Watched(NamedTuple):
    solution: Any
    gradient: Any
    products: int
    rounds: np.ndarray  # what the callback was told


@eqx.filter_jit
def _watch(matrix, estimator, k, key, tags, gradient):
    TRACED.append(1)

    def operator(matrix):
        return counted(matrix, tags)

    if gradient:
        return solution_and_gradient(operator, matrix, estimator, k, key=key)
    return trace(operator(matrix), estimator, k, key=key), None


def watch(matrix, estimator, *, gradient=True, key=KEY, tags=None, **settings):
    tags = tags_of(estimator) if tags is None else tags
    PRODUCTS.clear()
    ROUNDS.clear()
    k = watched_budget(**settings)
    found = _watch(matrix, estimator, k, key, tags, gradient)
    solution, slopes = as_numpy(found)
    return Watched(solution, slopes, len(PRODUCTS), np.array(ROUNDS, float))


# --- when it stops ---


def test_student_quantile():
    """Two-sided 95% points from tables."""
    table = {3: 3.182446, 4: 2.776445, 9: 2.262157, 15: 2.131450, 30: 2.042272}
    for freedom, expected in table.items():
        assert quantile(freedom + 1) == pytest.approx(expected, rel=2e-3)
    assert quantile(1e9) == pytest.approx(1.959964, rel=1e-5)
    for confidence, expected in ((0.9, 1.833113), (0.99, 3.249836), (0.5, 0.702722)):
        assert quantile(10, confidence) == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow(but="Hutchinson")
@ALL
def test_stops_at_the_first_round_that_is_good_enough(estimator):
    """The history, against the rule: quantile times standard error within tolerance. The
    callback is told the same, once a round."""
    per_round = SIZE // 2 if estimator is XTRACE else SIZE
    for rtol in (0.3, 0.06, 0.005):
        solution, _, _, rounds = watch(DECAY, estimator, rtol=rtol)
        history = solution.stats["history"]
        assert history.shape == (MAX // SIZE, 3)
        made = int(np.sum(np.isfinite(history[:, 0])))
        assert np.all(np.isinf(history[made:]))
        assert history[:made, 0].tolist() == [SIZE * (i + 1) for i in range(made)]
        assert num_probes(solution, estimator) == SIZE * made
        assert np.allclose(history[made - 1, 1], solution.value, rtol=1e-12)
        assert np.allclose(history[made - 1, 2], solution.std_err, rtol=1e-9)
        assert np.allclose(rounds, history[:made], rtol=1e-12, equal_nan=True)
        if estimator in PLANNING:
            continue  # the number of its samples is its own affair
        good = []
        for i in range(made):
            count = per_round * (i + 1)
            _, value, std_err = history[i].tolist()
            enough = quantile(count) * std_err <= rtol * abs(value)
            good.append(count >= 10 and enough)
        assert not any(good[:-1])
        assert good[-1] == succeeded(solution)
        assert succeeded(solution) or made == MAX // SIZE


@pytest.mark.slow(but=("Hutchinson", "XTrace", "XNysTrace"))
@AS_FIXED
def test_tolerance_to_the_last_digit(estimator):
    """Just below the tolerance it goes on, and just above it ends."""
    solution = watch(DECAY, estimator, rtol=1e-6).solution
    counts = np.arange(1, MAX // SIZE + 1) * SIZE // (2 if estimator is XTRACE else 1)
    _, value, std_err = solution.stats["history"].T
    widths = np.array([quantile(count) for count in counts]) * std_err / abs(value)
    enough = counts >= 10
    last = int(np.argmin(np.where(enough, widths, np.inf)))
    before = np.min(widths[:last], where=enough[:last], initial=np.inf)
    assert widths[last] < before
    for factor in (1 - 1e-6, 1 + 1e-6):
        solution = watch(DECAY, estimator, rtol=factor * widths[last]).solution
        assert succeeded(solution) == (factor > 1)
    assert num_probes(solution, estimator) == SIZE * (last + 1)


def test_absolute_tolerance_and_confidence():
    solution = watch(FLAT, HUTCHINSON, atol=2.0).solution
    assert succeeded(solution)
    count = int(solution.stats["num_matvecs"])
    assert quantile(count) * solution.std_err <= 2
    either = watch(FLAT, HUTCHINSON, atol=2.0, rtol=1e-9).solution
    assert either.value == solution.value
    sure = watch(FLAT, HUTCHINSON, atol=2.0, confidence=0.9999, gradient=False).solution
    assert sure.stats["num_matvecs"] > count


def test_least_number_of_samples():
    """Tested before, the identity would end after one round."""
    solution = watch(
        np.eye(N), HUTCHINSON, rtol=0.1, min_samples=17, gradient=False
    ).solution
    assert solution.stats["num_matvecs"] == 24
    assert succeeded(solution)
    never = watch(
        np.eye(N), HUTCHINSON, rtol=0.1, min_samples=33, gradient=False
    ).solution
    assert never.stats["num_matvecs"] == MAX
    assert never.result == tx.RESULTS.max_matvecs_reached


@pytest.mark.slow
@ALL
def test_budget_ends_first(estimator):
    solution, _, _, rounds = watch(DECAY, estimator, rtol=1e-6)
    assert solution.result == tx.RESULTS.max_matvecs_reached
    assert num_probes(solution, estimator) == MAX
    assert np.isfinite(solution.std_err)
    assert len(rounds) == MAX // SIZE
    assert np.allclose(rounds, solution.stats["history"], rtol=1e-12, equal_nan=True)


@pytest.mark.slow(but=("Hutchinson", "XTrace"))
@ALL
def test_nonfinite_operator(estimator):
    """Seen after a round, or after two where the first makes no sample."""
    bad = DECAY.copy()
    bad[0, 0] = np.nan
    solution = watch(bad, estimator, rtol=0.05).solution
    assert solution.result == tx.RESULTS.nonfinite_product
    rounds = 2 if estimator in PLANNING else 1
    assert num_probes(solution, estimator) <= rounds * SIZE


def test_wrong_tag():
    solution = watch(hermitian(6, np.linspace(-1, 1, N)), XNYS, rtol=0.05).solution
    assert solution.result == tx.RESULTS.not_semidefinite


# --- the same as a fixed budget ---


@pytest.mark.slow(but="Hutchinson")
@AS_FIXED
def test_same_as_fixed_budget_stopped_early(estimator):
    """One compiled program for all numbers of rounds; samples beyond are not finite. The
    same gradients, in all entries of the matrix and in the function."""
    rtols, seen = (0.3, 0.1, 0.06, 0.02, 0.003), {}
    for rtol in rtols:
        grown = watch(DECAY, estimator, rtol=rtol)
        seen.setdefault(num_probes(grown.solution, estimator), grown)
    assert len(seen) >= 2
    k = max(k for k in seen if k < MAX)
    (grown, slopes, _, _), (fixed, expected) = seen[k], estimate(DECAY, estimator, k)
    samples, others = grown.stats["samples"], fixed.stats["samples"]
    assert np.allclose(grown.value, fixed.value, rtol=1e-11)
    assert np.allclose(grown.std_err, fixed.std_err, rtol=1e-9)
    assert np.allclose(samples[: len(others)], others, rtol=1e-10)
    assert not np.any(np.isfinite(samples[len(others) :]))
    assert len(samples) == MAX // (2 if estimator is XTRACE else 1)
    for one, other in zip(slopes, expected, strict=True):
        assert np.allclose(one, other, rtol=1e-10, atol=1e-10 * np.max(abs(other)))
    if estimator is SLQ:
        assert expected[1] != 0
        assert np.allclose(grown.stats["ritz_values"], fixed.stats["ritz_values"])
        residuals = grown.stats["gradient_residual"]
        assert np.allclose(residuals[:k], fixed.stats["gradient_residual"])


@pytest.mark.slow(but=("Hutchinson", "XTrace"))
@EVERY
def test_gradient(estimator):
    """The estimate is linear in the operator but for coefficients that are constant to
    derivatives, so a slope is that of an unbiased estimate. That in the direction of the
    operator is the value, but for Nystrom approximations. Two z-scores over 40 keys, one
    of them above 5 with a chance of 3e-5."""
    slope = np.cos(0.3) * hermitian(5, np.linspace(0.5, 2, N)) + 0.6 * FLAT
    along_slope, along_operator = [], []
    for key in jax.random.split(jax.random.key(7), 40):
        solution, (gradient, _), _, _ = watch(DECAY, estimator, rtol=0.08, key=key)
        along_slope.append(np.sum(gradient * slope))
        along_operator.append(np.sum(gradient * DECAY))
        if estimator not in SEMIDEFINITE:
            assert np.isclose(along_operator[-1], solution.value, rtol=1e-10)
    assert z_score(along_slope, np.trace(slope)) < 5
    assert z_score(along_operator, np.trace(DECAY)) < 5


@AS_FIXED
def test_products_of_a_gradient(estimator):
    """Each product once more, or for a frame twice, and no rounds that were not made."""
    solution, _, products, _ = watch(DECAY, estimator, rtol=0.5)
    made = solution.stats["num_matvecs"]
    assert made < (MAX * STEPS if estimator is SLQ else MAX)
    assert made <= products <= 3 * made


@pytest.mark.slow
def test_budget_is_rounded_down_to_whole_rounds():
    def run(estimator, k):
        return estimate(DECAY, estimator, k, gradient=False)[0]

    solution = run(HUTCHINSON, budget(rtol=1e-9, max_k=30))
    assert solution.stats["num_matvecs"] == 24
    odd = run(XTRACE, budget(rtol=1e-9, max_k=30, round_size=7))
    assert odd.stats["num_matvecs"] == 24  # two by two, three pairs in a round
    fixed = run(XTRACE, 24)
    assert np.allclose(odd.value, fixed.value, rtol=1e-11)


# --- budgets of n products or more, without a gradient ---


BEYOND = {"gradient": False, "max_k": 10 * N}


@pytest.mark.slow(but="Hutchinson")
@ALL
def test_products_are_counted(estimator):
    """Those that are reported, and no more; fewer than n where that is enough."""
    solution, _, products, _ = watch(DECAY, estimator, rtol=0.5, **BEYOND)
    made = solution.stats["num_matvecs"]
    assert made < (N * STEPS if estimator is SLQ else N)
    assert products == made
    assert succeeded(solution)


@pytest.mark.slow
@EVERY
def test_an_estimate_that_is_good_enough_is_kept(estimator):
    """For a tolerance that is met, the budget beyond n changes nothing."""
    small = watch(FLAT, estimator, rtol=0.2).solution
    large = watch(FLAT, estimator, rtol=0.2, **BEYOND).solution
    assert succeeded(small)
    assert np.isclose(large.value, small.value, rtol=1e-12)
    assert large.std_err > 0
    if estimator in (HUTCHINSON, XTRACE):  # the others plan for the largest budget
        assert large.stats["num_matvecs"] == small.stats["num_matvecs"] < N


@pytest.mark.slow(but="XTrace")
@EVERY
def test_budget_beyond_the_size(estimator):
    """Which are not enough: the answer is then exact, for n more."""
    solution, _, products, _ = watch(DECAY, estimator, rtol=1e-9, **BEYOND)
    assert succeeded(solution)
    assert np.isclose(solution.value, np.trace(DECAY), rtol=1e-13)
    assert solution.std_err == 0
    assert N < products <= 2 * N
    assert solution.stats["num_matvecs"] == products


@pytest.mark.slow(but="XNysTrace")
@EVERY
def test_negative_semidefinite(estimator):
    """Also what the history says, and the callback."""
    needs_tag = estimator in SEMIDEFINITE
    settings = {"tags": lx.negative_semidefinite_tag, "gradient": False}
    positive = watch(DECAY, estimator, rtol=0.06).solution
    negative, _, _, rounds = watch(
        -DECAY, estimator, rtol=0.06, **settings if needs_tag else {}
    )
    assert np.allclose(negative.value, -positive.value, rtol=1e-11)
    assert np.allclose(negative.std_err, positive.std_err, rtol=1e-8)
    samples, others = negative.stats["samples"], positive.stats["samples"]
    assert np.allclose(np.abs(samples), np.abs(others), rtol=1e-9)
    made = np.isfinite(samples)
    assert np.allclose(samples[made], -others[made], rtol=1e-9)
    assert negative.stats["num_matvecs"] == positive.stats["num_matvecs"]
    history = negative.stats["history"]
    assert np.allclose(history[len(rounds) - 1, 1], negative.value, rtol=1e-12)
    assert np.allclose(rounds, history[: len(rounds)], rtol=1e-12, equal_nan=True)


# --- one program ---


def test_compiled_once_for_all_data():
    """Tolerances, keys and operators are data; a loop, and no copy of its body for each
    round."""
    for estimator in (XTRACE, HUTCHINSON):
        watch(DECAY, estimator, rtol=0.3)
        traced, counts = len(TRACED), set()
        for i, matrix in enumerate((DECAY, FLAT, LOW, 0 * FLAT)):
            for rtol in (0.3, 0.05, 0.001):
                key = jax.random.key(i)
                solution = watch(matrix, estimator, rtol=rtol, key=key).solution
                counts.add(int(solution.stats["num_matvecs"]))
        assert len(TRACED) == traced
        assert counts <= {SIZE * (i + 1) for i in range(MAX // SIZE)}
        assert len(counts) >= 2

    def length(max_k):
        def value(matrix):
            k = budget(rtol=0.1, max_k=max_k)
            return trace(lx.MatrixLinearOperator(matrix), XTRACE, k).value

        jaxpr = str(jax.make_jaxpr(value)(DECAY))
        assert "while[" in jaxpr
        return jaxpr.count("dot_general")

    assert length(16) == length(32)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [HUTCHPP, XTRACE], ids=name)
def test_tolerances_under_vmap(estimator):
    """Each of a batch stops by itself, and its answer is the one that it has alone."""

    @jax.jit
    @jax.vmap
    def batch(rtol):
        solution = trace(matrix_free(DECAY, PSD), estimator, budget(rtol=rtol))
        return solution.value, solution.std_err, solution.stats

    rtols = np.asarray([0.3, 0.1, 0.05, 0.001])
    values, errors, stats = as_numpy(batch(rtols))
    for i, rtol in enumerate(rtols):
        alone = watch(DECAY, estimator, rtol=rtol).solution
        assert np.allclose(values[i], alone.value, rtol=1e-11)
        assert np.allclose(errors[i], alone.std_err, rtol=1e-8)
        assert stats["num_matvecs"][i] == alone.stats["num_matvecs"]
        samples = stats["samples"][i], alone.stats["samples"]
        assert np.allclose(*samples, rtol=1e-9, equal_nan=True)
    assert len(set(stats["num_matvecs"].tolist())) > 1


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=name)
def test_second_derivative_and_batches(estimator):
    """In a batch, by reverse over reverse mode, and by forward mode."""
    ts = np.asarray([0.3, 0.3001])
    slope = hermitian(5, np.linspace(0.5, 2, N))

    @eqx.filter_jit
    def derivatives(ts, k):
        def value(t):
            matrix = DECAY + jax.numpy.sin(t) * slope + t**2 * FLAT
            solution = trace(matrix_free(matrix, PSD), estimator, k)
            return solution.value, solution.stats["num_matvecs"]

        def all_of(t):
            def slope(t):
                first, made = jax.grad(value, has_aux=True)(t)
                return first, (first, made)

            forward = jax.jvp(lambda t: value(t)[0], (t,), (1.0,))[1]
            second, (first, made) = jax.grad(slope, has_aux=True)(t)
            return (first, second, forward), made

        return jax.vmap(all_of)(ts)

    found, made = derivatives(ts, budget(rtol=0.08))
    assert made[0] == made[1] < MAX
    expected, _ = derivatives(ts, int(made[0]))
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other, rtol=1e-10)
    assert np.allclose(found[0], found[2], rtol=1e-10)
