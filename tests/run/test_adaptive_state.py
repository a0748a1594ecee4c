"""Adaptive budgets: going on with an earlier run, errors of calls, progress."""

import os
import re
import subprocess
import sys

import equinox as eqx
import equinox.internal as eqxi
import jax
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import matrix_free, PSD
from .adaptive import (
    budget,
    DECAY,
    FLAT,
    HUTCHINSON,
    HUTCHPP,
    KEY,
    MAX,
    N,
    name,
    num_probes,
    NYSTROMPP,
    SLQ,
    succeeded,
    trace,
    XNYS,
    XTRACE,
)


OPERATOR = lx.MatrixLinearOperator(jax.numpy.asarray(DECAY), PSD)
LONG = {"rtol": 1e-6}  # more than the budget allows


# --- resuming ---


@pytest.mark.slow(but="Hutchinson")
@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=name)
def test_resume_with_more_budget(estimator):
    """Stopped by its budget, or by a tolerance, and gone on with a larger `max_k`."""
    whole = trace(OPERATOR, estimator, budget(**LONG))
    first = trace(OPERATOR, estimator, budget(**LONG, max_k=16))
    assert num_probes(first, estimator) == 16
    loose = trace(OPERATOR, estimator, budget(rtol=0.5))
    assert num_probes(loose, estimator) < MAX
    for earlier in (first, loose):
        solution = trace(OPERATOR, estimator, budget(**LONG), state=earlier.state)
        # Other programs, in which the same sums may be rounded otherwise.
        np.testing.assert_allclose(solution.value, whole.value, rtol=1e-14)
        np.testing.assert_allclose(solution.std_err, whole.std_err, rtol=1e-10)
        samples, others = solution.stats["samples"], whole.stats["samples"]
        np.testing.assert_allclose(samples, others, rtol=1e-13)
        assert solution.stats["num_matvecs"] == whole.stats["num_matvecs"]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [HUTCHPP, NYSTROMPP], ids=name)
def test_resume_of_what_plans(estimator):
    """It plans for the tolerance: what was deflated for a looser one is kept."""
    first = trace(OPERATOR, estimator, budget(rtol=0.2, min_samples=4))
    assert succeeded(first)
    again = budget(rtol=1e-9, min_samples=4)
    solution = trace(OPERATOR, estimator, again, state=first.state)
    assert solution.stats["num_matvecs"] == MAX
    assert np.abs(solution.value - np.trace(DECAY)) < 5 * solution.std_err


@pytest.mark.slow
def test_resume_with_a_tighter_tolerance():
    """Rounds that were good enough for the looser one do not count: in small rounds it
    takes several in a row."""
    loose = budget(rtol=0.5, round_size=2, min_samples=4)
    first = trace(OPERATOR, XTRACE, loose)
    assert succeeded(first)
    count = first.stats["num_matvecs"] // 2
    quantile = stats.t.ppf(0.95 / 2 + 0.5, int(count) - 1)
    met = float(1.01 * quantile * first.std_err / np.abs(first.value))
    tight = budget(rtol=met, round_size=2, min_samples=4)
    again = trace(OPERATOR, XTRACE, tight, state=first.state)
    assert succeeded(again)
    assert again.stats["num_matvecs"] >= first.stats["num_matvecs"] + 6


@pytest.mark.slow
def test_resume_where_nothing_is_left_to_do():
    """A state that is good enough costs no product."""
    first = trace(OPERATOR, XTRACE, budget(rtol=0.1))
    assert succeeded(first)
    again = trace(OPERATOR, XTRACE, budget(rtol=0.1), state=first.state)
    assert again.value == first.value
    assert again.stats["num_matvecs"] == first.stats["num_matvecs"]
    assert succeeded(again)


@pytest.mark.slow
def test_state_of_another_call():
    """A longer one, another size of rounds, another estimator, and no state at all."""
    state = trace(OPERATOR, XTRACE, budget(rtol=0.1)).state
    with pytest.raises(ValueError, match="`max_k` must not be below that of the call"):
        trace(OPERATOR, XTRACE, budget(rtol=0.1, max_k=16), state=state)
    with pytest.raises(ValueError, match=r"`round_size`\. Found 8 and 4"):
        trace(OPERATOR, XTRACE, budget(rtol=0.1, round_size=4), state=state)
    with pytest.raises(ValueError, match="same estimator"):
        trace(OPERATOR, XNYS, budget(rtol=0.1), state=state)
    with pytest.raises(TypeError, match="`state` must be"):
        trace(OPERATOR, XTRACE, budget(rtol=0.1), state=np.zeros(3))
    other = jax.random.key(1)
    with pytest.raises(ValueError, match="same `key`"):
        trace(OPERATOR, XTRACE, budget(rtol=0.1), state=state, key=other)
    first = trace(OPERATOR, SLQ, budget(**LONG, max_k=16))
    settings = {"k": budget(**LONG), "state": first.state, "key": KEY, "num_steps": 5}
    with pytest.raises(ValueError, match="num_steps=5"):
        tx.trace_of_function(OPERATOR, tx.Exp(-1.0), SLQ, **settings)


