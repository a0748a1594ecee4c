"""Traced code is compared by its content: what was made anew with the same code compiles
nothing, and what differs in a constant, a context or a derivative rule is not mixed."""

import contextlib
import functools as ft
import gc
import importlib
import sys
import weakref

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._core.code import Code

from ..helpers import hermitian, PSD


N, KEY = 5, jax.random.key(0)
POINT = jnp.asarray(np.linspace(0.1, 1, N))
MATRIX = jnp.asarray(hermitian(0, np.linspace(0.2, 2, N)))
# Budgets of N: the exact answer, whose program is small.
trace = ft.partial(tx.trace, k=N, key=KEY, throw=False)


@contextlib.contextmanager
def compilations():
    """A list that grows with each program that XLA is asked for."""
    seen = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def counted(fn, *args):
    """The value, and how many programs were compiled for it."""
    with compilations() as seen:
        value = jax.block_until_ready(fn(*args))
    return value, len(seen)


def of_function(mv, dtype=float):
    """The trace of a product."""
    structure = jax.ShapeDtypeStruct((N,), dtype)
    return trace(lx.FunctionLinearOperator(mv, structure)).value


def of_spectrum(function, scale):
    """tr f(scale A)."""
    operator = lx.MatrixLinearOperator(scale * MATRIX, PSD)
    settings = {"k": N, "num_steps": N, "key": KEY, "throw": False}
    return tx.trace_of_function(operator, function, **settings).value


def through(function, point):
    """The trace of an operator whose entries are the sum of `function(point)`."""
    return of_function(lambda v: jnp.sum(function(point)) * v)


# --- made anew ---


def test_arrays_that_lambdas_close_over():
    ones, twos = (jnp.full(N, x) for x in (1.0, 2.0))
    first, compiled = counted(lambda: of_function(lambda v: ones * v))
    assert first == N
    assert compiled > 0
    second, compiled = counted(lambda: of_function(lambda v: twos * v))
    assert second == 2 * N
    assert compiled == 0


def test_estimates_of_lambdas():
    """Of random probes, with an adaptive budget, and gradients."""
    x = np.random.default_rng(0).standard_normal((2, 12))
    structure = jax.ShapeDtypeStruct((12,), float)

    @jax.grad
    def slope(x):
        operator = lx.FunctionLinearOperator(lambda v: x * jnp.cumsum(v), structure)
        k = tx.Adaptive(rtol=1e-9, max_k=8, round_size=4)
        return tx.trace(operator, tx.XTraceEstimator(), k=k, key=KEY, throw=False).value

    one, two = map(jnp.asarray, x)
    slope(one)
    found, compiled = counted(slope, two)
    assert compiled == 0
    assert np.all(np.isfinite(found))


def network(activation, w):
    x = jnp.linspace(-1, 1, 6).reshape(3, 2)
    return jnp.sum(activation(x @ w[:4].reshape(2, 2)) @ w[4:6]) ** 2


def scanned(w):
    def step(carry, x):
        return jax.nn.gelu(carry * w[:2] + x), None

    carry, _ = jax.lax.scan(step, jnp.zeros(2), jnp.outer(jnp.ones(3), w[2:4]))
    return jnp.sum(carry * w[4:6])


ACTIVATIONS = [jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus]
LOSSES = {x.__name__: ft.partial(network, x) for x in ACTIVATIONS} | {"scan": scanned}


