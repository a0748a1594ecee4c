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

from . import plot
from ._api.check_operator import check_operator
from ._api.colours import graph_colours, grid_colours
from ._api.diagonal import (
    diagonal,
    leaf_traces,
)
from ._api.diagonal_of_function import diagonal_of_function
from ._api.diagonal_of_product import diagonal_of_product
from ._api.divergence import divergence
from ._api.dynamic_trace import DynamicState, DynamicTrace
from ._api.eigsh import Eigenpairs, eigsh
from ._api.estimate import estimate
from ._api.function_of import function_of
from ._api.gaussian_log_prob import gaussian_log_prob
from ._api.jacobi_preconditioner import jacobi_preconditioner
from ._api.laplacian import laplacian
from ._api.log_trace_exp import log_trace_exp
from ._api.logdet import logdet
from ._api.minibatch_trace import minibatch_trace
from ._api.norms import (
    frobenius_norm,
    frobenius_products,
    row_norms,
)
from ._api.operator_report import OperatorReport
from ._api.schatten_norm import schatten_norm
from ._api.spectral_density import spectral_density
from ._api.spectral_measure import SpectralDensity
from ._api.svds import SingularTriplets, svds
from ._api.trace import trace
from ._api.trace_difference import trace_difference
from ._api.trace_of_function import trace_of_function
from ._api.trace_of_solves import trace_of_solves
from ._core.coloured_sampler import ColouredSampler
from ._core.quantity import AbstractQuantity, Diagonal, LeafTraces, Trace
from ._core.results import RESULTS
from ._core.sampler import AbstractSampler
from ._core.samplers import (
    NormalSampler,
    RademacherSampler,
    SphereSampler,
    SteinhausSampler,
)
from ._core.solution import Solution
from ._estimators.auto import (
    AutoTraceEstimator,
    select_trace_estimator,
)
from ._estimators.auto_diagonal import AutoDiagonalEstimator
from ._estimators.base import AbstractEstimator, AbstractTraceEstimator
from ._estimators.diagpp import DiagPlusPlusEstimator
from ._estimators.exact import ExactTraceEstimator
from ._estimators.growing import AbstractGrowingEstimator
from ._estimators.hutchinson import HutchinsonEstimator
from ._estimators.hutchpp import HutchPlusPlusEstimator
from ._estimators.nystrompp import NystromPlusPlusEstimator
from ._estimators.sketch import (
    AbstractSketchEstimator,
    Sketch,
)
from ._estimators.streaming import AbstractStreamingEstimator
from ._estimators.xdiag import XDiagEstimator
from ._estimators.xnysdiag import XNysDiagEstimator
from ._estimators.xnystrace import XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator
from ._functions.base import AbstractFunctionEstimator
from ._functions.gradients import (
    AbstractFunctionGradient,
    LanczosGradient,
    SolveGradient,
)
from ._functions.krylov_aware import KrylovAwareEstimator
from ._functions.preconditioned import Preconditioned
from ._functions.slq import SLQEstimator
from ._krylov.arnoldi import Arnoldi
from ._krylov.base import AbstractKrylovMethod
from ._krylov.golub_kahan import GolubKahan
from ._krylov.lanczos import Lanczos
from ._operators.convert import as_operator, sparse
from ._operators.curvature import (
    empirical_fisher,
    ggn,
    hessian,
    jacobian_gram,
)
from ._operators.data_gram import data_gram
from ._operators.factored import block_diagonal, kronecker, kronecker_sum
from ._operators.fisher import (
    AbstractLikelihood,
    CategoricalLikelihood,
    fisher,
    GaussianLikelihood,
)
from ._operators.tags import hermitian_tag
from ._operators.toeplitz import circulant, toeplitz
from ._operators.trace_of_product import TraceOfProduct
from ._preconditioners.auto import AutoPreconditioner
from ._preconditioners.base import AbstractPreconditioner, AbstractPreconditioning
from ._preconditioners.diagonal import (
    DiagonalPreconditioner,
)
from ._preconditioners.low_rank import Preconditioner
from ._preconditioners.make import (
    nystrom_preconditioner,
    pivoted_cholesky_preconditioner,
)
from ._preconditioners.scaled import ScaledPreconditioner
from ._quadrature.functions import (
    AbstractSpectralFunction,
    Entropy,
    Exp,
    Inverse,
    Log,
    Power,
)
from ._run.adaptive import Adaptive
from ._run.devices import (
    default_device,
    devices,
    probe_mesh,
)
from ._run.execution import AbstractExecution, Local
from ._run.lapack_threads import single_threaded_lapack
from ._run.matvecs import Matvecs
from ._run.norms import each_entry, each_leaf
from ._run.random_steps import RandomSteps
from ._run.sharded import Sharded
from ._run.steps import AdaptiveSteps


