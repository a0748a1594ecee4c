"""Hessians by differences of gradients: their errors are within what they say, and every
error bar counts them."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx
from traceax._operators.door import flatten


N = 11


def loss(w, batch):
    """Positive definite at `point`, with a Hessian that varies on the scale of `w`."""
    outputs = jnp.tanh(batch @ w["a"]) @ w["b"]
    return jnp.mean(jnp.cosh(outputs)) + jnp.sum(w["a"] ** 2) + jnp.sum(w["b"] ** 4)


def point(dtype):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((4, 2)) / 2, rng.uniform(0.7, 1.3, 2)
    return {
        "a": jnp.asarray(a, dtype),
        "b": jnp.asarray(b, dtype),
        "c": jnp.ones(1, dtype),
    }


def data(dtype=np.float64):
    return jnp.asarray(np.random.default_rng(4).standard_normal((7, 4)), dtype)


def by_differences(w, batches=None, **settings):
    if batches is None:
        whole = data(w["b"].dtype)
        return tx.hessian(lambda w: loss(w, whole), w, product="difference")
    return tx.hessian(loss, w, batches, product="difference", **settings)


@ft.cache
def exact(dtype):
    """The Hessian at the point in this dtype, computed in float64."""
    wide = jax.tree.map(lambda x: x.astype(np.float64), point(dtype))
    flat, unravel = ravel_pytree(wide)
    whole = data(dtype).astype(np.float64)
    return np.asarray(jax.jit(jax.hessian(lambda v: loss(unravel(v), whole)))(flat))


def matrix_of(operator):
    return np.asarray(jax.jit(lambda: operator.as_matrix())(), np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products(dtype):
    """As accurate as they say, and not much more accurate."""
    operator = by_differences(point(dtype))
    flat = flatten(operator)
    eps = float(jnp.finfo(dtype).eps)
    assert flat.error == pytest.approx(20 * eps ** (2 / 3))
    assert flat.eps == flat.error
    assert lx.is_symmetric(operator)
    assert flat.hermitian
    expected = exact(dtype)
    error = np.linalg.norm(matrix_of(operator) - expected) / np.linalg.norm(expected)
    assert flat.error / 200 < error < flat.error


def test_batches_and_chunks():
    """Stacked, and of several sizes."""
    w, whole = point(np.float32), data(np.float32)
    for batches in ([whole[:2], whole[2:4], whole[4:]], whole[:, None]):
        operator = by_differences(w, batches, chunk_size=2)
        error = matrix_of(operator) - exact(np.float32)
        assert np.linalg.norm(error) < flatten(operator).error * np.max(exact(np.float32))


def test_units_do_not_matter():
    """Of vectors, of parameters and of the function, also near the ends of the range."""
    w, whole = point(np.float32), data(np.float32)
    v = jax.tree.map(jnp.cos, w)
    image = by_differences(w).mv(v)
    for scale in (2.0**-60, 2.0**60):
        scaled = by_differences(w).mv(jax.tree.map(lambda x, s=scale: s * x, v))
        jax.tree.map(
            lambda x, y, s=scale: np.testing.assert_array_equal(x, s * y), scaled, image
        )
        other = jax.tree.map(lambda x, s=scale: s * x, w)
        fn = lambda w, s=scale: loss(jax.tree.map(lambda x: x / s, w), whole)  # noqa: E731
        scaled = tx.hessian(fn, other, product="difference").mv(v)
        jax.tree.map(
            lambda x, y, s=scale: np.testing.assert_allclose(x * s * s, y, rtol=1e-2),
            scaled,
            image,
        )


def test_zero_point_and_zero_vector():
    operator = tx.hessian(lambda x: jnp.sum(x**2), jnp.zeros(3), product="difference")
    assert np.allclose(operator.mv(jnp.ones(3)), 2, rtol=1e-3)
    assert np.array_equal(operator.mv(jnp.zeros(3)), np.zeros(3))


def covers(solution, expected):
    low, high = solution.interval()
    return np.all((np.asarray(low) <= expected) & (expected <= np.asarray(high)))


@pytest.mark.slow(but="float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_bars_of_answers_without_sampling(dtype):
    """Nothing but the error of the products is left, and the intervals cover it, where
    those of exact products would not."""
    w, matrix = point(dtype), exact(dtype)
    operator = by_differences(w)
    floor = flatten(operator).error
    shifted = operator + lx.IdentityLinearOperator(operator.in_structure())
    definite = lx.TaggedLinearOperator(shifted, lx.positive_semidefinite_tag)
    wrapped = lx.FunctionLinearOperator(lambda v: operator.mv(v), operator.in_structure())
    eigenvalues = np.linalg.eigvalsh(matrix)
    answers = {
        "trace": (tx.trace(operator, k=N), np.trace(matrix)),
        "wrapped": (tx.trace(wrapped, k=N), np.trace(matrix)),
        "norm": (tx.frobenius_norm(operator, k=N), np.linalg.norm(matrix)),
        "logdet": (tx.logdet(definite, k=N), np.sum(np.log1p(eigenvalues))),
        "exp": (tx.log_trace_exp(operator, k=N), np.log(np.sum(np.exp(eigenvalues)))),
    }
    for name, (solution, expected) in answers.items():
        assert solution.successful, name
        assert covers(solution, expected), name
        half = (solution.interval()[1] - solution.interval()[0]) / 2
        assert 0 < half < 60 * floor * max(abs(expected), 1), name
        assert 0 < solution.std_err < 60 * floor * max(abs(expected), 1), name
    diagonal = tx.diagonal(operator, k=N)
    low, high = (ravel_pytree(x)[0] for x in diagonal.interval())
    assert np.all((low <= np.diag(matrix)) & (np.diag(matrix) <= high))


@pytest.mark.slow
def test_error_bars_of_estimates():
    """Of a matrix that a sketch of 16 vectors fully contains, many of them: sampling has
    no part in the error, and 95% of the intervals are all of them."""
    keys = jr.split(jr.key(0), 200)

    def run(key):
        a, b = jr.split(key)
        x = jr.normal(a, (40, 6), jnp.float32)
        w = jr.normal(b, (40,), jnp.float32) / 6

        def fn(w):
            return jnp.sum(jnp.cosh(w @ x))

        operator = tx.hessian(fn, w, product="difference")
        operator = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
        wide = w.astype(np.float64) @ x.astype(np.float64)
        expected = jnp.sum(jnp.cosh(wide) * jnp.sum(x.astype(np.float64) ** 2, axis=0))
        found = []
        for estimator in (tx.XTraceEstimator(), tx.XNysTraceEstimator()):
            settings = {"k": 16 if found else 32, "key": key, "throw": False}
            solution = tx.trace(operator, estimator, **settings)
            found.append((*solution.interval(), solution.std_err / expected))
        return found, expected

    found, expected = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    for low, high, relative in found:
        assert np.mean((low <= expected) & (expected <= high)) >= 0.95
        assert np.median(relative) < 2e-2


def test_tolerance_below_the_error_of_products():
    settings = {"key": jr.key(0), "throw": False}
    solution = tx.trace(
        by_differences(point(np.float32)), k=tx.Adaptive(rtol=1e-6, max_k=40), **settings
    )
    assert solution.result == tx.RESULTS.precision_lost


def test_derivatives():
    """Of traces in the point, also mapped and in forward mode: those of the Hessian."""
    w = point(np.float64)
    settings = {"k": 3, "key": jr.key(0), "throw": False}

    def value(scale, product):
        moved = jax.tree.map(lambda x: scale * x, w)
        operator = tx.hessian(loss, moved, data()[None], product=product)
        return tx.trace(operator, tx.HutchinsonEstimator(), **settings).value

    scales = jnp.array([0.5, 1.0])
    found, expected = (
        jax.jit(jax.vmap(jax.value_and_grad(lambda s: value(s, product))))(scales)  # noqa: B023
        for product in ("difference", "exact")
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7)
    slope = jax.jvp(lambda s: value(s, "difference"), (scales[1],), (jnp.ones(()),))[1]
    np.testing.assert_allclose(slope, expected[1][1], rtol=1e-7)


def test_precision_of_the_gradient():
    """The coarsest dtype that the gradient passes through decides; data do not."""
    w = point(np.float64)
    coarse = jnp.asarray(data(), jnp.bfloat16)

    def in_float32(w):
        return loss(jax.tree.map(lambda x: x.astype(np.float32), w), data(np.float32))

    def error(fn):
        return flatten(tx.hessian(fn, w, product="difference")).error

    with jax.numpy_dtype_promotion("standard"):
        fine = error(lambda w: loss(w, coarse.astype(np.float32)))
    assert fine == error(lambda w: loss(w, data()))
    assert error(jax.jit(in_float32)) == pytest.approx(20 * 2 ** (-46 / 3))


def test_gradients_without_derivatives():
    """Rules that call the host, or kernels, which JAX cannot differentiate."""

    @jax.custom_vjp
    def square(x):
        return x**2

    def pull(x, g):
        slope = jax.pure_callback(lambda x: 2 * x, x, x, vmap_method="sequential")
        return (slope * g,)

    square.defvjp(lambda x: (x**2, x), pull)
    fn = lambda x: jnp.sum(square(x) ** 2)  # noqa: E731
    x = jnp.linspace(1.0, 2.0, 5)
    with pytest.raises(ValueError, match="callback"):
        tx.hessian(fn, x).mv(x)
    operator = tx.hessian(fn, x, product="difference")
    np.testing.assert_allclose(operator.mv(x), 12 * x**3, rtol=1e-7)


def test_memory():
    """That of a gradient, and a few vectors."""
    layers, width, examples = 12, 32, 512

    def deep(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return jnp.sum(x**2)

    shapes = (
        jax.ShapeDtypeStruct((layers, width, width), np.float32),
        jax.ShapeDtypeStruct((examples, width), np.float32),
    )

    def temporaries(fn):
        compiled = jax.jit(fn).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def product(kind):
        fn = lambda w, x: tx.hessian(lambda w: deep(w, x), w, product=kind)  # noqa: E731
        return temporaries(lambda w, x: fn(w, x).mv(jnp.cos(w)))

    gradient, vector = temporaries(jax.grad(deep)), 4 * layers * width**2
    assert gradient > 10 * vector
    assert product("difference") < gradient + 6 * vector < 0.8 * product("exact")


def test_check_operator_knows_their_errors():
    report = tx.check_operator(by_differences(point(np.float32)), key=jr.key(0))
    assert report.successful
    assert "no error bar counts that" not in str(report)


@pytest.mark.parametrize("product", ["differences", ""])
def test_bad_product(product):
    with pytest.raises(ValueError, match=r'`product` must be "exact" or "difference"'):
        tx.hessian(lambda x: jnp.sum(x**2), jnp.ones(3), product=product)


def test_points_of_several_scales():
    """A step that suits most entries is lost in a large one: no answer is given."""
    fn = lambda x, *_: jnp.sum(jnp.sin(x))  # noqa: E731
    x = jnp.ones(100, np.float32)
    tx.hessian(fn, x.at[0].set(500), product="difference")
    large = x.at[0].set(1e5)
    with pytest.raises(ValueError, match=r"of about one size.*1\.0e\+05.*lost"):
        tx.hessian(fn, large, product="difference")
    operator = tx.hessian(fn, large, jnp.ones((2, 1)), product="difference")
    solution = tx.trace(operator, k=3, key=jr.key(0), throw=False)
    assert solution.result == tx.RESULTS.nonfinite_product


def test_gradients_that_are_too_coarse():
    x = jnp.ones(3, np.float32)
    half = lambda x: jnp.sum(jnp.sin(x.astype(jnp.bfloat16))).astype(np.float32)  # noqa: E731
    for fn, at in ((half, x), (lambda x: jnp.sum(x**2), x.astype(np.float16))):
        with pytest.raises(TypeError, match=r"must be in float32 or float64.*Found"):
            tx.hessian(fn, at, product="difference")


def test_bad_functions():
    for batches in (None, data()):
        settings = {"batches": batches, "product": "difference"}
        with pytest.raises(TypeError, match="`fn` must return a real"):
            tx.hessian(lambda x, *_: x, jnp.ones(3), **settings)
        with pytest.raises(TypeError, match="`x` must hold at least one real"):
            tx.hessian(lambda x, *_: jnp.float64(x), jnp.ones((), int), **settings)
