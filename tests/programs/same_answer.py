"""Every estimator on meshes of 1, 2, 4 and 8 devices: the answer of one device, for
numbers of probes that the number of devices does not divide."""

import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from common import (
    close,
    equal,
    general,
    matrix_free,
    positive_definite,
    PSD,
    say,
    some_key,
    value_and_grad,
)

import traceax as tx


N = 30
MESHES = [tx.probe_mesh(jax.devices()[:d]) for d in (1, 2, 4, 8)]


def trace(estimator, k, make=lx.MatrixLinearOperator, tags=PSD):
    def call(matrix, execution):
        operator = make(matrix, tags)
        return tx.trace(
            operator, estimator, k=k, key=some_key(), execution=execution, throw=False
        )

    return call


def logdet(k, tags=PSD, num_steps=8, estimator=tx.SLQEstimator()):
    def call(matrix, execution):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return tx.logdet(
            operator,
            estimator,
            k=k,
            num_steps=num_steps,
            key=some_key(),
            execution=execution,
            throw=False,
        )

    return call


def preconditioned(matrix, execution):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    preconditioner = tx.nystrom_preconditioner(
        operator, rank=6, key=jr.key(3), execution=execution
    )
    return tx.logdet(
        operator,
        k=13,
        num_steps=8,
        key=some_key(),
        preconditioner=preconditioner,
        execution=execution,
        throw=False,
    )


def krylov_aware(matrix, execution):
    return tx.trace_of_function(
        lx.MatrixLinearOperator(matrix, PSD),
        tx.Exp(),
        tx.KrylovAwareEstimator(),
        k=13,
        num_steps=3,
        key=some_key(),
        execution=execution,
        throw=False,
    )


def check(name, call, matrix, *, rtol=1e-13, bitwise=False, meshes=MESHES):
    expected, slope = value_and_grad(lambda x: call(x, tx.Local()))(matrix)
    assert jnp.isfinite(expected.value), f"{name}: {expected.value}"
    for mesh in meshes:
        execution = tx.Sharded(mesh)
        found, sharded = value_and_grad(lambda x, e=execution: call(x, e))(matrix)
        at = f"{name}, {mesh.size} devices: "
        assert found.result == expected.result, f"{at}another result"
        if bitwise:
            equal(f"{at}samples", found.stats["samples"], expected.stats["samples"])
        close(at, found, expected, rtol)
        close(f"{at}gradient", sharded, slope, rtol)
    say(name)


def streaming():
    psd, other = positive_definite(N), general(N)
    check("Hutchinson", trace(tx.HutchinsonEstimator(), 13), psd, bitwise=True)
    # One probe on a device: its product is another routine of XLA than that of several.
    check("fewer probes than devices", trace(tx.HutchinsonEstimator(), 3), psd)
    check("one probe", trace(tx.HutchinsonEstimator(), 1), psd, bitwise=True)
    hermitian = positive_definite(N, jnp.complex128)
    check("complex", trace(tx.HutchinsonEstimator(), 13), hermitian)
    single = positive_definite(N, jnp.float32)
    check("float32", trace(tx.HutchinsonEstimator(), 13), single, rtol=1e-6)
    exact = tx.ExactTraceEstimator()
    check("Exact", trace(exact, N, make=matrix_free, tags=()), other)
    check("Auto, exact", trace(tx.AutoTraceEstimator(), N, make=matrix_free), other)


def sketches():
    psd, other = positive_definite(N), general(N)
    check("Hutch++", trace(tx.HutchPlusPlusEstimator(), 13), psd)
    check("Nystrom++", trace(tx.NystromPlusPlusEstimator(), 13), psd)
    check("XTrace", trace(tx.XTraceEstimator(), 13), psd)
    check("Auto, semidefinite", trace(tx.AutoTraceEstimator(), 13), psd)
    check("Auto, general", trace(tx.AutoTraceEstimator(), 13, tags=()), other)
    few = MESHES[-1:]
    check("XNysTrace, k=3", trace(tx.XNysTraceEstimator(), 3), psd, meshes=few)
    hermitian = positive_definite(N, jnp.complex128)
    check("complex XTrace", trace(tx.XTraceEstimator(), 13), hermitian, meshes=few)


def functions():
    psd, other = positive_definite(N), general(N)
    check("SLQ", logdet(13), psd, bitwise=True)
    check("fewer probes than devices", logdet(3), psd, meshes=MESHES[-1:])
    check("Golub-Kahan", logdet(13, tags=()), other, rtol=1e-12, bitwise=True)
    check("exact log-determinant", logdet(N), psd, rtol=1e-12)
    few = MESHES[-1:]
    hermitian, single = (positive_definite(N, x) for x in (jnp.complex128, jnp.float32))
    check("complex SLQ", logdet(13), hermitian, meshes=few)
    check("float32 SLQ", logdet(13), single, rtol=1e-5, meshes=few)


def blocks():
    psd = positive_definite(N)
    check("Krylov-aware", krylov_aware, psd)
    check("preconditioned", preconditioned, psd, rtol=1e-12)
    check("XNysTrace", trace(tx.XNysTraceEstimator(), 13), psd)


if __name__ == "__main__":
    {each.__name__: each for each in (streaming, sketches, functions, blocks)}[
        sys.argv[1]
    ]()
