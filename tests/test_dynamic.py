"""`tx.DynamicTrace`: the trace of an operator that changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx

from .helpers import spectrum_matrix, z_score


N, STEPS, KEYS = 30, 12, 200
BASE = spectrum_matrix(jr.key(0), jnp.linspace(-2.0, 3.0, N), jnp.float64)
DRIFT = spectrum_matrix(jr.key(1), jnp.linspace(-1.0, 1.5, N), jnp.float64)


def drifting(t):
    return BASE + 0.02 * t * DRIFT


def plain(matrix):
    """An operator that is not known to be symmetric, nor to have a diagonal."""
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure)


DYNAMIC = tx.DynamicTrace(plain, num_probes=8)


def follow(dynamic, parameters, key, k):
    """The first solution, and those of one scan over the others, stacked."""
    first = dynamic.init(jax.tree.map(lambda x: x[0], parameters), key=key, k=k)

    def step(state, parameters):
        solution = dynamic.update(state, parameters)
        return solution.state, (solution.value, solution.std_err, solution.stats)

    rest = jax.tree.map(lambda x: x[1:], parameters)
    return first, jax.lax.scan(step, first.state, rest)[1]


def rms(x):
    return jnp.sqrt(jnp.mean(jnp.abs(x) ** 2, axis=0))


def many(parameters, num_keys=KEYS, dynamic=DYNAMIC, k=20):
    """Values and standard errors, shape `(keys, steps)`, and the parameters gamma."""

    @jax.jit
    def all_keys(keys):
        def one(key):
            _, (value, std_err, stats) = follow(dynamic, parameters, key, k)
            return value, std_err, stats["gamma"]

        return jax.vmap(one)(keys)

    return all_keys(jr.split(jr.key(20261121), num_keys))


# --- statistics ---


def test_drift_is_followed():
    """200 keys: no bias at any step, an honest error bar, and an error much smaller than
    that of a fresh estimate with as many products."""
    parameters = jax.vmap(drifting)(jnp.arange(STEPS + 1.0))
    exact = jnp.trace(parameters[1:], axis1=1, axis2=2)
    value, std_err, gamma = many(parameters)
    assert value.shape == std_err.shape == gamma.shape == (KEYS, STEPS)
    for t in range(STEPS):
        assert z_score(value[:, t], exact[t]) < 5
    error = rms(value - exact)
    ratio = rms(std_err) / error
    assert jnp.all((ratio > 0.8) & (ratio < 2))
    assert jnp.all((gamma >= 0) & (gamma <= 1))
    assert jnp.median(gamma) < 0.2

    # Four products for each step.
    few = tx.DynamicTrace(plain, num_probes=2)
    value, std_err, _ = many(parameters, dynamic=few, k=N - 2)
    error = rms(value - exact)
    assert 0.8 < rms(std_err)[-1] / error[-1] < 2
    estimator = tx.HutchinsonEstimator()
    keys = jr.split(jr.key(1), KEYS)
    operator = plain(parameters[-1])
    fresh = jax.jit(
        jax.vmap(lambda key: tx.trace(operator, estimator, k=4, key=key).value)
    )(keys)
    assert 2 * error[-1] < rms(fresh - exact[-1])


def test_complex_hermitian():
    base = spectrum_matrix(jr.key(2), jnp.linspace(-2.0, 3.0, N), jnp.complex128)
    drift = spectrum_matrix(jr.key(3), jnp.linspace(-1.0, 1.5, N), jnp.complex128)
    parameters = base + 0.02 * jnp.arange(7.0)[:, None, None] * drift
    exact = jnp.trace(parameters[1:], axis1=1, axis2=2)
    value, std_err, _ = many(parameters)
    assert value.dtype == jnp.complex128
    assert std_err.dtype == jnp.float64
    for t in range(6):
        assert z_score(value[:, t], exact[t]) < 5
    ratio = rms(std_err) / rms(value - exact)
    assert jnp.all((ratio > 0.8) & (ratio < 2))


def test_jump_starts_afresh():
    """A becomes -5A in the third of six steps: nothing of the estimate is kept there, the
    error bar says so, and afterwards it is built upon again."""
    factor = jnp.where(jnp.arange(7) < 3, 1.0, -5.0)[:, None, None]
    parameters = factor * jax.vmap(drifting)(jnp.arange(7.0))
    exact = jnp.trace(parameters[1:], axis1=1, axis2=2)
    value, std_err, gamma = many(parameters)
    assert jnp.min(gamma[:, 2]) > 0.9
    assert jnp.median(gamma[:, 5]) < 0.2
    for t in range(6):
        assert z_score(value[:, t], exact[t]) < 5
    ratio = rms(std_err) / rms(value - exact)
    assert jnp.all((ratio > 0.8) & (ratio < 2))


def test_operator_that_stays():
    """The difference is zero: the estimate and its error bar do not grow worse, and go
    on to improve, as every update makes new products."""
    parameters = jnp.broadcast_to(BASE, (STEPS + 1, N, N))
    value, std_err, gamma = many(parameters)
    assert z_score(value[:, -1], jnp.trace(BASE)) < 5
    first = DYNAMIC.init(BASE, key=jr.key(0), k=20)
    assert rms(std_err)[-1] <= 1.5 * first.std_err
    assert jnp.all(rms(std_err)[1:] <= 1.001 * rms(std_err)[:-1])
    assert jnp.all(gamma < 1)


# --- structures, transformations ---


def test_hessian_of_a_loss_during_training():
    """A PyTree operator, with parameters that an optimiser updates inside a scan."""
    x = jr.normal(jr.key(4), (20, 3))
    y = jnp.sin(x[:, 0])

    def loss(params):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((hidden @ params["v"] - y) ** 2)

    key_w, key_v = jr.split(jr.key(5))
    params = {
        "w": jr.normal(key_w, (3, 4)) / 2,
        "b": jnp.zeros(4),
        "v": jr.normal(key_v, (4,)) / 2,
    }

    def hessian(params):
        return tx.hessian(loss, params)

    dynamic = tx.DynamicTrace(hessian, num_probes=8)
    momentum = jax.tree.map(jnp.zeros_like, params)
    first = dynamic.init(params, key=jr.key(6), k=16)

    @jax.jit
    def train(params, momentum, state):
        def step(carry, _):
            params, momentum, state = carry
            slope = jax.grad(loss)(params)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
            updates = jax.tree.map(lambda m: -0.01 * m, momentum)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
            solution = dynamic.update(state, params)
            seen = solution.value, solution.std_err, lx.diagonal(hessian(params)).sum()
            return (params, momentum, solution.state), seen

        return jax.lax.scan(step, (params, momentum, state), length=15)[1]

    value, std_err, exact = train(params, momentum, first.state)
    assert jnp.all(jnp.isfinite(std_err) & (std_err > 0))
    assert jnp.all(jnp.abs(value - exact) < 5 * std_err)
    assert jnp.std(exact) > 0


def test_jit_vmap_and_loop_agree():
    """`init` and `update` in Python, under `jit`, and batched over keys."""
    parameters = jax.vmap(drifting)(jnp.arange(4.0))
    keys = jr.split(jr.key(7), 3)

    @eqx.filter_jit
    def compiled(key):
        return follow(DYNAMIC, parameters, key, 10)

    _, (together, errors, _) = jax.vmap(lambda key: compiled(key))(keys)
    for i in range(3):
        solution = DYNAMIC.init(parameters[0], key=keys[i], k=10)
        assert solution.state.count == 0
        for t in range(3):
            solution = DYNAMIC.update(solution.state, parameters[t + 1])
            assert jnp.allclose(solution.value, together[i, t], rtol=1e-10)
            assert jnp.allclose(solution.std_err, errors[i, t], rtol=1e-8)
        assert solution.state.count == 3


def test_first_estimate_is_that_of_hutchinson():
    """Its state goes into the solution, and nothing else of it changes."""
    solution = DYNAMIC.init(BASE, key=jr.key(8), k=10)
    first, _ = jr.split(jr.key(8))
    expected = tx.trace(plain(BASE), tx.HutchinsonEstimator(), k=10, key=first)
    assert solution.value == expected.value
    assert solution.std_err == expected.std_err
    assert solution.stats["num_matvecs"] == 10
    assert solution.result == tx.RESULTS.successful
    exact = DYNAMIC.init(BASE, key=jr.key(8), k=N)
    assert jnp.allclose(exact.value, jnp.trace(BASE))
    assert exact.std_err == 0


def test_start_from_one_product():
    """The error of one product is not known, so the first update starts afresh."""
    first = DYNAMIC.init(BASE, key=jr.key(9), k=1)
    assert first.std_err == jnp.inf
    second = DYNAMIC.update(first.state, drifting(1.0))
    assert second.stats["gamma"] == 1
    assert jnp.isfinite(second.std_err)
    assert jnp.abs(second.value - jnp.trace(drifting(1.0))) < 6 * second.std_err
    third = DYNAMIC.update(second.state, drifting(2.0))
    assert third.stats["gamma"] < 0.5


def test_zero_operator():
    zero = jnp.zeros((N, N))
    first = DYNAMIC.init(zero, key=jr.key(10), k=10)
    second = DYNAMIC.update(first.state, zero)
    assert second.value == second.std_err == 0
    assert second.result == tx.RESULTS.successful
    third = DYNAMIC.update(second.state, BASE)
    assert jnp.abs(third.value - jnp.trace(BASE)) < 6 * third.std_err


@pytest.mark.parametrize("exponent", [-100, 100])
def test_scale(exponent):
    """A power of two: the same answer, in its units."""
    scale = jnp.float32(2.0**exponent)
    old, new = BASE.astype(jnp.float32), drifting(1.0).astype(jnp.float32)
    found = []
    for factor in (jnp.float32(1), scale):
        first = DYNAMIC.init(factor * old, key=jr.key(11), k=10)
        second = DYNAMIC.update(first.state, factor * new)
        third = DYNAMIC.update(second.state, factor * old)
        assert third.value.dtype == jnp.float32
        found.append(
            (third.value / factor, third.std_err / factor, second.stats["gamma"])
        )
    for one, other in zip(*found, strict=True):
        assert jnp.allclose(one, other, rtol=1e-4)


def test_products_are_counted():
    seen = []

    def operator(matrix):
        def mv(v):
            jax.debug.callback(lambda _: seen.append(1), v[0])
            return matrix @ v

        return lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), matrix.dtype))

    dynamic = tx.DynamicTrace(operator, num_probes=3)
    first = dynamic.init(BASE, key=jr.key(12), k=10)
    jax.effects_barrier()
    assert len(seen) == first.stats["num_matvecs"] == 10
    second = dynamic.update(first.state, drifting(1.0))
    jax.block_until_ready(second.value)
    jax.effects_barrier()
    assert len(seen) - 10 == second.stats["num_matvecs"] == 6


# --- settings, failures ---


def test_settings():
    """Another sampler; an odd number of probes; a block of products at a time."""
    dynamic = tx.DynamicTrace(plain, num_probes=3, sampler=tx.NormalSampler())
    first = dynamic.init(BASE, key=jr.key(13), k=10)
    assert dynamic.update(first.state, drifting(1.0)).stats["num_matvecs"] == 6
    blocks = tx.DynamicTrace(plain, num_probes=8, execution=tx.Local(3))
    state = DYNAMIC.init(BASE, key=jr.key(13), k=10).state
    found = [each.update(state, drifting(1.0)).value for each in (DYNAMIC, blocks)]
    assert jnp.allclose(*found, rtol=1e-12)


def test_no_derivative():
    first = DYNAMIC.init(BASE, key=jr.key(14), k=10)

    def value(t):
        return DYNAMIC.update(first.state, drifting(t)).value

    assert jax.grad(value)(1.0) == 0


def test_nonfinite_operator():
    first = DYNAMIC.init(BASE, key=jr.key(15), k=10)
    bad = BASE.at[0, 0].set(jnp.nan)
    assert DYNAMIC.update(first.state, BASE).result == tx.RESULTS.successful
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        DYNAMIC.update(first.state, bad)
    solution = DYNAMIC.update(first.state, bad, throw=False)
    assert solution.result == tx.RESULTS.nonfinite_product
    # Estimates go on from it as soon as the operator is finite again, or say that they
    # do not.
    after = DYNAMIC.update(solution.state, BASE, throw=False)
    after = DYNAMIC.update(after.state, BASE, throw=False)
    finite = jnp.isfinite(after.value)
    assert finite == (after.result == tx.RESULTS.successful)


@pytest.mark.parametrize("num_probes", [1, 0, -1])
def test_too_few_probes(num_probes):
    with pytest.raises(ValueError, match="`num_probes` must be at least"):
        tx.DynamicTrace(plain, num_probes=num_probes)


def test_probes_must_be_an_integer():
    with pytest.raises(TypeError, match="`num_probes` must be an integer"):
        tx.DynamicTrace(plain, num_probes=2.5)  # pyright: ignore
