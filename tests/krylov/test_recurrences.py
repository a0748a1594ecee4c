"""Lanczos, block Lanczos and Golub-Kahan by their defining identities, and the quadrature
rules by the polynomials that they integrate exactly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from traceax._krylov.block_lanczos import block_lanczos
from traceax._krylov.golub_kahan_recurrence import (
    golub_kahan_advance,
    golub_kahan_run,
    golub_kahan_start,
)
from traceax._krylov.lanczos_recurrence import lanczos
from traceax._numerics.dense import eigh, svd
from traceax._numerics.gram_schmidt import put_row
from traceax._quadrature.tridiagonal import Compression, radau, radau_factor, ritz

from ..helpers import hermitian


N = 60
DTYPES = [np.float32, np.float64, np.complex64, np.complex128]
# Less than full reorthogonalisation, and blocks, in a real and in a complex dtype.
SOME_DTYPES = [np.float32, np.complex128]
every_window_and_dtype = pytest.mark.parametrize(
    ("window", "dtype"),
    [
        *((None, dtype) for dtype in DTYPES),
        *((window, dtype) for window in (4, 0) for dtype in SOME_DTYPES),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
SPECTRA = {
    "flat": np.linspace(1, 3, N),
    "indefinite": np.linspace(-1, 1, N),
    "ill conditioned": np.geomspace(1e-8, 1, N),
    "clustered": np.where(np.arange(N) < 5, 1e3 + np.arange(N), 1.0),
}
every_spectrum = pytest.mark.parametrize("spectrum", SPECTRA)


@eqx.filter_jit
def lanczos_of(matrix, start, num_steps, window=None, eps=1e-16):
    return lanczos(lambda v: matrix @ v, start, num_steps, window=window, eps=eps)


@eqx.filter_jit
def block_lanczos_of(matrix, start, num_steps, eps):
    return block_lanczos(lambda x: matrix @ x, start, num_steps, eps=eps)


@eqx.filter_jit
def golub_kahan_of(matrix, start, num_steps, window=None, eps=1e-16):
    products = (lambda v: matrix @ v), (lambda v: matrix.conj().T @ v)
    state = golub_kahan_start(products[0], start, num_steps)
    settings = {"window": window, "eps": eps}
    state = golub_kahan_advance(*products, state, 0, num_steps, **settings)
    return golub_kahan_run(state, num_steps)


rule = jax.jit(ritz)


@jax.jit
def extended_rule(alpha, beta, end):
    matrix = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    coupling, last = beta[-1:, None], len(beta) - 1
    return eigh(radau(Compression(matrix, coupling, last, *eigh(matrix)), end))


@jax.jit
def extended_factor(diagonal, above, end):
    matrix = jnp.diag(diagonal) + jnp.diag(above[:-1], 1)
    border = jnp.zeros_like(above).at[-1].set(above[-1])
    u, s, _ = svd(matrix)
    return radau_factor(matrix, border, u, s, end)


def as_numpy(run):
    return jax.tree.map(np.asarray, run)


def eps_of(dtype):
    return float(np.finfo(dtype).eps)


def tridiagonal(alpha, beta):
    return np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)


def normal(seed, shape, dtype=np.float64):
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (parts[0] + 1j * parts[1] if is_complex else parts[0]).astype(dtype)


def setup(spectrum, dtype=np.float64):
    return hermitian(0, SPECTRA[spectrum], dtype), normal(1, (N,), dtype)


@every_spectrum
@every_window_and_dtype
def test_lanczos_relation(window, dtype, spectrum):
    matrix, start = setup(spectrum, dtype)
    eps = eps_of(dtype)
    run = as_numpy(lanczos_of(matrix, start, 40, window, eps))
    assert run.basis.dtype == dtype
    basis = run.basis.T
    assert np.allclose(run.norm * basis[:, 0], start, rtol=20 * eps)
    size = np.linalg.norm(matrix)
    rest = matrix @ basis - basis @ tridiagonal(run.alpha, run.beta).astype(dtype)
    assert np.linalg.norm(rest[:, :-1]) < 60 * eps * size
    assert np.abs(np.linalg.norm(rest[:, -1]) - run.beta[-1]) < 20 * eps * size
    if window is None:
        alive = np.linalg.norm(basis, axis=0) > 0
        assert np.allclose(basis.conj().T @ basis, np.diag(alive), atol=20 * eps)


def test_lanczos_is_scale_invariant():
    """Squares of the vectors' entries are beyond float32."""
    matrix, start = setup("flat", np.float32)

    @jax.jit
    def run(scale):
        mv = lambda v: matrix @ (v * scale)  # noqa: E731
        return lanczos(mv, start * scale, 10, eps=1e-7)

    plain, *others = (as_numpy(run(x)) for x in np.float32([1, 1e-25, 1e25]))
    for scale, scaled in zip(np.float32([1e-25, 1e25]), others, strict=True):
        assert np.allclose(scaled.basis, plain.basis, atol=1e-4), scale
        assert np.allclose(scaled.alpha / scale, plain.alpha, rtol=1e-4), scale
        assert np.allclose(scaled.norm / scale, plain.norm, rtol=1e-6), scale


