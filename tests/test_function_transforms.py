"""Log-determinants and traces of functions: `jit`, `vmap`, derivatives, dtypes, PyTrees,
limits of the arguments, structured and degenerate operators."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx

from .helpers import matrix_free, spectrum_matrix


N = 20
KEY = jr.key(0)
PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag
SLQ, KRYLOV = tx.SLQEstimator(), tx.KrylovAwareEstimator()
FLAT = jnp.linspace(1, 3, N)
SETTINGS = {"k": 4, "num_steps": 5}


def dense(matrix, tags=PSD):
    return lx.MatrixLinearOperator(matrix, tags)


def preconditioned(operator, key, make, **settings):
    key1, key2 = jr.split(key)
    if make is tx.nystrom_preconditioner:
        preconditioner = make(operator, 4, key=key1)
    else:
        ones = jnp.diagonal(operator.as_matrix())
        preconditioner = make(operator, 4, diagonal=ones)
    return tx.logdet(operator, key=key2, preconditioner=preconditioner, **settings)


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


# Of a Hermitian operator.
DEFINITE = {
    "logdet": logdet,
    "nystrom": nystrom_logdet,
    "cholesky": cholesky_logdet,
    "krylov-logdet": krylov_logdet,
    "exponential": exponential,
    "krylov": krylov,
}


def solution_of(name, operator, key, **settings):
    return DEFINITE[name](operator, key, **(SETTINGS | settings))


def probe(operator, key):
    leaf = operator.in_structure()
    return jr.normal(key, leaf.shape, leaf.dtype)


def action(operator, key, num_steps=5):
    return tx.function_of(operator, tx.Inverse(), num_steps).mv(probe(operator, key))


def nystrom_inverse(operator, key):
    preconditioner = tx.nystrom_preconditioner(operator, 4, key=key)
    return preconditioner.inverse().mv(probe(operator, key)), preconditioner.logdet


def cholesky_inverse(operator, key):
    preconditioner = tx.pivoted_cholesky_preconditioner(operator, 4)
    return preconditioner.inverse().mv(probe(operator, key)), preconditioner.logdet


def answer(name, matrix, key):
    """What each public function gives for a matrix and a key, as a PyTree of arrays."""
    if name == "general":
        skew = jnp.triu(matrix, 1) + matrix
        solution = logdet(dense(skew, ()), key, **SETTINGS)
    elif name == "solved":
        solution = solved_logdet(dense(matrix), key, **SETTINGS)
    elif name in OTHERS:
        return OTHERS[name](dense(matrix), key)
    else:
        solution = solution_of(name, dense(matrix), key)
    return solution.value, solution.std_err


OTHERS = {
    "action": action,
    "nystrom-inverse": nystrom_inverse,
    "cholesky-inverse": cholesky_inverse,
}
ESTIMATES = [*DEFINITE, "general", "solved"]
everything = pytest.mark.parametrize("name", [*ESTIMATES, *OTHERS])
# Compilation takes the time, so most tests are of a few of these.


def matrix_of(dtype=jnp.float64, spectrum=FLAT, seed=0):
    return spectrum_matrix(jr.key(seed), spectrum, dtype)


def stack_of(num=3):
    return jnp.stack([matrix_of(seed=i, spectrum=FLAT + i) for i in range(num)])


def close(x, y, rtol):
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(jnp.allclose(a, b, rtol=rtol, atol=rtol) for a, b in pairs)


@everything
def test_shapes_are_known(name):
    shapes = eqx.filter_eval_shape(lambda a: answer(name, a, KEY), matrix_of())
    first, *rest = jax.tree.leaves(shapes)
    assert first.shape == ((N,) if name in OTHERS else ())
    assert {leaf.dtype for leaf in (first, *rest)} == {jnp.dtype(jnp.float64)}


@pytest.mark.parametrize(
    "name", ["logdet", "krylov", "general", "action", "nystrom-inverse"]
)
def test_jit_is_eager_and_vmap_is_a_loop(name):
    stack, keys = stack_of(), jr.split(KEY, 3)
    alone = [answer(name, a, key) for a, key in zip(stack, keys, strict=True)]
    together = jax.jit(jax.vmap(lambda a, key: answer(name, a, key)))(stack, keys)
    assert close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone), 1e-9)
    compiled = jax.jit(lambda a, key: answer(name, a, key))
    assert close(compiled(stack[1], keys[1]), alone[1], 1e-10)


@pytest.mark.parametrize("name", ["logdet"])
def test_vmap_over_keys(name):
    matrix, keys = matrix_of(), jr.split(KEY, 3)
    together = jax.vmap(lambda key: answer(name, matrix, key))(keys)
    alone = [answer(name, matrix, key) for key in keys]
    assert close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone), 1e-9)
    assert len({float(x) for x in jax.tree.leaves(together)[0].reshape(3, -1)[:, 0]}) == 3


@pytest.mark.parametrize("name", ["nystrom", "general"])
def test_derivatives_agree(name):
    """Reverse and forward mode with each other, and those of a batch with single ones."""
    stack, keys = stack_of(2), jr.split(KEY, 2)
    directions = jr.normal(jr.key(9), stack.shape)

    def value(matrix, key):
        return answer(name, matrix, key)[0]

    def total(stack):
        return jnp.sum(jax.vmap(value)(stack, keys))

    slopes = jax.jit(jax.grad(total))(stack)
    single = jax.grad(value)(stack[1], keys[1])
    assert jnp.allclose(slopes[1], single, rtol=1e-8, atol=1e-9)
    _, along = jax.jvp(lambda a: value(a, keys[1]), (stack[1],), (directions[1],))
    assert jnp.allclose(along, jnp.sum(single * directions[1]), rtol=1e-9)
    assert jnp.max(jnp.abs(single)) > 1e-3


def test_derivative_of_the_action_in_the_vector():
    operator = tx.function_of(dense(matrix_of(jnp.complex128)), tx.Inverse(), N)
    v, w = probe(operator, jr.key(1)), probe(operator, jr.key(2))
    _, along = jax.jvp(operator.mv, (v,), (w,))
    assert jnp.allclose(along, operator.mv(w))
    _, pull = jax.vjp(operator.mv, v)
    # JAX's cotangents are transposes, without a conjugate.
    assert jnp.allclose(pull(w)[0], operator.mv(w.conj()).conj())


@pytest.mark.parametrize("name", ["nystrom-inverse", "cholesky-inverse"])
def test_preconditioners_are_constant(name):
    total = lambda a: sum(jnp.sum(x) for x in answer(name, a, KEY))  # noqa: E731
    assert jnp.all(jax.grad(total)(matrix_of()) == 0)


def test_parameters_of_functions():
    operator, scales = dense(matrix_of()), jnp.array([-1.0, 0.0, 0.5])

    def value(scale, k):
        function = tx.Exp(scale)
        return tx.trace_of_function(operator, function, k=k, num_steps=5, key=KEY).value

    exact = jax.vmap(jax.grad(lambda s: value(s, N)))(scales)
    assert jnp.allclose(exact, jnp.sum(FLAT * jnp.exp(scales[:, None] * FLAT), axis=1))

    def power(p):
        function = lambda x: x**p  # noqa: E731
        return tx.trace_of_function(operator, function, k=N, num_steps=1).value

    assert jnp.allclose(jax.grad(power)(1.5), jnp.sum(FLAT**1.5 * jnp.log(FLAT)))


@pytest.mark.parametrize("name", ["logdet"])
def test_one_trace_for_each_budget(name):
    """Further calls with other keys and arrays do not trace the operator again."""
    traces = collections.Counter()

    @jax.custom_jvp
    def product(matrix, v):
        traces["product"] += 1
        return matrix @ v

    product.defjvp(lambda x, t: (product(*x), t[0] @ x[1] + x[0] @ t[1]))
    matrix = matrix_of()
    solve = eqx.filter_jit(
        lambda matrix, key, k: (
            DEFINITE[name](
                lx.FunctionLinearOperator(
                    lambda v: product(matrix, v), jax.eval_shape(lambda: matrix[0]), PSD
                ),
                key,
                k=k,
                num_steps=5,
            ).value
        )
    )
    found = []
    for k, key in [(3, 0), (3, 1), (4, 0), (4, 1), (3, 2)]:
        solve(matrix, jr.key(key), k)
        found.append(traces.total())
    assert found[0] == found[1] < found[2] == found[3] == found[4]


def test_eager_calls_compile_once(caplog):
    """The same operator, or one like it, with other keys."""
    logdet(dense(matrix_of()), jr.key(0), k=3, num_steps=4)
    nystrom_logdet(dense(matrix_of()), jr.key(0), k=3, num_steps=4)
    other = dense(matrix_of(seed=1))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        logdet(other, jr.key(1), k=3, num_steps=4)
        nystrom_logdet(other, jr.key(1), k=3, num_steps=4)
    assert "Compiling" not in caplog.text


# --- Complex, PyTrees, dtypes ---


def dense_answer(name, matrix):
    eigenvalues = jnp.linalg.eigvalsh(matrix.astype(jnp.complex128))
    f = {"exponential": lambda x: jnp.exp(-x / 2), "krylov": lambda x: 1 / x}
    return jnp.sum(f.get(name, jnp.log)(eigenvalues))


@pytest.mark.parametrize("name", ["nystrom", "krylov"])
def test_complex_hermitian(name):
    """Within 6 standard errors and the bracket. For Student's t with 11 degrees of
    freedom and the inflation of `std_err` that is a false alarm with probability below
    1e-4; the seed is fixed."""
    matrix = matrix_of(jnp.complex128, jnp.linspace(1, 10, 2 * N))
    truth = dense_answer(name, matrix)
    exact = solution_of(name, dense(matrix), KEY, k=2 * N)
    assert exact.value.dtype == jnp.float64
    assert jnp.allclose(exact.value, truth, rtol=1e-12)
    assert exact.std_err == 0
    solution = solution_of(name, matrix_free(matrix, PSD), KEY, k=12, num_steps=10)
    assert solution.value.dtype == solution.std_err.dtype == jnp.float64
    low, high = solution.stats.get("bracket", [solution.value, solution.value])
    # Without a bracket: the error of 10 steps at condition number 10 is below 1e-6.
    error = 6 * solution.std_err + (high - low) + 1e-6 * jnp.abs(truth)
    assert jnp.abs(solution.value - truth) < error
    assert solution.std_err < 0.1 * jnp.abs(truth)


@pytest.mark.parametrize("estimator", [SLQ, KRYLOV], ids=lambda e: type(e).__name__)
def test_hermitian_tag(estimator):
    """An indefinite complex operator; the false-alarm rate is as above."""
    matrix = matrix_of(jnp.complex128, jnp.linspace(-1, 1, 2 * N))
    truth = jnp.sum(jnp.exp(jnp.linalg.eigvalsh(matrix)))
    if estimator is SLQ:
        operator = matrix_free(matrix, tx.hermitian_tag)
    else:
        plain = lx.MatrixLinearOperator(matrix)
        operator = lx.TaggedLinearOperator(plain, tx.hermitian_tag)

    def run(k):
        settings = {"k": k, "num_steps": 10, "key": KEY}
        return tx.trace_of_function(operator, tx.Exp(), estimator, **settings)

    assert jnp.allclose(run(2 * N).value, truth)
    solution = run(12)
    assert solution.value.dtype == jnp.float64
    assert jnp.abs(solution.value - truth) < 6 * solution.std_err + 1e-9
    function = tx.function_of(operator, tx.Exp(), 2 * N)
    assert tx.hermitian_tag in function.tags
    v = probe(operator, KEY)
    assert jnp.allclose(function.mv(v), jax.scipy.linalg.expm(matrix) @ v)


def test_complex_general():
    """The false-alarm rate is as above."""
    matrix = jr.normal(KEY, (2 * N, 2 * N), complex) / 10 + 2 * jnp.eye(2 * N)
    truth = jnp.linalg.slogdet(matrix)[1]
    exact = logdet(matrix_free(matrix), KEY, k=2 * N, num_steps=1)
    assert jnp.allclose(exact.value, truth)
    assert exact.value.dtype == jnp.float64
    solution = logdet(matrix_free(matrix), KEY, k=12, num_steps=15)
    low, high = solution.stats["bracket"]
    assert jnp.abs(solution.value - truth) < 6 * solution.std_err + high - low


TREE = {
    "a": jax.ShapeDtypeStruct((3, 4), jnp.float64),
    "b": jax.ShapeDtypeStruct((N - 12,), jnp.float64),
}


def tree_operator(matrix, tags=PSD):
    def mv(tree):
        flat, back = ravel_pytree(tree)
        return back(matrix @ flat)

    return lx.FunctionLinearOperator(mv, TREE, tags)


@pytest.mark.parametrize("name", ["logdet"])
def test_pytrees_are_flat_vectors(name):
    matrix = matrix_of()
    found = solution_of(name, tree_operator(matrix), KEY)
    expected = solution_of(name, dense(matrix), KEY)
    assert jnp.allclose(found.value, expected.value, rtol=1e-11)
    assert jnp.allclose(found.std_err, expected.std_err, rtol=1e-9)


def test_actions_on_pytrees():
    matrix = matrix_of()
    v = jr.normal(KEY, (N,))
    tree = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape), TREE))[1](v)
    operator = tree_operator(matrix)
    found = tx.function_of(operator, tx.Inverse(), 5).mv(tree)
    assert jax.eval_shape(lambda: found) == TREE
    expected = tx.function_of(dense(matrix), tx.Inverse(), 5).mv(v)
    assert jnp.allclose(ravel_pytree(found)[0], expected)
    inverse = tx.nystrom_preconditioner(operator, 4, key=KEY).inverse()
    expected = tx.nystrom_preconditioner(dense(matrix), 4, key=KEY).inverse().mv(v)
    assert jnp.allclose(ravel_pytree(inverse.mv(tree))[0], expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_dtypes(dtype):
    """Answers are in float32, as accurate as the products: relative errors eps of entries
    move each eigenvalue by at most about 3 eps, and the logarithm has slopes of at most 1
    on [1, 3]. Quadrature errors are below 0.01, and for sampling 6 standard errors of 4
    probes are allowed, with a fixed seed."""
    matrix, eps = matrix_of().astype(dtype), float(jnp.finfo(dtype).eps)

    def value(matrix):
        solution = solution_of("logdet", dense(matrix), KEY)
        return solution.value, solution

    slope, solution = jax.grad(value, has_aux=True)(matrix)
    assert solution.value.dtype == solution.std_err.dtype == jnp.float32
    tolerance = 3 * N * eps + 0.01 + 6 * solution.std_err
    truth = jnp.sum(jnp.log(jnp.linalg.eigvalsh(matrix.astype(jnp.float64))))
    assert jnp.abs(solution.value - truth) < tolerance
    assert slope.dtype == dtype
    assert jnp.all(jnp.isfinite(slope))


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_narrow_actions(dtype):
    matrix, eps = matrix_of().astype(dtype), float(jnp.finfo(dtype).eps)
    for name in OTHERS:
        found, *_ = jax.tree.leaves(answer(name, matrix, KEY))
        assert found.dtype == dtype
        assert jnp.all(jnp.isfinite(found))
    v = jr.normal(KEY, (N,), dtype)
    found = tx.function_of(dense(matrix), tx.Inverse(), N).mv(v).astype(float)
    expected = jnp.linalg.solve(matrix.astype(float), v.astype(float))
    assert jnp.linalg.norm(found - expected) < 6 * eps * jnp.linalg.norm(expected) * 3


@pytest.mark.parametrize("name", ["nystrom", "krylov", "action"])
def test_strict_promotion_modes(name):
    """A user's strict modes are for the user's code."""
    matrix = matrix_of(jnp.complex64)
    if name in OTHERS:
        function = lambda a: answer(name, a, KEY)  # noqa: E731
    else:
        function = jax.value_and_grad(lambda a: answer(name, a, KEY)[0])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = function(matrix)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(found))


# --- Limits of the arguments ---


@pytest.mark.parametrize("name", ["nystrom"])
def test_block_size(name):
    found = [
        solution_of(name, dense(matrix_of()), KEY, k=9, execution=tx.Local(block_size=b))
        for b in (1, 7)
    ]
    one, seven = found
    assert jnp.allclose(one.value, seven.value, rtol=1e-12)
    assert jnp.allclose(one.stats["samples"], seven.stats["samples"], rtol=1e-9)


def test_block_size_of_preconditioners():
    a, b = (
        tx.nystrom_preconditioner(
            dense(matrix_of()), 9, key=KEY, execution=tx.Local(block_size=size)
        )
        for size in (1, 7)
    )
    assert jnp.allclose(a.values, b.values, rtol=1e-10)
    assert jnp.allclose(a.shift, b.shift, rtol=1e-10)


@pytest.mark.parametrize("name", ["krylov"])
def test_one_sample_has_no_error_bar(name):
    # KrylovAware keeps one of three probes for the rest.
    k = 3 if "krylov" in name else 1
    solution = solution_of(name, dense(matrix_of()), KEY, k=k)
    assert jnp.isfinite(solution.value)
    assert solution.std_err == jnp.inf
    assert solution.result == tx.RESULTS.successful


@pytest.mark.parametrize("name", ["logdet", "exponential"])
def test_enough_products_are_exact(name):
    """Without a key, and whatever the number of steps."""
    matrix = matrix_of()

    def value(matrix):
        operator = dense(matrix)
        solution = solution_of(name, operator, None, k=N + 5, num_steps=1)
        return solution.value, solution

    slope, solution = jax.grad(value, has_aux=True)(matrix)
    assert jnp.allclose(solution.value, dense_answer(name, matrix), rtol=1e-12)
    assert solution.std_err == 0
    assert solution.stats["num_matvecs"] == N
    f = {"logdet": lambda x: 1 / x, "exponential": lambda x: -jnp.exp(-x / 2) / 2}[name]
    values, vectors = jnp.linalg.eigh(matrix)
    assert jnp.allclose(slope, (vectors * f(values)) @ vectors.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["krylov", "general"])
def test_more_steps_than_rows_count_as_n(name):
    matrix, tags, call = matrix_of(), PSD, DEFINITE.get(name, logdet)
    if name == "general":
        matrix, tags = matrix + jnp.triu(matrix, 1), ()
    more = call(dense(matrix, tags), KEY, k=4, num_steps=N + 7)
    same = call(dense(matrix, tags), KEY, k=4, num_steps=N)
    assert more.value == same.value
    assert more.stats["num_matvecs"] == same.stats["num_matvecs"]


def test_rank_above_n_counts_as_n():
    """A preconditioner of full rank is the operator, up to rounding and its shift."""
    operator = dense(matrix_of())
    for preconditioner in (
        tx.nystrom_preconditioner(operator, N + 5, key=KEY),
        tx.pivoted_cholesky_preconditioner(operator, N + 5),
    ):
        assert preconditioner.num_matvecs == N
        assert jnp.allclose(preconditioner.logdet, jnp.sum(jnp.log(FLAT)), rtol=1e-10)
        v = jr.normal(KEY, (N,))
        expected = jnp.linalg.solve(operator.matrix, v)
        assert jnp.allclose(preconditioner.inverse().mv(v), expected, rtol=1e-9)
        settings = {"k": 4, "num_steps": 2, "key": KEY, "preconditioner": preconditioner}
        solution = tx.logdet(operator, **settings)
        assert jnp.allclose(solution.value, jnp.sum(jnp.log(FLAT)), rtol=1e-9)


@pytest.mark.parametrize(("estimator", "k", "n"), [(SLQ, 4, 7), (KRYLOV, 4, 8)])
def test_negative_semidefinite(estimator, k, n):
    matrix = matrix_of(spectrum=jnp.linspace(1, 2, n))
    run = lambda a, tags: tx.logdet(  # noqa: E731
        lx.MatrixLinearOperator(a, tags), estimator, k=k, num_steps=4, key=KEY
    )
    negative, positive = run(-matrix, NSD), run(matrix, PSD)
    assert jnp.allclose(negative.value, positive.value, rtol=1e-12)
    assert positive.stats["sign"] == 1
    assert negative.stats["sign"] == jnp.linalg.slogdet(-matrix)[0] == (-1) ** n
    if estimator is SLQ:
        slope = jax.grad(lambda a: run(a, NSD).value)(-matrix)
        expected = jax.grad(lambda a: run(a, PSD).value)(matrix)
        assert jnp.allclose(slope, -expected, rtol=1e-9, atol=1e-12)


# --- Structured operators ---


def entries(seed, n, dtype, scale):
    return (jr.normal(jr.key(seed), (n,), dtype) * scale).astype(dtype)


def tridiagonal(n=9, dtype=jnp.float64, scale=1.0):
    three = [entries(i, n - (i > 0), dtype, scale) for i in range(3)]
    return lx.TridiagonalLinearOperator(*three)


def triangular(which, dtype=jnp.float64):
    matrix = jr.normal(jr.key(3), (9, 9), dtype)
    if which == "lower":
        return lx.MatrixLinearOperator(jnp.tril(matrix), lx.lower_triangular_tag)
    return lx.MatrixLinearOperator(jnp.triu(matrix), lx.upper_triangular_tag)


def diagonal(dtype=jnp.float64):
    return lx.DiagonalLinearOperator(entries(5, 9, dtype, 1.0))


def symmetric_tridiagonal(dtype):
    side = entries(1, 8, dtype, 1.0)
    middle = jnp.linspace(3, 5, 9).astype(dtype)
    operator = lx.TridiagonalLinearOperator(middle, side / 4, side.conj() / 4)
    return lx.TaggedLinearOperator(operator, PSD)


IDENTITY = lx.IdentityLinearOperator(TREE)
STRUCTURED = {
    "diagonal": diagonal,
    "diagonal-matrix": lambda dtype: lx.MatrixLinearOperator(
        diagonal(dtype).as_matrix(), lx.diagonal_tag
    ),
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float64) for name in STRUCTURED]
    + [(name, jnp.complex64) for name in ("definite", "nested", "tagged")],
)
def test_structured_operators(name, dtype):
    operator = STRUCTURED[name](dtype)
    solution = structured(operator)
    sign, log = jnp.linalg.slogdet(operator.as_matrix())
    rtol = 200 * float(jnp.finfo(dtype).eps)
    assert solution.value.dtype == log.dtype
    assert jnp.allclose(solution.value, log, rtol=rtol, atol=rtol)
    assert jnp.allclose(solution.stats["sign"], sign, rtol=rtol)
    assert solution.stats["num_matvecs"] == 0
    assert solution.std_err == 0


@pytest.mark.parametrize("name", ["diagonal", "tridiagonal", "size-1", "nested"])
def test_derivatives_of_structured_operators(name):
    operator = STRUCTURED[name](jnp.float64)
    found = eqx.filter_grad(lambda x: structured(x).value)(operator)
    expected = eqx.filter_grad(lambda x: jnp.linalg.slogdet(x.as_matrix())[1])(operator)
    assert close(found, expected, 1e-9)
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), operator)
    together = eqx.filter_vmap(lambda x: structured(x).value)(batch)
    assert jnp.allclose(together[0], structured(operator).value, rtol=1e-12)


def test_structured_pytrees():
    assert structured(IDENTITY).value == 0
    assert jnp.allclose(structured(3.0 * IDENTITY).value, N * jnp.log(3))
    tree = {"a": jnp.full((3, 4), -2.0), "b": jnp.full(3, 5.0)}
    solution = structured(lx.DiagonalLinearOperator(tree))
    assert jnp.allclose(solution.value, 12 * jnp.log(2) + 3 * jnp.log(5))
    assert solution.stats["sign"] == 1


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (jnp.float64, 1e200),
        (jnp.float32, 1e-30),
        (jnp.complex64, 1e30),
    ],
)
def test_large_tridiagonal(dtype, scale):
    """The determinant, and products of two entries, are beyond the dtype. Rounding: 2000
    rows and condition numbers of about 1e4 together allow 1e4 roundoffs, relative to a
    sum of about 1e5."""
    operator = tridiagonal(2000, dtype, scale)
    solution = structured(operator)
    wide = jnp.promote_types(dtype, jnp.float64)
    matrix = operator.as_matrix().astype(wide) / scale
    sign, log = jnp.linalg.slogdet(matrix)
    log = log + 2000 * jnp.log(jnp.asarray(scale, jnp.float64))
    rtol = 100 * float(jnp.finfo(dtype).eps)
    assert jnp.allclose(solution.value, log, rtol=rtol)
    assert jnp.allclose(solution.stats["sign"], sign, rtol=1e4 * rtol)
    slope = eqx.filter_grad(lambda x: structured(x).value)(operator)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(slope))


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
@pytest.mark.parametrize("name", ["diagonal", "lower", "tridiagonal", "identity"])
def test_structured_operators_in_half_precision(name, dtype):
    """`value` is in float32, as for other operators."""
    wide = STRUCTURED[name](jnp.float64)
    operator = jax.tree.map(lambda x: x.astype(dtype), wide)
    if name == "identity":
        operator = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((9,), dtype))
    solution = structured(operator)
    assert solution.value.dtype == jnp.float32
    matrix = operator.as_matrix().astype(jnp.float64)
    log = jnp.linalg.slogdet(matrix)[1]
    # The stored entries are exact, so that only float32 rounds.
    assert jnp.allclose(solution.value, log, rtol=1e-4, atol=1e-4)


SINGULAR = {
    "diagonal": lx.DiagonalLinearOperator(jnp.array([1.0, 0.0, 2.0])),
    "zero": lx.DiagonalLinearOperator(jnp.zeros(3)),
    "tridiagonal": lx.TridiagonalLinearOperator(jnp.ones(2), jnp.ones(1), jnp.ones(1)),
    "zero-tridiagonal": lx.TridiagonalLinearOperator(
        jnp.zeros(3), jnp.zeros(2), jnp.zeros(2)
    ),
    "triangular": lx.MatrixLinearOperator(
        jnp.triu(jnp.ones((3, 3)), 1), lx.upper_triangular_tag
    ),
    "composed": lx.DiagonalLinearOperator(jnp.zeros(9)) @ diagonal(),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_structured_operators(name):
    solution = structured(SINGULAR[name], throw=False)
    assert solution.result == tx.RESULTS.zero_determinant
    assert solution.stats["sign"] == 0
    assert solution.value == -jnp.inf
    with pytest.raises(RuntimeError) as error:
        structured(SINGULAR[name])
    assert tx.RESULTS[tx.RESULTS.zero_determinant] in str(error.value)


def test_zeros_on_the_diagonal_of_a_tridiagonal_operator():
    """Leading minors vanish, the determinant does not; nor do derivatives fail."""
    zeros, ones = jnp.zeros(6), jnp.ones(5)
    operator = lx.TridiagonalLinearOperator(zeros, 2 * ones, ones)
    solution = structured(operator)
    sign, log = jnp.linalg.slogdet(operator.as_matrix())
    assert jnp.allclose(solution.value, log)
    assert solution.stats["sign"] == sign
    found = eqx.filter_grad(lambda x: structured(x).value)(operator)
    expected = eqx.filter_grad(lambda x: jnp.linalg.slogdet(x.as_matrix())[1])(operator)
    assert close(found, expected, 1e-9)


# --- Scales and degenerate operators ---


# About 1e-12 and 1e12; and where squares of the entries are beyond float32.
@pytest.mark.parametrize("power", [-40, 40, -80, 80])
@pytest.mark.parametrize(
    "name", ["logdet", "nystrom", "cholesky", "krylov-logdet", "general"]
)
def test_scaling(name, power):
    """`logdet(c A) = n log c + logdet(A)`: c is a power of two, so that `c A` is exact.
    What remains are the roundoffs of Lanczos, at condition number 3 (10 for the general
    matrix) below 10 for each of n eigenvalues, and of adding `log c`, below 60."""
    matrix = matrix_of(jnp.float32)
    tags = PSD
    if name == "general":
        matrix, tags = matrix + jnp.triu(matrix, 1), ()

    def run(scale):
        operator = dense(matrix * scale, tags)
        call = DEFINITE.get(name, logdet)
        solution = call(operator, KEY, k=8, num_steps=5)
        return solution.value - N * jnp.log(scale), solution.std_err

    value, std_err = run(jnp.float32(1))
    tolerance = N * (10 + 60) * float(jnp.finfo(jnp.float32).eps)
    scaled, scaled_err = run(jnp.float32(2.0**power))
    assert jnp.abs(scaled - value) < tolerance
    assert jnp.allclose(scaled_err, std_err, rtol=0.01, atol=tolerance)


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

    def run(matrix):
        settings = {"k": k, "num_steps": N, "key": KEY, "throw": False}
        solution = tx.trace_of_function(dense(matrix), function, estimator, **settings)
        return solution.value, solution

    some = jnp.zeros(N).at[:5].set(jnp.linspace(0.2, 1, 5))
    for spectrum in (jnp.zeros(N), some):
        slope, solution = jax.grad(run, has_aux=True)(matrix_of(spectrum=spectrum))
        assert solution.result == tx.RESULTS.successful
        # Rounding leaves eigenvalues of size eps, with square roots of 1e-8.
        error = 1e-6 + (0 if k == N or spectrum is not some else 6 * solution.std_err)
        assert jnp.abs(solution.value - jnp.sum(function(spectrum))) < error
        leaves = jax.tree.leaves((slope, solution.std_err, solution.stats))
        assert all(jnp.all(jnp.isfinite(x)) for x in leaves)


@pytest.mark.parametrize("name", ["nystrom"])
def test_not_a_number_under_jit_and_vmap(name):
    stack = stack_of(2).at[1, 3, 4].set(jnp.nan).at[1, 4, 3].set(jnp.nan)

    @jax.jit
    def codes(stack):
        def one(matrix):
            solution = solution_of(name, dense(matrix), KEY, throw=False)
            return solution.result == tx.RESULTS.nonfinite_product

        return jax.vmap(one)(stack)

    assert codes(stack).tolist() == [False, True]


@pytest.mark.parametrize("function", [tx.Exp(), tx.Inverse(), tx.Power(0.5)], ids=str)
def test_actions_of_singular_operators(function):
    """The zero vector goes to zero; the zero operator and one of low rank to no NaN."""
    for matrix in (jnp.zeros((N, N)), matrix_of(spectrum=jnp.zeros(N).at[0].set(1))):
        operator = tx.function_of(dense(matrix), function, 5)
        assert jnp.all(operator.mv(jnp.zeros(N)) == 0)
        v = jr.normal(KEY, (N,))
        assert jnp.all(jnp.isfinite(operator.mv(v)))
        if isinstance(function, tx.Exp):
            expected = jax.scipy.linalg.expm(matrix) @ v
            assert jnp.allclose(operator.mv(v), expected)


def test_preconditioners_of_singular_operators():
    for matrix in (jnp.zeros((N, N)), matrix_of(spectrum=jnp.zeros(N).at[0].set(1))):
        for preconditioner in (
            tx.nystrom_preconditioner(dense(matrix), 4, key=KEY),
            tx.pivoted_cholesky_preconditioner(dense(matrix), 4),
        ):
            assert preconditioner.shift > 0
            assert jnp.isfinite(preconditioner.logdet)
            inverse = preconditioner.inverse().mv(jnp.ones(N))
            assert jnp.all(jnp.isfinite(inverse))
