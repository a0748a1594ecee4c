"""Numbers near the ends of the range of a dtype, where a product, a square or an error
estimate under- or overflows although the answer does not; and what is told from rounding
errors, or not, at the end of its precision. Exact answers are those of NumPy in float64,
or known."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, trace_of_matrix


KEY = jr.key(0)
SUCCESSFUL = tx.RESULTS.successful


def multiple_of_identity(factor, n, dtype, tags=PSD):
    structure = jax.ShapeDtypeStruct((n,), dtype)
    return lx.FunctionLinearOperator(lambda v: factor * v, structure, tags)


# float16: the smallest normal number is 6e-5, the smallest number 6e-8.


@pytest.mark.slow(but="XTraceEstimator")
@pytest.mark.parametrize(
    "estimator",
    [tx.XNysTraceEstimator(), tx.NystromPlusPlusEstimator(), tx.XTraceEstimator()],
    ids=lambda x: x.name,
)
def test_unit_vectors_do_not_underflow(estimator):
    """Sketches multiply by orthonormal vectors, whose entries are below 1e-2 here, and
    whose product with the operator is no number of float16."""
    n, factor = 2**14, np.float16(2.0**-18)
    operator = multiple_of_identity(factor, n, np.float16)
    solution = tx.trace(operator, estimator, k=8, key=KEY)
    assert abs(solution.value - n * factor) <= 4 * solution.std_err
    assert solution.std_err < 0.01 * n * factor


@pytest.mark.slow
def test_krylov_vectors_do_not_underflow():
    """The same of Golub-Kahan, which multiplies by the adjoint too."""
    n, factor = 2**14, np.float16(2.0**-18)
    operator = multiple_of_identity(factor, n, np.float16, ())
    solution = tx.schatten_norm(operator, 1, k=4, num_steps=2, key=KEY)
    assert abs(solution.value - n * factor) <= 4 * solution.std_err
    assert solution.std_err < 0.01 * n * factor


@pytest.mark.slow
def test_products_of_products_that_underflow_fail():
    """Of `A A*`, whose entries are no numbers of float16, nothing is known; of those
    that have a few digits there is enough."""
    small = 4e-4 * np.random.default_rng(0).standard_normal((200, 200))
    operator = lx.MatrixLinearOperator(jnp.asarray(small, np.float16))
    by_gram = tx.frobenius_norm(operator, tx.XNysTraceEstimator(), k=100, key=KEY)
    assert np.allclose(by_gram.value, np.linalg.norm(small), rtol=0.02)

    n, factor = 200, np.float16(2e-4)
    operator = multiple_of_identity(factor, n, np.float16, ())
    settings = {"k": 40, "key": KEY, "throw": False}
    plain = tx.frobenius_norm(operator, tx.HutchinsonEstimator(), **settings)
    assert plain.result == SUCCESSFUL
    assert np.allclose(plain.value, n**0.5 * float(factor), rtol=0.01)
    by_gram = tx.frobenius_norm(operator, tx.XNysTraceEstimator(), **settings)
    assert by_gram.result == tx.RESULTS.nonfinite_product


def test_largest_eigenvalues_do_not_overflow():
    """Of 1e5, whose eigenvector has no large entry."""
    matrix = 100 * np.ones((1000, 1000)) + np.eye(1000)
    operator = matrix_free(jnp.asarray(matrix, np.float16))
    solution = tx.trace(operator, tx.XTraceEstimator(), k=20, key=KEY)
    assert abs(solution.value - np.trace(matrix)) <= 4 * solution.std_err


def test_inverse_of_a_tiny_diagonal_is_finite():
    operator = lx.MatrixLinearOperator(1e-5 * jnp.eye(4, dtype=jnp.float16), PSD)
    inverse = tx.jacobi_preconditioner(operator, k=4).inverse()
    assert np.all(np.isfinite(inverse.mv(jnp.ones(4, jnp.float16))))


# float32: from 1e-38 to 3e38.


@eqx.filter_jit
def sum_of_exponentials(exponents, num_steps):
    operator = lx.DiagonalLinearOperator(exponents)
    operator = lx.TaggedLinearOperator(operator, lx.symmetric_tag)
    settings = {"k": 10, "num_steps": num_steps, "key": KEY, "throw": False}
    solution = tx.trace_of_function(operator, tx.Exp(), **settings)
    return solution.value, solution.interval(), solution.result == SUCCESSFUL


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [6, tx.AdaptiveSteps()], ids=["6", "chosen"])
def test_large_exponentials(num_steps):
    """The error of the quadrature is not below what it is because that is large."""
    exponents = np.linspace(0, 80, 200, dtype=np.float32)
    exact = np.sum(np.exp(exponents.astype(np.float64)))
    value, (low, high), successful = sum_of_exponentials(exponents, num_steps)
    assert successful
    assert np.isfinite(value)
    assert low <= exact <= high
    if not isinstance(num_steps, int):
        assert np.allclose(value, exact, rtol=0.01)
        assert high - low < 0.01 * exact


@eqx.filter_jit
def diagonal_of_inverse(matrix, **settings):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    return tx.diagonal_of_function(operator, tx.Inverse(), throw=False, **settings)


@pytest.mark.slow
def test_diagonal_of_a_tiny_inverse():
    """As many steps as where nothing is tiny."""
    matrix = hermitian(0, np.geomspace(1e-3, 1, 200))
    exact = np.mean(np.diag(np.linalg.inv(matrix)))
    numbers = []
    for scale in (1.0, 1e28):
        scaled = jnp.asarray(scale * matrix, np.float32)
        solution = diagonal_of_inverse(scaled, k=20, key=KEY)
        assert solution.result == SUCCESSFUL
        mean = np.mean(solution.value, dtype=np.float64)
        assert np.allclose(scale * mean, exact, rtol=0.1)
        numbers.append(int(solution.stats["num_steps"]))
    assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_exact_diagonal_of_a_huge_inverse():
    """Slopes of 1e20, whose squares are no numbers. The interval is of the size of
    rounding errors."""
    n = 10
    for matrix in (np.eye(n) + 0.1 * np.ones((n, n)), np.eye(n)):
        tiny = jnp.asarray(1e-10 * matrix, np.float32)
        solution = diagonal_of_inverse(tiny, k=n)
        low, high = solution.interval()
        exact = np.diag(np.linalg.inv(np.asarray(tiny, np.float64)))
        assert solution.result == SUCCESSFUL
        assert np.allclose(solution.value, exact, rtol=1e-5)
        assert np.all((low <= exact) & (exact <= high))
        assert np.all(high - low < 1e-5 * exact)


@pytest.mark.slow
def test_exact_logarithm_counts_rounding():
    """Eigenvalues up to 1e6 are known to 0.1, and so is the logarithm of the sum of their
    exponentials."""
    matrix = hermitian(0, np.linspace(0, 1e6, 50), np.float32)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
    low, high = tx.log_trace_exp(operator, -1.0, k=50).interval()
    eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
    assert low <= np.logaddexp.reduce(-eigenvalues) <= high
    assert 0 < high - low < 2


# Sums that cancel.


@pytest.mark.slow
def test_harmonic_functions():
    """The bar of a Laplacian that is zero is that of the rounding errors of its terms."""
    entries = np.random.default_rng(0).standard_normal(64)
    row = np.concatenate([entries, -entries[::-1]]) * (1 + np.arange(128) / 1e6)
    row = jnp.asarray(row, np.float32)
    fn, x = lambda x: jnp.sum(row * x**2), jnp.zeros(128, np.float32)
    _, _, solution = tx.laplacian(fn, x, k=16, key=KEY)
    exact = 2 * np.sum(np.asarray(row, np.float64))
    assert abs(solution.value - exact) <= 2 * solution.std_err
    eps = float(np.finfo(np.float32).eps)
    assert solution.std_err < 100 * eps * np.linalg.norm(row)


@pytest.mark.slow
def test_difference_of_two_exact_answers():
    """It may be smaller than the rounding errors of both."""
    x = np.linspace(0, 1, 100)

    def covariance(length):
        matrix = np.exp(-(((x[:, None] - x) / length) ** 2)) + 0.1 * np.eye(len(x))
        return matrix.astype(np.float32)

    pair = covariance(0.1), covariance(0.1 * (1 + 1e-6))
    one, other = (lx.MatrixLinearOperator(jnp.asarray(a), PSD) for a in pair)
    solution = tx.trace_difference(one, other, tx.Log(), k=len(x))
    (_, one), (_, other) = (np.linalg.slogdet(a.astype(np.float64)) for a in pair)
    assert abs(solution.value - (one - other)) <= 2 * solution.std_err
    assert 0 < solution.std_err < 0.1


@pytest.mark.slow
def test_difference_of_operators_of_different_scales():
    """Ritz values come from each operator by itself. Mixed, the smallest of one over the
    largest of the other is out of the domain."""
    eigenvalues = np.geomspace(1e-3, 1, 100)
    pair = [hermitian(0, 1e-6 * eigenvalues), hermitian(1, eigenvalues)]
    operators = [lx.MatrixLinearOperator(jnp.asarray(a, np.float32), PSD) for a in pair]
    solution = tx.trace_difference(*operators, tx.Log(), k=10, num_steps=10, key=KEY)
    smallest, largest = solution.stats["ritz_values"]
    assert largest < 2e3 * smallest
    exact = 100 * np.log(1e-6)
    assert abs(solution.value - exact) <= 4 * solution.std_err


# What holds up to rounding only.


@pytest.mark.slow
@pytest.mark.parametrize(
    "k", [20, tx.Adaptive(rtol=0.1, max_k=64)], ids=["fixed", "rounds"]
)
def test_slightly_negative_eigenvalues(k):
    """Too small to be told from rounding, and many: no sample is far off."""
    n, mean = 1000, np.full((1000, 1000), 1e-3, np.float32)
    matrix = mean - np.float32(2e-5) * np.eye(n, dtype=np.float32)
    solution = trace_of_matrix(jnp.asarray(matrix), tx.XNysTraceEstimator(), KEY, k=k)
    assert solution.result == SUCCESSFUL
    assert abs(solution.value - np.trace(matrix)) <= 4 * solution.std_err
    assert solution.std_err < 0.01


@eqx.filter_jit
def log_det(operator, **settings):
    return tx.logdet(operator, k=10, key=KEY, throw=False, **settings)


@pytest.mark.slow
def test_a_bound_above_the_spectrum_is_not_used():
    """A Ritz value below it shows that it is none. Taken for one, the bracket was empty,
    and one step enough."""
    operator = lx.MatrixLinearOperator(jnp.diag(jnp.geomspace(1e-2, 1, 200)), PSD)
    without, wrong = (
        log_det(operator, estimator=tx.SLQEstimator(lower_bound=bound))
        for bound in (None, 0.5)
    )
    assert np.allclose(wrong.value, without.value)
    assert np.allclose(wrong.stats["bracket"], without.stats["bracket"])
    assert wrong.stats["num_steps"] == without.stats["num_steps"]


@pytest.mark.slow
def test_a_shift_below_the_precision_of_products():
    """A preconditioner makes it larger, and knows less of the smallest eigenvalue."""
    d = jnp.asarray(np.repeat([16.0, 1 / 32], [80, 1920]), jnp.bfloat16)
    structure = jax.ShapeDtypeStruct((2000,), jnp.bfloat16)
    operator = lx.FunctionLinearOperator(lambda v: d * v, structure, PSD)
    solution = log_det(operator, preconditioner=tx.AutoPreconditioner(1 / 32))
    low, high = solution.interval()
    assert low <= 80 * np.log(16) - 1920 * np.log(32) <= high
    assert solution.stats["num_steps"] > 1


@pytest.mark.slow
def test_negative_eigenvalues_in_low_precision():
    """A fifth of the largest is no rounding error, whatever n is."""
    n = 700
    eigenvalues = np.repeat([1.0, -0.2], n // 2)
    matrix = jnp.asarray(hermitian(0, eigenvalues), jnp.bfloat16)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    settings = {"k": 4, "num_steps": 6, "key": KEY, "throw": False}
    solution = tx.trace_of_function(operator, tx.Power(0.5), **settings)
    assert solution.result == tx.RESULTS.outside_domain


@pytest.mark.slow
def test_solves_of_a_large_system():
    """With more than 42,000 rows an eigenvalue of one is below the limit of `lineax.CG`
    in float32."""
    n = 60_000
    operator = multiple_of_identity(2.0, n, np.float32)
    settings = {"k": 2, "num_steps": 2, "key": KEY}
    solution = tx.gaussian_log_prob(operator, jnp.ones(n, np.float32), **settings)
    exact = -n * (1 / 2 + np.log(2) + np.log(2 * np.pi)) / 2
    assert np.allclose(solution.value, exact, rtol=1e-5)

    gradient = tx.SolveGradient(lx.CG(rtol=1e-5, atol=1e-5))

    def of_scale(scale):
        operator = multiple_of_identity(scale, n, np.float32)
        return tx.logdet(operator, gradient=gradient, **settings).value

    assert np.allclose(jax.grad(of_scale)(np.float32(2.0)), n / 2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rtol", "met"),
    [
        (jnp.bfloat16, 1e-3, False),
        (jnp.bfloat16, 5e-3, True),
        (jnp.float32, 1e-6, False),
        (jnp.float32, 1e-5, True),
    ],
)
def test_tolerances_far_below_rounding(dtype, rtol, met):
    """More samples would not help, however small their error is. Where the budget has
    room for it, the exact answer is taken."""
    operator = multiple_of_identity(1.0, 1000, dtype)

    def run(max_k):
        settings = {"k": tx.Adaptive(rtol=rtol, max_k=max_k), "key": KEY}
        return tx.trace(operator, tx.HutchinsonEstimator(), throw=False, **settings)

    solution = run(64)
    assert (solution.result == SUCCESSFUL) == met
    assert met or solution.result == tx.RESULTS.precision_lost
    assert solution.stats["num_matvecs"] < 64
    assert run(2000).result == SUCCESSFUL


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 0])
def test_what_is_left_of_a_vector_at_a_breakdown(window):
    """A rounding error, in any direction. Without a basis it would be taken for a large
    error of the products."""
    n = 300
    operator = lx.MatrixLinearOperator(2 * np.eye(n, dtype=np.float32), PSD)
    settings = {"k": 10, "num_steps": 20, "key": KEY}
    lanczos = tx.SLQEstimator(krylov=tx.Lanczos(window))
    golub_kahan = tx.SLQEstimator(krylov=tx.GolubKahan(window))
    for solution, exact in (
        (tx.logdet(operator, lanczos, **settings), n * np.log(2)),
        (tx.schatten_norm(operator, 1, golub_kahan, **settings), 2 * n),
    ):
        low, high = solution.interval()
        assert low <= exact <= high < low + 1e-4 * exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (tx.Power(0.1), 100),
        (tx.Power(0.5), 100),
        (tx.Power(1.5), 100),
        (tx.Inverse(1e-3), 200e3 + 100 / 1.001),
        (tx.Inverse(1e-6), 200e6 + 100),
        (tx.Entropy(), 0),
    ],
    ids=["x^0.1", "x^0.5", "x^1.5", "ridge", "small ridge", "entropy"],
)
def test_exact_answers_of_rank_deficient_operators(function, exact):
    """A projection of rank 100 in 300 dimensions, float32. The eigenvalues that are zero
    come with rounding errors, and 200 of these add up: the interval has the truth, or the
    call is not successful."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((300, 100)))[0]
    basis = jnp.asarray(basis, np.float32)
    operator = lx.FunctionLinearOperator(
        lambda v: basis @ (basis.T @ v), jax.ShapeDtypeStruct((300,), np.float32), PSD
    )
    solution = tx.trace_of_function(operator, function, k=300, throw=False)
    low, high = solution.interval()
    assert low <= exact <= high
    assert solution.result == SUCCESSFUL or high - low > 0.02 * solution.value


