"""Log-determinants and traces of functions: `jit`, `vmap`, derivatives, dtypes, PyTrees,
limits of the arguments, structured and degenerate operators."""

import collections
import functools as ft
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx

from ..helpers import hermitian, matrix_free


N = 20
KEY = jr.key(0)
KEYS = jr.split(KEY, 3)
PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag
SLQ, KRYLOV = tx.SLQEstimator(), tx.KrylovAwareEstimator()
FLAT = np.linspace(1, 3, N)
SETTINGS = {"k": 4, "num_steps": 5}


def preconditioned(operator, key, make, throw=True, **settings):
    settings["throw"] = throw
    if make is tx.nystrom_preconditioner:
        preconditioner = make(operator, 4, key=jr.fold_in(key, 1), throw=throw)
    else:
        diagonal = jnp.diagonal(operator.as_matrix())
        preconditioner = make(operator, 4, diagonal=diagonal, throw=throw)
    return tx.logdet(operator, key=key, preconditioner=preconditioner, **settings)


def nystrom_logdet(operator, key, **settings):
    return preconditioned(operator, key, tx.nystrom_preconditioner, **settings)


def cholesky_logdet(operator, key, **settings):
    return preconditioned(operator, key, tx.pivoted_cholesky_preconditioner, **settings)


def logdet(operator, key, **settings):
    return tx.logdet(operator, key=key, **settings)


def krylov_logdet(operator, key, **settings):
    return tx.logdet(operator, KRYLOV, key=key, **settings)


def solved_logdet(operator, key, **settings):
    gradient = tx.SolveGradient(lx.CG(1e-12, 1e-12))
    return tx.logdet(operator, key=key, gradient=gradient, **settings)


def exponential(operator, key, **settings):
    return tx.trace_of_function(operator, tx.Exp(-0.5), key=key, **settings)


def krylov(operator, key, **settings):
    return tx.trace_of_function(operator, tx.Power(-1), KRYLOV, key=key, **settings)


ESTIMATES = {
    "logdet": logdet,
    "nystrom": nystrom_logdet,
    "cholesky": cholesky_logdet,
    "krylov-logdet": krylov_logdet,
    "exponential": exponential,
    "krylov": krylov,
    "general": logdet,  # of a matrix without a tag
    "solved": solved_logdet,
}


def probe(operator, key):
    leaf = operator.in_structure()
    return jr.normal(key, leaf.shape, leaf.dtype)


def action(operator, key, num_steps=5):
    return tx.function_of(operator, tx.Inverse(), num_steps).mv(probe(operator, key))


def nystrom_inverse(operator, key, shift=None):
    preconditioner = tx.nystrom_preconditioner(operator, 4, key=key, shift=shift)
    return preconditioner.inverse().mv(probe(operator, key)), preconditioner.logdet


def cholesky_inverse(operator, key, shift=None):
    preconditioner = tx.pivoted_cholesky_preconditioner(operator, 4, shift=shift)
    return preconditioner.inverse().mv(probe(operator, key)), preconditioner.logdet


OTHERS = {
    "action": action,
    "nystrom-inverse": nystrom_inverse,
    "cholesky-inverse": cholesky_inverse,
}
# Compilation takes the time, so most tests are of a few of these.


def dense(matrix, tags=PSD):
    return lx.MatrixLinearOperator(matrix, tags)


def solution_of(name, matrix, key, make=dense, **settings):
    operator = make(matrix, () if name == "general" else PSD)
    return ESTIMATES[name](operator, key, **(SETTINGS | settings))


def answer(name, matrix, key):
    """What each public function gives for a matrix and a key, as a PyTree of arrays."""
    if name in OTHERS:
        return OTHERS[name](dense(matrix), key)
    solution = solution_of(name, matrix, key)
    return solution.value, solution.std_err


def value_and_solution(name, matrix, key, **settings):
    solution = solution_of(name, matrix, key, **settings)
    return solution.value, solution


def slope_and_solution(name, matrix, key, **settings):
    value = lambda x: value_and_solution(name, x, key, **settings)  # noqa: E731
    return jax.grad(value, has_aux=True)(matrix)


@eqx.filter_jit
def compiled(function, *args, **settings):
    """One program for each function of this module, its settings, shapes and dtypes."""
    return function(*args, **settings)


def matrix_of(name="", dtype=np.float64, spectrum=FLAT, seed=0):
    """Hermitian, but for the function of others."""
    matrix = hermitian(seed, spectrum, dtype)
    return matrix + np.triu(matrix, 1) if name == "general" else matrix


def stack_of(name, num=3):
    return np.stack([matrix_of(name, spectrum=FLAT + i, seed=i) for i in range(num)])


def close(x, y, rtol):
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.allclose(a, b, rtol=rtol, atol=rtol) for a, b in pairs)


def stacked(answers):
    return jax.tree.map(lambda *x: np.stack(x), *answers)


def all_finite(tree):
    return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(tree))


def log_abs_det(matrix):
    return np.linalg.slogdet(matrix)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["krylov", "general", "nystrom-inverse"])
