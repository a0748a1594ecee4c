"""Extreme eigenvalues: right, with intervals that hold, and few matvecs."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse.linalg as sl

import traceax as tx

from ..helpers import hermitian, matrix_free


N, NUM = 100, 4
KEY = jr.key(0)


@ft.partial(jax.jit, static_argnames=("num", "which", "k"))
def pairs_of(matrix, key, rtol=1e-4, *, num=NUM, which="largest", k=1000):
    operator = matrix_free(matrix, tx.hermitian_tag)
    settings = {"which": which, "k": k, "rtol": rtol, "key": key}
    return tx.eigsh(operator, num, throw=False, **settings)


def eigenvalues_of(matrix):
    """In double precision, descending: those of the rounded matrix."""
    return np.linalg.eigvalsh(np.asarray(matrix).astype(complex))[::-1]


UNIFORM = np.linspace(-1, 1, N)
SPECTRA = {
    "uniform": UNIFORM,
    "decaying": 1 / np.arange(1, N + 1) ** 2,
    "double": np.concatenate([[2, 2, 1.5, 1.5], UNIFORM[4:]]),
    "condition": np.logspace(-12, 0, N),
    "low-rank": np.concatenate([[3, 2], np.zeros(N - 2)]),
    "identity": np.ones(N),
    "zero": np.zeros(N),
    "negative": -np.linspace(1, 100, N),
    "tiny": 1e-20 * UNIFORM,
    "huge": 1e20 * UNIFORM,
}
DTYPES = np.float64, np.float32, np.complex64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_each_interval_contains_its_eigenvalue(spectrum, dtype):
    """A claim about certainty, so each of 9 keys and tolerances must bear it. In
    none of these spectra a value is missed. Also the residuals are true, and the vectors
    orthonormal."""
    matrix = jnp.asarray(hermitian(1, SPECTRA[spectrum], dtype))
    exact, eps = eigenvalues_of(matrix), float(jnp.finfo(dtype).eps)
    # NumPy's own error.
    slack = 4 * np.finfo(float).eps * np.max(np.abs(exact))
    for seed in range(9):
        pairs = pairs_of(matrix, jr.key(seed), [1e-2, 1e-4, 0.0][seed % 3])
        assert pairs.successful
        low, high = (np.asarray(x, float) for x in pairs.interval())
        assert np.all(low - slack <= exact[:NUM]), (low, exact[:NUM])
        assert np.all(exact[:NUM] <= high + slack)
        vectors = np.asarray(pairs.vectors).astype(complex).T
        gram = vectors.conj().T @ vectors
        assert np.max(np.abs(gram - np.eye(NUM))) < 40 * eps
        scale = float(np.max(np.abs(exact)))
        errors = np.asarray(matrix).astype(complex) @ vectors - vectors * pairs.values
        residuals = np.linalg.norm(errors / (scale or 1), axis=0) * scale
        assert np.all(np.abs(residuals - pairs.residuals) <= 40 * eps * scale)
    assert pairs.values.dtype == jnp.finfo(dtype).dtype
    # The last one asked for all digits.
    assert np.all(high - low <= 6 * (42 + N**0.5) * eps * scale)


def test_which_end():
    matrix = jnp.asarray(hermitian(2, np.linspace(-3, 2, N)))
    exact = eigenvalues_of(matrix)
    smallest = pairs_of(matrix, KEY, 1e-9, which="smallest")
    np.testing.assert_allclose(smallest.values, exact[::-1][:NUM], atol=1e-12)
    both = pairs_of(matrix, KEY, 1e-9, num=5, which="both")
    np.testing.assert_allclose(both.values, exact[[0, 1, 2, -2, -1]], atol=1e-12)
    assert smallest.successful
    assert both.successful


def laplacian_2d(side):
    line = 2 - 2 * np.cos(np.arange(1, side + 1) * np.pi / (side + 1))
    return -(line[:, None] + line).ravel()


@pytest.mark.parametrize("num", [1, 3, 10])
@pytest.mark.parametrize("rtol", [1e-4, 1e-8])
def test_matvecs_compared_with_scipy(num, rtol):
    """At most half as many again; on a grid, where most eigenvalues are double and SciPy
    misses some, no more. One program for all three spectra."""
    n = 1600
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((n // 4, n // 4))
    semicircle = np.linalg.eigvalsh(normal + normal.T)
    spectra = {
        "linear": (np.linspace(0, 1, n), 1.5),
        "grid": (laplacian_2d(40), 1.5),
        "semicircle": (np.concatenate([semicircle, np.zeros(3 * n // 4)]), 1.5),
    }
    for name, (eigenvalues, most) in spectra.items():
        count = 0

        def product(v, eigenvalues=eigenvalues):
            nonlocal count
            count += 1
            return eigenvalues * v

        operator = sl.LinearOperator((n, n), matvec=product, dtype=float)
        sl.eigsh(operator, num, which="LA", tol=rtol, v0=rng.standard_normal(n))
        pairs = on_diagonal(eigenvalues, rtol, num)
        exact = np.sort(eigenvalues)[::-1][:num]
        error = np.max(np.abs(pairs.values - exact)) / np.max(np.abs(eigenvalues))
        assert pairs.successful, name
        assert error < rtol / 10, name
        assert pairs.matvecs <= most * count, f"{name}: {pairs.matvecs}, SciPy {count}"


@ft.partial(jax.jit, static_argnames="num")
def on_diagonal(diagonal, rtol, num):
    operator = tx.as_operator(
        lambda v: diagonal * v, like=diagonal, tags=lx.symmetric_tag
    )
    return tx.eigsh(operator, num, k=4000, rtol=rtol, key=KEY, throw=False)


@pytest.mark.parametrize("k", [12, 36, 1000])
def test_matvecs_are_counted(k):
    """By the host, which makes them."""
    matrix = hermitian(3, np.linspace(0, 1, N))
    count = 0

    def matmat(x):
        nonlocal count
        count += x.shape[1]
        return matrix @ x

    host = sl.LinearOperator(
        (N, N), matvec=lambda v: matmat(v[:, None])[:, 0], matmat=matmat, dtype=float
    )
    operator = tx.as_operator(host, tags=lx.symmetric_tag)
    count = 0
    pairs = tx.eigsh(operator, NUM, k=k, key=KEY, throw=False)
    assert count == pairs.matvecs <= k
    assert bool(pairs.successful) == (k == 1000)
    # The intervals of values that did not converge hold, too: each has an eigenvalue.
    low, high = pairs.interval()
    exact = eigenvalues_of(matrix)[:, None]
    assert np.all(np.any((low <= exact) & (exact <= high), axis=0))


def test_budget_that_is_too_small():
    matrix = hermitian(3, np.linspace(0, 1, N))
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
    pairs = tx.eigsh(operator, NUM, k=36, key=KEY, throw=False)
    assert pairs.result == tx.RESULTS.not_converged
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"(?s)raise `k`.* after 36 matvec"):
        tx.eigsh(operator, NUM, k=36, key=KEY)


@pytest.mark.parametrize("which", ["largest", "smallest", "both"])
def test_small_operators_are_exact(which):
    matrix = hermitian(4, np.arange(10.0))
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
    pairs = tx.eigsh(operator, 3, which=which)
    order = {"largest": [9, 8, 7], "smallest": [0, 1, 2], "both": [9, 8, 0]}[which]
    np.testing.assert_allclose(pairs.values, order, atol=1e-13)
    assert pairs.stats["exact"]
    assert pairs.matvecs == 10
    assert np.all(pairs.residuals < 1e-13)
    everything = tx.eigsh(operator, 10, which=which)
    exact = np.arange(10.0)
    np.testing.assert_allclose(np.sort(everything.values), exact, atol=1e-13)


def test_trees():
    def loss(parameters):
        w, b = parameters["w"], parameters["b"]
        return jnp.sum(jnp.cosh(w * jnp.arange(60).reshape(6, 10))) + jnp.sum(b * w[0])

    parameters = {"w": jnp.zeros((6, 10)), "b": jnp.ones(10)}
    operator = tx.hessian(loss, parameters)
    pairs = tx.eigsh(operator, 2, key=KEY, rtol=1e-8)
    assert jax.tree.map(jnp.shape, pairs.vectors) == {"w": (2, 6, 10), "b": (2, 10)}
    first = jax.tree.map(lambda x: x[0], pairs.vectors)
    for image, part in zip(
        jax.tree.leaves(operator.mv(first)), jax.tree.leaves(first), strict=True
    ):
        np.testing.assert_allclose(image, pairs.values[0] * part, atol=1e-4)
    np.testing.assert_allclose(pairs.values[0], 59.0**2, rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_derivatives(dtype):
    """`u* dA u`, in both modes; NaN for the double eigenvalue, and only there."""
    spectrum = np.concatenate([[5, 4, 3, 3], np.linspace(-1, 1, N - 4)])
    matrix = hermitian(5, spectrum, dtype)
    _, vectors = np.linalg.eigh(matrix)
    change = hermitian(6, np.linspace(0, 1, N), dtype)
    slopes = np.einsum("na,nm,ma->a", vectors.conj(), change, vectors).real[::-1]

    def values(x):
        return pairs_of(matrix + x * change, KEY, 1e-10).values

    value, forward = jax.jvp(values, (0.0,), (1.0,))
    reverse = jax.jit(jax.vmap(jax.vjp(values, 0.0)[1]))(jnp.eye(NUM))[0]
    np.testing.assert_allclose(value, spectrum[:NUM], atol=1e-12)
    for slope in forward, reverse:
        np.testing.assert_allclose(slope[:2], slopes[:2], rtol=1e-8)
        assert np.all(np.isnan(slope[2:]))


def test_what_has_no_derivative_refuses_it():
    matrix = jnp.asarray(hermitian(1, UNIFORM))

    def read(name, stop=lambda x: x):
        def fn(x):
            part = getattr(stop(pairs_of(x * matrix, KEY)), name)
            return jnp.sum(jnp.stack(jax.tree.leaves(part() if callable(part) else part)))

        return fn

    for name in "vectors", "residuals", "interval":
        for derivative in jax.grad, jax.jacfwd:
            with pytest.raises(NotImplementedError, match="have no derivative"):
                derivative(read(name))(1.0)
        assert jax.grad(read(name, stop=jax.lax.stop_gradient))(1.0) == 0
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(read("values"))(1.0)
    # Whoever reads vectors without a derivative gets them.
    assert jnp.isfinite(jax.jit(read("vectors"))(1.0))


def test_batches():
    matrices = jnp.stack([jnp.asarray(hermitian(i, i + UNIFORM)) for i in range(3)])
    pairs = jax.vmap(lambda matrix: pairs_of(matrix, KEY))(matrices)
    assert pairs.vectors.shape == (3, NUM, N)
    assert np.all(pairs.successful)
    for i in range(3):
        alone = pairs_of(matrices[i], KEY)
        np.testing.assert_allclose(pairs.values[i], alone.values, rtol=1e-12)
        assert pairs.matvecs[i] == alone.matvecs
    assert "a batch of shape (3,)" in repr(pairs)


def meshes():
    devices = jax.devices()
    kinds = (jax.sharding.AxisType.Auto,) * 2
    grid = jax.make_mesh((2, 4), ("probes", "rows"), devices=devices, axis_types=kinds)
    return tx.Sharded(tx.probe_mesh()), tx.Sharded(grid, rows="rows")


@pytest.mark.parametrize("i", [0, 1])
def test_meshes(i):
    """Eight devices share the columns, or two of them and four the rows."""
    matrix = jnp.asarray(hermitian(1, SPECTRA["double"]))

    def call(x, execution):
        operator = matrix_free(x * matrix, lx.symmetric_tag)
        settings = {"key": KEY, "throw": False, "rtol": 1e-8}
        return tx.eigsh(operator, NUM, execution=execution, **settings)

    def slope(x, execution):
        return jax.grad(lambda x: jnp.sum(call(x, execution).values ** 2))(x)

    on_mesh, alone = call(1.0, meshes()[i]), call(1.0, tx.Local())
    np.testing.assert_allclose(on_mesh.values, alone.values, atol=1e-12)
    assert on_mesh.successful
    assert np.all(on_mesh.residuals < 1e-7)
    gram = on_mesh.vectors @ on_mesh.vectors.T
    np.testing.assert_allclose(gram, np.eye(NUM), atol=1e-12)
    assert np.isnan(slope(1.0, meshes()[i]))


def test_an_operator_that_is_not_what_it_says():
    general = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)))
    assert pairs_of(general, KEY).result == tx.RESULTS.not_converged
    broken = pairs_of(general.at[3, 3].set(jnp.nan), KEY)
    assert broken.result == tx.RESULTS.nonfinite_product
    assert broken.matvecs < 100


def test_half_precision():
    matrix = jnp.asarray(hermitian(1, SPECTRA["double"]), jnp.bfloat16)
    pairs = pairs_of(matrix, KEY, 1e-2)
    exact = eigenvalues_of(matrix.astype(float))[:NUM]
    low, high = pairs.interval()
    assert pairs.values.dtype == jnp.float32
    assert np.all((low <= exact) & (exact <= high))


def test_print():
    matrix = hermitian(4, np.arange(10.0))
    pairs = tx.eigsh(jnp.asarray(matrix), 2, which="both")
    lines = repr(pairs).splitlines()
    assert lines[0] == "Eigenvalues, the 2 at both ends"
    assert lines[-1] == "  cost  10 matvecs"
    assert float(lines[1].split()[1]) == pytest.approx(9)
    assert " +- " in lines[1]
    shapes = repr(jax.eval_shape(lambda: pairs))
    assert "float64" in shapes
    assert "10 matvecs" not in shapes


SYMMETRIC = jnp.asarray(hermitian(1, UNIFORM))


@pytest.mark.parametrize(
    ("args", "settings", "exception", "parts"),
    [
        ((SYMMETRIC, 0), {}, ValueError, ["`num`", "at least 1", "0"]),
        ((SYMMETRIC, N + 1), {}, ValueError, ["`num`", "size of the operator, 100"]),
        ((SYMMETRIC, 2.0), {}, TypeError, ["`num`", "integer", "2.0"]),
        ((SYMMETRIC, True), {}, TypeError, ["`num`", "True"]),
        ((jnp.triu(SYMMETRIC), 2), {}, ValueError, ["`operator`", "symmetric_tag"]),
        ((SYMMETRIC[:5], 2), {}, ValueError, ["`operator`", "square"]),
        ((SYMMETRIC, 2), {"which": "LA"}, ValueError, ["`which`", "'LA'", '"largest"']),
        ((SYMMETRIC, 2), {"which": 1}, ValueError, ["`which`", "1"]),
        ((SYMMETRIC, 1), {"which": "both"}, ValueError, ["`num`", "both"]),
        ((SYMMETRIC, 5), {"k": 12}, ValueError, ["`k`", "at least 13", "12"]),
        ((SYMMETRIC, 5), {"k": 1e3}, TypeError, ["`k`", "int(1000.0)"]),
        ((SYMMETRIC[:9, :9], 5), {"k": 8}, ValueError, ["`k`", "at least 9"]),
        ((SYMMETRIC, 5), {"rtol": -1.0}, ValueError, ["`rtol`", "-1.0", "1e-4"]),
        ((SYMMETRIC, 5), {"rtol": "x"}, TypeError, ["`rtol`", "x"]),
        ((SYMMETRIC, 5), {"key": None}, ValueError, ["`key`", "missing"]),
        ((SYMMETRIC, 5), {"key": 0}, TypeError, ["`key`", "int"]),
        ((SYMMETRIC, 5), {"execution": 2}, TypeError, ["`execution`", "2"]),
        ((SYMMETRIC, 5), {"throw": 1}, TypeError, ["`throw`", "1"]),
    ],
)
def test_bad_input(args, settings, exception, parts, as_users_call):
    with pytest.raises(exception) as error:
        tx.eigsh(*args, **{"key": KEY} | settings)
    for part in parts:
        assert part in str(error.value)


def test_traced_numbers():
    with pytest.raises(TypeError, match="`num` must be a Python integer"):
        jax.jit(lambda num: tx.eigsh(SYMMETRIC, num, key=KEY))(2)
