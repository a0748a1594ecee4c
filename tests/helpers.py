"""What several test files share: matrices, operators and the list of estimators."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx

import traceax as tx


# An estimator, and k / m: the products that it makes for each probe in its estimate.
ESTIMATORS = [
    (tx.HutchinsonEstimator(), 1),
    (tx.HutchPlusPlusEstimator(), 3),
    (tx.NystromPlusPlusEstimator(), 2),
    (tx.XTraceEstimator(), 2),
    (tx.XNysTraceEstimator(), 1),
]


def spectrum_matrix(key, eigenvalues, dtype):
    """A Hermitian matrix with the given eigenvalues and a random orthogonal (for complex
    dtypes, unitary) basis, factored in double precision where that is enabled."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    wide = jax.dtypes.canonicalize_dtype(complex if is_complex else float)
    eigenvalues = jnp.asarray(eigenvalues).astype(wide)
    n = eigenvalues.shape[0]
    basis, r = jnp.linalg.qr(jr.normal(key, (n, n), wide))
    basis = basis * jnp.sign(jnp.diagonal(r))[None, :]  # Haar distributed
    matrix = (basis * eigenvalues[None, :]) @ basis.conj().T
    return ((matrix + matrix.conj().T) / 2).astype(dtype)


def matrix_free(matrix, tags=()):
    """`matrix` as an operator of which only the product is known."""
    n = matrix.shape[1]
    structure = jax.ShapeDtypeStruct((n,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def trace_many(matrix, estimator, k, num_keys, tags=lx.positive_semidefinite_tag):
    """The solutions for `num_keys` keys, stacked."""

    def one(key):
        operator = matrix_free(matrix, tags)
        solution = tx.trace(operator, estimator, k=k, key=key, throw=False)
        return solution.value, solution.std_err, solution.stats

    keys = jr.split(jr.key(20261121), num_keys)
    return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)


def z_score(samples, exact):
    """Distance of the mean of independent samples from `exact`, in standard errors; for
    complex samples the larger of those of the real and imaginary parts."""
    samples = jnp.asarray(samples)
    if jnp.iscomplexobj(samples):
        exact = jnp.asarray(exact, samples.dtype)
        return max(z_score(samples.real, exact.real), z_score(samples.imag, exact.imag))
    spread = jnp.std(samples, ddof=1) / samples.shape[0] ** 0.5
    distance = jnp.abs(jnp.mean(samples) - exact)
    # Rounding of the samples themselves is not a bias.
    rounding = 8 * jnp.finfo(samples.dtype).eps * jnp.max(jnp.abs(samples))
    return float(jnp.maximum(distance - rounding, 0) / jnp.where(spread > 0, spread, 1))
