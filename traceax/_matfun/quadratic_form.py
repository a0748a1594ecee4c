"""What a Krylov method tells of `z* f(A) z`, and where rounding begins."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._flat import FlatOperator
from .._moments import Moments
from .._solution import failure, RESULTS
from .functions import AbstractSpectralFunction


class QuadraticForm(eqx.Module):
    """What one probe z tells of a function of A.

    - `value`: the Gauss rule for `z* f(A) z`.
    - `left`, `right`: rows L_j and R_j with `sum_j Re(L_j* dA R_j)` the derivative of the
        form in a direction dA, or in the mean over z that of its mean.
    - `residual`: of `A f'(A) z` (for a function of singular values `A* U f'(S) V* z`),
        relative to what it should be; for the logarithm that of the solve `A x = z`.
    - `bracket`: lower and upper bound of `z* f(A) z`, by Gauss and Gauss-Radau.
    - `rounding`: how far `value` moves where the entries of the run that products give
        twice are taken the other time, which only rounding tells apart.
    - `extremes`: smallest and largest Ritz value; for operators that are not Hermitian
        those of the Hermitian part, between which the real parts of all are.
    """

    value: Inexact[Array, ""]
    left: Inexact[Array, "r m"]
    right: Inexact[Array, "r n"]
    residual: Real[Array, ""]
    bracket: Real[Array, "2"]
    rounding: Real[Array, ""]
    extremes: Real[Array, "2"]


def values_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The function at Ritz values, which rounding may have moved out of its domain."""
    if not function.semidefinite_domain:
        return function(nodes)
    lowest = roundoff(nodes, eps) if function.singular_at_zero else 0
    return function(jnp.maximum(nodes, lowest))


def slopes_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """Its derivative there."""
    if not function.semidefinite_domain:
        return function.derivative(nodes)
    return function.derivative(jnp.maximum(nodes, roundoff(nodes, eps)))


def subgradients_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The derivative, or where there is none a subgradient: that is 0 at the singular
    value 0, the least of them, if the function is defined there."""
    slopes = slopes_at(function, nodes, eps)
    if function.singular_at_zero or not function.of_singular_values:
        return slopes
    return jnp.where(nodes > roundoff(nodes, eps), slopes, 0)


def roundoff(nodes: Real[Array, " s"], eps: float) -> Real[Array, ""]:
    """The size of rounding errors where an operator is singular: there Ritz values are
    smaller than this, of either sign, and in a positive definite one larger."""
    largest = jnp.max(jnp.abs(nodes))
    return jnp.where(largest > 0, eps / 8 * largest, eps / 8)


def span(extremes: Real[Array, "k 2"]) -> Real[Array, "2"]:
    """The smallest and the largest of all Ritz values."""
    return jnp.stack([jnp.min(extremes[:, 0]), jnp.max(extremes[:, 1])])


def check_domain(
    function: AbstractSpectralFunction,
    operator: FlatOperator,
    extremes: Real[Array, "2"],
    value: Inexact[Array, ""],
) -> Any:
    """Whether Ritz values left the domain of `function`, beyond rounding. Where they are
    not real, it is not finite then."""
    smallest, largest = extremes
    size = jnp.maximum(jnp.abs(smallest), jnp.abs(largest))
    how: Any = RESULTS.outside_domain
    outside = jnp.isfinite(size) & ~jnp.isfinite(value)
    real = operator.hermitian or function.of_singular_values
    if real and function.semidefinite_domain:
        outside = smallest < -operator.eps * operator.size**0.5 * size
    if real and function.singular_at_zero:
        outside = smallest <= roundoff(extremes, operator.eps)
        how = RESULTS.not_positive_definite
        if function.of_singular_values:
            how = RESULTS.zero_determinant
    return failure(outside, how)


def check_precision(
    operator: FlatOperator,
    moments: Moments,
    width: Real[Array, ""] | float,
    rounding: Real[Array, ""],
) -> Any:
    """Whether rounding errors of the products are a large part of the error that is
    reported: the standard error, and the `width` of the bracket. `rounding` is the mean
    of that of the quadratic forms."""
    std_err = jnp.hypot(moments.std_err(), operator.rounding * jnp.abs(moments.mean))
    return failure(rounding > (std_err + width) / 2, RESULTS.precision_lost)
