"""Lanczos, block Lanczos and Golub-Kahan by their defining identities, and the quadrature
rules by the polynomials that they integrate exactly."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from traceax._kernel.golub_kahan import golub_kahan
from traceax._kernel.lanczos import block_lanczos, lanczos
from traceax._kernel.quadrature import radau, ritz

from .helpers import spectrum_matrix


N = 60
DTYPES = [jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
SPECTRA = {
    "flat": jnp.linspace(1, 3, N),
    "indefinite": jnp.linspace(-1, 1, N),
    "ill conditioned": jnp.geomspace(1e-8, 1, N),
    "clustered": jnp.where(jnp.arange(N) < 5, 1e3 + jnp.arange(N), 1.0),
}
every_spectrum = pytest.mark.parametrize("spectrum", SPECTRA)


def eps_of(dtype):
    return float(jnp.finfo(dtype).eps)


def tridiagonal(alpha, beta):
    return jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)


def setup(spectrum, dtype, scale=1.0):
    matrix = spectrum_matrix(jr.key(0), SPECTRA[spectrum], dtype) * scale
    return matrix.astype(dtype), jr.normal(jr.key(1), (N,), dtype)


@every_spectrum
@every_dtype
@pytest.mark.parametrize("window", [None, 4, 0])
def test_lanczos_relation(window, dtype, spectrum):
    matrix, start = setup(spectrum, dtype)
    steps, eps = 40, eps_of(dtype)
    run = lanczos(lambda v: matrix @ v, start, steps, window=window, eps=eps)
    basis = run.basis.T
    assert jnp.allclose(run.norm * basis[:, 0], start, rtol=20 * eps)
    size = jnp.linalg.norm(matrix)
    rest = matrix @ basis - basis @ tridiagonal(run.alpha, run.beta).astype(dtype)
    assert jnp.linalg.norm(rest[:, :-1]) < 60 * eps * size
    assert jnp.abs(jnp.linalg.norm(rest[:, -1]) - run.beta[-1]) < 20 * eps * size
    if window is None:
        alive = jnp.linalg.norm(basis, axis=0) > 0
        gram = basis.conj().T @ basis
        assert jnp.allclose(gram, jnp.diag(alive).astype(dtype), atol=20 * eps)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_lanczos_is_scale_invariant(scale):
    """Squares of the vectors' entries are beyond float32."""
    matrix, start = setup("flat", jnp.float32)
    plain = lanczos(lambda v: matrix @ v, start, 10, eps=1e-7)
    scaled = lanczos(lambda v: matrix @ (v * scale), start * scale, 10, eps=1e-7)
    assert jnp.allclose(scaled.basis, plain.basis, atol=1e-4)
    assert jnp.allclose(scaled.alpha / scale, plain.alpha, rtol=1e-4)
    assert jnp.allclose(scaled.norm / scale, plain.norm, rtol=1e-6)


BREAKDOWNS = {
    "identity": (jnp.ones(N), 1),
    "three eigenvalues": (jnp.repeat(jnp.array([1.0, 2.0, 5.0]), N // 3), 3),
    "rank one plus identity": (jnp.ones(N).at[0].set(100), 2),
    "zero": (jnp.zeros(N), 1),
}


@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("name", BREAKDOWNS)
def test_breakdown_ends_the_run_exactly(name, window):
    values, distinct = BREAKDOWNS[name]
    start = jr.normal(jr.key(2), (N,))
    run = lanczos(lambda v: values * v, start, 8, window=window, eps=eps_of(float))
    nodes, vectors = ritz(run.alpha, run.beta)
    for degree in (1, 2, 7):
        exact = start @ (values**degree * start)
        found = run.norm**2 * jnp.sum(vectors[0] ** 2 * nodes**degree)
        assert jnp.allclose(found, exact, rtol=1e-12)
    # Rounding may add a step or two with a coupling of that size, and no more nodes.
    weight = vectors[0] ** 2 > 1e-20
    spread = nodes[:, None] - nodes[weight]
    near = jnp.min(jnp.abs(spread), axis=1) < 1e-10 * jnp.max(jnp.abs(nodes) + 1)
    assert jnp.all(near | ~weight)
    assert len(set(jnp.round(nodes[weight], 8).tolist())) == distinct


def test_zero_start_and_full_space():
    matrix, start = setup("flat", jnp.float64)
    run = lanczos(lambda v: matrix @ v, jnp.zeros(N), 5, eps=1e-16)
    assert all(jnp.all(x == 0) for x in (run.basis, run.beta, run.norm))
    run = lanczos(lambda v: matrix @ v, start, N, eps=1e-16)
    nodes, _ = ritz(run.alpha, run.beta)
    assert jnp.allclose(nodes, SPECTRA["flat"], rtol=1e-12)


def test_one_product_for_each_step():
    matrix, start = setup("flat", jnp.float64)
    calls = []

    def mv(v):
        jax.debug.callback(lambda: calls.append(1))
        return matrix @ v

    jax.block_until_ready(lanczos(mv, start, 37, eps=1e-16).alpha)
    jax.effects_barrier()
    assert len(calls) == 37


def test_vmap_and_shard_map():
    """With the varying types of `check_vma=True`, and bitwise equal."""
    matrix, _ = setup("ill conditioned", jnp.float64)
    starts = jr.normal(jr.key(3), (4, N))

    def run(start):
        found = lanczos(lambda v: matrix @ v, start, 35, eps=1e-16)
        return found.alpha, found.beta, found.basis

    def run_gk(start):
        mv = lambda v: matrix @ v  # noqa: E731
        found = golub_kahan(mv, mv, start, 10, eps=1e-16)
        return found.diagonal, found.above, found.right

    mesh = jax.make_mesh((1,), ("probes",), axis_types=(AxisType.Auto,))
    for each in (run, run_gk):
        batched = jax.jit(jax.vmap(each))(starts)
        single = jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(each), starts))
        for x, y in zip(batched, single, strict=True):
            assert jnp.allclose(x[:, :10], y[:, :10], rtol=1e-6, atol=1e-9)
        mapped = jax.shard_map(
            jax.vmap(each), mesh=mesh, in_specs=P("probes"), out_specs=P("probes")
        )
        for x, y in zip(batched, jax.jit(mapped)(starts), strict=True):
            assert jnp.array_equal(x, y)


