"""What is no linear operator is refused where tracing shows it, and nothing else is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.sparse import BCOO
from jax.scipy.linalg import cho_factor, cho_solve
from jax.sharding import NamedSharding, PartitionSpec

import traceax as tx
from traceax.internal import flatten

from ..helpers import hermitian, matrix_free, PSD


N = 8
M = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)))
P = jnp.asarray(hermitian(1, np.linspace(1, 2, N)))
SPARSE = BCOO.fromdense(M)
X, B, ZEROS = jnp.linspace(-1, 1, N), jnp.ones(N), jnp.zeros(N)
INDEX, MASK = jnp.array([3, 1, 2, 0, 7, 6, 5, 4]), jnp.arange(N) % 2 == 0
REAL, COMPLEX = (jax.ShapeDtypeStruct((N,), x) for x in (np.float64, np.complex128))


def gradient(x):
    return M.T @ jnp.tanh(M @ x)


def residual(x):
    return P @ x + B


def by_custom_vjp():
    product = jax.custom_vjp(lambda v: M @ v)
    product.defvjp(lambda v: (M @ v, None), lambda _, t: (M.T @ t,))
    return product


def by_custom_jvp():
    product = jax.custom_jvp(lambda v: M @ v)
    product.defjvp(lambda primals, tangents: (product(primals[0]), M @ tangents[0]))
    return product


def by_custom_vmap():
    product = jax.custom_batching.custom_vmap(lambda v: M @ v)
    product.def_vmap(lambda size, batched, v: (v @ M.T, True))
    return product


def on_host(v):
    product = lambda v: np.asarray(M) @ np.asarray(v)  # noqa: E731
    return jax.pure_callback(product, REAL, v, vmap_method="sequential")


def scaled(size):
    def product(v):
        unit = size(v)
        return unit * (M @ (v / unit))

    return product


def conjugate_gradients(v):
    x, r, p = jnp.zeros(N), v, v
    for _ in range(4):
        step = (r @ r) / (p @ (P @ p))
        x, rest = x + step * p, r - step * (P @ p)
        p = rest + (rest @ rest) / (r @ r) * p
        r = rest
    return x


def lanczos(v):
    """Two steps, for the inverse."""
    first = v / jnp.linalg.norm(v)
    image = P @ first
    alpha = first @ image
    rest = image - alpha * first
    beta = jnp.linalg.norm(rest)
    second = rest / beta
    small = jnp.array([[alpha, beta], [beta, second @ P @ second]])
    left, right = jnp.linalg.inv(small)[0]
    return jnp.linalg.norm(v) * (left * first + right * second)


def solved(solver):
    operator = lx.MatrixLinearOperator(P, PSD)
    return lambda v: lx.linear_solve(operator, v, solver).value


def until_small(v):
    start, small = (v, jnp.zeros(N)), lambda s: jnp.linalg.norm(s[0]) > 1e-3
    return jax.lax.while_loop(small, lambda s: (s[0] / 2, s[1] + s[0]), start)[1]


LINEAR = {
    "sum": lambda v: sum(matrix @ v for matrix in (M, P)),
    "zeros": lambda v: jnp.zeros(N) + M @ v + 0 * B,
    "scan": lambda v: jax.lax.scan(lambda c, m: (c + m * v, None), 0 * B, M)[0],
    "scan and term": lambda v: jax.lax.scan(lambda c, m: (c + m * v, None), B, M)[0] - B,
    "fori_loop": lambda v: jax.lax.fori_loop(0, 3, lambda i, c: M @ c, v),
    "while_loop": until_small,
    "cond": lambda v: jax.lax.cond(B[0] > 0, lambda v: M @ v, lambda v: v, v),
    "map": lambda v: jax.lax.map(lambda row: row @ v, M, batch_size=3),
    "vmap": lambda v: jax.vmap(lambda row: row @ v)(M),
    "associative_scan": lambda v: jax.lax.associative_scan(jnp.add, v),
    "callback": on_host,
    "callback and shift": lambda v: on_host(v) + 0.1 * v,
    "callback and term": lambda v: on_host(v) - B,
    "io_callback": lambda v: io_callback(lambda v: 2 * v, REAL, v),
    "custom_vjp": by_custom_vjp(),
    "custom_jvp": by_custom_jvp(),
    "custom_vmap": by_custom_vmap(),
    "sequential_vmap": jax.custom_batching.sequential_vmap(lambda v: M @ v),
    "two rectifiers": lambda v: jax.nn.relu(v) - jax.nn.relu(-v),
    "checkpoint": jax.checkpoint(lambda v: M @ v),
    "jit": jax.jit(lambda v: M @ v),
    "fft": lambda v: jnp.fft.irfft(jnp.fft.rfft(v) * jnp.arange(5), N),
    "convolve": lambda v: jnp.convolve(v, B, mode="same"),
    "gather": lambda v: v[INDEX] + v[jnp.argsort(B)],
    "scatter": lambda v: jnp.zeros(N).at[INDEX].set(v).at[0].set(0.0),
    "scatter into an array": lambda v: ZEROS.at[INDEX].set(v),
    "scatter-add": lambda v: jax.ops.segment_sum(v[INDEX], INDEX, num_segments=N),
    "boundary values": lambda v: v.at[jnp.array([0, 7])].set(X[:2]),
    "where": lambda v: jnp.where(MASK, v, 0) + jnp.where(MASK, v, ZEROS),
    "where of itself": lambda v: jnp.where(v == 0, 0, v),
    "finite": lambda v: jnp.nan_to_num(jnp.clip(M @ v, -1e30, 1e30)),
    "stencil": lambda v: 2 * v - jnp.roll(v, 1) - jnp.pad(v, 1)[2:],
    "slices": lambda v: jax.lax.dynamic_update_slice(v, v[:3], (2,)),
    "bfloat16": lambda v: (M.astype("bfloat16") @ v.astype("bfloat16")).astype(v.dtype),
    "int8": lambda v: jnp.round(v * 100).astype(jnp.int8).astype(v.dtype) / 100,
    "integers": lambda v: jnp.arange(N) * v,
    "random": lambda v: jr.normal(jr.key(0), (N,)) * v,
    "functions of constants": lambda v: (jnp.exp(B) * v + jnp.sin(X)) - jnp.sin(X),
    "projection": lambda v: v - jnp.mean(v) - 2 * X * (X @ v) / (X @ X),
    "sparse": lambda v: SPARSE @ v,
    "barrier": lambda v: jax.lax.optimization_barrier(jax.lax.stop_gradient(M) @ v),
    "jvp": lambda v: jax.jvp(gradient, (X,), (v,))[1],
    "vjp": lambda v: jax.vjp(gradient, X)[1](v)[0],
    "linearize": jax.linearize(gradient, X)[1],
    "differences": lambda v: (gradient(X + v) - gradient(X - v)) / 2,
    "one-sided": lambda v: gradient(X + v) - gradient(X) + 0.1 * v,
    "from a value": (lambda before: lambda v: gradient(X + v) - before)(gradient(X)),
    "less its constant": lambda v: residual(v) - residual(jnp.zeros(N)),
    "less an array": lambda v: residual(v) - B,
    "scaled by a norm": scaled(jnp.linalg.norm),
    "scaled by the largest": scaled(lambda v: jnp.maximum(jnp.max(jnp.abs(v)), 1e-30)),
    "scaled and shifted": scaled(lambda v: 1 + jnp.sqrt(jnp.sum(v**2))),
    "conjugate gradients": conjugate_gradients,
    "lanczos": lanczos,
    "function_of": tx.function_of(lx.MatrixLinearOperator(P, PSD), tx.Exp(), 3).mv,
    "LU": solved(lx.AutoLinearSolver(well_posed=True)),
    "CG": solved(lx.CG(rtol=1e-6, atol=1e-6)),
    "solve": lambda v: jnp.linalg.solve(P, v),
    "cho_solve": lambda v: cho_solve(cho_factor(P), v),
    "custom_linear_solve": lambda v: jax.lax.custom_linear_solve(
        lambda u: P @ u, v, lambda mv, u: jnp.linalg.solve(P, u), symmetric=True
    ),
}
COMPLEX_LINEAR = {
    "hermitian": lambda v: (M + 1j * P) @ v,
    "conjugate": lambda v: v.conj(),
    "parts": lambda v: jax.lax.complex(M @ v.real, M @ v.imag),
    "fft": lambda v: jnp.fft.ifft(jnp.exp(1j * X) * jnp.fft.fft(v)),
}
# Functions and the primitive that shows what they are.
NOT_LINEAR = {
    "affine": (lambda v: M @ v + 1, "add"),
    "affine with an array": (lambda v: M @ v + B, "add"),
    "inside of jit": (jax.jit(lambda v: M @ v - B), "sub"),
    "gradient": (jax.grad(lambda v: jnp.sum((M @ v - B) ** 2) + jnp.sum(v**2)), "sub"),
    "logistic gradient": (lambda v: M.T @ (1 / (1 + jnp.exp(-M @ v)) - B), "exp"),
    "robust gradient": (lambda v: M.T @ jnp.tanh(M @ v - B) + v, "sub"),
    "tanh": (lambda v: M @ jnp.tanh(v), "tanh"),
    "checkpoint": (jax.checkpoint(lambda v: M @ jnp.tanh(v)), "tanh"),
    "unit vector": (lambda v: v / jnp.linalg.norm(v), "mul"),
    "quadratic": (lambda v: v * (M @ v), "mul"),
    "cubic": (jax.grad(lambda v: jnp.sum(v**4)), "integer_pow"),
    "reciprocal": (lambda v: 1 / v, "div"),
}


@pytest.mark.parametrize("name", LINEAR)
def test_nothing_else_is_refused(name):
    flatten(lx.FunctionLinearOperator(LINEAR[name], REAL))


@pytest.mark.parametrize("name", COMPLEX_LINEAR)
def test_no_complex_one_is_refused(name):
    flatten(lx.FunctionLinearOperator(COMPLEX_LINEAR[name], COMPLEX))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_refused(name):
    function, primitive = NOT_LINEAR[name]
    operator = lx.FunctionLinearOperator(function, REAL)
    names = ("traceax.hessian", "lineax.JacobianLinearOperator", f"`{primitive}`")
    for k in (3, N):
        with pytest.raises(ValueError, match="`operator` must be linear") as info:
            tx.trace(operator, tx.HutchinsonEstimator(), k=k, key=jr.key(0))
        assert all(part in str(info.value) for part in names)


def test_one_leaf_is_enough():
    tree = {"a": REAL, "b": REAL}
    functions = [
        lambda t: {"a": t["a"] + B, "b": t["b"]},
        lambda t: {"a": t["b"], "b": jnp.tanh(t["a"])},
    ]
    for function in functions:
        with pytest.raises(ValueError, match="must be linear"):
            flatten(lx.FunctionLinearOperator(function, tree))


def test_parts_of_operators():
    affine = lx.FunctionLinearOperator(residual, REAL)
    matrix = lx.MatrixLinearOperator(M)
    tagged = lx.TaggedLinearOperator(affine, PSD)
    for operator in (tagged, matrix + affine, 2.0 * affine, -affine, matrix @ affine):
        with pytest.raises(ValueError, match="must be linear"):
            flatten(operator)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **settings: tx.diagonal(x, k=3, **settings),
        lambda x, **settings: tx.frobenius_norm(x, k=4, **settings),
        lambda x, **settings: tx.logdet(x, k=3, num_steps=3, **settings),
        lambda x, **settings: tx.logdet(x, k=N, **settings),
        lambda x, **settings: tx.spectral_density(x, k=3, num_steps=3, **settings),
        lambda x, **settings: tx.nystrom_preconditioner(x, 3, **settings),
    ],
)
def test_every_call_refuses(call):
    operator = lx.FunctionLinearOperator(residual, REAL, PSD)
    with pytest.raises(ValueError, match="must be linear"):
        call(operator, key=jr.key(0))


def test_traced_arrays():
    """Under transformations, whose arrays have no values."""

    def value(matrix):
        def product(v):
            return jax.lax.fori_loop(0, 2, lambda i, c: c + matrix @ v, 0 * v)

        flat = flatten(lx.FunctionLinearOperator(product, REAL))
        return jnp.sum(flat.mv(B)) + jnp.sum(flatten(matrix_free(matrix)).mv(B))

    jax.make_jaxpr(jax.grad(value))(M)
    jax.make_jaxpr(jax.vmap(jax.grad(value)))(M[None])
    with pytest.raises(ValueError, match="must be linear"):
        eqx.filter_eval_shape(
            lambda b: flatten(lx.FunctionLinearOperator(lambda v: v + b, REAL)), B
        )


def test_arrays_on_a_mesh():
    place = NamedSharding(tx.probe_mesh(), PartitionSpec(*tx.probe_mesh().axis_names))
    matrix = jax.device_put(M, place)

    def product(v):
        return jax.lax.with_sharding_constraint(matrix @ v, place)

    flatten(lx.FunctionLinearOperator(product, REAL))
    flatten(lx.JacobianLinearOperator(lambda x, _: jnp.tanh(matrix @ x), X))
    with pytest.raises(ValueError, match="must be linear"):
        flatten(lx.FunctionLinearOperator(lambda v: product(v) + B, REAL))


def test_no_product_is_made():
    calls = []

    def product(v):
        calls.append(v)
        return v

    def on_host(v):
        return jax.pure_callback(product, REAL, v, vmap_method="sequential")

    flatten(lx.FunctionLinearOperator(on_host, REAL))
    assert not calls
