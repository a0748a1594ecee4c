"""Each kind of operator on four devices: values and derivatives of all its arrays are
those of one device, and JAX checks the sharding of those that it can."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from common import close, positive_definite, PSD, say, some_key
from jax.experimental import sparse

import traceax as tx
from traceax._flat import flatten
from traceax._sharded import _equations, _is_plain


N = 24
MESH = tx.probe_mesh()
SHARDED, LOCAL = tx.Sharded(MESH), tx.Local()
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float64)
A, B = jr.normal(jr.key(1), (2, N, N))
D = 1 + jr.uniform(jr.key(3), (N,))


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


PATTERN = sparse.BCOO.fromdense(jnp.where(jnp.abs(positive_definite(N)) > 0.02, 1.0, 0))


def bcoo(x, tags=()):
    entries = sparse.BCOO((x, PATTERN.indices), shape=(N, N))
    return lx.FunctionLinearOperator(lambda v: entries @ v, VECTOR, tags)


def looping(x):
    def fn(v):
        return jax.lax.fori_loop(0, 3, lambda _, y: x[1] * (x[0] @ y) / N, v)

    return lx.FunctionLinearOperator(fn, VECTOR)


def ggn(x):
    model = lambda y: jnp.tanh(x[0] @ y) * x[1]  # noqa: E731
    return tx.ggn(model, lambda out: jnp.sum(jnp.cosh(out)), x[1] / 2)


def value_of(make, execution, call):
    return lambda x: call(make(x), execution)


def hutchinson(operator, execution):
    return tx.trace(
        operator,
        tx.HutchinsonEstimator(),
        k=6,
        key=some_key(),
        execution=execution,
        throw=False,
    ).value


def slq(operator, execution):
    solution = tx.logdet(
        operator, k=6, num_steps=6, key=some_key(), execution=execution, throw=False
    )
    return solution.value


def check(make, x, *, call=hutchinson, rtol=1e-13):
    name = f"{call.__name__} of {make.__name__}"
    answers = [
        eqx.filter_jit(jax.value_and_grad(value_of(make, execution, call)))(x)
        for execution in (LOCAL, SHARDED)
    ]
    assert jnp.isfinite(answers[0][0]), f"{name}: {answers[0][0]}"
    slopes = [jnp.max(jnp.abs(y)) for y in jax.tree.leaves(answers[0][1])]
    assert min(slopes) > 1e-6, f"{name}: a gradient of {min(slopes)} tests nothing"
    close(name, answers[1], answers[0], rtol)
    say(name)


def check_second(make, x):
    """The derivative of the gradient in one direction."""
    name = f"second derivative of {make.__name__}"
    direction = jax.tree.map(jnp.cos, x)

    def slope(execution):
        grad = jax.grad(value_of(make, execution, hutchinson))
        return eqx.filter_jit(lambda x: jax.jvp(grad, (x,), (direction,)))(x)

    expected = slope(LOCAL)
    assert max(jnp.max(jnp.abs(y)) for y in jax.tree.leaves(expected[1])) > 1e-6, name
    close(name, slope(SHARDED), expected, 1e-13)
    say(name)


def check_identity():
    """Of no arrays: a value and no derivative."""
    operator = lx.IdentityLinearOperator(VECTOR)
    for execution in (LOCAL, SHARDED):
        assert hutchinson(operator, execution) == N
    say("identity")


def dense_semidefinite(x):
    return lx.MatrixLinearOperator(x, PSD)


def convex(x):
    """The Hessian, of PyTrees, of a convex function."""
    point = {"a": x[1][:4], "b": x[1][4:].reshape(4, 5)}

    def fn(y):
        flat = jnp.concatenate([y["a"], y["b"].reshape(-1)])
        return jnp.sum(jnp.cosh(x[0] @ flat)) + jnp.sum(flat**2)

    return lx.TaggedLinearOperator(tx.hessian(fn, point), PSD)


def definite_bcoo(x):
    return bcoo(x, PSD)


TYPED = {
    matrix: A,
    diagonal: D,
    total: (A, D),
    product: (A, B),
    jacobian: (A / N, D),
}
OTHERS = {
    composed: (A / N, D),
    scaled: (A, jnp.asarray(3.0)),
    tridiagonal: D,
    hessian: (A / N, D),
    closure: (A, D),
    looping: (A, D),
    ggn: (A / N, D),
}


def typed():
    def checked(make, x):
        return all(_is_plain(each) for each in _equations(flatten(make(x))))

    found = {make.__name__: checked(make, x) for make, x in TYPED.items()}
    assert all(found.values()), found
    print({make.__name__: checked(make, x) for make, x in OTHERS.items()})


def answers():
    check_identity()
    for make, x in (TYPED | OTHERS).items():
        check(make, x)
    check_second(jacobian, (A / N, D))
    check_second(hessian, (A / N, D))


def solve_inside():
    check(solving, (A, D), rtol=1e-12)


def logdets():
    check(dense_semidefinite, positive_definite(N), call=slq)
    check(convex, (A / N, D), call=slq)


def sparse_inside():
    check(bcoo, jr.normal(jr.key(4), (PATTERN.nse,)))
    on_diagonal = PATTERN.indices[:, 0] == PATTERN.indices[:, 1]
    check(definite_bcoo, jnp.where(on_diagonal, 2.0 * N, 0.5), call=slq)


if __name__ == "__main__":
    tasks = typed, answers, solve_inside, sparse_inside, logdets
    {each.__name__: each for each in tasks}[sys.argv[1]]()
