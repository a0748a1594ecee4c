"""Rules to compare the Gauss rule with, and the bracket that follows from them.

For smooth f the errors of the Gauss rule G_s of s steps, and of the Gauss-Radau rule R_s
with a node at a <= lambda_min, are, with some xi in the convex hull of the spectrum,

    int f dmu - G_s = f^(2s)(xi) / (2s)! int prod_j (x - theta_j)^2 dmu,
    int f dmu - R_s = f^(2s+1)(xi) / (2s+1)! int (x - a) prod_j (x - theta_j')^2 dmu.

If the derivatives of f from the second on alternate in sign (`function.bracketed`), G_s
and R_s are on either side of the true value. For other functions the largest difference
between G_s (`value`) and three other rules serves as an estimate of the error. Golub and
Meurant, Matrices, Moments and Quadrature with Applications, 2010, chapters 6 and 7;
docs/devdocs/quadrature.md has the derivations and measurements.

Throughout, `square` is ||z||^2, and `lower` stands for a.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.reductions import reduce_together
from .._numerics.dense import two_norm
from .base import AbstractSpectralFunction
from .tridiagonal import Compression, drop_last_step, largest_weight, radau


# The largest number of eigenvalues that a run may leave room for at a point where it
# excludes them. The weight of an eigenvector is 1 in the mean, so one that is missed has
# at most a tenth of that. A smaller number takes more steps; a larger one misses more.
_MAX_EXCLUDED = 0.1

# Bisections of an interval of logarithms, which is at most `log(8 / eps)` long: 38 in
# float64. The point that they find is within 1% of the exact one.
_NUM_BISECTIONS = 12

# By how many roundoffs of the largest Ritz value a lower bound may exceed the smallest
# one. Up to there the excess counts as rounding of that Ritz value. A larger number
# trusts more wrong bounds; a smaller one discards more exact bounds.
BOUND_TOLERANCE = 8


def roundoff(largest: Real[Array, ""], eps: float) -> Real[Array, ""]:
    """The size below which a Ritz value may be a rounding error of the matvecs, and is
    raised to it. `largest` is the largest modulus of the Ritz values."""
    # An eighth of eps, and not eps: of an identity with a few eigenvalues raised to 400,
    # in bfloat16, all other eigenvalues are below eps times the largest, and most of the
    # log-determinant comes from them.
    return jnp.where(largest > 0, eps / 8 * largest, eps / 8)


def lower_end(
    function: AbstractSpectralFunction,
    compression: Compression,
    lower_bound: Real[Array, ""] | float | None,
    eps: float,
) -> Real[Array, ""]:
    """A number that is assumed to be at or below the smallest eigenvalue. If the function
    is defined on all reals, a positive smallest Ritz value is taken to mean that the
    operator is positive."""
    nodes, largest = compression.nodes, compression.largest
    lower = jnp.zeros_like(largest)
    if function.singular_at_zero:
        lower = roundoff(largest, eps)
    if not function.semidefinite_domain:
        beyond = _least_enclosed(compression)
        lower = jnp.where(nodes[0] > 0, roundoff(largest, eps), beyond)
    if lower_bound is None:
        return lower
    bound = jnp.asarray(lower_bound, nodes.dtype)
    clipped = jnp.minimum(bound, nodes[0])
    if function.semidefinite_domain:
        # Rounding may leave a Ritz value below the domain.
        clipped = jnp.maximum(clipped, lower)
    # Ritz values are never below the spectrum, so a bound above one of them is wrong.
    wrong = bound - nodes[0] > BOUND_TOLERANCE * eps * largest
    return jnp.where(wrong, lower, clipped)


def bracket_end(
    compression: Compression,
    square: Real[Array, ""],
    lower: Real[Array, ""],
    smallest: Real[Array, ""],
) -> Real[Array, ""]:
    """The largest number, from `smallest` on, below which the run excludes further
    eigenvalues, or `lower` if it excludes none. `square` is the squared norm of the start
    vector, which is taken to be random.

    N(a), `square` times the Christoffel function, is the number of eigenvalues at a that
    the run leaves room for. It grows with a, so bisection finds where it is
    `_MAX_EXCLUDED`."""

    def is_excluded(at):
        return square * largest_weight(compression, at) <= _MAX_EXCLUDED

    def halve(_, ends):
        # Two roots, since the product of the ends may underflow.
        middle = jnp.sqrt(ends[0]) * jnp.sqrt(ends[1])
        excluded = is_excluded(middle)
        return jnp.where(excluded, middle, ends[0]), jnp.where(excluded, ends[1], middle)

    ends = smallest, jnp.maximum(jnp.min(compression.nodes), smallest)
    highest, _ = jax.lax.fori_loop(0, _NUM_BISECTIONS, halve, ends)
    # After a breakdown the coupling is zero, and T says nothing of other eigenvalues.
    excludes = (two_norm(compression.coupling) > 0) & is_excluded(smallest)
    return jnp.where(excludes, highest, lower)


def hidden_eigenvalues(
    compression: Compression,
    square: Real[Array, ""],
    at: Real[Array, ""],
    change: Real[Array, ""],
    is_infinite: Bool[Array, ""],
) -> Real[Array, "3"]:
    """`QuadraticForm.hidden` for eigenvalues at one point."""
    count = square * largest_weight(compression, at)
    count = jnp.where(two_norm(compression.coupling) > 0, count, 0)
    change = clip_to_finite(change, factor=1.0)
    return jnp.stack([count, change, is_infinite.astype(count.dtype)])


def change_at_lower_end(
    function: AbstractSpectralFunction,
    smallest: Real[Array, ""],
    lower: Real[Array, ""],
    floor: Real[Array, ""],
) -> tuple[Real[Array, ""], Bool[Array, ""]]:
    """How much the function changes from the `smallest` node to the `lower` end of the
    spectrum; and whether it is infinite at zero, and `lower` cannot be told from zero
    because it is not above the `floor`."""
    ends = function(jnp.stack([lower, jnp.maximum(smallest, jnp.maximum(lower, floor))]))
    return jnp.abs(ends[0] - ends[1]), function.singular_at_zero & (lower <= floor)


def gauss_changes(
    values: Sequence[Real[Array, ""]],
    steps: Int[Array, ""] | int,
    factor: Real[Array, ""],
) -> Real[Array, "2"]:
    """`QuadraticForm.changes`, from the Gauss rules of all `steps`, of the first half of
    them, and of the first quarter, each rounded up."""
    whole, half, quarter = values
    # Of fewer than 4 steps half and a quarter are the same number or almost, so that no
    # trend shows. An earlier change of 0 counts as one that has not settled.
    earlier = jnp.where(steps < 4, 0, jnp.abs(half - quarter))
    return factor * jnp.stack([jnp.abs(whole - half), earlier])


def integrals(
    values: Iterable[Inexact[Array, " q"]],
    vectors: Inexact[Array, "r q q"],
    measured: Bool[Array, " w"],
) -> Sequence[Inexact[Array, ""]]:
    """For each matrix T of a stack, the sum of those of the first w diagonal entries of
    `f(T)` that are `measured`. `values` are those of f at the eigenvalues of each T, and
    `vectors` its eigenvectors."""
    lead = vectors[:, : len(measured)] * measured[:, None]
    weights = jnp.sum(jnp.abs(lead) ** 2, axis=1)
    pairs = zip(weights, values, strict=True)
    # Nodes without weight may be poles of f, where 0 times infinity would be NaN. One
    # reduction for all sums is one kernel.
    return reduce_together([jnp.where(w > 0, w * f, 0) for w, f in pairs])


def comparison_rules(
    function: AbstractSpectralFunction,
    compression: Compression,
    lower: Real[Array, ""],
    largest: Real[Array, ""] | float = -jnp.inf,
) -> Inexact[Array, "r q q"]:
    """The matrices of the rules that `bracket_of` compares with the Gauss rule: for a
    bracket Gauss-Radau at the lower end; else Gauss-Radau at either end, and Gauss with
    one step fewer.

    - `lower`: a lower bound of the spectrum.
    - `largest`: an eigenvalue that is certain to exist.
    """
    below = radau(compression, lower)
    if function.bracketed:
        return below[None]
    # The upper end of T is the lower end of -T. With the residual norm of the whole run
    # instead of one Ritz pair, the rule is too wide: by 1e9 and more for exp(50 A).
    upper = jnp.maximum(-_least_enclosed(-compression), largest)
    above = -radau(-compression, -upper)
    return jnp.stack([below, above, drop_last_step(compression)])


def _least_enclosed(compression: Compression) -> Real[Array, ""]:
    """The smallest node minus its residual norm: the interval of this radius around a
    Ritz value has an eigenvalue in it."""
    smallest = jnp.argmin(compression.nodes)
    # The residual of a Ritz pair (theta, V y) is `v B E* y`, of the norm of `B E* y`.
    last = jax.lax.dynamic_slice_in_dim(
        compression.vectors[:, smallest],
        start_index=compression.first,
        slice_size=len(compression.coupling),
    )
    residual = jnp.matmul(compression.coupling, last, precision="highest")
    return compression.nodes[smallest] - two_norm(residual)


def likely_end(compression: Compression, lower: Real[Array, ""]) -> Real[Array, ""]:
    """A number that is likely to be below the smallest eigenvalue of a positive operator,
    if the smallest node has converged to it; else `lower`."""
    smallest = jnp.min(compression.nodes)
    residual = smallest - _least_enclosed(compression)
    converged = (residual < smallest) & (smallest > 0)
    ratio = residual / jnp.where(converged, smallest, 1)
    # To first order two residuals below the node, and always positive.
    return jnp.maximum(lower, jnp.where(converged, smallest / (1 + ratio) ** 2, lower))


def comparison_nodes(
    function: AbstractSpectralFunction,
    nodes: Real[Array, "r q"],
    lower: Real[Array, ""],
) -> Real[Array, "r q"]:
    """The eigenvalues of the `comparison_rules`, ascending, as nodes in the domain."""
    if function.bracketed:
        # The prescribed node is known exactly. The computed one is off by the machine
        # epsilon times the largest node, where an inverse with a small shift is steep.
        nodes = nodes.at[:, 0].set(lower)
    return jnp.maximum(nodes, lower) if function.semidefinite_domain else nodes


def bracket_of(
    function: AbstractSpectralFunction,
    value: Inexact[Array, ""],
    others: Sequence[Inexact[Array, ""]],
    coupling: Inexact[Array, "b b"],
    degree: Int[Array, ""] | int,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, "2"]:
    """Lower and upper bound of a quadratic form, or of its real part. They are estimates
    for a function that is not `bracketed`.

    - `value`, `others`: the Gauss rule, and the rules of `comparison_rules`.
    - `coupling`: the field of the `Compression`.
    - `degree`: the Gauss rule is exact for polynomials up to this degree.
    - `factor`: what the caller multiplies the bounds by.
    """
    if function.bracketed:
        (other,) = others
        return jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])
    differences = jnp.abs(jnp.stack(others) - value)
    # A rule with a node outside the domain is NaN, and left out. After a breakdown the
    # Gauss rule is exact, and only rounding is left, which is counted elsewhere.
    counted = (two_norm(coupling) > 0) & ~jnp.isnan(differences)
    if function.degree is not None:
        counted &= function.degree > degree
    error = clip_to_finite(jnp.max(jnp.where(counted, differences, 0)), factor)
    low, high = value.real - error, value.real + error
    if function.nonnegative:
        low = jnp.maximum(low, jnp.minimum(value, 0))
    return jnp.stack([low, high])


def clip_to_finite(
    error: Real[Array, "*n"], factor: Real[Array, ""] | float
) -> Real[Array, "*n"]:
    """The error, clipped so that `factor` times it is finite: moments of infinite errors
    would be NaN. The 8 leaves room to add and double such errors."""
    return jnp.minimum(error, jnp.finfo(error.dtype).max / (8 * jnp.maximum(factor, 1)))
