"""`vmap`, strict promotion modes, and no hang."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx

from ..helpers import CASES, hermitian, matrix_free, PSD, trace_of_matrix


N, K = 20, 8
KEYS = jr.split(jr.key(0), 2)
MATRICES = [hermitian(i, np.arange(1.0, N + 1.0) ** -i) for i in (1, 2)]
BAD = MATRICES[1].copy()
BAD[3, 4] = np.nan
every_estimator = pytest.mark.parametrize(
    "estimator",
    [case.estimator for case in CASES],
    ids=lambda estimator: type(estimator).__name__,
)


@eqx.filter_jit
def together(stack, estimator, keys):
    """A batch of operators, each with a batch of keys; and whether a product was not
    finite."""

    def one(matrix, key):
        solution = trace_of_matrix(matrix, estimator, key, k=K)
        failed = solution.result == tx.RESULTS.nonfinite_product
        return solution.value, solution.std_err, failed

    every_key = lambda matrix: jax.vmap(lambda key: one(matrix, key))(keys)  # noqa: E731
    return jax.vmap(every_key)(stack)


@pytest.mark.slow(but=("HutchinsonEstimator", "XTraceEstimator"))
@every_estimator
def test_vmap_over_operators_and_keys(estimator):
    stack = np.stack([*MATRICES, BAD])
    values, std_errs, failed = together(stack, estimator, KEYS)
    assert failed.tolist() == [[False, False], [False, False], [True, True]]
    for i, matrix in enumerate(MATRICES):
        for j, key in enumerate(KEYS):
            alone = trace_of_matrix(matrix, estimator, key, k=K)
            assert np.isclose(values[i, j], alone.value, rtol=1e-11, atol=0)
            assert np.isclose(std_errs[i, j], alone.std_err, rtol=1e-6, atol=0)


@pytest.mark.slow(but=("XTraceEstimator", "Nystrom*"))
@every_estimator
def test_strict_promotion_modes(estimator):
    """A user's strict modes are for the user's code: our program, with its gradient, is
    the same."""
    matrix = MATRICES[1].astype(np.complex64)

    def program():
        @jax.jit
        @jax.value_and_grad
        def run(matrix, key):
            return trace_of_matrix(matrix, estimator, key, k=K).value.real

        return run.lower(matrix, KEYS[0]).as_text()

    expected = program()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert program() == expected


def test_call_in_strict_promotion_modes():
    """Outside of `jit`, to the end."""
    operator = matrix_free(jnp.asarray(MATRICES[1].astype(np.complex64)), PSD)
    settings = {"estimator": tx.XTraceEstimator(), "k": K, "key": KEYS[0]}
    expected = tx.trace(operator, **settings)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert tx.trace(operator, **settings).value == expected.value


# The programs that hung: vmap of factorisations that do not depend on each other, and of
# every estimator, inside one program, on one (two that factorise twice) and on several
# devices.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, jax.random as jr, lineax as lx, numpy as np
import traceax as tx
from traceax._numerics import dense

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

for name in sys.argv[1:]:
    estimator = getattr(tx, name)()
    together = jax.jit(jax.vmap(lambda key: run(estimator, key)))
    for _ in range(3):
        values = together(keys)
    print(bool(np.all(np.isfinite(values))))
print("finished")
"""


NAMES = [type(case.estimator).__name__ for case in CASES]


@pytest.mark.slow(but="1-names0")
@pytest.mark.parametrize(("num_devices", "names"), [(1, NAMES[3:]), (4, NAMES)])
def test_batched_factorisations_do_not_hang(num_devices, names):
    flags = os.environ["XLA_FLAGS"].split()
    flags = [flag for flag in flags if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={num_devices}")
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env=os.environ | {"XLA_FLAGS": " ".join(flags)},
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["True"] * (1 + len(names)) + ["finished"]
