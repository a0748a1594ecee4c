"""A vector field and its divergence from one evaluation: exact, and by random probes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, z_score


N, NUM_KEYS = 12, 400
KEYS = jr.split(jr.key(20261122), NUM_KEYS)
TREE = {"a": jnp.zeros((2, 5)), "b": jnp.zeros(2)}
flat, unravel = jax.flatten_util.ravel_pytree(TREE)


def case(dtype=np.float64):
    matrix = hermitian(3, np.linspace(-1, 2, N)) + np.triu(np.ones((N, N)), 1) / N
    return matrix.astype(dtype), np.linspace(-1, 1, N).astype(dtype)


def field(matrix, x):
    return jnp.tanh(matrix @ x)


def reference(matrix, x):
    """The divergence of `field`, its gradients in `matrix` and in `x`."""
    matrix, x = matrix.astype(float), x.astype(float)
    t = np.tanh(matrix @ x)
    first, second = 1 - t**2, -2 * t * (1 - t**2)
    weights = second * np.diag(matrix)
    in_matrix = np.diag(first) + np.outer(weights, x)
    return first @ np.diag(matrix), in_matrix, weights @ matrix


def divergence(matrix, x, key, k, throw=True):
    velocity, solution = tx.divergence(
        lambda x: field(matrix, x), x, k=k, key=key, throw=throw
    )
    return solution.value, (velocity, solution)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exact(dtype):
    matrix, x = case(dtype)
    grads = eqx.filter_jit(jax.value_and_grad(divergence, (0, 1), has_aux=True))
    (value, (velocity, solution)), slopes = grads(matrix, x, None, None)
    tolerance = 30 * np.finfo(dtype).eps
    assert velocity.dtype == value.dtype == dtype
    np.testing.assert_allclose(velocity, np.tanh(matrix @ x), rtol=tolerance)
    for found, expected in zip((value, *slopes), reference(matrix, x), strict=True):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)
    assert solution.std_err <= tolerance
    assert solution.stats["num_matvecs"] == N


def test_unbiased():
    """The value, its derivatives, and a derivative of those; 5 z-scores, false alarms
    once in 10^5 runs."""
    matrix, x = case()
    direction = np.cos(np.arange(N))

    def value(matrix, x, key):
        return divergence(matrix, x, key, 4, throw=False)[0]

    def curvature(matrix, x, key):
        slope = lambda x: jnp.sum(jax.grad(value)(matrix, x, key))  # noqa: E731
        return jax.jvp(slope, (x,), (direction,))[1]

    def each(key):
        found, slopes = jax.value_and_grad(value, (0, 1))(matrix, x, key)
        return found, *map(jnp.sum, slopes), curvature(matrix, x, key)

    samples = jax.jit(jax.vmap(each))(KEYS)
    exact, *slopes = reference(matrix, x)
    step = 1e-5
    ends = [reference(matrix, x + s * step * direction)[1].sum() for s in (1, -1)]
    expected = (exact, *(slope.sum() for slope in slopes), (ends[0] - ends[1]) / 2 / step)
    for found, true in zip(samples, expected, strict=True):
        assert z_score(found, true) < 5


def test_evaluates_once():
    """Counted on the host."""
    evaluations = []

    @jax.jit
    def run(x, key):
        def fn(x):
            jax.debug.callback(lambda: evaluations.append(1))
            return jnp.sin(x) * jnp.sum(x)

        velocity, solution = tx.divergence(fn, x, k=3, key=key)
        return velocity, solution.value, solution.std_err

    jax.block_until_ready(run(flat + 1, jr.key(0)))
    jax.effects_barrier()
    assert len(evaluations) == 1


@pytest.mark.slow
def test_trees_batches_and_estimators():
    """`vmap` over points and keys is a loop; a PyTree is the vector of its leaves."""
    matrix, x = case()

    def as_tree(x, key):
        fn = lambda tree: unravel(field(matrix, flat_of(tree)))  # noqa: E731
        estimator = tx.XTraceEstimator()
        velocity, solution = tx.divergence(fn, unravel(x), estimator, k=8, key=key)
        return flat_of(velocity), solution.value, solution.std_err

    def as_vector(x, key):
        estimator = tx.XTraceEstimator()
        fn = lambda x: field(matrix, x)  # noqa: E731
        velocity, solution = tx.divergence(fn, x, estimator, k=8, key=key)
        return velocity, solution.value, solution.std_err

    points, keys = jnp.stack([x, 2 * x, -x]), KEYS[:3]
    batched = jax.jit(jax.vmap(as_tree))(points, keys)
    single = jax.jit(as_vector)
    for i in range(3):
        alone = single(points[i], keys[i])
        for found, expected in zip(batched, alone, strict=True):
            np.testing.assert_allclose(found[i], expected, rtol=1e-10)


def flat_of(tree):
    return jax.flatten_util.ravel_pytree(tree)[0]


def test_complex_field():
    """Of a real point: exact, with its derivative; unbiased; and in a PyTree with real
    components."""
    matrix, x = case()

    def waves(matrix, x):
        return (matrix @ x) * jnp.exp(1j * x) + jnp.tanh(matrix.T @ x)

    def reference(matrix, x):
        parts = [lambda x: waves(matrix, x).real, lambda x: waves(matrix, x).imag]
        real, imag = (jnp.trace(jax.jacfwd(part)(x)) for part in parts)
        return real + 1j * imag

    def exact_of(matrix, x):
        velocity, solution = tx.divergence(lambda x: waves(matrix, x), x)
        return solution.value, velocity

    @jax.jit
    def run(matrix, x, keys):
        def one(key):
            fn = lambda x: waves(matrix, x)  # noqa: E731
            solution = tx.divergence(fn, x, k=4, key=key, throw=False)[1]
            return solution.value, solution.std_err

        slopes = [
            jax.grad(lambda m, f=f: jnp.abs(f(m)) ** 2)(matrix)
            for f in (lambda m: exact_of(m, x)[0], lambda m: reference(m, x))
        ]
        return exact_of(matrix, x), reference(matrix, x), slopes, jax.lax.map(one, keys)

    (exact, velocity), true, slopes, (values, std_errs) = run(matrix, x, KEYS)
    assert np.allclose(velocity, waves(matrix, x), rtol=1e-14)
    assert np.allclose(exact, true, rtol=1e-13)
    assert np.allclose(*slopes, rtol=1e-10)
    assert z_score(values, true) < 5
    assert np.isrealobj(std_errs)

    def fn(z):
        return {"x": waves(matrix, z["x"]) * z["t"], "t": z["t"] ** 2}

    point = {"x": x, "t": jnp.asarray(2.0)}
    found = tx.divergence(fn, point)[1].value
    assert np.allclose(found, 2 * true + 4, rtol=1e-13)


def test_constant_components():
    """Of which JAX's derivatives make no arrays."""
    point = {"x": jnp.ones(3), "t": jnp.zeros(())}
    field = lambda z: {"x": jnp.sin(z["x"]), "t": 1.0}  # noqa: E731
    value, solution = tx.divergence(field, point)
    assert value["t"] == 1
    assert np.allclose(solution.value, 3 * np.cos(1))


