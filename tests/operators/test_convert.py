"""Inputs that people hold: matrices of NumPy, JAX and SciPy, functions, and operators
whose products are made on the host."""

import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pylops
import pytest
import scipy.sparse as sp
from jax.experimental.sparse import BCOO, BCSR
from scipy.sparse.linalg import aslinearoperator, LinearOperator

import traceax as tx
from traceax._operators.convert import _warn_of_float32

from ..helpers import hermitian, PSD


N, KEY = 24, jr.key(0)
rng = np.random.default_rng(0)
SPD = hermitian(0, np.linspace(1.0, 3.0, N))
SPD = (SPD + SPD.T) / 2
GENERAL = rng.standard_normal((N, N)) + 5 * np.eye(N)
COMPLEX = GENERAL + 1j * rng.standard_normal((N, N))
HERMITIAN = (COMPLEX + COMPLEX.conj().T) / 2
SETTINGS = {"k": 6, "num_steps": 8, "key": KEY}

# The kinds of stored matrices, from an array of NumPy.
KINDS = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "bcoo": BCOO.fromdense,
    "bcsr": BCSR.fromdense,
    "csr_array": sp.csr_array,
    "coo_matrix": sp.coo_matrix,
    "dia_array": sp.dia_array,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class OnHost(LinearOperator):
    """An operator of SciPy with an adjoint, which notes the shapes of its arguments."""

    def __init__(self, matrix):
        super().__init__(matrix.dtype, matrix.shape)
        self.matrix, self.shapes = matrix, []

    def _matmat(self, block):
        self.shapes.append(block.shape)
        return self.matrix @ block

    def _rmatmat(self, block):
        return self.matrix.conj().T @ block

    def _rmatvec(self, vector):
        return self.matrix.conj().T @ vector


class WithMatvec:
    """The least interface of an operator on the host."""

    shape, dtype = (N, N), np.dtype(float)

    def matvec(self, vector):
        return GENERAL @ vector

    def rmatvec(self, vector):
        return GENERAL.T @ vector


# --- stored matrices ---


@pytest.mark.slow(but=("*-numpy", "*-csr_array", "matrix3-bc*"))
@every_kind
@pytest.mark.parametrize("matrix", [SPD, GENERAL, COMPLEX, HERMITIAN, GENERAL[:, :5]])
def test_products_and_tags(kind, matrix):
    operator = tx.as_operator(KINDS[kind](matrix))
    np.testing.assert_allclose(operator.as_matrix(), matrix)
    np.testing.assert_allclose(operator.T.as_matrix(), matrix.T)
    assert lx.is_symmetric(operator) == (matrix is SPD)
    assert (tx.hermitian_tag in operator.tags) == (matrix is HERMITIAN)
    assert not lx.is_positive_semidefinite(operator)


@pytest.mark.slow(but="csr_array")
@every_kind
def test_a_call_on_a_matrix_is_one_on_the_operator(kind):
    matrix = KINDS[kind](SPD)
    values = [
        tx.trace_of_function(x, tx.Exp(), **SETTINGS).value
        for x in (matrix, lx.MatrixLinearOperator(jnp.asarray(SPD), lx.symmetric_tag))
    ]
    np.testing.assert_allclose(*values, rtol=1e-10)


@pytest.mark.slow(but=("numpy", "bcsr"))
@every_kind
def test_exact_answers(kind):
    """With the adjoint, for a matrix that is not symmetric."""
    matrix = KINDS[kind](GENERAL)
    solution = tx.logdet(matrix, **SETTINGS | {"k": N, "num_steps": N})
    np.testing.assert_allclose(solution.value, np.linalg.slogdet(GENERAL)[1])
    np.testing.assert_allclose(tx.trace(matrix, k=N).value, np.trace(GENERAL))


@pytest.mark.slow(but=("complex-*", "int-csr_array", "float-numpy"))
@every_kind
@pytest.mark.parametrize("dtype", [int, float, complex])
def test_diagonal_matrices(kind, dtype):
    entries = np.arange(1, 6).astype(dtype)
    operator = tx.as_operator(KINDS[kind](np.diag(entries)))
    assert lx.is_diagonal(operator)
    assert jnp.issubdtype(operator.in_structure().dtype, jnp.inexact)
    np.testing.assert_allclose(operator.as_matrix(), np.diag(entries))
    solution = tx.logdet(operator, k=1)
    np.testing.assert_allclose(solution.value, np.log(120))
    assert solution.stats["num_matvecs"] == 0
    # Hermitian, also in complex arithmetic.
    assert tx.function_of(operator, tx.Exp(), 2).in_size() == 5


