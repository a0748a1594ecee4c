import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


class Scale(eqx.Module):
    """A layer with a trainable array, a static string and a constant integer array."""

    weight: jax.Array
    order: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, x, key=None):
        return self.weight * x[self.order]


@eqx.filter_jit
def mlp(dtype):
    keys = jr.split(jr.key(1), 2)
    first = eqx.nn.Linear(3, 4, dtype=dtype, key=keys[0])
    last = eqx.nn.Linear(4, 2, dtype=dtype, key=keys[1])
    scale = Scale(jnp.linspace(1, 2, 4, dtype=dtype), jnp.array([1, 0, 3, 2]), "scale")
    return eqx.nn.Sequential([first, eqx.nn.Lambda(jnp.tanh), scale, last])


def apply_mlp(model):
    leaf = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))[0]
    x = jnp.linspace(-1, 1, 15, dtype=leaf.dtype).reshape(5, 3)
    return {"out": jax.vmap(model)(x)}


def apply_tree(tree):
    a, (b, c) = tree["a"], tree["bc"]
    return jnp.sin(a) * b, jnp.sum(a * b) * c**3


def apply_array(x):
    return jnp.tanh(jnp.cumsum(x) * x[::-1])


def point(kind, dtype):
    x = np.linspace(0.1, 1.3, 6, dtype=dtype)
    if kind == "array":
        return apply_array, jnp.asarray(x)
    if kind == "tree":
        tree = {"a": x[:3], "bc": (x[1], x[4:].reshape(1, 2))}
        return apply_tree, jax.tree.map(jnp.asarray, tree)
    return apply_mlp, mlp(dtype)


def loss(outputs):
    """Convex, with a Hessian that is not diagonal."""
    flat = ravel_pytree(outputs)[0]
    return jax.nn.logsumexp(flat) + jnp.sum(flat) ** 2


def dense(model, x):
    """Hessian, J^T H J and J^T J of `loss(model(x))`, from JAX alone."""
    params, static = eqx.partition(x, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(params)

    def outputs(flat):
        return ravel_pytree(model(eqx.combine(unravel(flat), static)))[0]

    jacobian = jax.jacobian(outputs)(flat)
    curvature = jax.hessian(loss)(outputs(flat))
    return {
        "hessian": jax.hessian(lambda flat: loss(outputs(flat)))(flat),
        "ggn": jacobian.T @ curvature @ jacobian,
        "gram": jacobian.T @ jacobian,
    }


def operators(model, x):
    return {
        "hessian": tx.hessian(lambda x: loss(model(x)), x),
        "ggn": tx.ggn(model, loss, x),
        "gram": tx.jacobian_gram(model, x),
    }


@pytest.mark.slow(but="tree")
@pytest.mark.parametrize("kind", ["array", "tree", "mlp"])
def test_against_dense(kind):
    model, x = point(kind, np.float64)

    @eqx.filter_jit
    def run(x):
        made = operators(model, x)
        matrices = {name: op.as_matrix() for name, op in made.items()}
        solutions = {name: tx.trace(op, k=op.in_size()) for name, op in made.items()}
        return dense(model, x), matrices, solutions

    expected, matrices, solutions = run(x)
    n = ravel_pytree(eqx.filter(x, eqx.is_inexact_array))[0].size
    for name, matrix in expected.items():
        assert matrices[name].shape == matrix.shape == (n, n)
        assert np.allclose(matrices[name], matrix, rtol=1e-9, atol=1e-9), name
        assert np.isclose(solutions[name].value, np.trace(matrix), rtol=1e-9), name
        assert solutions[name].stats["num_matvecs"] == n


def test_structure_and_tags():
    model, x = point("mlp", np.float32)
    variables = jax.eval_shape(lambda: eqx.filter(x, eqx.is_inexact_array))
    for name, op in operators(model, x).items():
        assert op.in_structure() == op.out_structure() == variables
        leaves = jax.tree.leaves(op.in_structure())
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
        assert lx.is_positive_semidefinite(op) == (name != "hessian")
        assert lx.is_symmetric(op)


@pytest.mark.slow
def test_estimate_of_float32_tree():
    """Random probes of PyTrees: within 6 reported standard errors (fixed seed)."""
    model, x = point("mlp", np.float32)

    @eqx.filter_jit
    def run(x, key):
        estimator = tx.HutchinsonEstimator()
        solutions = {
            name: tx.trace(op, estimator, k=16, key=key)
            for name, op in operators(model, x).items()
        }
        return dense(model, x), solutions

    expected, solutions = run(x, jr.key(5))
    for name, matrix in expected.items():
        solution, exact = solutions[name], np.trace(matrix)
        assert solution.value.dtype == solution.std_err.dtype == np.float32
        assert 0 < abs(solution.value - exact) < 6 * solution.std_err, name
        assert solution.std_err < abs(exact)


def test_transformations():
    """jit, vmap and grad of the trace with respect to the point."""
    x = np.linspace(0.1, 1.3, 6)

    def by_trace(x, name):
        op = operators(apply_array, x)[name]
        return tx.trace(op, k=6, key=jr.key(0)).value

    def by_matrix(x, name):
        return jnp.trace(dense(apply_array, x)[name])

    @eqx.filter_jit
    def run(points, name):
        ways = [jax.value_and_grad(by) for by in (by_trace, by_matrix)]
        return [jax.vmap(lambda x, way=way: way(x, name))(points) for way in ways]

    for name in ("hessian", "ggn", "gram"):
        (values, grads), (expected, expected_grads) = run(np.stack([x, x[::-1]]), name)
        assert np.allclose(values, expected), name
        assert np.allclose(grads, expected_grads), name


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: tx.hessian(jnp.sin, jnp.ones(3)), ["`fn`", "scalar", "shape=(3,)"]),
        (
            lambda: tx.hessian(lambda x: jnp.sum(x + 1j), jnp.ones(3)),
            ["`fn`", "real", "complex128"],
        ),
        (
            lambda: tx.ggn(jnp.sin, jnp.cos, jnp.ones(3)),
            ["`loss`", "scalar", "shape=(3,)"],
        ),
        *(
            (call, ["`x`", "real floating-point", found])
            for x, found in [
                (jnp.ones(3, complex), "complex128"),
                (jnp.arange(3), "int"),
            ]
            for call in (
                lambda x=x: tx.hessian(lambda x: jnp.sum(jnp.abs(x) * 1.0), x),
                lambda x=x: tx.jacobian_gram(jnp.sin, x),
                lambda x=x: tx.ggn(jnp.sin, jnp.sum, x),
            )
        ),
    ],
)
def test_errors(call, parts):
    with pytest.raises(TypeError) as error:
        call()
    for part in parts:
        assert part in str(error.value)


