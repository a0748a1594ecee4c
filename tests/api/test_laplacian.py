"""Laplacians by collapsed Taylor mode: against nested derivatives for functions of all
kinds, and by random directions."""

import functools as ft

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, z_score


N, NUM_KEYS = 7, 400
W = hermitian(1, np.linspace(-1, 2, N)) + np.triu(np.ones((N, N)), 1) / N
X = np.cos(np.arange(N) + 0.3)
KEYS = jr.split(jr.key(20261122), NUM_KEYS)


def loops(w, x):
    def body(i, c):
        return jnp.sin(w @ c) * x[i]

    last, kept = jax.lax.scan(lambda c, row: (jnp.tanh(row * c), c[0] ** 2), x, w)
    return jnp.sum(jax.lax.fori_loop(0, 3, body, x)) + jnp.sum(last) + jnp.sum(kept)


def choices(w, x):
    branches = (lambda x: jnp.sum(x**3), lambda x: jnp.prod(x))
    ordered = jnp.sort(x) ** 3 * jnp.arange(N) + jnp.where(x > 0, x**2, jnp.exp(x))
    return jax.lax.cond(x[0] > 0, *branches, x) + jnp.sum(ordered) + jnp.max(w @ x) ** 2


def algebra(w, x):
    matrix = 20 * jnp.eye(N) + jnp.outer(x, x) @ w @ jnp.diag(x)
    return jnp.linalg.slogdet(matrix)[1] + jnp.linalg.solve(matrix, x) @ x


def named(w, x):
    """Functions with derivative rules of their own, and calls within calls."""
    inside = jax.jit(lambda y: jax.nn.silu(y) * jax.nn.gelu(w @ y))(x)
    rest = jax.checkpoint(lambda x: jnp.sum(jnp.sin(w @ x) ** 2))(x)
    rules = jax.nn.softplus(x) + jax.nn.relu(x) ** 3 + jnp.abs(x) ** 2.5
    return jnp.sum(inside) + rest + jnp.sum(rules) + jax.nn.logsumexp(w @ x)


def products(w, x):
    dft = jnp.abs(jnp.fft.fft(x)) ** 2 * jnp.arange(N)
    several = x * x / (2 + x**4) + jnp.convolve(x, jnp.sin(x))[:N] + 2.0**x
    return jnp.sum(dft) + jnp.dot(x, x) * x[0] + jnp.sum(several) + jnp.linalg.norm(x)


def derivative(w, x):
    return jnp.sum(jax.grad(lambda y: jnp.sum(jnp.tanh(w @ y) * y))(x) ** 2)


def entrywise(w, x):
    small = 0.5 * jnp.tanh(w @ x)
    functions = (jnp.arcsin, jnp.arctan, jnp.arctanh, jnp.cosh, jnp.exp2, jnp.expm1)
    functions += (jax.lax.erf, jax.lax.erf_inv, jnp.log1p, jnp.sinh, jnp.tan, jnp.cbrt)
    functions += (jax.lax.lgamma, jax.lax.rsqrt, jnp.sqrt, jnp.log, jnp.arccosh)
    return sum(jnp.sum(f(small + 2 * (i > 10))) for i, f in enumerate(functions))


def held(w, x):
    """Constants, where a derivative would not be finite, or is refused."""
    constant = jax.lax.stop_gradient(x)
    roots, fixed = jnp.sqrt(constant - constant), eqxi.nondifferentiable(constant)
    return jnp.sum(x**2 * (1 + roots + fixed)) + jnp.sum((w @ x) ** 3)


def solver(w, x):
    operator = lx.MatrixLinearOperator(20 * jnp.eye(len(x)) + jnp.outer(x, x) @ w)
    return jnp.sum(lx.linear_solve(operator, x).value ** 2)


FUNCTIONS = [
    held,
    solver,
    loops,
    choices,
    algebra,
    named,
    products,
    derivative,
    entrywise,
]
FUNCTIONS += [lambda w, x: jnp.sum(w @ x), lambda w, x: jnp.sum(w)]


