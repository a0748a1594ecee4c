"""Each kind of operator on four devices: values and derivatives of all its arrays are
those of one device, and JAX checks the sharding of those that it can."""

import functools as ft

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import traceax as tx

from ..programs.common import close, positive_definite, PSD, some_key


N = 24
SHARDED = tx.Sharded(tx.probe_mesh(jax.devices()[:4]))
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float64)
A, B = np.random.default_rng(1).standard_normal((2, N, N))
D = 1 + np.random.default_rng(3).uniform(size=N)


def matrix(x):
    return lx.MatrixLinearOperator(x)


def diagonal(x):
    # A product with a diagonal has no noise for random signs: it is exact.
    return lx.DiagonalLinearOperator(x)


def total(x):
    return lx.MatrixLinearOperator(x[0]) + lx.DiagonalLinearOperator(x[1])


def product(x):
    return lx.MatrixLinearOperator(x[0]) @ lx.MatrixLinearOperator(x[1])


def scaled(x):
    return 0.5 * lx.MatrixLinearOperator(x[0]) / x[1]


def tridiagonal(x):
    return lx.TridiagonalLinearOperator(x, 2 * x[:-1], x[1:] ** 2)


def jacobian(x):
    return lx.JacobianLinearOperator(lambda y, args: jnp.tanh(args @ y), x[1], x[0])


def energy(y, x):
    inner = jnp.tanh(x[0] @ jnp.concatenate([y["a"], y["b"].reshape(-1)]))
    return jnp.sum(x[1] * inner**2) + jnp.sum(y["a"] ** 4)


def hessian(x):
    point = {"a": x[1][:4], "b": x[1][4:].reshape(4, 5)}
    return tx.hessian(lambda y: energy(y, x), point)


def closure(x):
    fn = lambda v: x[1] * (x[0] @ jnp.sin(x[1]) * v) + x[0].T @ v  # noqa: E731
    return lx.FunctionLinearOperator(fn, VECTOR)


def composed(x):
    operator = jacobian(x)
    return operator.T @ operator


def solving(x):
    inner = lx.MatrixLinearOperator(x[0] @ x[0].T + 30 * jnp.eye(N), PSD)

    def fn(v):
        solver = lx.CG(rtol=1e-14, atol=1e-14)
        return x[1] * lx.linear_solve(inner, v, solver).value

    return lx.FunctionLinearOperator(fn, VECTOR)


def solving_many(x):
    """Under `vmap`, which hides the solve in another primitive."""
    inner = lx.MatrixLinearOperator(x[0] @ x[0].T + 30 * jnp.eye(N), PSD)

    def solve(v):
        return lx.linear_solve(inner, v, lx.CG(rtol=1e-14, atol=1e-14)).value

    def fn(v):
        return x[1] * jnp.sum(jax.vmap(solve)(jnp.stack([v, 2 * v])), axis=0)

    return lx.FunctionLinearOperator(fn, VECTOR)


def printing(x):
    def fn(v):
        jax.debug.callback(lambda _: None, v[0])
        return x[1] * (x[0] @ v)

    return lx.FunctionLinearOperator(fn, VECTOR)


# Row and column of each entry that is stored.
PATTERN = np.argwhere(np.abs(positive_definite(N)) > 0.02)


def bcoo(x, tags=()):
    entries = sparse.BCOO((x, PATTERN), shape=(N, N))
    return lx.FunctionLinearOperator(lambda v: entries @ v, VECTOR, tags)


def looping(x):
    def fn(v):
        return jax.lax.fori_loop(0, 3, lambda _, y: x[1] * (x[0] @ y) / N, v)

    return lx.FunctionLinearOperator(fn, VECTOR)


def ggn(x):
    model = lambda y: jnp.tanh(x[0] @ y) * x[1]  # noqa: E731
    return tx.ggn(model, lambda out: jnp.sum(jnp.cosh(out)), x[1] / 2)


