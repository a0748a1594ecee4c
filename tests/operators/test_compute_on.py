"""Products that JAX runs on the host of an accelerator, by `compute_on`. There is none
here: the programs say where each product belongs."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.experimental import compute_on

import traceax as tx

from ..helpers import hermitian, PSD


KEY = jr.key(0)
# A context manager of this name came first, and the decorator had another.
on_host = getattr(compute_on, "compute_on2", compute_on.compute_on)
CALLS = {
    "fixed": lambda operator: tx.trace(
        operator, tx.HutchinsonEstimator(), k=6, key=KEY, throw=False
    ),
    "adaptive": lambda operator: tx.trace(
        operator,
        tx.HutchinsonEstimator(),
        k=tx.Adaptive(rtol=0.1, max_k=20, round_size=4),
        key=KEY,
        throw=False,
    ),
    "logdet": lambda operator: tx.logdet(
        operator, k=4, num_steps=5, key=KEY, throw=False
    ),
}
MATRIX = jnp.asarray(hermitian(0, np.linspace(1.0, 3.0, 23)))


def multiply(matrix, vector):
    return matrix @ vector


multiply_there = on_host(
    multiply, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
)


def estimate(call, product):
    def value(matrix):
        vector = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: product(matrix, v), vector, PSD)
        return call(operator).value

    return value


def lower(function):
    """Each product with the matrix has the mark that sends it to the host."""
    lowered = jax.jit(function).lower(MATRIX)
    lines = lowered.as_text().splitlines()
    products = [x for x in lines if "dot_general" in x and "tensor<23x23xf64>" in x]
    assert products
    assert all('_xla_compute_type = "host"' in line for line in products)
    return lowered


@pytest.mark.slow(but="fixed")
@pytest.mark.parametrize("name", CALLS)
def test_products_stay_on_the_host(name):
    value = estimate(CALLS[name], multiply_there)
    found = lower(value).compile()(MATRIX)
    np.testing.assert_allclose(found, value(MATRIX), rtol=1e-14)


@pytest.mark.slow
def test_derivatives_stay_on_the_host():
    there, here = [
        jax.value_and_grad(estimate(CALLS["fixed"], product))
        for product in (multiply_there, multiply)
    ]
    for found, expected in zip(lower(there).compile()(MATRIX), here(MATRIX), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_the_matrix_may_be_in_the_memory_of_the_host():
    space = jax.memory.Space.Host

    def product(matrix, vector):
        return multiply_there(matrix, jax.device_put(vector, space))

    found = jax.jit(estimate(CALLS["fixed"], product))(jax.device_put(MATRIX, space))
    expected = estimate(CALLS["fixed"], multiply)(MATRIX)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