@pytest.mark.slow(but=("held", "choices", "derivative", "<lambda>*"))
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_equals_nested_derivatives(function):
    """The Laplacian, and its derivatives in the point and in what is closed over."""

    def by_taylor(w, x):
        return tx.laplacian(ft.partial(function, w), x, throw=False)[2].value

    def nested(w, x):
        def second(e):
            slope = lambda y: jax.jvp(ft.partial(function, w), (y,), (e,))[1]  # noqa: E731
            return jax.jvp(slope, (x,), (e,))[1]

        return jnp.sum(jax.vmap(second)(np.eye(N)))

    @jax.jit
    def both(w, x):
        return [jax.value_and_grad(each, (0, 1))(w, x) for each in (by_taylor, nested)]

    found, expected = both(W, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11 * np.max(np.abs(b)))


def network(w, x):
    return jnp.sum(jnp.tanh(w @ jnp.tanh(w @ x)) ** 2)


@pytest.mark.slow(but="float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradient(dtype):
    w, x = W.astype(dtype), X.astype(dtype)

    @jax.jit
    def run(w, x):
        return tx.laplacian(ft.partial(network, w), x)

    value, gradient, solution = run(w, x)
    hidden = np.tanh(W @ X)
    outer = np.tanh(W @ hidden)
    inner, slope = 1 - hidden**2, 2 * outer * (1 - outer**2)
    jacobian = W @ (inner[:, None] * W)
    bent = 2 * (1 - outer**2) * (1 - 3 * outer**2) @ np.sum(jacobian**2, axis=1)
    exact = bent + slope @ (W @ (-2 * hidden * inner * np.sum(W**2, axis=1)))
    tolerance = 50 * np.finfo(dtype).eps
    assert value.dtype == gradient.dtype == solution.value.dtype == dtype
    np.testing.assert_allclose(value, np.sum(outer**2), rtol=tolerance)
    np.testing.assert_allclose(
        gradient, slope @ jacobian, rtol=0, atol=tolerance * np.max(np.abs(slope))
    )
    np.testing.assert_allclose(solution.value, exact, rtol=tolerance)
    assert solution.std_err == 0
    assert solution.stats["num_matvecs"] == N


@eqx.filter_jit
def estimates(w, x, keys, k):
    def one(key):
        def value(w, x):
            solution = tx.laplacian(ft.partial(network, w), x, k=k, key=key, throw=False)[
                2
            ]
            return solution.value, (solution.std_err, solution.stats["samples"])

        (found, rest), slopes = jax.value_and_grad(value, (0, 1), has_aux=True)(w, x)
        return found, *rest, *map(jnp.sum, slopes)

    return jax.lax.map(one, keys)


def test_random_directions():
    """Unbiased with its derivatives (5 z-scores, false alarms once in 10^5 runs), the
    mean of its samples, with the root-mean-square error that its bar says."""
    value, std_err, samples, *slopes = estimates(W, X, KEYS, 5)

    def exact(w, x):
        return jnp.trace(jax.hessian(ft.partial(network, w))(x))

    expected, exact_slopes = jax.jit(jax.value_and_grad(exact, (0, 1)))(W, X)
    assert z_score(value, expected) < 5
    for found, true in zip(slopes, exact_slopes, strict=True):
        assert z_score(found, np.sum(true)) < 5
    value, std_err, samples = map(np.asarray, (value, std_err, samples))
    np.testing.assert_allclose(np.mean(samples, axis=1), value, rtol=1e-10)
    covered = np.abs(value - expected) < 2.78 * std_err  # Student's t, 4 degrees
    assert np.mean(covered) > 0.93


@pytest.mark.slow
def test_as_the_trace_of_the_hessian():
    """The same directions, so the same samples; blocks of them, and one more."""
    w, x = hermitian(2, np.linspace(0, 2, 136)), np.cos(np.arange(136.0))

    @ft.partial(jax.jit, static_argnums=2)
    def both(w, key, k):
        fn, estimator = ft.partial(network, w), tx.HutchinsonEstimator()
        found = tx.laplacian(fn, x, k=k, key=key)[2]
        return found, tx.trace(tx.hessian(fn, x), estimator, k=k, key=key)

    for k in (1, 129):
        found, expected = jax.tree.map(np.asarray, both(w, KEYS[0], k))
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-10)
        samples = [solution.stats["samples"] for solution in (found, expected)]
        np.testing.assert_allclose(*samples, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.std_err, expected.std_err, rtol=1e-8)
        assert found.stats["num_matvecs"] == k
    budget = tx.Adaptive(rtol=0.1, max_k=64)

    @jax.jit
    def others(w, key):
        fn = ft.partial(network, w)
        adaptive = tx.laplacian(fn, x, k=budget, key=key, throw=False)[2]
        return adaptive, tx.laplacian(fn, x)[2].value, jnp.trace(jax.hessian(fn)(x))

    adaptive, exact, whole = others(w, KEYS[0])
    assert np.abs(adaptive.value - exact) < 5 * adaptive.std_err
    np.testing.assert_allclose(exact, whole, rtol=1e-10)


