"""The quadrature rules beside the Gauss rule, and the bracket that they make."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._kernel.dense import two_norm
from .._kernel.quadrature import Compression, radau, shorter
from .._reduce import reduce_together
from .functions import AbstractSpectralFunction


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
        beyond = nodes[0] - two_norm(compression.coupling)
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
    upper = jnp.max(compression.nodes) + two_norm(compression.coupling)
    above = -radau(-compression, -jnp.maximum(upper, largest))
    return jnp.stack([below, above, shorter(compression)])


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
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, "2"]:
    """Lower and upper bound of the form whose Gauss rule is `value`, and which is to be
    multiplied by a `factor`, from what `other_rules` give; `coupling` is that of the
    `Compression`.

    Where no bound is proven, the truth is taken to be within twice the largest difference
    from these rules. A rule with a node outside of the domain is left out. Where Lanczos
    broke down, only rounding is left."""
    if function.bracketed:
        (other,) = others
        return jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])
    differences = jnp.abs(jnp.stack(others) - value)
    known = (two_norm(coupling) > 0) & ~jnp.isnan(differences)
    error = finite(2 * jnp.max(jnp.where(known, differences, 0)), factor)
    low, high = value - error, value + error
    if function.nonnegative:
        low = jnp.maximum(low, jnp.minimum(value, 0))
    return jnp.stack([low, high])


def finite(error: Real[Array, ""], factor: Real[Array, ""] | float) -> Real[Array, ""]:
    """An error that is to be multiplied by a `factor`, and not infinite then, so that
    moments of such errors are defined."""
    return jnp.minimum(error, jnp.finfo(error.dtype).max / (8 * jnp.maximum(factor, 1)))
