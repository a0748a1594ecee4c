"""Diagonals of functions, `diag f(A)`, from matvecs `f(A) v` by Lanczos.

With a preconditioner P of the inverse, and M = P^(-1/2) A P^(-1/2) (`product`),

    diag A^-1 = diag P^-1 + diag P^(-1/2) (M^-1 - I) P^(-1/2).

The first part is the `offset`; `estimator` estimates the second one. One more Lanczos
run, from `probe`, shows the truncation error (`_functions/products.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import draw_for
from .._core.samplers import RademacherSampler
from .._core.shifted import Shifted
from .._core.solution import Estimate
from .._estimators.base import AbstractEstimator
from .._functions.action import Action
from .._functions.matrix_diagonal import exact_diagonal_of_function
from .._functions.preconditioned import Prepared
from .._functions.products import InverseMinusOne, PreconditionedAction, RunReport
from .._functions.task import AbstractTaskOfFunction
from .._krylov.lanczos import Lanczos
from .._krylov.lanczos_recurrence import LanczosState
from .._numerics.dense import two_norm
from .._operators.door import Facts
from .._preconditioners.base import AbstractPreconditioning
from .._quadrature.domain import check_domain, domain_result, is_complex_on_reals
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.steps import (
    AdaptiveSteps,
    choose_steps,
    DEVIATION_IN_STRATUM,
    exact_limit,
    excess,
    Steps,
)


# By whether steps are chosen, `hidden` of `Action.lower_end`: the share of its mean
# weight that an eigenvector must have in a probe to be seen. One in seven has less than
# 0.03, and one in 23 less than 0.003 (docs/devdocs/quadrature.md). The smaller share
# takes more steps. It is for given numbers of steps, where no error says that they are
# too few.
HIDDEN = {True: 0.03, False: 0.003}
# Rounding errors above this share of the value change its second digit: the call fails.
MAX_ROUNDING = 0.02


def root_mean_square(entries: Inexact[Array, " n"]) -> Real[Array, ""]:
    return two_norm(entries) / entries.size**0.5


class DiagonalOfFunction(AbstractTaskOfFunction):
    """The diagonal of a function, by an estimator of diagonals."""

    estimator: AbstractEstimator
    quantity: AbstractQuantity
    function: AbstractSpectralFunction
    num_steps: int | AdaptiveSteps
    preconditioner: AbstractPreconditioning | None
    offset: Array | None = None

    @property
    def name(self) -> str:
        return self.estimator.name

    @property
    def title(self) -> str:
        return f"Diagonal of {self.function.title}"

    @property
    def min_matvecs(self) -> int:
        return self.estimator.smallest_budget

    @property
    def fallback(self) -> str:
        return self.estimator.fallback

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit()

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return self.estimator.default_max_k(operator, k)

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        estimate = exact_diagonal_of_function(operator, self.function, execution)
        return estimate if self.offset is None else estimate.moved(self.offset)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat, function, outer, prepared = operator, self.function, None, None
        is_complex = is_complex_on_reals(function, flat.dtype)
        # Two products with a real operator make one with a complex vector.
        cost = 1
        if is_complex:
            flat = flat.complexified
            cost = 1 if flat is operator else 2
        if self.preconditioner is not None:
            arguments = {"k": k, "num_steps": self.num_steps}
            arguments |= {"key": key, "execution": execution}
            prepared = Prepared.of(freeze(self.preconditioner), flat.frozen, arguments)
            outer, k = prepared.preconditioner, prepared.call["k"]
        offset, num_matvecs = jnp.zeros((), flat.dtype), 0
        quantity = self.quantity
        if outer is not None:
            flat, function = outer.apply_to(flat), InverseMinusOne()
            offset = jax.lax.stop_gradient(outer.diagonal_of_power(-1.0))
            num_matvecs = outer.num_matvecs
        if self.offset is not None:
            offset = offset + self.offset
        if offset.ndim > 0:
            # Tolerances are relative to the whole diagonal, not to the estimated part.
            quantity = Shifted(quantity, jax.lax.stop_gradient(offset))
        max_steps, adaptive = self.num_steps, isinstance(self.num_steps, AdaptiveSteps)
        if isinstance(max_steps, AdaptiveSteps):
            max_steps = max_steps.most
        action = Action(flat, function=function, most=max_steps, steps=max_steps)
        product = PreconditionedAction(action, outer)
        probe = draw_for(flat, RademacherSampler(), key, jnp.zeros(1, int))[:, 0]
        mean = jnp.mean(jax.lax.stop_gradient(offset))
        steps, remaining = Steps.resumed(
            self.num_steps,
            lambda _: self._choose_steps(
                product, probe=probe, mean_offset=mean, k=k, execution=execution
            ),
            k,
        )
        if adaptive:
            product = product.after(jnp.asarray(steps.made))
            num_matvecs = num_matvecs + steps.spent
        sign = 1 if function.nonnegative else 0
        of_function = dataclasses.replace(
            flat, fn=product, hermitian=not is_complex, sign=sign, sign_holds=None
        )
        # By position: estimators of users may name these arguments differently.
        estimate = self.estimator.measure(
            quantity, of_function, remaining, key, execution
        )
        state = steps.state(estimate.state)
        if prepared is not None:
            state = prepared.state(state)
        # One run more than those of the estimate, from `probe`.
        num_runs = estimate.num_matvecs + 1
        estimate = dataclasses.replace(
            estimate,
            num_matvecs=cost * (num_runs * steps.made + num_matvecs),
            state=state,
        )
        # Errors have no derivatives. The run is one that `product` makes for the
        # estimate, with its buffers and steps.
        constant, frozen = freeze(product), jax.lax.stop_gradient(probe)
        state, made, _ = constant.action.advanced(constant.start(frozen))
        return self.with_truncation_error(
            estimate,
            product=product,
            state=state,
            steps=made,
            probe=probe,
            offset=offset,
            mean_offset=mean,
            k=k,
        )

    def with_truncation_error(
        self,
        estimate: Estimate,
        product: PreconditionedAction,
        state: LanczosState,
        steps: Int[Array, ""] | int,
        probe: Inexact[Array, " n"],
        offset: Inexact[Array, "..."],
        mean_offset: Inexact[Array, ""],
        k: int | Budget,
    ) -> Estimate:
        """The estimate plus the `offset`, with what the run from `probe` shows of its
        errors, whose `state` after these `steps` is constant."""
        flat, function = product.action.operator, product.action.function
        adaptive = isinstance(self.num_steps, AdaptiveSteps)
        outer = product.preconditioner
        report = freeze(product).look(state, steps, HIDDEN[adaptive])
        in_domain = check_domain(
            function,
            operator=flat,
            extremes=report.extremes,
            value=jnp.sum(report.product),
        )
        # A matvec of the estimate is NaN if it met an eigenvalue outside the domain that
        # this probe did not meet.
        lost = jnp.isfinite(report.product).all() & ~jnp.isfinite(estimate.value).all()
        in_domain_of_all = failure(lost, domain_result(function, flat))
        value = estimate.value + offset.astype(estimate.value.dtype)
        max_rounding = MAX_ROUNDING * root_mean_square(value)
        precision = failure(
            root_mean_square(report.rounding) > max_rounding, RESULTS.precision_lost
        )
        # Errors of some entries may be much larger than others, but an entry with a large
        # error may by chance show a small one for this probe. So the root mean square is
        # the smallest error of any entry.
        error = report.truncated + report.rounding
        typical = root_mean_square(error)
        error = jnp.maximum(error, typical)
        reach = error + report.beyond[:, None]
        low, high = value.real - reach[0], value.real + reach[1]
        # The diagonal of a nonnegative function is nonnegative, whatever its error.
        if self.function.nonnegative:
            low = jnp.maximum(low, jnp.minimum(value.real, 0))
        ends = jnp.stack([low, high])
        bars = jnp.broadcast_to(estimate.std_err, ends.shape)
        extra = {
            "ritz_values": report.extremes,
            "truncation_error": typical + jnp.max(report.beyond),
            "gradient_residual": report.residual,
            "num_steps": jnp.asarray(steps, jnp.int32),
        }
        unresolved, too_few_steps = 0.0, None
        if adaptive:
            excess_of_run = self.excess(
                report,
                probe=probe,
                k=k,
                mean_offset=mean_offset,
                rounding=flat.rounding,
                value=jax.lax.stop_gradient(value) if isinstance(k, Budget) else None,
            )
            missed = ~(excess_of_run <= 1)
            too_few_steps = failure(missed, RESULTS.too_few_steps)
            # If the call fails, the error bar is the sampling error alone.
            unresolved = jnp.where(missed, 0, error)
        return dataclasses.replace(
            estimate,
            value=value,
            unresolved=unresolved,
            result=first_failure(
                # Only a preconditioner needs the sign.
                None if outer is None else flat.sign_failure,
                in_domain,
                in_domain_of_all,
                precision,
                estimate.result,
                too_few_steps,
            ),
            extra=estimate.extra | extra,
            ends=None if outer is None else outer.ends(report.extremes),
            bounds=jnp.stack([ends, bars], axis=1),
        )

    def _choose_steps(
        self,
        product: PreconditionedAction,
        probe: Inexact[Array, " n"],
        mean_offset: Inexact[Array, ""],
        k: int | Budget,
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """The number of steps that make the truncation error a small share of the target.
        That is the tolerance, for a diagonal of equal entries with the trace that the
        probe shows, or the standard error of k random signs. `mean_offset` is the mean
        of the part of the diagonal that is known."""
        assert isinstance(self.num_steps, AdaptiveSteps)
        constant, flat = freeze((product, mean_offset, k)), product.action.operator

        def excess_after(_, state, steps):
            product, mean_offset, k = constant
            return self.excess(
                product.look(state, steps, HIDDEN[True]),
                probe=probe,
                k=k,
                mean_offset=mean_offset,
                rounding=flat.rounding,
            )

        return choose_steps(
            self.num_steps,
            krylov=Lanczos(),
            operator=flat,
            probe=product.start(probe),
            # Not after one step, from which the error cannot be estimated.
            first=4,
            excess_after=excess_after,
            execution=execution,
        )

    def excess(
        self,
        report: RunReport,
        probe: Inexact[Array, " n"],
        k: int | Budget,
        mean_offset: Inexact[Array, ""],
        rounding: float,
        value: Inexact[Array, " n"] | None = None,
    ) -> Real[Array, ""]:
        """The truncation error divided by the target. A tolerance is relative to `value`,
        or without it to equal entries with the trace that the probe shows."""
        # z* F z / n for the random signs z is an estimate of the mean of the diagonal.
        # What is left of F z without it has the size of the sampling error of one probe.
        mean = jnp.vdot(probe, report.product, precision="highest") / probe.size
        if isinstance(k, Budget):
            if value is None:
                value = jnp.full_like(report.product, mean + mean_offset)
            target = self._tolerance(k, value)
        else:
            deviation = root_mean_square(report.product - mean * probe) / k**0.5
            if self.estimator.num_strata > 1:
                deviation = DEVIATION_IN_STRATUM * deviation
            size = root_mean_square(report.product)
            target = jnp.maximum(deviation, rounding * size)
        # More steps do not reduce rounding errors, so these do not count.
        largest = jnp.max(report.truncated) - jnp.max(report.rounding)
        error = self._mean(k, report.truncated) - self._mean(k, report.rounding)
        # An entry may have ten times the error of the mean. Among n normal errors of one
        # size none is above five of them, so this does not count where entries are alike.
        error = jnp.maximum(error, largest / 10) + jnp.max(report.beyond)
        # A norm may have several sizes, each of which has its tolerance.
        return jnp.max(excess(error, target))

    def _tolerance(self, k: Budget, value: Inexact[Array, " n"]) -> Real[Array, "*s"]:
        """The error that each entry may have, if all have the same."""
        size, ones = (self._norm(k, x) for x in (value, jnp.ones_like(value)))
        return k.rule.tolerance(size) / ones.real

    def _mean(self, k: int | Budget, errors: Real[Array, " n"]) -> Real[Array, "*s"]:
        """The mean error of an entry, in the norm of an adaptive budget, or else in the
        root mean square."""
        if isinstance(k, Budget):
            return self._norm(k, errors) / self._norm(k, jnp.ones_like(errors))
        return root_mean_square(errors)

    def _norm(self, k: Budget, entries: Inexact[Array, " n"]) -> Inexact[Array, "*s"]:
        return k.rule.size(self.quantity.present(entries, entries)[0])
