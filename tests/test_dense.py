"""Dense factorisations: by rows from Gram matrices, and on the host."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx
from traceax._kernel.dense import eigh, factorising, qr, svd, thin_svd


PSD = lx.positive_semidefinite_tag
DTYPES = [jnp.float64, jnp.float32, jnp.complex64]
N, M = 200, 12
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.dtype.name)


def eps(x):
    return float(jnp.finfo(x.dtype).eps)


def with_singular_values(s, dtype):
    """An N x M matrix, factored in double precision."""
    wide = jnp.promote_types(dtype, jnp.float64)
    left, _ = jnp.linalg.qr(jr.normal(jr.key(1), (N, M), wide))
    right, _ = jnp.linalg.qr(jr.normal(jr.key(2), (M, M), wide))
    return ((left * s) @ right.conj().T).astype(dtype)


def well_conditioned(dtype):
    return jr.normal(jr.key(0), (N, M), dtype)


def graded(dtype):
    """Singular values from 1 down to the unit roundoff."""
    return with_singular_values(
        float(jnp.finfo(dtype).eps) ** jnp.linspace(0, 1, M), dtype
    )


def graded_columns(dtype):
    scales = float(jnp.finfo(dtype).eps) ** jnp.linspace(0, 1, M)
    return well_conditioned(dtype) * scales.astype(dtype)


def jump(dtype):
    """Half of the singular values at the roundoff of the others."""
    small = float(jnp.finfo(dtype).eps)
    return with_singular_values(jnp.where(jnp.arange(M) < M // 2, 1.0, small), dtype)


def rank_deficient(dtype):
    """Rank 5, but for the rounding of the product."""
    return well_conditioned(dtype)[:, :5] @ jr.normal(jr.key(3), (5, M), dtype)


def exactly_deficient(dtype):
    """Three rows that are not zero: every column is a combination of three units."""
    return (
        jnp.zeros((N, M), dtype)
        .at[jnp.array([3, 70, 150])]
        .set(jr.normal(jr.key(4), (3, M), dtype))
    )


def duplicated_columns(dtype):
    return well_conditioned(dtype)[:, jnp.arange(M) // 3]


def zero_columns(dtype):
    return well_conditioned(dtype) * (jnp.arange(M) % 3 > 0)


def one_column(dtype):
    return well_conditioned(dtype) * (jnp.arange(M) == 4)


def zero(dtype):
    return jnp.zeros((N, M), dtype)


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
    gram = jnp.matmul(q.conj().T, q, precision="highest")
    present = jnp.any(q != 0, axis=0)
    error = jnp.max(jnp.abs(gram - jnp.diag(present)))
    assert error <= 50 * eps(q), f"off by {error / eps(q):.0f} eps"


def check_qr(x):
    q, r = qr_by_rows(x)
    check_orthonormal(q)
    # In units in which squares do not overflow.
    unit = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(x.dtype).tiny)
    rest = jnp.matmul(q, r / unit, precision="highest") - x / unit
    error, size = jnp.linalg.norm(rest), jnp.linalg.norm(x / unit)
    assert error <= 50 * eps(x) * size, f"residual {error / eps(x) / size:.0f} eps"


def check_svd(x):
    q, s, vh = svd_by_rows(x)
    _, expected, _ = svd_by_householder(x)
    assert jnp.all(s[1:] <= s[:-1])
    error = jnp.max(jnp.abs(s - expected))
    assert error <= 50 * eps(x) * expected[0], f"{error / expected[0] / eps(x):.0f} eps"
    check_orthonormal(q)
    unit = jnp.maximum(expected[0], jnp.finfo(x.dtype).tiny)
    rest = jnp.matmul(q * (s / unit), vh, precision="highest") - x / unit
    error = jnp.linalg.norm(rest)
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
    x = make(jnp.float32) * jnp.float32(scale)
    check_qr(x)
    check_svd(x)


@every_dtype
def test_by_rows_spans_the_range(dtype):
    """Directions above the cutoff are kept, to the accuracy that they have."""
    x = graded(dtype)
    q, s, _ = svd_by_rows(x)
    assert jnp.sum(s > 0) >= M - 1
    rest = x - jnp.matmul(q, jnp.matmul(q.conj().T, x, precision="highest"))
    assert jnp.linalg.norm(rest) <= 50 * eps(x)


# --- on the host ---


FACTORISATIONS = [qr, svd, lambda x: thin_svd(x, 1e-12), lambda x: eigh(x.T @ x)]
every_factorisation = pytest.mark.parametrize(
    "factorise", FACTORISATIONS, ids=["qr", "svd", "thin_svd", "eigh"]
)


def on_host(fn):
    def inside(x):
        with factorising(on_host=True, by_rows=False):
            return fn(x)

    return inside


@every_factorisation
def test_on_host_is_the_same(factorise):
    x = well_conditioned(jnp.float64)
    for wrap, y in ((lambda f: f, x), (jax.vmap, jnp.stack([x, x + 1]))):
        found, expected = (
            jax.jit(wrap(on_host(factorise)))(y),
            jax.jit(wrap(factorise))(y),
        )
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert jnp.allclose(a, b, rtol=0, atol=1e-13 * float(jnp.max(jnp.abs(b))))


def annotated(fn, *args):
    """Whether the host is named in the program, before and after compilation."""
    lowered = jax.jit(fn).lower(*args)
    text, compiled = lowered.as_text(), lowered.compile().as_text()
    return '_xla_compute_type = "host"' in text, '_xla_compute_type="host"' in compiled


@every_factorisation
def test_on_host_is_in_the_program(factorise):
    x = well_conditioned(jnp.float32)
    assert annotated(on_host(factorise), x) == (True, True)
    assert annotated(jax.vmap(on_host(factorise)), x[None]) == (True, True)
    assert annotated(factorise, x) == (False, False)


def trace_of(estimator):
    def call(matrix, execution):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        key = jr.key(0)
        return tx.trace(
            operator, estimator, k=8, key=key, execution=execution, throw=False
        ).value

    return call


def logdet_of(tags):
    def call(matrix, execution):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return tx.logdet(
            operator, k=4, num_steps=4, key=jr.key(0), execution=execution, throw=False
        ).value

    return call


CALLS = {
    "XTrace": trace_of(tx.XTraceEstimator()),
    "Hutch++": trace_of(tx.HutchPlusPlusEstimator()),
    "XNysTrace": trace_of(tx.XNysTraceEstimator()),
    "SLQ": logdet_of(PSD),
    "Golub-Kahan": logdet_of(()),
}


@pytest.mark.parametrize("name", CALLS)
def test_on_host_by_an_execution(name):
    """The same numbers, with the gradient, and the host in the program."""
    call = CALLS[name]
    matrix = jnp.diag(jnp.linspace(1.0, 2.0, 30)) + 0.01
    host = tx.Local(host_factorisations=True)

    assert annotated(lambda x: call(x, host), matrix) == (True, True)
    assert annotated(lambda x: call(x, tx.Local()), matrix) == (False, False)
    found = jax.jit(jax.value_and_grad(lambda x: call(x, host)))(matrix)
    expected = jax.jit(jax.value_and_grad(lambda x: call(x, tx.Local())))(matrix)
    assert jnp.allclose(found[0], expected[0], rtol=1e-13, atol=0)
    assert jnp.allclose(found[1], expected[1], rtol=0, atol=1e-13)


def test_on_host_under_vmap():
    matrix = jnp.diag(jnp.linspace(1.0, 2.0, 30)) + 0.01
    matrices = jnp.stack([matrix, 2 * matrix])
    host = tx.Local(host_factorisations=True)
    batched = jax.vmap(lambda x: CALLS["XTrace"](x, host))
    assert annotated(batched, matrices) == (True, True)
    found = jax.jit(batched)(matrices)
    expected = jnp.stack([CALLS["XTrace"](x, tx.Local()) for x in matrices])
    assert jnp.allclose(found, expected, rtol=1e-13, atol=0)
