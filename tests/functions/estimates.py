"""Compiled estimates of functions, and their derivatives in one direction."""

import functools as ft

import equinox as eqx
import jax
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx


PSD = lx.positive_semidefinite_tag
KEY = jr.key(3)
N = 32


@eqx.filter_jit
def over_keys(function, *args, num_keys=300):
    """`function(key, *args)` for each of many keys, stacked."""
    keys = jr.split(jr.key(20261121), num_keys)
    return jax.lax.map(lambda key: function(key, *args), keys)


@eqx.filter_jit
def exactly_and_over_keys(function, n, k, *args, num_keys=300):
    """`function(None, n, *args)`, which needs no key, and for each of many keys
    `function(key, k, *args)`, stacked."""
    return function(None, n, *args), over_keys(function, k, *args, num_keys=num_keys)


@eqx.filter_jit
def compiled(function, *args, **settings):
    """One program for each function of this module, its settings, shapes and dtypes."""
    return function(*args, **settings)


def logdet(matrix, estimator=tx.SLQEstimator(), tags=PSD, **settings):
    operator = lx.MatrixLinearOperator(matrix, tags)
    return tx.logdet(operator, estimator, throw=False, **settings)


def trace_of(matrix, function, estimator=tx.SLQEstimator(), tags=PSD, **settings):
    operator = lx.MatrixLinearOperator(matrix, tags)
    return tx.trace_of_function(operator, function, estimator, throw=False, **settings)


@ft.cache
def seen_by(n, k):
    """The first k probes of KEY."""
    return np.asarray(compiled(tx.RademacherSampler(), KEY, n, k))


def value_and_slope(key, matrix, direction, call, **settings):
    """Of `call(matrix + t direction)` at t = 0."""

    def value(t):
        solution = call(matrix + t * direction, key=key, **settings)
        return solution.value, solution.std_err

    (found, std_err), slope = jax.value_and_grad(value, has_aux=True)(0.0)
    return found, slope, std_err


def slope_along(values, vectors, slopes, direction):
    """`tr(f'(A) dA)`."""
    diagonal = np.sum(vectors.conj() * (direction @ vectors), axis=0).real
    return np.sum(slopes(values) * diagonal)


def points(n):
    return np.random.default_rng(0).uniform(size=(n, 2))


def rbf(n, noise, dtype):
    x = points(n)
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    return (np.exp(-square / (2 * 0.2**2)) + noise * np.eye(n)).astype(dtype)
