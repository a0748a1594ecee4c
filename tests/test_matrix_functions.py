"""Traces of functions and log-determinants: unbiased within what they report, exact where
they must be, and with the right derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx

from .helpers import matrix_free, spectrum_matrix, z_score


PSD = lx.positive_semidefinite_tag
KEY = jr.key(3)
N = 40


def over_keys(function, num_keys=300):
    keys = jr.split(jr.key(20261121), num_keys)
    return jax.jit(lambda keys: jax.lax.map(function, keys))(keys)


def rbf(n, noise, dtype):
    x = jr.uniform(jr.key(0), (n, 2), jnp.float64)
    square = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    return (jnp.exp(-square / (2 * 0.2**2)) + noise * jnp.eye(n)).astype(dtype)


def laplacian(side, dtype):
    line = 2 * jnp.eye(side) - jnp.eye(side, k=1) - jnp.eye(side, k=-1)
    return (jnp.kron(line, jnp.eye(side)) + jnp.kron(jnp.eye(side), line)).astype(dtype)


def random_spd(condition, dtype):
    return spectrum_matrix(jr.key(1), jnp.geomspace(1, condition, 200), dtype)


PROBLEMS = {
    "rbf, noise 1e-2": lambda: rbf(300, 1e-2, jnp.float64),
    "rbf, noise 1e-4": lambda: rbf(300, 1e-4, jnp.float64),
    "rbf, noise 1e-2, float32": lambda: rbf(300, 1e-2, jnp.float32),
    "rbf, noise 1e-4, float32": lambda: rbf(300, 1e-4, jnp.float32),
    "laplacian": lambda: laplacian(18, jnp.float64),
    "condition 1e2": lambda: random_spd(1e2, jnp.float64),
    "condition 1e8": lambda: random_spd(1e8, jnp.float64),
    "complex": lambda: random_spd(1e3, jnp.complex128),
}


@pytest.mark.parametrize(
    ("name", "window"), [*((name, None) for name in PROBLEMS), ("rbf, noise 1e-4", 0)]
)
def test_error_is_covered(name, window):
    """Three standard errors and the bracket, for 99% of 200 keys, at a depth that is far
    too small for some of these; the bracket's ends are on both sides of the value."""
    matrix = PROBLEMS[name]()
    wide = jnp.promote_types(matrix.dtype, jnp.float64)
    _, exact = jnp.linalg.slogdet(matrix.astype(wide))
    estimator = tx.SLQEstimator(window=window)

    def run(key):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        solution = tx.logdet(operator, estimator, k=10, num_steps=20, key=key)
        return solution.value, solution.std_err, solution.stats["bracket"]

    value, std_err, bracket = over_keys(run, 200)
    assert jnp.all((bracket[:, 0] <= value) & (value <= bracket[:, 1]))
    low, high = bracket[:, 0] - 3 * std_err, bracket[:, 1] + 3 * std_err
    assert jnp.mean((low <= exact) & (exact <= high)) >= 0.99


def test_brackets_hold_for_each_probe_and_tighten():
    """Against `z* f(A) z` from an eigendecomposition."""
    matrix = rbf(100, 1e-2, jnp.float64)
    values, vectors = jnp.linalg.eigh(matrix)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    probes = tx.RademacherSampler()(KEY, 100, 12)
    weights = (vectors.T @ probes) ** 2
    for function in (tx.Log(), tx.Entropy()):
        exact = function(values) @ weights
        widths = []
        for lower_bound, steps in ((None, 12), (0.009, 12), (0.009, 40)):
            if lower_bound is not None:
                lower_bound = jnp.asarray(lower_bound)
            estimator = tx.SLQEstimator(lower_bound=lower_bound)
            solution = tx.trace_of_function(
                operator, function, estimator, k=12, num_steps=steps, key=KEY
            )
            low, high = solution.stats["sample_brackets"].T
            slack = 1e-10 * jnp.max(jnp.abs(exact))
            assert jnp.all((low <= exact + slack) & (exact <= high + slack))
            widths.append(jnp.mean(high - low))
        assert widths[0] >= widths[1] > 10 * widths[2]


