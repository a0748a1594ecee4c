"""Random numbers of steps: no quadrature error in the mean, and honest about its
variance."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, z_score


PSD = lx.positive_semidefinite_tag
KEY = jr.key(7)

# For a diagonal operator forms of random signs have no variance, so the spread is all due
# to the random numbers of steps, and a bias shows. After 36 steps what is cut off is
# below a hundredth of the standard errors here.
N, MOST = 100, 36
EIGENVALUES, DIRECTION = np.linspace(1.0, 100.0, N), np.linspace(2.0, 1.0, N) ** 2
EXACT, EXACT_SLOPE = np.sum(np.log(EIGENVALUES)), np.sum(DIRECTION / EIGENVALUES)


def diagonal(entries):
    structure = jax.ShapeDtypeStruct(entries.shape, entries.dtype)
    return lx.FunctionLinearOperator(lambda v: entries * v, structure, PSD)


def value(entries, key, num_steps):
    settings = {"k": 1, "num_steps": num_steps, "key": key, "throw": False}
    return tx.logdet(diagonal(entries), **settings).value


@eqx.filter_jit
def values(keys, num_steps):
    entries = jnp.asarray(EIGENVALUES)
    return jax.lax.map(lambda key: value(entries, key, num_steps), keys)


@eqx.filter_jit
def values_and_slopes(keys, num_steps):
    direction = jnp.asarray(DIRECTION)

    def one(key):
        along = lambda t: value(EIGENVALUES + t * direction, key, num_steps)  # noqa: E731
        return jax.jvp(along, (0.0,), (1.0,))

    return jax.lax.map(one, keys)


def test_value_and_derivative_are_unbiased():
    """By a test that fails by chance for one in 10,000 seeds; what 15 steps miss is ten
    standard errors or more."""
    num_keys = 1000
    steps = tx.RandomSteps(15, 0.9, max_steps=MOST)
    found = values_and_slopes(jr.split(KEY, num_keys), steps)
    fixed = values_and_slopes(jr.split(KEY, 1), 15)
    for samples, few, exact in zip(found, fixed, (EXACT, EXACT_SLOPE), strict=True):
        assert z_score(samples, exact) < 4
        assert abs(few[0] - exact) > 10 * np.std(samples) / num_keys**0.5


@pytest.mark.slow
def test_bias_over_many_keys():
    keys = jr.split(jr.key(8), (10, 2000))
    steps = tx.RandomSteps(15, 0.9, max_steps=MOST)
    found = np.concatenate([values(part, steps) for part in keys])
    error, std_err = abs(np.mean(found) - EXACT), np.std(found) / found.size**0.5
    assert error < 3 * std_err  # false for one in 370 seeds
    assert abs(values(keys[0, :1], 15)[0] - EXACT) > 10 * std_err


# --- error bars ---


@ft.cache
def matrix_of(seed, largest, dtype=np.float64, n=48):
    return hermitian(seed, np.linspace(1.0, largest, n), dtype)


def logdet(matrix, num_steps, key=KEY, estimator=tx.SLQEstimator(), **settings):
    operator = lx.MatrixLinearOperator(matrix, settings.pop("tags", PSD))
    settings = {"k": 8, "throw": False} | settings
    return tx.logdet(operator, estimator, num_steps=num_steps, key=key, **settings)


jitted = eqx.filter_jit(logdet)


@eqx.filter_jit
def solutions_over_keys(matrix, keys, num_steps):
    def one(key):
        solution = logdet(matrix, num_steps, key)
        return solution, solution.interval()

    return jax.lax.map(one, keys)


def test_intervals_cover():
    """Of 400 keys at least 93%, with a ratio that follows from the condition number."""
    matrix = matrix_of(0, 20.0)
    steps = tx.RandomSteps(4, max_steps=32)
    solutions, (low, high) = solutions_over_keys(matrix, jr.split(KEY, 400), steps)
    exact = np.linalg.slogdet(matrix)[1]
    assert np.all(solutions.successful)
    assert np.mean((low <= exact) & (exact <= high)) >= 0.93
    assert z_score(solutions.value, exact) < 4
    # The error bar is all: there is no other error in the bounds.
    stats = solutions.stats
    value, std_err = solutions.value[:, None], solutions.std_err[:, None]
    assert np.allclose(stats["bounds"][..., 0], value, rtol=1e-12)
    assert np.allclose(stats["proven_bounds"][..., 0], value, rtol=1e-12)
    assert np.allclose(stats["bounds"][..., 1], std_err, rtol=1e-6)
    # At most rho^(3/2), and less by what a short run has not yet seen.
    rho = (20**0.5 - 1) / (20**0.5 + 1)
    assert np.all((stats["ratio"] > rho**3) & (stats["ratio"] < rho**1.5))
    assert np.median(stats["ratio"]) > rho**1.8
    mean = 4 + np.mean(stats["ratio"] / (1 - stats["ratio"]))
    assert abs(np.mean(stats["num_steps"]) - mean) < 0.1
    # What the first run makes is counted.
    assert np.all(stats["num_matvecs"] > 8 * stats["num_steps"])


# --- what is flagged ---


def test_flags():
    matrix = matrix_of(1, 100.0)

    def result(start, ratio, matrix=matrix):
        steps = tx.RandomSteps(start, jnp.asarray(ratio), max_steps=20)
        return jitted(matrix, steps)

    # rho^4 is 0.45.
    assert result(15, 0.5).successful
    small = result(15, 0.4)
    assert small.result == tx.RESULTS.infinite_variance
    assert result(15, 0.5, 7 * matrix).successful  # it has no scale
    # Half of the eigenvalues are 1e-9 of the others, and rho is 1.
    spectrum = np.geomspace(1e-9, 1.0, 48)
    assert result(15, 0.5, hermitian(1, spectrum)).result == small.result
    # A breakdown has no error, whatever the ratio, unless it is none.
    two = hermitian(1, np.repeat([1.0, 1e3], 24))
    few, many = result(15, 0.01, two), result(15, 0.5, two)
    assert few.successful
    assert np.isclose(few.value, many.value, rtol=1e-12)

    @jax.jit
    def traced(ratio):
        return logdet(two, tx.RandomSteps(15, ratio, max_steps=20)).result

    for ratio in -1.0, 0.0, 1.0, np.nan:
        assert traced(ratio) == small.result
    # Runs that the limit cuts off, and one that may not see the smallest eigenvalue.
    assert result(15, 0.9).result == tx.RESULTS.too_few_steps
    assert jitted(matrix, tx.RandomSteps(2, 0.6, 20)).result == tx.RESULTS.too_few_steps


@pytest.mark.slow
def test_calls_fail_together_where_preconditioners_are_needed():
    """And not with them."""
    matrix = np.eye(300) + hermitian(2, np.r_[np.geomspace(1e4, 1, 30), np.zeros(270)])
    steps = tx.RandomSteps(10, max_steps=60)
    for key in jr.split(KEY, 3):
        assert jitted(matrix, steps, key).result == tx.RESULTS.too_few_steps
    automatic = tx.AutoPreconditioner(1.0)
    solution = jitted(matrix, steps, preconditioner=automatic)
    exact = np.linalg.slogdet(matrix)[1]
    assert solution.successful
    assert abs(solution.value - exact) < 5 * solution.std_err


def test_bad_input():
    for ratio in 0, 1, 1.5, -0.1, jnp.asarray(2.0), True, 1j, "half":
        with pytest.raises((ValueError, TypeError), match="`ratio`"):
            tx.RandomSteps(5, ratio)
    for start in 0, -1, 2.5, None:
        with pytest.raises((ValueError, TypeError), match="`start`"):
            tx.RandomSteps(start)
    with pytest.raises(ValueError, match="`max_steps` must be at least `start`, 9"):
        tx.RandomSteps(9, max_steps=8)
    operator = lx.MatrixLinearOperator(jnp.eye(48), PSD)
    untagged = lx.MatrixLinearOperator(jnp.eye(48).at[0, 1].set(1))
    settings = {"k": 4, "num_steps": tx.RandomSteps(3), "key": KEY}
    with pytest.raises(ValueError, match=r"`ratio` of `traceax\.RandomSteps`"):
        tx.trace_of_function(operator, tx.Exp(), **settings)
    with pytest.raises(ValueError, match="Found `Arnoldi`"):
        tx.trace_of_function(untagged, tx.Inverse(), **settings)
    others = [
        lambda: tx.log_trace_exp(operator, **settings),
        lambda: tx.diagonal_of_function(operator, tx.Exp(), **settings),
        lambda: tx.function_of(operator, tx.Exp(), num_steps=settings["num_steps"]),
        lambda: tx.logdet(operator, tx.KrylovAwareEstimator(), **settings),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"is for `traceax\.logdet`"):
            other()


# --- everywhere ---


@pytest.mark.slow
def test_blocks_devices_and_batches_change_nothing():
    matrix, steps = matrix_of(3, 30.0), tx.RandomSteps(4, max_steps=24)
    plain = jitted(matrix, steps)
    mesh = tx.probe_mesh(jax.devices()[:3])
    others = [
        jitted(matrix, steps, execution=tx.Local(block_size=3)),
        jitted(matrix, steps, execution=tx.Sharded(mesh)),
    ]
    batch = jax.jit(jax.vmap(lambda key: logdet(matrix, steps, key)))(jr.split(KEY, 2))
    alone = jitted(matrix, steps, jr.split(KEY, 2)[1])
    pairs = [(plain, other) for other in others]
    pairs.append((alone, jax.tree.map(lambda x: x[1], batch)))
    for one, other in pairs:
        assert np.isclose(one.value, other.value, rtol=1e-10)
        assert np.isclose(one.std_err, other.std_err, rtol=1e-6)
        for name in "num_steps", "num_matvecs", "ratio":
            assert np.isclose(one.stats[name], other.stats[name])


@pytest.mark.slow
def test_adaptive_runs_resume():
    matrix, steps = matrix_of(3, 30.0), tx.RandomSteps(4, max_steps=24)
    budget = ft.partial(tx.Adaptive, rtol=1e-9, round_size=4)
    first = jitted(matrix, steps, k=budget(max_k=8))
    rest = jitted(matrix, steps, k=budget(max_k=16), state=first.state)
    whole = jitted(matrix, steps, k=budget(max_k=16))
    assert np.isclose(rest.value, whole.value, rtol=1e-12)
    assert rest.stats["ratio"] == whole.stats["ratio"]
    # The first run is not made again.
    assert rest.stats["num_matvecs"] < whole.stats["num_matvecs"]


def difference(matrix, num_steps, **settings):
    other = matrix_of(5, 25.0, n=len(matrix))
    pair = (lx.MatrixLinearOperator(x, PSD) for x in (jnp.asarray(matrix), other))
    settings |= {"k": 40, "key": KEY, "throw": False, "num_steps": num_steps}
    return tx.trace_difference(*pair, tx.Log(), **settings)


def general(matrix, num_steps, **settings):
    basis = hermitian(6, np.repeat([1.0, -1.0], len(matrix) // 2))
    return logdet(matrix @ basis, num_steps, tags=(), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (logdet, np.float32),
        (logdet, np.complex128),
        (general, float),
        (difference, float),
    ],
    ids=["float32", "complex128", "general", "difference"],
)
def test_kinds_of_operators(call, dtype):
    """Within 4.5 error bars, of 40 probes, and as good as those of full runs."""
    matrix = matrix_of(4, 30.0, dtype)
    exact = np.linalg.slogdet(matrix)[1]
    if call is difference:
        exact = exact - np.linalg.slogdet(matrix_of(5, 25.0))[1]
    solution = eqx.filter_jit(call)(matrix, tx.RandomSteps(6), k=40)
    full = eqx.filter_jit(call)(matrix, 48, k=40)
    assert solution.value.dtype == np.finfo(dtype).dtype
    assert solution.successful
    assert abs(solution.value - exact) < 4.5 * solution.std_err < 6 * full.std_err


@pytest.mark.slow
def test_derivative_in_the_function():
    """Of as many steps as rows, after which nothing is random but the probes."""
    matrix, operator = (
        matrix_of(4, 30.0),
        lx.MatrixLinearOperator(matrix_of(4, 30.0), PSD),
    )

    @jax.grad
    def slope(shift):
        settings = {"k": 4, "key": KEY, "num_steps": tx.RandomSteps(48)}
        return tx.trace_of_function(operator, tx.Inverse(shift), **settings).value

    solved = np.linalg.solve(matrix + np.eye(48), tx.RademacherSampler()(KEY, 48, 4))
    assert np.isclose(slope(1.0), -np.sum(solved**2) / 4, rtol=1e-8)


def test_ratio_is_an_array():
    """So one program serves all of them."""
    steps = tx.RandomSteps(3, 0.5)
    assert jax.tree.leaves(steps) == [0.5]