def test_vmap_is_a_loop(name):
    stack = stack_of(name)
    pairs = zip(stack, KEYS, strict=True)
    alone = [compiled(answer, name, a, key) for a, key in pairs]
    together = jax.jit(jax.vmap(lambda a, key: answer(name, a, key)))(stack, KEYS)
    assert close(together, stacked(alone), 1e-9)


@pytest.mark.slow
def test_vmap_over_keys():
    matrix = matrix_of()
    together = jax.jit(jax.vmap(lambda key: answer("logdet", matrix, key)))(KEYS)
    alone = [compiled(answer, "logdet", matrix, key) for key in KEYS]
    assert close(together, stacked(alone), 1e-9)
    assert len(set(together[0].tolist())) == 3


@pytest.mark.slow(but="nystrom")
@pytest.mark.parametrize("name", ["nystrom", "general"])
def test_derivatives_agree(name):
    """Reverse and forward mode with each other, and those of a batch with single ones."""
    stack, keys = stack_of(name, 2), KEYS[:2]
    direction = np.random.default_rng(9).standard_normal((N, N))

    def value(matrix, key):
        return answer(name, matrix, key)[0]

    def total(stack):
        return jnp.sum(jax.vmap(value)(stack, keys))

    @jax.jit
    def derivatives(stack):
        along = jax.jvp(lambda a: value(a, keys[1]), (stack[1],), (direction,))[1]
        return jax.grad(total)(stack), jax.grad(value)(stack[1], keys[1]), along

    slopes, single, along = derivatives(stack)
    assert np.allclose(slopes[1], single, rtol=1e-8, atol=1e-9)
    assert np.allclose(along, np.sum(single * direction), rtol=1e-9)
    assert np.max(np.abs(single)) > 1e-3


def test_derivative_of_the_action_in_the_vector():
    matrix = matrix_of(dtype=np.complex128)
    normal = np.random.default_rng(1).standard_normal((2, 2, N))
    v, w = normal[0] + 1j * normal[1]

    @jax.jit
    def derivatives(matrix, v, w):
        operator = tx.function_of(dense(matrix), tx.Inverse(), N)
        along = jax.jvp(operator.mv, (v,), (w,))[1]
        return along, jax.vjp(operator.mv, v)[1](w)[0], operator.mv(w)

    along, pulled, product = derivatives(matrix, v, w)
    assert np.allclose(along, product)
    assert np.allclose(product, np.linalg.solve(matrix, w))
    # JAX's cotangents are transposes, without a conjugate.
    assert np.allclose(pulled, np.linalg.solve(matrix, w.conj()).conj())


@pytest.mark.slow(but="cholesky-inverse")
@pytest.mark.parametrize("name", ["nystrom-inverse", "cholesky-inverse"])
def test_preconditioners_are_constant(name):
    """In the operator, whether its shift is estimated or given, and in a given one."""

    def total(matrix, shift=None):
        return sum(jnp.sum(x) for x in OTHERS[name](dense(matrix), KEY, shift))

    @jax.jit
    def slopes(matrix, shift):
        return jax.grad(total)(matrix), *jax.grad(total, (0, 1))(matrix, shift)

    assert all(np.all(slope == 0) for slope in slopes(matrix_of(), 0.5))


@pytest.mark.slow
def test_parameters_of_functions():
    operator, scales = dense(matrix_of()), np.array([-1.0, 0.0, 0.5])

    def exponential(scale):
        settings = {"k": N, "num_steps": 5, "key": KEY}
        return tx.trace_of_function(operator, tx.Exp(scale), **settings).value

    exact = jax.jit(jax.vmap(jax.grad(exponential)))(scales)
    assert np.allclose(exact, np.sum(FLAT * np.exp(scales[:, None] * FLAT), axis=1))

    def power(p):
        function = lambda x: x**p  # noqa: E731
        return tx.trace_of_function(operator, function, k=N, num_steps=1).value

    assert np.allclose(jax.jit(jax.grad(power))(1.5), np.sum(FLAT**1.5 * np.log(FLAT)))


@pytest.mark.slow
def test_functions_as_arguments_of_a_program():
    """Their numbers arrive as arrays there."""
    matrix = matrix_of()

    def inverse(function, matrix):
        settings = {"k": N, "num_steps": 5, "throw": False}
        return tx.trace_of_function(dense(matrix), function, **settings).value

    assert np.allclose(jax.jit(inverse)(tx.Inverse(), matrix), np.sum(1 / FLAT))
    shifted = jax.jit(inverse)(tx.Inverse(0.5), matrix)
    assert np.allclose(shifted, np.sum(1 / (FLAT + 0.5)))


def test_what_a_callable_closes_over_is_not_kept():
    class Data:
        scale = 2.0

    def call():
        data = Data()
        function = lambda x: data.scale * x  # noqa: E731
        found = tx.trace_of_function(dense(matrix_of()), function, k=N, num_steps=5)
        assert np.allclose(found.value, 2 * np.sum(FLAT))
        return weakref.ref(data)

    seen = call()
    gc.collect()
    assert seen() is None


