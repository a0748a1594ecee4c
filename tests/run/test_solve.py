"""Which states of other calls an adaptive budget refuses to go on with."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._run.solve import _hash

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 40, jr.key(20261125)
MATRIX = hermitian(0, np.linspace(1.0, 4.0, N)).astype(np.float32)
OPERATOR = lx.MatrixLinearOperator(jnp.asarray(MATRIX), PSD)
HUTCHINSON = tx.HutchinsonEstimator()


def budget(**settings):
    return tx.Adaptive(**({"rtol": 1e-7, "max_k": 16, "round_size": 8} | settings))


def log_trace_exp(scale):
    scale = jnp.asarray(scale, np.float32)
    return lambda k: tx.log_trace_exp(
        OPERATOR, scale, k=k, num_steps=6, key=KEY, throw=False
    )


def of_exp(rate):
    function = tx.Exp(jnp.asarray(rate, np.float32))
    return lambda k: tx.trace_of_function(
        OPERATOR, function, k=k, num_steps=6, key=KEY, throw=False
    )


def logdet(shift):
    preconditioner = tx.nystrom_preconditioner(OPERATOR, 4, key=KEY, shift=shift)
    return lambda k: tx.logdet(
        OPERATOR, k=k, num_steps=6, key=KEY, throw=False, preconditioner=preconditioner
    )


@pytest.mark.slow(but="log_trace_exp-*")
@pytest.mark.parametrize(
    ("call", "one", "other", "name"),
    [
        (log_trace_exp, 1.0, 2.0, "`scale`"),
        (of_exp, -1.0, -2.0, "function"),
        (logdet, 1.0, 2.0, "preconditioner"),
    ],
)
def test_state_of_other_parameters_is_refused(call, one, other, name):
    first = call(one)(budget())
    again = budget(max_k=32, state=first.state)
    with pytest.raises(ValueError, match="same estimator and settings") as caught:
        call(other)(again)
    assert name in str(caught.value)
    assert call(one)(again).stats["num_matvecs"] > first.stats["num_matvecs"]


def test_large_arrays_are_compared():
    """Two rows in another order, and one entry of another sign: arrays of one shape."""
    preconditioner = tx.nystrom_preconditioner(OPERATOR, 4, key=KEY, shift=1.0)

    def call(vectors, k):
        other = eqx.tree_at(lambda x: x.vectors, preconditioner, vectors)
        settings = {"key": KEY, "throw": False, "preconditioner": other}
        return tx.logdet(OPERATOR, k=k, num_steps=6, **settings)

    vectors = preconditioner.vectors
    again = budget(max_k=32, state=call(vectors, budget()).state)
    for others in (
        vectors.at[np.array([0, 1])].set(vectors[np.array([1, 0])]),
        vectors.at[3, 2].multiply(-1),
    ):
        with pytest.raises(ValueError, match=r"`estimator\.preconditioner\.vectors`"):
            call(others, again)


class WithKey(tx.AbstractSampler):
    key: jax.Array
    dtype: None = None
    rotation_invariant: ClassVar[bool] = False

    def sample(self, key, n, dtype):
        del key
        return jr.rademacher(self.key, (n,), dtype)


def test_keys_among_the_parameters():
    def call(seed, k):
        estimator = tx.HutchinsonEstimator(WithKey(jr.key(seed)))
        return tx.trace(OPERATOR, estimator, k=k, key=KEY, throw=False)

    again = budget(max_k=32, state=call(1, budget()).state)
    assert call(1, again).stats["num_matvecs"] > 8
    with pytest.raises(ValueError, match=r"`estimator\.sampler\.key`"):
        call(2, again)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float64", "complex64"])
def test_one_entry_changes_what_identifies_an_array(dtype):
    x = np.arange(12).reshape(3, 4) % 3 % 2
    others = [x, x[::-1]]
    for i in range(12):
        others.append(x.copy())
        others[-1].flat[i] ^= 1
    found = {int(_hash(jnp.asarray(each, dtype))) for each in others}
    assert len(found) == len(others)


def test_traced_parameters_are_not_compared():
    state = log_trace_exp(1.0)(budget()).state
    value = jax.jit(lambda scale: log_trace_exp(scale)(budget(state=state)).value)
    assert np.isfinite(value(1.0))


@pytest.mark.slow(but="complex64")
@pytest.mark.parametrize("dtype", [np.complex64, np.float16])
def test_state_of_an_operator_of_another_dtype(dtype):
    estimator = tx.XTraceEstimator()
    settings = {"key": KEY, "throw": False}
    k = budget(max_k=16)
    state = tx.trace(matrix_free(jnp.asarray(MATRIX)), HUTCHINSON, k=k, **settings).state
    other = matrix_free(jnp.asarray(MATRIX, dtype))
    again = budget(max_k=32, state=state)
    if dtype == np.float16:  # Sums are in float32, too.
        assert np.isfinite(tx.trace(other, HUTCHINSON, k=again, **settings).value)
        return
    with pytest.raises(ValueError, match="operator with the same tags and dtype"):
        tx.trace(other, HUTCHINSON, k=again, **settings)
    state = tx.trace(matrix_free(jnp.asarray(MATRIX)), estimator, k=k, **settings).state
    with pytest.raises(ValueError, match="operator with the same tags and dtype"):
        tx.trace(other, estimator, k=budget(max_k=32, state=state), **settings)


@pytest.mark.slow
def test_state_of_an_operator_with_another_tag():
    settings = {"key": KEY, "throw": False}
    tagged, plain = (matrix_free(jnp.asarray(MATRIX), tags) for tags in (PSD, ()))
    for one, other in ((tagged, plain), (plain, tagged)):
        state = tx.trace(one, k=budget(), **settings).state
        with pytest.raises(ValueError, match="operator with the same tags and dtype"):
            tx.trace(other, k=budget(max_k=32, state=state), **settings)
