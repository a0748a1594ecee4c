"""The parts that estimators, quantities, gradients and preconditioners of your own need.

They may change between minor releases.
"""

from ._api.measure import measure as measure
from ._core.arithmetic import full_precision as full_precision
from ._core.flat import FlatOperator as FlatOperator
from ._core.moments import Moments as Moments
from ._core.quantity import (
    AbstractQuantity as AbstractQuantity,
    Diagonal as Diagonal,
    FrobeniusNorm as FrobeniusNorm,
    FrobeniusProducts as FrobeniusProducts,
    LeafTraces as LeafTraces,
    RowNorms as RowNorms,
    Trace as Trace,
)
from ._core.results import failure as failure
from ._core.sampler import draw_for as draw_for
from ._core.solution import Estimate as Estimate
from ._estimators.growing import by_round as by_round
from ._krylov.block_lanczos import block_lanczos as block_lanczos
from ._krylov.lanczos_recurrence import lanczos as lanczos
from ._numerics.dense import eigh as eigh, qr as qr, svd as svd, thin_svd as thin_svd
from ._numerics.expansion import (
    AbstractExpansion as AbstractExpansion,
    AbstractLeaveOneOut as AbstractLeaveOneOut,
    Independent as Independent,
    OneSided as OneSided,
)
from ._operators.door import flatten as flatten
from ._quadrature.quadratic_form import QuadraticForm as QuadraticForm
from ._run.gradient import (
    AbstractFrame as AbstractFrame,
    attach as attach,
    attach_derivative as attach_derivative,
    FirstOrderFrame as FirstOrderFrame,
    Frame as Frame,
    SolvedFrame as SolvedFrame,
)
