"""Traces of functions of operators that are not Hermitian: the Arnoldi run by its
defining identity, functions of small matrices, and estimates against dense linear
algebra."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
from scipy.linalg import block_diag

import traceax as tx
from traceax._krylov.arnoldi_recurrence import arnoldi_advance, arnoldi_run, arnoldi_start
from traceax._quadrature.callables import as_spectral_function
from traceax.internal import flatten

from ..helpers import hermitian, matrix_free, z_score


N = 24
KEY = jr.key(0)


def normal(seed, shape, dtype=np.float64):
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (parts[0] + 1j * parts[1] if is_complex else parts[0]).astype(dtype)


def nilpotent():
    """The adjacency matrix of a directed graph without cycles, in another order."""
    weights = np.triu(normal(1, (N, N)) * (normal(2, (N, N)) > 0.8), 1) ** 2
    order = np.random.default_rng(3).permutation(N)
    return weights[np.ix_(order, order)]


def rotation():
    angles = np.linspace(0.1, 3.0, N // 2)
    blocks = [[[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angles]
    return scipy.linalg.block_diag(*blocks)


def clustered():
    """Triangular, with eigenvalues that are almost the same."""
    return np.diag(1 + 1e-3 * normal(4, (N,))) + np.triu(normal(5, (N, N)), 1) / 4


MATRICES = {
    "random": lambda: 1.5 * normal(0, (N, N)) / N**0.5,
    "nilpotent": nilpotent,
    "rotation": rotation,
    "clustered": clustered,
    "Jordan block": lambda: 0.5 * np.eye(N) + np.eye(N, k=1),
    "complex": lambda: normal(6, (N, N), complex) / N**0.5,
    "hermitian": lambda: hermitian(7, np.linspace(-1, 2, N)),
}
# With spectra, and numerical ranges, to the right of the imaginary axis.
POSITIVE = {
    "random": lambda: 3 * np.eye(N) + normal(0, (N, N)) / N**0.5,
    "complex": lambda: 3 * np.eye(N) + 0.7 * normal(6, (N, N), complex) / N**0.5,
    "symmetric": lambda: hermitian(8, np.geomspace(0.1, 5, N)),
}
every_matrix = pytest.mark.parametrize("name", MATRICES)


def precisions(matrix):
    """Its own dtype and the narrow one."""
    return [matrix.dtype, np.dtype("c8" if np.iscomplexobj(matrix) else "f4")]


def eps_of(dtype):
    return float(np.finfo(dtype).eps)


def tanh_fraction(x):
    return jnp.tanh(x) / (1 + x / 8)


def dense(f, df):
    """f and f' of a matrix by eigenvalues, in double precision."""

    def apply(matrix):
        values, vectors = np.linalg.eig(matrix)
        inverse = np.linalg.inv(vectors)
        return tuple((vectors * g(values)) @ inverse for g in (f, df))

    return apply


def dense_exp(matrix):
    value = scipy.linalg.expm(-0.5 * matrix)
    return value, -0.5 * value


# With a function and its derivative of a dense matrix.
FUNCTIONS = {
    "exp": (tx.Exp(-0.5), dense_exp),
    "cube": (tx.Power(3), dense(lambda x: x**3, lambda x: 3 * x**2)),
    "constant": (tx.Power(0), dense(lambda x: x**0, lambda x: 0 * x)),
    "inverse": (tx.Inverse(), dense(lambda x: 1 / x, lambda x: -1 / x**2)),
    "inverse square": (tx.Power(-2), dense(lambda x: x**-2, lambda x: -2 * x**-3)),
    "log": (tx.Log(), dense(np.log, lambda x: 1 / x)),
    "root": (tx.Power(0.5), dense(np.sqrt, lambda x: 0.5 / np.sqrt(x))),
    "entropy": (
        tx.Entropy(),
        dense(lambda x: -x * np.log(x), lambda x: -1 - np.log(x)),
    ),
    "callable": (
        tanh_fraction,
        dense(
            lambda x: np.tanh(x) / (1 + x / 8),
            lambda x: (
                1 / np.cosh(x) ** 2 / (1 + x / 8) - np.tanh(x) / (1 + x / 8) ** 2 / 8
            ),
        ),
    ),
}


