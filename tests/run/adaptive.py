"""What the tests of adaptive budgets share. Tolerances, matrices and keys are arguments
of compiled calls, so that one program for each estimator and dtype serves most tests."""

import equinox as eqx
import jax
import numpy as np

import traceax as tx
from traceax._core.quantiles import student_quantile

from ..helpers import hermitian, matrix_free, PSD


KEY = jax.random.key(20261121)
N, SIZE, MAX, STEPS = 40, 8, 32, 6
HUTCHINSON, HUTCHPP = tx.HutchinsonEstimator(), tx.HutchPlusPlusEstimator()
NYSTROMPP = tx.NystromPlusPlusEstimator()
XTRACE, XNYS, SLQ = tx.XTraceEstimator(), tx.XNysTraceEstimator(), tx.SLQEstimator()
TRACES = [HUTCHINSON, HUTCHPP, NYSTROMPP, XTRACE, XNYS]
SEMIDEFINITE = [NYSTROMPP, XNYS]
# Those that plan deflate in some rounds and sample in others; the rest make in rounds
# what a fixed budget of as many probes makes at once.
PLANNING, PREDICTABLE = [HUTCHPP, NYSTROMPP], [HUTCHINSON, XTRACE, XNYS, SLQ]
DECAY = hermitian(0, 1 / np.arange(1, N + 1))
FLAT = hermitian(1, np.linspace(1, 2, N))
LOW = hermitian(2, [2] * 3 + [0] * (N - 3))


def name(estimator):
    return type(estimator).__name__.removesuffix("Estimator")


def budget(**settings):
    return tx.Adaptive(**({"max_k": MAX, "round_size": SIZE} | settings))


def trace(operator, estimator, k, *, key=KEY, state=None, rate=-1.0, throw=False):
    """That of the operator, or for `SLQ` of exp(rate A)."""
    settings = {"k": k, "key": key, "state": state, "throw": throw}
    if isinstance(estimator, tx.SLQEstimator):
        exp = tx.Exp(rate)
        return tx.trace_of_function(operator, exp, SLQ, num_steps=STEPS, **settings)
    return tx.trace(operator, estimator, **settings)


def tags_of(estimator):
    return PSD if estimator in SEMIDEFINITE else tx.hermitian_tag


def solution_and_gradient(operator, matrix, estimator, k, **settings):
    """Of `operator(matrix)`, and the gradient in the matrix and in the rate of `SLQ`."""

    def value(parameters):
        matrix, rate = parameters
        found = trace(operator(matrix), estimator, k, rate=rate, **settings)
        return found.value.real, found

    gradient, solution = eqx.filter_grad(value, has_aux=True)((matrix, np.asarray(-1.0)))
    return solution, gradient


@eqx.filter_jit
def _estimate(matrix, estimator, k, tags, gradient, state):
    def operator(matrix):
        return matrix_free(matrix, tags)

    if gradient:
        return solution_and_gradient(operator, matrix, estimator, k, state=state)
    return trace(operator(matrix), estimator, k, state=state), None


def estimate(matrix, estimator, k, tags=None, gradient=True, state=None):
    """Solution and gradients, as NumPy arrays, of a matrix whose product is known."""
    tags = tags_of(estimator) if tags is None else tags
    return as_numpy(_estimate(matrix, estimator, k, tags, gradient, state))


def as_numpy(tree):
    """All but the key in the state of a solution."""

    def convert(x):
        is_key = eqx.is_array(x) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else np.asarray(x)

    return jax.tree.map(convert, tree)


def num_probes(solution, estimator):
    """The fixed budget of as many probes."""
    made = int(solution.stats["num_matvecs"])
    return made // STEPS if estimator is SLQ else made


def succeeded(solution):
    return bool(solution.result == tx.RESULTS.successful)


def quantile(count, confidence=0.95):
    return float(student_quantile(confidence, np.asarray(count - 1, float)))
