"""The test matrices of the XTrace paper, section 4, and a slowly decaying one."""

import jax
import jax.numpy as jnp

import traceax as tx


# An estimator and its products for each probe in the estimate.
ESTIMATORS = {
    "Hutchinson": (tx.HutchinsonEstimator(), 1),
    "Hutch++": (tx.HutchPlusPlusEstimator(), 3),
    "Nystrom++": (tx.NystromPlusPlusEstimator(), 2),
    "XTrace": (tx.XTraceEstimator(), 2),
    "XNysTrace": (tx.XNysTraceEstimator(), 1),
}


def spectra(n: int) -> dict[str, jax.Array]:
    i = jnp.arange(1, n + 1)
    return {
        "flat": jnp.linspace(3.0, 1.0, n),
        "poly": i**-2.0,
        "exp": 0.7**i,
        "step": jnp.where(i <= 50, 1.0, 1e-3),
        "i^-1/2": i**-0.5,
    }


def matrix_with(eigenvalues: jax.Array) -> jax.Array:
    n = eigenvalues.shape[0]
    basis, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(7), (n, n)))
    return (basis * eigenvalues) @ basis.T