def test_matrices_of_several_blocks():
    """One entry breaks symmetry, or the diagonal, in whichever block it is."""
    matrix = np.diag(np.ones(600))
    for place in [(1, 0), (590, 3), (599, 598), (3, 590)]:
        other = matrix.copy()
        other[place] = 1
        for x in (other, jnp.asarray(other), sp.csr_array(other)):
            operator = tx.as_operator(x)
            assert not lx.is_symmetric(operator)
            assert not lx.is_diagonal(operator)
        operator = tx.as_operator(other + other.T)
        assert lx.is_symmetric(operator)
        assert not lx.is_diagonal(operator)


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.float16, jnp.bfloat16, np.float32])
def test_dtypes(dtype):
    matrix = (SPD > 0.1).astype(dtype)
    expected = dtype if jnp.issubdtype(dtype, jnp.inexact) else float
    matrices = [matrix, jnp.asarray(matrix), BCOO.fromdense(jnp.asarray(matrix))]
    if np.dtype(dtype).kind in "bif" and dtype is not jnp.float16:
        matrices.append(sp.csr_array(matrix))
    for x in matrices:
        operator = tx.as_operator(x)
        assert operator.in_structure().dtype == expected
        assert lx.is_symmetric(operator)
        image = operator.mv(jnp.ones(N, expected)).astype(float)
        np.testing.assert_allclose(image, matrix.astype(float).sum(1), rtol=1e-2)


def test_entries_that_fill_a_bcoo_up():
    padded = BCOO.fromdense(jnp.diag(jnp.arange(1.0, 5.0)), nse=9)
    assert lx.is_diagonal(tx.as_operator(padded))


def test_traced_matrices_are_not_looked_at():
    seen = []

    @jax.jit
    def run(matrix):
        tagged = tx.as_operator(matrix, tags=PSD)
        seen.extend([tx.as_operator(matrix), tagged, tx.as_operator(SPD)])
        return tx.logdet(tagged, **SETTINGS).value

    expected = tx.logdet(tx.as_operator(SPD, tags=PSD), **SETTINGS).value
    np.testing.assert_allclose(run(SPD), expected)
    assert [lx.is_symmetric(x) for x in seen] == [False, True, True]


@pytest.mark.parametrize("kind", ["jax", "bcoo"])
def test_derivatives(kind):
    data, make = jnp.asarray(SPD), jnp.asarray
    if kind == "bcoo":
        stored = BCOO.fromdense(jnp.asarray(SPD))
        data, make = stored.data, lambda x: BCOO((x, stored.indices), shape=(N, N))

    def log_det(scale):
        return tx.logdet(make(scale * data), **SETTINGS | {"k": N, "num_steps": N}).value

    np.testing.assert_allclose(jax.jit(jax.grad(log_det))(2.0), N / 2)


# --- functions and operators on the host ---


@pytest.mark.parametrize(
    "like", [(N,), N, np.ones(N), jnp.ones(N), jax.ShapeDtypeStruct((N,), float)]
)
def test_functions(like):
    operator = tx.as_operator(lambda v: GENERAL @ v, like, lx.symmetric_tag)
    assert operator.in_structure() == jax.ShapeDtypeStruct((N,), float)
    assert lx.is_symmetric(operator)
    np.testing.assert_allclose(operator.as_matrix(), GENERAL)


def test_functions_of_trees():
    example = {"w": np.ones((2, 3), np.float32), "b": np.arange(4)}
    operator = tx.as_operator(lambda v: {"w": 2 * v["w"], "b": 3 * v["b"]}, example)
    assert operator.in_structure()["b"].dtype == float
    np.testing.assert_allclose(tx.trace(operator, k=10).value, 2 * 6 + 3 * 4)


@pytest.mark.parametrize("matrix", [GENERAL, COMPLEX, GENERAL[:, :5]])
def test_operators_of_scipy(matrix):
    host = OnHost(matrix)
    operator = tx.as_operator(host)
    vectors = jnp.asarray(matrix[:3].conj())
    np.testing.assert_allclose(jax.vmap(operator.mv)(vectors), vectors @ matrix.T)
    assert host.shapes[-1] == (matrix.shape[1], 3)
    np.testing.assert_allclose(operator.T.as_matrix(), matrix.T)
    solution = tx.schatten_norm(host, 1, k=N)
    np.testing.assert_allclose(solution.value, np.linalg.norm(matrix, "nuc"))


@pytest.mark.slow(but="host0")
@pytest.mark.parametrize("host", [WithMatvec(), aslinearoperator(GENERAL)])
def test_calls_on_the_host(host):
    values = [tx.logdet(x, **SETTINGS).value for x in (host, GENERAL)]
    np.testing.assert_allclose(*values)