@pytest.mark.slow(but=("relu", "softplus"))
@pytest.mark.parametrize("name", LOSSES)
def test_hessians_of_networks(name):
    loss = LOSSES[name]
    points = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6)))
    exact = jax.jit(lambda w: jnp.trace(jax.hessian(loss)(w)))
    expected = list(map(exact, points))

    def hessian(w):
        return tx.trace(tx.hessian(lambda w: loss(w), w), k=6, key=KEY).value

    one, two = points
    assert np.isclose(hessian(one), expected[0])
    found, compiled = counted(hessian, two)
    assert compiled == 0
    assert np.isclose(found, expected[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_spectral_functions(activation):
    scales = jnp.asarray(1.0), jnp.asarray(2.0)

    def call(scale):
        return of_spectrum(lambda x: activation(scale * x), 1.0)

    call(scales[0])
    found, compiled = counted(call, scales[1])
    assert compiled == 0
    eigenvalues = 2 * np.linalg.eigvalsh(MATRIX)
    assert np.isclose(found, np.sum(activation(eigenvalues)))


# --- constants ---


def test_python_numbers_are_code():
    """0.0 and -0.0 are equal, and not the same."""
    for c in (2.0, 3.0, 2.0):
        assert of_function(lambda v, c=c: c * v) == c * N
    for exponent in (2, 3):
        loss = lambda w, e=exponent: jnp.sum(w**e)  # noqa: E731
        exact = exponent * (exponent - 1) * np.sum(POINT ** (exponent - 2.0))
        assert np.isclose(trace(tx.hessian(loss, POINT)).value, exact)
    for zero in (0.0, -0.0):
        found = of_spectrum(lambda x, zero=zero: 1 / (x * zero), 1.0)
        assert found == np.copysign(np.inf, zero)


def test_warning_where_a_line_compiles_again_and_again():
    """Once, after the third program; not for functions that do something else."""

    def run(product):
        structure = jax.ShapeDtypeStruct((N,), float)
        return trace(lx.FunctionLinearOperator(product, structure)).value

    products = [lambda v: v, lambda v: v + v, lambda v: -v, lambda v: v[::-1]]
    for product in products:
        run(product)
    for c in (5.0, 6.0):
        assert run(lambda v, c=c: v + c * v) == (1 + c) * N
    with pytest.warns(UserWarning, match="close over an array instead"):
        run(lambda v: v + 7.0 * v)
    assert run(lambda v: v + 8.0 * v) == 9 * N


def code_of(fn, *args):
    return Code.of(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda x: 2.0 * x, lambda y: 2.0 * y, True),
        (lambda x: 2.0 * x, lambda x: 3.0 * x, False),
        (lambda x: 0.0 * x, lambda x: -0.0 * x, False),
        (lambda x: x + x, lambda x: x - x, False),
        (lambda x: x**2, lambda x: x**3, False),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), False),
        (lambda x: (x[0], x[1]), lambda x: (x[1], x[0]), False),
        (lambda x: jnp.sin(x) - jnp.cos(x), lambda x: jnp.cos(x) - jnp.sin(x), False),
        (jax.jit(lambda x: x.T), jax.jit(lambda x: x.T), True),
        (
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + 1, x),
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + 2, x),
            False,
        ),
    ],
)
def test_content(one, other, same):
    x = jnp.ones((2, 2))
    codes = code_of(one, x), code_of(other, x)
    assert (codes[0] is codes[1]) == same


def test_code_that_no_program_uses_is_freed():
    code = Code.of(jax.make_jaxpr(lambda x: 3.25 * x)(1.0).jaxpr)
    assert Code.of(code.jaxpr) is code
    gone = weakref.ref(code)
    del code
    gc.collect()
    assert gone() is None


def test_shapes_and_dtypes_are_content():
    fn = lambda x: 2.0 * x  # noqa: E731
    arguments = jnp.ones(2), jnp.ones(3), jnp.ones(2, np.float32), jnp.ones(2, complex)
    codes = [code_of(fn, x) for x in arguments]
    assert len({id(code) for code in codes}) == 4


# --- derivative rules ---


def with_rule(function, factor):
    """`function`, with a derivative of `factor`."""
    function.defjvp(lambda x, t: (jnp.sin(x[0]), factor * t[0]))
    return function


def local(factor):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    return with_rule(sine, factor)


@jax.custom_jvp
def two(x):
    return jnp.sin(x)


@jax.custom_jvp
def three(x):
    return jnp.sin(x)


@jax.custom_jvp
def changing(x):
    return jnp.sin(x)


@jax.custom_vjp
def backward(x):
    return jnp.sin(x)


with_rule(two, 2.0)
with_rule(three, 3.0)


def slope_through(function):
    return jax.grad(ft.partial(through, lambda x: function(x)))(POINT)


def slope_of_spectrum(function):
    return jax.grad(ft.partial(of_spectrum, lambda x: function(x)))(1.0)


def expected(factor):
    return {
        slope_through: N * factor * np.ones(N),
        slope_of_spectrum: factor * np.trace(MATRIX),
    }


every_place = pytest.mark.parametrize("slope", [slope_through, slope_of_spectrum])


@every_place
def test_rules_of_functions_of_modules(slope):
    for function, factor in ((two, 2), (three, 3)):
        assert np.allclose(slope(function), expected(factor)[slope])
    for function, factor in ((two, 2), (three, 3)):
        found, compiled = counted(slope, function)
        assert compiled == 0
        assert np.allclose(found, expected(factor)[slope])


@pytest.mark.slow(but="slope_through")
@every_place
def test_local_rules(slope):
    """Two objects, one after another so that the first may be freed, and a closed-over
    array in a rule."""
    one, other = local(2.0), local(3.0)
    assert np.allclose(slope(one), expected(2)[slope])
    assert np.allclose(slope(other), expected(3)[slope])
    for factor in (4.0, 5.0, jnp.asarray(6.0), jnp.asarray(7.0)):
        assert np.allclose(slope(local(factor)), expected(float(factor))[slope])


@pytest.mark.parametrize("make", [local, lambda factor: {2.0: two, 3.0: three}[factor]])
def test_rules_in_products(make):
    """A Hessian differentiates by the rules while it is traced; a product keeps them."""
    for factor in (2.0, 3.0):
        function = make(factor)
        hessian = tx.hessian(lambda w, f=function: jnp.sum(f(w) * w), POINT)
        # The derivative of f(w) + factor w; of the value in a rule it is a cosine.
        exact = np.sum(np.cos(POINT)) + factor * N
        assert np.isclose(trace(hessian).value, exact)

        def value(scale, f=function):
            return of_function(lambda v: scale * v + 0 * f(POINT)[0] * v)

        assert np.isclose(jax.grad(value)(2.0), N)


