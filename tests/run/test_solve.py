"""Which states of other calls an adaptive budget refuses to go on with."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 40, jr.key(20261125)
MATRIX = hermitian(0, np.linspace(1.0, 4.0, N)).astype(np.float32)
OPERATOR = lx.MatrixLinearOperator(jnp.asarray(MATRIX), PSD)
HUTCHINSON = tx.HutchinsonEstimator()


def budget(**settings):
    return tx.Adaptive(**({"rtol": 1e-7, "max_k": 16, "round_size": 8} | settings))


def of_function(k, state=None, *, function=None, num_steps=6, **others):
    function = tx.Exp(-1.0) if function is None else function
    settings = {"k": k, "state": state, "num_steps": num_steps, "key": KEY}
    return tx.trace_of_function(OPERATOR, function, throw=False, **settings, **others)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow(but="row_norms")
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


@pytest.mark.slow
def test_traced_settings_are_those_of_the_same_call():
    """Arrays in the settings, concrete or traced, are their shapes and dtypes."""
    rate = jnp.float32(-1.0)
    first = of_function(budget(), function=tx.Exp(rate))

    def again(rate, state):
        return of_function(budget(max_k=32), state, function=tx.Exp(rate)).value

    inside, outside = (f(rate, first.state) for f in (jax.jit(again), again))
    np.testing.assert_allclose(inside, outside, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu, jax.nn.softplus])
def test_state_of_a_callable_made_anew(activation):
    """Its text has no address of an object."""
    shift = jnp.float32(0.5)
    first = of_function(budget(), function=lambda x: activation(x - shift))
    function = lambda x: activation(x - shift)  # noqa: E731
    again = of_function(budget(max_k=32), first.state, function=function)
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_state_of_an_operator_with_another_tag():
    settings = {"key": KEY, "throw": False}
    tagged, plain = (matrix_free(jnp.asarray(MATRIX), tags) for tags in (PSD, ()))
    for one, other in ((tagged, plain), (plain, tagged)):
        state = tx.trace(one, k=budget(), **settings).state
        with pytest.raises(ValueError, match="operator with the same tags and dtype"):
            tx.trace(other, k=budget(max_k=32), state=state, **settings)


ENTRIES = {
    "trace": (tx.trace, tx.XTraceEstimator(), [{}]),
    "diagonal": (tx.diagonal, tx.XDiagEstimator(), [{}]),
    "norm": (tx.frobenius_norm, tx.XNysTraceEstimator(), [{}]),
    "logdet": (
        tx.logdet,
        tx.SLQEstimator(),
        [{}, {"num_steps": 4}, {"preconditioner": tx.AutoPreconditioner(0.5)}],
    ),
    "function": (
        tx.trace_of_function,
        tx.KrylovAwareEstimator(),
        [{"function": f, "num_steps": 4} for f in (tx.Log(), tx.Exp(), jnp.tanh)],
    ),
}


@pytest.mark.slow(but="trace")
@pytest.mark.parametrize("name", ENTRIES)
def test_entries_depend_on_the_call_and_the_estimator(name):
    """And not on budgets, steps, functions or preconditioners."""
    call, estimator, settings = ENTRIES[name]
    n = 20
    operator = matrix_free(np.diag(np.linspace(1.0, 2.0, n)), PSD)
    entries = set()
    for each in settings:
        for k in (8, 200 * n, tx.Adaptive(rtol=0.5, max_k=16)):
            budget = {"k": k, "key": KEY, "throw": False}
            solution = call(operator, estimator=estimator, **budget, **each)
            assert k != 200 * n or solution.stats["exact"]
            entries.add(frozenset(solution.stats))
    assert len(entries) == 1
