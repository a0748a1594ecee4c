"""Calls without `k` and without numbers of steps, and what their budgets may hold."""

import importlib.util
import re

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._estimators.auto_diagonal import AutoDiagonalEstimator
from traceax._operators.door import flatten
from traceax._run.budget import Budget

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 24, jr.key(0)
MATRIX = jnp.asarray(hermitian(0, np.linspace(1.0, 3.0, N)))
OPERATOR, GENERAL = matrix_free(MATRIX, PSD), matrix_free(MATRIX)
EIGENVALUES = np.linspace(1.0, 3.0, N)
DIAGONAL = np.diagonal(MATRIX)
INVERSE = np.diagonal(np.linalg.inv(MATRIX))
ROWS = np.linalg.norm(MATRIX, axis=1)
POINT = jnp.ones(N)


def quadratic(x):
    return x @ MATRIX @ x / 2


def dynamic(parameters=MATRIX):
    return tx.DynamicTrace(lambda matrix: matrix_free(matrix), num_probes=2)


CALLS = {
    "trace": (lambda: tx.trace(OPERATOR, key=KEY), EIGENVALUES.sum()),
    "diagonal": (lambda: tx.diagonal(OPERATOR, key=KEY), DIAGONAL),
    "leaf_traces": (lambda: tx.leaf_traces(GENERAL, key=KEY), EIGENVALUES.sum()),
    "frobenius_norm": (
        lambda: tx.frobenius_norm(GENERAL, key=KEY),
        np.linalg.norm(EIGENVALUES),
    ),
    "row_norms": (lambda: tx.row_norms(GENERAL, key=KEY), ROWS),
    "logdet": (lambda: tx.logdet(OPERATOR, key=KEY), np.log(EIGENVALUES).sum()),
    "trace_of_function": (
        lambda: tx.trace_of_function(OPERATOR, tx.Exp(), key=KEY),
        np.exp(EIGENVALUES).sum(),
    ),
    "diagonal_of_function": (
        lambda: tx.diagonal_of_function(OPERATOR, tx.Inverse(), key=KEY),
        INVERSE,
    ),
    "schatten_norm": (
        lambda: tx.schatten_norm(OPERATOR, p=1, key=KEY),
        EIGENVALUES.sum(),
    ),
    "log_trace_exp": (
        lambda: tx.log_trace_exp(OPERATOR, key=KEY),
        np.log(np.exp(EIGENVALUES).sum()),
    ),
    "trace_difference": (
        lambda: tx.trace_difference(
            OPERATOR, matrix_free(2 * MATRIX, PSD), tx.Log(), key=KEY
        ),
        -N * np.log(2),
    ),
    "laplacian": (
        lambda: tx.laplacian(quadratic, POINT, key=KEY)[2],
        EIGENVALUES.sum(),
    ),
    "divergence": (
        lambda: tx.divergence(lambda x: MATRIX @ x, POINT, key=KEY)[1],
        EIGENVALUES.sum(),
    ),
    "DynamicTrace": (lambda: dynamic().init(MATRIX, key=KEY), EIGENVALUES.sum()),
}


@pytest.mark.slow(but=("trace", "DynamicTrace"))
@pytest.mark.parametrize("name", CALLS)
def test_one_percent_without_k_and_steps(name):
    call, exact = CALLS[name]
    solution = call()
    error = np.linalg.norm(np.asarray(solution.value) - exact)
    # One key in twenty may miss; twice the tolerance is four standard errors.
    assert error <= 0.02 * np.linalg.norm(exact)
    assert solution.result == tx.RESULTS.successful


@pytest.mark.slow
def test_calls_with_other_results_without_k():
    density = tx.spectral_density(OPERATOR, key=KEY)
    assert density.nodes.shape[0] == 10
    jacobi = tx.jacobi_preconditioner(OPERATOR, key=KEY)
    np.testing.assert_allclose(jacobi.entries, DIAGONAL, rtol=0.05)
    log_prob = tx.gaussian_log_prob(OPERATOR, POINT, key=KEY).value
    quadratic_form = POINT @ np.linalg.solve(MATRIX, POINT)
    log_det = np.log(EIGENVALUES).sum()
    exact = -0.5 * (quadratic_form + log_det + N * np.log(2 * np.pi))
    np.testing.assert_allclose(log_prob, exact, rtol=0.01)
    gram = tx.frobenius_products([OPERATOR, OPERATOR], key=KEY).value
    np.testing.assert_allclose(gram, np.sum(EIGENVALUES**2), rtol=0.02)


def test_no_backend_and_no_array_in_the_default():
    rule = tx.Adaptive()
    assert (rule.rtol, rule.atol, rule.max_k) == (0.01, 0.0, None)
    assert (tx.Adaptive(atol=1.0).rtol, tx.Adaptive(atol=1.0).atol) == (0.0, 1.0)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(rule))
    with pytest.raises(ValueError, match="needs a tolerance"):
        tx.Adaptive(atol=0.0)


def test_key_is_asked_for():
    with pytest.raises(ValueError, match=re.escape("`key=jax.random.key(0)`")):
        tx.trace(OPERATOR)
    exact = tx.trace(OPERATOR, tx.ExactTraceEstimator())
    assert exact.stats["exact"]
    np.testing.assert_allclose(exact.value, EIGENVALUES.sum(), rtol=1e-6)


