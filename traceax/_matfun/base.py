import abc
from typing import ClassVar

import equinox as eqx
from jaxtyping import PRNGKeyArray

from .._adaptive import Adaptive
from .._execution import AbstractExecution
from .._sampler import AbstractSampler
from .._solution import Estimate
from .._vectors import FlatOperator
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient


class AbstractFunctionEstimator(eqx.Module):
    """An estimator of $\\mathrm{tr} f(A)$ for Hermitian $A$. Hand one to
    [`traceax.trace_of_function`][] or [`traceax.logdet`][].

    **Attributes:**

    - `min_probes`: the smallest `k` that it works with.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    min_probes: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Adaptive,
        num_steps: int,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """Estimate with at most `k * num_steps` products; `num_steps` is at most n."""


class AbstractFunctionTask(eqx.Module):
    """An estimator with the settings of one call, as `solve` wants it."""

    estimator: eqx.AbstractVar[AbstractFunctionEstimator]
    fallback: ClassVar[str] = "SLQEstimator"

    @property
    def name(self) -> str:
        return type(self.estimator).__name__

    @property
    def min_matvecs(self) -> int:
        return self.estimator.min_probes
