"""`z* f(A) z` and `f'(A) z` from one run of Lanczos or Golub-Kahan."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._flat import FlatOperator
from .._kernel.dense import svd
from .._kernel.golub_kahan import golub_kahan
from .._kernel.lanczos import lanczos, unit
from .._kernel.quadrature import apply_to_first, radau, ritz
from .._moments import Moments
from .._solution import failure, RESULTS
from .functions import AbstractSpectralFunction


class QuadraticForm(eqx.Module):
    """What one probe z tells of a function of A.

    - `value`: the Gauss rule for `z* f(A) z`.
    - `gradient`: `f'(A) z`, such that `Re(gradient* dA z)` is the derivative in the mean;
        for a function of singular values `U f'(S) V* z`.
    - `residual`: of `A gradient` (for singular values `A* gradient`) relative to what it
        should be; for the logarithm that of the solve `A x = z`.
    - `bracket`: lower and upper bound of `z* f(A) z`, by Gauss and Gauss-Radau.
    - `rounding`: how far `value` moves where the entries of the run that products give
        twice are taken the other time, which only rounding tells apart.
    - `extremes`: smallest and largest Ritz value.
    """

    value: Real[Array, ""]
    gradient: Inexact[Array, " m"]
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
    """Its derivative there, which may be infinite at 0."""
    if not function.semidefinite_domain:
        return function.derivative(nodes)
    return function.derivative(jnp.maximum(nodes, roundoff(nodes, eps)))


def singular_slopes_at(
    function: AbstractSpectralFunction, nodes: Real[Array, " s"], eps: float
) -> Real[Array, " s"]:
    """Its derivative at singular values. Where it is defined at 0, which is the least of
    them, 0 is a subgradient there."""
    slopes = slopes_at(function, nodes, eps)
    if function.singular_at_zero:
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
    value: Real[Array, ""],
    singular: Any = RESULTS.not_positive_definite,
) -> Any:
    """Whether Ritz values left the domain of `function`, beyond rounding; `singular` is
    what to call it if that domain is the positive numbers."""
    smallest, largest = extremes
    size = jnp.maximum(jnp.abs(smallest), jnp.abs(largest))
    how: Any = RESULTS.outside_domain
    outside = jnp.isfinite(size) & ~jnp.isfinite(value)
    if function.semidefinite_domain:
        outside = smallest < -operator.eps * operator.size**0.5 * size
    if function.singular_at_zero:
        outside = smallest <= roundoff(extremes, operator.eps)
        how = singular
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


def lanczos_form(
    mv: Callable[[Array], Array],
    probe: Inexact[Array, " n"],
    function: AbstractSpectralFunction,
    num_steps: int,
    *,
    window: int | None,
    lower_bound: Real[Array, ""] | float | None,
    eps: float,
) -> QuadraticForm:
    run = lanczos(mv, probe, num_steps, window=window, eps=eps)
    nodes, vectors = ritz(run.alpha, run.beta)
    square = run.norm**2

    def gauss(nodes, vectors):
        return square * jnp.sum(vectors[0] ** 2 * values_at(function, nodes, eps))

    value = gauss(nodes, vectors)
    again = gauss(*ritz(run.alpha, jnp.append(run.projected, 0)))
    bracket = jnp.stack([value, value])
    if function.bracketed:
        end = roundoff(nodes, eps) if function.singular_at_zero else jnp.zeros_like(value)
        if lower_bound is not None:
            end = jnp.minimum(jnp.asarray(lower_bound, end.dtype), nodes[0])
        others, weights = ritz(*radau(run.alpha, run.beta, end))
        values = function(jnp.maximum(others.at[0].set(end), end))
        other = square * jnp.sum(weights[0] ** 2 * values)
        bracket = jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])

    slopes = slopes_at(function, nodes, eps)
    slope = apply_to_first(nodes, vectors, slopes)
    _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
    residual = run.beta[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
    gradient = run.norm * jnp.matmul(slope, run.basis, precision="highest")
    return QuadraticForm(
        value=value,
        gradient=gradient,
        residual=residual,
        bracket=bracket,
        rounding=jnp.abs(again - value),
        extremes=nodes[jnp.array([0, -1])],
    )


def golub_kahan_form(
    mv: Callable[[Array], Array],
    adjoint_mv: Callable[[Array], Array],
    probe: Inexact[Array, " n"],
    function: AbstractSpectralFunction,
    num_steps: int,
    *,
    window: int | None,
    lower_bound: Real[Array, ""] | float | None,
    eps: float,
) -> QuadraticForm:
    """For `f((A* A)^(1/2))` and any A with at least as many rows as columns: nodes are
    singular values of the bidiagonal B, and `gradient` is `U f'(S) V* z` for
    `A = U S V*`; for the logarithm `A^(-*) z`. A* A is never formed. Here
    `function.bracketed` is of `f(sqrt x)`."""
    run = golub_kahan(mv, adjoint_mv, probe, num_steps, window=window, eps=eps)
    square = run.norm**2

    def gauss(diagonal, above):
        u, s, vh = svd(jnp.diag(diagonal) + jnp.diag(above, 1))
        values = values_at(function, s, eps)
        return square * jnp.sum(vh[:, 0] ** 2 * values), (u, s, vh)

    value, (u, s, vh) = gauss(run.diagonal, run.above[:-1])
    again, _ = gauss(run.projected_diagonal, run.projected_above)
    bracket = jnp.stack([value, value])
    if function.bracketed:
        # Gauss-Radau for B* B, in units of the largest singular value so as not to
        # overflow.
        unit_of = jnp.where(s[0] > 0, s[0], 1)
        diagonal, above = run.diagonal / unit_of, run.above / unit_of
        alpha = diagonal**2 + jnp.append(0, above[:-1]) ** 2
        end = jnp.full_like(unit_of, eps / 8 if function.singular_at_zero else 0)
        if lower_bound is not None:
            end = jnp.minimum(jnp.asarray(lower_bound, s.dtype), s[-1]) / unit_of
        squares, vectors = ritz(*radau(alpha, diagonal * above, end**2))
        others = jnp.maximum(jnp.sqrt(jnp.maximum(squares.at[0].set(0), 0)), end)
        other = square * jnp.sum(vectors[0] ** 2 * function(others * unit_of))
        bracket = jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])

    slopes = singular_slopes_at(function, s, eps)
    slope = jnp.matmul(u, vh[:, 0] * slopes, precision="highest")
    _, size = unit(vh[:, 0] * slopes * s)
    residual = run.above[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
    gradient = run.norm * jnp.matmul(slope, run.left, precision="highest")
    return QuadraticForm(
        value=value,
        gradient=gradient,
        residual=residual,
        bracket=bracket,
        rounding=jnp.abs(again - value),
        extremes=s[jnp.array([-1, 0])],
    )