N = 5
M = np.random.default_rng(8).standard_normal((N, N))
D = np.diag(np.arange(1.0, N + 1))
MATRIX, DIAGONAL = jnp.asarray(M), jnp.asarray(np.diag(D))
STORED = lx.MatrixLinearOperator(MATRIX)
SCALES = lx.DiagonalLinearOperator(DIAGONAL)
OTHERS = lx.DiagonalLinearOperator(jnp.asarray(M[0]))
IDENTITY = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), jnp.float64))
TREE = lx.PyTreeLinearOperator(
    jax.tree.map(
        jnp.asarray,
        {"a": {"a": M[:2, :2], "b": M[:2, 2:]}, "b": {"a": M[2:, :2], "b": M[2:, 2:]}},
    ),
    {
        name: jax.ShapeDtypeStruct((size,), jnp.float64)
        for name, size in zip("ab", (2, 3), strict=True)
    },
)
TREE_SCALES = lx.DiagonalLinearOperator((DIAGONAL, {"b": jnp.asarray(np.ones((2, 3)))}))
TRIDIAGONAL = lx.TridiagonalLinearOperator(
    DIAGONAL, jnp.asarray(M[0, 1:]), jnp.asarray(M[1, 1:])
)


def function(tags=(), matrix=MATRIX):
    return matrix_free(matrix, tags)


def jacobian(tags=(), matrix=MATRIX):
    at = jnp.asarray(np.ones(N))
    return lx.JacobianLinearOperator(lambda x, _: matrix @ x, at, tags=tags)


FREE = function(lx.diagonal_tag, jnp.asarray(D))
FREE_JACOBIAN = jacobian(lx.diagonal_tag, jnp.asarray(D))

# An operator, its matrix, and the number of products that its exact trace takes.
KINDS = {
    "matrix": (STORED, M, 0),
    "diagonal": (SCALES, D, 0),
    "diagonal-tree": (TREE_SCALES, np.diag([*np.diag(D), *np.ones(6)]), 0),
    "identity": (IDENTITY, np.eye(N), 0),
    "tridiagonal": (TRIDIAGONAL, D, 0),
    "pytree": (TREE, M, 0),
    "function": (function(), M, N),
    "function-diagonal": (FREE, D, 1),
    "jacobian": (jacobian(), M, N),
    "jacobian-diagonal": (FREE_JACOBIAN, D, 1),
    "tagged-matrix": (lx.TaggedLinearOperator(STORED, lx.symmetric_tag), M, 0),
    "tagged-function": (lx.TaggedLinearOperator(function(), lx.symmetric_tag), M, N),
    "multiple": (3 * STORED, 3 * M, 0),
    "multiple-function": (function() * 3, 3 * M, N),
    "quotient": (STORED / 3, M / 3, 0),
    "negative": (-SCALES, -D, 0),
    "sum-stored": (STORED + IDENTITY, M + np.eye(N), 0),
    "sum-function": (function() + IDENTITY, M + np.eye(N), N),
    "sum-functions": (function() + jacobian(), 2 * M, N),
    "sum-diagonals": (FREE + FREE_JACOBIAN, 2 * D, 2),
    "difference": (STORED - SCALES, M - D, 0),
    "composed": (STORED @ STORED, M @ M, N),
    "composed-diagonals": (SCALES @ IDENTITY, D, 0),
    "composed-diagonal-squared": (SCALES @ OTHERS, D * M[0], 0),
    "composed-function-diagonal": (FREE @ OTHERS, D * M[0], 1),
    "composed-diagonal-matrix": (SCALES @ STORED, D @ M, N),
    "shifted-multiple": ((2 * STORED + IDENTITY) / 4, (2 * M + np.eye(N)) / 4, 0),
}


