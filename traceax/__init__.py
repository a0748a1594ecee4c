"""Traces, diagonals, log-determinants and spectra of linear operators that can only be
applied to vectors.

```python
import jax, lineax as lx, traceax as tx

x = jax.random.normal(jax.random.key(0), (500, 20))
operator = lx.FunctionLinearOperator(
    lambda v: x @ (x.T @ v),
    jax.ShapeDtypeStruct((500,), x.dtype),
    lx.positive_semidefinite_tag,
)
solution = tx.trace(operator, k=40, key=jax.random.key(1))
print(solution.value, "+-", solution.std_err)
```

Start with `help(traceax.trace)` and `help(traceax.logdet)`.
"""

from importlib.metadata import version as _version

from . import plot as plot
from ._api.check_operator import check_operator as check_operator
from ._api.diagonal import (
    diagonal as diagonal,
    leaf_traces as leaf_traces,
)
from ._api.diagonal_of_function import diagonal_of_function as diagonal_of_function
from ._api.divergence import divergence as divergence
from ._api.dynamic_trace import DynamicState as DynamicState, DynamicTrace as DynamicTrace
from ._api.function_of import function_of as function_of
from ._api.gaussian_log_prob import gaussian_log_prob as gaussian_log_prob
from ._api.jacobi_preconditioner import jacobi_preconditioner as jacobi_preconditioner
from ._api.laplacian import laplacian as laplacian
from ._api.log_trace_exp import log_trace_exp as log_trace_exp
from ._api.logdet import logdet as logdet
from ._api.norms import (
    frobenius_norm as frobenius_norm,
    frobenius_products as frobenius_products,
    row_norms as row_norms,
)
from ._api.operator_report import OperatorReport as OperatorReport
from ._api.schatten_norm import schatten_norm as schatten_norm
from ._api.spectral_density import (
    spectral_density as spectral_density,
    SpectralDensity as SpectralDensity,
)
from ._api.trace import trace as trace
from ._api.trace_difference import trace_difference as trace_difference
from ._api.trace_of_function import trace_of_function as trace_of_function
from ._core.quantity import AbstractQuantity as AbstractQuantity
from ._core.results import RESULTS as RESULTS
from ._core.sampler import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._core.solution import Solution as Solution
from ._estimators.auto import (
    AutoTraceEstimator as AutoTraceEstimator,
    select_trace_estimator as select_trace_estimator,
)
from ._estimators.auto_diagonal import AutoDiagonalEstimator as AutoDiagonalEstimator
from ._estimators.base import (
    AbstractEstimator as AbstractEstimator,
    AbstractStreamingEstimator as AbstractStreamingEstimator,
    AbstractTraceEstimator as AbstractTraceEstimator,
)
from ._estimators.diagpp import DiagPlusPlusEstimator as DiagPlusPlusEstimator
from ._estimators.exact import ExactTraceEstimator as ExactTraceEstimator
from ._estimators.growing import AbstractGrowingEstimator as AbstractGrowingEstimator
from ._estimators.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._estimators.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._estimators.nystrompp import NystromPlusPlusEstimator as NystromPlusPlusEstimator
from ._estimators.sketch import (
    AbstractSketchEstimator as AbstractSketchEstimator,
    Sketch as Sketch,
)
from ._estimators.xdiag import XDiagEstimator as XDiagEstimator
from ._estimators.xnysdiag import XNysDiagEstimator as XNysDiagEstimator
from ._estimators.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator as XTraceEstimator
from ._functions.base import AbstractFunctionEstimator as AbstractFunctionEstimator
from ._functions.gradients import (
    AbstractFunctionGradient as AbstractFunctionGradient,
    LanczosGradient as LanczosGradient,
    SolveGradient as SolveGradient,
)
from ._functions.krylov_aware import KrylovAwareEstimator as KrylovAwareEstimator
from ._functions.preconditioned import Preconditioned as Preconditioned
from ._functions.slq import SLQEstimator as SLQEstimator
from ._krylov.arnoldi import Arnoldi as Arnoldi
from ._krylov.base import AbstractKrylovMethod as AbstractKrylovMethod
from ._krylov.golub_kahan import GolubKahan as GolubKahan
from ._krylov.lanczos import Lanczos as Lanczos
from ._operators.curvature import (
    empirical_fisher as empirical_fisher,
    ggn as ggn,
    hessian as hessian,
    jacobian_gram as jacobian_gram,
)
from ._operators.data_gram import data_gram as data_gram
from ._operators.tags import hermitian_tag as hermitian_tag
from ._preconditioners.auto import AutoPreconditioner as AutoPreconditioner
from ._preconditioners.base import (
    AbstractPreconditioner as AbstractPreconditioner,
    AbstractPreconditioning as AbstractPreconditioning,
    Preconditioner as Preconditioner,
)
from ._preconditioners.diagonal import (
    DiagonalPreconditioner as DiagonalPreconditioner,
)
from ._preconditioners.make import (
    nystrom_preconditioner as nystrom_preconditioner,
    pivoted_cholesky_preconditioner as pivoted_cholesky_preconditioner,
)
from ._quadrature.functions import (
    AbstractSpectralFunction as AbstractSpectralFunction,
    Entropy as Entropy,
    Exp as Exp,
    Inverse as Inverse,
    Log as Log,
    Power as Power,
)
from ._run.adaptive import Adaptive as Adaptive
from ._run.devices import (
    default_device as default_device,
    devices as devices,
    probe_mesh as probe_mesh,
)
from ._run.execution import AbstractExecution as AbstractExecution, Local as Local
from ._run.sharded import Sharded as Sharded
from ._run.steps import AdaptiveSteps as AdaptiveSteps


__version__ = _version("traceax")