def hutchinson(operator, execution):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.trace(operator, tx.HutchinsonEstimator(), k=6, **settings).value


def slq(operator, execution):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.logdet(operator, k=6, num_steps=6, **settings).value


@ft.cache
def jitted(kind, *of):
    return jax.jit(kind(*of), static_argnums=1)


def agree(kind, of, x, rtol=1e-13, sharded=SHARDED):
    """`kind(*of)(x, execution)` on four devices and on one; nothing that it gives is
    zero."""
    fn = jitted(kind, *of)
    expected, found = (fn(x, execution) for execution in (tx.Local(), sharded))
    sizes = [np.max(np.abs(each)) for each in jax.tree.leaves(expected)]
    assert np.all(np.isfinite(sizes)), sizes
    assert min(sizes) > 1e-6, f"{sizes}: one of them tests nothing"
    close("", found, expected, rtol)


def value_and_slope(make, call=hutchinson):
    return lambda x, e: jax.value_and_grad(lambda x: call(make(x), e))(x)


def all_values_and_slopes(*makes):
    """In one program, by the names of the operators."""

    return lambda xs, execution: {
        make.__name__: value_and_slope(make)(x, execution)
        for make, x in zip(makes, xs, strict=True)
    }


def second(make, call=hutchinson):
    """Value and gradient, and the derivative of both in one direction."""

    def fn(x, execution):
        both = jax.value_and_grad(lambda x: call(make(x), execution))
        return jax.jvp(both, (x,), (jax.tree.map(jnp.cos, x),))

    return fn


CHECKED = {matrix: A, diagonal: D, total: (A, D), product: (A, B), jacobian: (A / N, D)}
OTHERS = {
    composed: (A / N, D),
    scaled: (A, np.asarray(3.0)),
    tridiagonal: D,
    closure: (A, D),
    looping: (A, D),
    ggn: (A / N, D),
    bcoo: np.random.default_rng(4).standard_normal(len(PATTERN)),
    printing: (A, D),
}
NONLINEAR = {jacobian: (A / N, D), hessian: (A / N, D)}
SOLVING = {solving: (A, D), solving_many: (A, D)}


def by_name(makes):
    return [pytest.param(make, x, id=make.__name__) for make, x in makes.items()]


@pytest.mark.slow
@pytest.mark.parametrize("makes", [CHECKED, OTHERS], ids=["checked", "others"])
def test_value_and_gradient(makes):
    agree(all_values_and_slopes, makes, list(makes.values()))


@pytest.mark.slow
def test_what_jax_can_check(monkeypatch):
    """The same code where JAX checks that what differs between devices is declared so."""
    unchecked, found = jax.shard_map, []

    def checked(*args, check_vma, **kwargs):
        found.append(check_vma)
        return unchecked(*args, check_vma=True, **kwargs)

    monkeypatch.setattr(jax, "shard_map", checked)
    # On a mesh of its own, since what was traced without the check is not traced again.
    mesh = tx.probe_mesh(jax.devices()[:4], axis="checked")
    sharded = tx.Sharded(mesh, "checked")
    agree(all_values_and_slopes, CHECKED, list(CHECKED.values()), sharded=sharded)
    assert len(found) >= len(CHECKED)
    assert not any(found)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "x"), by_name(NONLINEAR))
def test_second_derivative(make, x):
    agree(second, [make], x)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "x"), by_name(SOLVING))
def test_solve_inside(make, x):
    agree(second, [make], x, 1e-12)


def xtrace(operator, execution):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.trace(operator, tx.XTraceEstimator(), k=6, **settings).value


@pytest.mark.slow
def test_solve_inside_a_sketch():
    agree(second, [solving, xtrace], (A, D), 1e-11)