@every_spectrum
@every_dtype
def test_block_lanczos_relation(dtype, spectrum):
    matrix, _ = setup(spectrum, dtype)
    start, eps = jr.normal(jr.key(4), (N, 4), dtype), eps_of(dtype)
    run = block_lanczos(lambda x: matrix @ x, start, 7, eps=eps)
    alive = jnp.linalg.norm(run.basis, axis=0) > 0
    gram = run.basis.conj().T @ run.basis
    assert jnp.allclose(gram, jnp.diag(alive).astype(dtype), atol=30 * eps)
    rest = matrix @ run.basis - run.basis @ run.matrix
    size = jnp.linalg.norm(matrix)
    assert jnp.linalg.norm(rest[:, :-4]) < 100 * eps * size
    assert jnp.allclose(start, run.basis @ (run.basis.conj().T @ start), atol=60 * eps)


def test_block_lanczos_breaks_down():
    """A start of rank 2, and a matrix with three eigenvalues: six basis vectors."""
    values, _ = BREAKDOWNS["three eigenvalues"]
    start = jr.normal(jr.key(5), (N, 2)) @ jr.normal(jr.key(6), (2, 4))
    run = block_lanczos(lambda x: values[:, None] * x, start, 6, eps=1e-15)
    assert jnp.sum(jnp.linalg.norm(run.basis, axis=0) > 0) == 6
    rest = values[:, None] * run.basis - run.basis @ run.matrix
    assert jnp.max(jnp.abs(rest)) < 1e-12
    values = jnp.linalg.eigvalsh(run.matrix)
    assert 1 - 1e-12 < values[0] < values[-1] < 5 + 1e-12


@every_dtype
@pytest.mark.parametrize("window", [None, 4, 0])
def test_golub_kahan_relations(window, dtype):
    eps = eps_of(dtype)
    matrix, start = jr.normal(jr.key(7), (N, N), dtype), jr.normal(jr.key(8), (N,), dtype)
    adjoint = matrix.conj().T
    run = golub_kahan(
        lambda v: matrix @ v, lambda v: adjoint @ v, start, 20, window=window, eps=eps
    )
    left, right = run.left.T, run.right.T
    middle = (jnp.diag(run.diagonal) + jnp.diag(run.above[:-1], 1)).astype(dtype)
    size = jnp.linalg.norm(matrix)
    assert jnp.linalg.norm(matrix @ right - left @ middle) < 60 * eps * size
    rest = adjoint @ left - right @ middle.conj().T
    assert jnp.linalg.norm(rest[:, :-1]) < 60 * eps * size
    assert jnp.abs(jnp.linalg.norm(rest[:, -1]) - run.above[-1]) < 20 * eps * size
    if window is None:
        for basis in (left, right):
            assert jnp.allclose(basis.conj().T @ basis, jnp.eye(20), atol=20 * eps)


@pytest.mark.parametrize("matrix", [3 * jnp.eye(9), jnp.zeros((9, 9)), jnp.eye(9, k=1)])
def test_golub_kahan_breaks_down(matrix):
    start = jr.normal(jr.key(9), (9,))
    run = golub_kahan(lambda v: matrix @ v, lambda v: matrix.T @ v, start, 6, eps=1e-15)
    middle = jnp.diag(run.diagonal) + jnp.diag(run.above[:-1], 1)
    assert jnp.allclose(matrix @ run.right.T, run.left.T @ middle, atol=1e-13)
    assert jnp.all(jnp.isfinite(middle))


def test_gauss_and_radau_are_exact_for_polynomials():
    """Degree 2 s - 1 for Gauss with s nodes, 2 s for Gauss-Radau with one more; and not
    one degree further."""
    values, start, s = jnp.linspace(0.5, 2, N), jr.normal(jr.key(10), (N,)), 4
    run = lanczos(lambda v: values * v, start, s, eps=1e-16)
    end = jnp.asarray(0.25)
    extended = ritz(*radau(run.alpha, run.beta, end))
    assert jnp.allclose(extended[0][0], end, rtol=1e-13)
    for (nodes, vectors), last in (
        (ritz(run.alpha, run.beta), 2 * s - 1),
        (extended, 2 * s),
    ):
        for degree in range(last + 2):
            exact = start @ (values**degree * start)
            found = run.norm**2 * jnp.sum(vectors[0] ** 2 * nodes**degree)
            assert jnp.allclose(found, exact, rtol=1e-12, atol=0) == (degree <= last)