@every_place
def test_rule_that_is_defined_anew(slope):
    for factor in (2.0, 3.0):
        with_rule(changing, factor)
        assert np.allclose(slope(changing), expected(factor)[slope])


def test_backward_rule_that_is_defined_anew():
    for factor in (2.0, 3.0):
        backward.defvjp(lambda x: (jnp.sin(x), None), lambda _, g, c=factor: (c * g,))
        found = slope_through(backward)
        assert np.allclose(found, expected(factor)[slope_through])
    found, compiled = counted(slope_through, backward)
    assert compiled == 0


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_factor(factor, x):
    return jnp.sin(x)


@with_factor.defjvp
def _(factor, x, t):
    return jnp.sin(x[0]), factor * t[0]


@every_place
def test_arguments_that_are_not_differentiated(slope):
    """They are no part of the traced code."""
    for factor in (2.0, 3.0, 2.0):
        found = slope(ft.partial(with_factor, factor))
        assert np.allclose(found, expected(factor)[slope])


MODULE = """
import jax, jax.numpy as jnp

@jax.custom_jvp
def sine(x):
    return jnp.sin(x)

sine.defjvp(lambda x, t: (jnp.sin(x[0]), {} * t[0]))
"""


def test_module_that_is_loaded_again(tmp_path, monkeypatch):
    """The function has the same name in the same line, and another rule."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "rules_of_test_code.py"
    file.write_text(MODULE.format(2))
    module = importlib.import_module(file.stem)
    monkeypatch.setitem(sys.modules, file.stem, module)
    for factor in (2, 33):
        file.write_text(MODULE.format(factor))
        importlib.invalidate_caches()
        importlib.reload(module)
        found = slope_through(module.sine)
        assert np.allclose(found, expected(factor)[slope_through])


def sine_of_two(x):
    return jnp.sin(x)


alias = with_rule(jax.custom_jvp(sine_of_two), 3.0)
sine_of_two = with_rule(jax.custom_jvp(sine_of_two), 2.0)


def test_two_rules_of_one_function():
    for function, factor in ((sine_of_two, 2.0), (alias, 3.0)):
        found = slope_through(function)
        assert np.allclose(found, expected(factor)[slope_through])


# --- contexts and tracers ---


def test_contexts_of_precision():
    """Of one operator, and of equal ones. On a CPU all precisions give the same."""
    matrix = jnp.asarray(MATRIX, np.float32)
    product = lambda v: matrix @ v  # noqa: E731
    _, compiled = counted(of_function, product, np.float32)
    assert compiled == 1
    for made in (product, lambda v: matrix @ v):
        for precision in ("bfloat16", "highest"):
            with jax.default_matmul_precision(precision):
                _, compiled = counted(of_function, made, np.float32)
                assert compiled == (made is product)


def test_wide_and_narrow_numbers():
    """Indices are int64 in one of them."""
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            value = of_function(lambda v: jnp.arange(1, N + 1) * v, np.float32)
            assert value == N * (N + 1) / 2
            assert value.dtype == np.float32


def test_contexts_of_random_numbers():
    """Equations remember for which generator they were traced."""
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            x = jax.random.normal(KEY, (N,))
            found = of_function(lambda v: jax.random.normal(KEY, (N,)) * v)
            assert np.isclose(found, np.sum(x), rtol=1e-12)


def value_of_product(x):
    return of_function(lambda v: x * v)


def value_of_hessian(x):
    return trace(tx.hessian(lambda w: jnp.sum(jax.nn.gelu(w * x)), x)).value


def value_of_callable(x):
    return of_spectrum(lambda y: jnp.tanh(x[0] * y), 1.0)


VALUES = [value_of_product, value_of_hessian, value_of_callable]


@pytest.mark.slow(but="value_of_product")
@pytest.mark.parametrize("value", VALUES)
def test_traced_arrays_that_are_closed_over(value):
    """They leave their transformation with no call."""
    expected, slope = value(POINT), jax.grad(value)(POINT)
    batch = jnp.stack([POINT, 2 * POINT])
    # A newer JAX keeps jaxprs with their constants in caches of its own, and calls that a
    # leak.
    older = jax.version.__version_info__ < (0, 11)
    with jax.checking_leaks() if older else contextlib.nullcontext():
        assert np.isclose(jax.jit(value)(POINT), expected)
        assert np.allclose(jax.jit(jax.grad(value))(POINT), slope)
        batched = jax.vmap(value)(batch)
        slopes = jax.jit(jax.vmap(jax.grad(value)))(batch)
    assert np.allclose(batched, [expected, value(2 * POINT)])
    assert np.allclose(slopes, [slope, jax.grad(value)(2 * POINT)])


def test_operators_made_in_a_loop():
    """And afterwards outside of it."""

    def step(total, x):
        return total + value_of_product(x), None

    total, _ = jax.jit(lambda x: jax.lax.scan(step, 0.0, x))(jnp.stack([POINT] * 3))
    assert np.isclose(total, 3 * value_of_product(POINT))
