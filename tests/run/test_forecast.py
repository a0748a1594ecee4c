"""Rounds without a test, and rounds that are made at once, change no answer."""

import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD
from .adaptive import HUTCHINSON, KEY, name, XNYS, XTRACE


N = 200
MATRIX = jax.numpy.asarray(hermitian(3, np.arange(1, N + 1) ** -0.5))
EVERY = pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE, XNYS], ids=name)


def trace(estimator, rtol, *, max_k=160, key=KEY, state=None, block=None, **settings):
    operator = lx.MatrixLinearOperator(MATRIX, PSD)
    k = tx.Adaptive(rtol=rtol, max_k=max_k, round_size=8, **settings)
    call = {"key": key, "state": state, "execution": tx.Local(block_size=block)}
    return tx.trace(operator, estimator, k=k, throw=False, **call)


def same(one, other):
    assert one.stats["num_matvecs"] == other.stats["num_matvecs"]
    np.testing.assert_allclose(one.value, other.value, rtol=1e-10)
    np.testing.assert_allclose(one.std_err, other.std_err, rtol=1e-8)


@pytest.mark.slow(but="Hutchinson")
@EVERY
def test_watched_runs_end_where_others_do(estimator):
    """The history has every round. The run may miss the first good one by a little."""
    for rtol in (0.1, 0.03, 1e-9):
        alone = trace(estimator, rtol)
        watched = trace(estimator, rtol, history=True)
        same(alone, watched)
        made = int(np.sum(np.isfinite(watched.stats["history"][:, 0])))
        assert 8 * made == watched.stats["num_matvecs"]


@pytest.mark.parametrize("block", [8, 32])
def test_block_size(block):
    """Blocks of 32 and more hold four rounds."""
    for rtol in (0.03, 1e-9):
        same(trace(HUTCHINSON, rtol), trace(HUTCHINSON, rtol, block=block))


@pytest.mark.slow(but="Hutchinson")
@EVERY
def test_batch(estimator):
    rtols = np.array([0.1, 0.03, 1e-9])
    batch = jax.vmap(lambda rtol: trace(estimator, rtol))(rtols)
    for i, rtol in enumerate(rtols):
        member = jax.tree.map(lambda x, i=i: x[i], batch)
        same(member, trace(estimator, rtol))


@pytest.mark.slow(but="Hutchinson")
@EVERY
def test_resumed(estimator):
    first = trace(estimator, 1e-9, max_k=72)
    same(trace(estimator, 1e-9, state=first.state), trace(estimator, 1e-9))