BREAKDOWNS = {
    "identity": (np.ones(N), 1),
    "three eigenvalues": (np.repeat([1.0, 2.0, 5.0], N // 3), 3),
    "rank one plus identity": (np.where(np.arange(N) == 0, 100.0, 1.0), 2),
    "zero": (np.zeros(N), 1),
}


@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("name", BREAKDOWNS)
def test_breakdown_ends_the_run_exactly(name, window):
    values, distinct = BREAKDOWNS[name]
    start = normal(2, (N,))
    run = lanczos_of(np.diag(values), start, 8, window, eps_of(float))
    nodes, vectors = map(np.asarray, rule(run.alpha, run.beta))
    for degree in (1, 2, 7):
        exact = start @ (values**degree * start)
        found = run.norm**2 * np.sum(vectors[0] ** 2 * nodes**degree)
        assert np.allclose(found, exact, rtol=1e-12)
    # Rounding may add a step or two with a coupling of that size, and no more nodes.
    weight = vectors[0] ** 2 > 1e-20
    spread = nodes[:, None] - nodes[weight]
    near = np.min(np.abs(spread), axis=1) < 1e-10 * np.max(np.abs(nodes) + 1)
    assert np.all(near | ~weight)
    assert len(set(np.round(nodes[weight], 8).tolist())) == distinct


def test_zero_start_and_full_space():
    matrix, start = setup("flat")
    run = as_numpy(lanczos_of(matrix, np.zeros(N), N))
    assert all(np.all(x == 0) for x in (run.basis, run.beta, run.norm))
    run = lanczos_of(matrix, start, N)
    nodes, _ = rule(run.alpha, run.beta)
    assert np.allclose(nodes, SPECTRA["flat"], rtol=1e-12)


def test_one_product_for_each_step():
    matrix, start = setup("flat")
    calls = []

    def mv(v):
        jax.debug.callback(lambda: calls.append(1))
        return matrix @ v

    jax.block_until_ready(jax.jit(lambda v: lanczos(mv, v, 37, eps=1e-16).alpha)(start))
    jax.effects_barrier()
    assert len(calls) == 37


def coefficients_and_basis(start):
    found = lanczos_of(setup("ill conditioned")[0], start, 35)
    return found.alpha, found.beta, found.basis


def bidiagonal_and_basis(start):
    found = golub_kahan_of(setup("ill conditioned")[0], start, 10)
    return found.diagonal, found.above, found.right


@pytest.mark.parametrize("run", [coefficients_and_basis, bidiagonal_and_basis])
def test_vmap_and_shard_map(run):
    """With the varying types of `check_vma=True`, and bitwise equal."""
    starts = normal(3, (4, N))
    mesh = jax.make_mesh((1,), ("probes",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        jax.vmap(run), mesh=mesh, in_specs=P("probes"), out_specs=P("probes")
    )
    batched = as_numpy(jax.jit(jax.vmap(run))(starts))
    single = jax.tree.map(lambda *x: np.stack(x), *map(jax.jit(run), starts))
    for x, y, z in zip(batched, single, jax.jit(mapped)(starts), strict=True):
        assert np.allclose(x[:, :10], y[:, :10], rtol=1e-6, atol=1e-9)
        assert np.array_equal(x, z)


@every_spectrum
@pytest.mark.parametrize("dtype", SOME_DTYPES, ids=lambda d: d.__name__)
def test_block_lanczos_relation(dtype, spectrum):
    matrix, _ = setup(spectrum, dtype)
    start, eps = normal(4, (N, 4), dtype), eps_of(dtype)
    run = as_numpy(block_lanczos_of(matrix, start, 7, eps))
    assert run.basis.dtype == dtype
    alive = np.linalg.norm(run.basis, axis=0) > 0
    gram = run.basis.conj().T @ run.basis
    assert np.allclose(gram, np.diag(alive), atol=30 * eps)
    rest = matrix @ run.basis - run.basis @ run.matrix
    size = np.linalg.norm(matrix)
    assert np.linalg.norm(rest[:, :-4]) < 100 * eps * size
    assert np.linalg.norm(run.again - run.matrix) < 100 * eps * size
    assert run.neglected < 100 * eps * size
    assert np.allclose(start, run.basis @ (run.basis.conj().T @ start), atol=60 * eps)


def test_block_lanczos_breaks_down():
    """A start of rank 2, and a matrix with three eigenvalues: six basis vectors."""
    values, _ = BREAKDOWNS["three eigenvalues"]
    start = normal(5, (N, 2)) @ normal(6, (2, 4))
    run = as_numpy(block_lanczos_of(np.diag(values), start, 6, 1e-15))
    assert np.sum(np.linalg.norm(run.basis, axis=0) > 0) == 6
    rest = values[:, None] * run.basis - run.basis @ run.matrix
    assert np.max(np.abs(rest)) < 1e-12
    values = np.linalg.eigvalsh(run.matrix)
    assert 1 - 1e-12 < values[0] < values[-1] < 5 + 1e-12


def test_what_a_breakdown_neglects():
    """Two blocks with a coupling that is below the precision asked for, or above it."""
    matrix, start = np.diag(np.repeat([1.0, 2.0], N // 2)), np.eye(N)[:, :1]
    for coupling, neglected in ((3e-4, 3e-4), (3e-3, 0)):
        matrix[0, -1] = matrix[-1, 0] = coupling
        run = lanczos_of(matrix, start[:, 0], 4, None, 1e-3)
        block = block_lanczos_of(matrix, start, 4, 1e-3)
        for each in (run, block):
            assert np.abs(each.neglected - neglected) < 1e-12


@every_window_and_dtype
def test_golub_kahan_relations(window, dtype):
    eps = eps_of(dtype)
    matrix, start = normal(7, (N, N), dtype), normal(8, (N,), dtype)
    run = as_numpy(golub_kahan_of(matrix, start, 20, window, eps))
    left, right = run.left.T, run.right.T
    assert left.dtype == right.dtype == dtype
    middle = (np.diag(run.diagonal) + np.diag(run.above[:-1], 1)).astype(dtype)
    size = np.linalg.norm(matrix)
    assert np.linalg.norm(matrix @ right - left @ middle) < 60 * eps * size
    rest = matrix.conj().T @ left - right @ middle.conj().T
    assert np.linalg.norm(rest[:, :-1]) < 60 * eps * size
    assert np.abs(np.linalg.norm(rest[:, -1]) - run.above[-1]) < 20 * eps * size
    if window is None:
        for basis in (left, right):
            assert np.allclose(basis.conj().T @ basis, np.eye(20), atol=20 * eps)


@pytest.mark.parametrize("matrix", [3 * np.eye(9), np.zeros((9, 9)), np.eye(9, k=1)])
def test_golub_kahan_breaks_down(matrix):
    run = as_numpy(golub_kahan_of(matrix, normal(9, (9,)), 6, eps=1e-15))
    middle = np.diag(run.diagonal) + np.diag(run.above[:-1], 1)
    assert np.allclose(matrix @ run.right.T, run.left.T @ middle, atol=1e-13)
    assert np.all(np.isfinite(middle))


def test_gauss_and_radau_are_exact_for_polynomials():
    """Degree 2 s - 1 for Gauss with s nodes, 2 s for Gauss-Radau with one more; and not
    one degree further."""
    values, start, s = np.linspace(0.5, 2, N), normal(10, (N,)), 4
    run = lanczos_of(np.diag(values), start, s)
    end = jnp.asarray(0.25)
    extended = extended_rule(run.alpha, run.beta, end)
    assert np.allclose(extended[0][0], end, rtol=1e-13)
    for (nodes, vectors), last in (
        (rule(run.alpha, run.beta), 2 * s - 1),
        (extended, 2 * s),
    ):
        for degree in range(last + 2):
            exact = start @ (values**degree * start)
            weights = np.asarray(vectors)[0] ** 2
            found = run.norm**2 * np.sum(weights * np.asarray(nodes) ** degree)
            assert np.allclose(found, exact, rtol=1e-12, atol=0) == (degree <= last)


def test_radau_is_exact_for_even_polynomials_of_singular_values():
    """As that of the squares: of degree 2 s in these, and not one degree further."""
    values, start, s = np.linspace(0.5, 2, N), normal(10, (N,)), 4
    run = golub_kahan_of(np.diag(values), start, s)
    for end in (0.0, 0.25):
        factor = extended_factor(run.diagonal, run.above, jnp.asarray(end))
        _, nodes, vh = np.linalg.svd(factor)
        assert np.allclose(nodes[-1], end, rtol=1e-13, atol=1e-15)
        for degree in range(2 * s + 2):
            exact = start @ (values ** (2 * degree) * start)
            found = run.norm**2 * (vh[:, 0] ** 2 @ nodes ** (2 * degree))
            assert np.allclose(found, exact, rtol=1e-12, atol=0) == (degree <= 2 * s)


@pytest.mark.parametrize("sizes", [(7,), (4, 3)])
def test_rows_of_a_batch(sizes):
    """In the same row, which takes no scatter, or in a row each; in buffers that are
    mapped or not."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, sum(sizes), 5))
    new, rank = rng.standard_normal((3, 5)), np.arange(3)
    split = lambda x: tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-2))  # noqa: E731
    put = lambda *args: jnp.concatenate(put_row(*args))  # noqa: E731
    for index in (np.array(5), np.array([0, 3, 6])):
        expected = rows.copy()
        expected[rank, index] = new
        batched = jax.jit(jax.vmap(put, in_axes=(0, 0, 0 if index.ndim else None)))
        np.testing.assert_array_equal(batched(split(rows), new, index), expected)
        scattered = "scatter" in batched.lower(split(rows), new, index).as_text()
        assert scattered == (index.ndim > 0)
    parts = [jnp.asarray(part) for part in split(rows[0])]
    shared = jax.vmap(lambda row: put(tuple(parts), row, 2))(new)
    expected = np.stack([rows[0]] * 3)
    expected[:, 2] = new
    np.testing.assert_array_equal(shared, expected)