def test_one_trace_for_each_budget():
    """Further calls with other keys and arrays do not trace the operator again."""
    traces = collections.Counter()

    @jax.custom_jvp
    def product(matrix, v):
        traces["product"] += 1
        return matrix @ v

    product.defjvp(lambda x, t: (product(*x), t[0] @ x[1] + x[0] @ t[1]))
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)

    @eqx.filter_jit
    def solve(matrix, key, k):
        mv = lambda v: product(matrix, v)  # noqa: E731
        operator = lx.FunctionLinearOperator(mv, structure, PSD)
        return logdet(operator, key, k=k, num_steps=5).value

    found = []
    for k, seed in [(3, 0), (3, 1), (4, 0), (4, 1), (3, 2)]:
        solve(matrix_of(seed=seed), jr.key(seed), k)
        found.append(traces.total())
    assert found[0] == found[1] < found[2] == found[3] == found[4]


def test_eager_calls_compile_once(caplog):
    """The same operator, or one like it, with other keys."""
    for name in ("logdet", "nystrom"):
        solution_of(name, matrix_of(), KEYS[0])
    other = matrix_of(seed=1)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for name in ("logdet", "nystrom"):
            solution_of(name, other, KEYS[1])
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: x + 1)(other)
    assert "Compiling" in caplog.text, "what JAX writes is what is looked for"


# --- Complex, PyTrees, dtypes ---


def dense_answer(name, matrix):
    eigenvalues = np.linalg.eigvalsh(matrix)
    f = {"exponential": lambda x: np.exp(-x / 2), "krylov": lambda x: 1 / x}
    return np.sum(f.get(name, np.log)(eigenvalues))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nystrom", "krylov"])
def test_complex_hermitian(name):
    """Within 6 standard errors and the bracket. For Student's t with 11 degrees of
    freedom and the inflation of `std_err` that is a false alarm with probability below
    1e-4; the seed is fixed."""
    matrix = matrix_of(dtype=np.complex128, spectrum=np.linspace(1, 10, 2 * N))
    truth = dense_answer(name, matrix)
    exact = compiled(solution_of, name, matrix, KEY, k=2 * N)
    assert exact.value.dtype == np.float64
    assert np.allclose(exact.value, truth, rtol=1e-12)
    assert exact.std_err == 0
    settings = {"make": matrix_free, "k": 12, "num_steps": 10}
    solution = compiled(solution_of, name, matrix, KEY, **settings)
    assert solution.value.dtype == solution.std_err.dtype == np.float64
    low, high = solution.stats.get("bracket", [solution.value, solution.value])
    # Without a bracket: the error of 10 steps at condition number 10 is below 1e-6.
    error = 6 * solution.std_err + (high - low) + 1e-6 * np.abs(truth)
    assert np.abs(solution.value - truth) < error
    assert solution.std_err < 0.1 * np.abs(truth)


def tagged(matrix, tags):
    return lx.TaggedLinearOperator(lx.MatrixLinearOperator(matrix), tags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "make"), [(SLQ, matrix_free), (KRYLOV, tagged)], ids=["SLQ", "Krylov"]
)
def test_hermitian_tag(estimator, make):
    """An indefinite complex operator; the false-alarm rate is as above."""
    values = np.linspace(-1, 1, 2 * N)
    matrix = matrix_of(dtype=np.complex128, spectrum=values)
    truth = np.sum(np.exp(values))

    @jax.jit
    def run(matrix):
        operator = make(matrix, tx.hermitian_tag)
        exact, solution = (
            tx.trace_of_function(
                operator, tx.Exp(), estimator, k=k, num_steps=10, key=KEY, throw=False
            )
            for k in (2 * N, 12)
        )
        function = tx.function_of(operator, tx.Exp(), 2 * N)
        assert tx.hermitian_tag in function.tags
        v = probe(operator, KEY)
        return exact.value, solution.value, solution.std_err, v, function.mv(v)

    exact, value, std_err, v, product = run(matrix)
    assert np.allclose(exact, truth)
    assert value.dtype == np.float64
    assert np.abs(value - truth) < 6 * std_err + 1e-9
    eigenvalues, vectors = np.linalg.eigh(matrix)
    expected = vectors @ (np.exp(eigenvalues) * (vectors.conj().T @ np.asarray(v)))
    assert np.allclose(product, expected)


