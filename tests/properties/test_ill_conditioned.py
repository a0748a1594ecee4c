"""Traces of functions of ill-conditioned and singular operators: what is successful is
right, and what cannot be known is flagged.

Right values are from NumPy in float64. Two promises are tested over spectra from
harmless to hopeless, 20 keys each: a successful call whose steps were left out is within
eight error bars; one whose steps were given is inside of the interval of 99.9%.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, rms


N, KEYS = 120, jr.split(jr.key(48), 20)
RESULTS = tx.RESULTS
POINTS = np.linspace(0, 1, N)


def eigenvalues_of_penalty(order, n=N):
    differences = np.diff(np.eye(n), order, axis=0)
    eigenvalues = np.linalg.eigvalsh(differences.T @ differences)
    return np.append(np.zeros(order), eigenvalues[order:])


KERNEL = np.linalg.eigvalsh(np.exp(-50 * (POINTS[:, None] - POINTS) ** 2)).clip(0)
EASY = {
    "even": np.linspace(1, 3, N),
    "condition 1e2": np.geomspace(1e-2, 1, N),
    "kernel": KERNEL + 1e-2,
    "one large": np.append(np.linspace(1, 2, N - 1), 1e4),
}
HARD = {
    "condition 1e4": np.geomspace(1e-4, 1, N),
    "condition 1e8": np.geomspace(1e-4, 1e4, N),
    "condition 1e12": np.geomspace(1e-12, 1, N),
    "small noise": KERNEL + 1e-6,
    "Laplacian": eigenvalues_of_penalty(1) + 1e-4,
    "penalty": eigenvalues_of_penalty(2) + 1e-6,
    "one small": np.append(np.linspace(1, 2, N - 1), 1e-8),
}
SINGULAR = {
    "singular Laplacian": eigenvalues_of_penalty(1),
    "singular penalty": eigenvalues_of_penalty(2),
    "one zero": np.append(np.linspace(1, 2, N - 1), 0),
    "condition 1e4 and a zero": np.append(np.geomspace(1e-4, 1, N - 1), 0),
    "state": np.append(np.zeros(N - 1), 1),
}
FUNCTIONS = {
    "log": (tx.Log(), np.log),
    "inverse": (tx.Inverse(), np.reciprocal),
    "inverse root": (tx.Power(-0.5), lambda x: x**-0.5),
    "shifted inverse": (tx.Inverse(1e-8), lambda x: 1 / (x + 1e-8)),
    "root": (tx.Power(0.5), np.sqrt),
    "entropy": (tx.Entropy(), lambda x: -x * np.log(np.where(x > 0, x, 1))),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


class Found(eqx.Module):
    """Of a solution: the interval is that of 99.9%."""

    value: jax.Array
    std_err: jax.Array
    ends: tuple[jax.Array, jax.Array]
    result: RESULTS
    stats: dict[str, jax.Array]

    @property
    def successful(self):
        return np.asarray(self.result == RESULTS.successful)

    def inside(self, exact):
        low, high = (np.asarray(end, np.float64) for end in self.ends)
        return (low <= exact) & (exact <= high)


def found(solution):
    ends = solution.interval(0.999)
    return Found(solution.value, solution.std_err, ends, solution.result, solution.stats)


@eqx.filter_jit
def solved(matrix, keys=KEYS, tags=PSD, **settings):
    def one(key):
        operator = matrix_free(matrix, tags)
        call = tx.trace_of_function if "function" in settings else tx.logdet
        return found(call(operator, **settings, key=key, throw=False))

    return jax.lax.map(one, keys)


def exact_sum(function, spectrum):
    with np.errstate(divide="ignore"):
        return np.sum(function(spectrum))


@pytest.mark.slow
@every_function
@pytest.mark.usefixtures("without_exact_answers")
def test_steps_that_are_left_out(name):
    function, exact = FUNCTIONS[name]
    settings = {"function": function, "k": 20, "num_steps": tx.AdaptiveSteps(60)}
    for case, spectrum in (EASY | HARD | SINGULAR).items():
        all_found = solved(hermitian(0, spectrum), **settings)
        right, successful = exact_sum(exact, spectrum), all_found.successful
        error = np.abs(all_found.value - right)
        near = error <= 8 * all_found.std_err + 1e-9 * np.abs(right)
        assert np.all(near | ~successful), case
        assert np.all(successful) or case not in EASY, case
        assert not np.any(successful) or np.isfinite(right), case


@pytest.mark.slow
@every_function
@pytest.mark.parametrize("num_steps", [6, 20])
def test_steps_that_are_given(name, num_steps):
    function, exact = FUNCTIONS[name]
    settings = {"function": function, "k": 20, "num_steps": num_steps}
    for case, spectrum in (EASY | HARD | SINGULAR).items():
        all_found = solved(hermitian(0, spectrum), **settings)
        right = exact_sum(exact, spectrum)
        assert np.all(all_found.inside(right) | ~all_found.successful), case
        assert np.all(all_found.successful) or case not in EASY, case


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_general_operators():
    """Log-determinants by singular values."""
    left, right = (np.linalg.qr(hermitian(seed, POINTS))[0] for seed in (2, 3))
    for case, spectrum in (EASY | HARD | SINGULAR).items():
        matrix, exact = (left * spectrum) @ right, exact_sum(np.log, spectrum)
        given = solved(matrix, tags=(), k=20, num_steps=20)
        assert np.all(given.inside(exact) | ~given.successful), case
        chosen = solved(matrix, tags=(), k=10, num_steps=tx.AdaptiveSteps(100))
        near = np.abs(chosen.value - exact) <= 8 * chosen.std_err
        assert np.all(near | ~chosen.successful), case
        assert np.all(chosen.successful) or case not in EASY, case


@pytest.mark.slow
def test_exact_answers_take_the_place_of_estimates():
    """The eigenvalues are those of the examples, n = 400."""
    spectrum = np.geomspace(1e-4, 1e4, 400)
    matrix = hermitian(0, spectrum)
    values = {
        tx.Inverse(): 221642.84198697,
        tx.Power(-0.5): 4381.85159045,
        tx.Log(): 0.0,
    }
    for function, right in values.items():
        one = solved(matrix, KEYS[:2], function=function, k=20)
        assert np.all(one.successful)
        assert np.all(one.stats["exact"])
        assert np.allclose(one.value, right, rtol=1e-8, atol=1e-6)
        assert np.all(one.stats["num_matvecs"] == 21 * 128 + 400)
    adaptive = tx.Adaptive(rtol=1e-2, max_k=100)
    one = solved(matrix, KEYS[:2], function=tx.Inverse(), k=adaptive)
    assert np.all(one.successful & one.stats["exact"])
    assert np.allclose(one.value, values[tx.Inverse()], rtol=1e-8)

    singular = hermitian(0, np.append(spectrum[1:], 0))
    for function in tx.Inverse(), tx.Log():
        one = solved(singular, KEYS[:2], function=function, k=20)
        assert np.all(one.result == RESULTS.not_positive_definite)
    easy = solved(hermitian(0, np.linspace(1, 3, 400)), KEYS[:2], function=tx.Log(), k=20)
    assert not np.any(easy.stats["exact"])


@pytest.mark.slow
def test_derivatives_of_exact_answers():
    """In forward and in reverse mode, and under `vmap`, where only one is exact."""
    matrices = np.stack([hermitian(0, EASY["even"]), hermitian(0, HARD["penalty"])])

    def value(scale, matrix):
        operator = lx.MatrixLinearOperator(scale * matrix, PSD)
        return tx.logdet(operator, k=20, key=KEYS[0]).value

    ones = jnp.ones(2)
    reverse = jax.jit(jax.vmap(jax.grad(value)))(ones, matrices)
    _, forward = jax.jit(
        lambda: jax.jvp(jax.vmap(value), (ones, matrices), (ones, 0 * matrices))
    )()
    assert np.allclose(reverse, N, rtol=1e-6)
    assert np.allclose(forward, N, rtol=1e-6)


@pytest.mark.slow
def test_a_penalty_that_is_singular():
    spectrum = eigenvalues_of_penalty(2, 400)
    given = solved(hermitian(0, spectrum), k=30, num_steps=64)
    assert np.all(given.inside(-np.inf))
    left_out = solved(hermitian(0, spectrum), k=30)
    assert not np.any(left_out.successful)


@pytest.mark.slow
def test_a_penalty_and_a_preconditioner_of_its_shift():
    """The bound that the shift gives narrows the brackets so far that no key needs the
    exact answer. The bar is wide, and right."""
    spectrum = eigenvalues_of_penalty(2, 400) + 1e-6
    made = tx.AutoPreconditioner(1e-6)
    one = solved(hermitian(0, spectrum), k=20, preconditioner=made)
    error = np.abs(one.value - np.sum(np.log(spectrum)))
    assert np.all((error < 4 * one.std_err + 1e-6) & one.successful)
    ratio = rms(error) / rms(one.std_err)
    assert 0.5 < ratio < 1.5  # for 998 of 1000 sets of 20 normal errors


@pytest.mark.slow
def test_large_operators_are_flagged():
    """Second differences, of condition 1e6: more than 64 steps are needed."""
    n = 20_000

    @eqx.filter_jit
    def run(function):
        def second_differences(v):
            padded = jnp.pad(v, 1)
            return (2 + 4e-6) * v - padded[2:] - padded[:-2]

        structure = jax.ShapeDtypeStruct((n,), np.float64)
        operator = lx.FunctionLinearOperator(second_differences, structure, PSD)
        settings = {"k": 4, "key": KEYS[0], "throw": False}
        return found(tx.trace_of_function(operator, function, **settings))

    for function in tx.Log(), tx.Inverse():
        assert run(function).result == RESULTS.too_few_steps


@pytest.mark.slow
@pytest.mark.parametrize(("n", "condition"), [(200, [1e8, 3e8, 1e9]), (300, [3e8])])
def test_eigenvalues_below_the_noise(n, condition):
    """Most eigenvalues are 1 and less than roundoff of the largest one."""
    runs = [(name, 20) for name in FUNCTIONS] + [("log", 10), ("log", 40)]
    for largest in condition:
        spectrum = np.append(np.geomspace(1, largest, 60), np.ones(n - 60))
        matrix = hermitian(0, spectrum, np.float32)
        for name, num_steps in runs:
            function, exact = FUNCTIONS[name]
            settings = {"function": function, "k": 10, "num_steps": num_steps}
            all_found = solved(matrix, **settings)
            right = exact_sum(exact, spectrum)
            assert np.all(all_found.inside(right) | ~all_found.successful), name
        left_out, right = solved(matrix, k=10), exact_sum(np.log, spectrum)
        near = np.abs(left_out.value - right) <= 8 * left_out.std_err
        assert np.all(near | ~left_out.successful)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32, np.complex128])
def test_a_pure_state_has_no_entropy(dtype):
    vector = np.random.default_rng(0).standard_normal(256)
    state = np.outer(vector, vector) / np.sum(vector**2)
    all_found = solved(jnp.asarray(state, dtype), function=tx.Entropy(), k=20)
    assert np.all(all_found.successful)
    assert np.all(all_found.inside(0))


@pytest.mark.slow
def test_rules_are_exact_for_polynomials():
    spectrum = np.linspace(-1, 4, N)
    for estimator in tx.SLQEstimator(), tx.KrylovAwareEstimator():
        settings = {"estimator": estimator, "k": 12, "num_steps": 2}
        matrix, tag = hermitian(0, spectrum), lx.symmetric_tag
        one = solved(matrix, tags=tag, function=tx.Power(2), **settings)
        bounds = one.stats["bounds"]
        gap = bounds[:, 1, 0] - bounds[:, 0, 0]
        assert np.all(gap <= 1e-9 * np.sum(spectrum**2))
        assert np.all(one.inside(np.sum(spectrum**2)))


@pytest.mark.slow
def test_bounds_narrow_with_the_error():
    """The estimate is a few times the error, where the proven bracket is useless."""
    spectrum = np.geomspace(1, 1500, N)
    solution = tx.trace_of_function(
        lx.MatrixLinearOperator(hermitian(0, spectrum), PSD),
        tx.Inverse(),
        k=20,
        num_steps=60,
        key=KEYS[0],
    )
    low, high = solution.interval()
    assert high - low < 6 * solution.std_err
    assert low <= np.sum(1 / spectrum) <= high
    low, high = solution.interval(proven=True)
    assert high - low < 10 * solution.std_err
