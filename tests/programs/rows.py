"""Vectors split over rows, on a mesh of (2, D / 2) devices."""

import math
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from common import (
    close,
    collectives,
    positive_definite,
    PSD,
    say,
    some_key,
    value_and_grad,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tx


D = len(jax.devices())
SHAPE, NAMES = (2, D // 2), ("probes", "rows")
MESH = jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Auto,) * 2)
ROWS = tx.Sharded(MESH, rows="rows")


def place(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def stencil(d):
    def fn(v):
        return d * v - 0.1 * (jnp.roll(v, 1) + jnp.roll(v, -1))

    structure = jax.ShapeDtypeStruct(d.shape, d.dtype)
    return lx.FunctionLinearOperator(fn, structure, PSD)


def dense(x):
    return lx.MatrixLinearOperator(x, PSD)


def trace(estimator):
    def call(operator, execution):
        return tx.trace(
            operator, estimator, k=12, key=some_key(), execution=execution, throw=False
        )

    return call


def logdet(operator, execution):
    return tx.logdet(
        operator, k=6, num_steps=6, key=some_key(), execution=execution, throw=False
    )


CALLS = {
    "Hutchinson": trace(tx.HutchinsonEstimator()),
    "SLQ": logdet,
    "XTrace": trace(tx.XTraceEstimator()),
    "Hutch++": trace(tx.HutchPlusPlusEstimator()),
    "XNysTrace": trace(tx.XNysTraceEstimator()),
}


def agree(name, call, make, x, spec, execution=ROWS, rtol=1e-10):
    expected, slope = value_and_grad(lambda x: call(make(x), tx.Local()))(x)
    assert jnp.isfinite(expected.value), f"{name}: {expected.value}"
    found, split = value_and_grad(lambda x: call(make(x), execution))(place(x, *spec))
    assert jnp.isfinite(found.std_err), f"{name}: {found.std_err}"
    # Orthonormal bases of the same space differ, and with them what is not the answer.
    close(f"{name} value", found.value, expected.value, rtol)
    close(f"{name} std_err", found.std_err, expected.std_err, 1e3 * rtol)
    close(f"{name} gradient", split, slope, rtol)
    say(name)


def answers():
    diagonal = 1 + 10 * jr.uniform(jr.key(1), (4096,)) ** 8
    matrix = positive_definite(128)
    for name, call in CALLS.items():
        agree(f"{name} of a matrix", call, dense, matrix, ("rows", None))
        agree(f"{name} of a stencil", call, stencil, diagonal, ("rows",))


def traffic():
    """Nothing as long as a vector is sent: sketches gather blocks of their rows."""
    diagonal = place(1 + 10 * jr.uniform(jr.key(1), (4096,)) ** 8, "rows")
    long = {}
    for name, call in CALLS.items():
        program = jax.jit(lambda d, c=call: c(stencil(d), ROWS).value)
        found = collectives(program.lower(diagonal).compile())
        long[name] = [x for x in found if max((1, *x[1])) >= 4096]
        say(f"{name}: {sorted(set(found))}")
    for name, call in {x: CALLS[x] for x in ("Hutchinson", "SLQ")}.items():
        program = jax.jit(jax.grad(lambda d, c=call: c(stencil(d), ROWS).value))
        found = collectives(program.lower(diagonal).compile())
        long[f"gradient of {name}"] = [x for x in found if max((1, *x[1])) >= 4096]
        say(f"gradient of {name}: {sorted(set(found))}")
    assert not any(long.values()), {x: y for x, y in long.items() if y}


def sharded_operator():
    """Without `rows` the operator's array is still not gathered."""
    n = 512
    matrix = place(positive_definite(n), "rows", None)
    execution = tx.Sharded(MESH)
    for name in ("Hutchinson", "SLQ", "XTrace"):
        call = CALLS[name]
        agree(
            f"{name}, whole vectors",
            call,
            dense,
            positive_definite(n),
            ("rows", None),
            execution,
        )
        program = jax.jit(lambda x, c=call: c(dense(x), execution).value)
        found = collectives(program.lower(matrix).compile())
        gathered = [x for x in found if math.prod(x[1]) >= n * n]
        assert not gathered, f"{name}: {gathered}"


def singular():
    """Rank 3, so that most columns of the products are dependent."""
    n = 512
    x = jnp.zeros(n).at[jnp.array([5, 200, 400])].set(jnp.array([3.0, 2.0, 1.0]))

    def make(x):
        structure = jax.ShapeDtypeStruct((n,), x.dtype)
        return lx.FunctionLinearOperator(lambda v: x * v, structure)

    for name in ("XTrace", "Hutch++"):
        call = CALLS[name]
        expected = call(make(x), tx.Local())
        found, slope = value_and_grad(lambda x, c=call: c(make(x), ROWS))(
            place(x, "rows")
        )
        close(f"{name} of rank 3", found.value, expected.value, 1e-10)
        assert jnp.isfinite(found.std_err), f"{name}: {found.std_err}"
        assert jnp.all(jnp.isfinite(slope)), f"{name}: {slope}"
        say(f"{name} of rank 3: {found.value} +- {found.std_err}")


def explicit():
    """A mesh as `jax.make_mesh` makes it is taken, arrays placed on one are not."""
    mesh = jax.make_mesh(SHAPE, NAMES)
    print(mesh.axis_types)
    execution = tx.Sharded(mesh, rows="rows")
    diagonal = 1 + jr.uniform(jr.key(1), (4096,))
    for name in ("Hutchinson", "XTrace"):
        agree(f"{name}, explicit", CALLS[name], stencil, diagonal, ("rows",), execution)
    if AxisType.Explicit in mesh.axis_types:
        placed = jax.device_put(diagonal, NamedSharding(mesh, P("rows")))
        try:
            CALLS["Hutchinson"](stencil(placed), execution)
        except ValueError as error:
            say(f"refused: {error}")
        else:
            raise AssertionError("an array on an Explicit mesh was taken")


if __name__ == "__main__":
    tasks = answers, traffic, sharded_operator, singular, explicit
    {each.__name__: each for each in tasks}[sys.argv[1]]()