@pytest.mark.slow
def test_complex_general():
    """The false-alarm rate is as above."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((2, 2 * N, 2 * N)) / 200**0.5
    matrix = normal[0] + 1j * normal[1] + 2 * np.eye(2 * N)
    truth = log_abs_det(matrix)
    settings = {"make": matrix_free, "num_steps": 15}
    exact = compiled(solution_of, "general", matrix, KEY, k=2 * N, **settings)
    assert np.allclose(exact.value, truth)
    assert exact.value.dtype == np.float64
    solution = compiled(solution_of, "general", matrix, KEY, k=12, **settings)
    low, high = solution.stats["bracket"]
    allowed = 6 * solution.std_err + high - low
    assert np.abs(solution.value - truth) < allowed < 0.1 * np.abs(truth)


TREE = {
    "a": jax.ShapeDtypeStruct((3, 4), jnp.float64),
    "b": jax.ShapeDtypeStruct((N - 12,), jnp.float64),
}


def tree_of(v):
    return {"a": v[:12].reshape(3, 4), "b": v[12:]}


def tree_operator(matrix, tags=PSD):
    def mv(tree):
        flat, back = ravel_pytree(tree)
        return back(matrix @ flat)

    return lx.FunctionLinearOperator(mv, TREE, tags)


def test_pytrees_are_flat_vectors():
    matrix = matrix_of()
    found = compiled(solution_of, "logdet", matrix, KEY, make=tree_operator)
    value, std_err = compiled(answer, "logdet", matrix, KEY)
    assert np.allclose(found.value, value, rtol=1e-11)
    assert np.allclose(found.std_err, std_err, rtol=1e-9)


def test_actions_on_pytrees():
    @jax.jit
    def products(matrix):
        operator = tree_operator(matrix)
        tree = tree_of(probe(dense(matrix), KEY))
        function = tx.function_of(operator, tx.Inverse(), 5)
        preconditioner = tx.nystrom_preconditioner(operator, 4, key=KEY)
        return function.mv(tree), preconditioner.inverse().mv(tree)

    matrix = matrix_of()
    assert jax.eval_shape(products, matrix) == (TREE, TREE)
    for found, name in zip(products(matrix), ("action", "nystrom-inverse"), strict=True):
        expected, *_ = jax.tree.leaves(compiled(answer, name, matrix, KEY))
        flat = np.concatenate([np.ravel(found["a"]), found["b"]])
        assert np.allclose(flat, expected)


@pytest.mark.slow(but="bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_dtypes(dtype):
    """Answers are in float32, as accurate as the products: relative errors eps of entries
    move each eigenvalue by at most about 3 eps, and the logarithm has slopes of at most 1
    on [1, 3]. Quadrature errors are below 0.01, and for sampling 6 standard errors of 4
    probes are allowed, with a fixed seed."""
    matrix, eps = matrix_of(dtype=dtype), float(jnp.finfo(dtype).eps)
    slope, solution = compiled(slope_and_solution, "logdet", matrix, KEY)
    assert solution.value.dtype == solution.std_err.dtype == np.float32
    tolerance = 3 * N * eps + 0.01 + 6 * solution.std_err
    truth = dense_answer("logdet", matrix.astype(np.float64))
    assert np.abs(solution.value - truth) < tolerance
    assert slope.dtype == dtype
    assert np.all(np.isfinite(np.asarray(slope, np.float64)))


def test_narrow_actions():
    matrix, eps = matrix_of(dtype=jnp.bfloat16), float(jnp.finfo(jnp.bfloat16).eps)
    for name in OTHERS:
        found, *_ = jax.tree.leaves(compiled(answer, name, matrix, KEY))
        assert found.dtype == jnp.bfloat16, name
        assert np.all(np.isfinite(np.asarray(found, np.float64))), name

    @jax.jit
    def full_action(matrix):
        return action(dense(matrix), KEY, N), probe(dense(matrix), KEY)

    found, v = (np.asarray(x, np.float64) for x in full_action(matrix))
    expected = np.linalg.solve(matrix.astype(np.float64), v)
    assert np.linalg.norm(found - expected) < 6 * eps * np.linalg.norm(expected) * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nystrom", "krylov", "action"])
def test_strict_promotion_modes(name):
    """A user's strict modes are for the user's code: the program is the same."""
    matrix = matrix_of(dtype=np.complex64)
    if name in OTHERS:
        function = lambda a: answer(name, a, KEY)  # noqa: E731
    else:
        function = jax.value_and_grad(lambda a: answer(name, a, KEY)[0])
    plain = jax.jit(function).lower(matrix).as_text()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        strict = jax.jit(function).lower(matrix).as_text()
    assert strict == plain


# --- Limits of the arguments ---


@eqx.filter_jit
def with_execution(matrix, execution):
    operator, settings = dense(matrix), {"key": KEY, "execution": execution}
    preconditioner = tx.nystrom_preconditioner(operator, 9, **settings)
    settings |= {"k": 9, "num_steps": 5, "preconditioner": preconditioner}
    return preconditioner, tx.logdet(operator, throw=False, **settings)


@pytest.mark.slow
def test_block_size():
    """Of a log-determinant and of its preconditioner, both with 9 products at a time."""
    executions = [tx.Local(block_size=b) for b in (1, 7)]
    one, seven = (with_execution(matrix_of(), execution) for execution in executions)
    assert np.allclose(one[0].values, seven[0].values, rtol=1e-10)
    assert np.allclose(one[0].shift, seven[0].shift, rtol=1e-10)
    assert np.allclose(one[1].value, seven[1].value, rtol=1e-12)
    assert np.allclose(one[1].stats["samples"], seven[1].stats["samples"], rtol=1e-9)


@pytest.mark.slow
def test_one_sample_has_no_error_bar():
    """KrylovAware keeps one of three probes for the rest."""
    solution = compiled(solution_of, "krylov", matrix_of(), KEY, k=3)
    assert np.isfinite(solution.value)
    assert solution.std_err == np.inf
    assert solution.result == tx.RESULTS.successful


@pytest.mark.slow(but="logdet")
@pytest.mark.parametrize("name", ["logdet", "exponential"])
def test_enough_products_are_exact(name):
    """Without a key, and whatever the number of steps."""
    matrix, settings = matrix_of(), {"k": N + 5, "num_steps": 1}
    slope, solution = compiled(slope_and_solution, name, matrix, None, **settings)
    assert np.allclose(solution.value, dense_answer(name, matrix), rtol=1e-12)
    assert solution.std_err == 0
    assert solution.stats["num_matvecs"] == N
    f = {"logdet": lambda x: 1 / x, "exponential": lambda x: -np.exp(-x / 2) / 2}[name]
    values, vectors = np.linalg.eigh(matrix)
    assert np.allclose(slope, (vectors * f(values)) @ vectors.T, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["krylov", "general"])
def test_more_steps_than_rows_count_as_n(name):
    """They are the same program, which has the same results."""

    def program(num_steps):
        lowered = compiled.lower(
            solution_of, name, matrix_of(name), KEY, num_steps=num_steps
        )
        return lowered.as_text()

    assert program(N + 7) == program(N) != program(N - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [tx.nystrom_preconditioner, tx.pivoted_cholesky_preconditioner]
)
def test_rank_above_n_counts_as_n(make):
    """A preconditioner of full rank is the operator, up to rounding and its shift."""
    matrix = matrix_of()
    keyword = {"key": KEY} if make is tx.nystrom_preconditioner else {}

    @eqx.filter_jit
    def run(matrix):
        operator = dense(matrix)
        preconditioner = make(operator, N + 5, **keyword)
        v = probe(operator, KEY)
        settings = {"k": 4, "num_steps": 2, "key": KEY, "throw": False}
        solution = tx.logdet(operator, preconditioner=preconditioner, **settings)
        return preconditioner, v, preconditioner.inverse().mv(v), solution.value

    preconditioner, v, solved, value = run(matrix)
    assert preconditioner.num_matvecs == N
    assert np.allclose(preconditioner.logdet, np.sum(np.log(FLAT)), rtol=1e-10)
    assert np.allclose(solved, np.linalg.solve(matrix, v), rtol=1e-9)
    assert np.allclose(value, np.sum(np.log(FLAT)), rtol=1e-9)


def tagged_logdet(matrix, tags):
    operator = lx.MatrixLinearOperator(matrix, tags)
    settings = {"k": 4, "num_steps": 4, "key": KEY, "throw": False}
    solution = tx.logdet(operator, **settings)
    return solution.value, solution.stats["sign"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 8])
def test_negative_semidefinite(n):
    matrix = matrix_of(spectrum=np.linspace(1, 2, n))

    @eqx.filter_jit
    def run(matrix, tags):
        call = lambda a: tagged_logdet(a, tags)  # noqa: E731
        return jax.value_and_grad(call, has_aux=True)(matrix)

    (negative, sign), slope = run(-matrix, NSD)
    (positive, positive_sign), expected = run(matrix, PSD)
    assert np.allclose(negative, positive, rtol=1e-12)
    assert positive_sign == 1
    assert sign == np.linalg.slogdet(-matrix)[0] == (-1) ** n
    assert np.allclose(slope, -expected, rtol=1e-9, atol=1e-12)


# --- Structured operators ---


def entries(seed, shape, dtype, scale=1.0):
    normal = np.random.default_rng(seed).standard_normal((2, *shape))
    complex_ = np.issubdtype(dtype, np.complexfloating)
    normal = (normal[0] + 1j * normal[1]) / 2**0.5 if complex_ else normal[0]
    return jnp.asarray((normal * scale).astype(dtype))


def tridiagonal(n=9, dtype=np.float64, scale=1.0):
    three = [entries(i, (n - (i > 0),), dtype, scale) for i in range(3)]
    return lx.TridiagonalLinearOperator(*three)


def triangular(which, dtype=np.float64):
    # Well conditioned, so that a product of two has an accurate dense determinant.
    matrix = np.array(entries(3, (9, 9), dtype)) / 4
    signs = np.diagonal(matrix) / np.abs(np.diagonal(matrix))
    np.fill_diagonal(matrix, signs * np.linspace(1, 2, 9))
    if which == "lower":
        return lx.MatrixLinearOperator(np.tril(matrix), lx.lower_triangular_tag)
    return lx.MatrixLinearOperator(np.triu(matrix), lx.upper_triangular_tag)


def diagonal(dtype=np.float64):
    return lx.DiagonalLinearOperator(entries(5, (9,), dtype))


def diagonal_matrix(dtype):
    matrix = np.diag(np.asarray(entries(5, (9,), dtype)))
    return lx.MatrixLinearOperator(matrix, lx.diagonal_tag)


def symmetric_tridiagonal(dtype):
    side = np.asarray(entries(1, (8,), dtype)) / 4
    middle = np.linspace(3, 5, 9).astype(dtype)
    three = (jnp.asarray(x) for x in (middle, side, side.conj()))
    return lx.TaggedLinearOperator(lx.TridiagonalLinearOperator(*three), PSD)


IDENTITY = lx.IdentityLinearOperator(TREE)
STRUCTURED = {
    "diagonal": diagonal,
    "diagonal-matrix": diagonal_matrix,
    "lower": lambda dtype: triangular("lower", dtype),
    "upper": lambda dtype: triangular("upper", dtype),
    "tridiagonal": lambda dtype: tridiagonal(9, dtype),
    "definite": symmetric_tridiagonal,
    "size-1": lambda dtype: tridiagonal(1, dtype),
    "size-2": lambda dtype: tridiagonal(2, dtype),
    "identity": lambda dtype: lx.IdentityLinearOperator(
        jax.ShapeDtypeStruct((9,), dtype)
    ),
    "double": lambda dtype: diagonal(dtype) * 2.0,
    "third": lambda dtype: tridiagonal(9, dtype) / -3.0,
    "negative": lambda dtype: -triangular("upper", dtype),
    "composed": lambda dtype: triangular("lower", dtype) @ triangular("upper", dtype),
    "nested": lambda dtype: (
        2 * (tridiagonal(9, dtype) @ diagonal(dtype)) @ -diagonal(dtype)
    ),
    "tagged": lambda dtype: lx.TaggedLinearOperator(
        triangular("lower", dtype) @ tridiagonal(9, dtype), lx.symmetric_tag
    ),
}


def structured(operator, **settings):
    return tx.logdet(operator, k=1, num_steps=1, **settings)


def array(*entries):
    return jnp.asarray(np.array(entries))


def zero_diagonal():
    zeros, ones = np.zeros(6), np.ones(5)
    three = (jnp.asarray(x) for x in (zeros, 2 * ones, ones))
    return lx.TridiagonalLinearOperator(*three)


def in_half_precision(name):
    """With entries that are exact in it."""
    wide, half = STRUCTURED[name](np.float64), jnp.bfloat16
    if name == "identity":
        return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((9,), half))
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(half)), wide)


def diagonal_tree():
    tree = {"a": jnp.asarray(np.full((3, 4), -2.0)), "b": jnp.asarray(np.full(3, 5.0))}
    return lx.DiagonalLinearOperator(tree)


SINGULAR = {
    "diagonal": lx.DiagonalLinearOperator(array(1.0, 0.0, 2.0)),
    "zero": lx.DiagonalLinearOperator(array(0.0, 0.0, 0.0)),
    "tridiagonal": lx.TridiagonalLinearOperator(array(1.0, 1.0), array(1.0), array(1.0)),
    "zero-tridiagonal": lx.TridiagonalLinearOperator(
        array(0.0, 0.0, 0.0), array(0.0, 0.0), array(0.0, 0.0)
    ),
    "triangular": lx.MatrixLinearOperator(
        np.triu(np.ones((3, 3)), 1), lx.upper_triangular_tag
    ),
    "composed": lx.DiagonalLinearOperator(jnp.asarray(np.zeros(9))) @ diagonal(),
}
NARROW = ["diagonal", "lower", "tridiagonal", "identity"]
COMPLEX = ["definite", "nested", "tagged"]


@ft.cache
def structured_answers():
    """Solution and matrix of all operators, from one program."""
    operators = {
        **{f"{name}-float64": make(np.float64) for name, make in STRUCTURED.items()},
        **{f"{name}-complex64": STRUCTURED[name](np.complex64) for name in COMPLEX},
        **{f"{name}-bfloat16": in_half_precision(name) for name in NARROW},
        **{f"{name}-singular": operator for name, operator in SINGULAR.items()},
        "tree": diagonal_tree(),
        "identity-tree": IDENTITY,
        "multiple-tree": 3.0 * IDENTITY,
        "zero-diagonal": zero_diagonal(),
    }

    @eqx.filter_jit
    def run(operators):
        return {
            name: (structured(operator, throw=False), operator.as_matrix())
            for name, operator in operators.items()
        }

    return run(operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float64) for name in STRUCTURED),
        *((name, np.complex64) for name in COMPLEX),
    ],
)
def test_structured_operators(name, dtype):
    solution, matrix = structured_answers()[f"{name}-{dtype.__name__}"]
    sign, log = np.linalg.slogdet(matrix)
    rtol = 200 * float(np.finfo(dtype).eps)
    assert solution.value.dtype == log.dtype
    assert np.allclose(solution.value, log, rtol=rtol, atol=rtol)
    assert np.allclose(solution.stats["sign"], sign, rtol=rtol)
    assert solution.stats["num_matvecs"] == 0
    assert solution.std_err == 0


def structured_value(operator):
    return structured(operator, throw=False).value


def structured_slopes(operator):
    """By `logdet`, and of JAX's determinant of the matrix."""
    found = eqx.filter_grad(structured_value)(operator)
    dense = lambda x: jnp.linalg.slogdet(x.as_matrix())[1]  # noqa: E731
    return found, eqx.filter_grad(dense)(operator)


