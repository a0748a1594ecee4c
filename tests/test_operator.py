import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx

from .helpers import matrix_free


class Scale(eqx.Module):
    """A layer with a trainable array, a static string and a constant integer array."""

    weight: jax.Array
    order: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, x, key=None):
        return self.weight * x[self.order]


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
    x = jnp.linspace(0.1, 1.3, 6, dtype=dtype)
    if kind == "array":
        return apply_array, x
    if kind == "tree":
        return apply_tree, {"a": x[:3], "bc": (x[1], x[4:].reshape(1, 2))}
    return apply_mlp, mlp(dtype)


def loss(outputs):
    """Convex, with a Hessian that is not diagonal."""
    flat = ravel_pytree(outputs)[0]
    return jax.nn.logsumexp(flat) + jnp.sum(flat) ** 2


@eqx.filter_jit
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


def operator(name, model, x):
    if name == "hessian":
        return tx.hessian(lambda x: loss(model(x)), x)
    if name == "ggn":
        return tx.ggn(model, loss, x)
    return tx.jacobian_gram(model, x)


every_operator = pytest.mark.parametrize("name", ["hessian", "ggn", "gram"])


@every_operator
@pytest.mark.parametrize("kind", ["array", "tree", "mlp"])
def test_against_dense(name, kind):
    model, x = point(kind, jnp.float64)
    expected = dense(model, x)[name]
    op = operator(name, model, x)
    n = op.in_size()
    matrix = eqx.filter_jit(lambda op: op.as_matrix())(op)
    assert matrix.shape == expected.shape == (n, n)
    assert jnp.allclose(matrix, expected, rtol=1e-9, atol=1e-9)
    solution = tx.trace(op, k=n)
    assert jnp.allclose(solution.value, jnp.trace(expected), rtol=1e-9)
    assert solution.stats["num_matvecs"] == n


@every_operator
def test_structure_and_tags(name):
    model, x = point("mlp", jnp.float32)
    op = operator(name, model, x)
    variables = jax.eval_shape(lambda: eqx.filter(x, eqx.is_inexact_array))
    assert op.in_structure() == op.out_structure() == variables
    leaves = jax.tree.leaves(op.in_structure())
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    assert lx.is_positive_semidefinite(op) == (name != "hessian")
    assert lx.is_symmetric(op)


@every_operator
def test_estimate_of_float32_tree(name):
    """Random probes of PyTrees: within 6 reported standard errors (fixed seed)."""
    model, x = point("mlp", jnp.float32)
    op = operator(name, model, x)
    solution = tx.trace(op, tx.HutchinsonEstimator(), k=16, key=jr.key(5))
    assert solution.value.dtype == solution.std_err.dtype == jnp.float32
    exact = jnp.trace(dense(model, x)[name])
    assert 0 < jnp.abs(solution.value - exact) < 6 * solution.std_err
    assert solution.std_err < jnp.abs(exact)


@every_operator
def test_transformations(name):
    """jit, vmap and grad of the trace with respect to the point."""
    x = jnp.linspace(0.1, 1.3, 6)
    points = jnp.stack([x, x[::-1]])

    def by_trace(x):
        return tx.trace(operator(name, apply_array, x), k=6, key=jr.key(0)).value

    def by_matrix(x):
        return jnp.trace(dense(apply_array, x)[name])

    values, grads = jax.jit(jax.vmap(jax.value_and_grad(by_trace)))(points)
    expected, expected_grads = jax.jit(jax.vmap(jax.value_and_grad(by_matrix)))(points)
    assert jnp.allclose(values, expected)
    assert jnp.allclose(grads, expected_grads)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: tx.hessian(jnp.sin, jnp.ones(3)), ["`f`", "scalar", "shape=(3,)"]),
        (
            lambda: tx.hessian(lambda x: jnp.sum(x + 1j), jnp.ones(3)),
            ["`f`", "real", "complex128"],
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
MATRIX = jr.normal(jr.key(8), (N, N))
STORED = lx.MatrixLinearOperator(MATRIX)
DIAGONAL = jnp.arange(1.0, N + 1)
IDENTITY = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), jnp.float64))


def function(tags=(), matrix=MATRIX):
    return matrix_free(matrix, tags)


def jacobian(matrix=MATRIX, tags=()):
    return lx.JacobianLinearOperator(lambda x, _: matrix @ x, jnp.ones(N), tags=tags)