def test_operators_of_pylops():
    slope = pylops.FirstDerivative(30, edge=True)
    operator = tx.as_operator(slope)
    np.testing.assert_allclose(operator.as_matrix(), slope.todense())
    np.testing.assert_allclose(operator.T.as_matrix(), slope.todense().T)


def test_a_missing_adjoint():
    host = LinearOperator((N, N), matvec=lambda v: GENERAL @ v, dtype=float)
    np.testing.assert_allclose(tx.trace(host, k=N).value, np.trace(GENERAL))
    with pytest.raises(NotImplementedError, match=r"`rmatvec`.*rmatvec is not defined"):
        tx.logdet(host, **SETTINGS)


def test_complex_products_of_an_operator_that_says_it_is_real():
    host = LinearOperator((N, N), matvec=lambda v: 1j * v, dtype=float)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Found complex128"):
        tx.as_operator(host).mv(jnp.ones(N))


# --- calls ---


@pytest.mark.slow
def test_every_call_takes_matrices():
    """A call on a matrix is one on the operator, for those with paths of their own."""
    first, second = (sp.csr_array(x) for x in (SPD, 2 * SPD))
    operators = [tx.as_operator(x) for x in (first, second)]
    dynamic = tx.DynamicTrace(lambda scale: scale * jnp.asarray(GENERAL), num_probes=4)
    state = dynamic.init(jnp.array(1.0), key=KEY, k=N).state
    updated = dynamic.update(state, jnp.array(1.0))
    np.testing.assert_allclose(updated.value, np.trace(GENERAL))
    for call in (
        lambda a, b: tx.frobenius_products([a, b], k=3, key=KEY),
        lambda a, b: tx.trace_difference(a, b, tx.Exp(), **SETTINGS),
    ):
        values = [call(*pair).value for pair in ((first, second), operators)]
        np.testing.assert_allclose(*values)
    assert tx.check_operator(first, key=KEY).hermitian
    assert tx.select_trace_estimator(SPD, 4).name == "ExactTraceEstimator"
    image = tx.function_of(first, tx.Inverse(), N).mv(jnp.ones(N))
    np.testing.assert_allclose(image, np.linalg.solve(SPD, np.ones(N)), rtol=1e-6)
    jacobi = tx.jacobi_preconditioner(SPD, k=N)
    np.testing.assert_allclose(jacobi.entries, np.diag(SPD))
    value, _ = tx.HutchinsonEstimator().estimate(KEY, GENERAL, N)
    np.testing.assert_allclose(value, np.trace(GENERAL))


def test_a_grid_of_scipy():
    """As a new user types it, in less than ten lines."""
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(12, 12))
    grid = tx.as_operator(sp.kronsum(line, line), tags=lx.positive_semidefinite_tag)
    log_det = tx.logdet(grid, k=20, key=KEY)
    variances = tx.diagonal_of_function(grid, tx.Inverse(), k=40, key=KEY)
    matrix = sp.kronsum(line, line).toarray()
    assert abs(log_det.value - np.linalg.slogdet(matrix)[1]) < 4 * log_det.std_err
    errors = variances.value - np.diag(np.linalg.inv(matrix))
    assert np.sum(errors**2) < 4 * np.sum(variances.std_err**2)


# --- what is refused, and warned of ---


def test_a_warning_of_float32_is_given_once():
    _warn_of_float32.cache_clear()
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="became one in float32"):
            operator = tx.as_operator(GENERAL)
        assert operator.in_structure().dtype == np.float32
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            host = tx.as_operator(OnHost(GENERAL))
            image = host.mv(jnp.ones(N, np.float32))
            assert tx.as_operator(GENERAL.astype(int)).in_structure().dtype == np.float32
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, GENERAL.sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0, 2.0], [3.0, 4.0]],), r"type list. Convert a list"),
        ((np.ones((3, 4, 4)),), r"shape \(3, 4, 4\). For several matrices use"),
        ((np.ones(3),), "a vector is no operator"),
        ((np.array([["a"]]),), "`x` must hold numbers. Found dtype <U1"),
        ((np.ma.masked_array(SPD, SPD > 1),), "masked"),
        ((2.0,), "type float. Pass an array"),
        ((lambda v: v,), r"`traceax.as_operator\(function, like\)`"),
        ((lambda v: v, {"a": "b"}), "`like` must be .* Found a leaf of type str"),
        ((SPD, (N,)), "`like` is for functions.* Leave `like` out"),
        ((SPD, None, "symmetric"), "`tags` must be tags of lineax"),
        (
            (lambda v: np.fft.fft(v), (N,)),
            "`x` must be one that JAX can trace.*LinearOperator.*made on the host",
        ),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        tx.as_operator(*arguments)
