"""Test matrices, those of the XTrace paper among them, and estimates for many keys."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx

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


def published_spectra(n: int) -> dict[str, jax.Array]:
    """Those of figure 1 of the XTrace paper (Epperly, Tropp and Webber, 2024), as in its
    authors' repository, eepperly/XTrace, `tests/basic_tests.m`."""
    i = jnp.arange(1, n + 1)
    return {
        "linspace(1, 3)": jnp.linspace(1.0, 3.0, n),
        "i^-2": i**-2.0,
        "0.9^(i-1)": 0.9 ** (i - 1),
        "0.7^(i-1)": 0.7 ** (i - 1),
        "1 and 1e-3": jnp.where(i <= n / 20, 1.0, 1e-3),
        "1 and 1e-8": jnp.where(i <= n / 20, 1.0, 1e-8),
    }


def thesis_spectra(n: int) -> dict[str, jax.Array]:
    """Those of figure 16.1 of Epperly's thesis (arXiv 2512.15929)."""
    found = published_spectra(n)
    return {name: found[name] for name in ("linspace(1, 3)", "i^-2", "0.7^(i-1)")}


def matrix_with(eigenvalues: jax.Array) -> jax.Array:
    n = eigenvalues.shape[0]
    basis, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(7), (n, n)))
    return (basis * eigenvalues) @ basis.T


def operator_of(matrix, *tags):
    # A function operator: no estimator is told the diagonal.
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


@functools.cache
def _over_keys(quantity, estimator, k: int, tags, *parts):
    """A compiled function of matrix and keys, to these parts of the solutions."""

    def one(matrix, key):
        operator = operator_of(matrix, *tags)
        solution = quantity(operator, estimator, k=k, key=key, throw=False)
        return [getattr(solution, part) for part in parts]

    return jax.jit(lambda a, keys: jax.lax.map(lambda key: one(a, key), keys))


def trace_many(matrix, estimator, k: int, num_keys: int):
    """Value, standard error and `stats` for each of `num_keys` keys."""
    keys = jax.random.split(jax.random.key(3), num_keys)
    tags = (lx.positive_semidefinite_tag,)
    parts = "value", "std_err", "stats"
    return _over_keys(tx.trace, estimator, k, tags, *parts)(matrix, keys)


def diagonal_many(estimator, k: int, tags, matrix, keys):
    """The diagonal for each key."""
    (values,) = _over_keys(tx.diagonal, estimator, k, tags, "value")(matrix, keys)
    return values
