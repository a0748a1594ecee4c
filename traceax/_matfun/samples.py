from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._adaptive import Adaptive
from .._execution import AbstractExecution, Local
from .._flat import FlatOperator
from .._gradient import attach
from .._iterate import stream, Streamed
from .._moments import Moments
from .._quantity import AbstractQuantity
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .quadratic_form import QuadraticForm, span


class FormMoments(eqx.Module):
    """`Moments` of quadratic forms, and of what is known of their errors: lower and upper
    ends of brackets, sizes of roundings, magnitudes, what is unresolved, and spreads.
    Devices send each other all that is stored, and so the count once."""

    forms: Moments
    uncounted: Moments

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, " m"],
        errors: Real[Array, "m 6"],
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
    def mean_errors(self) -> Real[Array, "6"]:
        return self.uncounted.center[0]

    def std_err(self) -> Real[Array, ""]:
        return jnp.maximum(self.forms.std_err(), self._least_std_err)

    @property
    def _least_std_err(self) -> Real[Array, ""]:
        """What follows from the spreads."""
        errors, count = self.errors, jnp.maximum(self.count, 1)
        variance = errors.squares[0, -1] / count
        spread = jnp.hypot(errors.center[0, -1], errors.unit[-1] * jnp.sqrt(variance))
        return spread / jnp.sqrt(count)

    def bounds(self, common: Real[Array, ""] | float = 0.0) -> Real[Array, "2 2"]:
        """Bounds of the mean of the forms, each with its standard error, with a rounding
        error `common` to all."""
        low, high, rounding, _, unresolved, _ = self.mean_errors
        std_errs = jnp.maximum(self.errors.std_err(), self._least_std_err)
        low_std_err, high_std_err, *_ = std_errs
        rounding = rounding + unresolved + common
        low, high = low - rounding, high + rounding
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
        rounding, magnitude = jnp.abs(one.rounding), one.magnitude
        beside = jnp.stack([rounding, magnitude, one.unresolved, one.spread])
        errors = jnp.append(one.bracket, beside)
        return value, (errors, one.extremes, one.residual)

    def reduce(outs, valid):
        samples, (errors, extremes, _) = outs
        return FormMoments.of(samples, errors, valid), span(extremes)

    def merge(parts):
        moments, extremes = parts
        return FormMoments.merge(moments), span(extremes, moments.count)

    return stream(
        body, reduce, merge, operator, k, execution, width=width, quantity=quantity
    )
