"""`Solution.interval`: how often the truth is inside, for every kind of call and steps
that are too few; that it is no wider than its bar where they are enough; its misuse.

References are from dense NumPy linear algebra in float64. Coverage is over 400 keys,
which are fixed: 93% of them are promised. What covers with probability 0.95 falls short
of that by chance in 3% of cases; what was measured is above 0.96 nearly everywhere.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, KEYS = 32, jr.split(jr.key(20261122), 400)
SUCCESSFUL = tx.RESULTS.successful
SLQ, DEFLATED = tx.SLQEstimator(), tx.KrylovAwareEstimator()
EXP = tx.Exp(np.asarray(1.0))
INDICES = np.arange(1, N + 1)
POSITIVE = {
    "even": np.linspace(1, 3, N),
    "condition 1e4": np.geomspace(1, 1e4, N) / 1e3,
    "kernel": 100 * np.exp(-0.5 * INDICES) + 1e-3,
    "power": INDICES**-2.0,
}
SYMMETRIC = {
    "both signs": np.linspace(-2, 2, N),
    "outliers": np.append(np.linspace(-0.3, 0.3, N - 3), [-5, 4, 7]),
    "condition 1e2": np.geomspace(0.1, 10, N),
}


def wave(x):
    return jnp.cos(5 * x)


def solved(call, matrix, keys=KEYS):
    """Both ends for each key, whether it was successful, the error bar and the value."""
    return jax.tree.map(np.asarray, _solved(call, matrix, keys))


@eqx.filter_jit
def _solved(call, matrix, keys):
    def one(key):
        solution = call(matrix, key)
        ends = solution.interval()
        successful = solution.result == SUCCESSFUL
        return ends, successful, solution.std_err, solution.value

    return jax.lax.map(one, keys)


class Call(eqx.Module):
    """A public call that does not raise, with its settings."""

    fn: object = eqx.field(static=True)
    settings: dict
    tags: object = eqx.field(static=True, default=PSD)

    def __call__(self, matrix, key):
        operator = matrix_free(matrix, self.tags)
        return self.fn(operator, **self.settings, key=key, throw=False)


def of_function(function, estimator, num_steps, k=20):
    settings = {"function": function, "estimator": estimator, "num_steps": num_steps}
    return Call(tx.trace_of_function, settings | {"k": k})


def inside(ends, exact):
    low, high = (np.asarray(end, np.result_type(end, np.float64)) for end in ends)
    return (low <= exact) & (exact <= high)


def check_width(ends, std_err, value, exact, spectrum):
    """Finite, and the bar no more than three times the spread of the values, beside ten
    times what a roundoff of the largest eigenvalue changes where it is added to each."""
    roundoff = float(jnp.finfo(value.dtype).eps) * np.max(np.abs(spectrum))
    change = np.sum(np.abs(exact(spectrum + roundoff) - exact(spectrum)))
    rms, spread = np.sqrt(np.mean(std_err**2)), np.std(value, dtype=np.float64)
    assert np.all(np.isfinite(ends))
    assert rms <= 3 * spread + 10 * change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "exact", "estimator", "num_steps", "dtype"),
    [
        *((tx.Log(), np.log, SLQ, steps, np.float64) for steps in (5, 10)),
        (tx.Log(), np.log, SLQ, 20, np.float32),
        (tx.Inverse(), np.reciprocal, SLQ, 5, np.float32),
        (tx.Power(0.5), np.sqrt, SLQ, 10, np.float32),
        (tx.Power(2.5), lambda x: x**2.5, SLQ, 5, np.float64),
        (tx.Log(), np.log, DEFLATED, 5, np.float32),
    ],
)
def test_covers_on_the_positive_numbers(function, exact, estimator, num_steps, dtype):
    call = of_function(function, estimator, num_steps)
    for name, spectrum in POSITIVE.items():
        matrix = hermitian(0, spectrum, dtype)
        eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
        ends, successful, std_err, value = solved(call, matrix)
        assert np.mean(inside(ends, np.sum(exact(eigenvalues)))) >= 0.93, name
        assert np.all(successful), name
        check_width(ends, std_err, value, exact, eigenvalues)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "exact", "estimator", "num_steps"),
    [
        (EXP, np.exp, SLQ, 5),
        (wave, lambda x: np.cos(5 * x), SLQ, 5),
        (jnp.abs, np.abs, SLQ, 10),
        (EXP, np.exp, DEFLATED, 3),
    ],
)
def test_covers_without_a_bracket(function, exact, estimator, num_steps):
    """No bound is known for these; as few steps as there can be trouble with."""
    call = of_function(function, estimator, num_steps)
    for name, spectrum in SYMMETRIC.items():
        ends, successful, std_err, value = solved(call, hermitian(1, spectrum))
        assert np.mean(inside(ends, np.sum(exact(spectrum)))) >= 0.93, name
        assert np.all(successful), name
        check_width(ends, std_err, value, exact, spectrum)


@pytest.mark.slow
def test_covers_where_one_eigenvalue_is_left():
    """Four samples of a form of rank one do not show their spread: by it alone, 92% are
    covered."""
    call = of_function(EXP, DEFLATED, 4, k=6)
    spectrum = np.append(np.linspace(1, 2, 6), np.linspace(0.01, 0.02, 94))
    keys = jr.split(jr.key(0), 1600)
    ends, successful, *_ = solved(call, hermitian(1, spectrum), keys)
    assert np.mean(inside(ends, np.sum(np.exp(spectrum)))) >= 0.95
    assert np.all(successful)


@pytest.mark.slow
def test_covers_where_rounding_is_all_of_the_error():
    """One small eigenvalue, which is deflated: a single draw of how rounding moves it may
    be close to zero by chance."""
    matrix = hermitian(0, np.append(np.ones(19), 1e-5), np.float32)
    exact = np.linalg.slogdet(matrix.astype(np.float64))[1]
    call = of_function(tx.Log(), DEFLATED, 6, k=12)
    ends, successful, std_err, value = solved(call, matrix)
    assert np.mean(inside(ends, exact)) >= 0.95
    assert np.all(successful)
    assert np.sqrt(np.mean(std_err**2)) <= 3 * np.std(value, dtype=np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "exact", "num_steps", "spectrum"),
    [
        (tx.Log(), np.log, 10, POSITIVE["even"]),
        (EXP, np.exp, 5, SYMMETRIC["both signs"]),
        (wave, lambda x: np.cos(5 * x), 20, SYMMETRIC["condition 1e2"]),
    ],
)
def test_no_wider_than_needed(function, exact, num_steps, spectrum):
    """With so many steps the quadrature is exact: the interval is that of the bar."""
    call = of_function(function, SLQ, num_steps)
    ends, successful, std_err, _ = solved(call, hermitian(1, spectrum))
    half = stats.t.ppf(0.975, 19) * std_err
    assert np.allclose((ends[1] - ends[0]) / 2, half, rtol=5e-3)
    assert np.mean(inside(ends, np.sum(exact(spectrum)))) >= 0.93
    assert np.all(successful)


def general():
    left, right = (hermitian(seed, INDICES) for seed in (2, 3))
    left, right = np.linalg.qr(left)[0], np.linalg.qr(right)[0]
    return (left * np.geomspace(0.1, 10, N)) @ right


SETTINGS = {"k": 10, "num_steps": 5}


def preconditioned(operator, **settings):
    """By one that is made with a key of its own."""
    by = {"key": jr.key(5), "shift": 1e-3, "throw": False}
    made = tx.nystrom_preconditioner(operator, 10, **by)
    return tx.logdet(operator, preconditioner=made, **settings)


OTHERS = {
    "preconditioned": (
        Call(preconditioned, {"k": 10, "num_steps": 3}),
        hermitian(0, POSITIVE["kernel"]),
        np.sum(np.log(POSITIVE["kernel"])),
    ),
    "general": (
        Call(tx.logdet, SETTINGS, ()),
        general(),
        np.linalg.slogdet(general())[1],
    ),
    "nuclear norm": (
        Call(tx.schatten_norm, SETTINGS | {"p": 1}, ()),
        general(),
        np.linalg.norm(general(), "nuc"),
    ),
    "Schatten 6-norm": (
        Call(tx.schatten_norm, {"k": 10, "num_steps": 2, "p": 6}, ()),
        general(),
        np.sum(np.linalg.svd(general())[1] ** 6) ** (1 / 6),
    ),
    "trace": (
        Call(tx.trace, {"k": 20, "estimator": tx.XTraceEstimator()}),
        hermitian(0, POSITIVE["power"]),
        np.sum(POSITIVE["power"]),
    ),
    "complex trace": (
        Call(tx.trace, {"k": 10, "estimator": tx.HutchinsonEstimator()}, ()),
        general() + 1j * hermitian(5, POSITIVE["even"]),
        np.trace(general() + 1j * hermitian(5, POSITIVE["even"])),
    ),
    "diagonal": (
        Call(tx.diagonal, {"k": 10, "estimator": tx.HutchinsonEstimator()}),
        hermitian(0, POSITIVE["even"]),
        np.diag(hermitian(0, POSITIVE["even"])),
    ),
    "adaptive": (
        Call(tx.logdet, {"k": tx.Adaptive(rtol=0.05, max_k=32), "num_steps": 5}),
        hermitian(0, POSITIVE["even"]),
        np.sum(np.log(POSITIVE["even"])),
    ),
}


@pytest.mark.slow(but=("trace", "diagonal"))
@pytest.mark.parametrize("name", OTHERS)
def test_covers_in_every_call(name):
    """Complex values are inside where their real and their imaginary part are; of a
    diagonal what is counted is the mean over entries."""
    call, matrix, truth = OTHERS[name]
    (low, high), *_ = solved(call, matrix)
    covered = inside((low.real, high.real), truth.real)
    covered &= inside((low.imag, high.imag), truth.imag)
    assert np.mean(covered) >= 0.93
    assert np.all(np.isfinite(high - low))
    assert low.shape == high.shape == (len(KEYS), *np.shape(truth))


@pytest.mark.slow
def test_exact_answers_count_rounding():
    for dtype in (np.float32, np.float64):
        matrix = hermitian(0, POSITIVE["condition 1e4"], dtype)
        spectrum = np.linalg.eigvalsh(matrix.astype(np.float64))
        call = of_function(tx.Log(), SLQ, 5, k=N)
        (low, high), _, std_err, _ = solved(call, matrix, KEYS[:12])
        assert np.all(inside((low, high), np.sum(np.log(spectrum))))
        assert np.all((std_err == 0) & (high - low < 10 * 1e4 * jnp.finfo(dtype).eps))


def test_one_sample_tells_nothing():
    operator = matrix_free(hermitian(0, POSITIVE["even"]), PSD)
    solution = tx.logdet(operator, k=1, num_steps=5, key=jr.key(0))
    assert solution.interval() == (-jnp.inf, jnp.inf)


@pytest.mark.slow
def test_transformations_of_the_call():
    """Compiled with a traced confidence, batched, and on a mesh."""
    operator = lx.MatrixLinearOperator(hermitian(0, POSITIVE["kernel"]), PSD)

    def ends(key, confidence, execution=tx.Local()):
        settings = {"k": 8, "num_steps": 5, "key": key, "execution": execution}
        return tx.logdet(operator, **settings).interval(confidence)

    expected = np.stack([ends(key, 0.9) for key in KEYS[:3]])
    batched = jax.jit(jax.vmap(ends, in_axes=(0, None)))(KEYS[:3], 0.9)
    assert np.allclose(np.stack(batched, 1), expected, rtol=1e-10)
    on_mesh = ends(KEYS[0], 0.9, tx.Sharded(tx.probe_mesh()))
    assert np.allclose(np.stack(on_mesh), expected[0], rtol=1e-10)

    @jax.jit
    @jax.vmap
    def solve(key):
        return tx.logdet(operator, k=8, num_steps=5, key=key)

    solutions = solve(KEYS[:3])
    one_by_one = jax.vmap(lambda solution: solution.interval(0.9))(solutions)
    assert np.allclose(np.stack(one_by_one, 1), expected, rtol=1e-10)
    with pytest.raises(ValueError, match=r"batch of solutions.*jax\.vmap"):
        solutions.interval(0.9)
    wide, narrow = ends(KEYS[0], 0.999), ends(KEYS[0], 0.1)
    assert wide[0] < expected[0, 0] < narrow[0] < narrow[1] < expected[0, 1] < wide[1]


@pytest.mark.slow
def test_it_has_no_derivative():
    def low(scale):
        operator = matrix_free(scale * hermitian(0, POSITIVE["even"]), PSD)
        return tx.logdet(operator, k=8, num_steps=5, key=jr.key(0)).interval()[0]

    assert jax.grad(low)(2.0) == 0


@pytest.mark.parametrize("confidence", [0, 1, 95, -0.5, np.nan, np.full(2, 0.9)])
def test_confidence_must_be_a_probability(confidence):
    solution = tx.trace(lx.DiagonalLinearOperator(jnp.ones(3)), k=3)
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        solution.interval(confidence)


@pytest.mark.parametrize("confidence", ["0.9", None, True, [0.9]])
def test_confidence_must_be_a_number(confidence):
    solution = tx.trace(lx.DiagonalLinearOperator(jnp.ones(3)), k=3)
    with pytest.raises(TypeError, match="`confidence` must be a number"):
        solution.interval(confidence)


def test_traced_confidence_is_checked():
    solution = tx.trace(lx.DiagonalLinearOperator(jnp.ones(3)), k=3)
    with pytest.raises(RuntimeError, match="`confidence` must be between 0 and 1"):
        eqx.filter_jit(solution.interval)(jnp.asarray(1.5))


@jax.jit
def exponential_of(matrix, rate):
    settings = {"k": 8, "num_steps": 3, "key": jr.key(0), "throw": False}
    solution = tx.trace_of_function(matrix_free(matrix, PSD), tx.Exp(rate), **settings)
    return solution.interval()


@pytest.mark.slow
def test_quadrature_errors_do_not_vanish_at_any_scale():
    """Squares of the couplings underflow or overflow in float32. But for rounding errors
    the interval is the same, and it is no wider than the values in [0, 1] allow."""
    values, found = np.linspace(0, 60, N), []
    for scale in (1, 1e-25, 1e25):
        matrix = jnp.asarray(hermitian(0, scale * values), jnp.float32)
        low, high = exponential_of(matrix, jnp.float32(-1 / scale))
        assert low <= np.sum(np.exp(-values)) <= high
        assert high - low < N
        found.append((low, high))
    assert np.allclose(found[1:], found[0], rtol=0, atol=1e-3)


def test_confidence_that_rounds_to_one():
    with jax.enable_x64(False):
        solution = tx.trace(lx.DiagonalLinearOperator(jnp.ones(3)), k=3)
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            solution.interval(0.999999998)


@pytest.mark.slow
def test_infinite_slope_of_an_exact_answer():
    """Rounding may change the root of the eigenvalue 0 by an unknown amount."""
    operator = matrix_free(np.diag([0.0, 1.0, 4.0]), PSD)
    solution = tx.trace_of_function(operator, jnp.sqrt, k=3, num_steps=3)
    low, high = solution.interval()
    assert low <= 3 <= high