@ft.cache
def exact_traces():
    """Of all kinds, by two estimators, from one program."""
    estimators = tx.ExactTraceEstimator(), tx.AutoTraceEstimator()
    costs = {name: cost for name, (_, _, cost) in KINDS.items()}

    @eqx.filter_jit
    def run(made):
        return {
            name: [tx.trace(op, each, k=max(costs[name], 1)) for each in estimators]
            for name, op in made.items()
        }

    return run({name: op for name, (op, _, _) in KINDS.items()})


@pytest.mark.slow(but=("matrix", "pytree", "jacobian", "tagged-function", "multiple"))
@pytest.mark.parametrize("kind", KINDS)
def test_exact_trace_and_its_cost(kind):
    op, matrix, cost = KINDS[kind]
    for solution in exact_traces()[kind]:
        assert np.isclose(solution.value, np.trace(matrix), rtol=1e-12, atol=0)
        assert solution.std_err == 0
        assert solution.stats["num_matvecs"] == cost
    chosen = tx.select_trace_estimator(op, max(cost, 1))
    assert isinstance(chosen, tx.ExactTraceEstimator)
    if cost > 1:
        chosen = tx.select_trace_estimator(op, cost - 1)
        assert not isinstance(chosen, tx.ExactTraceEstimator)
        with pytest.raises(ValueError, match="or fewer where lineax knows the diagonal"):
            tx.trace(op, tx.ExactTraceEstimator(), k=cost - 1)


WRAPS = {
    "function": lambda op: op,
    "tagged": lambda op: lx.TaggedLinearOperator(op, lx.symmetric_tag),
    "multiple": lambda op: 2 * op,
    "sum": lambda op: op + lx.DiagonalLinearOperator(jnp.asarray(np.arange(6.0))),
}


@pytest.mark.parametrize(
    ("name", "block_size"),
    [*((name, None) for name in WRAPS), ("function", 1), ("function", 4)],
)
def test_number_of_products_made(name, block_size):
    """Counted as they are made, in the running program."""
    made = []

    def count(v):
        jax.debug.callback(lambda _: made.append(1), v[0])
        return 3 * v

    structure = jax.ShapeDtypeStruct((6,), jnp.float64)
    op = WRAPS[name](lx.FunctionLinearOperator(count, structure))
    solution = tx.trace(op, k=6, execution=tx.Local(block_size))
    jax.block_until_ready(solution.value)
    jax.effects_barrier()
    assert len(made) == 6 == solution.stats["num_matvecs"]


def test_what_is_made_of_hermitian_operators_is_hermitian():
    values = np.linspace(-1, 1, 4)
    matrix = jnp.asarray(hermitian(0, values, np.complex128))
    tagged = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
    identity = lx.TaggedLinearOperator(lx.MatrixLinearOperator(jnp.eye(4) + 0j), PSD)
    combined = -(2.0 * tagged) / 4.0 + identity
    found = tx.log_trace_exp(combined, k=4).value
    assert np.allclose(found, np.log(np.sum(np.exp(1 - values / 2))))
    for other in (1j * tagged, tagged + lx.MatrixLinearOperator(matrix)):
        with pytest.raises(ValueError, match="must be Hermitian"):
            tx.log_trace_exp(other, k=4)


def test_gram_of_a_complex_jacobian():
    """That of the real and the imaginary parts: its trace is the squared norm."""
    point = jnp.arange(4.0)
    operator = tx.jacobian_gram(jnp.fft.fft, point)
    assert np.allclose(tx.trace(operator, k=4).value, 16)
    operator = tx.jacobian_gram(lambda x: jnp.exp(1j * x), point)
    assert np.allclose(tx.diagonal(operator, k=4).value, 1)


def test_numpy_parameters_of_any_dtype():
    """NumPy does not take bfloat16 for a floating-point number."""
    point = {"a": np.ones(3, jnp.bfloat16), "b": np.ones(2, np.float32)}
    square = lambda x: jnp.sum(jnp.square(x).astype(jnp.float32))  # noqa: E731
    loss = lambda x: square(x["a"]) + square(x["b"])  # noqa: E731
    operator = tx.hessian(loss, point)
    assert operator.in_size() == 5
    assert np.allclose(tx.trace(operator, k=5).value, 10)
    batched = tx.hessian(lambda x, _: loss(x), point, np.zeros(2, np.float32))
    assert np.allclose(tx.trace(batched, k=5).value, 10)
