"""`jit`, `vmap`, shape evaluation, compilation ahead of time, and no hang."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx

from .helpers import ESTIMATORS, spectrum_matrix


PSD = lx.positive_semidefinite_tag
ALL = [*(estimator for estimator, _ in ESTIMATORS), tx.AutoTraceEstimator()]
EVERY = pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)


def run(matrix, estimator, key):
    operator = lx.FunctionLinearOperator(
        lambda v: matrix @ v, jax.eval_shape(lambda: matrix[0]), PSD
    )
    return tx.trace(operator, estimator, k=8, key=key)


def matrices(num):
    return jnp.stack(
        [
            spectrum_matrix(jr.key(i), jnp.arange(1.0, 21.0) ** -i, jnp.float64)
            for i in range(num)
        ]
    )


@EVERY
def test_vmap_over_operators_and_keys(estimator):
    stack, keys = matrices(3), jr.split(jr.key(0), 3)
    together = jax.vmap(lambda a, key: run(a, estimator, key))(stack, keys)
    for i in range(3):
        alone = run(stack[i], estimator, keys[i])
        assert jnp.allclose(together.value[i], alone.value, rtol=1e-11)
        assert jnp.allclose(together.std_err[i], alone.std_err, rtol=1e-6)


@EVERY
def test_vmap_over_keys_of_one_operator(estimator):
    matrix, keys = matrices(1)[0], jr.split(jr.key(0), 3)
    together = jax.vmap(lambda key: run(matrix, estimator, key).value)(keys)
    alone = jnp.stack([run(matrix, estimator, key).value for key in keys])
    assert jnp.allclose(together, alone, rtol=1e-11)


@EVERY
def test_jit_and_ahead_of_time(estimator):
    matrix, key = matrices(1)[0], jr.key(0)
    direct = run(matrix, estimator, key)

    def function(matrix, key):
        return run(matrix, estimator, key)

    for jit in (jax.jit, eqx.filter_jit):
        compiled = jit(function).lower(matrix, key).compile()
        assert jnp.allclose(compiled(matrix, key).value, direct.value, rtol=1e-12)
        assert jnp.allclose(jit(function)(matrix, key).value, direct.value, rtol=1e-12)


@EVERY
def test_shape_evaluation(estimator):
    matrix, key = matrices(1)[0], jr.key(0)
    shapes = eqx.filter_eval_shape(run, matrix, estimator, key)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes.value) == ((), jnp.float64)
    solution = run(matrix, estimator, key)
    assert shapes.stats["samples"].shape == solution.stats["samples"].shape


@EVERY
def test_nonfinite_under_jit_and_vmap(estimator):
    stack = matrices(2).at[1, 3, 4].set(jnp.nan)
    keys = jr.split(jr.key(0), 2)

    @jax.jit
    def codes(stack, keys):
        def one(matrix, key):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            if isinstance(estimator, tx.AutoTraceEstimator):
                operator = lx.FunctionLinearOperator(
                    operator.mv, operator.in_structure(), PSD
                )
            solution = tx.trace(operator, estimator, k=8, key=key, throw=False)
            return solution.result == tx.RESULTS.nonfinite_product

        return jax.vmap(one)(stack, keys)

    assert codes(stack, keys).tolist() == [False, True]


@EVERY
def test_strict_promotion_modes(estimator):
    """A user's strict modes are for the user's code."""
    matrix = matrices(1)[0].astype(jnp.complex64)
    expected = run(matrix, estimator, jr.key(0)).value
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        solution = run(matrix, estimator, jr.key(0))
        assert jnp.allclose(solution.value, expected, rtol=1e-5)
        jax.grad(lambda a: run(a, estimator, jr.key(0)).value.real)(matrix)


# The programs that hung: vmap of factorisations that do not depend on each other, and of
# every estimator, inside one program, on one and on several devices.
PROGRAM = """
import jax, jax.numpy as jnp, jax.random as jr, lineax as lx, numpy as np
import traceax as tx
from traceax._kernel import dense

x = jr.normal(jr.key(0), (16, 20, 20))
both = jax.jit(jax.vmap(lambda x: (dense.qr(x), dense.qr(x + 1), dense.eigh(x + x.T))))
print(float(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(both(x)))) > 0)

mesh = jax.make_mesh(
    (jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,)
)
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
keys = jax.device_put(jr.split(jr.key(0), 16), sharding)
matrix = jnp.diag(jnp.arange(1.0, 41.0))

def run(estimator, key):
    structure = jax.ShapeDtypeStruct((40,), matrix.dtype)
    tag = lx.positive_semidefinite_tag
    operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)
    return tx.trace(operator, estimator, k=12, key=key, throw=False).value

for estimator in (
    tx.HutchinsonEstimator(), tx.HutchPlusPlusEstimator(), tx.NystromPlusPlusEstimator(),
    tx.XTraceEstimator(), tx.XNysTraceEstimator(),
):
    together = jax.jit(jax.vmap(lambda key: run(estimator, key)))
    for _ in range(3):
        values = together(keys)
    print(bool(np.all(np.isfinite(values))))
print("finished")
"""


@pytest.mark.parametrize("num_devices", [1, 4])
def test_batched_factorisations_do_not_hang(num_devices):
    flag = f"--xla_force_host_platform_device_count={num_devices}"
    environment = os.environ | {"XLA_FLAGS": flag}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["True"] * 6 + ["finished"]