__version__ = _version("traceax")

__all__ = [
    # Calls.
    "check_operator",
    "diagonal",
    "diagonal_of_function",
    "diagonal_of_product",
    "divergence",
    "DynamicState",
    "DynamicTrace",
    "Eigenpairs",
    "eigsh",
    "estimate",
    "frobenius_norm",
    "frobenius_products",
    "function_of",
    "gaussian_log_prob",
    "jacobi_preconditioner",
    "laplacian",
    "leaf_traces",
    "log_trace_exp",
    "logdet",
    "minibatch_trace",
    "OperatorReport",
    "row_norms",
    "schatten_norm",
    "SingularTriplets",
    "spectral_density",
    "SpectralDensity",
    "svds",
    "trace",
    "trace_difference",
    "trace_of_function",
    "trace_of_solves",
    # Estimators.
    "AbstractEstimator",
    "AbstractGrowingEstimator",
    "AbstractSketchEstimator",
    "AbstractStreamingEstimator",
    "AbstractTraceEstimator",
    "AutoDiagonalEstimator",
    "AutoTraceEstimator",
    "DiagPlusPlusEstimator",
    "ExactTraceEstimator",
    "HutchinsonEstimator",
    "HutchPlusPlusEstimator",
    "NystromPlusPlusEstimator",
    "select_trace_estimator",
    "Sketch",
    "XDiagEstimator",
    "XNysDiagEstimator",
    "XNysTraceEstimator",
    "XTraceEstimator",
    # Functions of operators.
    "AbstractFunctionEstimator",
    "AbstractFunctionGradient",
    "AbstractKrylovMethod",
    "AbstractSpectralFunction",
    "Arnoldi",
    "Entropy",
    "Exp",
    "GolubKahan",
    "Inverse",
    "KrylovAwareEstimator",
    "Lanczos",
    "LanczosGradient",
    "Log",
    "Power",
    "Preconditioned",
    "SLQEstimator",
    "SolveGradient",
    # Preconditioners.
    "AbstractPreconditioner",
    "AbstractPreconditioning",
    "AutoPreconditioner",
    "DiagonalPreconditioner",
    "nystrom_preconditioner",
    "pivoted_cholesky_preconditioner",
    "Preconditioner",
    "ScaledPreconditioner",
    # Operators.
    "AbstractLikelihood",
    "as_operator",
    "block_diagonal",
    "CategoricalLikelihood",
    "circulant",
    "data_gram",
    "empirical_fisher",
    "fisher",
    "GaussianLikelihood",
    "ggn",
    "graph_colours",
    "grid_colours",
    "hermitian_tag",
    "hessian",
    "jacobian_gram",
    "kronecker",
    "kronecker_sum",
    "sparse",
    "toeplitz",
    # Quantities.
    "AbstractQuantity",
    "Diagonal",
    "LeafTraces",
    "Trace",
    "TraceOfProduct",
    # Budgets, devices, samplers, results.
    "AbstractExecution",
    "AbstractSampler",
    "Adaptive",
    "each_entry",
    "each_leaf",
    "AdaptiveSteps",
    "RandomSteps",
    "default_device",
    "devices",
    "Local",
    "ColouredSampler",
    "Matvecs",
    "NormalSampler",
    "probe_mesh",
    "single_threaded_lapack",
    "RademacherSampler",
    "RESULTS",
    "Sharded",
    "Solution",
    "SphereSampler",
    "SteinhausSampler",
    "plot",
]