@eqx.filter_jit
def arnoldi_of(matrix, start, num_steps, scale=1):
    eps = float(jnp.finfo(matrix.dtype).eps)
    state, mv = arnoldi_start(start, num_steps), lambda v: matrix @ (v * scale)
    return arnoldi_run(arnoldi_advance(mv, state, 0, num_steps, eps=eps), num_steps)


@eqx.filter_jit
def trace_of(matrix, function, key=KEY, *, k, num_steps, tags=(), estimator=None, **more):
    operator = lx.MatrixLinearOperator(matrix, tags)
    estimator = tx.SLQEstimator() if estimator is None else estimator
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False}
    return tx.trace_of_function(operator, function, estimator, **settings, **more)


@eqx.filter_jit
def forms(matrix, probes, function, num_steps):
    """What Arnoldi tells from each of the rows of `probes`."""
    flat = flatten(lx.MatrixLinearOperator(matrix))
    settings = function, num_steps, None, 1
    return jax.vmap(lambda z: tx.Arnoldi().form(flat, z, *settings))(probes)


def signs(count, dtype, seed=9):
    return np.sign(normal(seed, (count, N))).astype(dtype)


@every_matrix
def test_arnoldi_relation(name):
    matrix = MATRICES[name]()
    for dtype in precisions(matrix):
        a, start = matrix.astype(dtype), normal(1, (N,), dtype)
        run = jax.tree.map(np.asarray, arnoldi_of(a, start, 12))
        eps, basis = eps_of(dtype), run.basis.T
        size = np.linalg.norm(a, 2)
        assert run.matrix.dtype == basis.dtype == dtype
        assert np.allclose(run.norm * basis[:, 0], start, rtol=20 * eps)
        alive = np.linalg.norm(basis, axis=0) > 0
        assert np.allclose(basis.conj().T @ basis, np.diag(alive), atol=20 * eps)
        rest = a @ basis - basis @ run.matrix
        assert np.linalg.norm(rest[:, :-1]) < 60 * eps * size
        assert np.abs(np.linalg.norm(rest[:, -1]) - run.residual) < 20 * eps * size
        assert np.all(np.tril(run.matrix, -2) == 0)
        assert (run.residual == 0) == (not np.all(alive))


def test_arnoldi_is_scale_invariant():
    """Squares of the vectors' entries are beyond float32."""
    matrix = MATRICES["random"]().astype(np.float32)
    start = normal(1, (N,), np.float32)
    plain = arnoldi_of(matrix, start, 10, np.float32(1))
    for scale in np.float32([1e-25, 1e25]):
        scaled = arnoldi_of(matrix, start * scale, 10, scale)
        assert np.allclose(scaled.basis, plain.basis, atol=1e-4), scale
        assert np.allclose(scaled.matrix / scale, plain.matrix, atol=1e-5), scale
        assert np.allclose(scaled.norm / scale, plain.norm, rtol=1e-6), scale


@pytest.mark.parametrize("size", [1, 2, 5])
def test_breakdown_ends_the_run_exactly(size):
    """In an invariant subspace: of an orthogonal cycle, or from the zero vector."""
    cycle = np.roll(np.eye(size), 1, axis=0)
    matrix = scipy.linalg.block_diag(cycle, 3 * np.eye(N - size))
    start = np.eye(N)[0]
    run = arnoldi_of(matrix, start, 8)
    assert run.residual == 0
    assert np.all(run.basis[size:] == 0)
    assert np.allclose(run.matrix[:size, :size], cycle)
    assert np.all(np.asarray(run.matrix)[size:] == 0)
    empty = arnoldi_of(matrix, 0 * start, 8)
    found = empty.matrix, empty.residual, empty.basis, empty.norm
    assert all(np.all(x == 0) for x in found)


