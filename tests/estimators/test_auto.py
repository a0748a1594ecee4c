"""Which estimator is picked."""

import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx

from ..helpers import (
    matrix_free,
    PSD,
)


def test_select_trace_estimator():
    matrix = jnp.asarray(np.eye(9))

    def pick(operator, k):
        return type(tx.select_trace_estimator(operator, k))

    assert pick(lx.MatrixLinearOperator(matrix), 1) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix), 9) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix, lx.diagonal_tag), 1) is tx.ExactTraceEstimator
    assert pick(matrix_free(matrix, PSD), 4) is tx.XNysTraceEstimator
    assert pick(-matrix_free(matrix, PSD), 4) is tx.XNysTraceEstimator
    assert pick(matrix_free(matrix), 4) is tx.XTraceEstimator
    assert pick(matrix_free(matrix), 1) is tx.HutchinsonEstimator