def test_exact_for_polynomials():
    matrix = spectrum_matrix(jr.key(2), jnp.linspace(-1, 2, N), jnp.float64)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    probes = tx.RademacherSampler()(KEY, N, 6)
    steps = 4
    for degree in (0, 1, 2 * steps - 1, 2 * steps):
        power = jnp.linalg.matrix_power(matrix, degree)
        exact = jnp.sum(probes * (power @ probes), axis=0)
        solution = tx.trace_of_function(
            operator, tx.Power(degree), k=6, num_steps=steps, key=KEY
        )
        samples = solution.stats["samples"]
        assert jnp.allclose(samples, exact, rtol=1e-11) == (degree < 2 * steps)


EXACT = {
    "identity": 2.5 * jnp.ones(N),
    "repeated eigenvalues": jnp.repeat(jnp.array([0.5, 2.0, 3.0, 7.0]), N // 4),
    "rank one plus identity": jnp.ones(N).at[3].set(50.0),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.complex128])
@pytest.mark.parametrize("name", EXACT)
def test_exact_after_an_early_breakdown(name, dtype):
    """Few distinct eigenvalues: the quadrature is exact, also in what it reports."""
    matrix = spectrum_matrix(jr.key(4), EXACT[name], dtype)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    probes = tx.RademacherSampler()(KEY, N, 5).astype(dtype)
    values, vectors = jnp.linalg.eigh(matrix.astype(jnp.promote_types(dtype, float)))
    exact = jnp.log(values) @ jnp.abs(vectors.conj().T @ probes) ** 2
    solution = tx.logdet(operator, k=5, num_steps=12, key=KEY)
    tolerance = 100 * float(jnp.finfo(dtype).eps) * N
    assert jnp.allclose(solution.stats["samples"], exact, rtol=1e-12, atol=tolerance)
    low, high = solution.stats["bracket"]
    assert high - low < tolerance
    if name == "identity":
        assert jnp.abs(solution.value - N * jnp.log(2.5)) < tolerance
        assert solution.std_err < tolerance


def test_exact_after_n_steps():
    matrix = random_spd(1e4, jnp.float64)[:25, :25]
    operator = lx.MatrixLinearOperator(matrix, PSD)
    solution = tx.logdet(operator, k=3, num_steps=25, key=KEY)
    values, vectors = jnp.linalg.eigh(matrix)
    probes = tx.RademacherSampler()(KEY, 25, 3)
    exact = jnp.log(values) @ (vectors.T @ probes) ** 2
    assert jnp.allclose(solution.stats["samples"], exact, rtol=1e-9)


