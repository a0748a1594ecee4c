"""The domain of a function, and its values at Ritz values, which rounding may move out
of it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._numerics.small_matrix import least_seen, with_pole
from .functions import AbstractSpectralFunction
from .rules import roundoff


def values_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The function at Ritz values, which rounding may have moved out of its domain."""
    return mark_poles(
        function,
        nodes,
        function(clip_to_domain(function, nodes, _smallest_resolved(nodes, eps))),
    )


def _smallest_resolved(nodes: Real[Array, " s"], eps: float) -> Real[Array, ""]:
    return roundoff(jnp.max(jnp.abs(nodes)), eps)


def clip_to_domain(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], least: Real[Array, ""]
) -> Real[Array, " s"]:
    """The nodes, those outside of the domain raised to it: to 0, or if that is outside
    too, to the `least` number that is told from 0."""
    if not function.semidefinite_domain:
        return nodes
    return jnp.maximum(nodes, least if function.singular_at_zero else 0)


def mark_poles(
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
) -> Real[Array, " s"]:
    """The values there, infinite at what may be a pole of a function of which nothing is
    known."""
    if function.semidefinite_domain or function.bracketed:
        return values
    return with_pole(function, nodes, values)


def used_nodes(
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    weights: Real[Array, " s"],
) -> Real[Array, " s"]:
    """The nodes, ascending. After a breakdown those without weight are anywhere between
    the others, and may be a pole: then one that has weight takes their place."""
    if function.semidefinite_domain:
        return nodes
    largest = jnp.max(jnp.where(weights > 0, nodes, nodes[0]))
    return jnp.where(weights > 0, nodes, largest)


def slopes_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """Its derivative there."""
    if not function.semidefinite_domain:
        return function.derivative(nodes)
    return function.derivative(jnp.maximum(nodes, _smallest_resolved(nodes, eps)))


def subgradients_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The derivative, or where there is none a subgradient: that is 0 at the singular
    value 0, the least of them, if the function is defined there."""
    slopes = slopes_at(function, nodes, eps)
    if function.singular_at_zero or not function.of_singular_values:
        return slopes
    return jnp.where(nodes > _smallest_resolved(nodes, eps), slopes, 0)


def critical_extremes(extremes: Real[Array, "*r 2"]) -> Real[Array, "2"]:
    """Of several operators, the Ritz values of the one that is nearest to leaving a
    domain."""
    if extremes.ndim == 1:
        return extremes
    size = jnp.max(jnp.abs(extremes), axis=-1)
    return extremes[jnp.argmin(extremes[:, 0] / jnp.where(size > 0, size, 1))]


def outside_domain(
    function: AbstractSpectralFunction,
    operator: FlatOperator,
    extremes: Real[Array, "2"],
    value: Inexact[Array, ""],
) -> Bool[Array, ""]:
    """Whether Ritz values left the domain of `function`, beyond rounding. Where they are
    not real, it is not finite then."""
    smallest, largest = extremes
    size = jnp.maximum(jnp.abs(smallest), jnp.abs(largest))
    real = operator.hermitian or function.of_singular_values
    if real and function.singular_at_zero:
        # Errors of the products move all singular values by so much (Weyl's inequality).
        least = operator.eps * size
        if not function.of_singular_values:
            least = roundoff(size, operator.eps)
        return smallest <= jnp.maximum(least, least_seen(size))
    if real and function.semidefinite_domain:
        return smallest < -operator.rounding * size
    return jnp.isfinite(size) & ~jnp.isfinite(value)


def domain_result(function: AbstractSpectralFunction, operator: FlatOperator) -> Any:
    """The result of a call that left the domain."""
    if function.of_singular_values and function.singular_at_zero:
        return RESULTS.zero_determinant
    definite = operator.hermitian and function.singular_at_zero
    return RESULTS.not_positive_definite if definite else RESULTS.outside_domain


def check_domain(
    function: AbstractSpectralFunction,
    operator: FlatOperator,
    extremes: Real[Array, "2"],
    value: Inexact[Array, ""],
) -> Any:
    """The result that says whether Ritz values left the domain."""
    outside = outside_domain(function, operator, extremes, value)
    return failure(outside, domain_result(function, operator))