# An operator, and the number of products that its exact trace takes.
KINDS = {
    "matrix": (STORED, 0),
    "diagonal": (lx.DiagonalLinearOperator(DIAGONAL), 0),
    "diagonal-tree": (lx.DiagonalLinearOperator((DIAGONAL, {"b": jnp.ones((2, 3))})), 0),
    "identity": (IDENTITY, 0),
    "tridiagonal": (
        lx.TridiagonalLinearOperator(DIAGONAL, MATRIX[0, 1:], MATRIX[1, 1:]),
        0,
    ),
    "pytree": (
        lx.PyTreeLinearOperator(
            {
                "a": {"a": MATRIX[:2, :2], "b": MATRIX[:2, 2:]},
                "b": {"a": MATRIX[2:, :2], "b": MATRIX[2:, 2:]},
            },
            {
                "a": jax.ShapeDtypeStruct((2,), jnp.float64),
                "b": jax.ShapeDtypeStruct((3,), jnp.float64),
            },
        ),
        0,
    ),
    "function": (function(), N),
    "function-diagonal": (function(lx.diagonal_tag, jnp.diag(DIAGONAL)), 1),
    "jacobian": (jacobian(), N),
    "jacobian-diagonal": (jacobian(jnp.diag(DIAGONAL), lx.diagonal_tag), 1),
    "tagged-matrix": (
        lx.TaggedLinearOperator(STORED, lx.symmetric_tag),
        0,
    ),
    "tagged-function": (lx.TaggedLinearOperator(function(), lx.symmetric_tag), N),
    "multiple": (3 * STORED, 0),
    "multiple-function": (function() * 3, N),
    "quotient": (STORED / 3, 0),
    "negative": (-lx.DiagonalLinearOperator(DIAGONAL), 0),
    "sum-stored": (
        STORED + IDENTITY,
        0,
    ),
    "sum-function": (function() + IDENTITY, N),
    "sum-functions": (function() + jacobian(), N),
    "sum-diagonals": (
        function(lx.diagonal_tag, jnp.diag(DIAGONAL))
        + jacobian(jnp.diag(DIAGONAL), lx.diagonal_tag),
        2,
    ),
    "difference": (
        STORED - lx.DiagonalLinearOperator(DIAGONAL),
        0,
    ),
    "composed": (STORED @ STORED, N),
    "composed-diagonals": (lx.DiagonalLinearOperator(DIAGONAL) @ IDENTITY, 0),
    "composed-diagonal-squared": (
        lx.DiagonalLinearOperator(DIAGONAL) @ lx.DiagonalLinearOperator(MATRIX[0]),
        0,
    ),
    "composed-function-diagonal": (
        function(lx.diagonal_tag, jnp.diag(DIAGONAL))
        @ lx.DiagonalLinearOperator(MATRIX[0]),
        1,
    ),
    "composed-diagonal-matrix": (lx.DiagonalLinearOperator(DIAGONAL) @ STORED, N),
    "shifted-multiple": (
        (2 * STORED + IDENTITY) / 4,
        0,
    ),
}


@pytest.mark.parametrize(("op", "cost"), KINDS.values(), ids=KINDS)
def test_exact_trace_and_its_cost(op, cost):
    expected = jnp.trace(op.as_matrix())
    for estimator in (tx.ExactTraceEstimator(), tx.AutoTraceEstimator()):
        solution = tx.trace(op, estimator, k=max(cost, 1))
        assert jnp.allclose(solution.value, expected, rtol=1e-12)
        assert solution.std_err == 0
        assert solution.stats["num_matvecs"] == cost
    chosen = tx.select_trace_estimator(op, max(cost, 1))
    assert isinstance(chosen, tx.ExactTraceEstimator)
    if cost > 1:
        chosen = tx.select_trace_estimator(op, cost - 1)
        assert not isinstance(chosen, tx.ExactTraceEstimator)
        with pytest.raises(ValueError, match=f"needs k={cost}"):
            tx.trace(op, tx.ExactTraceEstimator(), k=cost - 1)


@pytest.mark.parametrize(
    ("wrap", "cost"),
    [
        (lambda op: op, 6),
        (lambda op: lx.TaggedLinearOperator(op, lx.symmetric_tag), 6),
        (lambda op: 2 * op, 6),
        (lambda op: op + lx.DiagonalLinearOperator(jnp.arange(6.0)), 6),
    ],
    ids=["function", "tagged", "multiple", "sum"],
)
@pytest.mark.parametrize("block_size", [1, 4, None])
def test_number_of_products_made(wrap, cost, block_size):
    """Counted as they are made, in the running program."""
    made = []

    def count(v):
        jax.debug.callback(lambda _: made.append(1), v[0])
        return 3 * v

    op = wrap(lx.FunctionLinearOperator(count, jax.ShapeDtypeStruct((6,), jnp.float64)))
    solution = tx.trace(op, k=6, execution=tx.Local(block_size))
    jax.block_until_ready(solution.value)
    jax.effects_barrier()
    assert len(made) == cost == solution.stats["num_matvecs"]
