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
from ._adaptive import Adaptive as Adaptive
from ._check_operator import check_operator as check_operator
from ._devices import (
    default_device as default_device,
    devices as devices,
    probe_mesh as probe_mesh,
)
from ._diagonal import (
    diagonal as diagonal,
    jacobi_preconditioner as jacobi_preconditioner,
    leaf_traces as leaf_traces,
)
from ._diagonal_of_function import diagonal_of_function as diagonal_of_function
from ._divergence import divergence as divergence
from ._dynamic import DynamicState as DynamicState, DynamicTrace as DynamicTrace
from ._estimator.auto import (
    AutoTraceEstimator as AutoTraceEstimator,
    select_trace_estimator as select_trace_estimator,
)
from ._estimator.auto_diagonal import AutoDiagonalEstimator as AutoDiagonalEstimator
from ._estimator.base import (
    AbstractStreamingEstimator as AbstractStreamingEstimator,
    AbstractTraceEstimator as AbstractTraceEstimator,
)
from ._estimator.diagpp import DiagPlusPlusEstimator as DiagPlusPlusEstimator
from ._estimator.exact import ExactTraceEstimator as ExactTraceEstimator
from ._estimator.growing import AbstractGrowingEstimator as AbstractGrowingEstimator
from ._estimator.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._estimator.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._estimator.nystrompp import NystromPlusPlusEstimator as NystromPlusPlusEstimator
from ._estimator.sketch import (
    AbstractSketchEstimator as AbstractSketchEstimator,
    Sketch as Sketch,
)
from ._estimator.xdiag import XDiagEstimator as XDiagEstimator
from ._estimator.xnysdiag import XNysDiagEstimator as XNysDiagEstimator
from ._estimator.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._estimator.xtrace import XTraceEstimator as XTraceEstimator
from ._execution import AbstractExecution as AbstractExecution, Local as Local
from ._flat import hermitian_tag as hermitian_tag
from ._gaussian import gaussian_log_prob as gaussian_log_prob
from ._laplacian import laplacian as laplacian
from ._log_trace_exp import log_trace_exp as log_trace_exp
from ._logdet import logdet as logdet
from ._matfun.arnoldi import Arnoldi as Arnoldi
from ._matfun.auto_preconditioner import AutoPreconditioner as AutoPreconditioner
from ._matfun.base import AbstractFunctionEstimator as AbstractFunctionEstimator
from ._matfun.function_of import function_of as function_of
from ._matfun.functions import (
    AbstractSpectralFunction as AbstractSpectralFunction,
    Entropy as Entropy,
    Exp as Exp,
    Inverse as Inverse,
    Log as Log,
    Power as Power,
)
from ._matfun.golub_kahan import GolubKahan as GolubKahan
from ._matfun.gradients import (
    AbstractFunctionGradient as AbstractFunctionGradient,
    LanczosGradient as LanczosGradient,
    SolveGradient as SolveGradient,
)
from ._matfun.krylov import AbstractKrylovMethod as AbstractKrylovMethod
from ._matfun.krylov_aware import KrylovAwareEstimator as KrylovAwareEstimator
from ._matfun.lanczos import Lanczos as Lanczos
from ._matfun.make_preconditioner import (
    nystrom_preconditioner as nystrom_preconditioner,
    pivoted_cholesky_preconditioner as pivoted_cholesky_preconditioner,
)
from ._matfun.preconditioned import Preconditioned as Preconditioned
from ._matfun.preconditioner import (
    AbstractPreconditioner as AbstractPreconditioner,
    Preconditioner as Preconditioner,
)
from ._matfun.slq import SLQEstimator as SLQEstimator
from ._matfun.spectral_density import (
    spectral_density as spectral_density,
    SpectralDensity as SpectralDensity,
)
from ._matfun.steps import AdaptiveSteps as AdaptiveSteps
from ._norms import (
    frobenius_norm as frobenius_norm,
    frobenius_products as frobenius_products,
    row_norms as row_norms,
)
from ._operator.curvature import (
    empirical_fisher as empirical_fisher,
    ggn as ggn,
    hessian as hessian,
    jacobian_gram as jacobian_gram,
)
from ._operator.data_gram import data_gram as data_gram
from ._operator_report import OperatorReport as OperatorReport
from ._results import RESULTS as RESULTS
from ._sampler import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._schatten import schatten_norm as schatten_norm
from ._sharded import Sharded as Sharded
from ._solution import Solution as Solution
from ._trace import trace as trace
from ._trace_difference import trace_difference as trace_difference
from ._trace_of_function import trace_of_function as trace_of_function


__version__ = _version("traceax")