def identity(n, tags=()):
    structure = jax.ShapeDtypeStruct((n,), jnp.float32)
    return lx.FunctionLinearOperator(lambda v: v, structure, tags)


@pytest.mark.parametrize("n", [100, 3000, 20_000, 3 * 10**6])
@pytest.mark.parametrize(
    "estimator",
    [
        tx.HutchinsonEstimator(),
        tx.XTraceEstimator(),
        tx.XNysTraceEstimator(),
        tx.HutchPlusPlusEstimator(),
        tx.AutoTraceEstimator(),
        AutoDiagonalEstimator(),
    ],
    ids=lambda estimator: estimator.name,
)
def test_memory_rule(estimator, n):
    flat, budget = flatten(identity(n, PSD)), Budget.of(tx.Adaptive())
    most = estimator.default_max_k(flat, budget)
    fitted = budget.for_operator(n, default=most, exact_limit=10_000)
    assert fitted.exact_cost == (n if n <= 10_000 else None)
    assert 16 <= fitted.max_k <= n
    if not isinstance(estimator, tx.AbstractGrowingEstimator):
        floor = min(n, 10_000) if isinstance(estimator, tx.HutchinsonEstimator) else 16
        assert fitted.max_k >= floor
        return
    buffers = jax.eval_shape(lambda: estimator.start(n, jnp.float32, fitted))
    tall = sum(x.size for x in jax.tree.leaves(buffers) if n in x.shape)
    assert tall <= 2**28
    assert fitted.max_k <= 512
    # No smaller than the rule demands.
    if n <= 20_000:
        assert fitted.max_k == min(n, 512)


def test_each_leaf_to_its_tolerance():
    """All leaves together reach it while the small one is still far off."""
    bias = jnp.asarray(hermitian(0, np.linspace(0.5, 1.5, 30)))

    def apply(v):
        return {"bias": bias @ v["bias"], "weight": 100 * v["weight"]}

    like = {"bias": bias[0], "weight": jnp.zeros(40, bias.dtype)}
    operator = lx.FunctionLinearOperator(apply, jax.eval_shape(lambda: like))

    def errors(**settings):
        k = tx.Adaptive(rtol=0.03, history=True, **settings)
        solution = tx.leaf_traces(operator, tx.HutchinsonEstimator(), k=k, key=KEY)
        np.testing.assert_allclose(solution.value["weight"], 4000, rtol=1e-6)
        error = abs(solution.value["bias"] - 30) / 30
        return error, solution.std_err["bias"] / 30, solution.stats["history"]

    _, together, _ = errors()
    error, separate, history = errors(norm=tx.each_leaf)
    assert 2 * separate <= 0.03 < 2 * together
    assert error <= 2 * 0.03
    # The history has the leaf that is furthest from its tolerance.
    np.testing.assert_allclose(history[0, 1], 30, rtol=0.1)
    _, by_entry, _ = errors(norm=tx.each_entry)
    np.testing.assert_allclose(by_entry, separate, rtol=1e-6)


def test_progress_bar(monkeypatch, capsys):
    assert isinstance(tx.Adaptive(progress=False).progress, eqxi.NoProgressMeter)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        k = tx.Adaptive(rtol=0.2, progress=True)
        assert isinstance(k.progress, eqxi.TextProgressMeter)
    tx.trace(OPERATOR, tx.HutchinsonEstimator(), k=k, key=KEY)
    jax.effects_barrier()
    assert "100.00%" in capsys.readouterr().out
    pytest.importorskip("tqdm")
    k = tx.Adaptive(rtol=0.2, progress=True)
    assert isinstance(k.progress, eqxi.TqdmProgressMeter)
    tx.trace(OPERATOR, tx.HutchinsonEstimator(), k=k, key=KEY)
    jax.effects_barrier()
    assert "100.00%" in capsys.readouterr().err


@pytest.mark.usefixtures("without_exact_answers")
def test_batch_over_a_function_shares_matvecs():
    """All members take the largest number of steps, and values are those of each."""
    matrix, products = np.asarray(MATRIX), []

    def product(v):
        products.append(v)
        return matrix @ v

    operator = lx.FunctionLinearOperator(
        lambda v: jax.pure_callback(product, v, v, vmap_method="sequential"),
        jax.ShapeDtypeStruct((N,), MATRIX.dtype),
        lx.symmetric_tag,
    )

    def one(scale):
        function, settings = tx.Exp(scale), {"k": 4, "key": KEY, "throw": False}
        solution = tx.trace_of_function(operator, function, **settings)
        return solution.value, solution.stats["num_steps"], solution.stats["num_matvecs"]

    one, scales = eqx.filter_jit(one), jnp.asarray([0.01, 0.5, 3.0])
    alone = [jax.device_get(one(scale)) for scale in scales]
    products.clear()
    values, steps, num_matvecs = jax.device_get(jax.vmap(one)(scales))
    # One run to choose the steps, and one for each of four probes.
    assert len(products) == num_matvecs[0] == 5 * steps[0]
    assert alone[0][1] < alone[2][1]
    assert all(steps == alone[2][1])
    np.testing.assert_allclose(values, [value for value, *_ in alone], rtol=1e-4)
