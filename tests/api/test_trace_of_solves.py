"""Traces of words in an inverse: coverage, errors of solves, derivatives, bad input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N = 24
KEY = jr.key(0)
KEYS = jr.split(jr.key(1), 400)
B = hermitian(1, np.linspace(0.2, 1, N))
C = np.random.default_rng(2).standard_normal((N, N)) / 5
GENERAL = np.eye(N) + C / 2


def words_of(b, tags=lx.symmetric_tag):
    b, c = matrix_free(b, tags), matrix_free(jnp.asarray(C, b.dtype))
    return {"inverse": (), "one": (b,), "two": (b, c)}


def exact_of(a, b=B, c=C):
    inverse = np.linalg.inv(np.asarray(a, np.result_type(a, np.float64)))
    two = np.trace(inverse @ b @ inverse @ c)
    return {"inverse": np.trace(inverse), "one": np.trace(inverse @ b), "two": two}


@eqx.filter_jit
def compiled(a, b, key, rtol, max_steps, *, k, execution):
    solver = lx.CG(rtol=rtol, atol=rtol, max_steps=max_steps)
    settings = {"k": k, "key": key, "execution": execution, "throw": False}
    return tx.trace_of_solves(matrix_free(a, PSD), words_of(b), solver, **settings)


def solve(a, key, *, b=B, k=8, rtol=1e-3, max_steps=5000, execution=tx.Local()):
    # All tolerances share one program.
    rtol = jnp.asarray(rtol, jnp.finfo(a.dtype).dtype)
    settings = {"k": k, "execution": execution}
    return compiled(a, jnp.asarray(b), key, rtol, jnp.asarray(max_steps), **settings)


@jax.jit
def over_keys(a, rtol):
    def one(key):
        found = solve(a, key, rtol=rtol)
        return found.value, found.interval(), found.stats["solve_error"], found.successful

    return jax.vmap(one)(KEYS)


def check_coverage(condition, tolerances):
    a = hermitian(0, np.geomspace(1 / condition, 1, N))
    exact, precise = exact_of(a), over_keys(a, 1e-10)[0]
    for rtol in tolerances:
        values, (low, high), errors, successful = over_keys(a, rtol)
        assert successful.all()
        for name, truth in exact.items():
            covers = (low[name] <= truth) & (truth <= high[name])
            # 0.93 - 3 sqrt(0.05 0.95 / 400): false alarms have a probability of 1e-5.
            assert np.mean(covers) > 0.9, (name, rtol)
            # What the error bar counts is at least the error of the solves.
            slack = 1e-6 * np.abs(truth)
            wrong = np.abs(values[name] - precise[name]) > errors[name] + slack
            assert np.mean(wrong) <= 0.01, (name, rtol)


def test_intervals_cover_and_count_the_error_of_solves():
    check_coverage(1e3, (1e-1, 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_intervals_cover_for_all_conditions_and_tolerances(condition):
    check_coverage(condition, (1e-1, 1e-2, 1e-4, 1e-6, 1e-8))


def test_a_singular_operator_is_flagged_or_covered():
    a = hermitian(0, np.geomspace(1e-12, 1, N))
    found = solve(a, KEY, rtol=1e-8)
    exact = exact_of(a)
    low, high = found.interval()
    covered = all(low[name] <= exact[name] <= high[name] for name in exact)
    assert covered or not found.successful
    # A solver that ends too soon is flagged, whatever it returns.
    stopped = solve(a, KEY, max_steps=5)
    assert stopped.result == tx.RESULTS.max_steps_reached


def test_float32_and_counts():
    a = hermitian(0, np.geomspace(1e-4, 1, N), np.float32)
    found = solve(a, KEY, b=B.astype(np.float32), rtol=1e-2)
    assert found.successful
    assert found.value["one"].dtype == jnp.float32
    exact = exact_of(a)
    low, high = found.interval(0.999)
    for name, truth in exact.items():
        assert low[name] <= truth <= high[name]
    # x and C z, each twice for each of 8 probes.
    assert found.stats["num_solves"] == 32
    assert found.stats["joint_samples"].shape == (8, 3)
    assert found.stats["solve_residual"] < 1e-2
    ratio = found.transform(lambda t: t["one"] / t["inverse"])
    assert ratio.std_err < found.std_err["one"] / found.value["inverse"]


def test_scaling_operators_scales_the_answer():
    a = hermitian(0, np.geomspace(1e-2, 1, N))
    usual, scaled = solve(a, KEY), solve(a / 2**100, KEY, b=2**40 * B)
    exact = 2.0**140 * usual.value["one"]
    np.testing.assert_allclose(scaled.value["one"], exact, rtol=1e-9)
    steps = [x.stats["solver_steps"] for x in (usual, scaled)]
    assert steps[0] == steps[1]


@eqx.filter_jit
def general(a, b, k):
    # Of a general operator, which may be complex.
    solver = lx.BiCGStab(rtol=1e-4, atol=1e-4)
    words = words_of(b, ())
    operator = matrix_free(a, ())
    return tx.trace_of_solves(operator, words, solver, k=k, key=KEY, throw=False)


@pytest.mark.parametrize("phase", [1.0, pytest.param(0.6 + 0.8j, marks=pytest.mark.slow)])
def test_general_operators(phase):
    a, exact = phase * GENERAL, exact_of(phase * GENERAL)
    found, whole = general(a, B, k=20), general(a, B, k=N)
    for name, truth in exact.items():
        np.testing.assert_allclose(whole.value[name], truth, rtol=1e-9)
        assert abs(found.value[name] - truth) < 4 * found.std_err[name]
    assert found.successful
    assert whole.stats["exact"]
    assert whole.std_err["two"] < 1e-9


@pytest.mark.parametrize("k", [6, N])
def test_derivatives_are_those_of_the_value(k):
    a = hermitian(0, np.geomspace(0.1, 1, N))

    @jax.jit
    def value(t):
        moved = a + t * B + t**2 * np.eye(N)
        return solve(moved, KEY, b=B * jnp.exp(t), k=k, rtol=1e-10).value

    step = 1e-5
    slopes = jax.jit(jax.jacrev(value))(0.3)
    moves = jax.tree.map(
        lambda x, y: (x - y) / (2 * step), value(0.3 + step), value(0.3 - step)
    )
    for name in slopes:
        np.testing.assert_allclose(slopes[name], moves[name], rtol=1e-6)
    if k < N:
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.hessian(lambda t: value(t)["two"])(0.3)


@pytest.mark.slow
def test_devices_and_adaptive_budgets():
    a = hermitian(0, np.geomspace(0.1, 1, N))
    mesh = jax.make_mesh((2,), ("probes",), devices=jax.devices()[:2])
    one, two = solve(a, KEY), solve(a, KEY, execution=tx.Sharded(mesh))
    np.testing.assert_allclose(one.value["two"], two.value["two"], rtol=1e-9)
    assert one.stats["solver_steps"] == two.stats["solver_steps"]
    k = tx.Adaptive(rtol=0.5, max_k=20, round_size=4)
    found = solve(a, KEY, k=k)
    assert found.successful
    assert found.stats["num_solves"] == 4 * found.stats["num_samples"]
    # The error of a solve that is too inexact misses the tolerance.
    k = tx.Adaptive(rtol=1e-9, max_k=8, round_size=4)
    assert not solve(a, KEY, k=k, rtol=1e-1).successful


def test_bad_input():
    a, b = matrix_free(np.eye(N), PSD), matrix_free(B)
    for words, message in (
        ({}, "at least one tuple"),
        ({"one": b}, "tuples of operators"),
        ((matrix_free(np.eye(3)),), "structure of `operator`"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            tx.trace_of_solves(a, words, k=4, key=KEY)
    with pytest.raises(ValueError, match="semidefinite tag"):
        tx.trace_of_solves(b, (b,), k=4, key=KEY)
    with pytest.raises(TypeError, match="`solver`"):
        tx.trace_of_solves(a, (b,), 3, k=4, key=KEY)  # pyright: ignore
