"""What four devices tell each other, counted in the compiled programs."""

import math

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..programs.common import collectives, general, positive_definite, PSD, some_key


MESH = tx.probe_mesh(jax.devices()[:4])
SHARDED = tx.Sharded(MESH)


def trace(operator, estimator, k, execution=SHARDED):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.trace(operator, estimator, k=k, **settings)


def hutchinson(operator, k, execution=SHARDED):
    return trace(operator, tx.HutchinsonEstimator(), k, execution)


def slq(operator, k, execution=SHARDED):
    settings = {"key": some_key(), "execution": execution, "throw": False}
    return tx.logdet(operator, k=k, num_steps=5, **settings)


def of(fn, *args):
    return collectives(jax.jit(fn).lower(*args).compile())


@pytest.mark.slow(but="Hutchinson")
@pytest.mark.parametrize(
    ("call", "make", "tags"),
    [
        (hutchinson, positive_definite, PSD),
        (slq, positive_definite, PSD),
        (slq, general, ()),
    ],
    ids=["Hutchinson", "SLQ", "Golub-Kahan"],
)
def test_values(call, make, tags):
    """One all-reduce of a few numbers, however many probes, and however long. Fewer than
    16 samples have marks as well."""
    sizes = set()
    for k, n in ((16, 32), (64, 128)):

        def everything(x, k=k):
            out = call(lx.MatrixLinearOperator(x, tags), k)
            return out.value, out.std_err, out.stats

        found = of(everything, make(n))
        assert [kind for kind, _ in found] == ["all-reduce"], f"k={k}, n={n}: {found}"
        sizes.add(math.prod(found[0][1]))
    assert len(sizes) == 1, f"{sizes} numbers"
    assert max(sizes) < 128, f"{sizes} numbers"


@pytest.mark.slow(but="slq")
@pytest.mark.parametrize("call", [hutchinson, slq])
def test_gradients(call):
    """One all-reduce for each array of the operator, of its shape, in a loop too."""
    n = 32
    x = positive_definite(n), np.linspace(1.0, 2.0, n)

    def value(x, execution):
        total = lx.MatrixLinearOperator(x[0]) + lx.DiagonalLinearOperator(x[1])
        return call(lx.TaggedLinearOperator(total, PSD), 16, execution).value

    for block_size in (None, 1):
        execution = tx.Sharded(MESH, block_size=block_size)
        found = of(jax.grad(lambda x, e=execution: value(x, e)), x)
        expected = [("all-reduce", (n,)), ("all-reduce", (n, n))]
        assert sorted(found) == expected, f"block_size={block_size}: {found}"


def test_gradient_with_a_loop_inside():
    """One all-reduce for an array that each step of the product's own loop uses."""
    n = 32

    def value(x):
        def fn(v):
            return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(x) @ y / n, v)

        vector = jax.ShapeDtypeStruct((n,), jnp.float64)
        return hutchinson(lx.FunctionLinearOperator(fn, vector), 16).value

    found = of(jax.grad(value), positive_definite(n))
    assert found == [("all-reduce", (n, n))], found


@pytest.mark.slow(but=("estimator0-*", "estimator3-*"))
@pytest.mark.parametrize(
    ("estimator", "k", "widths"),
    [
        (tx.HutchPlusPlusEstimator(), 24, {8, 16}),
        (tx.NystromPlusPlusEstimator(), 16, {16}),
        (tx.XTraceEstimator(), 16, {8}),
        (tx.XNysTraceEstimator(), 8, {8}),
    ],
)
def test_sketches(estimator, k, widths):
    """All-gathers of the products, n m numbers, and nothing else."""
    n, matrix = 64, positive_definite(64)

    def value(x):
        return trace(lx.MatrixLinearOperator(x, PSD), estimator, k).value

    found = of(value, matrix)
    assert found
    for kind, shape in found:
        assert kind == "all-gather", found
        assert tuple(sorted(shape, reverse=True)) in {(n, m) for m in widths}, found


def test_none_on_one_device():
    def value(x):
        return hutchinson(lx.MatrixLinearOperator(x, PSD), 8, tx.Local()).value

    assert of(jax.value_and_grad(value), positive_definite(32)) == []
