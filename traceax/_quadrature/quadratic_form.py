"""Quadratic forms `z* f(A) z` from a Krylov method, their brackets, and the effect of
rounding."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.flat import FlatOperator
from .._core.reductions import reduce_together
from .._core.results import failure, RESULTS
from .._numerics.gram_schmidt import unit
from .._numerics.small_matrix import least_seen, with_pole
from .functions import AbstractSpectralFunction
from .rules import finite, roundoff


class QuadraticForm(eqx.Module):
    """The quadratic form of one probe z, shape `(n,)`, with a function of A, an m by n
    operator, with its bracket and derivative. Fields for which no shape is given are
    real, of shape `()`.

    - `value`: the Gauss rule for `z* f(A) z`, complex where f(A) is.
    - `deviation`: the root of the Gauss rule for `z* (f(A) - c)^2 z`, c the mean of f in
        its rule for z. In the root mean square over z, about `||f(A) - c||_F`.
    - `left`, `right`: shapes `(r, m)` and `(r, n)`, rows L_j and R_j with
        `sum_j Re(L_j* dA R_j)` the derivative of the form in a direction dA, or in the
        mean over z that of its mean.
    - `residual`: of `A f'(A) z` (for a function of singular values `A* U f'(S) V* z`),
        relative to what it should be; for the logarithm that of the solve `A x = z`.
    - `bracket`: shape `(2,)`, lower and upper bound of `z* f(A) z`, by Gauss and
        Gauss-Radau where these are known to be on both sides, and estimated elsewhere.
    - `changes`: shape `(2,)`, how far the value moved over the second half of the steps,
        and over the second quarter, from which the rest is extrapolated; `None` where
        the bracket is an estimate already.
    - `hidden`: shape `(3,)`, how many eigenvalues at the lower end of the spectrum the
        run may have overlooked, by how much one of them changes the trace, and 1 if the
        function is infinite at zero and that end cannot be told from it, else 0; `None`
        where this is not known.
    - `magnitude`: the size of what `value` is made of, to which rounding is relative.
    - `rounding`: how far `value` moves where the entries of the run that products give
        twice are taken the other time, which only rounding tells apart; of its dtype.
    - `unresolved`: how far it may be off where the function is steep, at eigenvalues or
        singular values that are known to rounding.
    - `extremes`: shape `(2,)`, smallest and largest Ritz value; by Golub-Kahan, singular
        value of the bidiagonal matrix; by Arnoldi, eigenvalue of the Hermitian part of
        the Hessenberg matrix, between which the real parts of its eigenvalues are. Of
        several operators `(r, 2)`.
    - `spread`: about the standard deviation of the form over z where one z tells it, in
        the root mean square; elsewhere `None`.
    """

    value: Inexact[Array, ""]
    deviation: Real[Array, ""]
    left: Inexact[Array, "r m"]
    right: Inexact[Array, "r n"]
    residual: Real[Array, ""]
    bracket: Real[Array, "2"]
    magnitude: Real[Array, ""]
    rounding: Inexact[Array, ""]
    extremes: Real[Array, "*r 2"]
    unresolved: Real[Array, ""] | float = 0.0
    changes: Real[Array, "2"] | None = None
    hidden: Real[Array, "3"] | None = None
    spread: Real[Array, ""] | None = None


def deviation_of(
    root_weights: Inexact[Array, " s"],
    values: Real[Array, " s"],
    mean: Inexact[Array, ""],
) -> Real[Array, ""]:
    """`QuadraticForm.deviation` of a unit vector, by a rule whose weights have these
    roots and which gives this mean."""
    return unit(root_weights * (values - mean))[1]


def values_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The function at Ritz values, which rounding may have moved out of its domain."""
    return with_poles(
        function, nodes, function(inside(function, nodes, _least(nodes, eps)))
    )


def _least(nodes: Real[Array, " s"], eps: float) -> Real[Array, ""]:
    return roundoff(jnp.max(jnp.abs(nodes)), eps)


def inside(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], least: Real[Array, ""]
) -> Real[Array, " s"]:
    """The nodes, those outside of the domain raised to it: to 0, or if that is outside
    too, to the `least` number that is told from 0."""
    if not function.semidefinite_domain:
        return nodes
    return jnp.maximum(nodes, least if function.singular_at_zero else 0)