FUNCTIONS = {
    "log": tx.Log(),
    "inverse": tx.Inverse(),
    "square root": tx.Power(0.5),
    "cube": tx.Power(3),
    "exp": tx.Exp(-0.5),
    "entropy": tx.Entropy(),
    "callable": lambda x: jnp.tanh(x) / (1 + x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivative_of_each_function(name):
    """Lanczos has converged at 14 steps; one direction; false alarm 6e-5. The derivative
    with `k >= n` is that of the exact trace."""
    function = FUNCTIONS[name]
    values = jnp.linspace(1, 3, N)
    matrix = spectrum_matrix(jr.key(5), values, jnp.float64)
    direction = spectrum_matrix(jr.key(6), jnp.linspace(-1, 2, N), jnp.float64)

    def value(t, key, k, num_steps=14):
        operator = lx.MatrixLinearOperator(matrix + t * direction, PSD)
        return tx.trace_of_function(
            operator, function, k=k, num_steps=num_steps, key=key
        ).value

    def exact(t):
        values = jnp.linalg.eigvalsh(matrix + t * direction)
        return jnp.sum(jax.vmap(function)(values))

    slope = jax.grad(exact)(0.0)
    assert jnp.allclose(jax.grad(value)(0.0, None, N), slope, rtol=1e-9)
    slopes = over_keys(lambda key: jax.grad(value)(0.0, key, 4))
    assert z_score(slopes, slope) < 4


def kernel(theta, n=N):
    x = jnp.linspace(0, 1, n)
    square = (x[:, None] - x) ** 2
    return jnp.exp(-square / (2 * theta[0] ** 2)) + theta[1] * jnp.eye(n)


THETA = jnp.array([0.1, 0.05])


def with_nystrom(theta, operator, key):
    key = jr.fold_in(key, 1)
    return tx.nystrom_preconditioner(operator, 16, key=key, shift=theta[1])


def with_estimated_shift(theta, operator, key):
    return tx.nystrom_preconditioner(operator, 16, key=jr.fold_in(key, 1))


def with_cholesky(theta, operator, key):
    return tx.pivoted_cholesky_preconditioner(operator, 16, shift=theta[1])


def without(theta, operator, key):
    return None


PRECONDITIONERS = [without, with_nystrom, with_estimated_shift, with_cholesky]


def gp_logdet(theta, key, preconditioner=without, **kwargs):
    operator = lx.MatrixLinearOperator(kernel(theta), PSD)
    return tx.logdet(
        operator,
        k=4,
        num_steps=30,
        key=key,
        preconditioner=preconditioner(theta, operator, key),
        **kwargs,
    ).value


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_gradient_of_a_log_determinant(preconditioner):
    """Value and both derivatives by z-test, 300 keys, false alarm 6e-5 each; and the
    preconditioner lowers the spread of all three."""
    exact = lambda theta: jnp.linalg.slogdet(kernel(theta))[1]  # noqa: E731

    def run(preconditioner):
        def one(key):
            value, slope = jax.value_and_grad(gp_logdet)(THETA, key, preconditioner)
            return jnp.append(value, slope)

        return over_keys(one)

    found = run(preconditioner)
    expected = jnp.append(exact(THETA), jax.grad(exact)(THETA))
    for samples, each in zip(found.T, expected, strict=True):
        assert z_score(samples, each) < 4
    if preconditioner is not without:
        plain = run(without)
        assert jnp.all(jnp.std(found, axis=0) < jnp.std(plain, axis=0) / 3)


def test_hessian_by_solves():
    """All second derivatives, 300 keys, false alarm 6e-5 each."""
    exact = jax.hessian(lambda theta: jnp.linalg.slogdet(kernel(theta))[1])(THETA)
    gradient = tx.SolveGradient(lx.CG(rtol=1e-10, atol=1e-10))
    found = over_keys(
        lambda key: jax.hessian(lambda t: gp_logdet(t, key, gradient=gradient))(THETA)
    )
    for i in range(2):
        for j in range(2):
            assert z_score(found[:, i, j], exact[i, j]) < 4


@pytest.mark.parametrize("function", [tx.Log(), tx.Inverse(), tx.Power(-2)])
def test_gradient_by_solves_equals_that_by_lanczos(function):
    matrix = kernel(jnp.array([0.1, 0.3]))
    gradients = [tx.LanczosGradient(), tx.SolveGradient(lx.CG(1e-12, 1e-12))]

    def value(matrix, gradient):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return tx.trace_of_function(
            operator, function, k=5, num_steps=N, key=KEY, gradient=gradient
        ).value

    first, second = (eqx.filter_jit(jax.grad(value))(matrix, each) for each in gradients)
    assert jnp.allclose(first, second, rtol=1e-6, atol=1e-6 * jnp.max(jnp.abs(first)))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@pytest.mark.parametrize("by_solves", [False, True])
def test_general_square(dtype, by_solves):
    """log|det| and its derivative in one direction, 300 keys, false alarm 6e-5 each."""
    matrix = jr.normal(jr.key(7), (N, N), dtype) / N**0.5 + 2 * jnp.eye(N)
    direction = jr.normal(jr.key(8), (N, N), dtype)
    solver = lx.GMRES(rtol=1e-10, atol=1e-10, restart=N)
    gradient = tx.SolveGradient(solver) if by_solves else tx.LanczosGradient()

    def value(t, key, k):
        operator = matrix_free(matrix + t * direction)
        return tx.logdet(operator, k=k, num_steps=25, key=key, gradient=gradient).value

    exact = lambda t: jnp.linalg.slogdet(matrix + t * direction)[1]  # noqa: E731
    values, slopes = over_keys(lambda key: jax.value_and_grad(value)(0.0, key, 4))
    assert z_score(values, exact(0.0)) < 4
    assert z_score(slopes, jax.grad(exact)(0.0)) < 4
    found = jax.value_and_grad(value)(0.0, None, N)
    assert jnp.allclose(jnp.array(found), jnp.array(jax.value_and_grad(exact)(0.0)))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
def test_krylov_aware(dtype):
    """Value and derivative by z-test, 300 keys, false alarm 6e-5 each, and a spread far
    below that of plain quadrature for the same products."""
    matrix = spectrum_matrix(jr.key(9), 6 * 0.8 ** jnp.arange(80) + 0.1, dtype)
    direction = spectrum_matrix(jr.key(10), jnp.linspace(-1, 2, 80), dtype)

    def run(estimator, key):
        def value(t):
            operator = lx.MatrixLinearOperator(matrix + t * direction, PSD)
            solution = tx.trace_of_function(
                operator, tx.Exp(3.0), estimator, k=8, num_steps=10, key=key
            )
            return solution.value, solution.std_err

        (found, std_err), slope = jax.value_and_grad(value, has_aux=True)(0.0)
        return found, slope, std_err

    values, vectors = jnp.linalg.eigh(matrix)
    diagonal = jnp.sum(vectors.conj() * (direction @ vectors), axis=0).real
    plain = over_keys(lambda key: run(tx.SLQEstimator(), key))
    found = over_keys(lambda key: run(tx.KrylovAwareEstimator(), key))
    for value, slope, std_err in (plain, found):
        assert z_score(value, jnp.sum(jnp.exp(3 * values))) < 4
        assert z_score(slope, jnp.sum(3 * jnp.exp(3 * values) * diagonal)) < 4
        assert 0.9 < jnp.sqrt(jnp.mean(std_err**2)) / jnp.std(value) < 2.5
    assert jnp.std(found[0]) < jnp.std(plain[0]) / 4
    assert jnp.std(found[1]) < jnp.std(plain[1]) / 2


def test_derivative_in_the_parameters_of_a_function():
    values = jnp.linspace(0, 2, N)
    operator = lx.MatrixLinearOperator(
        spectrum_matrix(jr.key(11), values, jnp.float64), lx.symmetric_tag
    )

    def value(scale, k, function):
        return tx.trace_of_function(
            operator, function(scale), k=k, num_steps=12, key=KEY
        ).value

    for function in (tx.Exp, lambda scale: lambda x: jnp.exp(scale * x)):
        slope = jax.grad(value)(-0.7, N, function)
        assert jnp.allclose(slope, jnp.sum(values * jnp.exp(-0.7 * values)))
        difference = value(-0.7 + 1e-6, 4, function) - value(-0.7 - 1e-6, 4, function)
        assert jnp.allclose(jax.grad(value)(-0.7, 4, function), difference / 2e-6)


@pytest.mark.parametrize("gradient", [False, True])
def test_number_of_products(gradient):
    """A derivative adds the one that it is of, and its tangent, for each probe."""
    calls = []

    def mv(v):
        jax.debug.callback(lambda _: calls.append(1), v)
        return jnp.linspace(1, 2, N) * v

    def value(t):
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        operator = lx.FunctionLinearOperator(lambda v: t * mv(v), structure, PSD)
        solution = tx.logdet(operator, k=4, num_steps=6, key=KEY)
        assert solution.stats["num_matvecs"] == 24
        return solution.value

    jax.block_until_ready((jax.grad(value) if gradient else value)(1.0))
    jax.effects_barrier()
    assert len(calls) == 24 + 8 * gradient


def test_function_of():
    """f(A) as an operator: products, traces of it by other estimators, its diagonal."""
    values = jnp.geomspace(0.1, 10, N)
    matrix = spectrum_matrix(jr.key(12), values, jnp.complex128)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    inverse = tx.function_of(operator, tx.Inverse(), N)
    dense = jnp.linalg.inv(matrix)
    vector = jr.normal(jr.key(13), (N,), jnp.complex128)
    assert jnp.allclose(inverse.mv(vector), dense @ vector)
    assert jnp.allclose(inverse.transpose().mv(vector), dense.T @ vector)
    assert jnp.allclose(jax.jvp(inverse.mv, (vector,), (vector,))[1], dense @ vector)
    assert jnp.all(inverse.mv(jnp.zeros_like(vector)) == 0)
    assert jnp.allclose(inverse.as_matrix(), dense)
    assert jnp.allclose(lx.diagonal(inverse), jnp.diagonal(dense))
    for estimator in (
        tx.HutchPlusPlusEstimator(),
        tx.XTraceEstimator(),
        tx.XNysTraceEstimator(),
    ):
        solution = tx.trace(inverse, estimator, k=24, key=KEY)
        error = jnp.abs(solution.value - jnp.trace(dense))
        assert error < 6 * solution.std_err
    assert not lx.is_positive_semidefinite(tx.function_of(operator, tx.Log(), 5))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128, jnp.float32])