def test_fixed_budget_has_no_state():
    assert trace(OPERATOR, HUTCHINSON, 16).state is None
    state = trace(OPERATOR, HUTCHINSON, budget(rtol=0.1)).state
    with pytest.raises(ValueError, match=r"`state` is for an adaptive budget.*`k=16`"):
        trace(OPERATOR, HUTCHINSON, 16, state=state)
    with pytest.raises(TypeError, match="state"):
        tx.Adaptive(rtol=0.1, max_k=16, state=state)  # pyright: ignore


# Another process, which knows of the first run only the file.
PROGRAM = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, jax.random as jr, lineax as lx, numpy as np
import traceax as tx

jax.config.update("jax_enable_x64", True)
folder = sys.argv[1]
matrix = jnp.asarray(np.load(f"{folder}/matrix.npy"))
operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

def run(name, k, state=None):
    settings = {"k": k, "state": state, "key": jr.key(20261121), "throw": False}
    estimator = getattr(tx, name + "Estimator")()
    if name == "SLQ":
        exp = tx.Exp(-1.0)
        return tx.trace_of_function(operator, exp, estimator, num_steps=6, **settings)
    return tx.trace(operator, estimator, **settings)

for name in sys.argv[2:]:
    short = tx.Adaptive(rtol=1e-6, max_k=16, round_size=8)
    like = eqx.filter_eval_shape(lambda: run(name, short).state)
    state = eqx.tree_deserialise_leaves(f"{folder}/{name}.eqx", like)
    long = tx.Adaptive(rtol=1e-6, max_k=32, round_size=8)
    solution = run(name, long, state)
    made = int(solution.stats["num_matvecs"])
    print(name, float(solution.value).hex(), float(solution.std_err).hex(), made)
