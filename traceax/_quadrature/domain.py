"""The domain of a function, and its values at Ritz values.

Rounding may move a Ritz value out of the domain by about `eps * theta_max`. Such nodes
are clipped into it: to 0, or for a function that is singular at 0 to `roundoff`, which is
`eps * theta_max / 8`. Nodes farther outside are a failure of the call (`check_domain`).
docs/devdocs/quadrature.md ("The end point by default") has the measurements.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._numerics.small_matrix import with_pole, zero_threshold
from .base import AbstractSpectralFunction
from .rules import roundoff


def values_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Inexact[Array, " s"]:
    """The function at Ritz values, which rounding may have moved out of its domain."""
    clipped = clip_to_domain(function, nodes, _smallest_resolved(nodes, eps))
    return mark_poles(function, nodes, function(clipped))


def _smallest_resolved(nodes: Real[Array, " s"], eps: float) -> Real[Array, ""]:
    """`roundoff` of the largest modulus of the nodes."""
    return roundoff(jnp.max(jnp.abs(nodes)), eps)


def clip_to_domain(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], floor: Real[Array, ""]
) -> Real[Array, " s"]:
    """The nodes, clipped into the domain: those below it become 0, or the `floor` if 0 is
    outside too. The `floor` is the smallest number that can be told from 0."""
    if not function.semidefinite_domain:
        return nodes
    return jnp.maximum(nodes, floor if function.singular_at_zero else 0)


def mark_poles(
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    values: Inexact[Array, " s"],
) -> Inexact[Array, " s"]:
    """The `values` at the nodes; for a function of which nothing is known, infinite at
    nodes that cannot be told from a pole at 0."""
    # These functions say what they are at 0, so they need no evaluation there.
    if function.semidefinite_domain or function.bracketed:
        return values
    return with_pole(function, nodes, values)


def used_nodes(
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    weights: Real[Array, " s"],
) -> Real[Array, " s"]:
    """The nodes, ascending, with those that have no weight replaced by the largest one
    that has weight."""
    if function.semidefinite_domain:
        return nodes
    # After a breakdown, nodes without weight are anywhere between the others. There may
    # be a pole, whose infinite value or slope would make derivatives NaN.
    largest = jnp.max(jnp.where(weights > 0, nodes, nodes[0]))
    return jnp.where(weights > 0, nodes, largest)


def is_complex_on_reals(function: AbstractSpectralFunction, dtype: DTypeLike) -> bool:
    """Whether the function has complex values at eigenvalues of a Hermitian operator of
    `dtype`."""
    node = jax.ShapeDtypeStruct((1,), jnp.finfo(dtype).dtype)
    return jnp.iscomplexobj(eqx.filter_eval_shape(function, node))


def slopes_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Inexact[Array, " s"]:
    """The derivative of the function at Ritz values."""
    if not function.semidefinite_domain:
        return function.derivative(nodes)
    # Unlike values, derivatives may be infinite at 0 where the function is defined
    # there, as for a root. So nodes are raised to the floor in any case.
    return function.derivative(jnp.maximum(nodes, _smallest_resolved(nodes, eps)))


def subgradients_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Inexact[Array, " s"]:
    """The derivative of the function at singular values, or a subgradient where there is
    no derivative."""
    slopes = slopes_at(function, nodes, eps)
    if function.singular_at_zero or not function.of_singular_values:
        return slopes
    # At the singular value 0 a norm has a set of subgradients. 0 is the smallest of them.
    return jnp.where(nodes > _smallest_resolved(nodes, eps), slopes, 0)


def critical_extremes(extremes: Real[Array, "*r 2"]) -> Real[Array, "2"]:
    """The smallest and the largest Ritz value of that one of several operators which is
    nearest to leaving a domain: its smallest Ritz value is lowest, relative to its size.
    """
    if extremes.ndim == 1:
        return extremes
    size = jnp.max(jnp.abs(extremes), axis=-1)
    return extremes[jnp.argmin(extremes[:, 0] / jnp.where(size > 0, size, 1))]


def leaves_domain(
    function: AbstractSpectralFunction,
    operator: FlatOperator,
    extremes: Real[Array, "2"],
    value: Inexact[Array, ""],
) -> Bool[Array, ""]:
    """Whether Ritz values are outside the domain of `function` by more than rounding."""
    smallest, largest = extremes
    size = jnp.maximum(jnp.abs(smallest), jnp.abs(largest))
    real = operator.hermitian or function.of_singular_values
    if real and function.singular_at_zero:
        # Errors of the matvecs move all singular values by up to eps times the largest
        # (Weyl's inequality), and none comes out negative. Of eigenvalues that are only
        # rounding half are negative, so an eighth, by `roundoff`, is enough.
        floor = operator.eps * size
        if not function.of_singular_values:
            floor = roundoff(size, operator.eps)
        return smallest <= jnp.maximum(floor, zero_threshold(size))
    if real and function.semidefinite_domain:
        return smallest < -operator.rounding * size
    # Where eigenvalues may be complex, or nothing is known of the domain, a value that is
    # not finite shows that they left it.
    return jnp.isfinite(size) & ~jnp.isfinite(value)


def domain_result(function: AbstractSpectralFunction, operator: FlatOperator) -> Any:
    """The result of a call whose Ritz values left the domain."""
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
    """`domain_result` if Ritz values left the domain, else success."""
    outside = leaves_domain(function, operator, extremes, value)
    return failure(outside, domain_result(function, operator))
