"""The same answer on any mesh: every estimator on meshes of 1, 2, 4 or 8 devices gives
the value, the error bar and the gradient of one device, for numbers of probes that the
number of devices does not divide. The code that shares probes among devices knows no
estimator, so each size of mesh is met by several of them, and not each by all."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..programs.common import (
    close,
    general,
    matrix_free,
    positive_definite,
    PSD,
    some_key,
    value_and_grad,
)


N, K = 30, 13
ADAPTIVE = tx.Adaptive(rtol=0.05, max_k=24, round_size=8, min_samples=4)


def trace(estimator, k=K, make=lx.MatrixLinearOperator, tags=PSD):
    def call(matrix, execution):
        settings = {"key": some_key(), "execution": execution, "throw": False}
        return tx.trace(make(matrix, tags), estimator, k=k, **settings)

    return call


def diagonal(estimator, k):
    def call(matrix, execution):
        settings = {"key": some_key(), "execution": execution, "throw": False}
        found = tx.diagonal(matrix_free(matrix, ()), estimator, k=k, **settings)
        # What a further call goes on from has sums in units of its own.
        return dataclasses.replace(found, state=None)

    return call


def logdet(k=K, tags=PSD, num_steps=8, **others):
    def call(matrix, execution):
        operator = lx.MatrixLinearOperator(matrix, tags)
        settings = {"key": some_key(), "execution": execution, "throw": False}
        return tx.logdet(operator, k=k, num_steps=num_steps, **settings, **others)

    return call


def preconditioned(matrix, execution):
    preconditioner = tx.nystrom_preconditioner(
        lx.MatrixLinearOperator(matrix, PSD),
        rank=6,
        key=jax.random.key(3),
        execution=execution,
    )
    return logdet(preconditioner=preconditioner)(matrix, execution)


def krylov_aware(matrix, execution):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"key": some_key(), "execution": execution, "throw": False}
    estimator = tx.KrylovAwareEstimator()
    return tx.trace_of_function(
        operator, tx.Exp(), estimator, k=K, num_steps=3, **settings
    )


def check(call, matrix, *sizes, values=(), rtol=1e-13, blocks=()):
    """Value and gradient on meshes of these `sizes`, or with the size of the blocks for
    each of those in `blocks`; value alone for `values`."""
    expected, slope = value_and_grad(lambda x: call(x, tx.Local()))(matrix)
    assert np.all(np.isfinite(expected.value)), expected.value
    whole = [(size, None) for size in (*sizes, *values)]
    for size, block_size in (*whole, *blocks):
        mesh = tx.probe_mesh(jax.devices()[:size])
        run = lambda x, e=tx.Sharded(mesh, block_size=block_size): call(x, e)  # noqa: E731
        found, sharded = (
            (eqx.filter_jit(run)(matrix), slope)
            if size in values
            else value_and_grad(run)(matrix)
        )
        at = f"{size} devices, blocks of {block_size}: "
        assert found.result == expected.result, f"{at}another result"
        close(at, found, expected, rtol)
        close(f"{at}gradient", sharded, slope, rtol)


def test_hutchinson():
    """Whole, and in blocks on each device."""
    call, blocks = trace(tx.HutchinsonEstimator()), [(2, 1), (2, 3)]
    check(call, positive_definite(N), 1, 4, 8, blocks=blocks)


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("k", [1, 3])
def test_fewer_probes_than_devices(k):
    call = trace(tx.HutchinsonEstimator(), k)
    check(call, positive_definite(N), 8)


@pytest.mark.slow
def test_complex_single_precision():
    matrix = positive_definite(N, jnp.complex64)
    check(trace(tx.HutchinsonEstimator()), matrix, 4, rtol=1e-6)


@pytest.mark.slow
def test_complex_sketch():
    check(trace(tx.XTraceEstimator()), positive_definite(N, jnp.complex128), 8)


def test_exact():
    check(trace(tx.ExactTraceEstimator(), N, matrix_free, ()), general(N), 8)


@pytest.mark.slow(but="estimator1-*")
@pytest.mark.parametrize(
    ("estimator", "k", "tags", "size", "values"),
    [
        (tx.HutchPlusPlusEstimator(), K, PSD, 8, ()),
        (tx.XTraceEstimator(), K, (), 2, (8,)),
        (tx.XNysTraceEstimator(), 3, PSD, 8, ()),
    ],
)
def test_sketches(estimator, k, tags, size, values):
    matrix = positive_definite(N) if tags else general(N)
    check(trace(estimator, k, tags=tags), matrix, size, values=values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "k", "size"),
    [
        (tx.HutchinsonEstimator(), K, 4),
        (tx.XDiagEstimator(), K, 8),
        (tx.HutchinsonEstimator(), ADAPTIVE, 8),
    ],
)
def test_diagonals(estimator, k, size):
    check(diagonal(estimator, k), general(N), size, rtol=1e-12)


@pytest.mark.slow
def test_slq():
    """Whole, and in blocks on each device."""
    check(logdet(), positive_definite(N), 4, blocks=[(2, 3)])


@pytest.mark.slow
def test_slq_with_fewer_probes_than_devices():
    # The bar is a difference of samples, and has their rounding errors.
    check(logdet(3), positive_definite(N, jnp.complex64), 8, rtol=3e-5)


@pytest.mark.slow
def test_golub_kahan():
    check(logdet(tags=()), general(N), 8, rtol=1e-12)


@pytest.mark.slow(but="exact")
@pytest.mark.parametrize(
    ("call", "size", "rtol"),
    [(logdet(N), 4, 1e-12), (krylov_aware, 8, 1e-13), (preconditioned, 2, 1e-12)],
    ids=["exact", "Krylov-aware", "preconditioned"],
)
def test_other_functions(call, size, rtol):
    check(call, positive_definite(N), size, rtol=rtol)