def test_bad_input():
    with pytest.raises(TypeError, match=r"`x` must be .* Found leaves of \['int"):
        tx.divergence(lambda x: x, jnp.arange(3))
    with pytest.raises(TypeError, match=r"`x` must be .*complex128"):
        tx.divergence(lambda x: x, jnp.ones(3) * 1j)
    with pytest.raises(TypeError, match=r"`x` must be .* Found leaves of \['str'\]"):
        tx.divergence(lambda x: x, "x")
    with pytest.raises(ValueError, match=r"`fn\(x\)` must have the structure"):
        tx.divergence(lambda x: x[:2], jnp.ones(3))
    with pytest.raises(ValueError, match=r"`fn\(x\)` must have the structure"):
        tx.divergence(lambda x: x.astype(jnp.float32), jnp.ones(3))
    with pytest.raises(ValueError, match="`key`"):
        tx.divergence(lambda x: x**2, jnp.ones(3), k=1)
    with pytest.raises(TypeError, match="`k` must be an integer"):
        tx.divergence(lambda x: x**2, jnp.ones(3), k=1.5, key=KEYS[0])
    with pytest.raises(eqx.EquinoxRuntimeError, match="finite"):
        tx.divergence(jnp.sqrt, jnp.zeros(3), k=1, key=KEYS[0])
