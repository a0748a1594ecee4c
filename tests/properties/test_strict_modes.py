"""Every public call under JAX's strict modes, all at once: NaN as an error, no promotion
of ranks, no transfer between host and device that was not asked for."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import CASES, hermitian, matrix_free, PSD


N = 16
MODES = (
    lambda: jax.debug_nans(True),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.transfer_guard("disallow"),
)


def trace(estimator):
    def call(matrix, key, k):
        return tx.trace(matrix_free(matrix, PSD), estimator, k=k, key=key)

    return call


def of_exponential(estimator):
    def call(matrix, key, k):
        settings = {"k": k, "key": key, "num_steps": 4}
        operator = matrix_free(matrix, PSD)
        return tx.trace_of_function(operator, tx.Exp(), estimator, **settings)

    return call


def logdet(matrix, key, k):
    return tx.logdet(matrix_free(matrix, PSD), k=k, key=key, num_steps=4)


def of_general_matrix(matrix, key, k):
    settings = {"k": k, "key": key, "num_steps": 4}
    return tx.trace_of_function(matrix_free(matrix), jnp.tanh, **settings)


def log_trace_exp(matrix, key, k):
    operator = matrix_free(matrix, PSD)
    return tx.log_trace_exp(operator, 2.0, k=k, key=key, num_steps=4)


CALLS = {
    # Nyström++ plans as Hutch++ does, and approximates as XNysTrace.
    **{str(case): trace(case.estimator) for case in (*CASES[:2], *CASES[3:])},
    "SLQ": of_exponential(tx.SLQEstimator()),
    "logdet": logdet,
    "Arnoldi": of_general_matrix,
    "log_trace_exp": log_trace_exp,
}


@pytest.fixture
def arguments():
    """A matrix, a key and a budget, on the device."""
    adaptive = tx.Adaptive(rtol=0.5, max_k=12, round_size=4, min_samples=4, history=True)
    matrix = hermitian(0, np.linspace(1.0, 2.0, N))
    return jax.block_until_ready(jax.device_put((matrix, jr.key(0), adaptive)))


@contextlib.contextmanager
def strict():
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            stack.enter_context(mode())
        yield


@pytest.mark.slow(but="XTrace-Sphere")
@pytest.mark.parametrize("name", CALLS)
def test_adaptive_budget(name, arguments):
    """Outside of `jit`, to a tolerance that is reached before the largest budget."""
    matrix, key, adaptive = arguments
    with strict():
        solution = CALLS[name](matrix, key, adaptive)
    assert solution.result == tx.RESULTS.successful
    assert np.isfinite(solution.value)


@pytest.mark.slow(but="XTrace-Sphere")
@pytest.mark.parametrize("name", [str(CASES[0]), "XTrace-Sphere", "logdet"])
def test_gradient(name, arguments):
    """Of a fixed budget, within `jit`."""
    matrix, key, _ = arguments
    slope = jax.jit(jax.value_and_grad(lambda a, key: CALLS[name](a, key, 8).value))
    with strict():
        value, gradient = slope(matrix, key)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


@pytest.mark.slow
def test_gradient_of_an_adaptive_budget(arguments):
    slope = jax.jit(jax.grad(lambda a, key, k: CALLS["XTrace-Sphere"](a, key, k).value))
    with strict():
        gradient = slope(*arguments)
    assert np.all(np.isfinite(gradient))


def nystrom(operator, key):
    preconditioner = tx.nystrom_preconditioner(operator, 3, key=key)
    return preconditioner, preconditioner.logdet


OTHERS = {
    "exact": lambda free, _, key: tx.trace(free, k=N).value,
    "density": lambda free, _, key: (
        tx.spectral_density(free, k=3, num_steps=4, key=key).nodes
    ),
    "nystrom": lambda free, _, key: nystrom(free, key),
    "pivoted": lambda _, stored, key: tx.pivoted_cholesky_preconditioner(stored, 3),
    "diagonal": lambda free, _, key: tx.diagonal(free, k=4, key=key),
    "leaf_traces": lambda free, _, key: tx.leaf_traces(free, k=4, key=key),
    "row_norms": lambda free, _, key: tx.row_norms(free, k=4, key=key),
    "jacobi": lambda free, _, key: tx.jacobi_preconditioner(free, k=4, key=key),
    "function_of": lambda free, _, key: (
        tx.trace(tx.function_of(free, tx.Exp(), 4), k=3, key=key).value
    ),
}


@pytest.mark.slow(but=("exact", "density", "nystrom", "diagonal", "row_norms"))
@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(name, arguments):
    matrix, key, _ = arguments
    free, stored = matrix_free(matrix, PSD), lx.MatrixLinearOperator(matrix, PSD)
    with strict():
        found = OTHERS[name](free, stored, key)
    numbers = jax.tree.leaves(eqx.filter(found, eqx.is_inexact_array))
    assert numbers
    assert all(np.all(np.isfinite(each)) for each in numbers)


def test_dynamic_trace(arguments):
    matrix, key, _ = arguments
    dynamic = tx.DynamicTrace(matrix_free, num_probes=4)
    with strict():
        first = dynamic.init(matrix, key=key, k=8)
        second = dynamic.update(first.state, matrix)
    assert np.isfinite(second.value)


def test_interval_of_a_complex_value(arguments):
    matrix, key, _ = arguments
    operator = matrix_free(matrix + 0j, PSD)
    solution = tx.trace(operator, tx.HutchinsonEstimator(), k=8, key=key)
    with strict(), jax.numpy_dtype_promotion("strict"):
        low, high = solution.interval()
    assert np.all(np.isfinite([low, high]))
    assert low.real < solution.value.real < high.real


@pytest.mark.slow(but="XTrace-*")
@pytest.mark.parametrize("name", ["XTrace-Sphere", "logdet", "Arnoldi"])
def test_no_promotion_of_dtypes(name, arguments):
    matrix, key, _ = arguments
    with strict(), jax.numpy_dtype_promotion("strict"):
        solution = CALLS[name](matrix, key, 8)
    assert np.isfinite(solution.value)


def logdet_by_one_step(matrix, key):
    settings = {"k": 2, "num_steps": 1, "throw": False}
    return tx.logdet(matrix_free(matrix, PSD), key=key, **settings).value


def logdet_preconditioned(matrix, key):
    preconditioner = tx.AutoPreconditioner(max_rank=N, shift=1.0)
    settings = {"k": 2, "num_steps": 2, "preconditioner": preconditioner, "throw": False}
    return tx.logdet(matrix_free(matrix, PSD), key=key, **settings).value


NOT_COMPILED = {
    "one step": logdet_by_one_step,
    "a preconditioner that grows": logdet_preconditioned,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_COMPILED)
def test_without_compilation(name, arguments):
    """Under `jax.disable_jit` a loop over no entries is an error, and counters of loops
    are integers of Python."""
    matrix, key, _ = arguments
    value = NOT_COMPILED[name](matrix, key)
    with jax.disable_jit():
        same = NOT_COMPILED[name](matrix, key)
    assert np.allclose(same, value, rtol=1e-12)
