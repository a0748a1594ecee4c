"""Quadratic forms with a control variate, `a - c (b - known)`, and their errors.

Errors of a and of c b add up, as if they were unrelated: for a positive c the lower end
of the bracket is that of a minus c times the upper end of that of b.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Real

from .._core.control import check_known, Regression
from .._core.flat import FlatOperator
from .._core.moments import align
from .._core.sign_moments import SignMoments
from .._quadrature.quadratic_form import QuadraticForm
from .._run.stream import Streamed
from .samples import errors_of, FormMoments


def controlled_moments(
    forms: tuple[QuadraticForm, QuadraticForm], known: Array, valid: Array
) -> tuple[FormMoments, Regression, QuadraticForm]:
    """The moments of the controlled forms, the regression that they are made by, and
    these forms, from those of both operators, stacked."""
    a, b = forms
    fit = Regression.of(a.value, b.value, valid)
    controlled = jax.vmap(_controlled, in_axes=(0, 0, 0, None))(
        a, b, fit.coefficients, known
    )
    errors = jax.vmap(errors_of)(controlled)
    moments = FormMoments.of(controlled.value, errors, valid)
    return dataclasses.replace(moments, factor=fit.widening), fit, controlled


def _controlled(
    a: QuadraticForm, b: QuadraticForm, coefficient: Array, known: Array
) -> QuadraticForm:
    """The form `a - c (b - known)`."""
    size, unused = jnp.abs(coefficient), coefficient == 0
    positive = jnp.maximum(coefficient.real, 0)
    negative = jnp.maximum(-coefficient.real, 0)
    value = a.value - coefficient * (b.value - known)

    def times(factor, x):
        """A product, 0 where the control is not used, whatever its errors."""
        return jnp.where(unused, 0, factor * jnp.where(unused, 0, x))

    def widths(form):
        low, high = form.bracket
        return jnp.stack([form.value.real - low, high - form.value.real])

    # A positive coefficient turns the bracket of b around. An imaginary one may turn it
    # either way.
    below_b, above_b = widths(b)
    turned = times(jnp.abs(coefficient.imag), jnp.maximum(below_b, above_b))
    below = times(positive, above_b) + times(negative, below_b) + turned
    above = times(positive, below_b) + times(negative, above_b) + turned
    low, high = widths(a) + jnp.stack([below, above])
    changes, hidden = None, None
    if a.changes is not None and b.changes is not None:
        changes = a.changes + times(size, b.changes)
    if a.hidden is not None and b.hidden is not None:
        number, change, is_infinite = b.hidden
        scaled = jnp.stack([number, size * change, is_infinite])
        hidden = jnp.maximum(a.hidden, times(1, scaled))
    return dataclasses.replace(
        a,
        value=value,
        residual=jnp.maximum(a.residual, b.residual),
        bracket=jnp.stack([value.real - low, value.real + high]),
        magnitude=a.magnitude + times(size, b.magnitude),
        rounding=a.rounding - times(coefficient, b.rounding),
        extremes=jnp.stack([a.extremes, b.extremes]),
        unresolved=a.unresolved + times(size, b.unresolved),
        changes=changes,
        hidden=hidden,
    )


def as_streamed(
    streamed: Streamed,
    controlled: QuadraticForm,
    moments: FormMoments,
    extremes: Real[Array, "2 2"],
    valid: Array,
) -> Streamed:
    """The controlled forms as `stream_forms` returns plain ones."""
    errors = jax.vmap(errors_of)(controlled)
    kept = controlled.value, errors, controlled.extremes, controlled.residual

    def fill(x):
        return jnp.where(align(valid, x), x, jnp.inf)

    samples, errors, ritz_values, residuals = map(fill, kept)
    return dataclasses.replace(
        streamed,
        samples=samples,
        others=(errors, ritz_values, residuals, None),
        summary=(moments, extremes),
    )


def check_known_forms(
    forms: QuadraticForm, known: Array, valid: Array, operator: FlatOperator
) -> tuple[Real[Array, ""], Any]:
    """`check_known` for the forms of the control."""
    count = jnp.maximum(jnp.sum(valid), 1)

    def mean(x):
        return jnp.sum(jnp.where(valid, x, 0)) / count

    moments = SignMoments.of(
        samples=forms.value,
        size=forms.magnitude,
        marks=None,
        valid=valid,
        skewed=True,
        rounding=operator.rounding,
        near=0.0,
    )
    low, high = mean(forms.bracket[:, 0]), mean(forms.bracket[:, 1])
    value = moments.mean.real
    rounding = jnp.abs(mean(forms.rounding)) + mean(
        forms.unresolved * jnp.ones_like(valid, low.dtype)
    )
    # Few forms may be equal by chance. Their deviations say how far they spread.
    return check_known(
        moments,
        known,
        operator.rounding,
        least=jnp.sqrt(2 / count) * mean(forms.deviation),
        apart=jnp.maximum(value - low, high - value) + rounding,
    )
