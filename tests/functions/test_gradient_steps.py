"""Steps left to the call are enough for the gradient of a log-determinant: its bias is
below its sampling error where a derivative is taken, and values take no more steps."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import PSD


N, K, NUM_KEYS, NOISE = 120, 16, 12, 1e-2
PARAMETERS = jnp.array([0.15, NOISE])
# The bound makes brackets of the value so tight that few steps are enough for it.
TIGHT = tx.SLQEstimator(lower_bound=NOISE)
SINGULAR = tx.SLQEstimator(lower_bound=NOISE, krylov=tx.GolubKahan())
LOOSE = tx.Adaptive(rtol=0.1, max_k=3 * K, round_size=K)
CASES = {
    "lanczos": (TIGHT, K, PSD),
    "tolerance": (TIGHT, LOOSE, PSD),
    "golub-kahan": (SINGULAR, K, ()),
}


@ft.cache
def squares():
    x = np.random.default_rng(0).uniform(size=(N, 2))
    return np.sum((x[:, None] - x) ** 2, axis=-1)


def kernel(parameters):
    length, noise = parameters
    return jnp.exp(-squares() / (2 * length**2)) + noise * jnp.eye(N)


def exact_gradient():
    length, noise = map(float, PARAMETERS)
    smooth = np.exp(-squares() / (2 * length**2))
    inverse = np.linalg.inv(smooth + noise * np.eye(N))
    along = np.sum(inverse * smooth * squares()) / length**3
    return np.array([along, np.trace(inverse)])


def logdet(parameters, key, estimator, k, tags, num_steps, gradient):
    operator = lx.MatrixLinearOperator(kernel(parameters), tags)
    settings = {"num_steps": num_steps, "gradient": gradient, "throw": False}
    if tags:
        settings["preconditioner"] = None
    solution = tx.logdet(operator, estimator, k=k, key=key, **settings)
    return solution.value, solution


@eqx.filter_jit
def gradients(*settings):
    """Gradients, and the solutions that they belong to, for several keys."""

    def one(key):
        both = eqx.filter_value_and_grad(logdet, has_aux=True)
        (_, solution), slope = both(PARAMETERS, key, *settings)
        return slope, solution.stats["num_steps"], solution.successful

    return jax.lax.map(one, jr.split(jr.key(1), NUM_KEYS))


@eqx.filter_jit
def steps_of_value(*settings):
    return logdet(PARAMETERS, jr.key(1), *settings)[1].stats["num_steps"]


@pytest.mark.slow(but="lanczos")
@pytest.mark.parametrize("name", CASES)
def test_bias_is_below_the_sampling_error(name):
    settings, gradient = CASES[name], tx.LanczosGradient()
    chosen, steps, successful = gradients(*settings, tx.AdaptiveSteps(), gradient)
    assert successful.all()
    converged, *_ = gradients(*settings, N - 1, gradient)
    sampling = np.std(converged, axis=0, ddof=1)
    # With the same probes, so that sampling errors cancel.
    bias = np.mean(chosen - converged, axis=0)
    assert np.all(np.abs(bias) < 0.3 * sampling)
    error = np.mean(chosen, axis=0) - exact_gradient()
    assert np.all(np.abs(error) < 4 * sampling / NUM_KEYS**0.5 + 0.3 * sampling)
    assert np.max(steps) < N - 1


@pytest.mark.slow
def test_steps_of_the_value_alone_are_too_few():
    """Without this the other tests prove nothing."""
    gradient = tx.LanczosGradient()
    made = int(steps_of_value(TIGHT, K, PSD, tx.AdaptiveSteps(), gradient))
    biased, *_ = gradients(TIGHT, LOOSE, PSD, made // 2, gradient)
    converged, *_ = gradients(TIGHT, K, PSD, N - 1, gradient)
    bias = np.abs(np.mean(biased - converged, axis=0))
    assert np.max(bias / np.std(converged, axis=0, ddof=1)) > 1


def test_only_derivatives_from_the_runs_take_more_steps():
    """In forward mode, too; neither values, nor derivatives by solves, nor derivatives of
    other arguments."""
    key, steps, lanczos = jr.key(1), tx.AdaptiveSteps(), tx.LanczosGradient()

    def made(parameters, gradient: tx.AbstractFunctionGradient = lanczos):
        settings = TIGHT, LOOSE, PSD, steps, gradient
        return logdet(parameters, key, *settings)[1].stats["num_steps"]

    @jax.jit
    def all_of(parameters):
        zeros = jnp.zeros_like(parameters)
        solves = tx.SolveGradient(lx.CG(rtol=1e-3, atol=1e-3))
        pushed = lambda fn: jax.jvp(fn, (parameters,), (zeros + 1,), has_aux=True)[-1]  # noqa: E731
        forward = pushed(lambda x: (x[0], made(x)))
        solved = pushed(lambda x: (x[0], made(x, gradient=solves)))
        return made(parameters), forward, solved

    value, forward, solved = all_of(PARAMETERS)
    assert value == solved < forward


@pytest.mark.slow
def test_too_few_steps_for_the_gradient(without_exact_answers):
    """A limit that is enough for the value alone is a failure of the gradient."""
    lanczos = tx.LanczosGradient()
    made = int(steps_of_value(TIGHT, LOOSE, PSD, tx.AdaptiveSteps(), lanczos))
    limited = tx.AdaptiveSteps(max_steps=made)
    _, solution = logdet(PARAMETERS, jr.key(1), TIGHT, LOOSE, PSD, limited, lanczos)
    assert solution.successful
    _, _, successful = gradients(TIGHT, LOOSE, PSD, limited, lanczos)
    assert not successful.any()