@pytest.mark.slow
def test_singular_values_after_a_breakdown():
    """Rounding errors of an orthogonal matrix, in a basis that they lose their
    orthogonality to, would make a singular value of zero."""
    orthogonal = np.linalg.qr(np.random.default_rng(0).standard_normal((200, 200)))[0]
    operator = lx.MatrixLinearOperator(np.float32(2.5 * orthogonal))
    of_key = lambda key: tx.logdet(operator, k=8, num_steps=30, key=key, throw=False)  # noqa: E731
    solution = jax.vmap(of_key)(jax.random.split(KEY, 10))
    assert np.all(solution.result == SUCCESSFUL)
    np.testing.assert_allclose(solution.value, 200 * np.log(2.5), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [tx.XTraceEstimator(), tx.XDiagEstimator(), tx.XNysTraceEstimator()],
    ids=lambda x: x.name,
)
def test_a_tail_below_the_precision_of_products(estimator):
    """In bfloat16, of five large eigenvalues and the identity: the estimate, and its
    derivative in these eigenvalues, which a basis that is cut at the precision of the
    products makes 4% to 18% too large or too small."""
    n, rank, k = 50_000, 5, 20
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((n, rank)))[0]
    basis, size = basis.astype(np.float32), 32 * np.float32(n) ** 0.5
    if estimator.name != "XNysTraceEstimator":
        size = 4 * size

    @jax.jit
    @ft.partial(jax.value_and_grad, has_aux=True)
    def estimate(size, basis, key):
        def product(v):
            v = v.astype(np.float32)
            return (size * (basis @ (basis.T @ v)) + v).astype(jnp.bfloat16)

        structure = jax.ShapeDtypeStruct((n,), jnp.bfloat16)
        operator = lx.FunctionLinearOperator(product, structure, PSD)
        solution = tx.trace(operator, estimator, k=k, key=key, throw=False)
        return solution.value, solution.std_err

    found = [estimate(size, basis, key) for key in jr.split(KEY, 4)]
    values, bars = np.mean([one for one, _ in found], axis=0)
    assert abs(values - (rank * size + n)) < 2 * bars
    assert abs(np.mean([slope for _, slope in found]) / rank - 1) < 5e-3


