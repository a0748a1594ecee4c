"""The parts that estimators, quantities, gradients and preconditioners of your own need.

They may change between minor releases.
"""

from ._estimator.growing import by_round as by_round
from ._execution import full_precision as full_precision
from ._flat import FlatOperator as FlatOperator, flatten as flatten
from ._gradient import (
    AbstractFrame as AbstractFrame,
    attach as attach,
    attach_derivative as attach_derivative,
    FirstOrderFrame as FirstOrderFrame,
    Frame as Frame,
    SolvedFrame as SolvedFrame,
)
from ._kernel.dense import eigh as eigh, qr as qr, svd as svd, thin_svd as thin_svd
from ._kernel.expansion import (
    AbstractExpansion as AbstractExpansion,
    AbstractLeaveOneOut as AbstractLeaveOneOut,
    Independent as Independent,
    OneSided as OneSided,
)
from ._kernel.lanczos import block_lanczos as block_lanczos, lanczos as lanczos
from ._matfun.quadratic_form import QuadraticForm as QuadraticForm
from ._measure import measure as measure
from ._moments import Moments as Moments
from ._quantity import (
    AbstractQuantity as AbstractQuantity,
    Diagonal as Diagonal,
    FrobeniusNorm as FrobeniusNorm,
    FrobeniusProducts as FrobeniusProducts,
    LeafTraces as LeafTraces,
    RowNorms as RowNorms,
    Trace as Trace,
)
from ._results import failure as failure
from ._sampler import draw_for as draw_for
from ._solution import Estimate as Estimate
