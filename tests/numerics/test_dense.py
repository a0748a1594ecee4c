"""Dense factorisations: by rows from Gram matrices, and those of a GPU."""

import re

import jax
import numpy as np
import pytest

from traceax._core.arithmetic import standard_promotion
from traceax._numerics import dense
from traceax._numerics.dense import eigh, factorising, qr, svd, thin_svd


DTYPES = [np.float64, np.float32, np.complex64]
N, M = 200, 12
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)


def eps(x):
    return float(np.finfo(x.dtype).eps)


def normal(seed, shape, dtype):
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (parts[0] + 1j * parts[1] if is_complex else parts[0]).astype(dtype)


def with_singular_values(s, dtype):
    """An N x M matrix, factored in double precision."""
    wide = np.promote_types(dtype, np.float64)
    left, _ = np.linalg.qr(normal(1, (N, M), wide))
    right, _ = np.linalg.qr(normal(2, (M, M), wide))
    return ((left * s) @ right.conj().T).astype(dtype)


def well_conditioned(dtype):
    return normal(0, (N, M), dtype)


def graded(dtype):
    """Singular values from 1 down to the unit roundoff."""
    return with_singular_values(float(np.finfo(dtype).eps) ** np.linspace(0, 1, M), dtype)


def graded_columns(dtype):
    scales = float(np.finfo(dtype).eps) ** np.linspace(0, 1, M)
    return well_conditioned(dtype) * scales.astype(dtype)