def convex(x):
    """The Hessian, of PyTrees, of a convex function."""
    point = {"a": x[1][:4], "b": x[1][4:].reshape(4, 5)}

    def fn(y):
        flat = jnp.concatenate([y["a"], y["b"].reshape(-1)])
        return jnp.sum(jnp.cosh(x[0] @ flat)) + jnp.sum(flat**2)

    return lx.TaggedLinearOperator(tx.hessian(fn, point), PSD)


def definite_bcoo(x):
    return bcoo(x, PSD)


def set_mesh(kind):
    return jax.set_mesh(jax.make_mesh((4,), ("probes",), axis_types=(kind,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "x"),
    [
        pytest.param((matrix,), A, id="matrix"),
        pytest.param((closure, xtrace), (A, D), id="closure"),
        pytest.param((convex, slq), (A / N, D), id="convex"),
    ],
)
def test_set_mesh(of, x):
    """Where `jax.set_mesh` is in force, also as operators are made."""
    with set_mesh(AxisType.Auto):
        agree(value_and_slope, of, x)


@pytest.mark.slow
def test_explicit_axes_are_nothing_to_local_execution():
    of, x = (matrix, xtrace), A
    expected = jitted(value_and_slope, *of)(x, tx.Local())
    with set_mesh(AxisType.Explicit):
        close("", jitted(value_and_slope, *of)(x, tx.Local()), expected, 1e-13)


ON_DIAGONAL = PATTERN[:, 0] == PATTERN[:, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "x"),
    [(convex, (A / N, D)), (definite_bcoo, np.where(ON_DIAGONAL, 2.0 * N, 0.5))],
)
def test_log_determinant(make, x):
    agree(value_and_slope, [make, slq], x)


def masked(x):
    fn = lambda v: jnp.where(x > 0, x, 0) @ v + 3 * v  # noqa: E731
    return lx.FunctionLinearOperator(fn, VECTOR, PSD)


def by_rows(x):
    """A loop over rows that starts from a vector of its own."""

    def fn(v):
        add = lambda total, row: (total + row * (row @ v), None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros(N), x)[0] + 3 * v

    return lx.FunctionLinearOperator(fn, VECTOR, PSD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "call"), [(masked, hutchinson), (masked, slq), (by_rows, xtrace)]
)
def test_arrays_on_the_mesh(make, call):
    """Whose types name it, in functions that are compiled apart. Their derivative is
    still one sum over the devices, outside of the loop over blocks."""
    mesh, x = SHARDED.mesh, np.abs(A) / N + D * np.eye(N)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("probes")))
    both = jax.jit(
        lambda x, e: jax.value_and_grad(lambda x: call(make(x), e))(x), static_argnums=1
    )
    compiled = both.lower(placed, tx.Sharded(mesh, block_size=1)).compile()
    text = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    (of_matrix,) = [line for line in text if f"f64[{N},{N}]" in line]
    assert "while/body" not in of_matrix
    close("", compiled(placed), both(x, tx.Local()), 1e-12)


@pytest.mark.slow
def test_identity():
    """Of no arrays: a value and no derivative."""
    operator = lx.IdentityLinearOperator(VECTOR)
    assert hutchinson(operator, tx.Local()) == hutchinson(operator, SHARDED) == N


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [tx.HutchinsonEstimator(), tx.XTraceEstimator()])
def test_callback_in_an_adaptive_run(estimator):
    """Reverse mode of a loop with an effect. The product may be called more than once a
    probe, but is called."""
    told = []

    def make(x):
        def fn(v):
            jax.debug.callback(lambda _: told.append(1), v[0])
            return x[1] * (x[0] @ v)

        return lx.FunctionLinearOperator(fn, VECTOR)

    def call(operator, execution):
        budget = tx.Adaptive(rtol=0.01, max_k=12, round_size=4, min_samples=4)
        settings = {"key": some_key(), "execution": execution, "throw": False}
        return tx.trace(operator, estimator, k=budget, **settings).value

    agree(value_and_slope, [make, call], (A, D), 1e-11)
    jax.effects_barrier()
    assert len(told) >= 24, len(told)
