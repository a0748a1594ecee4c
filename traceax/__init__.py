"""Traces of linear operators that can only be applied to vectors."""

from importlib.metadata import version as _version

from ._estimator.auto import (
    AutoTraceEstimator as AutoTraceEstimator,
    select_trace_estimator as select_trace_estimator,
)
from ._estimator.base import (
    AbstractSketchEstimator as AbstractSketchEstimator,
    AbstractStreamingEstimator as AbstractStreamingEstimator,
    AbstractTraceEstimator as AbstractTraceEstimator,
    Sketch as Sketch,
)
from ._estimator.exact import ExactTraceEstimator as ExactTraceEstimator
from ._estimator.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._estimator.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._estimator.nystrompp import NystromPlusPlusEstimator as NystromPlusPlusEstimator
from ._estimator.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._estimator.xtrace import XTraceEstimator as XTraceEstimator
from ._execution import AbstractExecution as AbstractExecution, Local as Local
from ._operator.curvature import (
    ggn as ggn,
    hessian as hessian,
    jacobian_gram as jacobian_gram,
)
from ._sampler import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._solution import RESULTS as RESULTS, Solution as Solution
from ._trace import trace as trace


__version__ = _version("traceax")
