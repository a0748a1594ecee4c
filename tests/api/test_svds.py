"""The largest singular values: right, with intervals that hold."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse.linalg as sl

import traceax as tx

from ..helpers import hermitian, matrix_free


ROWS, COLUMNS, NUM = 120, 80, 4
KEY = jr.key(0)


@ft.partial(jax.jit, static_argnames=("k", "num"))
def triplets_of(matrix, key, rtol=1e-4, *, num=NUM, k=1000):
    return tx.svds(matrix_free(matrix), num, k=k, rtol=rtol, key=key, throw=False)


def with_singular_values(values, shape, dtype=np.float64):
    rng = np.random.default_rng(7)
    bases = []
    for n in shape:
        normal = rng.standard_normal((n, len(values)))
        if np.issubdtype(dtype, np.complexfloating):
            normal = normal + 1j * rng.standard_normal((n, len(values)))
        bases.append(np.linalg.qr(normal)[0])
    return ((bases[0] * values) @ bases[1].conj().T).astype(dtype)


UNIFORM = np.linspace(0, 1, COLUMNS)
SPECTRA = {
    "uniform": UNIFORM,
    "decaying": 1 / np.arange(1, COLUMNS + 1) ** 2,
    "double": np.concatenate([[2, 2, 1.5, 1.5], UNIFORM[4:]]),
    "condition": np.logspace(-12, 0, COLUMNS),
    "low-rank": np.concatenate([[3, 2], np.zeros(COLUMNS - 2)]),
    "isometry": np.ones(COLUMNS),
    "zero": np.zeros(COLUMNS),
    "tiny": 1e-20 * UNIFORM,
    "huge": 1e20 * UNIFORM,
}
SHAPES = {
    np.float64: (ROWS, COLUMNS),
    np.float32: (COLUMNS, ROWS),
    np.complex64: (COLUMNS, ROWS),
}


@pytest.mark.parametrize("dtype", SHAPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_each_interval_contains_its_singular_value(spectrum, dtype):
    """For each of 9 keys and tolerances. Tall ones and wide ones; also the residuals are
    true, and the vectors orthonormal."""
    matrix = with_singular_values(SPECTRA[spectrum], SHAPES[dtype], dtype)
    eps, exactly = float(jnp.finfo(dtype).eps), matrix.astype(complex)
    exact = np.linalg.svd(exactly, compute_uv=False)
    scale = float(exact[0])
    slack = 4 * np.finfo(float).eps * scale
    for seed in range(9):
        found = triplets_of(matrix, jr.key(seed), [1e-2, 1e-4, 0.0][seed % 3])
        assert found.successful
        low, high = (np.asarray(x, float) for x in found.interval())
        assert np.all(low - slack <= exact[:NUM]), (low, exact[:NUM])
        assert np.all(exact[:NUM] <= high + slack), (high, exact[:NUM])
        left, right = (np.asarray(x).astype(complex).T for x in (found.left, found.right))
        for basis in left, right:
            gram = basis.conj().T @ basis
            assert np.max(np.abs(gram - np.eye(NUM))) < 40 * eps
        errors = exactly @ right - left * found.values
        back = exactly.conj().T @ left - right * found.values
        both = np.concatenate([errors, back]) / (scale or 1)
        residuals = np.linalg.norm(both, axis=0) * scale
        assert np.all(np.abs(residuals - found.residuals) <= 40 * eps * scale)
    assert found.values.dtype == jnp.finfo(dtype).dtype
    # The last one asked for all digits: relative to the largest value and not its square.
    assert np.all(high - low <= 6 * (42 + ROWS**0.5) * eps * scale)


def test_matvecs_compared_with_scipy():
    """Which runs on A* A: at most half as many again."""
    for spectrum in "uniform", "decaying", "double":
        matrix, count = with_singular_values(SPECTRA[spectrum], (ROWS, COLUMNS)), 0

        def counted(matrix):
            def product(v):
                nonlocal count
                count += 1
                return matrix @ v

            return product

        operator = sl.LinearOperator(
            matrix.shape,
            matvec=counted(matrix),
            rmatvec=counted(matrix.T),
            dtype=float,
        )
        sl.svds(operator, NUM, tol=1e-6, rng=np.random.default_rng(0))
        found = triplets_of(matrix, KEY, 1e-6)
        assert found.successful
        assert found.matvecs <= 1.5 * count, f"{spectrum}: {found.matvecs}, {count}"


@pytest.mark.parametrize("k", [24, 1000])
def test_matvecs_are_counted(k):
    """By the host, which makes them, those with the adjoint as well."""
    matrix, count = with_singular_values(UNIFORM, (ROWS, COLUMNS)), 0

    def counted(matrix):
        def matmat(x):
            nonlocal count
            count += x.shape[1] if x.ndim == 2 else 1
            return matrix @ x

        return matmat

    products, adjoint = counted(matrix), counted(matrix.T)
    host = sl.LinearOperator(
        matrix.shape,
        matvec=products,
        rmatvec=adjoint,
        matmat=products,
        rmatmat=adjoint,
        dtype=float,
    )
    operator = tx.as_operator(host)
    # Whether there is an adjoint is found out once.
    tx.svds(operator, NUM, k=k, key=jr.key(1), throw=False)
    count = 0
    found = tx.svds(operator, NUM, k=k, key=KEY, throw=False)
    assert count == found.matvecs <= k
    assert bool(found.successful) == (k == 1000)
    if k == 24:
        assert found.result == tx.RESULTS.not_converged


@pytest.mark.parametrize("shape", [(9, 30), (30, 9), (9, 9)])
def test_small_operators_are_exact(shape):
    matrix = with_singular_values(np.arange(9.0), shape)
    found = tx.svds(jnp.asarray(matrix), 9)
    np.testing.assert_allclose(found.values, np.arange(9.0)[::-1], atol=1e-13)
    np.testing.assert_allclose(
        (found.left.T * found.values) @ found.right, matrix, atol=1e-12
    )
    assert found.stats["exact"]
    assert found.matvecs == 9


def test_trees():
    matrix = jnp.asarray(with_singular_values(UNIFORM, (ROWS, COLUMNS)))

    def fn(tree):
        image = matrix @ jnp.concatenate([tree["a"].ravel(), tree["b"]])
        return image[:20], image[20:].reshape(10, 10)

    structure = {
        "a": jax.ShapeDtypeStruct((5, 10), matrix.dtype),
        "b": jax.ShapeDtypeStruct((30,), matrix.dtype),
    }
    operator = lx.FunctionLinearOperator(fn, structure)
    found = tx.svds(operator, NUM, key=KEY)
    assert jax.tree.map(jnp.shape, found.right) == {"a": (NUM, 5, 10), "b": (NUM, 30)}
    assert jax.tree.map(jnp.shape, found.left) == ((NUM, 20), (NUM, 10, 10))
    np.testing.assert_allclose(found.values, UNIFORM[::-1][:NUM], atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_derivatives(dtype):
    """`Re(u* dA v)`, in both modes; NaN for a double value and for zero, and only
    there."""
    values = np.concatenate([[5, 4, 4], np.zeros(COLUMNS - 3)])
    matrix = with_singular_values(values, (COLUMNS, ROWS), dtype)
    change = hermitian(6, UNIFORM, dtype)[:, :1] * np.linspace(0, 1, ROWS)
    u, _, vh = np.linalg.svd(matrix)
    slope = (u[:, 0].conj() @ change @ vh[0].conj()).real

    def values_of(x):
        return triplets_of(matrix + x * change, KEY, 1e-10).values

    forward = jax.jvp(values_of, (0.0,), (1.0,))[1]
    reverse = jax.jit(jax.vmap(jax.vjp(values_of, 0.0)[1]))(jnp.eye(NUM))[0]
    for found in forward, reverse:
        np.testing.assert_allclose(found[0], slope, rtol=1e-8)
        assert np.all(np.isnan(found[1:]))


def test_what_has_no_derivative_refuses_it():
    matrix = jnp.asarray(with_singular_values(UNIFORM, (ROWS, COLUMNS)))
    for name in "left", "right", "residuals":
        with pytest.raises(NotImplementedError, match="have no derivative"):
            jax.grad(lambda x, n=name: jnp.sum(getattr(triplets_of(x * matrix, KEY), n)))(
                1.0
            )
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(lambda x: triplets_of(x * matrix, KEY).values[0])(1.0)


def test_batches_and_meshes():
    matrix = jnp.asarray(with_singular_values(SPECTRA["double"], (ROWS, COLUMNS)))
    matrices = jnp.stack([matrix, 2 * matrix[::-1]])
    batch = jax.vmap(lambda matrix: triplets_of(matrix, KEY, 1e-9))(matrices)
    exact = np.array([2, 2, 1.5, 1.5])
    np.testing.assert_allclose(batch.values, [exact, 2 * exact], atol=1e-12)
    assert batch.left.shape == (2, NUM, ROWS)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    grid = jax.make_mesh((2, 4), ("probes", "rows"), axis_types=kinds)
    for execution in tx.Sharded(tx.probe_mesh()), tx.Sharded(grid, rows="rows"):
        found = tx.svds(matrix, NUM, key=KEY, rtol=1e-9, execution=execution)
        np.testing.assert_allclose(found.values, exact, atol=1e-12)
        left, right = found.left.T, found.right.T
        np.testing.assert_allclose(matrix @ right, left * found.values, atol=1e-8)


def test_print():
    found = tx.svds(jnp.diag(jnp.arange(4.0)), 2)
    first, *_, last = repr(found).splitlines()
    assert first == "Singular values, the 2 largest"
    assert last == "  cost  4 matvecs"


MATRIX = jnp.ones((100, 60))


@pytest.mark.parametrize(
    ("settings", "exception", "parts"),
    [
        ({"num": 61}, ValueError, ["`num`", "at most", "60", "61"]),
        ({"num": -1}, ValueError, ["`num`", "-1"]),
        ({"num": None}, TypeError, ["`num`", "None"]),
        ({"k": 23}, ValueError, ["`k`", "at least 24", "23"]),
        ({"rtol": 2.0}, ValueError, ["`rtol`", "2.0"]),
        ({"key": None}, ValueError, ["`key`", "missing"]),
    ],
)
def test_bad_input(settings, exception, parts, as_users_call):
    with pytest.raises(exception) as error:
        tx.svds(MATRIX, **{"num": 4, "key": KEY} | settings)
    for part in parts:
        assert part in str(error.value)


def test_broken_products():
    matrix = np.ones((ROWS, COLUMNS))
    matrix[3, 3] = np.inf
    assert triplets_of(matrix, KEY).result == tx.RESULTS.nonfinite_product
