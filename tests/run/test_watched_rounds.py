"""Rounds without a test change no answer, and where a run ends does not depend on who
watches it."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._estimators.growing import _tests

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
    """A run that resumes ends where a single run would."""
    for max_k in (48, 80):
        first = trace(estimator, 1e-9, max_k=max_k)
        for rtol in RTOLS[1:]:
            resumed = trace(estimator, rtol, state=first.state)
            single = trace(estimator, rtol)
            same(resumed, single)


def test_which_rounds_are_tested():
    """All of the first 8, the last one, and fewer and fewer between them."""
    tests = [i for i, due in enumerate(_tests(30)) if due]
    assert tests == [*range(1, 9), 10, 12, 14, 17, 20, 24, 29, 30]
