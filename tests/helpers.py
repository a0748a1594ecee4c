"""What several test files share: matrices, operators, compiled calls and the list of
estimators. Matrices are made by NumPy and are arguments of the compiled calls, so that
one program serves all matrices of a shape."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


PSD = lx.positive_semidefinite_tag


class Case(NamedTuple):
    """An estimator, and what is special about it."""

    estimator: tx.AbstractEstimator
    products_per_probe: int  # k / m, for the m probes in its estimate
    semidefinite: bool = False  # whether it needs the tag
    rank_exact: bool = True  # whether a sketch wider than the rank is exact

    def __str__(self):
        name = type(self.estimator).__name__.removesuffix("Estimator")
        sampler = type(self.estimator.sampler).__name__.removesuffix("Sampler")
        return f"{name}-{sampler}"


CASES = [
    Case(tx.HutchinsonEstimator(), 1, rank_exact=False),
    Case(tx.HutchPlusPlusEstimator(), 3),
    Case(tx.NystromPlusPlusEstimator(), 2, semidefinite=True),
    Case(tx.XTraceEstimator(), 2),
    Case(tx.XNysTraceEstimator(), 1, semidefinite=True),
]
VARIANTS = [
    *CASES,
    Case(tx.XTraceEstimator(tx.RademacherSampler(), improved=False), 2),
    Case(tx.XNysTraceEstimator(tx.NormalSampler()), 1, semidefinite=True),
    Case(
        tx.XNysTraceEstimator(tx.RademacherSampler(), improved=False),
        1,
        semidefinite=True,
    ),
]


def hermitian(seed, eigenvalues, dtype=np.float64):
    """A Hermitian NumPy matrix with the given eigenvalues and a random orthogonal (for
    complex dtypes, unitary) basis, made in double precision."""
    generator, n = np.random.default_rng(seed), len(eigenvalues)
    normal = generator.standard_normal((n, n))
    if np.issubdtype(dtype, np.complexfloating):
        normal = normal + 1j * generator.standard_normal((n, n))
    basis, r = np.linalg.qr(normal)
    basis = basis * np.sign(np.diag(r))  # Haar distributed
    matrix = (basis * np.asarray(eigenvalues)) @ basis.conj().T
    return ((matrix + matrix.conj().T) / 2).astype(dtype)


@eqx.filter_jit
def trace_of_matrix(matrix, estimator, key, *, k, tags=PSD, execution=tx.Local()):
    """`tx.trace` of a matrix of which only the product is known, without raising."""
    operator = matrix_free(matrix, tags)
    settings = {"k": k, "key": key, "execution": execution, "throw": False}
    return tx.trace(operator, estimator, **settings)


@eqx.filter_jit
def traces_of_matrix(matrix, estimator, keys, *, k, tags=PSD):
    """The same for each of several keys, stacked: value, error bar and stats."""

    def one(key):
        solution = trace_of_matrix(matrix, estimator, key, k=k, tags=tags)
        return solution.value, solution.std_err, solution.stats

    return jax.lax.map(one, keys)


@eqx.filter_jit
def traces_of_matrices(matrices, which, estimator, keys, *, k, tags=PSD):
    """The solutions for `matrices[which[i]]` and `keys[i]`, stacked: value, error bar,
    stats and whether they were successful."""

    def one(pair):
        i, key = pair
        solution = trace_of_matrix(matrices[i], estimator, key, k=k, tags=tags)
        successful = solution.result == tx.RESULTS.successful
        return solution.value, solution.std_err, solution.stats, successful

    return jax.lax.map(one, (which, keys))


@eqx.filter_jit
def diagonals_of_matrices(matrices, which, estimator, keys, *, k, tags=PSD):
    """The diagonals of `matrices[which[i]]` by `keys[i]`, stacked: value, error bar and
    stats."""

    def one(pair):
        i, key = pair
        operator = matrix_free(matrices[i], tags)
        solution = tx.diagonal(operator, estimator, k=k, key=key, throw=False)
        return solution.value, solution.std_err, solution.stats

    return jax.lax.map(one, (which, keys))


def matrix_free(matrix, tags=()):
    """`matrix` as an operator of which only the product is known."""
    n = matrix.shape[1]
    structure = jax.ShapeDtypeStruct((n,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def rms(x, axis=None):
    """The root of the mean square."""
    return np.sqrt(np.mean(np.abs(x).astype(np.float64) ** 2, axis=axis))


def z_score(samples, exact):
    """Distance of the mean of independent samples from `exact`, in standard errors; for
    complex samples the larger of those of the real and imaginary parts."""
    samples, exact = np.asarray(samples), np.asarray(exact)
    if np.iscomplexobj(samples):
        return max(z_score(samples.real, exact.real), z_score(samples.imag, exact.imag))
    spread = np.std(samples, ddof=1) / len(samples) ** 0.5
    distance = np.abs(np.mean(samples) - exact)
    # Rounding of the samples themselves is not a bias.
    rounding = 8 * jnp.finfo(samples.dtype).eps * np.max(np.abs(samples))
    return float(np.maximum(distance - rounding, 0) / (spread if spread > 0 else 1))