def with_poles(
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
    return function.derivative(jnp.maximum(nodes, _least(nodes, eps)))


def gauss_rule(
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    slopes: Real[Array, " s"],
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """What a quadrature rule gives, and the size that its rounding errors are relative
    to: that value or, if larger, its change when all nodes change by the same factor.
    (The logarithm and the entropy are 0 at 1, but change there.)"""
    value, change = reduce_together((weights * values, weights * jnp.abs(nodes * slopes)))
    change = jnp.where(jnp.isfinite(change), change, 0)
    return value, jnp.maximum(jnp.abs(value), change)


def moved_by(
    error: Real[Array, ""],
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    eps: float,
) -> tuple[Real[Array, " s"], Real[Array, " s"]]:
    """How far a function with these `values` rises if the nodes grow by `error`, and how
    far it falls if they shrink by it, singular values to zero at most."""
    less = nodes - error
    less = jnp.maximum(less, 0) if function.of_singular_values else less
    up = values_at(function, nodes + error, eps) - values
    return up, values - values_at(function, less, eps)


def unresolved_of(
    function: AbstractSpectralFunction,
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    eps: float,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, ""] | float:
    """By how much a rule, multiplied by a `factor`, may be off because of rounding errors
    of its nodes, which are relative to the largest of them: much where the function is
    steep. `QuadraticForm.rounding` is a sample of those of products.

    - Singular values move by `eps` times the largest (Weyl's inequality). Changes of
      first order, of the sum of which that is a sample, cancel, but for those that are
      smaller, which a run takes for zero.
    - A function without a bracket may be steep anywhere, where errors of the
      factorisation count too.
    - One with a bracket is steep near zero: nodes there that cannot be told from zero may
      all be zero, or none; negative ones show how large these may be. If it is not
      defined at zero, they end the run."""
    largest = jnp.max(jnp.abs(nodes))
    if function.of_singular_values:
        up, down = moved_by(eps * largest, function, nodes, values, eps)
        change = jnp.maximum(jnp.abs(up), jnp.abs(down))
        change = jnp.where(nodes > eps * largest, jnp.abs(up - down) / 2, change)
    elif not function.bracketed:
        error = 8 * jnp.finfo(nodes.dtype).eps * largest
        moved = jnp.stack(moved_by(error, function, nodes, values, eps))
        change = jnp.max(jnp.abs(moved), axis=0)
    elif function.singular_at_zero:
        return 0.0
    else:
        small = jnp.maximum(eps / 8 * largest, -jnp.min(nodes))
        ends = jnp.zeros_like(nodes), jnp.maximum(nodes, small)
        moved = jnp.stack([values_at(function, end, eps) - values for end in ends])
        hidden = nodes <= jnp.maximum(eps * largest, small)
        change = jnp.where(hidden, jnp.max(jnp.abs(moved), axis=0), 0)
    change = jnp.where((weights > 0) & ~jnp.isnan(change), change, 0)
    return factor * finite(jnp.sum(weights * change), factor)


def subgradients_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """The derivative, or where there is none a subgradient: that is 0 at the singular
    value 0, the least of them, if the function is defined there."""
    slopes = slopes_at(function, nodes, eps)
    if function.singular_at_zero or not function.of_singular_values:
        return slopes
    return jnp.where(nodes > _least(nodes, eps), slopes, 0)


def span(
    extremes: Real[Array, "k *r 2"], count: Real[Array, " k"] | None = None
) -> Real[Array, "*r 2"]:
    """The smallest and the largest of all Ritz values; where a `count` is 0, there are
    none."""
    if count is not None:
        index = jnp.arange(len(count))
        extremes = extremes[jnp.where(count > 0, index, jnp.argmax(count > 0))]
    ends = jnp.min(extremes[..., 0], axis=0), jnp.max(extremes[..., 1], axis=0)
    return jnp.stack(ends, axis=-1)


def worst(extremes: Real[Array, "*r 2"]) -> Real[Array, "2"]:
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


def how_outside(function: AbstractSpectralFunction, operator: FlatOperator) -> Any:
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
    return failure(outside, how_outside(function, operator))


def check_precision(
    operator: FlatOperator,
    std_err: Real[Array, ""],
    width: Real[Array, ""],
    rounding: Real[Array, ""],
    unresolved: Real[Array, ""],
    magnitude: Real[Array, ""],
) -> Any:
    """Whether rounding errors of the products are a large part of the error that is
    reported. `rounding`, `unresolved` and `magnitude` are those of the quadratic forms in
    the mean, `std_err` is that of sampling, and `width` that of the interval that
    quadrature leaves.

    What is `unresolved` is part of the reported error, up to the second digit of the
    value, and so is what is smaller. Where all of these are below the rounding floor of
    the standard error, up to twice that floor are as expected."""
    floor, half = operator.rounding * magnitude, (std_err + width) / 2
    large = jnp.maximum(jnp.maximum(half, unresolved), 2 * floor)
    hidden = jnp.maximum(half, 0.02 * magnitude)
    lost = (rounding > large) | (unresolved > hidden)
    return failure(lost, RESULTS.precision_lost)


def combine(
    coefficients: Real[Array, "r s"],
    vectors: Real[Array, "s s"],
    basis: Inexact[Array, "s n"],
) -> Inexact[Array, "r n"]:
    """Combinations of Ritz vectors, whose coordinates in the basis are rows."""
    weights = jnp.matmul(coefficients, vectors, precision="highest")
    return jnp.matmul(weights, basis, precision="highest")
