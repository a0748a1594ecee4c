"""The first rounds are assessed from smaller matrices, with the same answer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


# With tolerances that need less and more than half of the rounds.
ESTIMATORS = [
    (tx.XTraceEstimator(), 0.25, 0.045),
    (tx.XNysTraceEstimator(), 0.25, 0.015),
    (tx.XDiagEstimator(), 0.8, 0.2),
    (tx.XNysDiagEstimator(), 0.5, 0.06),
]


@pytest.mark.parametrize(("estimator", "loose", "strict"), ESTIMATORS)
def test_first_rounds(estimator, loose, strict):
    n, size, num_rounds = 100, 4, 16
    matrix = jnp.asarray(hermitian(0, 0.9 ** jnp.arange(n)))
    structure = jax.ShapeDtypeStruct((n,), matrix.dtype)
    call = tx.diagonal if "Diag" in estimator.name else tx.trace

    @eqx.filter_jit
    def run(matrix, max_k, tolerance, key):
        def value(matrix):
            operator = tx.as_operator(lambda v: matrix @ v, like=structure, tags=PSD)
            budget = tx.Adaptive(rtol=tolerance, round_size=size, max_k=max_k)
            solution = call(operator, estimator, k=budget, key=key, throw=False)
            return jnp.sum(solution.value), (solution.std_err, solution.matvecs)

        return jax.value_and_grad(value, has_aux=True)(matrix)

    key = jr.key(1)
    for tolerance in (loose, strict):
        first, slope = run(matrix, size * num_rounds, tolerance, key)
        # One round less, and all rounds are assessed from matrices of one size.
        whole, same_slope = run(matrix, size * (num_rounds - 1), tolerance, key)
        matvecs = int(first[1][1])
        assert matvecs == whole[1][1] < size * (num_rounds - 1)
        assert (tolerance == strict) == (matvecs > size * num_rounds / 2)
        assert jnp.allclose(first[0], whole[0], rtol=1e-5)
        assert jnp.allclose(first[1][0], whole[1][0], rtol=1e-2)
        assert jnp.allclose(slope, same_slope, atol=1e-4)
