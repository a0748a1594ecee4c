"""Tasks, in the sense of `_run/solve.py`, that estimate the trace of a function."""

import dataclasses
from typing import Self

import equinox as eqx
import jax
from jaxtyping import Array, PRNGKeyArray

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.shifted import Shifted
from .._core.solution import Estimate
from .._operators.door import Facts
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.random_steps import RandomSteps
from .._run.solve import AbstractTask
from .._run.steps import AdaptiveSteps, exact_limit
from .all_eigenvalues import exact_traces, trace_from_eigenvalues
from .base import AbstractFunctionEstimator
from .gradients import AbstractFunctionGradient
from .several import join_members


# A probe takes about so many matvecs or more, so n of them are spent by n / 8 probes, and
# the exact answer costs less than further ones.
_TYPICAL_STEPS = 8


class AbstractTaskOfFunction(AbstractTask):
    """A quantity of a function of an operator.

    - `offset`: what is known of the quantity and added to the answer, of its shape, or
        None. Relative tolerances are for the sum.
    """

    function: eqx.AbstractVar[AbstractSpectralFunction | FunctionTree]
    num_steps: eqx.AbstractVar[int | AdaptiveSteps | RandomSteps]
    offset: eqx.AbstractVar[Array | None]

    def operand(self, operator: FlatOperator) -> FlatOperator:
        """The operator that the function is applied to: A, or its negative."""
        return operator

    def beside(self, known: Array) -> Self:
        """The same task, with a further part that is known."""
        total = known if self.offset is None else self.offset + known
        return dataclasses.replace(self, offset=total)


class AbstractFunctionTask(AbstractTaskOfFunction):
    """The trace of a function, estimated or computed from all eigenvalues. Subclasses
    choose the operator that the function is applied to, and post-process the estimate.
    """

    estimator: AbstractFunctionEstimator
    function: AbstractSpectralFunction | FunctionTree
    gradient: AbstractFunctionGradient
    num_steps: int | AdaptiveSteps | RandomSteps
    quantity: AbstractQuantity = eqx.field(default=Trace(), kw_only=True)
    offset: Array | None = eqx.field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return type(self.estimator).__name__

    @property
    def title(self) -> str:
        return f"Trace of {self.function.title}"

    @property
    def min_matvecs(self) -> int:
        return max(self.estimator.min_probes, self.estimator.sampler.num_strata)

    @property
    def fallback(self) -> str:
        strata = self.estimator.sampler.num_strata
        return "RademacherSampler" if strata > 1 else "SLQEstimator"

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        return 0 if self.is_known(facts) else operator.size

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    def exact_limit(self, operator: FlatOperator) -> int:
        # Without orthogonal eigenvectors or singular vectors a factorisation takes ten
        # times as long, so the exact answer replaces an estimate for smaller n only.
        orthogonal = operator.hermitian or self.function.of_singular_values
        return exact_limit(orthogonal=orthogonal)

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        most = self.estimator.default_max_k(operator)
        if operator.size > self.exact_limit(operator):
            return most
        return min(most, operator.size // _TYPICAL_STEPS)

    def is_known(self, facts: Facts) -> bool:
        """Whether the answer follows from facts about the operator, without a matvec."""
        return facts.spectrum is not None

    def known(self, operator: FlatOperator, facts: Facts) -> Estimate:
        """The answer, if it `is_known`."""
        assert facts.spectrum is not None
        operand, eigenvalues = self.operand(operator), facts.spectrum.eigenvalues
        if operand is not operator:  # its negative
            eigenvalues = -eigenvalues
        estimates = [
            trace_from_eigenvalues(operand, function, eigenvalues)
            for function in members_of(self.function)
        ]
        return self.finish(operator, join_members(self.function, estimates))

    def finish(self, operator: FlatOperator, estimate: Estimate) -> Estimate:
        """The estimate, post-processed."""
        return estimate

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        if self.is_known(facts):
            return self._moved(self.known(operator, facts))
        operand = self.operand(operator)
        functions = members_of(self.function)
        estimates = exact_traces(operand, functions, self.gradient, execution)
        estimate = join_members(self.function, estimates)
        return self._moved(self.finish(operator, estimate))

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        quantity = self.quantity
        if self.offset is not None:
            quantity = Shifted(quantity, jax.lax.stop_gradient(self.offset))
        estimate = self.estimator.run(
            self.operand(operator),
            self.function,
            self.gradient,
            k=k,
            num_steps=self.num_steps,
            key=key,
            execution=execution,
            quantity=quantity,
        )
        return self._moved(self.finish(operator, estimate))

    def _moved(self, estimate: Estimate) -> Estimate:
        return estimate if self.offset is None else estimate.moved(self.offset)


class TraceOfFunction(AbstractFunctionTask):
    """The trace itself, without post-processing."""