"""


@pytest.mark.slow
def test_resume_in_another_process(tmp_path):
    np.save(tmp_path / "matrix.npy", DECAY)
    expected = {}
    for estimator in (XTRACE, SLQ):
        first = trace(OPERATOR, estimator, budget(**LONG, max_k=16))
        eqx.tree_serialise_leaves(tmp_path / f"{name(estimator)}.eqx", first.state)
        expected[name(estimator)] = trace(OPERATOR, estimator, budget(**LONG))
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *expected],
        env=os.environ,
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert [line[0] for line in lines] == list(expected)
    for estimator, value, std_err, made in lines:
        whole = expected[estimator]
        assert float.fromhex(value) == pytest.approx(float(whole.value), rel=1e-12)
        assert float.fromhex(std_err) == pytest.approx(float(whole.std_err), rel=1e-9)
        assert int(made) == whole.stats["num_matvecs"]


# --- errors ---


@pytest.mark.slow(but=("Hutchinson", "XTrace"))
@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE, SLQ], ids=name)
def test_error_where_the_budget_ends_first(estimator):
    solution = trace(OPERATOR, estimator, budget(**LONG))
    with pytest.raises(RuntimeError, match="The budget ended") as caught:
        trace(OPERATOR, estimator, budget(**LONG), throw=True)
    message = str(caught.value)
    found = re.search(
        r"Reached (\S+) with a standard error of (\S+) after (\d+) matvecs", message
    )
    assert float(found[1]) == pytest.approx(float(solution.value))
    assert float(found[2]) == pytest.approx(float(solution.std_err))
    assert int(found[3]) == solution.stats["num_matvecs"]
    assert "max_k" in message
    assert "state" in message


@pytest.mark.slow
def test_error_of_a_nonfinite_operator():
    bad = lx.MatrixLinearOperator(np.nan * OPERATOR.matrix, PSD)
    for estimator in (HUTCHINSON, SLQ):
        with pytest.raises(RuntimeError, match="not finite"):
            trace(bad, estimator, budget(rtol=0.05), throw=True)


def test_budget_ends_first_under_jit():
    @jax.jit
    def value(matrix):
        operator = matrix_free(matrix, PSD)
        return trace(operator, HUTCHINSON, budget(**LONG), throw=True).value

    with pytest.raises(RuntimeError, match="The budget ended"):
        jax.block_until_ready(value(DECAY))


def test_budget_is_a_pytree():
    """`Adaptive` may be an argument of a compiled function."""

    @jax.jit
    def made(k):
        return trace(OPERATOR, HUTCHINSON, k).stats["num_matvecs"]

    assert made(budget(rtol=0.5)) < made(budget(rtol=0.01)) == MAX


# --- progress ---


def shown(capsys):
    jax.effects_barrier()
    lines = capsys.readouterr().out.split()
    assert all(line.endswith("%") for line in lines)
    return [float(line[:-1]) for line in lines]


@pytest.mark.slow(but="float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_progress_meter(capsys, dtype):
    meter = eqxi.TextProgressMeter()

    @jax.jit
    def run_with_meter(matrix, rtol):
        k = budget(rtol=rtol, progress=meter)
        return trace(matrix_free(matrix, PSD), HUTCHINSON, k).stats["num_matvecs"]

    made = run_with_meter(DECAY.astype(dtype), np.asarray(1e-6))
    assert made == MAX
    assert shown(capsys) == [0, 25, 50, 75, 100]
    # A run that is over before its budget is counts what it is the way to.
    made = run_with_meter(FLAT.astype(dtype), np.asarray(0.05))
    assert made < MAX
    seen = shown(capsys)
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 100


def test_progress_is_not_complete_before_the_end(capsys):
    """Not even where the error bar is small before there are enough samples."""
    k = budget(rtol=0.5, min_samples=32, progress=eqxi.TextProgressMeter())
    identity = lx.MatrixLinearOperator(np.eye(N), PSD)
    assert trace(identity, HUTCHINSON, k).stats["num_matvecs"] == MAX
    assert shown(capsys).count(100) == 1


@pytest.mark.slow
def test_progress_meter_of_a_batch(capsys):
    def one(key):
        k = budget(**LONG, progress=eqxi.TextProgressMeter())
        return trace(OPERATOR, HUTCHINSON, k, key=key).value

    assert np.all(np.isfinite(jax.jit(jax.vmap(one))(jax.random.split(KEY, 2))))
    assert shown(capsys) == [0, 25, 50, 75, 100]


def test_no_history_unless_asked():
    assert "history" not in trace(OPERATOR, HUTCHINSON, budget(rtol=0.1)).stats


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_all_samples_of_a_run_that_goes_on_have_as_many_steps():
    """As many as the first tolerance asked for; products are counted once."""
    matrix = jax.numpy.asarray(FLAT + np.eye(N))

    def solve(state=None, **settings):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        call = {"k": budget(**settings), "key": KEY, "state": state}
        return tx.logdet(operator, throw=False, preconditioner=None, **call)

    first = solve(rtol=0.3, max_k=16)
    for rtol in (0.3, 1e-9):
        again = solve(rtol=rtol, state=first.state)
        steps, others = again.stats["num_steps"], first.stats["num_steps"]
        assert steps == others
        probes = np.sum(np.isfinite(again.stats["samples"]))
        assert again.stats["num_matvecs"] == (probes + 1) * steps
    assert probes == MAX
    assert not succeeded(again)


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_deflation_that_goes_on():
    """Without a block: `test_adaptive_deflation.py`."""
    estimator = tx.KrylovAwareEstimator(block=(2, 4))
    matrix = jax.numpy.asarray(DECAY + 0.1 * np.eye(N))

    def solve(state=None, **settings):
        operator, k = lx.MatrixLinearOperator(matrix, PSD), budget(rtol=1e-9, **settings)
        call = {"k": k, "key": KEY, "state": state, "throw": False}
        return tx.logdet(operator, estimator, **call)

    first = solve(max_k=16)
    again = solve(max_k=MAX, state=first.state)
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]
    assert again.stats["num_steps"] == first.stats["num_steps"]
    error = again.value - np.linalg.slogdet(matrix)[1]
    assert np.abs(error) < 6 * again.std_err
    whole = solve(max_k=MAX)
    assert again.stats["num_matvecs"] == whole.stats["num_matvecs"]
    np.testing.assert_allclose(again.value, whole.value, rtol=1e-12)


@pytest.mark.slow
def test_numpy_settings_are_those_of_the_same_call():
    """Without 64 bits, those of NumPy are rounded on the way into a program."""
    with jax.enable_x64(False):
        check_numpy_settings()


def check_numpy_settings():
    matrix = jax.numpy.asarray(FLAT)

    def solve(state=None, **settings):
        operator, function = lx.MatrixLinearOperator(matrix, PSD), tx.Exp(np.float64(-1))
        call = {"k": budget(rtol=1e-9, **settings), "num_steps": 4, "key": KEY}
        return tx.trace_of_function(operator, function, state=state, throw=False, **call)

    first = solve(max_k=16)
    assert solve(state=first.state).stats["num_matvecs"] == 4 * MAX


def test_another_norm_is_refused():
    operator = matrix_free(jax.numpy.asarray(FLAT))
    settings = {"key": KEY, "throw": False}
    first = tx.diagonal(operator, HUTCHINSON, k=budget(rtol=0.5, max_k=16), **settings)
    norm = lambda tree: jax.numpy.max(jax.numpy.abs(tree[0]))  # noqa: E731
    again = budget(rtol=0.5, norm=norm)
    with pytest.raises(ValueError, match="same `norm`"):
        tx.diagonal(operator, HUTCHINSON, k=again, state=first.state, **settings)


@pytest.mark.slow
def test_a_little_more_than_n_is_enough_for_every_estimator():
    """What is left beside n products may be less than the estimator needs."""
    operator = lx.MatrixLinearOperator(jax.numpy.asarray(FLAT), PSD)
    k = tx.Adaptive(rtol=0.5, max_k=N + 2, round_size=2)
    settings = {"k": k, "key": KEY, "throw": False}
    for found, exact in (
        (
            tx.logdet(operator, tx.KrylovAwareEstimator(), num_steps=4, **settings),
            np.linalg.slogdet(FLAT)[1],
        ),
        (tx.frobenius_norm(operator, XTRACE, **settings), np.linalg.norm(FLAT)),
    ):
        assert succeeded(found)
        assert np.abs(found.value - exact) <= 0.5 * exact