def slopes_and_batch(operator):
    """Slopes as above; values of a batch, and of the operators in it."""
    double = jax.tree.map(lambda x: 2 * x, operator)
    batch = jax.tree.map(lambda *x: jnp.stack(x), operator, double)
    together = eqx.filter_vmap(structured_value)(batch)
    alone = jnp.stack([structured_value(operator), structured_value(double)])
    return *structured_slopes(operator), together, alone


@ft.cache
def structured_derivatives():
    """From one program."""
    names = ["diagonal", "tridiagonal", "size-1", "nested"]
    operators = {name: STRUCTURED[name](np.float64) for name in names}
    operators["zero-diagonal"] = zero_diagonal()

    @eqx.filter_jit
    def run(operators):
        return {name: slopes_and_batch(x) for name, x in operators.items()}

    return run(operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["diagonal", "tridiagonal", "size-1", "nested", "zero-diagonal"]
)
def test_derivatives_of_structured_operators(name):
    found, expected, together, alone = structured_derivatives()[name]
    assert close(found, expected, 1e-9)
    assert np.allclose(together, alone, rtol=1e-12)


@pytest.mark.slow
def test_structured_pytrees():
    answers = structured_answers()
    assert answers["identity-tree"][0].value == structured(IDENTITY).value == 0
    assert np.allclose(answers["multiple-tree"][0].value, N * np.log(3))
    solution, _ = answers["tree"]
    assert np.allclose(solution.value, 12 * np.log(2) + 3 * np.log(5))
    assert solution.stats["sign"] == 1


