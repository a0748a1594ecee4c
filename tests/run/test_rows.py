"""Vectors split over rows, on meshes of (2, 2) and (2, 4) devices."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tx
from traceax._core.flat import FlatOperator

from ..programs.common import (
    close,
    collectives,
    positive_definite,
    PSD,
    some_key,
    value_and_grad,
)


N = 4096
DIAGONAL = 1 + 10 * np.random.default_rng(1).uniform(size=N) ** 8
NAMES = ("probes", "rows")


def make_mesh(size, kind=AxisType.Auto):
    devices = jax.devices()[:size]
    return jax.make_mesh((2, size // 2), NAMES, devices=devices, axis_types=(kind,) * 2)


def place(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def stencil(d):
    def fn(v):
        return d * v - 0.1 * (jnp.roll(v, 1) + jnp.roll(v, -1))

    structure = jax.ShapeDtypeStruct(d.shape, d.dtype)
    return lx.FunctionLinearOperator(fn, structure, PSD)


def dense(x):
    return lx.MatrixLinearOperator(x, PSD)


DATA = {stencil: DIAGONAL, dense: np.asarray(positive_definite(128))}


def trace(estimator):
    def call(operator, execution):
        settings = {"key": some_key(), "execution": execution, "throw": False}
        return tx.trace(operator, estimator, k=12, **settings)

    return call


def logdet(operator, execution):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.logdet(operator, k=6, num_steps=6, **settings)


CALLS = {
    "Hutchinson": trace(tx.HutchinsonEstimator()),
    "SLQ": logdet,
    "XTrace": trace(tx.XTraceEstimator()),
    "Hutch++": trace(tx.HutchPlusPlusEstimator()),
    "XNysTrace": trace(tx.XNysTraceEstimator()),
}


def sent(call, *x):
    return collectives(jax.jit(call).lower(*x).compile())


def run(name, make, where, x):
    """Value, error bar and gradient, and what is sent for them."""

    def value(x):
        solution = CALLS[name](make(x), where)
        return solution.value, solution.std_err

    compiled = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(x).compile()
    return compiled(x), collectives(compiled)


@ft.cache
def on_one_device(name, make):
    return run(name, make, tx.Local(), DATA[make])[0]


def agree(name, make, placed, execution, rtol=1e-10):
    """Value, error bar and gradient are those of one device. What is sent for them."""
    (value, std_err), slope = on_one_device(name, make)
    assert np.isfinite(value), value
    ((found, bar), split), told = run(name, make, execution, placed)
    assert np.isfinite(bar), bar
    # Orthonormal bases of the same space differ, and with them what is not the answer.
    close("value", found, value, rtol)
    close("std_err", bar, std_err, 1e3 * rtol)
    close("gradient", split, slope, rtol)
    return told


def as_long_as_a_vector(told):
    assert told
    return [x for x in told if max((1, *x[1])) >= N]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("Hutchinson", 4), ("SLQ", 8)])
def test_streaming(name, size):
    """And nothing as long as a vector is sent."""
    mesh = make_mesh(size)
    placed, rows = place(mesh, DIAGONAL, "rows"), tx.Sharded(mesh, rows="rows")
    told = agree(name, stencil, placed, rows)
    assert not as_long_as_a_vector(told), told


@pytest.mark.slow(but="Hutch++")
@pytest.mark.parametrize("name", ["XTrace", "Hutch++", "XNysTrace"])
def test_sketches(name):
    """Blocks of rows are gathered; for a value nothing as long as a vector is sent."""
    mesh = make_mesh(8)
    placed, rows = place(mesh, DIAGONAL, "rows"), tx.Sharded(mesh, rows="rows")
    agree(name, stencil, placed, rows)
    told = sent(lambda d: CALLS[name](stencil(d), rows).value, placed)
    assert not as_long_as_a_vector(told), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("Hutchinson", 8), ("SLQ", 4), ("XTrace", 4), ("Hutch++", 4), ("XNysTrace", 4)],
)
def test_matrix(name, size):
    mesh, matrix = make_mesh(size), DATA[dense]
    placed, rows = place(mesh, matrix, "rows", None), tx.Sharded(mesh, rows="rows")
    agree(name, dense, placed, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hutchinson", "XTrace"])
def test_a_sharded_array_is_not_gathered(name):
    """Without `rows`, where vectors are whole."""
    matrix, mesh = DATA[dense], make_mesh(4)
    execution, placed = tx.Sharded(mesh), place(mesh, matrix, "rows", None)
    agree(name, dense, placed, execution)
    found = sent(lambda x: CALLS[name](dense(x), execution).value, placed)
    gathered = [x for x in found if math.prod(x[1]) >= matrix.size]
    assert not gathered, gathered


@pytest.mark.slow
@pytest.mark.parametrize("name", ["XTrace", "Hutch++"])
def test_singular(name):
    """Rank 3, so that most columns of the products are dependent."""
    n, mesh, call = 512, make_mesh(8), CALLS[name]
    x = np.zeros(n)
    x[[5, 200, 400]] = 3.0, 2.0, 1.0

    def make(x):
        structure = jax.ShapeDtypeStruct((n,), x.dtype)
        return lx.FunctionLinearOperator(lambda v: x * v, structure)

    rows = tx.Sharded(mesh, rows="rows")
    expected = call(make(jnp.asarray(x)), tx.Local())
    run = value_and_grad(lambda x: call(make(x), rows))
    found, slope = run(place(mesh, x, "rows"))
    close("value", found.value, expected.value, 1e-10)
    assert np.isfinite(found.std_err), found.std_err
    assert np.all(np.isfinite(slope)), slope


def test_rows_alone():
    """On one device for the probes, with eight for the rows, there are derivatives; and
    the six or seven arrays of a sketch take less than one that is whole."""
    mesh = jax.make_mesh((1, 8), NAMES, axis_types=(AxisType.Auto,) * 2)
    rows = tx.Sharded(mesh, rows="rows")
    placed = place(mesh, DIAGONAL, "rows")
    told = agree("Hutchinson", stencil, placed, rows)
    assert not as_long_as_a_vector(told), told
    n, m = 2**20, 6
    large = jax.ShapeDtypeStruct((n,), float, sharding=placed.sharding)
    run = jax.jit(lambda d: CALLS["XTrace"](stencil(d), rows).value)
    memory = run.lower(large).compile().memory_analysis().temp_size_in_bytes
    assert memory < n * m * 8, memory


def test_blocks():
    """A device that holds a quarter of the rows takes four times as many probes, and a
    large matrix has blocks of up to an eighth of its size."""

    float32 = jnp.dtype(jnp.float32)

    def operator(n, *arrays):
        product = jax.tree_util.Partial(jnp.dot, *arrays)
        return FlatOperator(product, size=n, dtype=float32, precision=float32)

    mesh = make_mesh(8)
    cheap = operator(2**18)
    assert tx.Sharded(mesh).block(cheap) == 2 * 4
    assert tx.Sharded(mesh, rows="rows").block(cheap) == 2 * 16
    assert tx.Sharded(mesh, rows="rows", block_size=3).block(cheap) == 2 * 3
    tall = operator(2**18, jax.ShapeDtypeStruct((2**18, 2**9), jnp.float32))
    assert tx.Local().block(tall) == 2**6
    assert tx.Sharded(mesh, rows="rows").block(tall) == 2 * 2**6
    assert tx.Local().block(tall, width=2**6) == 4


def test_explicit_axes():
    """A mesh as `jax.make_mesh` makes it is taken, arrays placed on one are not."""
    explicit = make_mesh(4, AxisType.Explicit)
    execution = tx.Sharded(explicit, rows="rows")
    placed = place(make_mesh(4), DIAGONAL, "rows")
    agree("Hutchinson", stencil, placed, execution)
    with pytest.raises(ValueError, match="needs meshes with Auto axes"):
        CALLS["Hutchinson"](stencil(place(explicit, DIAGONAL, "rows")), execution)


@pytest.mark.slow(but="Hutch++")
@pytest.mark.parametrize(
    "estimator",
    [tx.HutchPlusPlusEstimator(), tx.NystromPlusPlusEstimator()],
    ids=["Hutch++", "Nystrom++"],
)
def test_gradient_where_the_basis_has_zero_columns(estimator):
    """That of `tr(t I)` is n for every draw: probes are scaled to the length that is
    left."""
    n, rows = 96, tx.Sharded(make_mesh(8), rows="rows")

    def value(t):
        structure = jax.ShapeDtypeStruct((n,), jnp.float64)
        operator = lx.FunctionLinearOperator(lambda v: t * v, structure, PSD)
        call = {"k": 60, "key": some_key(), "execution": rows, "throw": False}
        return tx.trace(operator, estimator, **call).value

    assert np.allclose(jax.jit(jax.grad(value))(0.0), n, rtol=1e-10)
