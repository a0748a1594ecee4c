"""The quadrature rules beside the Gauss rule, and the bracket that they make."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.reductions import reduce_together
from .._numerics.dense import two_norm
from .functions import AbstractSpectralFunction
from .tridiagonal import (
    Compression,
    largest_weight,
    radau,
    shorter,
)


def roundoff(largest: Real[Array, ""], eps: float) -> Real[Array, ""]:
    """The size below which a Ritz value may be a rounding error of the products, and is
    raised to it, for the `largest` of their moduli."""
    return jnp.where(largest > 0, eps / 8 * largest, eps / 8)


def lower_end(
    function: AbstractSpectralFunction,
    compression: Compression,
    lower_bound: Real[Array, ""] | float | None,
    eps: float,
) -> Real[Array, ""]:
    """A number that is taken to be at or below the smallest eigenvalue. For a function
    that is defined on all reals, an operator is assumed to be positive if its Ritz values
    are."""
    nodes, largest = compression.nodes, compression.largest
    lower = jnp.zeros_like(largest)
    if function.singular_at_zero:
        lower = roundoff(largest, eps)
    if not function.semidefinite_domain:
        beyond = _below(compression)
        lower = jnp.where(nodes[0] > 0, roundoff(largest, eps), beyond)
    if lower_bound is None:
        return lower
    bound = jnp.asarray(lower_bound, nodes.dtype)
    known = jnp.minimum(bound, nodes[0])
    # Rounding may leave a Ritz value below the domain.
    known = jnp.maximum(known, lower) if function.semidefinite_domain else known
    # A bound that is above a Ritz value is none.
    wrong = bound - nodes[0] > 8 * eps * largest
    return jnp.where(wrong, lower, known)


def seen_above(
    compression: Compression,
    square: Real[Array, ""],
    lower: Real[Array, ""],
    least: Real[Array, ""],
) -> Real[Array, ""]:
    """The largest number, from `least` on, up to which the run has seen every eigenvalue,
    or `lower` if there is none: the weight of one in the measure of a random vector, of
    which `square` is the squared norm, is 1 in the mean, and where a run leaves room for
    no more than a tenth of that, there is none."""

    def is_seen(at):
        return square * largest_weight(compression, at) <= 0.1

    def halve(_, ends):
        middle = jnp.sqrt(ends[0]) * jnp.sqrt(ends[1])
        seen = is_seen(middle)
        return jnp.where(seen, middle, ends[0]), jnp.where(seen, ends[1], middle)

    ends = least, jnp.maximum(jnp.min(compression.nodes), least)
    highest, _ = jax.lax.fori_loop(0, 12, halve, ends)
    known = (two_norm(compression.coupling) > 0) & is_seen(least)
    return jnp.where(known, highest, lower)


def hidden_at(
    compression: Compression,
    square: Real[Array, ""],
    least: Real[Array, ""],
    change: Real[Array, ""],
    is_infinite: Bool[Array, ""],
) -> Real[Array, "3"]:
    """`QuadraticForm.hidden` for eigenvalues at `least`."""
    count = square * largest_weight(compression, least)
    count = jnp.where(two_norm(compression.coupling) > 0, count, 0)
    return jnp.stack([count, finite(change, 1.0), is_infinite.astype(count.dtype)])


def change_below(
    function: AbstractSpectralFunction,
    smallest: Real[Array, ""],
    lower: Real[Array, ""],
    floor: Real[Array, ""],
) -> tuple[Real[Array, ""], Bool[Array, ""]]:
    """How far the value of a function at the `smallest` node is from that at the `lower`
    end of the spectrum; and whether the function is infinite at zero, from which an end
    up to the `floor` cannot be told."""
    ends = function(jnp.stack([lower, jnp.maximum(smallest, jnp.maximum(lower, floor))]))
    return jnp.abs(ends[0] - ends[1]), function.singular_at_zero & (lower <= floor)


def changes_of(
    values: Sequence[Real[Array, ""]],
    made: Int[Array, ""] | int,
    factor: Real[Array, ""],
) -> Real[Array, "2"]:
    """`QuadraticForm.changes` from the Gauss rules of all steps that were `made`, the
    first half, and the first quarter of them, rounded up. Fewer than 4 show no trend."""
    all_steps, half, quarter = values
    before = jnp.where(made < 4, 0, jnp.abs(half - quarter))
    return factor * jnp.stack([jnp.abs(all_steps - half), before])


def integrals(
    values: Iterable[Real[Array, " q"]],
    vectors: Inexact[Array, "r q q"],
    measured: Bool[Array, " w"],
) -> Sequence[Real[Array, ""]]:
    """The sum of diagonal entries of `f(T)` for each T of a stack, from the values of f
    at its eigenvalues, and its eigenvectors: of those among the first that are
    `measured`. Values without weight may be infinite."""
    lead = vectors[:, : len(measured)] * measured[:, None]
    weights = jnp.sum(jnp.abs(lead) ** 2, axis=1)
    pairs = zip(weights, values, strict=True)
    return reduce_together([jnp.where(w > 0, w * f, 0) for w, f in pairs])


def other_rules(
    function: AbstractSpectralFunction,
    compression: Compression,
    lower: Real[Array, ""],
    largest: Real[Array, ""] | float = -jnp.inf,
) -> Inexact[Array, "r q q"]:
    """The matrices of the rules that `bracket_of` compares with the Gauss rule. `lower`
    is a lower bound of the spectrum, and `largest` an eigenvalue that is certain to
    exist.

    Where no bound is proven, they are Gauss-Radau at either end, and Gauss with one step
    less; else Gauss-Radau at the lower end."""
    below = radau(compression, lower)
    if function.bracketed:
        return below[None]
    upper = jnp.maximum(-_below(-compression), largest)
    above = -radau(-compression, -upper)
    return jnp.stack([below, above, shorter(compression)])


def _below(compression: Compression) -> Real[Array, ""]:
    """The smallest node, less its residual norm, within which there is an eigenvalue."""
    at = jnp.argmin(compression.nodes)
    rows = compression.first, len(compression.coupling)
    last = jax.lax.dynamic_slice_in_dim(compression.vectors[:, at], *rows)
    residual = jnp.matmul(compression.coupling, last, precision="highest")
    return compression.nodes[at] - two_norm(residual)


def likely_end(compression: Compression, lower: Real[Array, ""]) -> Real[Array, ""]:
    """A number below the smallest eigenvalue of a positive operator if the smallest node
    has converged to it, or `lower`: the farther down, the larger the residual."""
    smallest = jnp.min(compression.nodes)
    residual = smallest - _below(compression)
    converged = (residual < smallest) & (smallest > 0)
    ratio = residual / jnp.where(converged, smallest, 1)
    return jnp.maximum(lower, jnp.where(converged, smallest / (1 + ratio) ** 2, lower))


def other_nodes(
    function: AbstractSpectralFunction,
    nodes: Real[Array, "r q"],
    lower: Real[Array, ""],
) -> Real[Array, "r q"]:
    """The eigenvalues of these matrices as nodes: the one of Gauss-Radau that is known is
    exact where it is to be a bound, and none is below the spectrum if the function is not
    defined there."""
    if function.bracketed:
        nodes = nodes.at[:, 0].set(lower)
    return jnp.maximum(nodes, lower) if function.semidefinite_domain else nodes


def bracket_of(
    function: AbstractSpectralFunction,
    value: Real[Array, ""],
    others: Sequence[Real[Array, ""]],
    coupling: Inexact[Array, "b b"],
    degree: Int[Array, ""] | int,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, "2"]:
    """Lower and upper bound of the form whose Gauss rule is `value`, and which is to be
    multiplied by a `factor`, from what `other_rules` give; `coupling` is that of the
    `Compression`, and `degree` that of polynomials up to which the rule is exact.

    Where no bound is proven, the truth is taken to be within the largest difference from
    these rules. A rule with a node outside of the domain is left out. Where Lanczos
    broke down, only rounding is left."""
    if function.bracketed:
        (other,) = others
        return jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])
    differences = jnp.abs(jnp.stack(others) - value)
    known = (two_norm(coupling) > 0) & ~jnp.isnan(differences)
    if function.degree is not None:
        known &= function.degree > degree
    error = finite(jnp.max(jnp.where(known, differences, 0)), factor)
    low, high = value - error, value + error
    if function.nonnegative:
        low = jnp.maximum(low, jnp.minimum(value, 0))
    return jnp.stack([low, high])


def finite(
    error: Real[Array, "*n"], factor: Real[Array, ""] | float
) -> Real[Array, "*n"]:
    """An error that is to be multiplied by a `factor`, and not infinite then, so that
    moments of such errors are defined."""
    return jnp.minimum(error, jnp.finfo(error.dtype).max / (8 * jnp.maximum(factor, 1)))
