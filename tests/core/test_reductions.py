"""Several reductions at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from traceax._core.reductions import reduce_together


def both(x):
    return reduce_together((x**2, jnp.sin(x)))


@pytest.mark.parametrize("m", [1, 50])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_sums_and_their_derivatives(m, dtype):
    x, v = np.random.default_rng(m).standard_normal((2, 3, m)).astype(dtype)
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    close = {"rtol": tolerance, "atol": tolerance * m}
    square, sine = jax.jit(jax.vmap(both))(x)
    assert np.allclose(square, np.sum(x**2, axis=1), **close)
    assert np.allclose(sine, np.sum(np.sin(x), axis=1), **close)

    derivative = lambda x, v: jax.jvp(both, (x,), (v,))[1]  # noqa: E731
    square, sine = jax.jit(jax.vmap(derivative))(x, v)
    assert np.allclose(square, np.sum(2 * x * v, axis=1), **close)
    assert np.allclose(sine, np.sum(np.cos(x) * v, axis=1), **close)
    if dtype != np.complex128:
        hessian = jax.jit(jax.vmap(jax.hessian(lambda x: both(x)[1] ** 2)))(x)
        slopes = np.cos(x)
        curvature = -np.sin(x) * np.sum(np.sin(x), axis=1, keepdims=True)
        expected = slopes[:, :, None] * slopes[:, None] + curvature[:, None] * np.eye(m)
        assert np.allclose(hessian, 2 * expected, **close)


def test_each_term_has_its_operation():
    x = np.random.default_rng(0).standard_normal((50, 2, 3))
    operations = jax.lax.add, jax.lax.max
    total, largest = jax.jit(lambda x: reduce_together((x, jnp.abs(x)), operations))(x)
    assert np.allclose(total, np.sum(x, axis=0))
    assert np.array_equal(largest, np.max(np.abs(x), axis=0))


def test_derivative_of_a_largest_term_beside_a_constant():
    x = np.random.default_rng(0).standard_normal(50)
    operations = jax.lax.max, jax.lax.add
    largest = lambda x: reduce_together((x**2, jnp.ones(50)), operations)[0]  # noqa: E731
    (at,) = np.nonzero(x**2 == np.max(x**2))
    slopes = jax.jit(jax.grad(largest))(x)
    assert np.allclose(slopes[at], 2 * x[at])
    assert np.sum(slopes != 0) == 1


def test_a_vector_counts_for_all_entries_of_arrays():
    x = np.random.default_rng(0).standard_normal((50, 2, 3))
    operations = jax.lax.max, jax.lax.add
    largest, total = reduce_together((x, x[:, 0, 0]), operations)
    assert np.array_equal(largest, np.max(np.append(x, 0 * x[:1], 0), axis=0))
    assert np.allclose(total, np.full((2, 3), np.sum(x[:, 0, 0])))


@pytest.mark.parametrize("m", [4000, 1_000_000])
def test_sums_of_many_equal_terms_keep_their_digits(m):
    """One after another, a million additions in float32 lose three digits more."""
    x = np.full(m, 1 / 3, np.float32)
    total, square = reduce_together((x, x**2))
    assert np.allclose(total, m * float(x[0]), rtol=3e-5, atol=0)
    assert np.allclose(square, m * float(x[0]) ** 2, rtol=3e-5, atol=0)
