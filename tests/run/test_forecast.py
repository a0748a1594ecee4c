"""Rounds without a test change no answer, and where a run ends does not depend on who
watches it."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._run.budget import Budget
from traceax._run.forecast import LastTest
from traceax._run.loop import Assessment

from ..helpers import hermitian, PSD
from .adaptive import KEY, name, XNYS, XTRACE


N = 200
MATRIX = jnp.asarray(hermitian(3, np.arange(1, N + 1) ** -0.5))
RTOLS = np.array([0.1, 0.01, 1e-9])
SKETCHES = pytest.mark.parametrize("estimator", [XTRACE, XNYS], ids=name)


def trace(estimator, rtol, *, max_k=160, state=None, **settings):
    operator = lx.MatrixLinearOperator(MATRIX, PSD)
    k = tx.Adaptive(rtol=rtol, max_k=max_k, round_size=8, **settings)
    return tx.trace(operator, estimator, k=k, key=KEY, state=state, throw=False)


def same(one, other):
    assert one.stats["num_matvecs"] == other.stats["num_matvecs"]
    np.testing.assert_allclose(one.value, other.value, rtol=1e-10)
    np.testing.assert_allclose(one.std_err, other.std_err, rtol=1e-8)


def integers(state):
    """The numbers of rounds in all, and up to the last test among others."""
    leaves = jax.tree.leaves(state)
    return [x.tolist() for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)]


@pytest.mark.slow(but="XNysTrace")
@SKETCHES
def test_history_changes_nothing(estimator):
    """The history has every round, also those without a test."""
    for rtol in RTOLS:
        alone, watched = trace(estimator, rtol), trace(estimator, rtol, history=True)
        same(alone, watched)
        made = int(np.sum(np.isfinite(watched.stats["history"][:, 0])))
        assert 8 * made == watched.stats["num_matvecs"]


@pytest.mark.slow(but="XNysTrace")
@SKETCHES
def test_batch(estimator):
    batch = jax.vmap(lambda rtol: trace(estimator, rtol))(RTOLS)
    for i, rtol in enumerate(RTOLS):
        member = jax.tree.map(lambda x, i=i: x[i], batch)
        same(member, trace(estimator, rtol))


@pytest.mark.slow(but="XNysTrace")
@SKETCHES
def test_resumed(estimator):
    """The end of a budget asks for a test, but a run that resumes ignores it."""
    for max_k in (48, 72):
        first = trace(estimator, 1e-9, max_k=max_k)
        for rtol in RTOLS[1:]:
            resumed = trace(estimator, rtol, state=first.state)
            single = trace(estimator, rtol)
            same(resumed, single)
            assert integers(resumed.state) == integers(single.state)


@pytest.mark.parametrize(
    ("std_err", "residual", "rounds", "is_due"),
    [
        (100.0, 0.5, 11, False),
        (100.0, 0.5, 15, True),  # half as many rounds again
        (100.0, 0.0, 11, True),  # nothing was added
        (100.0, np.nan, 11, True),
        (1.0, 0.5, 11, True),  # the forecast meets the tolerance
        (1.0, 1.0, 11, False),
        (0.1, 1.0, 11, True),  # the last test has met it
        (np.inf, 0.5, 11, False),
    ],
)
def test_which_rounds_are_tested(std_err, residual, rounds, is_due):
    """After a test at 10 rounds with the residual 1 and the tolerance 1."""
    rule = Budget.of(tx.Adaptive(atol=1.0)).rule
    number = jnp.asarray
    assessment = Assessment.of(rule, number(5.0), number(std_err), number(80.0))
    last = LastTest(assessment, number(1.0), number(10))
    assert last.is_next_due(rule, number(residual), number(rounds)) == is_due
