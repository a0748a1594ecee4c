from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._adaptive import Adaptive
from .._execution import AbstractExecution, Local
from .._flat import FlatOperator
from .._gradient import attach, attach_derivative
from .._iterate import stream, Streamed
from .._moments import Moments
from .._quantity import AbstractQuantity
from .._solution import Estimate, first_failure
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .quadratic_form import check_domain, check_precision, QuadraticForm, span
from .steps import Steps


_SPREAD = 5  # the place of the spread among the errors


class FormMoments(eqx.Module):
    """`Moments` of quadratic forms, and of what is known of their errors: lower and upper
    ends of brackets, sizes of roundings, magnitudes, what is unresolved, and spreads
    where there are any. Devices send each other all that is stored, and so the count
    once."""

    forms: Moments
    uncounted: Moments

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, " m"],
        errors: Real[Array, "m e"],
        valid: Bool[Array, " m"],
    ) -> "FormMoments":
        return cls(
            Moments.of(samples, valid), _with_count(Moments.of(errors, valid), None)
        )

    @classmethod
    def merge(cls, parts: "FormMoments") -> "FormMoments":
        errors = _with_count(Moments.merge(parts.errors), None)
        return cls(Moments.merge(parts.forms), errors)

    @property
    def errors(self) -> Moments:
        return _with_count(self.uncounted, self.count)

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.forms.count

    @property
    def mean(self) -> Inexact[Array, ""]:
        return self.forms.mean

    @property
    def mean_errors(self) -> Real[Array, " e"]:
        return self.uncounted.center[0]

    def std_err(self) -> Real[Array, ""]:
        return jnp.maximum(self.forms.std_err(), self._least_std_err)

    @property
    def _least_std_err(self) -> Real[Array, ""] | float:
        """What follows from the spreads."""
        if len(self.mean_errors) <= _SPREAD:
            return 0.0
        errors, count = self.errors, jnp.maximum(self.count, 1)
        deviation = errors.unit[_SPREAD] * jnp.sqrt(errors.squares[0, _SPREAD] / count)
        spread = jnp.hypot(errors.center[0, _SPREAD], deviation)
        return spread / jnp.sqrt(count)

    def bounds(self, common: Real[Array, ""] | float) -> Real[Array, "2 2"]:
        """Bounds of the mean of the forms, each with its standard error, with an error
        `common` to all."""
        low, high, rounding, _, unresolved, *_ = self.mean_errors
        std_errs = jnp.maximum(self.errors.std_err(), self._least_std_err)
        low_std_err, high_std_err, *_ = jnp.hypot(std_errs, common)
        low, high = low - rounding - unresolved, high + rounding + unresolved
        return jnp.stack([low, low_std_err, high, high_std_err]).reshape(2, 2)


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
    k: int | Adaptive,
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
        errors = [*one.bracket, jnp.abs(one.rounding), one.magnitude, one.unresolved]
        if one.spread is not None:
            errors.append(one.spread)
        return value, (jnp.stack(errors), one.extremes, one.residual)

    def reduce(outs, valid):
        samples, (errors, extremes, _) = outs
        return FormMoments.of(samples, errors, valid), span(extremes)

    def merge(parts):
        moments, extremes = parts
        return FormMoments.merge(moments), span(extremes, moments.count)

    return stream(
        body, reduce, merge, operator, k, execution, width=width, quantity=quantity
    )


def estimate_of_forms(
    streamed: Streamed,
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    k: int | Adaptive,
    steps: Steps,
    excess: Callable[[Array, tuple[Array, Array], float], Real[Array, ""]],
    *,
    live: Callable[[], Inexact[Array, ""]],
    extremes: Real[Array, "2"],
    common: Real[Array, ""] | float = 0.0,
) -> Estimate:
    """What `stream_forms` has found. Products and state are those of the samples alone.

    `excess` is that of a value, a bracket and a deviation over the target; `live()` is
    the value with its derivative; `extremes` are the smallest and the largest Ritz value;
    `common` is a rounding error that all samples share."""
    moments = streamed.summary[0]
    sample_errors, _, residuals = streamed.others
    low, high, rounding, magnitude, unresolved, *_ = moments.mean_errors
    extra = {"gradient_residual": residuals, "ritz_values": extremes}
    if function.bracketed:
        extra["sample_brackets"] = sample_errors[:, :2]
        extra["bracket"] = jnp.stack([low, high])
    in_domain = check_domain(function, operator, extremes, moments.mean)
    taken, wide = steps.report(k, lambda _: excess(moments.mean, (low, high), 0))
    std_err, unresolved = moments.std_err(), jnp.hypot(unresolved, common)
    errors = std_err, high - low, rounding, unresolved
    precise = check_precision(operator, *errors, magnitude)
    return Estimate(
        value=attach_derivative(moments.mean, live),
        std_err=std_err,
        samples=streamed.samples,
        num_matvecs=streamed.count * steps.made,
        rounding=operator.rounding,
        magnitude=magnitude,
        unresolved=unresolved,
        result=first_failure(in_domain, precise, streamed.loop.result, wide),
        extra=extra | taken | streamed.loop.extra,
        state=steps.state(streamed.loop.state),
        bounds=moments.bounds(common),
    )
