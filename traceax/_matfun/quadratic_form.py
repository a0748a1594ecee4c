"""Quadratic forms `z* f(A) z` from a Krylov method, their brackets, and the effect of
rounding."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._flat import FlatOperator
from .._kernel.dense import eigh, two_norm
from .._kernel.lanczos import unit
from .._kernel.quadrature import Compression, radau, shorter
from .._kernel.small_matrix import least_seen, with_pole
from .._solution import failure, RESULTS
from .functions import AbstractSpectralFunction


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
        the root mean square; elsewhere 0.
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
    spread: Real[Array, ""] | float = 0.0


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
    if not function.semidefinite_domain:
        values = function(nodes)
        return values if function.bracketed else with_pole(function, nodes, values)
    lowest = roundoff(nodes, eps) if function.singular_at_zero else 0
    return function(jnp.maximum(nodes, lowest))


def used_nodes(nodes: Real[Array, " s"], weights: Real[Array, " s"]) -> Real[Array, " s"]:
    """The nodes, but one that has weight in the place of those without: after a breakdown
    these need not be in the domain of a function."""
    return jnp.where(weights > 0, nodes, nodes[jnp.argmax(weights)])


def slopes_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """Its derivative there."""
    if not function.semidefinite_domain:
        return function.derivative(nodes)
    return function.derivative(jnp.maximum(nodes, roundoff(nodes, eps)))


def magnitude_of(
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    slopes: Real[Array, " s"],
) -> Real[Array, ""]:
    """The size that rounding errors of a quadrature rule are relative to: its value or,
    if larger, its change when all nodes change by the same factor. (The logarithm and the
    entropy are 0 at 1, but change there.)"""
    change = jnp.sum(weights * jnp.abs(nodes * slopes))
    change = jnp.where(jnp.isfinite(change), change, 0)
    return jnp.maximum(jnp.abs(jnp.sum(weights * values)), change)


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
    return jnp.where(nodes > roundoff(nodes, eps), slopes, 0)


def roundoff(nodes: Real[Array, " s"], eps: float) -> Real[Array, ""]:
    """The size below which a Ritz value may be a rounding error of the products, and is
    raised to it."""
    largest = jnp.max(jnp.abs(nodes))
    return jnp.where(largest > 0, eps / 8 * largest, eps / 8)


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
            least = roundoff(extremes, operator.eps)
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
    the mean, `std_err` is that of sampling, and `width` that of the bracket.

    What is `unresolved` is part of the reported error, up to the second digit of the
    value. Where all of these are below the rounding floor of the standard error, up to
    twice that floor are as expected."""
    floor = operator.rounding * magnitude
    large = jnp.maximum((jnp.hypot(std_err, unresolved) + width) / 2, 2 * floor)
    hidden = jnp.maximum((std_err + width) / 2, 0.02 * magnitude)
    lost = (rounding > large) | (unresolved > hidden)
    return failure(lost, RESULTS.precision_lost)


def lower_end(
    function: AbstractSpectralFunction,
    compression: Compression,
    lower_bound: Real[Array, ""] | float | None,
    eps: float,
) -> Real[Array, ""]:
    """A number that is taken to be at or below the smallest eigenvalue. For a function
    that is defined on all reals, an operator is assumed to be positive if its Ritz values
    are."""
    nodes, singular = compression.nodes, function.singular_at_zero
    lower = roundoff(nodes, eps) if singular else jnp.zeros_like(nodes[0])
    if not function.semidefinite_domain:
        beyond = nodes[0] - two_norm(compression.border)
        lower = jnp.where(nodes[0] > 0, roundoff(nodes, eps), beyond)
    if lower_bound is None:
        return lower
    bound = jnp.asarray(lower_bound, nodes.dtype)
    known = jnp.minimum(bound, nodes[0])
    # Rounding may leave a Ritz value below the domain.
    known = jnp.maximum(known, lower) if function.semidefinite_domain else known
    # A bound that is above a Ritz value is none.
    wrong = bound - nodes[0] > 8 * eps * jnp.max(jnp.abs(nodes))
    return jnp.where(wrong, lower, known)


def integral(
    values: Callable[[Real[Array, " p"]], Real[Array, " p"]],
    eigenpairs: tuple[Real[Array, " p"], Inexact[Array, "p p"]],
    measured: Bool[Array, " w"],
) -> Real[Array, ""]:
    """The sum of diagonal entries of `values(T)`, T with these eigenpairs: of those among
    the first that are `measured`. Values without weight may be infinite."""
    nodes, vectors = eigenpairs
    lead = vectors[: len(measured)] * measured[:, None]
    weights = jnp.sum(jnp.abs(lead) ** 2, axis=0)
    return jnp.sum(jnp.where(weights > 0, weights * values(nodes), 0))


def bracket_of(
    function: AbstractSpectralFunction,
    value: Real[Array, ""],
    compression: Compression,
    measured: Bool[Array, " w"],
    lower: Real[Array, ""],
    at_nodes: Callable[[Real[Array, " p"]], Real[Array, " p"]] | None = None,
    largest: Real[Array, ""] | float = -jnp.inf,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, "2"]:
    """Lower and upper bound of the form whose Gauss rule is `value`, and which is to be
    multiplied by a `factor`; `lower` is a lower bound of the spectrum, and `largest` an
    eigenvalue that is certain to exist. `at_nodes` are the values of the function at the
    nodes, if they are known.

    Where no bound is proven, the truth is taken to be within twice the largest
    difference from three other rules: Gauss-Radau at either end, and Gauss with one step
    less. A rule with a node outside of the domain is left out. Where Lanczos broke down,
    only rounding is left."""

    def values(nodes):
        if at_nodes is not None:
            return at_nodes(nodes)
        return function(jnp.maximum(nodes, lower) if in_domain else nodes)

    in_domain = function.semidefinite_domain
    below = radau(compression, lower)
    if function.bracketed:
        exactly = lambda nodes: values(nodes.at[0].set(lower))  # noqa: E731
        other = integral(exactly, eigh(below), measured)
        return jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])
    rest = two_norm(compression.border)
    upper = jnp.maximum(jnp.max(compression.nodes) + rest, largest)
    above = -radau(-compression, -upper)
    rules = eigh(jnp.stack([below, above, shorter(compression)]))
    others = jax.vmap(lambda rule: integral(values, rule, measured))(rules)
    differences = jnp.abs(others - value)
    differences = jnp.where((rest > 0) & ~jnp.isnan(differences), differences, 0)
    error = finite(2 * jnp.max(differences), factor)
    low, high = value - error, value + error
    if function.nonnegative:
        low = jnp.maximum(low, jnp.minimum(value, 0))
    return jnp.stack([low, high])


def finite(error: Real[Array, ""], factor: Real[Array, ""] | float) -> Real[Array, ""]:
    """An error that is to be multiplied by a `factor`, and not infinite then, so that
    moments of such errors are defined."""
    return jnp.minimum(error, jnp.finfo(error.dtype).max / (8 * jnp.maximum(factor, 1)))


def combine(
    coefficients: Real[Array, "r s"],
    vectors: Real[Array, "s s"],
    basis: Inexact[Array, "s n"],
) -> Inexact[Array, "r n"]:
    """Combinations of Ritz vectors, whose coordinates in the basis are rows."""
    weights = jnp.matmul(coefficients, vectors, precision="highest")
    return jnp.matmul(weights, basis, precision="highest")
