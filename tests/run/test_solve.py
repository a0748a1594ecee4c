"""What states of other calls, settings and arguments are refused; sums and budgets at the
edges."""

import copy
import functools as ft
import pickle

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


def of_function(k, state=None, *, function=None, num_steps=6, **others):
    function = tx.Exp(-1.0) if function is None else function
    settings = {"k": k, "state": state, "num_steps": num_steps, "key": KEY}
    return tx.trace_of_function(OPERATOR, function, throw=False, **settings, **others)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ({"function": tx.Inverse()}, "Inverse"),
        ({"function": lambda x: x**2}, "integer_pow"),
        ({"function": tx.Power(3)}, "Power"),
        ({"num_steps": 5}, "num_steps=5"),
        ({"estimator": tx.SLQEstimator(tx.NormalSampler())}, "NormalSampler"),
        ({"gradient": tx.LanczosGradient(columns=3)}, "columns=3"),
    ],
)
def test_state_of_other_settings_is_refused(others, found):
    first = of_function(budget())
    with pytest.raises(ValueError, match="same estimator and settings") as caught:
        of_function(budget(max_k=32), first.state, **others)
    assert found in str(caught.value)
    again = of_function(budget(max_k=32), first.state)
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]


def test_state_of_a_preconditioner_of_another_shape_is_refused():
    """Numbers in arrays are not compared, but shapes are."""

    def call(rank, shift, **settings):
        outer = tx.nystrom_preconditioner(OPERATOR, rank, key=KEY, shift=shift)
        settings |= {"num_steps": 6, "key": KEY, "throw": False}
        return tx.logdet(OPERATOR, preconditioner=outer, **settings)

    state = call(4, 1.0, k=budget()).state
    again = {"k": budget(max_k=32), "state": state}
    assert call(4, 2.0, **again).stats["num_matvecs"] > 8
    with pytest.raises(ValueError, match="same estimator and settings"):
        call(6, 1.0, **again)


CALLS = {
    "trace": (tx.trace, (), {}),
    "diagonal": (tx.diagonal, (), {}),
    "leaf_traces": (tx.leaf_traces, (), {}),
    "frobenius_norm": (tx.frobenius_norm, (), {}),
    "row_norms": (tx.row_norms, (), {}),
    "schatten_norm": (tx.schatten_norm, (1,), {"num_steps": 6}),
    "trace_of_function": (tx.trace_of_function, (tx.Exp(-1.0),), {"num_steps": 6}),
    "logdet": (tx.logdet, (), {"num_steps": 6}),
    "diagonal_of_function": (tx.diagonal_of_function, (tx.Exp(-1.0),), {"num_steps": 6}),
    "log_trace_exp": (tx.log_trace_exp, (), {"num_steps": 6}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_goes_on(name):
    """With the budget of a longer run, it is that run. A fixed one has no state."""
    function, arguments, settings = CALLS[name]
    operator = matrix_free(jnp.asarray(MATRIX), PSD)
    settings = settings | {"key": KEY, "throw": False}
    call = ft.partial(function, operator, *arguments, **settings)
    short, long = budget(rtol=1e-12), budget(rtol=1e-12, max_k=32)
    first, whole = call(k=short), call(k=long)
    again = call(k=long, state=first.state)
    assert again.stats["num_matvecs"] == whole.stats["num_matvecs"]
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]
    jax.tree.map(
        ft.partial(np.testing.assert_allclose, rtol=1e-4), again.value, whole.value
    )
    with pytest.raises(ValueError, match="`state` is for an adaptive budget"):
        call(k=16, state=first.state)


def test_traced_settings_are_those_of_the_same_call():
    """Arrays in the settings, concrete or traced, are their shapes and dtypes."""
    rate = jnp.float32(-1.0)
    first = of_function(budget(), function=tx.Exp(rate))

    def again(rate, state):
        return of_function(budget(max_k=32), state, function=tx.Exp(rate)).value

    inside, outside = (f(rate, first.state) for f in (jax.jit(again), again))
    np.testing.assert_allclose(inside, outside, rtol=1e-5)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu, jax.nn.softplus])
def test_state_of_a_callable_made_anew(activation):
    """Its text has no address of an object."""
    shift = jnp.float32(0.5)
    first = of_function(budget(), function=lambda x: activation(x - shift))
    function = lambda x: activation(x - shift)  # noqa: E731
    again = of_function(budget(max_k=32), first.state, function=function)
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]


@pytest.mark.parametrize("dtype", [np.complex64, np.float16])
def test_state_of_an_operator_of_another_dtype(dtype):
    estimator = tx.XTraceEstimator()
    settings = {"key": KEY, "throw": False}
    k = budget(max_k=16)
    state = tx.trace(matrix_free(jnp.asarray(MATRIX)), HUTCHINSON, k=k, **settings).state
    other = matrix_free(jnp.asarray(MATRIX, dtype))
    again = {"k": budget(max_k=32), "state": state, **settings}
    if dtype == np.float16:  # Sums are in float32, too.
        assert np.isfinite(tx.trace(other, HUTCHINSON, **again).value)
        return
    with pytest.raises(ValueError, match="operator with the same tags and dtype"):
        tx.trace(other, HUTCHINSON, **again)
    state = tx.trace(matrix_free(jnp.asarray(MATRIX)), estimator, k=k, **settings).state
    with pytest.raises(ValueError, match="operator with the same tags and dtype"):
        tx.trace(other, estimator, **again | {"state": state})


def test_state_of_an_operator_with_another_tag():
    settings = {"key": KEY, "throw": False}
    tagged, plain = (matrix_free(jnp.asarray(MATRIX), tags) for tags in (PSD, ()))
    for one, other in ((tagged, plain), (plain, tagged)):
        state = tx.trace(one, k=budget(), **settings).state
        with pytest.raises(ValueError, match="operator with the same tags and dtype"):
            tx.trace(other, k=budget(max_k=32), state=state, **settings)


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