def jump(dtype):
    """Half of the singular values at the roundoff of the others."""
    small = float(np.finfo(dtype).eps)
    return with_singular_values(np.where(np.arange(M) < M // 2, 1.0, small), dtype)


def rank_deficient(dtype):
    """Rank 5, but for the rounding of the product."""
    return well_conditioned(dtype)[:, :5] @ normal(3, (5, M), dtype)


def exactly_deficient(dtype):
    """Three rows that are not zero: every column is a combination of three units."""
    x = np.zeros((N, M), dtype)
    x[[3, 70, 150]] = normal(4, (3, M), dtype)
    return x


def duplicated_columns(dtype):
    return well_conditioned(dtype)[:, np.arange(M) // 3]


def zero_columns(dtype):
    return well_conditioned(dtype) * (np.arange(M) % 3 > 0)


def one_column(dtype):
    return well_conditioned(dtype) * (np.arange(M) == 4)


def zero(dtype):
    return np.zeros((N, M), dtype)


MATRICES = [
    well_conditioned,
    graded,
    graded_columns,
    jump,
    rank_deficient,
    exactly_deficient,
    duplicated_columns,
    zero_columns,
    one_column,
    zero,
]
every_matrix = pytest.mark.parametrize("make", MATRICES, ids=lambda x: x.__name__)


@jax.jit
def qr_by_rows(x):
    with factorising(by_rows=True):
        return qr(x)


@jax.jit
def svd_by_rows(x):
    with factorising(by_rows=True):
        return thin_svd(x, eps(x))


@jax.jit
def svd_by_householder(x):
    return thin_svd(x, eps(x))


def check_orthonormal(q):
    """Columns are orthonormal, or zero."""
    gram = q.conj().T @ q
    present = np.any(q != 0, axis=0)
    error = np.max(np.abs(gram - np.diag(present)))
    assert error <= 50 * eps(q), f"off by {error / eps(q):.0f} eps"


def check_qr(x):
    q, r = map(np.asarray, qr_by_rows(x))
    assert q.dtype == r.dtype == x.dtype
    check_orthonormal(q)
    # In units in which squares do not overflow.
    unit = np.maximum(np.max(np.abs(x)), np.finfo(x.dtype).tiny)
    rest = q @ (r / unit) - x / unit
    error, size = np.linalg.norm(rest), np.linalg.norm(x / unit)
    assert error <= 50 * eps(x) * size, f"residual {error / eps(x) / size:.0f} eps"


def check_svd(x):
    q, s, vh = map(np.asarray, svd_by_rows(x))
    expected = np.asarray(svd_by_householder(x)[1])
    assert np.all(s[1:] <= s[:-1])
    error = np.max(np.abs(s - expected))
    assert error <= 50 * eps(x) * expected[0], f"{error / expected[0] / eps(x):.0f} eps"
    check_orthonormal(q)
    unit = np.maximum(expected[0], np.finfo(x.dtype).tiny)
    rest = (q * (s / unit)) @ vh - x / unit
    error = np.linalg.norm(rest)
    assert error <= 50 * eps(x), f"residual {error / eps(x):.0f} eps"


@every_dtype
@every_matrix
def test_qr_by_rows(make, dtype):
    check_qr(make(dtype))


@every_dtype
@every_matrix
def test_thin_svd_by_rows(make, dtype):
    check_svd(make(dtype))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@every_matrix
def test_by_rows_at_any_scale(make, scale):
    x = make(np.float32) * np.float32(scale)
    check_qr(x)
    check_svd(x)


@every_dtype
def test_by_rows_spans_the_range(dtype):
    """Directions above the cutoff are kept, to the accuracy that they have."""
    x = graded(dtype)
    q, s, _ = map(np.asarray, svd_by_rows(x))
    assert np.sum(s > 0) >= M - 1
    rest = x - q @ (q.conj().T @ x)
    assert np.linalg.norm(rest) <= 50 * eps(x)


def test_stacks_of_any_shape():
    """The same bits for each matrix, whatever axes are mapped, and without `jit`."""
    x = normal(5, (2, N, 3, M), np.float64)
    inner = jax.vmap(svd, in_axes=1)
    expected = [[svd(x[i, :, j]) for j in range(3)] for i in range(2)]
    mapped = jax.jit(jax.vmap(inner))(x)
    with jax.disable_jit():
        plain = jax.vmap(inner)(x)
    for many in (mapped, plain):
        for i, j in np.ndindex(2, 3):
            for found, one in zip(many, expected[i][j], strict=True):
                assert np.array_equal(found[i, j], one)


# --- on NVIDIA's GPUs ---


def routines_of_cusolver(fn, shape):
    """The names, and the algorithms that are asked for."""
    traced = jax.jit(fn).trace(jax.ShapeDtypeStruct(shape, np.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    patterns = r"cusolver_(\w+)_ffi", r"algorithm = (\d)"
    return tuple(set(re.findall(pattern, text)) for pattern in patterns)


@pytest.mark.parametrize("shape", [(20, 20), (5, 20, 20), (50, 50)], ids=str)
def test_no_jacobi_method(shape):
    """Neither `gesvdj` nor `syevj`: 1 stands for QR iterations, and 2 for Jacobi's."""
    assert routines_of_cusolver(svd, shape) == ({"gesvd"}, set())
    assert routines_of_cusolver(eigh, shape) == ({"syevd"}, {"1"})


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_strict_modes(platform):
    """What a factorisation consists of is traced when the program is lowered, and not in
    the context of the call."""

    def run(x):
        with standard_promotion():
            return eigh(x), svd(x), dense.eig(x)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        traced = jax.jit(run).trace(jax.ShapeDtypeStruct((5, 5), np.complex64))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"cpu": "lapack_cheevd", "cuda": "cusolver_syevd"}[platform] in text


def first(of_stacks, *args):
    """Of stacks of one."""
    found = jax.jit(of_stacks)(*(x[None] for x in args))
    return [np.asarray(x)[0] for x in found]


@every_dtype
def test_qr_iterations(dtype):
    """The same factors as on CPU, of matrices of any size, whose units do not matter."""
    for scale in (1, 1e-30, 1e30):
        x = dtype(scale) * (normal(0, (M, M), dtype) + M * np.eye(M, dtype=dtype))
        u, s, vh = first(dense._svd_on_cuda, x)
        unit = np.max(np.abs(x))
        assert np.allclose((u * (s / unit)) @ vh, x / unit, rtol=0, atol=100 * eps(x))
        expected = np.linalg.svd(x / unit, compute_uv=False)
        assert np.allclose(s / unit, expected, rtol=100 * eps(x), atol=0)
        values, q = first(dense._eigh_on_cuda, x + x.conj().T)
        again = (q * (values / unit)) @ q.conj().T
        assert np.allclose(again, (x + x.conj().T) / unit, rtol=0, atol=200 * eps(x))


def upper_triangular(dtype):
    return np.linalg.qr(well_conditioned(dtype))[1]


def with_room(dtype):
    """As in a loop of rounds, of which the last have not been."""
    x = upper_triangular(dtype)
    x[M // 2 :] = x[:, M // 2 :] = 0
    return x


def of_rank_five(dtype):
    return np.linalg.qr(rank_deficient(dtype))[1]


def of_two_equal_columns(dtype):
    x = upper_triangular(dtype)
    x[:, 3] = x[:, 7]
    return x


def graded_triangle(dtype):
    return np.linalg.qr(graded(dtype))[1]


def zero_square(dtype):
    return np.zeros((M, M), dtype)


def check_revealed(x, scale, u, t, rows, kept, unit):
    """What the docstring of `dense.reveal` says, of `x * scale`."""
    size, tiny = max(np.max(np.abs(x)), 1e-3), np.finfo(x.dtype).tiny
    identity = np.diag(kept)
    assert np.allclose(u.conj().T @ u, identity, rtol=0, atol=20 * eps(x))
    assert np.allclose(u @ (t / scale), x, rtol=0, atol=20 * eps(x) * size)
    assert np.all(t[~kept] == 0)
    d, null = rows * kept[:, None], rows * ~kept[:, None]
    product = (t / np.maximum(unit, tiny)) @ d.conj().T
    error = np.max(np.abs(product - identity))
    assert error <= 20 * eps(x) * np.linalg.norm(d)
    assert np.allclose(null @ null.conj().T, np.diag(~kept), rtol=0, atol=20 * eps(x))
    assert np.allclose(x @ null.conj().T, 0, rtol=0, atol=20 * eps(x) * size)


WELL = [upper_triangular, with_room, zero_square]
ILL = [of_rank_five, of_two_equal_columns, graded_triangle]


def revealed(x, *limits):
    """By singular values, and as on a GPU, where the factor is diagonal if it is by the
    inverse."""
    limits = np.asarray(limits, x.real.dtype)
    found = [
        first(fn, x, limits) for fn in (jax.vmap(dense._reveal), dense._reveal_on_cuda)
    ]
    u = found[1][0]
    return *found, np.array_equal(u, np.diag(np.diag(u)))


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
@every_dtype
@pytest.mark.parametrize("make", WELL + ILL, ids=lambda x: x.__name__)
def test_reveal(make, dtype, scale):
    x, scale = make(dtype), dtype(scale)
    by_values, on_cuda, by_inverse = revealed(x * scale, eps(x), 0)
    for found in (by_values, on_cuda):
        check_revealed(x, scale, *found)
    assert np.sum(on_cuda[3]) == np.sum(by_values[3])
    assert by_inverse == (make in WELL)


@pytest.mark.parametrize(("smallest", "rank"), [(0.9, M), (0.6, M), (0.4, M - 1)])
def test_reveal_relative_to_a_scale(smallest, rank):
    """Block Gram-Schmidt drops what it has cancelled half of."""
    x = np.diag(np.where(np.arange(M) == 4, smallest, 1))
    for unit in (1, 1e-3):
        by_values, on_cuda, by_inverse = revealed(unit * x, 0.5, 0.5 * unit)
        assert np.sum(by_values[3]) == np.sum(on_cuda[3]) == rank
        assert by_inverse == (rank == M)
    for found in revealed(1e-3 * x, 0.5, 0.5)[:2]:
        assert np.sum(found[3]) == 0


def test_reveal_stacks():
    """All by the inverse, or none: one condition for all matrices."""
    well, ill = upper_triangular(np.float64), of_rank_five(np.float64)
    limits = np.asarray([[eps(well), 0]] * 2)
    for second, by_inverse in ((well, True), (ill, False)):
        stack = np.stack([well, second])
        found = jax.tree.map(np.asarray, jax.jit(dense._reveal_on_cuda)(stack, limits))
        assert np.array_equal(found[0][0], np.eye(M)) == by_inverse
        for i in range(2):
            check_revealed(stack[i], 1.0, *(y[i] for y in found))
