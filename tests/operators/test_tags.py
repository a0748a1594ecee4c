"""Tags of operators."""

import copy
import pickle

import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._operators.door import flatten

from ..helpers import hermitian


MATRIX = hermitian(0, np.linspace(1.0, 4.0, 40)).astype(np.float32)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_the_hermitian_tag(copied):
    matrix = jnp.asarray(MATRIX, np.complex64)
    assert copied(tx.hermitian_tag) is tx.hermitian_tag
    operator = copied(lx.MatrixLinearOperator(matrix, tx.hermitian_tag))
    assert flatten(operator).hermitian


def test_hermitian_tag_of_a_transpose():
    """It stays, and the transpose is the conjugate."""
    matrix = jnp.asarray(hermitian(0, np.linspace(1.0, 4.0, 40), np.complex128))
    operator = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
    flat = flatten((operator + 2.0 * operator).T)
    assert flat.hermitian
    vector = jnp.arange(40.0) + 0j
    assert np.allclose(flat.mv(vector), 3 * matrix.conj() @ vector)