@pytest.mark.slow
def test_diagonals_that_decay():
    """The error of each entry counts as that of the largest, which says little of all."""
    row = 1 / np.arange(1, 2049, dtype=np.float32)
    structure = jax.ShapeDtypeStruct(row.shape, row.dtype)
    operator = lx.FunctionLinearOperator(lambda v: row * (row @ v), structure, PSD)
    solution = tx.diagonal(operator, k=tx.Adaptive(rtol=5e-4, max_k=64), key=KEY)
    assert np.allclose(solution.value, row**2, rtol=0, atol=1e-5)
    assert solution.stats["num_matvecs"] < 64


@pytest.mark.slow
def test_bars_of_numbers_near_the_largest():
    """Of row norms, whose squares are; merged from blocks too. They were zero where the
    reciprocal of the largest deviation of a sample underflows."""
    matrix = np.random.default_rng(0).standard_normal((30, 30))
    settings = {"k": 12, "key": jr.key(0)}

    @jax.jit
    def relative(matrix, scale):
        operator = lx.MatrixLinearOperator(matrix)
        found = tx.row_norms(operator, **settings)
        blocks = tx.Local(block_size=4)
        merged = tx.row_norms(operator, execution=blocks, **settings)
        return [x.std_err / scale for x in (found, merged)]

    matrix = jnp.asarray(matrix / np.linalg.norm(matrix, axis=1).max(), jnp.float32)
    expected = relative(matrix, jnp.float32(1))
    for scale in np.float32([1e-15, 7.5e18]):
        assert np.allclose(relative(scale * matrix, scale), expected, rtol=1e-3)
