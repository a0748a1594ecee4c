from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.flat import FlatOperator
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate
from .._quadrature.convergence import Convergence
from .._quadrature.domain import check_domain
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm, spectral_range
from .._quadrature.rounding import check_precision
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach, attach_derivative
from .._run.steps import Steps
from .._run.stream import stream, Streamed
from .gradients import AbstractFunctionGradient


# Of the errors of a form: the ends of its bracket, then those of which only the mean is
# needed, last the spread if there is one; and its place among those that have moments.
_MEANS, _SPREAD = slice(2, 10), 2


class FormMoments(eqx.Module):
    """`Moments` of quadratic forms, of the ends of their brackets, and of spreads where
    there are any; and the means of what else is known of their errors: the other numbers
    of `Convergence`, sizes of roundings, magnitudes, what is unresolved. Devices send
    each other all that is stored, and so the count once."""

    forms: Moments
    uncounted: Moments
    means: Real[Array, "*parts 8"]

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, " m"],
        errors: Real[Array, "m e"],
        valid: Bool[Array, " m"],
    ) -> "FormMoments":
        forms = Moments.of(samples, valid)
        ends = jnp.concatenate([errors[:, :2], errors[:, _MEANS.stop :]], axis=1)
        share = valid / jnp.maximum(forms.count, 1)
        means = jnp.where(valid[:, None], errors[:, _MEANS], 0)
        means = jnp.sum(share[:, None].astype(means.dtype) * means, axis=0)
        return cls(forms, _with_count(Moments.of(ends, valid), None), means)

    @classmethod
    def merge(cls, parts: "FormMoments") -> "FormMoments":
        forms = Moments.merge(parts.forms)
        share = parts.count / jnp.maximum(forms.count, 1)
        means = jnp.sum(share[:, None].astype(parts.means.dtype) * parts.means, axis=0)
        return cls(forms, _with_count(Moments.merge(parts.errors), None), means)

    @property
    def errors(self) -> Moments:
        return _with_count(self.uncounted, self.count)

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.forms.count

    @property
    def mean(self) -> Inexact[Array, ""]:
        return self.forms.mean

    def std_err(self) -> Real[Array, ""]:
        return jnp.maximum(self.forms.std_err(), self._least_std_err)

    @property
    def _least_std_err(self) -> Real[Array, ""] | float:
        """What follows from the spreads."""
        if self.uncounted.center.shape[-1] <= _SPREAD:
            return 0.0
        errors, count = self.errors, jnp.maximum(self.count, 1)
        deviation = errors.unit[_SPREAD] * jnp.sqrt(errors.squares[0, _SPREAD] / count)
        spread = jnp.hypot(errors.center[0, _SPREAD], deviation)
        return spread / jnp.sqrt(count)

    @property
    def convergence(self) -> Convergence:
        bracket = self.uncounted.center[0, :2]
        return Convergence.from_flat(jnp.concatenate([bracket, self.means[:5]]))

    @property
    def rounding(self) -> Real[Array, "3"]:
        """The size of roundings, the magnitude, and what is unresolved."""
        return self.means[5:]

    def bounds(
        self, errors: Real[Array, "2"], common: Real[Array, ""] | float
    ) -> Real[Array, "2 2"]:
        """Bounds of the mean of the forms with these quadrature errors, each with its
        standard error, and with an error `common` to all."""
        ends = jnp.stack([self.mean.real - errors[0], self.mean.real + errors[1]])
        as_wide = errors >= self.convergence.widths(self.mean)
        std_errs = jnp.where(as_wide, self._std_errs_of_brackets, self.std_err())
        return self._bounds(ends, jnp.hypot(std_errs, common))

    def proven_bounds(self, common: Real[Array, ""] | float) -> Real[Array, "2 2"]:
        """The same, as far as brackets prove it."""
        ends = self.convergence.proven(self.mean)
        return self._bounds(ends, jnp.hypot(self._std_errs_of_brackets, common))

    @property
    def _std_errs_of_brackets(self) -> Real[Array, "2"]:
        return jnp.maximum(self.errors.std_err()[:2], self._least_std_err)

    def _bounds(
        self, ends: Real[Array, "2"], std_errs: Real[Array, "2"]
    ) -> Real[Array, "2 2"]:
        rounding, _, unresolved = self.rounding
        further = jnp.array([-1, 1]) * (rounding + unresolved)
        return jnp.stack([ends + further, std_errs], axis=1)