def structured_slope_and_solution(operator):
    def run(operator):
        solution = structured(operator, throw=False)
        return solution.value, solution

    return eqx.filter_grad(run, has_aux=True)(operator)


@pytest.mark.slow(but="float64-*")
@pytest.mark.parametrize(
    ("dtype", "scale"), [(np.float64, 1e200), (np.float32, 1e-30), (np.complex64, 1e30)]
)
def test_large_tridiagonal(dtype, scale):
    """The determinant, and products of two entries, are beyond the dtype. Rounding: 2000
    rows and condition numbers of about 1e4 together allow 1e4 roundoffs, relative to a
    sum of about 1e5."""
    operator = tridiagonal(2000, dtype, scale)
    slope, solution = compiled(structured_slope_and_solution, operator)
    wide = np.promote_types(dtype, np.float64)
    parts = (operator.diagonal, operator.lower_diagonal, operator.upper_diagonal)
    parts = [np.asarray(x).astype(wide) / scale for x in parts]
    matrix = sum(np.diag(x, i) for x, i in zip(parts, (0, -1, 1), strict=True))
    sign, log = np.linalg.slogdet(matrix)
    log = log + 2000 * np.log(scale)
    rtol = 100 * float(np.finfo(dtype).eps)
    assert np.allclose(solution.value, log, rtol=rtol)
    assert np.allclose(solution.stats["sign"], sign, rtol=1e4 * rtol)
    assert all_finite(slope)