@eqx.filter_jit
def of_matrix(functions, matrix):
    """Each of the functions, and its derivative, in one program."""
    convert = ft.partial(as_spectral_function, dtype=matrix.dtype, hermitian=False)
    return [convert(function).of_matrix(matrix) for function in functions]


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIVE)
def test_functions_of_small_matrices(name):
    """And their derivatives, of matrices whose eigenvectors are well conditioned."""
    matrix = POSITIVE[name]()
    functions, references = zip(*FUNCTIONS.values(), strict=True)
    for dtype in precisions(matrix)[: 1 if name == "complex" else 2]:
        pairs = of_matrix(functions, matrix.astype(dtype))
        for function, found, reference in zip(FUNCTIONS, pairs, references, strict=True):
            for ours, exact in zip(found, reference(matrix), strict=True):
                assert ours.dtype == dtype
                error = np.linalg.norm(ours - exact) / (np.linalg.norm(exact) + 1)
                assert error < 2e3 * eps_of(dtype), (function, dtype)


@pytest.mark.parametrize("name", ["nilpotent", "clustered", "Jordan block"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_defective_matrices_keep_half_the_digits(name, dtype):
    """By eigenvalues, where these have no correct digit of their own, and all digits
    where the function knows better."""
    matrix = MATRICES[name]()
    exact = scipy.linalg.expm(matrix)
    size = np.linalg.norm(exact)
    half, whole = of_matrix((jnp.exp, tx.Exp()), matrix.astype(dtype))
    for ours in half:
        assert np.linalg.norm(ours - exact) < 40 * eps_of(dtype) ** 0.5 * size
    for ours in whole:
        assert np.linalg.norm(ours - exact) < 100 * eps_of(dtype) * size


@pytest.mark.slow
@every_matrix
def test_exact_once_the_space_is_whole(name):
    """Each sample, by more steps than there are dimensions, after breakdowns too."""
    matrix = MATRICES[name]()
    exact = scipy.linalg.expm(matrix)
    for dtype in precisions(matrix):
        probes = signs(6, dtype)
        found = forms(matrix.astype(dtype), probes, tx.Exp(), N + 3)
        assert found.value.dtype == dtype
        values = np.einsum("ki,ij,kj->k", probes, exact, probes)
        tolerance = 100 * eps_of(dtype) * N * np.linalg.norm(exact, 2)
        assert np.max(np.abs(np.asarray(found.value) - values)) < tolerance
        right = np.asarray(found.right)[:, 0]
        assert np.max(np.abs(right - probes @ exact.T)) < tolerance
        assert np.all(np.diff(found.bracket) < 10 * tolerance)


def test_exact_for_polynomials():
    matrix, steps, probes = MATRICES["random"](), 5, signs(4, float)
    for degree in (steps, steps + 1):
        power = np.linalg.matrix_power(matrix, degree)
        exact = np.einsum("ki,ij,kj->k", probes, power, probes)
        found = forms(matrix, probes, tx.Power(degree), steps)
        width = np.diff(found.bracket)[:, 0]
        right = np.abs(found.value - exact) <= 1e-11 * np.abs(exact)
        assert np.all(right == (degree <= steps)), degree
        assert np.all((width < 1e-11 * found.magnitude) == (degree <= steps)), degree


@pytest.mark.slow
@every_matrix
def test_bracket_sees_the_krylov_error(name):
    """The mean error of the quadratic forms of 16 probes is below what their brackets
    say, at few steps and at many."""
    matrix = 2 * MATRICES[name]()
    probes, exact = signs(16, matrix.dtype), scipy.linalg.expm(matrix)
    exact = np.einsum("ki,ij,kj->k", probes, exact, probes)
    for steps in (1, 11):
        found = jax.tree.map(np.asarray, forms(matrix, probes, tx.Exp(), steps))
        low, high = np.mean(found.bracket / 16, axis=0) * 16
        slack = 1e-10 * np.max(np.abs(exact))
        error = np.abs(np.mean(found.value - exact))
        assert error <= (high - low) / 2 + slack, steps
        # Nor is it always told to be large, but by one step.
        if steps > 1:
            assert np.allclose((low + high) / 2, np.mean(found.value).real)
            assert high - low < 1e-2 * np.mean(np.abs(exact))


@pytest.mark.slow
def test_krylov_error_where_each_step_gains_little():
    """Of eigenvalues down to -1 and an exponent of 300, by 20 keys."""
    eigenvalues = np.linspace(-1, 0, 2000)
    structure = jax.ShapeDtypeStruct(eigenvalues.shape, eigenvalues.dtype)
    operator = lx.FunctionLinearOperator(lambda v: eigenvalues * v, structure)
    settings = {"k": 10, "num_steps": 10, "throw": False}
    estimator = tx.SLQEstimator(tx.SphereSampler())

    def interval(key):
        call = tx.trace_of_function(
            operator, tx.Exp(300.0), estimator, key=key, **settings
        )
        return call.interval()

    keys = jr.split(jr.key(0), 20)
    low, high = jax.jit(lambda keys: jax.lax.map(interval, keys))(keys)
    exact = np.sum(np.exp(300 * eigenvalues))
    assert np.all((low <= exact) & (exact <= high))


def kernel(n, scale):
    """Of Gaussians around n points in the unit square, plus 1e-5."""
    points = np.random.default_rng(3).uniform(size=(n, 2))
    squares = np.sum((points[:, None] - points) ** 2, axis=-1)
    return np.exp(-squares / (2 * scale**2)) + 1e-5 * np.eye(n)


def ill_conditioned(n):
    """Operators without a tag, the first of condition 100."""
    basis = np.eye(n) + 0.5 * normal(12, (n, n)) / n**0.5
    geometric = {c: np.geomspace(1 / c, 1, n) for c in (1e2, 1e4, 1e6)}
    root = np.sqrt(geometric[1e4])
    upper = 0.05 * np.triu(normal(13, (n, n)), 1) * np.outer(root, root)
    one = np.linspace(1, 2, n)
    one[0] = 1e-6
    return [hermitian(8, x) for x in (*geometric.values(), one)] + [
        kernel(n, 0.2),
        kernel(n, 0.5),
        np.diag(geometric[1e4]) + upper,
        basis @ np.diag(geometric[1e4]) @ np.linalg.inv(basis),
        np.eye(n) - 0.8 * normal(14, (n, n)) / n**0.5,
    ]


STEEP = {
    "Log": (tx.Log(), np.log),
    "Inverse": (tx.Inverse(), lambda x: 1 / x),
    "root": (tx.Power(0.5), np.sqrt),
    "callable": (lambda x: 1 / (x + 1e-3), lambda x: 1 / (x + 1e-3)),
}


@eqx.filter_jit
def intervals_of(matrices, function, keys, num_steps):
    def one(matrix, key):
        found = trace_of(matrix, function, key, k=10, num_steps=num_steps)
        ends = found.interval(), found.interval(0.999)
        return (
            found.result == tx.RESULTS.successful,
            jnp.stack(ends[0]),
            jnp.stack(ends[1]),
        )

    def of_keys(matrix):
        return jax.lax.map(lambda key: one(matrix, key), keys)

    return jax.lax.map(of_keys, matrices)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEEP)
def test_intervals_of_ill_conditioned_operators(name):
    """By 20 keys each: where a call is successful, intervals cover the truth, although
    most of it may come from eigenvalues that no step has found."""
    function, f = STEEP[name]
    matrices = np.stack(ill_conditioned(100))
    values = np.linalg.eigvals(matrices).astype(complex)
    exact = np.sum(f(values), axis=1).real[:, None]
    for steps in (4, 8, 20):
        keys = jr.split(jr.key(steps), 20)
        answer = intervals_of(matrices, function, keys, steps)
        good, usual, wide = map(np.asarray, answer)
        assert np.all(np.mean(good, axis=1) > 0.9)
        covers = [(x[..., 0] <= exact) & (exact <= x[..., 1]) for x in (usual, wide)]
        assert np.all(np.mean(covers[0] | ~good, axis=1) > 0.7)
        assert np.mean(covers[0][good]) >= 0.93
        assert np.mean(covers[1][good]) >= 0.998
    # Steps that suffice are not doubted.
    assert np.median(np.diff(usual)[0]) < 0.5 * np.abs(exact[0])


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_adaptive_budget_of_an_ill_conditioned_operator():
    """Never ends well on a value that is not within its tolerance."""

    def run(matrix, key):
        budget = tx.Adaptive(rtol=0.3, max_k=64)
        steps = tx.AdaptiveSteps(64)
        found = trace_of(matrix, tx.Inverse(), key, k=budget, num_steps=steps)
        return found.value, found.result == tx.RESULTS.successful

    def of_keys(matrix):
        return jax.lax.map(lambda key: run(matrix, key), jr.split(KEY, 20))

    matrices = np.stack([kernel(200, 0.1), kernel(200, 0.5)])
    values, good = jax.jit(lambda x: jax.lax.map(of_keys, x))(matrices)
    exact = np.trace(np.linalg.inv(matrices), axis1=1, axis2=2)[:, None]
    close = np.abs(values / exact - 1) < 0.3
    assert np.all(close | ~good)
    # Of the first all of 64 steps say too little.
    assert np.mean(close[0]) < 0.2
    assert np.mean(good[1]) > 0.9


@eqx.filter_jit
def over_keys(matrix, direction):
    """Value, derivative along `direction`, bar and success of exp(-A / 2) by 200 keys."""

    def one(key):
        def value(t):
            moved = matrix + t * direction
            found = trace_of(moved, tx.Exp(-0.5), key, k=6, num_steps=14)
            return found.value, (found.std_err, found.result == tx.RESULTS.successful)

        (zero, one) = (jnp.full((), x, matrix.real.dtype) for x in (0, 1))
        value, slope, others = jax.jvp(value, (zero,), (one,), has_aux=True)
        return value, slope, *others

    return jax.lax.map(one, jr.split(jr.key(20261122), 200))


@pytest.mark.slow(but="clustered")
@every_matrix
def test_unbiased_with_an_honest_bar(name):
    """Values and derivatives over 200 keys; a z-score above 4.5 has a chance below 1e-5.
    The bar is at least the root-mean-square error, less 15% for the noise of that."""
    matrix = MATRICES[name]()
    direction = normal(10, (N, N), matrix.dtype)
    exact, slope = FUNCTIONS["exp"][1](matrix)
    value, along = np.trace(exact), np.sum(slope.T * direction)
    values, slopes, bars, successful = map(np.asarray, over_keys(matrix, direction))
    assert np.all(successful)
    assert z_score(values, value) < 4.5
    assert z_score(slopes, along) < 4.5
    error = np.sqrt(np.mean(np.abs(values - value) ** 2))
    assert np.sqrt(np.mean(bars**2)) > 0.85 * error


@pytest.mark.slow
def test_derivative_in_float32():
    matrix = MATRICES["nilpotent"]().astype(np.float32)
    direction = normal(10, (N, N), np.float32)
    values, slopes, _, _ = over_keys(matrix, direction)
    assert values.dtype == slopes.dtype == np.float32
    assert z_score(values, np.float32(N)) < 4.5
    slope = FUNCTIONS["exp"][1](matrix.astype(float))[1]
    assert z_score(slopes, np.float32(np.sum(slope.T * direction))) < 4.5


IN_COMPLEX = ("exp", "inverse", "log", "entropy")


@eqx.filter_jit
def slopes_and_solutions(matrix, functions):
    """Of each of the functions, in one program."""

    def run(matrix, function):
        solution = trace_of(matrix, function, k=N, num_steps=3)
        return solution.value.real, solution

    slope = jax.grad(run, has_aux=True)
    return {name: slope(matrix, function) for name, function in functions.items()}


@ft.cache
def exactly(kind):
    """The functions that are tested with a matrix of this kind."""
    names = [name for name in FUNCTIONS if (name in IN_COMPLEX) == (kind == "complex")]
    functions = {name: FUNCTIONS[name][0] for name in names}
    return slopes_and_solutions(POSITIVE[kind](), functions)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_exact_budget(function):
    """With k = n: value and gradient, without an error bar."""
    kind = "complex" if function in IN_COMPLEX else "random"
    exact, slope = FUNCTIONS[function][1](POSITIVE[kind]())
    slopes, solution = exactly(kind)[function]
    assert solution.result == tx.RESULTS.successful
    assert solution.std_err == 0
    assert solution.stats["num_matvecs"] == N
    assert np.allclose(solution.value, np.trace(exact), rtol=1e-11)
    assert np.allclose(slopes, slope.T, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nilpotent", "Jordan block", "clustered"])
@pytest.mark.parametrize("function", [tx.Exp(), jnp.exp], ids=["Exp", "callable"])
def test_defective_operators(name, function):
    """In float32, of matrices whose eigenvectors span nothing: right to what is reported,
    or reported to be lost."""
    matrix = MATRICES[name]().astype(np.float32)
    exact = np.trace(scipy.linalg.expm(matrix.astype(float)))
    for k in (8, N):
        solution = trace_of(matrix, function, k=k, num_steps=N)
        lost = solution.result == tx.RESULTS.precision_lost
        bar = np.hypot(5 * solution.std_err, 1e-2 * exact)
        assert lost or np.abs(solution.value - exact) < bar
        # The matrix exponential needs no eigenvectors.
        assert not lost or function is jnp.exp
    if isinstance(function, tx.Exp):
        assert np.allclose(solution.value, exact, rtol=1e-5)


@pytest.mark.slow
def test_domain():
    """Negative real eigenvalues, or zero, where the function has no value."""
    basis = np.eye(N) + np.triu(normal(11, (N, N)), 1) / N
    swap = basis @ np.diag(np.linspace(-1, 2, N)) @ np.linalg.inv(basis)
    singular = np.diag(np.arange(N * 1.0)) + np.triu(np.ones((N, N)), 1)
    for matrix, function, budgets in (
        (swap, tx.Log(), (4, N)),
        (swap, tx.Power(0.5), (4,)),
        (singular, tx.Inverse(), (4, N)),
        (singular, tx.Log(), (4, N)),
    ):
        for k in budgets:
            solution = trace_of(matrix, function, k=k, num_steps=N)
            assert solution.result == tx.RESULTS.outside_domain, function
    for k in (4, N):
        solution = trace_of(rotation(), tx.Log(), k=k, num_steps=N)
        assert solution.result == tx.RESULTS.successful
        assert np.abs(solution.value) <= 5 * solution.std_err + 1e-12


@pytest.mark.slow
def test_breakdown_where_the_first_entry_is_zero():
    """As of a skew operator, and where a callable may have a pole. Two steps tell all of
    an orthogonal one, and the forms of 1 / A = -A are zero."""
    matrix = block_diag(*[np.array([[0.0, -1.0], [1.0, 0.0]])] * (N // 2))
    solution = trace_of(matrix, lambda z: 1 / z + 2, k=4, num_steps=6)
    assert solution.result == tx.RESULTS.successful
    assert np.allclose(solution.value, 2 * N, rtol=1e-13)
    assert solution.std_err < 1e-11


@pytest.mark.slow
def test_degenerate_operators():
    """Zero, multiples of the identity, scales at the ends of float32, one step, one
    probe."""
    zero = np.zeros((N, N), np.float32)
    solution = trace_of(zero, tx.Exp(), k=4, num_steps=5)
    assert np.allclose(solution.value, N, rtol=1e-6)
    assert solution.std_err < 1e-4
    huge = -1e4 * np.eye(N, dtype=np.float32)
    for num_steps in (1, 5):
        solution = trace_of(huge, tx.Exp(), k=4, num_steps=num_steps)
        assert solution.result == tx.RESULTS.successful
        assert solution.value == 0
    matrix = MATRICES["random"]().astype(np.float32)
    plain = trace_of(matrix, tx.Power(1), k=4, num_steps=3)
    for scale in np.float32([1e-30, 1e30]):
        scaled = trace_of(scale * matrix, tx.Power(1), k=4, num_steps=3)
        assert np.allclose(scaled.value / scale, plain.value, rtol=1e-4)
        assert np.allclose(scaled.std_err / scale, plain.std_err, rtol=1e-4)
    single = trace_of(matrix, tx.Exp(), k=1, num_steps=5)
    assert np.isfinite(single.value)
    assert np.isinf(single.std_err)


@pytest.mark.slow
def test_hermitian_operators_without_a_tag():
    """The samples of Lanczos, by as many steps as make both exact."""
    matrix = MATRICES["hermitian"]()
    settings = {"k": 5, "num_steps": 20}
    plain = trace_of(matrix, tx.Exp(), **settings)
    tagged = trace_of(matrix, tx.Exp(), tags=lx.symmetric_tag, **settings)
    chosen = tx.SLQEstimator(krylov=tx.Arnoldi())
    asked = trace_of(
        matrix, tx.Exp(), tags=lx.symmetric_tag, estimator=chosen, **settings
    )
    for other in (tagged, asked):
        assert np.allclose(plain.stats["samples"], other.stats["samples"], rtol=1e-9)
        assert np.allclose(plain.stats["ritz_values"], other.stats["ritz_values"])


@pytest.mark.slow
def test_complex_function():
    """Of a real operator in complex arithmetic."""
    matrix = MATRICES["random"]()
    exact = np.trace(scipy.linalg.expm(2j * matrix))
    found = trace_of(matrix.astype(complex), tx.Exp(2j), k=N, num_steps=3)
    assert np.allclose(found.value, exact)
    found = trace_of(matrix.astype(complex), tx.Exp(2j), k=20, num_steps=16)
    assert np.abs(found.value - exact) < 5 * found.std_err
    assert found.std_err < 0.4 * np.abs(exact)
    parts = "`function` must map a real number to a real number"
    with pytest.raises(TypeError, match=parts):
        trace_of(matrix, lambda x: jnp.exp(2j * x), k=4, num_steps=3)


@pytest.mark.slow
def test_parameters_of_the_function():
    """Derivatives in them, first and second, and with that in the operator."""
    matrix = MATRICES["random"]()
    exact = scipy.linalg.expm(0.7 * matrix)

    def value(scale, matrix, k):
        return trace_of(matrix, tx.Exp(scale), k=k, num_steps=N).value

    both = jax.jit(jax.value_and_grad(jax.grad(value)), static_argnums=2)
    whole, sampled = (both(0.7, matrix, k) for k in (N, 4))
    probes = np.asarray(jax.jit(lambda key: tx.RademacherSampler()(key, N, 4))(KEY))
    for i, factor in enumerate((matrix, matrix @ matrix)):
        assert np.allclose(whole[i], np.trace(factor @ exact))
        forms = np.sum(probes * (factor @ exact @ probes), axis=0)
        assert np.allclose(sampled[i], np.mean(forms))
    mixed = jax.jit(jax.jacfwd(jax.grad(value, argnums=1)), static_argnums=2)
    assert np.allclose(mixed(0.7, matrix, N), (exact + 0.7 * matrix @ exact).T)


@pytest.mark.slow
def test_second_derivatives():
    """By solves; refused by Arnoldi."""
    matrix = POSITIVE["random"]()
    gradient = tx.SolveGradient(lx.GMRES(1e-12, 1e-12))

    def value(t, gradient, k):
        settings = {"k": k, "num_steps": N, "gradient": gradient}
        return trace_of(t * matrix, tx.Inverse(), **settings).value

    inverse = np.trace(np.linalg.inv(matrix))
    both = jax.jit(lambda t: jax.value_and_grad(jax.grad(value))(t, gradient, N))
    assert np.allclose(both(1.0), [-inverse, 2 * inverse])
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        jax.grad(jax.grad(value))(1.0, tx.LanczosGradient(), 4)


@pytest.mark.slow
def test_transforms():
    """`vmap` over operators and keys, reverse mode, and an operator on a PyTree."""
    stack = np.stack([MATRICES["random"](), MATRICES["nilpotent"]()])
    call = lambda x, key: trace_of(x, tx.Exp(), key, k=4, num_steps=8).value  # noqa: E731
    keys = jr.split(KEY, 2)
    single = jax.value_and_grad(call)
    both = jax.jit(jax.vmap(single))(stack, keys)
    alone = [jax.jit(single)(stack[i], keys[i]) for i in range(2)]
    for i in range(2):
        for a, b in zip(both, alone[i], strict=True):
            assert np.allclose(a[i], b, rtol=1e-10, atol=1e-12)

    half = N // 2

    def product(tree):
        joined = stack[0] @ jnp.concatenate([tree["a"], tree["b"].reshape(-1)])
        return {"a": joined[:half], "b": joined[half:].reshape(2, -1)}

    shapes = {"a": (half,), "b": (2, half // 2)}
    structure = {name: jax.ShapeDtypeStruct(x, float) for name, x in shapes.items()}
    operator = lx.FunctionLinearOperator(product, structure)
    settings = {"k": 4, "num_steps": 8, "key": keys[0]}
    found = tx.trace_of_function(operator, tx.Exp(), **settings)
    assert np.allclose(found.value, alone[0][0])


@pytest.mark.slow
def test_low_precision_operators():
    matrix = MATRICES["random"]()
    exact = np.trace(scipy.linalg.expm(matrix))
    found = trace_of(matrix.astype(jnp.bfloat16), tx.Exp(), k=20, num_steps=10)
    assert found.value.dtype == np.float32
    assert np.abs(found.value - exact) < 5 * found.std_err
    assert found.std_err < 0.3 * exact


@pytest.mark.slow
def test_on_a_mesh():
    """The value, bar and gradient of one device, for probes that do not divide."""
    matrix = MATRICES["random"]()

    def value(x, execution):
        settings = {"k": 5, "num_steps": 6, "execution": execution}
        solution = trace_of(x, tx.Exp(), **settings)
        return solution.value, (solution.std_err, solution.stats["samples"])

    run = eqx.filter_jit(jax.value_and_grad(value, has_aux=True))
    expected = run(matrix, tx.Local())
    sharded = run(matrix, tx.Sharded(tx.probe_mesh(jax.devices()[:4])))
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "complex"])
def test_adaptive(name):
    matrix = MATRICES[name]()
    exact = np.trace(scipy.linalg.expm(matrix))
    settings = {"max_k": 2 * N, "round_size": 4, "min_samples": 4}
    rough, tight = (
        trace_of(matrix, tx.Exp(), k=tx.Adaptive(rtol=rtol, **settings), num_steps=10)
        for rtol in map(np.asarray, (1.0, 1e-6))
    )
    assert rough.result == tight.result == tx.RESULTS.successful
    assert np.abs(rough.value - exact) < 0.5 * np.abs(exact)
    # Budgets beyond n end with the exact answer.
    assert tight.std_err == 0 < rough.std_err
    assert np.allclose(tight.value, exact)


def test_misuse():
    operator = matrix_free(MATRICES["random"]())
    settings = {"k": 4, "num_steps": 3, "key": KEY}
    for estimator, parts in (
        (tx.KrylovAwareEstimator(), r"`KrylovAwareEstimator` needs.*tagged Hermitian"),
        (tx.SLQEstimator(krylov=tx.Lanczos()), r"`krylov` must fit.*not known to be"),
        (tx.SLQEstimator(krylov=tx.GolubKahan()), "`krylov` must fit"),
    ):
        with pytest.raises(ValueError, match=parts):
            tx.trace_of_function(operator, tx.Exp(), estimator, **settings)
    chosen = tx.SLQEstimator(krylov=tx.Arnoldi())
    with pytest.raises(ValueError, match=r"`krylov` must fit.*`Arnoldi`"):
        tx.logdet(operator, chosen, **settings)
    with pytest.raises(ValueError, match="`operator` must be Hermitian"):
        tx.function_of(operator, tx.Exp(), 3)


@pytest.mark.slow
def test_brackets_are_finite():
    """The shorter run has the eigenvalue -1, where the logarithm is not defined."""
    blocks = [np.array([[-1.0, -b], [b, -1.0]]) for b in np.linspace(0.5, 3, 15)]
    matrix = jnp.asarray(block_diag(*blocks))
    settings = {"k": 6, "num_steps": 12, "key": jr.key(0), "throw": False}
    solution = tx.trace_of_function(lx.MatrixLinearOperator(matrix), tx.Log(), **settings)
    assert not np.isnan(np.stack(solution.interval())).any()
