"""Operators made of factors, and by Fourier transforms, against matrices of NumPy and
SciPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.linalg as sl
import scipy.sparse as sp
import scipy.special
from jax.experimental.sparse import BCOO, BCSR
from jax.scipy.special import logsumexp

import traceax as tx

from ..helpers import hermitian, PSD


KEY = jr.key(0)
RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=np.float64):
    real, imaginary = RANDOM.standard_normal((2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (real + 1j * imaginary if is_complex else real).astype(dtype)


def kronecker_sum(*matrices):
    total = np.zeros((1, 1))
    for x in matrices:
        total = np.kron(total, np.eye(len(x))) + np.kron(np.eye(len(total)), x)
    return total


def circulant(column):
    """The convolution with an array on a torus."""
    shifts = [np.roll(column, i, range(column.ndim)) for i in np.ndindex(column.shape)]
    return np.stack([x.ravel() for x in shifts], axis=1)


def cases(dtype):
    """Operators and their matrices: rectangular ones, and square ones without a tag."""
    shapes = (3, 4), (2, 5), (4, 4), (3, 3)
    a, b, c, d = (normal(*shape, dtype=dtype) for shape in shapes)
    column, row, torus = (normal(*n, dtype=dtype) for n in ((7,), (5,), (3, 4)))
    sparse = sp.random_array((9, 6), density=0.3, rng=RANDOM).astype(dtype)
    return {
        "kronecker": (tx.kronecker(a, b, c), np.kron(np.kron(a, b), c)),
        "sum": (tx.kronecker_sum(c, d), kronecker_sum(c, d)),
        "blocks": (tx.block_diagonal(a, c), sl.block_diag(a, c)),
        "toeplitz": (tx.toeplitz(column, row), sl.toeplitz(column, row)),
        "circulant": (tx.circulant(torus), circulant(torus)),
        "sparse": (tx.sparse(sparse), sparse.toarray()),
        "mixed": (
            tx.kronecker(tx.toeplitz(column), sparse),
            np.kron(hermitian_toeplitz(column), sparse.toarray()),
        ),
    }


def hermitian_toeplitz(column):
    return sl.toeplitz(np.concatenate([column[:1].real, column[1:]]))


def flat(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def products(operator, x, y):
    """`A x`, `A^T y` and `conj(A) x` of flat vectors, also of the linearised operator."""

    def of(operator, x):
        leaves, structure = jax.tree.flatten(operator.in_structure())
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = jnp.split(x, ends)
        parts = [v.reshape(leaf.shape) for v, leaf in zip(parts, leaves, strict=True)]
        return flat(operator.mv(jax.tree.unflatten(structure, parts)))

    linear = lx.linearise(operator)
    conjugate, matrix = lx.conj(operator), operator.as_matrix()
    return of(operator, x), of(linear, x), of(operator.T, y), of(conjugate, x), matrix


@pytest.mark.slow(but="complex128")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32])
def test_products(dtype):
    table = cases(dtype)
    vectors = {
        name: (normal(x.shape[1], dtype=dtype), normal(x.shape[0], dtype=dtype))
        for name, (_, x) in table.items()
    }

    @eqx.filter_jit
    def run(operators):
        return {name: products(x, *vectors[name]) for name, x in operators.items()}

    found = run({name: operator for name, (operator, _) in table.items()})
    for name, (_, matrix) in table.items():
        x, y = vectors[name]
        expected = matrix @ x, matrix @ x, matrix.T @ y, matrix.conj() @ x, matrix
        for one, other in zip(found[name], expected, strict=True):
            assert one.dtype == dtype, name
            tolerance = 100 * np.finfo(dtype).eps * np.linalg.norm(matrix)
            np.testing.assert_allclose(one, other, atol=tolerance, err_msg=name)


def laplacian(n):
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def tagged(matrix):
    return tx.as_operator(matrix, tags=PSD)


def test_what_is_known():
    """Tags and structure pass from the parts."""
    line, lower = tagged(laplacian(4)), tx.as_operator(np.tril(normal(3, 3)))
    lower = lx.TaggedLinearOperator(lower, lx.lower_triangular_tag)
    diagonal, minus = lx.DiagonalLinearOperator(jnp.ones(3)), -line
    for make in (tx.kronecker, tx.kronecker_sum, tx.block_diagonal):
        assert lx.is_positive_semidefinite(make(line, line))
        assert lx.is_symmetric(make(line, line))
        assert not lx.is_symmetric(make(line, lower))
        assert lx.is_lower_triangular(make(lower, diagonal))
        assert not lx.is_positive_semidefinite(make(line, lower))
        assert lx.is_diagonal(make(diagonal, diagonal))
        assert lx.is_tridiagonal(make(diagonal, diagonal))
    assert lx.is_positive_semidefinite(tx.kronecker(minus, minus))
    assert lx.is_negative_semidefinite(tx.kronecker(minus, line))
    assert lx.is_negative_semidefinite(tx.kronecker_sum(minus, minus))
    assert not lx.is_positive_semidefinite(tx.kronecker_sum(minus, line))
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((3,), float))
    assert lx.has_unit_diagonal(tx.kronecker(identity, identity))
    assert not lx.has_unit_diagonal(tx.kronecker_sum(identity, identity))
    assert lx.is_symmetric(tx.toeplitz(np.arange(3.0)))
    assert not lx.is_symmetric(tx.toeplitz(np.arange(3.0), np.arange(4.0)))
    assert lx.is_symmetric(tx.circulant(np.array([2.0, -1.0, 0.0, -1.0])))
    assert not lx.is_symmetric(tx.circulant(np.arange(4.0)))


def structured(scale=1.0, shift=0.5, dtype=np.float64):
    """Positive definite operators, and their matrices by `jnp`."""
    a = jnp.asarray(hermitian(1, np.arange(1.0, 6.0), dtype))
    b = jnp.asarray(hermitian(2, np.arange(1.0, 4.0), dtype))
    column = jnp.asarray([3.0, -1.0, 0.5, 0.5, -1.0]).astype(dtype)
    tag = lambda x: lx.MatrixLinearOperator(scale * x, PSD)  # noqa: E731
    eye = lambda x: shift * lx.IdentityLinearOperator(x.in_structure())  # noqa: E731
    product, total = tx.kronecker(tag(a), tag(b)), tx.kronecker_sum(tag(a), tag(b))
    ring = tx.circulant(scale * column, PSD)
    identity = jnp.eye(15, dtype=dtype)
    dense = jnp.kron(scale * a, scale * b)
    dense_sum = jnp.kron(scale * a, jnp.eye(3)) + jnp.kron(jnp.eye(5), scale * b)
    dense_ring = jnp.stack([jnp.roll(scale * column, i) for i in range(5)], axis=1)
    return {
        "product": (product + eye(product), dense + shift * identity),
        "sum": (2 * (total + eye(total)), 2 * (dense_sum + shift * identity)),
        "minus": (-(total + eye(total)), -(dense_sum + shift * identity)),
        "blocks": (
            tx.block_diagonal(tag(a), tag(b)),
            jax.scipy.linalg.block_diag(scale * a, scale * b),
        ),
        "ring": (ring + eye(ring), dense_ring + shift * jnp.eye(5)),
        "nested": (
            tx.kronecker(total, ring),
            jnp.kron(dense_sum, dense_ring),
        ),
    }


def answers(operator):
    """All that the structure gives, without a key."""
    solutions = [tx.trace(operator), tx.diagonal(operator), tx.logdet(operator)]
    solutions.append(tx.trace_of_function(operator, tx.Exp(-0.1)))
    return [*solutions, tx.schatten_norm(operator, 3), tx.log_trace_exp(operator, -2.0)]


@pytest.mark.slow(but="float64")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32])
def test_exact_answers(dtype):
    table = structured(dtype=dtype)
    found = eqx.filter_jit(lambda xs: jax.tree.map(answers, xs, is_leaf=is_operator))(
        {name: operator for name, (operator, _) in table.items()}
    )
    for name, (_, matrix) in table.items():
        matrix = np.asarray(matrix).astype(np.promote_types(dtype, np.float64))
        values = np.linalg.eigvalsh(matrix)
        sign = np.sign(values[0])
        exact = [np.trace(matrix), np.diag(matrix), np.sum(np.log(np.abs(values)))]
        exact += [np.sum(np.exp(-0.1 * values))]
        exact += [np.sum(np.abs(values) ** 3) ** (1 / 3)]
        exact += [scipy.special.logsumexp(-2 * values)]
        for solution, number in zip(found[name], exact, strict=True):
            rtol = 100 * np.finfo(dtype).eps
            np.testing.assert_allclose(flat(solution.value), number, rtol=rtol)
            assert solution.successful
            assert np.all(flat(solution.std_err) <= rtol * np.abs(number))
            assert solution.stats["num_matvecs"] == 0
        assert found[name][2].stats["sign"] == sign ** len(matrix)


def is_operator(x):
    return isinstance(x, lx.AbstractLinearOperator)


def test_derivatives():
    """In the factors, where eigenvalues are equal too; a second one is refused."""

    def total(scale, shift):
        operators = [x for x, _ in structured(scale, shift).values()]
        total = sum(tx.logdet(x).value for x in operators)
        return total + tx.log_trace_exp(operators[0], 0.1).value

    def reference(scale, shift):
        matrices = [x for _, x in structured(scale, shift).values()]
        total = sum(jnp.linalg.slogdet(x)[1] for x in matrices)
        return total + logsumexp(0.1 * jnp.linalg.eigvalsh(matrices[0]))

    at = 1.3, 0.7
    found = jax.jit(jax.grad(total, (0, 1)))(*at)
    np.testing.assert_allclose(found, jax.grad(reference, (0, 1))(*at), rtol=1e-10)
    _, tangent = jax.jvp(total, at, (1.0, 0.0))
    np.testing.assert_allclose(tangent, found[0], rtol=1e-10)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(jax.grad(total))(*at)


def test_derivatives_in_parameters():
    """Of functions, and of second order in a scale alone."""
    operator, matrix = structured()["sum"]
    values = np.linalg.eigvalsh(matrix)

    def total(scale):
        return tx.trace_of_function(operator, tx.Exp(scale)).value

    found = jax.grad(total)(-0.1)
    np.testing.assert_allclose(found, np.sum(values * np.exp(-0.1 * values)), rtol=1e-12)
    weights = np.exp(-0.1 * values) / np.sum(np.exp(-0.1 * values))
    variance = weights @ values**2 - (weights @ values) ** 2
    found = jax.grad(jax.grad(lambda s: tx.log_trace_exp(operator, s).value))(-0.1)
    np.testing.assert_allclose(found, variance, rtol=1e-10)


def test_vmap():
    def value(scale):
        return tx.logdet(structured(scale)["sum"][0]).value

    scales = jnp.asarray([0.5, 2.0])
    together = jax.vmap(value)(scales)
    np.testing.assert_allclose(together, [value(x) for x in scales], rtol=1e-12)


def test_singular_and_indefinite():
    """A ring has the eigenvalue 0: its logarithm is not finite, and that is said."""
    ring = tx.circulant(np.array([2.0, -1.0, 0.0, 0.0, -1.0]), PSD)
    torus = tx.kronecker_sum(ring, ring)
    solution = tx.logdet(torus, throw=False)
    assert solution.result == tx.RESULTS.not_positive_definite
    assert not np.isnan(solution.value)
    matrix = hermitian(0, np.array([-2.0, 1.0, 3.0]))
    operator = tx.kronecker(tx.as_operator(matrix), tx.as_operator(matrix))
    solution = tx.logdet(operator)
    assert np.isclose(solution.value, np.linalg.slogdet(np.kron(matrix, matrix))[1])
    assert solution.stats["sign"] == 1
    assert solution.stats["num_matvecs"] == 0


def test_sparse_matrices_know_their_diagonal():
    """Rectangular ones, duplicates, and entries that fill arrays up, too."""
    matrix = sp.random_array((50, 50), density=0.1, rng=RANDOM).tocsr()
    solution = tx.diagonal(matrix)
    np.testing.assert_allclose(solution.value, matrix.diagonal(), rtol=1e-14)
    assert solution.stats["num_matvecs"] == 0
    duplicates = sp.coo_array(([1.0, 2.0, 5.0], ([0, 0, 1], [0, 0, 0])), shape=(2, 2))
    assert tx.trace(duplicates).value == 3


def norms(operator, k=10):
    """Both norms, without a key."""
    return tx.frobenius_norm(operator, k=k), tx.row_norms(operator, k=k)


def of_norms(dtype):
    """More operators with their matrices: sums, multiples, other shapes."""
    table, (column, row) = cases(dtype), (normal(n, dtype=dtype) for n in (6, 15))
    shapes = {"wide": (column, row), "square": (row[:6], column), "tall": (row, row[:1])}
    table |= {
        name: (tx.toeplitz(*ends), sl.toeplitz(*ends)) for name, ends in shapes.items()
    }
    scalar = jnp.asarray(normal(1, dtype=dtype)[0])
    for name in ("sum", "circulant", "square"):
        operator, matrix = table[name]
        matrix = matrix.astype(dtype)
        identity = lx.IdentityLinearOperator(operator.in_structure())
        shifted = matrix - matrix[0, 0] * np.eye(len(matrix), dtype=dtype)
        # The diagonal of a circulant cancels.
        moved = scalar * (operator - jnp.asarray(matrix[0, 0], dtype) * identity)
        table[f"moved {name}"] = moved, np.asarray(scalar) * shifted
        table[f"nested {name}"] = (
            tx.kronecker(moved, tx.block_diagonal(operator, matrix)) / 3,
            np.kron(table[f"moved {name}"][1], sl.block_diag(matrix, matrix)) / 3,
        )
    diagonal = normal(12, dtype=dtype)
    operator, matrix = table["sum"]
    table["noise"] = (
        -(lx.DiagonalLinearOperator(jnp.asarray(diagonal.reshape(4, 3))) + operator),
        matrix + np.diag(diagonal),
    )
    stored, places = normal(4, dtype=dtype), np.array([[0, 0], [1, 2], [0, 0], [3, 9]])
    twice = BCOO((jnp.asarray(stored), jnp.asarray(places)), shape=(3, 3))
    entries = np.zeros((3, 3), dtype)
    entries[0, 0], entries[1, 2] = stored[0] + stored[2], stored[1]
    table["duplicates"] = tx.sparse(twice), entries
    duplicates = sp.coo_array((stored[:3], ([2, 2, 1], [0, 0, 1])), shape=(3, 4))
    table["duplicates of SciPy"] = tx.sparse(duplicates), duplicates.toarray()
    table["zero"] = (
        tx.kronecker(np.zeros((2, 3), dtype), stored[:, None]),
        np.zeros((8, 3)),
    )
    return table


@pytest.mark.slow(but="complex128")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32])
def test_norms(dtype):
    table = of_norms(dtype)
    found = eqx.filter_jit(lambda xs: {name: norms(x) for name, x in xs.items()})(
        {name: operator for name, (operator, _) in table.items()}
    )
    for name, (_, matrix) in table.items():
        total, rows = found[name]
        exact, rtol = np.linalg.norm(matrix, axis=1), 50 * np.finfo(dtype).eps
        np.testing.assert_allclose(flat(rows.value), exact, rtol=rtol, err_msg=name)
        np.testing.assert_allclose(total.value, np.linalg.norm(exact), rtol=rtol)
        assert total.value.dtype == np.finfo(dtype).dtype
        for solution in (total, rows):
            assert solution.successful
            assert not flat(solution.std_err).any()
            assert solution.stats["num_matvecs"] == 0


def test_budgets_and_estimators_of_norms():
    """All of them take what is known; a factor without stored entries is not known."""
    a, b = normal(4, 4), normal(6, 6)
    exact = np.linalg.norm(np.kron(a, b))
    for estimator in (tx.HutchinsonEstimator(), tx.XNysTraceEstimator()):
        for k in (4, tx.Adaptive(rtol=1e-3)):
            solution = tx.frobenius_norm(tx.kronecker(a, b), estimator, k=k)
            np.testing.assert_allclose(solution.value, exact, rtol=1e-13)
            assert solution.stats["exact"]
    function = lx.FunctionLinearOperator(
        lambda x: b @ x, jax.ShapeDtypeStruct((6,), float)
    )
    solution = tx.frobenius_norm(tx.kronecker(a, function), k=10, key=KEY)
    assert solution.stats["num_matvecs"] == 10
    assert abs(solution.value - exact) < 5 * solution.std_err


def test_derivatives_of_norms():
    """Also where rows and entries are 0."""
    a, column = normal(3, 3, dtype=np.complex128), np.array([2.0j, 0.0, -1.0])
    b = np.diag([1.0, 0.0, 2.0j])
    a[1], b[0, 2] = 0, 0.5

    def operators(a, b, column):
        total = tx.kronecker_sum(tx.circulant(column), b)
        line = tx.sparse(BCOO.fromdense(b, nse=4))
        return tx.kronecker(a, b), 2 * total, tx.toeplitz(column, column[:2]), line

    def value(norm, *parts):
        return sum(norm(x) for x in operators(*parts))

    def known(x):
        total, rows = norms(x)
        return total.value + jnp.sum(flat(rows.value))

    def dense(x):
        squares = jnp.sum(jnp.abs(x.as_matrix()) ** 2, axis=1)
        roots = jnp.sqrt(jnp.where(squares > 0, squares, 1))
        return jnp.sqrt(jnp.sum(squares)) + jnp.sum(jnp.where(squares > 0, roots, 0))

    parts = tuple(map(jnp.asarray, (a, b, column)))
    found, expected = (
        jax.jit(jax.grad(lambda *parts, norm=norm: value(norm, *parts), (0, 1, 2)))(
            *parts
        )
        for norm in (known, dense)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)
    scales = jnp.asarray([0.5, 2.0])
    together = jax.vmap(lambda s: known(operators(s * a, b, column)[0]))(scales)
    np.testing.assert_allclose(together, scales * together[1] / 2, rtol=1e-12)


def test_range_of_norms():
    """Squares out of range are flagged, and infinite; factors may be out of range where
    their product is not."""
    matrix = normal(3, 3, dtype=np.float32)
    small, large = matrix * np.float32(1e-30), matrix * np.float32(1e30)
    for operator in (tx.kronecker(small, matrix), tx.kronecker_sum(large, matrix)):
        for norm in (tx.frobenius_norm, tx.row_norms):
            solution = norm(operator, throw=False)
            assert np.all(np.isinf(flat(solution.value)))
            assert solution.result == tx.RESULTS.nonfinite_product
    for operator, dense in (
        (tx.kronecker(small, large), np.kron(small, large)),
        (tx.kronecker(tx.toeplitz(small[0]), large), None),
        (tx.kronecker(tx.circulant(small[0]), tx.sparse(sp.csr_array(large))), None),
        (1e30 * tx.kronecker_sum(small, small), None),
    ):
        dense = np.asarray(operator.as_matrix()) if dense is None else dense
        total, rows = norms(operator)
        exact = np.linalg.norm(dense.astype(float), axis=1)
        np.testing.assert_allclose(flat(rows.value), exact, rtol=1e-5)
        np.testing.assert_allclose(total.value, np.linalg.norm(exact), rtol=1e-5)


def solvable():
    """Definite operators, and others."""
    line, general = tagged(laplacian(4)), 3 * np.eye(4) + normal(4, 4) / 4
    ring, phase = np.array([3.0, -1.0, 0.0, -1.0]), 0.5j ** np.arange(5.0)
    entries = sp.csr_array(laplacian(7))
    definite = {
        "kronecker": tx.kronecker(line, line),
        "sum": tx.kronecker_sum(line, line),
        "minus": -tx.kronecker_sum(line, line),
        "blocks": tx.block_diagonal(line, line),
        "toeplitz": tx.toeplitz(phase, tags=PSD),
        "circulant": tx.circulant(ring, PSD),
        "sparse": tx.sparse(entries, PSD),
        "rows": tx.sparse(BCSR.from_scipy_sparse(entries), PSD),
    }
    return definite, {
        "kronecker": tx.kronecker(general, line),
        "sum": tx.kronecker_sum(general, line),
        "blocks": tx.block_diagonal(general, line),
        "toeplitz": tx.toeplitz(ring, 0.1 * ring),
        "circulant": tx.circulant(np.array([3.0, 1.0, 0.5])),
        "sparse": tx.sparse(sp.csr_array(general)),
    }


def test_linear_solve():
    """By solvers of lineax that apply operators, and by those that read matrices."""
    definite, general = solvable()
    steps = {"rtol": 1e-12, "atol": 1e-12}
    lists = [(definite, lx.CG(**steps)), (general, lx.GMRES(**steps))]
    lists += [(general, lx.AutoLinearSolver(well_posed=True))]

    def solve(operator, solver):
        right = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype), operator.in_structure()
        )
        return flat(lx.linear_solve(operator, right, solver).value)

    @eqx.filter_jit
    def run(lists):
        return [{i: solve(x, solver) for i, x in xs.items()} for xs, solver in lists]

    for (table, _), found in zip(lists, run(lists), strict=True):
        for name, operator in table.items():
            matrix = np.asarray(operator.as_matrix())
            expected = np.linalg.solve(matrix, np.ones(len(matrix)))
            np.testing.assert_allclose(found[name], expected, rtol=1e-9, err_msg=name)


def test_derivatives_of_linear_solve():
    """In entries of a sparse matrix, and in a column, through transposed solves."""
    entries = 3 * np.eye(5) + np.eye(5, k=1)
    stored = BCOO.fromdense(jnp.asarray(entries))
    solver = lx.GMRES(rtol=1e-12, atol=1e-12)

    def of(make, x):
        return jnp.sum(lx.linear_solve(make(x), jnp.ones(5), solver).value ** 2)

    def dense(matrix):
        return jnp.sum(jnp.linalg.solve(matrix, jnp.ones(5)) ** 2)

    slope = jax.grad(
        lambda data: of(
            lambda x: tx.sparse(BCOO((x, stored.indices), shape=(5, 5))), data
        )
    )
    expected = jax.grad(dense)(jnp.asarray(entries))[tuple(stored.indices.T)]
    np.testing.assert_allclose(slope(stored.data), expected, rtol=1e-9)
    column = jnp.asarray([3.0, 1.0, 0.0, 0.5, 0.0])
    slope = jax.grad(lambda x: of(tx.circulant, x))(column)
    expected = jax.grad(lambda x: dense(tx.circulant(x).as_matrix()))(column)
    np.testing.assert_allclose(slope, expected, rtol=1e-9)


def test_factorisations_of_images():
    """XLA on CPU refuses Fourier transforms of arrays that are stored by columns."""
    for operator in (
        tx.toeplitz(0.5 ** np.arange(9.0)),
        tx.circulant(np.array([3, -1, -1])),
    ):
        matrix, n = np.asarray(operator.as_matrix()), operator.in_size()
        function = lx.FunctionLinearOperator(
            operator.mv, operator.in_structure(), lx.symmetric_tag
        )
        solution = tx.trace_of_function(function, tx.Exp(-1.0), k=n)
        np.testing.assert_allclose(solution.value, np.trace(sl.expm(-matrix)), rtol=1e-12)


def test_estimates_where_no_rule_is_known():
    """Of a product of general matrices: with a key, within the error bar."""
    a, b = np.eye(8) + normal(8, 8) / 8, np.eye(9) + normal(9, 9) / 9
    solution = tx.logdet(tx.kronecker(a, b), k=40, key=KEY)
    exact = np.linalg.slogdet(np.kron(a, b))[1]
    assert abs(solution.value - exact) < 4 * solution.std_err
    assert solution.stats["num_matvecs"] > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tx.kronecker(), ValueError, "`operators` must be one or more"),
        (lambda: tx.block_diagonal("a"), TypeError, "`operators` must be a matrix or"),
        (lambda: tx.kronecker_sum(np.ones((2, 3))), ValueError, "must be square"),
        (lambda: tx.toeplitz([1, 2]), TypeError, "`column` must be an array"),
        (lambda: tx.toeplitz(np.ones((2, 2))), ValueError, "`column` must have one axis"),
        (lambda: tx.toeplitz(np.ones(2), np.ones(0)), ValueError, "`row` must have ent"),
        (lambda: tx.circulant(np.float64(1)), ValueError, "`column` must have entries"),
        (
            lambda: tx.kronecker(np.eye(2), np.ones((0, 2))),
            ValueError,
            "`operators` must have entries. Found one of 0 rows and 2 columns",
        ),
        (
            lambda: tx.kronecker(np.eye(2), 1j * np.eye(2)),
            TypeError,
            "`operators` must all be real, or all complex",
        ),
        (
            lambda: tx.toeplitz(np.ma.masked_array(np.ones(2), [True, False])),
            TypeError,
            "`column`",
        ),
        (lambda: tx.circulant(np.array(["a"])), TypeError, "`column` must hold numbers"),
        (lambda: tx.logdet(tx.kronecker(np.ones((2, 3)))), ValueError, "must be square"),
        (
            lambda: tx.logdet(tx.toeplitz(np.ones(3), np.ones(2))),
            ValueError,
            "must be square",
        ),
        (lambda: tx.sparse(np.eye(3)), TypeError, "`matrix` must be a sparse matrix"),
        (
            lambda: tx.sparse(BCOO.fromdense(jnp.ones((2, 3, 3)), n_batch=1)),
            TypeError,
            "without batch and dense axes",
        ),
        (lambda: tx.sparse(sp.eye_array(3), "psd"), TypeError, "`tags` must be tags"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    """Factors are factorised in float32, and rows are not squared in less."""
    line, ring = 300 * laplacian(4), np.array([600.0, -300.0, 0.0, -300.0])
    parts = jnp.asarray(line, dtype), jnp.asarray(ring, dtype)
    operator = tx.kronecker(tx.as_operator(parts[0], tags=PSD), tx.circulant(parts[1]))
    exact = np.kron(line, circulant(ring))
    trace = np.sum(np.exp(-1e-5 * np.linalg.eigvalsh(exact)))
    solutions = [
        (trace, tx.trace_of_function(operator, tx.Exp(-1e-5))),
        (np.linalg.norm(exact), tx.frobenius_norm(operator)),
    ]
    for expected, solution in solutions:
        assert solution.value.dtype == np.float32
        np.testing.assert_allclose(solution.value, expected, rtol=1e-5)
        assert solution.stats["num_matvecs"] == 0


def test_multiples_of_the_identity_by_complex_numbers():
    """That are not real, one by one, but together."""
    factors = np.diag([1.0 + 0j, 2.0]), np.diag([3.0 + 0j, 5.0])
    product = tx.kronecker(*map(jnp.asarray, factors))
    identity = lx.IdentityLinearOperator(product.in_structure())
    operator = product + 1j * (1j * identity)
    operator = lx.TaggedLinearOperator(operator, tx.hermitian_tag)
    solution = tx.trace_of_function(operator, tx.Exp())
    exact = np.sum(np.exp(np.diag(np.kron(*factors)).real - 1))
    np.testing.assert_allclose(solution.value, exact, rtol=1e-12)