def test_preconditioner(dtype):
    """P, its inverse and log-determinant against dense algebra; exact for a matrix of low
    rank plus a multiple of the identity."""
    low = spectrum_matrix(
        jr.key(14), jnp.geomspace(1, 1e3, N) * (jnp.arange(N) > 30), dtype
    )
    matrix = low + 0.1 * jnp.eye(N, dtype=dtype)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    size = float(jnp.linalg.norm(matrix))
    tolerance = 1e3 * float(jnp.finfo(dtype).eps) * size
    nystrom = tx.nystrom_preconditioner(operator, 12, key=KEY, shift=0.1)
    cholesky = tx.pivoted_cholesky_preconditioner(operator, 12, shift=0.1)
    estimated = tx.nystrom_preconditioner(operator, 12, key=KEY)
    for preconditioner in (nystrom, cholesky, estimated):
        u, values = preconditioner.vectors, preconditioner.values
        dense = (u * values) @ u.conj().T + preconditioner.shift * jnp.eye(N)
        inverse = preconditioner.inverse().as_matrix()
        assert jnp.allclose(inverse @ dense, jnp.eye(N), atol=tolerance)
        _, expected = jnp.linalg.slogdet(dense)
        assert jnp.allclose(preconditioner.logdet, expected, atol=tolerance)
        assert preconditioner.num_matvecs == 12
        if preconditioner is not estimated:
            assert jnp.allclose(dense, matrix, atol=tolerance)
    solution = tx.logdet(operator, k=4, num_steps=5, key=KEY, preconditioner=nystrom)
    assert jnp.allclose(solution.value, jnp.linalg.slogdet(matrix)[1], atol=tolerance)
    assert solution.stats["num_matvecs"] == 32


