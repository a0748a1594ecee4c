"""Dense factorisations: by rows from Gram matrices, and on the host."""

import functools as ft

import jax
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._kernel.dense import eigh, factorising, qr, svd, thin_svd


PSD = lx.positive_semidefinite_tag
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
    with factorising(on_host=False, by_rows=True):
        return qr(x)


@jax.jit
def svd_by_rows(x):
    with factorising(on_host=False, by_rows=True):
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


# --- on the host ---


FACTORISATIONS = {
    "qr": qr,
    "svd": svd,
    "thin_svd": lambda x: thin_svd(x, 1e-12),
    "eigh": lambda x: eigh(x.T @ x),
}
ONE = well_conditioned(np.float64)
TWO = np.stack([ONE, ONE + 1])


def on_host(fn):
    def inside(x):
        with factorising(on_host=True, by_rows=False):
            return fn(x)

    return inside


def compiled(fn, *args):
    """The program, and whether the host is named in it before and after compilation."""
    lowered = jax.jit(fn).lower(*args)
    program = lowered.compile()
    before = '_xla_compute_type = "host"' in lowered.as_text()
    return program, (before, '_xla_compute_type="host"' in program.as_text())


@ft.cache
def without_the_host():
    """All factorisations, of one matrix and of two, in a program that does not name
    it."""

    def factors(one, two):
        return {name: (f(one), jax.vmap(f)(two)) for name, f in FACTORISATIONS.items()}

    program, named = compiled(factors, ONE, TWO)
    assert named == (False, False)
    return program(ONE, TWO)


@pytest.mark.parametrize("name", FACTORISATIONS)
def test_on_host(name):
    """The same numbers, alone and under `vmap`, and the host in the program."""
    factorise = on_host(FACTORISATIONS[name])
    calls = (factorise, ONE), (jax.vmap(factorise), TWO)
    for (call, x), expected in zip(calls, without_the_host()[name], strict=True):
        program, named = compiled(call, x)
        assert named == (True, True)
        for a, b in zip(program(x), expected, strict=True):
            assert a.shape == b.shape
            assert np.allclose(a, b, rtol=0, atol=1e-13 * np.max(np.abs(b)))


def trace_of(estimator):
    def call(matrix, execution):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        key = jr.key(0)
        return tx.trace(
            operator, estimator, k=8, key=key, execution=execution, throw=False
        ).value

    return call


def general_logdet(matrix, execution):
    settings = {"key": jr.key(0), "execution": execution, "throw": False}
    operator = lx.MatrixLinearOperator(matrix)
    return tx.logdet(operator, k=4, num_steps=4, **settings).value


CALLS = {
    "XTrace": trace_of(tx.XTraceEstimator()),
    "XNysTrace": trace_of(tx.XNysTraceEstimator()),
    "Golub-Kahan": general_logdet,
}


MATRIX = np.diag(np.linspace(1.0, 2.0, 30)) + 0.01
HOST = tx.Local(host_factorisations=True)


@pytest.mark.parametrize("name", CALLS)
def test_on_host_by_an_execution(name):
    """The same numbers, with the gradient, and the host in the program."""

    def derivative(execution):
        return jax.value_and_grad(lambda x: CALLS[name](x, execution))

    here, named_here = compiled(derivative(tx.Local()), MATRIX)
    there, named_there = compiled(derivative(HOST), MATRIX)
    assert named_there == (True, True)
    assert named_here == (False, False)
    found, expected = there(MATRIX), here(MATRIX)
    assert np.allclose(found[0], expected[0], rtol=1e-13, atol=0)
    assert np.allclose(found[1], expected[1], rtol=0, atol=1e-13)


def test_on_host_under_vmap():
    matrices = np.stack([MATRIX, 2 * MATRIX])
    batched, named = compiled(jax.vmap(lambda x: CALLS["XTrace"](x, HOST)), matrices)
    assert named == (True, True)
    expected = [CALLS["XTrace"](x, tx.Local()) for x in matrices]
    assert np.allclose(batched(matrices), expected, rtol=1e-13, atol=0)
