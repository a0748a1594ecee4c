from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._adaptive import Adaptive
from .._execution import AbstractExecution, Local
from .._flat import FlatOperator
from .._gradient import attach
from .._iterate import stream, Streamed
from .._moments import Moments
from .._quantity import AbstractQuantity
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .quadratic_form import least_std_err, QuadraticForm, span


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
    and that probe; with their derivatives. Beside them lower and upper ends of brackets,
    roundings, magnitudes, what is unresolved and spreads; Ritz values; and residuals."""

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
        errors = Moments.of(errors, valid)
        return Moments.of(samples, valid), errors, span(extremes)

    def merge(parts):
        moments, errors, extremes = parts
        # Of no samples, the extremes are 0.
        made = moments.count[:, None] > 0
        extremes = jnp.where(made, extremes, extremes[jnp.argmax(made)])
        return Moments.merge(moments), Moments.merge(errors), span(extremes)

    settings = operator, k, execution, width
    return stream(body, reduce, merge, *settings, quantity=quantity, std_err=std_err_of)


def std_err_of(summary: tuple[Moments, Moments, Array]) -> Real[Array, ""]:
    """The standard error of the mean of what `stream_forms` has summarised."""
    moments, errors, _ = summary
    return jnp.maximum(moments.std_err(), least_std_err(errors))