def test_error_bar_is_not_computed_where_it_is_not_read():
    def value(w, x, read):
        solution = tx.laplacian(ft.partial(network, w), x, k=5, key=KEYS[0])[2]
        return read(solution)

    flops = [
        jax.jit(ft.partial(value, read=read)).lower(W, X).compile().cost_analysis()
        for read in (lambda s: s.value, lambda s: (s.value, s.std_err))
    ]
    assert flops[0]["flops"] < 0.6 * flops[1]["flops"]


@pytest.mark.slow
def test_trees_and_batches():
    tree = {"a": np.zeros((2, 3)), "b": np.zeros(1)}
    unravel = jax.flatten_util.ravel_pytree(tree)[1]

    def fn(tree):
        return network(W, jax.flatten_util.ravel_pytree(tree)[0])

    def run(x, key):
        value, gradient, solution = tx.laplacian(fn, unravel(x), k=3, key=key)
        assert jax.tree.structure(gradient) == jax.tree.structure(tree)
        return value, gradient, solution.value, solution.std_err

    points = np.stack([X, 2 * X, -X])
    batched, single = jax.jit(jax.vmap(run))(points, KEYS[:3]), jax.jit(run)
    for i in range(3):
        alone = single(points[i], KEYS[i])
        expected = jax.tree.leaves(alone)
        for found, one in zip(jax.tree.leaves(batched), expected, strict=True):
            np.testing.assert_allclose(found[i], one, rtol=1e-9, atol=1e-12)


