"""The building blocks for estimators, quantities, gradients and preconditioners of your
own. They may change between minor releases.
"""

from ._api.measure import measure
from ._core.arithmetic import full_precision
from ._core.flat import FlatOperator
from ._core.moments import Moments
from ._core.norms import FrobeniusNorm, FrobeniusProducts, RowNorms
from ._core.quantity import AbstractQuantity, Diagonal, LeafTraces, Trace
from ._core.results import failure
from ._core.sampler import draw_for
from ._core.solution import Estimate
from ._estimators.growing import by_round
from ._krylov.block_lanczos import block_lanczos
from ._krylov.lanczos_recurrence import lanczos
from ._numerics.dense import eigh, qr, svd, thin_svd
from ._numerics.expansion import (
    AbstractExpansion,
    AbstractLeaveOneOut,
    Independent,
    OneSided,
)
from ._operators.door import flatten
from ._quadrature.quadratic_form import QuadraticForm
from ._run.gradient import (
    AbstractFrame,
    attach,
    attach_derivative,
    FirstOrderFrame,
    Frame,
    SolvedFrame,
)


__all__ = [
    "AbstractExpansion",
    "AbstractFrame",
    "AbstractLeaveOneOut",
    "AbstractQuantity",
    "Diagonal",
    "Estimate",
    "FirstOrderFrame",
    "FlatOperator",
    "Frame",
    "FrobeniusNorm",
    "FrobeniusProducts",
    "Independent",
    "LeafTraces",
    "Moments",
    "OneSided",
    "QuadraticForm",
    "RowNorms",
    "SolvedFrame",
    "Trace",
    "attach",
    "attach_derivative",
    "block_lanczos",
    "by_round",
    "draw_for",
    "eigh",
    "failure",
    "flatten",
    "full_precision",
    "lanczos",
    "measure",
    "qr",
    "svd",
    "thin_svd",
]
