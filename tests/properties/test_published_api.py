"""Scripts written for traceax 1.0 run, and give the numbers of `tx.trace`."""

import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax import (
    AbstractSampler,
    AbstractTraceEstimator,
    HutchinsonEstimator,
    HutchPlusPlusEstimator,
    NormalSampler,
    RademacherSampler,
    SphereSampler,
    XNysTraceEstimator,
    XTraceEstimator,
)

from ..helpers import hermitian, PSD


ESTIMATORS = [
    HutchinsonEstimator,
    HutchPlusPlusEstimator,
    XTraceEstimator,
    XNysTraceEstimator,
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@pytest.mark.slow(but=("HutchinsonEstimator", "HutchPlusPlusEstimator"))
@every_estimator
def test_estimators(estimator):
    matrix = hermitian(0, np.arange(1, 31) ** -1.0)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    key = jr.PRNGKey(0)
    solution = tx.trace(operator, estimator(), k=12, key=key)
    for call in (estimator(), estimator().estimate):
        value, stats = call(key, operator, 12)
        assert value == solution.value
        assert stats["std.err"] == solution.std_err
    assert abs(value - np.trace(matrix)) < 6 * stats["std.err"]  # fixed seed


@pytest.mark.slow(but="sampler0-*")
@every_estimator
@pytest.mark.parametrize("sampler", [NormalSampler(float), SphereSampler()])
def test_settings(estimator, sampler):
    assert isinstance(estimator(), AbstractTraceEstimator)
    assert isinstance(estimator().sampler, AbstractSampler)
    assert estimator(sampler).sampler is estimator(sampler=sampler).sampler is sampler


@pytest.mark.parametrize("estimator", [XTraceEstimator, XNysTraceEstimator])
def test_improved(estimator):
    assert estimator().improved
    assert not estimator(RademacherSampler(), improved=False).improved
    assert not estimator(RademacherSampler(), False).improved


@pytest.mark.parametrize(
    ("sampler", "dtype"),
    [
        (NormalSampler(), float),
        (NormalSampler(complex), complex),
        (SphereSampler(), float),
        (SphereSampler(complex), complex),
        (RademacherSampler(), float),
        (RademacherSampler(int), int),
        (RademacherSampler(dtype=float), float),
    ],
)
def test_samplers(sampler, dtype):
    probes = sampler(jr.PRNGKey(0), 30, 12)
    assert probes.shape == (30, 12)
    assert probes.dtype == dtype
