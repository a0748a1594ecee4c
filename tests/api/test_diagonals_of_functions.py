"""`diagonal_of_function` of several functions, from the same runs."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N = 40
EIGENVALUES = np.geomspace(0.1, 5, N)
MATRIX = hermitian(0, EIGENVALUES)
FUNCTIONS = {"decay": tx.Exp(-1.0), "log": tx.Log()}
ON_NODES = {"decay": lambda x: np.exp(-x), "log": np.log}
HUTCHINSON = tx.HutchinsonEstimator()
SETTINGS = {"k": 10, "num_steps": 10, "key": jr.key(1), "throw": False}


def diagonals(functions, scale=1.0, estimator=HUTCHINSON, **settings):
    operator = lx.MatrixLinearOperator(scale * jnp.asarray(MATRIX), PSD)
    return tx.diagonal_of_function(operator, functions, estimator, **SETTINGS | settings)


def exact(name):
    nodes, vectors = np.linalg.eigh(MATRIX)
    return np.abs(vectors) ** 2 @ ON_NODES[name](nodes)


def test_each_is_what_it_is_alone():
    """Values, error bars, bounds, derivatives and matvecs; the default is Hutchinson."""

    def value(scale, functions, estimator=HUTCHINSON):
        solution = diagonals(functions, scale, estimator)
        return solution.value, solution

    slopes, together = jax.jacfwd(
        lambda x: value(x, FUNCTIONS, tx.AutoDiagonalEstimator()), has_aux=True
    )(1.0)
    for name, function in FUNCTIONS.items():
        slope, alone = jax.jacfwd(ft.partial(value, functions=function), has_aux=True)(
            1.0
        )
        close = ft.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
        close(together.value[name], alone.value)
        close(together.std_err[name], alone.std_err)
        close(together.stats["bounds"][name], alone.stats["bounds"])
        truncation = together.stats["truncation_error"][name]
        close(truncation, alone.stats["truncation_error"])
        close(slopes[name], slope, rtol=1e-7)
        assert together.matvecs == alone.matvecs == 110


def test_exact():
    """By budget, and by a tolerance that no estimate reaches."""
    for k in (N, tx.Adaptive(rtol=1e-9)):
        solution = diagonals(FUNCTIONS, k=k)
        assert solution.successful
        for name in FUNCTIONS:
            np.testing.assert_allclose(solution.value[name], exact(name), atol=1e-12)


@pytest.mark.slow
def test_chosen_steps_suffice_for_the_worst():
    """With colours of two strata, and one function with complex values."""
    functions = {**FUNCTIONS, "wave": tx.Exp(1j)}
    sampler = tx.ColouredSampler(np.arange(N) % 2)
    choose = {"num_steps": tx.AdaptiveSteps(30)}
    estimator = tx.HutchinsonEstimator(sampler)
    together = diagonals(functions, estimator=estimator, **choose)
    alone = [diagonals(x, estimator=estimator, **choose) for x in functions.values()]
    steps = [int(x.stats["num_steps"]) for x in alone]
    assert int(together.stats["num_steps"]) == max(steps) > min(steps)
    for name in FUNCTIONS:
        error = np.abs(together.value[name] - exact(name))
        assert np.all(error < 7 * together.std_err[name])
        assert np.iscomplexobj(together.value[name])


@pytest.mark.slow
def test_intervals_hold_the_entries():
    """Of all entries and 100 keys, whose errors are alike: two points less than 95%."""

    @jax.jit
    def held(key):
        low, high = diagonals(FUNCTIONS, key=key, num_steps=20).interval()
        return {x: (low[x] <= exact(x)) & (exact(x) <= high[x]) for x in FUNCTIONS}

    held = jax.lax.map(held, jr.split(jr.key(0), 100), batch_size=25)
    for name in FUNCTIONS:
        assert np.mean(held[name]) > 0.93


def test_messages():
    with pytest.raises(ValueError, match="independent samples"):
        diagonals(FUNCTIONS, estimator=tx.XDiagEstimator())
    for name in ("deflation", "null_space"):
        with pytest.raises(ValueError, match=f"`{name}` is for a single function"):
            diagonals(FUNCTIONS, **{name: jnp.eye(N, 1)})