def _with_count(moments: Moments, count: Array | None) -> Moments:
    where = lambda moments: moments.count  # noqa: E731
    return eqx.tree_at(where, moments, count, is_leaf=lambda x: x is None)


def stream_forms(
    form: Callable[
        [FlatOperator, Int[Array, ""]], tuple[QuadraticForm, Inexact[Array, " n"]]
    ],
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    k: int | Budget,
    execution: AbstractExecution,
    *,
    width: int,
    quantity: AbstractQuantity,
) -> Streamed:
    """Samples for the whole budget, of which `form(operator, i)` is the one of probe i,
    and that probe; with their derivatives. Beside them what is known of errors, as in
    `FormMoments`; Ritz values; and residuals."""

    def body(flat, index):
        one, probe = form(flat.frozen, index)
        frame = gradient.frame(function, one.left.T, one.right.T, probe[:, None])
        value = attach(flat, one.value, frame, execution=Local())
        errors = [*Convergence.of(one).flat, jnp.abs(one.rounding), one.magnitude]
        errors.append(jnp.asarray(one.unresolved, errors[0].dtype))
        if one.spread is not None:
            errors.append(one.spread)
        return value, (jnp.stack(errors), one.extremes, one.residual)

    def reduce(outs, valid):
        samples, (errors, extremes, _) = outs
        return FormMoments.of(samples, errors, valid), spectral_range(extremes)

    def merge(parts):
        moments, extremes = parts
        return FormMoments.merge(moments), spectral_range(extremes, moments.count)

    return stream(
        body, reduce, merge, operator, k, execution, width=width, quantity=quantity
    )


def estimate_of_forms(
    streamed: Streamed,
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    k: int | Budget,
    steps: Steps,
    excess: Callable[[Array, tuple[Array, Array], float], Real[Array, ""]],
    *,
    live: Callable[[], Inexact[Array, ""]],
    extremes: Real[Array, "2"],
    common: Real[Array, ""] | float = 0.0,
    apart: Real[Array, "2"] | float = 0.0,
) -> Estimate:
    """What `stream_forms` has found. Products and state are those of the samples alone.

    `excess` is that of a value, a bracket and a deviation over the target; `live()` is
    the value with its derivative; `extremes` are the smallest and the largest Ritz value;
    `common` is a rounding error that all samples share, and `apart` are quadrature errors
    of what is not sampled."""
    moments = streamed.summary[0]
    sample_errors, _, residuals = streamed.others
    convergence, mean = moments.convergence, moments.mean
    rounding, magnitude, unresolved = moments.rounding
    errors, (low, high) = convergence.errors(mean, apart), convergence.bracket
    extra = {"gradient_residual": residuals, "ritz_values": extremes}
    if function.bracketed:
        extra["sample_brackets"] = sample_errors[:, :2]
        extra["bracket"] = jnp.stack([low, high])
    in_domain = check_domain(function, operator, extremes, mean)
    std_err, unresolved = moments.std_err(), jnp.hypot(unresolved, common)
    sizes = std_err, jnp.sum(errors), rounding, unresolved
    precise = check_precision(operator, *sizes, magnitude)
    bar = jnp.hypot(jnp.hypot(std_err, unresolved), operator.rounding * magnitude)
    # A value that is zero to rounding has no digits to lose.
    is_zero = jnp.abs(mean) <= 2 * bar
    precise = RESULTS.where(is_zero, failure(False, RESULTS.precision_lost), precise)
    unresolved = jnp.hypot(unresolved, jnp.where(is_zero, rounding, 0))
    missed = jnp.zeros((), bool)
    if steps.chosen:
        ends = mean.real - errors[0], mean.real + errors[1]
        missed = jnp.max(errors) > bar
        if isinstance(k, Budget):
            missed = excess(mean, ends, 0) > 1
        missed |= convergence.hides(mean, 4 * bar)
        std_err = jnp.hypot(std_err, jnp.max(errors))
    taken, wide = steps.report(missed)
    return Estimate(
        value=attach_derivative(mean, live),
        std_err=std_err,
        samples=streamed.samples,
        num_matvecs=streamed.count * steps.made,
        rounding=operator.rounding,
        magnitude=magnitude,
        unresolved=unresolved,
        result=first_failure(in_domain, precise, wide, streamed.loop.result),
        extra=extra | taken | streamed.loop.extra,
        state=steps.state(streamed.loop.state),
        bounds=moments.bounds(errors, common),
        proven_bounds=moments.proven_bounds(common),
    )