def test_preconditioner_of_another_matrix_is_unbiased():
    """As in training, where one is kept for some steps; 300 keys, false alarm 6e-5."""
    old = lx.MatrixLinearOperator(kernel(1.2 * THETA), PSD)
    preconditioner = tx.nystrom_preconditioner(old, 8, key=KEY, shift=0.06)

    def run(key):
        value = lambda theta: gp_logdet(theta, key, lambda *_: preconditioner)  # noqa: E731
        value, slope = jax.value_and_grad(value)(THETA)
        return jnp.append(value, slope)

    exact = lambda theta: jnp.linalg.slogdet(kernel(theta))[1]  # noqa: E731
    expected = jnp.append(exact(THETA), jax.grad(exact)(THETA))
    for samples, each in zip(over_keys(run).T, expected, strict=True):
        assert z_score(samples, each) < 4


def test_cg_with_the_preconditioner():
    """The same preconditioner in a solve: an order of magnitude fewer steps."""
    operator = lx.MatrixLinearOperator(rbf(300, 1e-3, jnp.float64), PSD)
    preconditioner = tx.nystrom_preconditioner(operator, 90, key=KEY, shift=1e-3)
    right = jr.normal(jr.key(15), (300,))
    solver = lx.CG(rtol=1e-8, atol=1e-8, max_steps=2000)
    steps = []
    for options in ({}, {"preconditioner": preconditioner.inverse()}):
        solution = lx.linear_solve(operator, right, solver, options=options)
        assert jnp.linalg.norm(operator.mv(solution.value) - right) < 1e-5
        steps.append(solution.stats["num_steps"])
    assert steps[1] < steps[0] / 10


def test_custom_function():
    class Softplus(tx.AbstractSpectralFunction):
        sharpness: jax.Array
        semidefinite_domain: bool = False
        singular_at_zero: bool = False
        bracketed: bool = False
        nonnegative: bool = True

        def __call__(self, x):
            return jax.nn.softplus(self.sharpness * x)

    matrix = spectrum_matrix(jr.key(16), jnp.linspace(-1, 1, N), jnp.float64)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    function = Softplus(jnp.asarray(2.0))
    exact = jnp.sum(jax.nn.softplus(2 * jnp.linspace(-1, 1, N)))
    assert jnp.allclose(
        tx.trace_of_function(operator, function, k=N, num_steps=1).value, exact
    )
    solution = tx.trace_of_function(operator, function, k=8, num_steps=12, key=KEY)
    assert jnp.abs(solution.value - exact) < 6 * solution.std_err
    assert eqx.tree_equal(solution.result, tx.RESULTS.successful)
