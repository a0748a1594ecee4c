"""`log tr exp(s A)` in log space: against dense linear algebra in double precision, at
exponents that overflow, with bars in log units and derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
from scipy.special import logsumexp

import traceax as tx

from ..helpers import hermitian, matrix_free, z_score


N = 40
KEY = jr.key(0)
# Evenly spread, and with one that outweighs the others.
SPECTRA = {"flat": np.linspace(-1, 1, N), "gap": np.append(np.linspace(0, 1, N - 1), 2)}
every_spectrum = pytest.mark.parametrize("name", SPECTRA)


def estimate(matrix, scale, key=KEY, **settings):
    """With the scale as an argument of the program, and not a part of it."""
    return _estimate(matrix, jnp.asarray(scale), key, **settings)


@eqx.filter_jit
def _estimate(matrix, scale, key, *, k=6, num_steps=20, **settings):
    operator = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False} | settings
    return tx.log_trace_exp(operator, scale, **settings)


@eqx.filter_jit
def slopes_and_solution(matrix, scale, **settings):
    """Derivatives in the scale and in the matrix, and what they are of."""

    def value(scale, matrix):
        solution = estimate(matrix, scale, **settings)
        return solution.value, solution

    return jax.grad(value, (0, 1), has_aux=True)(scale, matrix)


def exact_of(name, scale):
    """The logarithm, and its derivatives in the scale and in the matrix."""
    values, matrix = SPECTRA[name], hermitian(0, SPECTRA[name])
    log = logsumexp(scale * values)
    weights = np.exp(scale * values - log)
    basis = np.linalg.eigh(matrix)[1]
    return log, weights @ values, (basis * (scale * weights)) @ basis.T


@pytest.mark.slow(but=("float32-*", "complex128-*"))
@every_spectrum
@pytest.mark.parametrize("scale", [0.0, -3.0, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_exact_budget(name, scale, dtype):
    matrix = hermitian(0, SPECTRA[name]).astype(dtype)
    if dtype == np.complex128:
        phases = np.exp(1j * np.arange(N))
        matrix = phases[:, None] * matrix * phases.conj()
    log, mean, slope = exact_of(name, scale)
    settings = {"k": N, "num_steps": 1}
    (along, slopes), solution = slopes_and_solution(matrix, np.asarray(scale), **settings)
    rounding = 20 * float(np.finfo(dtype).eps) * (1 + np.abs(scale))
    assert np.abs(solution.value - log) < rounding
    assert solution.std_err == solution.stats["quadrature_error"] == 0
    assert np.abs(along - mean) < rounding
    assert solution.result == tx.RESULTS.successful
    if dtype == np.float64:
        assert np.allclose(slopes, slope, atol=1e-9 * (1 + np.abs(scale)))


@jax.jit
def over_keys(matrix, direction, scale):
    """Over 200 keys: value, bar, error of the quadrature, derivatives in the scale and in
    the matrix along `direction`."""

    def one(key):
        def value(scale, t):
            moved = matrix + t * direction
            found = estimate(moved, scale, key, k=12, num_steps=25)
            return found.value, (found.std_err, found.stats["quadrature_error"])

        both = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
        (log, (bar, error)), slopes = both(scale, 0.0)
        return log, bar, error, *slopes

    return jax.lax.map(one, jr.split(jr.key(20261123), 200))


@pytest.mark.slow
@every_spectrum
@pytest.mark.parametrize("scale", [2.0, -50.0])
def test_bars_and_derivatives(name, scale):
    """A 95% interval covers at least 93% but for its own noise of 1.6%. The logarithm is
    biased by half its variance, and derivatives, which are quotients, by about the square
    of the relative error: beyond that a z-score above 4.5 has a chance below 1e-5."""
    matrix = hermitian(0, SPECTRA[name])
    log, mean, slope = exact_of(name, scale)
    direction = hermitian(1, np.linspace(-1, 1, N))
    found = map(np.asarray, over_keys(matrix, direction, scale))
    values, bars, errors, means, slopes = found
    covered = np.abs(values - log) <= 2.2 * bars + errors
    assert np.mean(covered) >= 0.93 - 0.016
    spread = np.std(values)
    assert np.mean(np.minimum(bars, 2)) > 0.85 * spread
    for samples, exact in (
        (values, log),
        (means, mean),
        (slopes, np.sum(slope * direction)),
    ):
        allowed = spread**2 * max(1.0, np.std(samples) / spread)
        distance = np.abs(np.mean(samples) - exact)
        assert distance < allowed + 4.5 * np.std(samples) / 200**0.5


@pytest.mark.slow
def test_derivatives_have_no_bias_of_first_order():
    """Six samples of one large eigenvalue: the derivative of the logarithm of their mean
    is 4% below the mean energy. Over 2000 keys a bias has a spread of 0.3%."""
    spectrum = np.append(np.linspace(0, 2, N - 1), 6)
    matrix, weights = hermitian(1, spectrum), np.exp(spectrum)

    @jax.jit
    def means(matrix, keys):
        def value(scale, key):
            return estimate(matrix, scale, key, k=6, num_steps=12).value

        return jax.lax.map(lambda key: jax.grad(value)(1.0, key), keys, batch_size=50)

    found = np.mean(means(matrix, jr.split(jr.key(20261127), 2000)))
    assert np.abs(found / (np.sum(spectrum * weights) / np.sum(weights)) - 1) < 0.02


def exact_samples(matrix, scale):
    """Logarithms of `z* exp(scale A) z` for the first six probes of KEY."""
    probes = eqx.filter_jit(tx.RademacherSampler())(KEY, N, 6)
    values, vectors = np.linalg.eigh(matrix.astype(np.float64))
    weights = (vectors.T @ np.asarray(probes)) ** 2
    return logsumexp(scale * values[:, None], b=weights, axis=0)


@pytest.mark.slow
def test_quadrature_error_is_seen():
    """With too few steps, where the logarithm of each sample is too small."""
    matrix = hermitian(0, SPECTRA["flat"])
    exact = exact_samples(matrix, 100.0)
    for num_steps in (1, 12):
        solution = estimate(matrix, 100.0, num_steps=num_steps)
        samples = np.asarray(solution.stats["samples"])
        assert np.all(samples <= exact + 1e-9)
        error = logsumexp(exact) - np.log(6) - float(solution.value)
        assert error <= float(solution.stats["quadrature_error"]) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [8, 16])
def test_quadrature_error_where_each_step_gains_little(num_steps):
    """Of eigenvalues down to -1 and an exponent of 1000, by 20 keys."""
    eigenvalues = jnp.linspace(-1, 0, 2000)
    operator = lx.DiagonalLinearOperator(eigenvalues)
    estimator = tx.SLQEstimator(tx.SphereSampler())
    settings = {"k": 10, "num_steps": num_steps, "estimator": estimator}

    def interval(key):
        return tx.log_trace_exp(
            operator, 1e3, key=key, throw=False, **settings
        ).interval()

    low, high = jax.jit(lambda keys: jax.lax.map(interval, keys))(jr.split(KEY, 20))
    exact = logsumexp(1e3 * eigenvalues)
    assert np.all((low <= exact) & (exact <= high))


STEPS = tx.AdaptiveSteps(max_steps=30)


@pytest.mark.slow
def test_steps_chosen_by_the_data():
    """As many as make the quadrature error small beside the bar: more for larger
    exponents. Value and derivatives are those of as many steps."""
    matrix = hermitian(0, SPECTRA["flat"])
    chosen = []
    for scale in map(np.asarray, (0.0, 1.0, 20.0, 200.0)):
        slopes, found = slopes_and_solution(matrix, scale, num_steps=STEPS)
        steps = int(found.stats["num_steps"])
        assert found.result == tx.RESULTS.successful
        assert found.stats["num_matvecs"] == 7 * steps
        error = float(found.stats["quadrature_error"])
        assert error <= max(0.4 * float(found.std_err), 1e-12)
        chosen.append(steps)
    assert chosen == sorted(chosen)
    assert chosen[1] == 4 < chosen[-1] < 30
    others, fixed = slopes_and_solution(matrix, scale, num_steps=steps)
    for one, other in zip(slopes, others, strict=True):
        assert np.allclose(one, other, rtol=1e-8, atol=1e-10)
    assert np.allclose(found.value, fixed.value, rtol=1e-12)
    assert np.allclose(fixed.stats["quadrature_error"], error, atol=1e-10)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    left_out = tx.log_trace_exp(operator, 200.0, k=6, key=KEY)
    assert np.allclose(left_out.value, found.value, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_tolerance_and_too_few_steps():
    matrix, k = hermitian(0, SPECTRA["flat"]), tx.Adaptive(atol=1.0, max_k=36)
    found = estimate(matrix, 5.0, k=k, num_steps=STEPS)
    assert found.result == tx.RESULTS.successful
    few = tx.AdaptiveSteps(max_steps=1)
    found = estimate(matrix, 5.0, k=k, num_steps=few)
    assert found.result == tx.RESULTS.too_few_steps


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e4, -1e4, 3e30])
def test_large_exponents_in_float32(scale):
    """Where their exponentials are beyond the dtype: for the probes at hand, but for
    rounding of the eigenvalue that is left."""
    matrix = hermitian(0, SPECTRA["gap"]).astype(np.float32)
    scale = np.float32(scale)
    _, mean, _ = exact_of("gap", float(scale))
    exact = logsumexp(exact_samples(matrix, float(scale))) - np.log(6)
    (slope, slopes), found = slopes_and_solution(matrix, scale, num_steps=N)
    assert found.value.dtype == np.float32
    assert found.result == tx.RESULTS.successful
    rounding = 20 * float(np.finfo(np.float32).eps) * (1 + np.abs(scale))
    assert np.abs(found.value - exact) < rounding
    assert np.abs(slope - mean) < 1e-3
    assert np.abs(np.trace(slopes) / scale - 1) < 1e-3


@pytest.mark.slow
def test_known_answers():
    """Operators with few distinct eigenvalues, where nothing is left to sampling, or to
    the quadrature."""
    zero = estimate(np.zeros((N, N)), 5.0)
    assert np.allclose(zero.value, np.log(N))
    assert zero.std_err < 1e-12
    shifted = estimate(-3 * np.eye(N), 700.0)
    assert np.allclose(shifted.value, np.log(N) - 2100)
    assert shifted.stats["quadrature_error"] == 0
    unscaled = estimate(hermitian(0, SPECTRA["gap"]), 0.0, num_steps=1)
    assert np.allclose(unscaled.value, np.log(N))
    single = estimate(hermitian(0, SPECTRA["gap"]), 1.0, k=1)
    assert np.isinf(single.std_err)
    # One sample is the logarithm of a quadratic form of n signs: between n times the
    # smallest and n times the largest eigenvalue of the exponential.
    spectrum = SPECTRA["gap"]
    assert np.log(N) + np.min(spectrum) <= single.value <= np.log(N) + np.max(spectrum)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "window"), [(tx.NormalSampler(), None), (tx.RademacherSampler(), 0)]
)
def test_agrees_with_the_trace(sampler, window):
    matrix = hermitian(0, SPECTRA["flat"])
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    estimator = tx.SLQEstimator(sampler, tx.Lanczos(window))
    settings = {"k": 6, "num_steps": 20, "key": KEY}
    trace = tx.trace_of_function(operator, tx.Exp(2.0), estimator, **settings)
    found = estimate(matrix, 2.0, estimator=estimator)
    assert np.allclose(found.value, np.log(trace.value))
    assert np.allclose(found.stats["samples"], np.log(trace.stats["samples"]))
    relative = float(trace.std_err) / float(trace.value)
    assert np.allclose(found.std_err, -np.log1p(-relative), rtol=1e-6)


@pytest.mark.slow
def test_second_derivatives():
    """In the scale, of an adaptive budget too; refused in the operator. The first one is
    that of the logarithm without its bias."""
    matrix = hermitian(0, SPECTRA["flat"])
    value = lambda s, x, k=6: estimate(x, s, k=k).value  # noqa: E731
    both = eqx.filter_jit(jax.value_and_grad(jax.grad(value)))
    scale, step = np.asarray(2.0), 1e-4
    found = both(scale, matrix)

    def unbiased(s):
        solution = estimate(matrix, s, k=6)
        shares = np.exp(solution.stats["samples"] - solution.value)
        return solution.value + np.var(shares, ddof=1) / 12

    low, high = ((unbiased(s), both(s, matrix)[0]) for s in (scale - step, scale + step))
    assert np.allclose(found, np.subtract(high, low) / (2 * step), rtol=1e-5)
    adaptive = tx.Adaptive(atol=1e6, max_k=6, round_size=3, min_samples=6)
    assert np.allclose(both(scale, matrix, adaptive), found, rtol=1e-10)
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        jax.grad(lambda t: jax.grad(lambda s: value(1.0, s * matrix))(t))(1.0)


@pytest.mark.slow
def test_adaptive_and_mesh():
    """Probes are those of one device and a fixed budget."""
    matrix = hermitian(0, SPECTRA["flat"])
    adaptive = tx.Adaptive(atol=0.3, max_k=32, round_size=8, min_samples=4)
    (_, slopes), solution = slopes_and_solution(matrix, 5.0, k=adaptive)
    assert solution.result == tx.RESULTS.successful
    count = int(solution.stats["num_matvecs"]) // 20
    (_, others), fixed = slopes_and_solution(matrix, 5.0, k=count)
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:4]))
    sharded = estimate(matrix, 5.0, k=count, execution=execution)
    for other in (fixed, sharded):
        assert np.allclose(solution.value, other.value, rtol=1e-12)
        assert np.allclose(solution.std_err, other.std_err, rtol=1e-10)
    assert np.allclose(slopes, others, atol=1e-10)


@pytest.mark.slow
def test_interval_of_an_answer_that_became_exact():
    budget = tx.Adaptive(atol=1e-9, max_k=2 * N, round_size=8)
    solution = estimate(hermitian(0, SPECTRA["gap"]), 8.0, k=budget)
    log, *_ = exact_of("gap", 8.0)
    assert np.allclose(solution.interval(), log, rtol=1e-12)


@pytest.mark.slow
def test_vmap():
    """Over scales, from one run: the temperatures of a partition function."""
    matrix, scales = hermitian(0, SPECTRA["flat"]), np.array([0.5, 1.0, 40.0])
    together = jax.vmap(lambda s: estimate(matrix, s).value)(scales)
    one_by_one = [estimate(matrix, s).value for s in scales]
    assert np.allclose(together, one_by_one, rtol=1e-12)


@eqx.filter_jit
def untagged(matrix, scale, key, **settings):
    operator = lx.MatrixLinearOperator(matrix)
    settings = {"num_steps": 20, "key": key, "throw": False} | settings
    return tx.log_trace_exp(operator, jnp.asarray(scale), **settings)


@pytest.mark.slow(but="1000.0")
@pytest.mark.parametrize("scale", [-50.0, 1e3])
def test_untagged(scale):
    """Exponents that overflow in float32, with the same samples as with a tag."""
    matrix = hermitian(0, SPECTRA["flat"]).astype(np.float32)
    log, mean, slope = exact_of("flat", scale)
    rounding = 1e-5 * np.abs(scale)

    def value(scale, matrix):
        return untagged(matrix, scale, None, k=N).value

    assert np.abs(value(scale, matrix) - log) < rounding
    along, in_matrix = jax.grad(value, (0, 1))(jnp.float32(scale), matrix)
    assert np.isclose(along, mean, rtol=1e-3)
    assert np.allclose(in_matrix, slope, atol=1e-3 * np.abs(scale))
    for steps, error in ((36, rounding), (tx.AdaptiveSteps(), 0.1)):
        found = untagged(matrix, scale, KEY, k=12, num_steps=steps)
        tagged = estimate(matrix, scale, k=12, num_steps=36)
        assert found.result == tx.RESULTS.successful
        assert np.abs(found.value - tagged.value) < error
        ratio = np.subtract(*reversed(found.interval())) / np.subtract(
            *reversed(tagged.interval())
        )
        assert 0.7 < ratio < 1.4
        made = found.stats["num_steps"]
        assert found.stats["num_matvecs"] <= (12 + 3) * made


@pytest.mark.slow
def test_directed_graph():
    """Whose quadratic forms have either sign: intervals cover, where the estimate is
    positive; where it is not, the call says so."""
    generator = np.random.default_rng(4)
    matrix = (generator.random((60, 60)) < 0.2).astype(np.float64)
    true = np.log(np.trace(scipy.linalg.expm(3 * matrix)))
    budget = {"k": 40, "num_steps": 30}

    @jax.jit
    def over_keys(matrix, keys):
        def one(key):
            found = untagged(matrix, 3.0, key, **budget)
            return found.interval(), found.result == tx.RESULTS.successful

        return jax.lax.map(one, keys)

    (low, high), successful = over_keys(matrix, jr.split(KEY, 200))
    assert np.mean(successful) > 0.8
    inside = (low <= true) & (true <= high)
    assert np.mean(inside[successful]) > 0.93
    solutions = (untagged(matrix, 3.0, key, k=1) for key in jr.split(KEY, 40))
    failed = [each for each in solutions if not each.stats["samples"][0] > 0]
    assert failed
    assert all(each.result == tx.RESULTS.not_positive for each in failed)
    assert all(each.value == -np.inf for each in failed)


@pytest.mark.usefixtures("as_users_call")
def test_misuse():
    matrix = hermitian(0, SPECTRA["flat"])
    tagged, settings = matrix_free(matrix, lx.symmetric_tag), {"num_steps": 3, "key": KEY}
    for kind, part, operator, scale, k in (
        (ValueError, "`operator` must be Hermitian", matrix_free(matrix + 0j), 1.0, 3),
        (TypeError, "`scale` must be a real number", tagged, 1j, 3),
        (TypeError, "For several values", tagged, jnp.ones(2), 3),
        (TypeError, "`scale` must be a real number", tagged, "1", 3),
        (ValueError, "`k` must be at least 1", tagged, 1.0, 0),
    ):
        with pytest.raises(kind, match=part):
            tx.log_trace_exp(operator, scale, k=k, **settings)
    for kind, part, wrong in (
        (TypeError, "`estimator` must be an", tx.RademacherSampler()),
        (TypeError, "`estimator` must be an", tx.KrylovAwareEstimator()),
        (TypeError, "`estimator.krylov`", tx.SLQEstimator(krylov=tx.GolubKahan())),
    ):
        with pytest.raises(kind, match=part):
            tx.log_trace_exp(tagged, 1.0, wrong, k=3, **settings)


def test_samples_are_logarithms():
    """Whose exponentials are unbiased."""
    matrix = hermitian(0, SPECTRA["flat"])
    found = estimate(matrix, 1.0, k=39)
    samples = np.exp(np.asarray(found.stats["samples"]))
    assert z_score(samples, np.exp(exact_of("flat", 1.0)[0])) < 4.5
    assert np.allclose(np.mean(samples), np.exp(found.value))