@pytest.mark.parametrize("name", NARROW)
def test_structured_operators_in_half_precision(name):
    """`value` is in float32, as for other operators."""
    solution, matrix = structured_answers()[f"{name}-bfloat16"]
    assert solution.value.dtype == np.float32
    # The stored entries are exact, so that only float32 rounds.
    log = log_abs_det(np.asarray(matrix, np.float64))
    assert np.allclose(solution.value, log, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(but=("tridiagonal", "triangular"))
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_structured_operators(name):
    solution, _ = structured_answers()[f"{name}-singular"]
    assert solution.result == tx.RESULTS.zero_determinant
    assert solution.stats["sign"] == 0
    assert solution.value == -np.inf
    if name in ("diagonal", "tridiagonal"):
        with pytest.raises(RuntimeError) as error:
            structured(SINGULAR[name])
        assert tx.RESULTS[tx.RESULTS.zero_determinant] in str(error.value)


def test_zeros_on_the_diagonal_of_a_tridiagonal_operator():
    """Leading minors vanish, the determinant does not; of derivatives see above."""
    solution, matrix = structured_answers()["zero-diagonal"]
    sign, log = np.linalg.slogdet(matrix)
    assert np.allclose(solution.value, log)
    assert solution.stats["sign"] == sign


# --- Scales and degenerate operators ---


def scaled(name, matrix, scale):
    # With 5 steps the deflated space would be the whole one, and all error rounding.
    num_steps = 3 if name == "krylov-logdet" else 5
    settings = {"k": 8, "num_steps": num_steps, "throw": False}
    solution = solution_of(name, scale * matrix, KEY, **settings)
    return solution.value - N * jnp.log(scale), solution.std_err


# About 1e-12 and 1e12; and where squares of the entries are beyond float32.
@pytest.mark.slow
@pytest.mark.parametrize("power", [-40, 40, -80, 80])
@pytest.mark.parametrize(
    "name", ["logdet", "nystrom", "cholesky", "krylov-logdet", "general"]
)
def test_scaling(name, power):
    """`logdet(c A) = n log c + logdet(A)`: c is a power of two, so that `c A` is exact.
    What remains are roundoffs for each of n eigenvalues: of Lanczos, at condition number
    3 (10 for the general matrix), below 10; of `log c`, which is added with weights that
    sum to one but for roundoffs, below 4 of its size (2.7 in 100 keys)."""
    matrix = matrix_of(name, np.float32)
    value, std_err = compiled(scaled, name, matrix, np.float32(1))
    roundoffs = 10 + 4 * abs(power) * np.log(2)
    tolerance = N * roundoffs * float(np.finfo(np.float32).eps)
    other, other_err = compiled(scaled, name, matrix, np.float32(2.0**power))
    assert np.abs(other - value) < tolerance
    assert np.allclose(other_err, std_err, rtol=0.01, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "k", "estimator"),
    [
        (tx.Power(0.5), 4, SLQ),
        (tx.Entropy(), 4, SLQ),
        (tx.Exp(), 4, SLQ),
        (tx.Entropy(), N, SLQ),
        (tx.Power(0.5), 4, KRYLOV),
    ],
    ids=["sqrt", "entropy", "exp", "entropy-exact", "sqrt-krylov"],
)
def test_singular_operators(function, k, estimator):
    """With all n steps the quadrature is exact; where sampling is not, 6 standard errors
    as above, but with few samples: fixed seed."""

    @jax.jit
    def run(matrix, spectrum):
        def value(matrix):
            settings = {"k": k, "num_steps": N, "key": KEY, "throw": False}
            solution = tx.trace_of_function(
                dense(matrix), function, estimator, **settings
            )
            return solution.value, solution

        exact = jnp.sum(function(spectrum))
        return *jax.grad(value, has_aux=True)(matrix), exact

    some = np.append(np.linspace(0.2, 1, 5), np.zeros(N - 5))
    for spectrum in (np.zeros(N), some):
        slope, solution, exact = run(matrix_of(spectrum=spectrum), spectrum)
        # Rounding leaves eigenvalues of size eps, with square roots of 1e-8. What is not
        # deflated is nothing else, and then rounding decides whether it is much of a bar.
        rounded = solution.result == tx.RESULTS.precision_lost
        rounded &= estimator is KRYLOV and spectrum is some
        assert rounded | (solution.result == tx.RESULTS.successful)
        error = 1e-6 + (0 if k == N or spectrum is not some else 6 * solution.std_err)
        assert np.abs(solution.value - exact) < error
        assert all_finite((slope, solution.std_err, solution.stats))


