"""Steps of the Krylov method that the data choose."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._core.sampler import draw_for
from traceax._operators.door import flatten
from traceax._quadrature.convergence import Convergence, SEEN_BY_ONE
from traceax._quadrature.singular_functions import SingularLog

from ..helpers import hermitian


N, K, KEY = 64, 10, jr.key(0)
PSD = lx.positive_semidefinite_tag
SPECTRA = {
    "condition 4": np.linspace(1.0, 4.0, N),
    "condition 1e3": np.geomspace(1.0, 1e3, N),
    "two clusters": np.repeat([1.0, 100.0], N // 2),
    "decaying": 1e-2 + 0.8 ** np.arange(1, N + 1),
}


@eqx.filter_jit
def log_det(matrix, key, num_steps, *, k=K, tags=PSD, dtype=None, **settings):
    operator = lx.MatrixLinearOperator(matrix.astype(dtype or matrix.dtype), tags)
    settings |= {"k": k, "num_steps": num_steps, "key": key, "throw": False}
    return tx.logdet(operator, **settings)


@eqx.filter_jit
def trace_of(matrix, key, num_steps, function):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"k": K, "num_steps": num_steps, "key": key, "throw": False}
    return tx.trace_of_function(operator, function, **settings)


@eqx.filter_jit
def half_bracket(matrix, steps, method, function):
    """Of the first probe, by which steps are chosen, after any number of them; and
    whether an eigenvalue that it has not seen may be zero."""
    tags = lx.symmetric_tag if isinstance(method, tx.Lanczos) else ()
    flat = flatten(lx.MatrixLinearOperator(matrix, tags))
    probe = draw_for(flat, tx.RademacherSampler(), KEY, jnp.zeros(1, int))[:, 0]
    form = method.form(flat, probe, function, N, None, 1, steps)
    low, high = form.bracket
    return (high - low) / 2, Convergence.of(form).may_be_singular(SEEN_BY_ONE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tags", "method", "function"),
    [(PSD, tx.Lanczos(), tx.Log()), ((), tx.GolubKahan(), SingularLog())],
    ids=["Lanczos", "GolubKahan"],
)
@pytest.mark.parametrize("name", SPECTRA)
def test_half_the_bracket_is_a_share_of_the_error(name, tags, method, function):
    """And a quarter less steps would not have been enough, beyond the least number."""
    matrix = hermitian(0, SPECTRA[name])
    solution = log_det(matrix, KEY, tx.AdaptiveSteps(max_steps=64), tags=tags)
    steps = np.asarray(solution.stats["num_steps"])
    products = (K + 1) * steps * method.products_per_step
    assert solution.stats["num_matvecs"] == products
    assert solution.result == tx.RESULTS.successful
    # The error that the first probe expects is within a factor of the one that came out.
    half, may_be_singular = half_bracket(matrix, steps, method, function)
    assert half <= 0.1 * 3 * solution.std_err
    assert not may_be_singular
    if steps > 4:
        fewer = steps - max(4, steps // 4)
        half, may_be_singular = half_bracket(matrix, fewer, method, function)
        assert half > 0.1 / 3 * solution.std_err or may_be_singular


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "estimator"),
    [
        (np.complex128, tx.SLQEstimator()),
        (np.float64, tx.SLQEstimator(krylov=tx.Lanczos(window=0))),
        (np.float64, tx.KrylovAwareEstimator(block=(2, 4))),
    ],
    ids=["complex128", "window=0", "deflated"],
)
@pytest.mark.usefixtures("without_exact_answers")
def test_value_is_that_of_as_many_steps(dtype, estimator):
    matrix = hermitian(1, SPECTRA["condition 1e3"], dtype)

    def value(scale, num_steps):
        settings = {"k": 4, "num_steps": num_steps, "key": KEY, "throw": False}
        operator = lx.MatrixLinearOperator(scale * matrix, PSD)
        solution = tx.logdet(operator, estimator, **settings)
        return solution.value, solution.stats

    slope = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=1)
    adaptive = tx.AdaptiveSteps(max_steps=40)
    (found, stats), found_slope = slope(1.5, adaptive)
    (exact, _), exact_slope = slope(1.5, int(stats["num_steps"]))
    # Without reorthogonalisation rounding errors are amplified.
    plain = isinstance(estimator, tx.SLQEstimator) and estimator.krylov is not None
    rtol = 1e-5 if plain else 1e-9
    assert 4 < stats["num_steps"] < 40
    assert np.isclose(found, exact, rtol=rtol)
    assert np.isclose(found_slope, exact_slope, rtol=rtol)


def check(solution, exact):
    """Within four standard errors of the truth, none of more than 5% of it, with fewer
    steps than there could be."""
    assert solution.result == tx.RESULTS.successful
    assert abs(solution.value - exact) < 4 * solution.std_err < 4 * 0.05 * exact
    assert solution.stats["num_steps"] <= 21


@pytest.mark.slow(but="tanh")
@pytest.mark.parametrize("function", [tx.Power(0.5), jnp.tanh])
def test_functions(function):
    matrix = hermitian(2, SPECTRA["condition 4"])
    solution = trace_of(matrix, KEY, tx.AdaptiveSteps(), function)
    check(solution, np.sum(jax.jit(function)(SPECTRA["condition 4"])))


@pytest.mark.slow
def test_exponential_and_its_derivative():
    matrix = hermitian(3, SPECTRA["condition 4"])

    def value(scale, num_steps):
        solution = trace_of(matrix, KEY, num_steps, tx.Exp(scale))
        return solution.value, solution

    run = jax.jit(jax.grad(value, has_aux=True), static_argnums=1)
    for scale in (-0.1, -0.5):
        slope, solution = run(scale, tx.AdaptiveSteps())
        check(solution, np.sum(np.exp(scale * SPECTRA["condition 4"])))
    exact, _ = run(scale, int(solution.stats["num_steps"]))
    assert np.isclose(slope, exact, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-200, 1.0, 1e200])
def test_multiples_of_the_identity_take_the_least(scale):
    matrix = scale * np.eye(N)
    solution = trace_of(matrix, KEY, tx.AdaptiveSteps(), tx.Power(0.5))
    assert solution.stats["num_steps"] == 1
    assert np.isclose(solution.value, N * np.sqrt(scale), rtol=1e-5)


@pytest.mark.slow
def test_whole_call_reaches_the_tolerance():
    """40 keys, all within the tolerance but two: at 95% more than 6 would be outside of
    it in one of 300 runs."""
    spectrum = SPECTRA["condition 1e3"]
    matrix, k = hermitian(4, spectrum), tx.Adaptive(rtol=0.05, max_k=60)

    @jax.jit
    def over(keys):
        def one(key):
            solution = log_det(matrix, key, tx.AdaptiveSteps(), k=k)
            return solution.value, solution.result == tx.RESULTS.successful

        return jax.lax.map(one, keys)

    values, successful = map(np.asarray, over(jr.split(KEY, 40)))
    exact = np.sum(np.log(spectrum))
    assert np.all(successful)
    assert np.sum(np.abs(values / exact - 1) > 0.05) <= 6


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_too_few_steps_for_the_tolerance_are_told():
    matrix, k = hermitian(5, SPECTRA["condition 1e3"]), tx.Adaptive(rtol=0.02, max_k=60)
    settings = {"k": k, "preconditioner": None}
    solution = log_det(matrix, KEY, tx.AdaptiveSteps(max_steps=3), **settings)
    assert solution.stats["num_steps"] == 3
    assert solution.result == tx.RESULTS.too_few_steps


@pytest.mark.slow
def test_after_deflation():
    """Enough steps for the error of what is left. The bracket of what is deflated, which
    they do not narrow, takes none."""
    matrix = hermitian(4, SPECTRA["decaying"])
    estimator = tx.KrylovAwareEstimator(block=(2, 16))
    settings = {"k": tx.Adaptive(rtol=1e-3, max_k=40), "estimator": estimator}
    solution = log_det(matrix, KEY, tx.AdaptiveSteps(), **settings)
    steps = int(solution.stats["num_steps"])
    probes = np.sum(np.isfinite(solution.stats["samples"]))
    assert solution.result == tx.RESULTS.successful
    assert steps < 64
    assert solution.stats["num_matvecs"] == 2 * 16 + (probes + 1) * steps
    low, high = solution.interval()
    assert low <= np.sum(np.log(SPECTRA["decaying"])) <= high
    after = log_det(matrix, KEY, 2 * steps, **settings)
    narrower = np.ptp(solution.stats["bracket"]) - np.ptp(after.stats["bracket"])
    assert narrower / 2 <= 0.1 * 3 * 1e-3 * abs(solution.value)


@pytest.mark.slow
def test_before_deflation():
    """Without a block the first probe says how much to deflate: as for an estimate
    without deflation. Then as many steps are chosen as what is left takes."""
    matrix, steps = hermitian(4, SPECTRA["decaying"]), tx.AdaptiveSteps()
    undeflated = tx.SLQEstimator(tx.SphereSampler())
    first = log_det(matrix, KEY, steps, k=8, estimator=undeflated).stats["num_steps"]
    estimator = tx.KrylovAwareEstimator()
    solution = log_det(matrix, KEY, steps, k=8, estimator=estimator)
    then = solution.stats["num_steps"]
    deflated = 2 * min(2 * first, N // 2)
    assert solution.stats["num_matvecs"] == first + deflated + then + (8 - 2 * 2) * then
    low, high = solution.interval()
    assert low <= np.sum(np.log(SPECTRA["decaying"])) <= high


@pytest.mark.slow
def test_of_a_deflation_that_grows():
    """As with the number of steps that the first probe finds to be enough for the
    tolerance."""
    matrix = hermitian(4, SPECTRA["condition 1e3"])
    budget = tx.Adaptive(rtol=0.01, max_k=200, round_size=4)
    settings = {"k": budget, "estimator": tx.KrylovAwareEstimator()}
    solution = log_det(matrix, KEY, tx.AdaptiveSteps(), **settings)
    steps = int(solution.stats["num_steps"])
    told = log_det(matrix, KEY, steps, **settings)
    assert 1 < steps < 64
    assert solution.result == told.result == tx.RESULTS.successful
    assert np.isclose(solution.value, told.value, rtol=1e-10)
    assert solution.stats["num_matvecs"] == told.stats["num_matvecs"] + steps


@pytest.mark.slow
def test_on_a_mesh():
    matrix, mesh = hermitian(6, SPECTRA["condition 1e3"]), tx.probe_mesh()
    one = log_det(matrix, KEY, tx.AdaptiveSteps())
    other = log_det(matrix, KEY, tx.AdaptiveSteps(), execution=tx.Sharded(mesh))
    assert one.stats["num_steps"] == other.stats["num_steps"]
    assert np.isclose(one.value, other.value, rtol=1e-12)


@pytest.mark.slow
def test_vmap_over_operators():
    """All take what one of them needs."""
    matrices = np.stack([hermitian(7, SPECTRA[name]) for name in SPECTRA])
    steps = tx.AdaptiveSteps(max_steps=64)
    together = jax.vmap(lambda matrix: log_det(matrix, KEY, steps))(matrices)
    alone = [log_det(matrix, KEY, steps) for matrix in matrices]
    most = max(x.stats["num_steps"] for x in alone)
    assert np.all(together.stats["num_steps"] == most)
    assert most > min(x.stats["num_steps"] for x in alone)
    for i, matrix in enumerate(matrices):
        same = log_det(matrix, KEY, int(most))
        assert np.isclose(together.value[i], same.value, rtol=1e-9)


@pytest.mark.slow
def test_more_than_n_and_a_single_probe():
    matrix = hermitian(8, SPECTRA["condition 1e3"])
    solution = log_det(matrix, KEY, tx.AdaptiveSteps(max_steps=1000), k=1)
    assert solution.stats["num_steps"] <= N
    assert np.isinf(solution.std_err)


@pytest.mark.parametrize(
    ("call", "exception", "message"),
    [
        (lambda: tx.AdaptiveSteps(max_steps=0), ValueError, "`max_steps` must be at"),
        (lambda: tx.AdaptiveSteps(max_steps=2.0), TypeError, "`max_steps` must be an"),
        (lambda: tx.AdaptiveSteps(share=0), ValueError, "`share` must be positive"),
    ],
)
def test_misuse(call, exception, message):
    with pytest.raises(exception, match=message):
        call()
