import sys

import jax.numpy as jnp
import jax.random as jr
import pytest
import threadpoolctl

import traceax as tx

from ..helpers import matrix_free


def threads():
    """Of each BLAS in the process."""
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
    return {library["filepath"]: library["num_threads"] for library in found}


def estimate():
    return tx.trace(matrix_free(jnp.diag(jnp.arange(50.0))), k=20, key=jr.key(0)).value


def test_one_thread_within_the_block():
    expected = estimate()
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        assert set(before.values()) == {2}
        with tx.single_threaded_lapack():
            assert set(threads().values()) == {1}
            assert threads().keys() == before.keys()
            assert estimate() == pytest.approx(expected)
        assert threads() == before
        with pytest.raises(ZeroDivisionError), tx.single_threaded_lapack():
            1 / 0  # noqa: B018
        assert threads() == before


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with (
        pytest.raises(ImportError, match="pip install threadpoolctl"),
        tx.single_threaded_lapack(),
    ):
        pass