@pytest.mark.slow
def test_not_a_number_under_jit_and_vmap():
    stack = stack_of("nystrom", 2)
    stack[1, [3, 4], [4, 3]] = np.nan

    @jax.jit
    def codes(stack):
        def one(matrix):
            solution = solution_of("nystrom", matrix, KEY, throw=False)
            return solution.result == tx.RESULTS.nonfinite_product

        return jax.vmap(one)(stack)

    assert codes(stack).tolist() == [False, True]


SINGULAR_MATRICES = [np.zeros((N, N)), matrix_of(spectrum=np.eye(N)[0])]


def action_and_trace(function, matrix, v):
    operator = tx.function_of(dense(matrix), function, 5)
    estimator = tx.HutchinsonEstimator()
    solution = tx.trace(operator, estimator, k=4, key=KEY, throw=False)
    return operator.mv(v), solution.result == tx.RESULTS.successful


@pytest.mark.slow
@pytest.mark.parametrize("function", [tx.Exp(), tx.Inverse(), tx.Power(0.5)], ids=str)
def test_actions_of_singular_operators(function):
    """The zero vector goes to zero. There is no inverse, and a product cannot say so but
    by NaN, which a trace of it then reports; other functions are finite."""
    v = np.random.default_rng(0).standard_normal(N)
    for matrix in SINGULAR_MATRICES:
        of_zero, _ = compiled(action_and_trace, function, matrix, np.zeros(N))
        assert np.all(of_zero == 0)
        found, successful = compiled(action_and_trace, function, matrix, v)
        defined = not isinstance(function, tx.Inverse)
        assert np.all(np.isfinite(found) if defined else np.isnan(found))
        assert successful == defined
        if isinstance(function, tx.Exp):
            values, vectors = np.linalg.eigh(matrix)
            assert np.allclose(found, vectors @ (np.exp(values) * (vectors.T @ v)))


def preconditioners(matrix):
    made = (
        tx.nystrom_preconditioner(dense(matrix), 4, key=KEY),
        tx.pivoted_cholesky_preconditioner(dense(matrix), 4),
    )
    return [(x.shift, x.logdet, x.inverse().mv(jnp.ones(N))) for x in made]


@pytest.mark.slow
def test_preconditioners_of_singular_operators():
    for matrix in SINGULAR_MATRICES:
        for shift, logdet, inverse in compiled(preconditioners, matrix):
            assert shift > 0
            assert np.isfinite(logdet)
            assert np.all(np.isfinite(inverse))