EXECUTIONS = {
    "one by one": tx.Local(block_size=1),
    "two devices": tx.Sharded(tx.probe_mesh(jax.devices()[:2])),
    "eight devices": tx.Sharded(tx.probe_mesh(), block_size=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
def test_on_meshes(execution):
    """The answers, samples and slopes of one device in one block: exact ones, those of 19
    directions, which no mesh divides, and of functions with a solve inside."""

    def run(w, x, execution):
        def value(w):
            fn, sum_of_both = ft.partial(network, w), lambda x: fn(x) + solver(w, x)
            exact = tx.laplacian(sum_of_both, x, execution=execution, throw=False)[2]
            estimate = tx.laplacian(
                fn, x, k=19, key=KEYS[0], execution=execution, throw=False
            )[2]
            total = exact.value + estimate.value
            return total, (exact.value, estimate.stats["samples"], estimate.std_err)

        return jax.value_and_grad(value, has_aux=True)(w)

    w, x = hermitian(2, np.linspace(0, 2, 20)), np.cos(np.arange(20.0))
    both = jax.jit(lambda w, x: [run(w, x, each) for each in (execution, tx.Local())])
    found, expected = both(w, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11 * np.max(np.abs(b)))


def wave(w, x):
    """A complex function, with a modulus, a real part and products of conjugates."""
    hidden = jnp.tanh(w @ x + 1j * (w.T @ x))
    phase = jnp.exp(1j * jnp.sum(x**2) + jnp.sum(jnp.log(jnp.cosh(0.3 * hidden))))
    rest = jax.lax.complex(jnp.sin(x[0]), x[1] ** 3) + jnp.vdot(hidden, hidden * x)
    return phase * jnp.abs(hidden[0]) + rest + hidden[1].real


def test_complex_function():
    """Against the Laplacians of the two parts: exact, with its derivative, and by random
    directions, of a fixed and an adaptive budget."""

    def of_parts(w, x):
        parts = [lambda x: wave(w, x).real, lambda x: wave(w, x).imag]
        real, imag = (jnp.trace(jax.hessian(part)(x)) for part in parts)
        slopes = [jax.grad(part)(x) for part in parts]
        return real + 1j * imag, slopes[0] + 1j * slopes[1]

    def by_taylor(w, x):
        value, gradient, solution = tx.laplacian(ft.partial(wave, w), x)
        return solution.value, (value, gradient, solution.std_err)

    @jax.jit
    def run(w, x):
        found, expected = by_taylor(w, x), of_parts(w, x)
        slopes = [
            jax.grad(lambda w, f=f: jnp.abs(f(w, x)[0]) ** 2)(w)
            for f in (by_taylor, of_parts)
        ]
        return found, expected, slopes

    (exact, (value, gradient, std_err)), (true, true_gradient), slopes = run(W, X)
    assert np.allclose(value, wave(W, X), rtol=1e-14)
    assert np.allclose(gradient, true_gradient, rtol=1e-12)
    assert np.allclose(exact, true, rtol=1e-12)
    assert std_err == 0
    assert np.allclose(*slopes, rtol=1e-9)

    @eqx.filter_jit
    def over_keys(w, x, keys, k):
        def one(key):
            fn, settings = ft.partial(wave, w), {"key": key, "throw": False}
            solution = tx.laplacian(fn, x, k=k, **settings)[2]
            return solution.value, solution.std_err, solution.interval()

        return jax.lax.map(one, keys)

    values, std_errs, (low, high) = over_keys(W, X, KEYS, 4)
    assert z_score(values, true) < 5
    assert np.isrealobj(std_errs)
    for part in (np.real, np.imag):
        inside = (part(low) <= part(true)) & (part(true) <= part(high))
        assert np.mean(inside) > 0.93
    rule = tx.Adaptive(atol=1e9, max_k=6, round_size=4, min_samples=4)
    adaptive, *_ = over_keys(W, X, KEYS[:2], rule)
    assert np.allclose(adaptive, values[:2], rtol=1e-12)


def test_numbers_are_points():
    for point in (1.0, np.float32(1.0), {"x": 1.0}):
        fn = lambda x: jax.tree.leaves(x)[0] ** 3  # noqa: E731
        value, gradient, solution = tx.laplacian(fn, point)
        assert np.allclose([value, solution.value], [1, 6])
        assert np.allclose(jax.tree.leaves(gradient), 3)


def test_bad_input():
    fn = ft.partial(network, W)
    with pytest.raises(TypeError, match=r"`x` must be .* Found leaves of \['int"):
        tx.laplacian(fn, np.arange(N))
    with pytest.raises(TypeError, match="must return a floating-point scalar"):
        tx.laplacian(jnp.sin, X)
    with pytest.raises(ValueError, match="`key` is missing"):
        tx.laplacian(fn, X, k=2)
    with pytest.raises(ValueError, match="`k` must be at least 1"):
        tx.laplacian(fn, X, k=0, key=KEYS[0])
    mesh = jax.make_mesh((2, 2), ("probes", "rows"))
    with pytest.raises(ValueError, match="must not split vectors by `rows`"):
        tx.laplacian(fn, X, execution=tx.Sharded(mesh, rows="rows"))
    with pytest.raises(eqx.EquinoxRuntimeError, match="finite"):
        tx.laplacian(lambda x: jnp.sum(jnp.sqrt(x)), np.zeros(N))


@pytest.mark.slow
def test_half_precision():
    """A sum over 40 directions of 3840 would overflow; and the bar is of its rounding."""
    fn = lambda x: 30 * jnp.sum(x * x)  # noqa: E731
    run = jax.jit(lambda x: tx.laplacian(fn, x, k=40, key=KEYS[0])[2])
    solution = run(np.zeros(64, np.float16))
    assert solution.std_err > 3840 * float(np.finfo(np.float16).eps)
    assert np.abs(solution.value - 3840.0) < 4 * solution.std_err
