"""Krylov-aware deflation: how much of a Krylov space is deflated, with its bracket; and
one that grows while it pays: accurate as asked, from fewer products than the published
algorithm, with derivatives, history and resumption."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._functions.deflation import Deflation
from traceax._krylov.block_lanczos import (
    block_lanczos_advance,
    block_lanczos_run,
    block_lanczos_start,
)

from ..helpers import hermitian, matrix_free, PSD, z_score


ESTIMATOR = tx.KrylovAwareEstimator()
N = 120
INDEX = np.arange(1.0, N + 1)
SPECTRA = {"decaying": INDEX**-1.5, "flat": np.linspace(1.0, 1.2, N)}
KEYS = jr.split(jr.key(20261122), 200)


@eqx.filter_jit
def solve(matrix, key, k, num_steps=6, execution=tx.Local(), estimator=ESTIMATOR):
    settings = {"num_steps": num_steps, "execution": execution, "throw": False}
    operator = matrix_free(matrix, PSD)
    return tx.trace_of_function(
        operator, tx.Power(0.5), estimator, k=k, key=key, **settings
    )


def budget(**settings):
    return tx.Adaptive(**{"rtol": 0.03, "max_k": 64, "round_size": 8} | settings)


@eqx.filter_jit
def on_many_keys(matrix, direction, keys):
    """Value, products, success, interval, and the derivative along the direction."""

    def one(key):
        def along(t):
            solution = solve(matrix + t * direction, key, budget())
            return solution.value, solution

        _, slope, solution = jax.jvp(along, (0.0,), (1.0,), has_aux=True)
        low, high = solution.interval()
        successful = solution.result == tx.RESULTS.successful
        spent = solution.stats["num_matvecs"]
        return solution.value, spent, successful, low, high, slope

    return jax.lax.map(one, keys)


@pytest.fixture(scope="module", params=SPECTRA)
def many(request):
    spectrum = SPECTRA[request.param]
    matrix = hermitian(0, spectrum)
    found = on_many_keys(matrix, matrix @ matrix, KEYS)
    return request.param, *map(np.asarray, found)


@pytest.mark.slow
def test_is_as_accurate_as_asked(many):
    """With 95%. Less than 90% of 200 keys is 3.2 standard deviations away."""
    name, values, _, successful, low, high, _ = many
    exact = np.sum(np.sqrt(SPECTRA[name]))
    assert np.all(successful)
    assert np.mean(np.abs(values / exact - 1) <= 0.03) > 0.90
    assert np.mean((low <= exact) & (exact <= high)) > 0.90
    assert np.abs(np.mean(values) / exact - 1) < 3e-3


@pytest.mark.slow
def test_deflates_where_it_pays(many):
    """Blocks of 2 columns, 6 steps at a time, which count as 2 probes of 6 steps: not
    beyond the first 12 steps if the spectrum is flat. Others are in rounds of 8."""
    name, _, spent, *_ = many
    assert np.all((spent % 12 == 0) & (spent <= 64 * 6))
    if name == "flat":
        assert np.all(spent == 24 + 16 * 6)
    else:
        assert np.all(spent > 24 + 16 * 6)


@pytest.mark.slow
def test_derivatives_follow(many):
    """Unbiased, but for the error of Krylov spaces of 6 steps."""
    name, *_, slopes = many
    exact = np.sum(SPECTRA[name] ** 1.5) / 2
    assert z_score(slopes, exact) < 5 or np.isclose(np.mean(slopes), exact, rtol=2e-3)


@pytest.mark.slow
def test_products_are_as_few_as_published():
    """Chen and Hallman, arXiv 2205.01736, section 5: eigenvalues i^-1.5, n = 2500, error
    below 2^-p of the trace with 95%. The numbers of products are from their stored
    results, with 50 steps for each probe; 20 are enough."""
    eigenvalues = np.arange(1.0, 2501.0) ** -1.5
    structure = jax.ShapeDtypeStruct((2500,), float)
    operator = lx.FunctionLinearOperator(lambda v: eigenvalues * v, structure, PSD)

    @jax.jit
    def run(rtol, keys):
        k = tx.Adaptive(rtol=rtol, max_k=32, round_size=8, min_samples=8)

        def one(key):
            settings = {"k": k, "num_steps": 20, "key": key, "throw": False}
            solution = tx.trace_of_function(
                operator, tx.Power(0.5), ESTIMATOR, **settings
            )
            return solution.value, solution.stats["num_matvecs"]

        return jax.lax.map(one, keys)

    for p, published in ((2, 266), (3, 335), (4, 479), (5, 747)):
        values, spent = map(np.asarray, run(2.0**-p, jr.split(jr.key(p), 2)))
        assert np.mean(spent) < published
        assert np.all(np.abs(values / 24.844400003368424 - 1) < 2.0**-p)


@pytest.mark.slow
def test_history_counts_deflation_and_a_state_keeps_it():
    """A run that is resumed with a tighter tolerance and a larger budget goes on from the
    same deflated space: its products are of samples alone, and of those of one run."""
    matrix, seen, made = hermitian(0, SPECTRA["decaying"]), [], []

    def mv(vector):
        jax.debug.callback(lambda _: made.append(1), vector[0])
        return matrix @ vector

    operator = lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), float), PSD)

    def call(k, state=None):
        made.clear()
        settings = {"num_steps": 6, "key": jr.key(1), "state": state, "throw": False}
        solution = tx.trace_of_function(
            operator, tx.Power(0.5), ESTIMATOR, k=k, **settings
        )
        jax.effects_barrier()
        return solution, int(solution.stats["num_matvecs"]), len(made)

    extra = {"history": True, "callback": lambda spent, *_: seen.append(int(spent))}
    first, spent, products = call(budget(**extra))
    assert spent == products
    history = np.asarray(first.stats["history"])[:, 0]
    assert [x for x in history if np.isfinite(x)] == seen
    assert seen[-1] * 6 == spent
    resumed, total, more = call(budget(rtol=0.003, max_k=80), first.state)
    assert total - spent == more > 0
    assert resumed.std_err < first.std_err
    samples = np.asarray(first.stats["samples"])
    samples = samples[np.isfinite(samples)]
    assert np.array_equal(resumed.stats["samples"][: len(samples)], samples)


@pytest.mark.slow
def test_meshes(many):
    name, values, spent, *_ = many
    settings = {"k": budget(), "execution": tx.Sharded(tx.probe_mesh())}
    found = solve(hermitian(0, SPECTRA[name]), KEYS[0], **settings)
    assert np.isclose(found.value, values[0], rtol=1e-12)
    assert found.stats["num_matvecs"] == spent[0]


@eqx.filter_jit
def with_block(matrix, block, k, num_steps):
    """By 64 keys: value, bar, interval and the number of products."""
    estimator = tx.KrylovAwareEstimator(block=block)

    def one(key):
        found = solve(matrix, key, k, num_steps, estimator=estimator)
        products = found.stats["num_matvecs"]
        return found.value, found.std_err, *found.interval(), products

    return jax.lax.map(one, jr.split(jr.key(3), 64))


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, (1, 20), (2, 9)], ids=str)
def test_all_blocks_but_the_last_are_deflated(block):
    """Twelve eigenvalues above a multiple of the identity take 13 columns. Half of the 20
    steps of k=6 would be too few of them."""
    spectrum = np.append(np.linspace(1, 2, 12), np.full(N - 12, 0.01))
    found = with_block(hermitian(0, spectrum), block, 6, 10)
    values, std_errs, _, _, products = map(np.asarray, found)
    assert np.allclose(values, np.sum(np.sqrt(spectrum)), rtol=1e-9)
    assert np.all(std_errs < 1e-9)
    assert np.all(products == (60 if block is None else block[0] * block[1] + 60))


@pytest.mark.slow
def test_few_vectors_and_many_steps():
    """60 products: unbiased to the error of quadrature, a third of the error of the
    default, and intervals that hold the truth, in 60 of 64 keys or more."""
    spectrum, errors = 0.8**INDEX, []
    matrix, exact = hermitian(0, spectrum), np.sum(np.sqrt(spectrum))
    for block, k, num_steps in (((3, 16), 4, 3), (None, 6, 10)):
        found = with_block(matrix, block, k, num_steps)
        values, _, low, high, products = map(np.asarray, found)
        assert np.all(products == 60)
        assert np.sum((low <= exact) & (exact <= high)) >= 60
        errors.append(np.sqrt(np.mean((values / exact - 1) ** 2)))
    assert errors[0] < errors[1] / 3


@pytest.mark.slow
def test_deflates_as_much_at_any_scale():
    """In float32, where squares of the values are no numbers of it."""

    @jax.jit
    def products(matrix):
        operator = matrix_free(matrix, PSD)
        settings = {"k": budget(rtol=3e-3, round_size=4), "num_steps": 6, "key": KEYS[0]}
        found = tx.trace_of_function(operator, tx.Power(1.5), ESTIMATOR, **settings)
        return found.stats["num_matvecs"]

    matrix = hermitian(0, SPECTRA["decaying"])
    unscaled, *others = (
        products((scale * matrix).astype(np.float32)) for scale in (1.0, 1e-15, 1e14)
    )
    assert others == [unscaled, unscaled]


@pytest.mark.slow
def test_tolerances_are_of_the_whole_log_determinant():
    """And not of what a preconditioner leaves of it: as for the same absolute one."""
    matrix = hermitian(0, 0.01 + 2 * 0.8**INDEX)
    operator = matrix_free(matrix, PSD)
    outer = tx.nystrom_preconditioner(operator, 10, key=KEYS[1], shift=0.01)
    settings = {"num_steps": 8, "key": KEYS[0], "preconditioner": outer}
    exact = np.linalg.slogdet(matrix)[1]
    counts = [
        tx.logdet(operator, ESTIMATOR, k=budget(**tolerance), **settings).stats[
            "num_matvecs"
        ]
        for tolerance in ({"rtol": 0.01}, {"rtol": 0.0, "atol": 0.01 * abs(exact)})
    ]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_block_with_more_vectors_than_rows():
    estimator = tx.KrylovAwareEstimator(block=(9, 2))
    found = solve(np.diag(np.arange(1.0, 6)), jr.key(0), 3, 2, estimator=estimator)
    assert np.isclose(found.value, np.sum(np.sqrt(np.arange(1.0, 6))), rtol=1e-12)


@pytest.mark.slow
def test_a_block_is_deflated_before_an_adaptive_budget():
    matrix = hermitian(0, SPECTRA["decaying"])
    estimator = tx.KrylovAwareEstimator(block=(2, 12))
    found = solve(matrix, jr.key(4), budget(), estimator=estimator)
    assert found.result == tx.RESULTS.successful
    exact = np.sum(np.sqrt(SPECTRA["decaying"]))
    assert abs(found.value / exact - 1) < 0.03
    assert (found.stats["num_matvecs"] - 24) % 48 == 0


BRACKETED = {
    "log": (tx.Log(), np.log),
    "inverse": (tx.Inverse(), lambda x: 1 / x),
    "sqrt": (tx.Power(0.5), np.sqrt),
    "power": (tx.Power(1.5), lambda x: x**1.5),
    "entropy": (tx.Entropy(), lambda x: -x * np.log(x)),
}


@jax.jit
def brackets_of_deflated(matrix, start, lower, steps, kept):
    """By the names of all functions: the deflated basis, and the bracket."""
    eps, most = 2.0**-52, 8
    state = block_lanczos_start(start, most, eps=eps)
    state = block_lanczos_advance(lambda x: matrix @ x, state, 0, steps, eps=eps)
    run = block_lanczos_run(state, steps)
    width = most * start.shape[1]

    def one(function):
        deflation = Deflation.of(function, run, steps, kept, width, eps)
        return deflation.basis, deflation.bracket(function, lower)

    return {name: one(function) for name, (function, _) in BRACKETED.items()}


@pytest.mark.parametrize(("steps", "kept"), [(2, 1), (4, 3), (8, 4), (8, 7), (8, 8)])
def test_brackets_hold_however_many_blocks_are_deflated(steps, kept):
    """Of the trace over the deflated columns, in dense arithmetic."""
    matrix = hermitian(1, np.geomspace(0.05, 3, N))
    nodes, vectors = np.linalg.eigh(matrix)
    start = np.random.default_rng(0).standard_normal((N, 3))
    arguments = map(jnp.asarray, (matrix, start, 0.04, steps, kept))
    found = jax.device_get(brackets_of_deflated(*arguments))
    for name, (_, on_nodes) in BRACKETED.items():
        basis, (low, high) = found[name]
        dense = (vectors * on_nodes(nodes)) @ vectors.T
        exact = np.trace(basis.T @ dense @ basis)
        assert low < exact < high, name
