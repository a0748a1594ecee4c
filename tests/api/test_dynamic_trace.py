"""`tx.DynamicTrace`: the trace of an operator that changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, rms, traces_of_matrix, z_score


N, STEPS, KEYS = 30, 12, 200
BASE = hermitian(0, np.linspace(-2.0, 3.0, N))
DRIFT = hermitian(1, np.linspace(-1.0, 1.5, N))


def drifting(t):
    return BASE + 0.02 * t * DRIFT


def stacked(times, base=BASE, drift=DRIFT):
    return base + 0.02 * np.asarray(times)[:, None, None] * drift


# `matrix_free` is an operator that is not known to be symmetric, nor to have a diagonal.
DYNAMIC = tx.DynamicTrace(matrix_free, num_probes=8)


@eqx.filter_jit
def start(dynamic, parameters, key, k):
    return dynamic.init(parameters, key=key, k=k)


@eqx.filter_jit
def follow(dynamic, parameters, keys, k):
    """For each key, the solutions of one scan over the parameters but the first."""

    def one(key):
        first = dynamic.init(jax.tree.map(lambda x: x[0], parameters), key=key, k=k)

        def step(state, parameters):
            solution = dynamic.update(state, parameters)
            return solution.state, (solution.value, solution.std_err, solution.stats)

        rest = jax.tree.map(lambda x: x[1:], parameters)
        return jax.lax.scan(step, first.state, rest)[1]

    return jax.vmap(one)(keys)


def many(parameters, dynamic=DYNAMIC, k=20, num_keys=KEYS):
    """Values and standard errors, shape `(keys, steps)`, and the parameters gamma."""
    keys = jr.split(jr.key(20261121), num_keys)
    value, std_err, stats = follow(dynamic, jnp.asarray(parameters), keys, k)
    return np.asarray(value), np.asarray(std_err), np.asarray(stats["gamma"])


def trace(stack):
    return np.trace(stack, axis1=1, axis2=2)


# --- statistics ---


def check(value, std_err, exact):
    """No bias at any step, and an honest error bar."""
    for t in range(STEPS):
        assert z_score(value[:, t], exact[t]) < 5, t
    ratio = rms(std_err, axis=0) / rms(value - exact, axis=0)
    assert np.all((ratio > 0.8) & (ratio < 2))


def test_drift_is_followed():
    """200 keys: no bias at any step, an honest error bar, and an error much smaller than
    that of a fresh estimate with as many products."""
    parameters = stacked(np.arange(STEPS + 1.0))
    exact = trace(parameters[1:])
    value, std_err, gamma = many(parameters)
    assert value.shape == std_err.shape == gamma.shape == (KEYS, STEPS)
    check(value, std_err, exact)
    assert np.all((gamma >= 0) & (gamma <= 1))
    assert np.median(gamma) < 0.2

    # Four products for each step.
    few = tx.DynamicTrace(matrix_free, num_probes=2)
    value, std_err, _ = many(parameters, dynamic=few, k=N - 2)
    error = rms(value - exact, axis=0)
    assert 0.8 < rms(std_err, axis=0)[-1] / error[-1] < 2
    keys = jr.split(jr.key(1), KEYS)
    args = jnp.asarray(parameters[-1]), tx.HutchinsonEstimator(), keys
    fresh, _, _ = traces_of_matrix(*args, k=4, tags=())
    assert 2 * error[-1] < rms(np.asarray(fresh) - exact[-1], axis=0)


def test_no_bias_adds_up():
    """With the gamma of the same probes it would: with 2 probes and 2000 keys to 8
    standard errors after 12 updates."""
    parameters = stacked(5.0 * np.arange(STEPS + 1))
    few = tx.DynamicTrace(matrix_free, num_probes=2)
    value, _, _ = many(parameters, dynamic=few, num_keys=2000)
    exact = trace(parameters[1:])
    for t in range(STEPS):
        assert z_score(value[:, t], exact[t]) < 5, t


@pytest.mark.slow(but="sampler0-2")
@pytest.mark.parametrize("num_probes", [2, 4])
@pytest.mark.parametrize("sampler", [tx.RademacherSampler(), tx.NormalSampler()])
def test_bars_of_few_probes_cover(num_probes, sampler):
    """A rank-one operator that grows, from an exact start: of the error of few probes the
    same ones know little. Without widening 2 covered 83% in the first update. In the long
    run the bar is that of many probes."""
    one = hermitian(5, np.append(np.zeros(N - 1), 5.0))
    parameters = (1 + 0.2 * np.arange(STEPS + 1))[:, None, None] * one
    dynamic = tx.DynamicTrace(matrix_free, num_probes=num_probes, sampler=sampler)
    value, std_err, _ = many(parameters, dynamic=dynamic, k=N, num_keys=1000)
    error = value - trace(parameters[1:])
    covered = np.mean(np.abs(error) <= 1.96 * std_err, axis=0)
    assert np.all(covered > 0.92)
    assert rms(std_err, axis=0)[-1] < 1.4 * rms(error, axis=0)[-1]


def test_complex_hermitian():
    base = hermitian(2, np.linspace(-2.0, 3.0, N), np.complex128)
    drift = hermitian(3, np.linspace(-1.0, 1.5, N), np.complex128)
    parameters = stacked(np.arange(STEPS + 1.0), base, drift)
    value, std_err, _ = many(parameters)
    assert value.dtype == np.complex128
    assert std_err.dtype == np.float64
    check(value, std_err, trace(parameters[1:]))


def test_jump_starts_afresh():
    """A becomes -5A in the third step: nothing of the estimate is kept there, the error
    bar says so, and afterwards it is built upon again."""
    times = np.arange(STEPS + 1.0)
    factor = np.where(times < 3, 1.0, -5.0)[:, None, None]
    parameters = factor * stacked(times)
    value, std_err, gamma = many(parameters)
    assert np.min(gamma[:, 2]) > 0.9
    assert np.median(gamma[:, 5]) < 0.2
    check(value, std_err, trace(parameters[1:]))


def test_operator_that_stays():
    """The difference is zero: the estimate and its error bar do not grow worse, and go
    on to improve, as every update makes new products."""
    parameters = np.broadcast_to(BASE, (STEPS + 1, N, N))
    value, std_err, gamma = many(parameters)
    assert z_score(value[:, -1], np.trace(BASE)) < 5
    first = start(DYNAMIC, BASE, jr.key(0), 20)
    assert rms(std_err, axis=0)[-1] <= 1.5 * first.std_err
    assert np.all(rms(std_err, axis=0)[1:] <= 1.001 * rms(std_err, axis=0)[:-1])
    assert np.all(gamma < 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_probes", [2, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("swing", [0.0, 1e-3])
def test_updates_below_the_last_digit_add_up(num_probes, dtype, swing):
    """In single precision, from an exact start, a trace of 2e7 that grows by a quarter of
    a unit in the last place in each update; without compensation it stayed where it was.
    Where all entries swing, the old operator is not quite kept whole."""
    unit = 1 if dtype == np.float32 else 1 + 1j
    entries = jnp.asarray(unit * np.linspace(1.5e5, 2.5e5, 100), dtype)

    def diagonal(t):
        return entries.at[0].add(unit * t) * (1 + swing * jnp.sin(t))

    def operator(t):
        factors = diagonal(t)
        structure = jax.ShapeDtypeStruct((100,), dtype)
        return lx.FunctionLinearOperator(lambda v: factors * v, structure)

    times = jnp.arange(401, dtype=np.float32) / 2
    dynamic = tx.DynamicTrace(operator, num_probes=num_probes)
    value, std_err, _ = follow(dynamic, times, jr.split(jr.key(17), 4), 100)
    assert value.dtype == dtype
    exact = np.sum(np.asarray(diagonal(times[-1]), np.complex128))
    spacing = np.spacing(np.float32(abs(exact)))
    assert np.all(np.abs(np.asarray(value[:, -1]) - exact) <= 4 * spacing)
    assert np.all(std_err[:, -1] >= spacing)


def test_bar_is_no_less_than_rounding():
    """As in other calls, and it does not grow with the number of updates."""
    parameters = np.broadcast_to(BASE.astype(np.float32), (201, N, N))
    value, std_err, _ = many(parameters, k=N, num_keys=4)
    floor = (2 + N**0.5) * np.finfo(np.float32).eps * np.abs(value)
    assert np.all(std_err >= 0.999 * floor)
    assert np.all(std_err[:, -1] <= 1.1 * std_err[:, 0])


# --- structures, transformations ---


@pytest.mark.slow
def test_hessian_of_a_loss_during_training():
    """A PyTree operator, with parameters that an optimiser updates inside a scan."""
    generator = np.random.default_rng(4)
    x = generator.standard_normal((20, 3))
    y = np.sin(x[:, 0])

    def loss(params):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((hidden @ params["v"] - y) ** 2)

    def hessian(params):
        return tx.hessian(loss, params)

    params = {
        "w": generator.standard_normal((3, 4)) / 2,
        "b": np.zeros(4),
        "v": generator.standard_normal(4) / 2,
    }
    dynamic = tx.DynamicTrace(hessian, num_probes=8)

    @jax.jit
    def train(params, key):
        def step(carry, _):
            params, momentum, state = carry
            slope = jax.grad(loss)(params)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
            updates = jax.tree.map(lambda m: -0.01 * m, momentum)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
            solution = dynamic.update(state, params)
            seen = solution.value, solution.std_err, lx.diagonal(hessian(params)).sum()
            return (params, momentum, solution.state), seen

        first = dynamic.init(params, key=key, k=16)
        carry = params, jax.tree.map(jnp.zeros_like, params), first.state
        return jax.lax.scan(step, carry, length=15)[1]

    value, std_err, exact = (np.asarray(seen) for seen in train(params, jr.key(6)))
    assert np.all(np.isfinite(std_err) & (std_err > 0))
    assert np.all(np.abs(value - exact) < 5 * std_err)
    assert np.std(exact) > 0


def test_jit_vmap_and_loop_agree():
    """`init` and `update` in Python, and in one program, batched over keys."""
    parameters = stacked(np.arange(STEPS + 1.0))
    keys = jr.split(jr.key(20261121), KEYS)
    together, errors, _ = many(parameters)
    for i in range(3):
        solution = DYNAMIC.init(jnp.asarray(BASE), key=keys[i], k=20)
        assert solution.state.count == 0
        for t in range(3):
            solution = DYNAMIC.update(solution.state, jnp.asarray(parameters[t + 1]))
            assert np.isclose(solution.value, together[i, t], rtol=1e-10, atol=0)
            assert np.isclose(solution.std_err, errors[i, t], rtol=1e-8, atol=0)
        assert solution.state.count == 3


def test_first_estimate_is_that_of_hutchinson():
    """Its state goes into the solution, and nothing else of it changes."""
    solution = start(DYNAMIC, BASE, jr.key(8), 20)
    first, _ = jr.split(jr.key(8))
    estimator = tx.HutchinsonEstimator()
    expected = tx.trace(matrix_free(jnp.asarray(BASE)), estimator, k=20, key=first)
    assert solution.value == expected.value
    assert solution.std_err == expected.std_err
    assert solution.stats["num_matvecs"] == 20
    assert solution.result == tx.RESULTS.successful
    exact = start(DYNAMIC, BASE, jr.key(8), N)
    assert np.isclose(exact.value, np.trace(BASE))
    assert exact.std_err == 0


def test_start_from_one_product():
    """The error of one product is not known, so the first update starts afresh."""
    first = start(DYNAMIC, BASE, jr.key(9), 1)
    assert first.std_err == np.inf
    second = DYNAMIC.update(first.state, jnp.asarray(drifting(1.0)))
    assert second.stats["gamma"] == 1
    assert np.isfinite(second.std_err)
    assert abs(second.value - np.trace(drifting(1.0))) < 6 * second.std_err
    third = DYNAMIC.update(second.state, jnp.asarray(drifting(2.0)))
    assert third.stats["gamma"] < 0.5


def test_zero_operator():
    zero = np.zeros((N, N))
    first = start(DYNAMIC, zero, jr.key(10), 20)
    second = DYNAMIC.update(first.state, jnp.asarray(zero))
    assert second.value == second.std_err == 0
    assert second.result == tx.RESULTS.successful
    third = DYNAMIC.update(second.state, jnp.asarray(BASE))
    assert abs(third.value - np.trace(BASE)) < 6 * third.std_err


def test_scale():
    """A power of two: the same answer, in its units."""
    old, new = BASE.astype(np.float32), drifting(1.0).astype(np.float32)
    found = []
    for factor in (np.float32(1), np.float32(2.0**-100), np.float32(2.0**100)):
        first = start(DYNAMIC, factor * old, jr.key(11), 20)
        second = DYNAMIC.update(first.state, jnp.asarray(factor * new))
        third = DYNAMIC.update(second.state, jnp.asarray(factor * old))
        assert third.value.dtype == np.float32
        found.append(
            (third.value / factor, third.std_err / factor, second.stats["gamma"])
        )
    for other in found[1:]:
        assert np.allclose(other, found[0], rtol=1e-4, atol=0)


def test_products_are_counted():
    seen = []

    def operator(matrix):
        def mv(v):
            jax.debug.callback(lambda _: seen.append(1), v[0])
            return matrix @ v

        return lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), matrix.dtype))

    dynamic = tx.DynamicTrace(operator, num_probes=3)
    first = start(dynamic, BASE, jr.key(12), 10)
    jax.block_until_ready(first.value)
    jax.effects_barrier()
    assert len(seen) == first.stats["num_matvecs"] == 10
    second = dynamic.update(first.state, jnp.asarray(drifting(1.0)))
    jax.block_until_ready(second.value)
    jax.effects_barrier()
    assert len(seen) - 10 == second.stats["num_matvecs"] == 6


# --- settings, failures ---


def test_settings():
    """Another sampler; an odd number of probes; a block of products at a time."""
    first = start(DYNAMIC, BASE, jr.key(13), 20)
    dynamic = tx.DynamicTrace(matrix_free, num_probes=3, sampler=tx.NormalSampler())
    new = jnp.asarray(drifting(1.0))
    assert dynamic.update(first.state, new).stats["num_matvecs"] == 6
    blocks = tx.DynamicTrace(matrix_free, num_probes=8, execution=tx.Local(3))
    found = [each.update(first.state, new).value for each in (DYNAMIC, blocks)]
    assert np.isclose(*found, rtol=1e-12, atol=0)


def test_no_derivative():
    first = start(DYNAMIC, BASE, jr.key(14), 20)

    @jax.jit
    @jax.grad
    def slope(t, state):
        return DYNAMIC.update(state, BASE + 0.02 * t * DRIFT).value

    assert slope(1.0, first.state) == 0


def test_nonfinite_operator():
    first = start(DYNAMIC, BASE, jr.key(15), 20)
    good, bad = jnp.asarray(BASE), BASE.copy()
    bad[0, 0] = np.nan
    assert DYNAMIC.update(first.state, good).result == tx.RESULTS.successful
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        DYNAMIC.update(first.state, jnp.asarray(bad))
    solution = DYNAMIC.update(first.state, jnp.asarray(bad), throw=False)
    assert solution.result == tx.RESULTS.nonfinite_product
    # Of two finite operators the second is estimated, afresh.
    after = DYNAMIC.update(solution.state, good, throw=False)
    after = DYNAMIC.update(after.state, good)
    assert after.result == tx.RESULTS.successful
    assert abs(after.value - np.trace(BASE)) < 6 * after.std_err


@pytest.mark.parametrize("key", [jr.key(16), jr.PRNGKey(16), jr.key(16, impl="rbg")])
def test_saved_state(tmp_path, key):
    """Its arrays are plain ones, whatever the key."""
    first = DYNAMIC.init(jnp.asarray(BASE), key=key, k=20)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", first.state)
    like = eqx.filter_eval_shape(lambda: first.state)
    state = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", like)
    new = jnp.asarray(drifting(1.0))
    expected = DYNAMIC.update(first.state, new)
    assert DYNAMIC.update(state, new).value == expected.value
    assert expected.state.impl == first.state.impl


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (None, ValueError, "`key` is missing"),
        (3, TypeError, "`key` must be one JAX PRNG key"),
        (np.zeros((2, 2), np.uint32), TypeError, "`key` must be one JAX PRNG key"),
    ],
)
def test_key_must_be_one(key, error, match):
    with pytest.raises(error, match=match):
        DYNAMIC.init(jnp.asarray(BASE), key=key, k=4)


@pytest.mark.parametrize("setting", ["sampler", "execution"])
@pytest.mark.parametrize("value", [None, tx.NormalSampler, 3])
def test_settings_must_be_instances(setting, value):
    with pytest.raises(TypeError, match=f"`{setting}` must be an instance of"):
        tx.DynamicTrace(matrix_free, **{setting: value})


@pytest.mark.parametrize("num_probes", [1, 0, -1])
def test_too_few_probes(num_probes):
    with pytest.raises(ValueError, match="`num_probes` must be at least"):
        tx.DynamicTrace(matrix_free, num_probes=num_probes)


def test_probes_must_be_an_integer():
    with pytest.raises(TypeError, match="`num_probes` must be an integer"):
        tx.DynamicTrace(matrix_free, num_probes=2.5)  # pyright: ignore
