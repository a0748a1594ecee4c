"""Vectors split over rows, on meshes of (2, 2) and (2, 4) devices."""

import math

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tx

from .programs.common import (
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


def agree(call, make, x, placed, execution, rtol=1e-10):
    expected, slope = value_and_grad(lambda x: call(make(x), tx.Local()))(x)
    assert np.isfinite(expected.value), expected.value
    found, split = value_and_grad(lambda x: call(make(x), execution))(placed)
    assert np.isfinite(found.std_err), found.std_err
    # Orthonormal bases of the same space differ, and with them what is not the answer.
    close("value", found.value, expected.value, rtol)
    close("std_err", found.std_err, expected.std_err, 1e3 * rtol)
    close("gradient", split, slope, rtol)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Hutchinson", (4, 8)),
        ("SLQ", (4, 8)),
        ("XTrace", (4, 8)),
        ("Hutch++", (8,)),
        ("XNysTrace", (4,)),
    ],
)
def test_same_answer(name, sizes):
    matrix = np.asarray(positive_definite(128))
    for size in sizes:
        mesh = make_mesh(size)
        rows = tx.Sharded(mesh, rows="rows")
        if size == sizes[-1]:
            agree(CALLS[name], dense, matrix, place(mesh, matrix, "rows", None), rows)
        agree(CALLS[name], stencil, DIAGONAL, place(mesh, DIAGONAL, "rows"), rows)


def sent(call, *x):
    return collectives(jax.jit(call).lower(*x).compile())


@pytest.mark.parametrize("name", list(CALLS))
def test_nothing_as_long_as_a_vector_is_sent(name):
    """Sketches gather blocks of their rows."""
    mesh = make_mesh(8)
    rows, diagonal = tx.Sharded(mesh, rows="rows"), place(mesh, DIAGONAL, "rows")

    def value(d):
        return CALLS[name](stencil(d), rows).value

    found = sent(value, diagonal)
    if name in ("Hutchinson", "SLQ"):
        found += sent(jax.grad(value), diagonal)
    assert found
    long = [x for x in found if max((1, *x[1])) >= N]
    assert not long, long


@pytest.mark.parametrize("name", ["Hutchinson", "SLQ", "XTrace"])
def test_a_sharded_array_is_not_gathered(name):
    """Without `rows`, where vectors are whole."""
    n, mesh = 512, make_mesh(4)
    call, execution = CALLS[name], tx.Sharded(mesh)
    matrix = np.asarray(positive_definite(n))
    placed = place(mesh, matrix, "rows", None)
    agree(call, dense, matrix, placed, execution)
    found = sent(lambda x: call(dense(x), execution).value, placed)
    gathered = [x for x in found if math.prod(x[1]) >= n * n]
    assert not gathered, gathered


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


@pytest.mark.parametrize("name", ["Hutchinson", "XTrace"])
def test_explicit_axes(name):
    """A mesh as `jax.make_mesh` makes it is taken, arrays placed on one are not."""
    explicit = make_mesh(4, AxisType.Explicit)
    execution = tx.Sharded(explicit, rows="rows")
    placed = place(make_mesh(4), DIAGONAL, "rows")
    agree(CALLS[name], stencil, DIAGONAL, placed, execution)
    with pytest.raises(ValueError, match="needs meshes with Auto axes"):
        CALLS[name](stencil(place(explicit, DIAGONAL, "rows")), execution)
