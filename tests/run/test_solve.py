"""What states of other calls, settings and arguments are refused; sums and budgets at the
edges."""

import copy
import pickle
from typing import ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._operators.door import flatten
from traceax._run.execution import Local
from traceax._run.fold import fold
from traceax._run.solve import _hash

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 40, jr.key(20261125)
MATRIX = hermitian(0, np.linspace(1.0, 4.0, N)).astype(np.float32)
OPERATOR = lx.MatrixLinearOperator(jnp.asarray(MATRIX), PSD)
HUTCHINSON = tx.HutchinsonEstimator()


def budget(**settings):
    return tx.Adaptive(**({"rtol": 1e-7, "max_k": 16, "round_size": 8} | settings))


# --- sums ---


@pytest.mark.parametrize("rest", [0, 1])
def test_long_sums_keep_their_digits(rest):
    """Of as many equal terms one after another float32 lost four of seven digits."""
    n, term = 200_000 + rest, np.float32(0.7123456)
    flat = flatten(lx.IdentityLinearOperator(jax.ShapeDtypeStruct((n,), np.float32)))

    @eqx.filter_jit
    def total(term, scale):
        fn = lambda _, index: (scale * term + 0 * index, ())  # noqa: E731
        return fold(fn, lambda *_: (), lambda _: (), flat, n, Local(8))[0]

    # An array too, as for leaves; and the derivative of the sum.
    terms = np.array([term, 2 * term])
    exact = n * terms.astype(np.float64)
    np.testing.assert_allclose(total(jnp.asarray(terms), 1.0), exact, rtol=1e-6)
    slope = jax.grad(lambda scale: total(jnp.asarray(term), scale))(np.float32(1))
    np.testing.assert_allclose(slope, exact[0], rtol=1e-3)


# --- states ---


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


def test_state_of_an_operator_with_another_tag():
    settings = {"key": KEY, "throw": False}
    tagged, plain = (matrix_free(jnp.asarray(MATRIX), tags) for tags in (PSD, ()))
    for one, other in ((tagged, plain), (plain, tagged)):
        state = tx.trace(one, k=budget(), **settings).state
        with pytest.raises(ValueError, match="operator with the same tags and dtype"):
            tx.trace(other, k=budget(max_k=32, state=state), **settings)


# --- adaptive budgets ---


@pytest.mark.parametrize("estimator", [tx.XTraceEstimator(), tx.HutchPlusPlusEstimator()])
def test_operator_smaller_than_the_least_budget(estimator):
    """What is left beside n products is not enough for a single sample."""
    matrix = jnp.asarray(MATRIX[:3, :3])
    k = tx.Adaptive(rtol=0.1, max_k=50, round_size=2)
    found = tx.frobenius_norm(matrix_free(matrix), estimator, k=k, key=KEY)
    np.testing.assert_allclose(found.value, np.linalg.norm(matrix), rtol=1e-6)
    assert found.std_err == 0
    assert found.stats["num_matvecs"] == 3


def test_adaptive_where_transfers_are_forbidden():
    with jax.transfer_guard("disallow"):
        assert tx.Adaptive(rtol=0.1, max_k=30).max_k == 30


def test_infinite_tolerance_of_the_zero_operator():
    zero = matrix_free(jnp.zeros((N, N)))
    k = tx.Adaptive(rtol=np.inf, max_k=32, round_size=8)
    found = tx.trace(zero, HUTCHINSON, k=k, key=KEY)
    assert found.value == found.std_err == 0


def test_no_error_bar_of_an_exact_answer():
    """In small buffers of an estimate that the exact answer has replaced."""
    flat = matrix_free(jnp.asarray(MATRIX))
    found = tx.trace(
        flat, tx.XTraceEstimator(), k=budget(max_k=N + 8), key=KEY, throw=False
    )
    assert found.std_err == 0
    for name in ("std.err", "jackknife_std_err", "independent_std_err"):
        assert found.stats[name] == 0, name


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"progress": True}, TypeError, "`progress` must be a progress meter"),
        ({"progress": eqxi.TextProgressMeter}, TypeError, "`progress` must be"),
        ({"callback": 5}, TypeError, "`callback` must be a function"),
        ({"history": "no"}, TypeError, "`history` must be True or False"),
        ({"confidence": 1 - 1e-16}, ValueError, "`confidence` must be a known number"),
    ],
)
def test_settings_of_adaptive(settings, error, match):
    with pytest.raises(error, match=match):
        budget(**settings)


def test_confidence_near_one():
    k = budget(rtol=10.0, confidence=1 - 1e-15, min_samples=8)
    found = tx.trace(matrix_free(jnp.asarray(MATRIX)), HUTCHINSON, k=k, key=KEY)
    assert np.isfinite(found.value)


# --- other arguments ---


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_the_hermitian_tag(copied):
    matrix = jnp.asarray(MATRIX, np.complex64)
    assert copied(tx.hermitian_tag) is tx.hermitian_tag
    operator = copied(lx.MatrixLinearOperator(matrix, tx.hermitian_tag))
    assert flatten(operator).hermitian


def test_devices_of_a_mesh():
    device = jax.devices()[0]
    with pytest.raises(TypeError, match="`devices` must be a list of devices"):
        tx.probe_mesh(device)  # pyright: ignore
    with pytest.raises(ValueError, match="each device once"):
        tx.probe_mesh([device, device])
    assert tx.probe_mesh([device]).size == 1


@pytest.mark.parametrize("size", [1, 3])
def test_words_that_are_no_key(size):
    with pytest.raises(TypeError, match="`key` must be one JAX PRNG key"):
        tx.trace(OPERATOR, HUTCHINSON, k=4, key=jnp.zeros(size, np.uint32))


def test_raw_keys_where_new_ones_are_the_default():
    raw = jnp.array([0, 1], np.uint32)
    with jax.enable_custom_prng(), pytest.warns(FutureWarning, match="Raw arrays"):
        inside = tx.trace(OPERATOR, HUTCHINSON, k=4, key=raw)
    assert inside.value == tx.trace(OPERATOR, HUTCHINSON, k=4, key=raw).value


@pytest.mark.parametrize(
    "make",
    [
        lambda: tx.Exp(np.nan),
        lambda: tx.SLQEstimator(lower_bound=np.nan),
        lambda: tx.Adaptive(rtol=np.nan, max_k=8),
    ],
)
def test_parameters_that_are_no_numbers(make):
    with pytest.raises(ValueError, match="nan"):
        make()


def test_raw_keys_of_another_generator():
    with jax.default_prng_impl("rbg"):
        key = jr.PRNGKey(0)
        assert key.shape == (4,)
        assert np.isfinite(tx.trace(OPERATOR, HUTCHINSON, k=4, key=key).value)
