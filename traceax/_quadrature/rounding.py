"""How far rounding moves a quadratic form.

Rounding errors of Ritz values are relative to the largest of them: up to about
`eps * theta_max` for `eps` of the matvecs, and for singular values, by Weyl's inequality,
`eps * sigma_max`. `QuadraticForm.rounding` is a sample of their effect to first order.
`unresolved_error` counts what that sample does not show where the function is steep: with
a shift e of the nodes theta_j, and their weights w_j,

    sum_j w_j |f(theta_j + e) - f(theta_j)|.

docs/devdocs/quadrature.md ("Where a function is steep") has the measurements.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .base import AbstractSpectralFunction
from .domain import values_at
from .rules import clip_to_finite


# Errors of the eigenvalue factorisation of the small matrix, in units of the machine
# epsilon of its dtype times the largest node. With a smaller number, intervals may miss
# the true value where a function is steep; a larger one widens all intervals there.
_FACTORISATION_ROUNDOFFS = 8

# Unresolved errors up to the second digit of the value are part of the reported error;
# larger ones are flagged.
_FLAGGED_SHARE = 0.02


def changes_under_shift(
    error: Real[Array, ""],
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    values: Inexact[Array, " s"],
    eps: float,
) -> tuple[Inexact[Array, " s"], Inexact[Array, " s"]]:
    """How far a function with these `values` rises if the nodes grow by `error`, and how
    far it falls if they shrink by it. Singular values shrink to zero at most."""
    smaller = nodes - error
    smaller = jnp.maximum(smaller, 0) if function.of_singular_values else smaller
    rise = values_at(function, nodes + error, eps) - values
    return rise, values - values_at(function, smaller, eps)


def unresolved_error(
    function: AbstractSpectralFunction,
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Inexact[Array, " s"],
    eps: float,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, ""] | float:
    """`QuadraticForm.unresolved`: an upper estimate of the error of a rule, multiplied by
    a `factor`, where rounding of its nodes changes a steep function."""
    largest = jnp.max(jnp.abs(nodes))
    if function.of_singular_values:
        # Nodes above the error of the matvecs move either way. To first order the changes
        # cancel in the sum, and `rounding` is a sample of it: the second order is left. A
        # run takes smaller ones for zero, so their whole change counts.
        rise, fall = changes_under_shift(eps * largest, function, nodes, values, eps)
        change = jnp.maximum(jnp.abs(rise), jnp.abs(fall))
        change = jnp.where(nodes > eps * largest, jnp.abs(rise - fall) / 2, change)
    elif not function.bracketed:
        # The function may be steep anywhere: exp(30) has at most fourteen digits in
        # float64. Errors of the factorisation count too.
        machine_eps = jnp.finfo(nodes.dtype).eps
        error = _FACTORISATION_ROUNDOFFS * machine_eps * largest
        shifted = changes_under_shift(error, function, nodes, values, eps)
        change = jnp.max(jnp.abs(jnp.stack(shifted)), axis=0)
    elif function.singular_at_zero:
        # Steep near zero, but there the call fails: see `leaves_domain`.
        return 0.0
    else:
        # Steep near zero. Nodes that cannot be told from zero may all be zero, or none of
        # them; the negative ones show how large they may be.
        small = jnp.maximum(eps / 8 * largest, -jnp.min(nodes))
        ends = jnp.zeros_like(nodes), jnp.maximum(nodes, small)
        shifts = jnp.stack([values_at(function, end, eps) - values for end in ends])
        hidden = nodes <= jnp.maximum(eps * largest, small)
        change = jnp.where(hidden, jnp.max(jnp.abs(shifts), axis=0), 0)
    change = jnp.where((weights > 0) & ~jnp.isnan(change), change, 0)
    return factor * clip_to_finite(jnp.sum(weights * change), factor)


def check_precision(
    operator: FlatOperator,
    std_err: Real[Array, ""],
    width: Real[Array, ""],
    rounding: Real[Array, ""],
    unresolved: Real[Array, ""],
    magnitude: Real[Array, ""],
) -> Any:
    """`RESULTS.precision_lost` if rounding errors are a large part of the reported error,
    else success.

    - `std_err`: the standard error of sampling.
    - `width`: the width of the interval that quadrature leaves.
    - `rounding`, `unresolved`, `magnitude`: means of those of the quadratic forms.
    """
    floor, half = operator.rounding * magnitude, (std_err + width) / 2
    # Rounding of up to twice the rounding floor of the standard error is as expected, and
    # so is no reason for a flag.
    large = jnp.maximum(jnp.maximum(half, unresolved), 2 * floor)
    hidden = jnp.maximum(half, _FLAGGED_SHARE * magnitude)
    lost = (rounding > large) | (unresolved > hidden)
    return failure(lost, RESULTS.precision_lost)
