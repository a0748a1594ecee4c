"""Control variates in traces, diagonals and traces of leaves, against NumPy."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx
from traceax._core.control import Regression

from ..helpers import matrix_free


N, NUM_KEYS = 40, 400
KEY = jr.key(20261129)
KEYS = jr.split(KEY, NUM_KEYS)
GENERATOR = np.random.default_rng(0)
FACTORS = GENERATOR.normal(size=(2, N, N))
CONTROL = FACTORS[0] + FACTORS[0].T
OTHER = FACTORS[1] + FACTORS[1].T
HUTCHINSON = tx.HutchinsonEstimator()
SYMMETRIC = lx.symmetric_tag


def with_correlation(rho):
    """A matrix whose samples have this correlation with those of `CONTROL`: for random
    signs that of the entries beside the diagonal."""
    control, other = (x - np.diag(np.diag(x)) for x in (CONTROL, OTHER))
    other = other - control * np.sum(control * other) / np.sum(control**2)
    other *= np.linalg.norm(control) / np.linalg.norm(other)
    return rho * control + (1 - rho**2) ** 0.5 * other + np.diag(np.diag(OTHER) + 5)


def answer(quantity, matrix):
    diagonal = jnp.diag(jnp.asarray(matrix))
    return diagonal if quantity is tx.diagonal else jnp.sum(diagonal)


def solve(quantity, matrix, control, known, **settings):
    operator, other = (matrix_free(jnp.asarray(x), SYMMETRIC) for x in (matrix, control))
    return quantity(operator, HUTCHINSON, control=(other, known), **settings)


@ft.cache
def compiled(quantity, k):
    def one(matrix, control, known, key):
        solution = solve(quantity, matrix, control, known, k=k, key=key, throw=False)
        return solution.value, solution.interval(), solution.successful

    return jax.jit(jax.vmap(one, in_axes=(None, None, None, 0)))


@pytest.mark.parametrize(
    ("quantity", "k"),
    [
        (tx.trace, 4),
        (tx.trace, 20),
        (tx.diagonal, 20),
        pytest.param(tx.trace, 8, marks=pytest.mark.slow),
        pytest.param(tx.diagonal, 4, marks=pytest.mark.slow),
    ],
)
def test_unbiased_with_bars_that_cover(quantity, k):
    exact_known = answer(quantity, CONTROL)
    for rho in (0, 0.9, 0.999):
        matrix = with_correlation(rho)
        exact = np.asarray(answer(quantity, matrix))
        values, (low, high), successful = compiled(quantity, k)(
            matrix, CONTROL, exact_known, KEYS
        )
        assert np.all(successful)
        values = np.asarray(values)
        z = (values.mean(axis=0) - exact) / values.std(axis=0) * NUM_KEYS**0.5
        # A false alarm in one of 1000 runs.
        assert np.max(np.abs(z)) < stats.norm.isf(0.0005 / z.size)
        assert np.mean((low <= exact) & (exact <= high)) > 0.93
        if k >= 8:
            off_diagonal = matrix - np.diag(np.diag(matrix))
            # Of a sample with random signs: 2 ||A||_F^2 for the trace, and for the sum of
            # all entries of the diagonal half as much.
            plain = np.sum(off_diagonal**2) * (2 if quantity is tx.trace else 1) / k
            ideal = (1 - rho**2) * plain
            # Entries lose two probes to the coefficient; traces the noise of theirs.
            assert np.sum(values.var(axis=0)) < 1.5 * (ideal + 52 / k)


def test_a_control_like_the_operator_is_exact():
    for quantity in (tx.trace, tx.diagonal):
        known = answer(quantity, CONTROL)
        for factor in (1.0, 3.0):
            values, (low, high), successful = compiled(quantity, 4)(
                factor * CONTROL, CONTROL, known, KEYS[:4]
            )
            assert np.all(successful)
            np.testing.assert_allclose(values, factor * known + 0 * values, atol=1e-10)
            assert np.max(high - low) < 1e-8


def test_regression_leaves_one_out():
    a, b = np.random.default_rng(1).normal(size=(2, 9, 2))
    a[:, 0] += 2 * b[:, 0]
    valid = np.arange(9) < 7
    fit = Regression.of(jnp.asarray(a), jnp.asarray(b), jnp.asarray(valid))
    for i in range(7):
        for j in range(2):
            x, y = (np.delete(z[:7, j], i) for z in (a, b))
            x, y = x - x.mean(), y - y.mean()
            slope, rest = x @ y / (y @ y), x @ x - (x @ y) ** 2 / (y @ y)
            expected = slope * max(0, 1 - rest / 4 / (slope * (x @ y)))
            np.testing.assert_allclose(fit.coefficients[i, j], expected, atol=1e-12)
    assert np.all(fit.coefficients[7:] == 0)
    expected = np.abs([np.corrcoef(a[:7, j], b[:7, j])[0, 1] for j in range(2)])
    np.testing.assert_allclose(fit.correlation, expected)


def test_few_probes_are_plain():
    matrix = with_correlation(0.9)
    for k in (1, 3):
        settings = {"k": k, "key": KEY}
        solution = solve(tx.trace, matrix, CONTROL, np.trace(CONTROL), **settings)
        plain = tx.trace(
            matrix_free(jnp.asarray(matrix), SYMMETRIC), HUTCHINSON, **settings
        )
        np.testing.assert_allclose(solution.value, plain.value)
        np.testing.assert_allclose(solution.std_err, plain.std_err)
        assert solution.stats["control_coefficient"] == 0


def test_leaves_have_their_own_coefficients():
    scale = np.repeat([1.0, 5.0], N // 2)
    matrix = jnp.asarray(with_correlation(0.999) * np.sqrt(np.outer(scale, scale)))
    like = {"a": jnp.zeros(N // 2), "b": jnp.zeros(N // 2)}

    def tree(matrix):
        def product(v):
            image = matrix @ jnp.concatenate([v["a"], v["b"]])
            return {"a": image[: N // 2], "b": image[N // 2 :]}

        return tx.as_operator(product, like=like)

    diagonal = np.split(np.diag(CONTROL), 2)
    known = {"a": diagonal[0].sum(), "b": diagonal[1].sum()}
    control = tree(jnp.asarray(CONTROL)), known
    solution = tx.leaf_traces(tree(matrix), k=20, key=KEY, control=control)
    exact = {
        name: x.sum() for name, x in zip("ab", np.split(np.diag(matrix), 2), strict=True)
    }
    for name, value in solution.value.items():
        low, high = (x[name] for x in solution.interval())
        assert low <= exact[name] <= high
        assert solution.stats["correlation_with_control"][name].shape == ()
        assert value.shape == ()
    coefficients = solution.stats["control_coefficient"]
    assert coefficients["b"] > 2 * coefficients["a"]
    assert solution.stats["num_control_matvecs"] == solution.matvecs == 20
    # The sum of the leaves has one bar.
    total = solution.transform(lambda x: x["a"] + x["b"])
    np.testing.assert_allclose(total.value, sum(solution.value.values()))


@pytest.mark.parametrize(
    "k", [12, pytest.param(tx.Adaptive(rtol=0.1, max_k=24), marks=pytest.mark.slow)]
)
def test_derivative_with_constant_coefficients(k):
    matrix = with_correlation(0.9)

    def value(t):
        known = (1 + t) ** 2 * np.trace(CONTROL)
        controls = (1 + t) ** 2 * CONTROL
        settings = {"k": k, "key": KEY, "throw": False}
        solution = solve(tx.trace, (1 + t) * matrix, controls, known, **settings)
        return solution.value, solution.stats["num_samples"]

    derivative, num_samples = jax.grad(value, has_aux=True)(0.0)
    a, b = (
        tx.trace(matrix_free(jnp.asarray(x), SYMMETRIC), HUTCHINSON, k=24, key=KEY).stats[
            "samples"
        ][: int(num_samples)]
        for x in (matrix, CONTROL)
    )
    c = Regression.of(a, b, jnp.ones(len(a), bool)).coefficients
    np.testing.assert_allclose(derivative, np.mean(a - 2 * c * (b - np.trace(CONTROL))))
    assert jax.jvp(lambda t: value(t)[0], (0.0,), (1.0,))[1] == pytest.approx(derivative)


def test_adaptive_budgets_need_fewer_probes():
    matrix, known = with_correlation(0.99), np.trace(CONTROL)
    exact = np.trace(matrix)
    rule = tx.Adaptive(atol=20.0, max_k=39, round_size=13)
    solution = solve(tx.trace, matrix, CONTROL, known, k=rule, key=KEY)
    assert solution.matvecs == solution.stats["num_control_matvecs"] == 13
    assert abs(solution.value - exact) < 40
    operator = matrix_free(jnp.asarray(matrix), SYMMETRIC)
    plain = tx.trace(operator, HUTCHINSON, k=rule, key=KEY, throw=False)
    assert plain.result == tx.RESULTS.max_matvecs_reached
    mesh = tx.Sharded(tx.probe_mesh())
    again = solve(tx.trace, matrix, CONTROL, known, k=rule, key=KEY, execution=mesh)
    np.testing.assert_allclose(again.value, solution.value)


def test_structure_gives_the_known_answer():
    matrix = with_correlation(0.9)
    operator = matrix_free(jnp.asarray(matrix), SYMMETRIC)
    alone = tx.trace(operator, k=8, key=KEY, control=CONTROL)
    pair = solve(tx.trace, matrix, CONTROL, np.trace(CONTROL), k=8, key=KEY)
    np.testing.assert_allclose(alone.value, pair.value)
    # A stored diagonal needs no probe, and a large budget none either.
    assert tx.trace(jnp.asarray(matrix), k=8, control=CONTROL).std_err == 0
    exact = tx.trace(operator, k=N, key=KEY, control=CONTROL)
    np.testing.assert_allclose(exact.value, np.trace(matrix))
    assert exact.stats["control_coefficient"] == exact.stats["num_control_matvecs"] == 0


def test_a_wrong_known_answer_is_flagged():
    matrix = with_correlation(0.9)
    large = 10 * np.linalg.norm(CONTROL)
    for quantity in (tx.trace, tx.diagonal):
        known = answer(quantity, CONTROL)
        _, _, successful = compiled(quantity, 20)(
            matrix, CONTROL, known + large, KEYS[:4]
        )
        assert not np.any(successful)
    # A smaller error, which twenty samples cannot exclude, is in the error bar.
    _, (low, high), _ = compiled(tx.trace, 20)(
        matrix, CONTROL, np.trace(CONTROL) + large / 5, KEYS[:40]
    )
    assert np.mean((low <= np.trace(matrix)) & (np.trace(matrix) <= high)) > 0.9
    solution = solve(tx.trace, matrix, CONTROL, large * 9, k=20, key=KEY, throw=False)
    assert solution.result == tx.RESULTS.inconsistent_control


def test_bad_input():
    operator = matrix_free(jnp.asarray(with_correlation(0.9)), SYMMETRIC)
    control = matrix_free(jnp.asarray(CONTROL), SYMMETRIC)
    settings = {"k": 8, "key": KEY}

    def refused(error, message, *args, quantity=tx.trace, **kwargs):
        with pytest.raises(error, match=message):
            quantity(operator, *args, **settings, **kwargs)

    pair = control, 0.0
    refused(ValueError, "independent samples.*XTrace", tx.XTraceEstimator(), control=pair)
    refused(ValueError, "same structure", control=(jnp.eye(3), 3.0))
    refused(ValueError, "same structure", control=(jnp.eye(N, dtype=jnp.float32), 1.0))
    refused(ValueError, "structure of the value", control=(control, np.ones(N)))
    refused(ValueError, "structure of the value", control=pair, quantity=tx.diagonal)
    refused(ValueError, "must be finite", control=(control, np.nan))
    refused(ValueError, "have a known answer", control=(control, None))
    refused(ValueError, "operator alone", control=control)
    refused(ValueError, "length 3", control=(control, 1.0, 2.0))
    refused(TypeError, "complex128", control=(control, 1j))
    refused(ValueError, "exclude each other", control=pair, deflation=jnp.ones((N, 1)))
    colours = tx.HutchinsonEstimator(tx.ColouredSampler(np.arange(N) % 2))
    refused(ValueError, "full support", colours, control=pair)
