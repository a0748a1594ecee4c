"""Lanczos, block Lanczos and Golub-Kahan by their defining identities."""

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from traceax._krylov.block_lanczos import block_lanczos
from traceax._krylov.lanczos_recurrence import lanczos
from traceax._quadrature.tridiagonal import ritz

from ..helpers import hermitian
from .recurrences import golub_kahan_of, lanczos_of, N, normal


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
def block_lanczos_of(matrix, start, num_steps, eps):
    return block_lanczos(lambda x: matrix @ x, start, num_steps, eps=eps)


rule = jax.jit(ritz)


def as_numpy(run):
    return jax.tree.map(np.asarray, run)


def eps_of(dtype):
    return float(np.finfo(dtype).eps)


def tridiagonal(alpha, beta):
    return np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)


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
