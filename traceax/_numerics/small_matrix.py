"""Functions of small general matrices, and their derivatives. The matrices themselves
are constant to derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Inexact, Real, Scalar

from .._core.threefry import fast_key
from .dense import eig, expm, inverse


def by_eigenvalues(
    function: Callable[[Array], Array],
    derivative: Callable[[Array], Array],
    matrix: Inexact[Array, "s s"],
    *,
    semidefinite_domain: bool,
    singular_at_zero: bool,
) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
    """A function of complex numbers and its derivative. It is defined on all numbers, or
    on all but the negative ones, if it is `singular_at_zero` without 0; elsewhere the
    result is NaN. The derivative may be infinite at 0, and is taken at the roundoff
    there."""
    nodes, vectors, inverted = eig(matrix)
    condition = jnp.linalg.norm(vectors, axis=0) * jnp.linalg.norm(inverted, axis=1)
    largest = jnp.max(jnp.abs(nodes))
    roundoff = float(jnp.finfo(nodes.dtype).eps) * jnp.where(largest > 0, largest, 1)
    inner = nodes
    if semidefinite_domain:
        zero = hidden(nodes, condition)
        outside = (nodes.real < 0) & (jnp.abs(nodes.imag) <= roundoff) & ~zero
        outside = outside | zero if singular_at_zero else outside
        nodes = jnp.where(outside, jnp.nan, nodes)
        inner = jnp.where(zero, roundoff.astype(nodes.dtype), nodes)

    def apply(values):
        of_matrix = jnp.matmul(vectors * values, inverted, precision="highest")
        return of_matrix if jnp.iscomplexobj(matrix) else of_matrix.real

    values = function(nodes)
    if not semidefinite_domain:
        values = with_pole(function, nodes, values, condition)
    return apply(values), apply(derivative(inner))


def least_seen(largest: Real[Array, ""]) -> Real[Array, ""]:
    """The size up to which an eigenvalue cannot be told from zero: those of exactly
    singular matrices are found with errors of up to three roundoffs of the largest."""
    return 4 * float(jnp.finfo(largest.dtype).eps) * largest


def hidden(
    nodes: Inexact[Array, " s"], condition: Real[Array, " s"] | float = 1.0
) -> Bool[Array, " s"]:
    """Which eigenvalues, with these condition numbers, cannot be told from zero."""
    sizes = jnp.abs(nodes)
    return sizes <= least_seen(jnp.max(sizes)) * condition


def with_pole(
    function: Callable[[Array], Array],
    nodes: Inexact[Array, " s"],
    values: Inexact[Array, " s"],
    condition: Real[Array, " s"] | float = 1.0,
) -> Inexact[Array, " s"]:
    """The `values` of a function of which nothing is known: if it is infinite at zero,
    then also at the nodes that cannot be told from zero. No derivative is taken there."""
    at_zero = jax.lax.stop_gradient(function(jnp.zeros_like(nodes[:1])))
    return jnp.where(hidden(nodes, condition) & jnp.isinf(at_zero), at_zero, values)


def rounded(matrix: Inexact[Array, "s s"], eps: float) -> Inexact[Array, "s s"]:
    """The matrix with a rounding error added to each entry, up or down by `eps` times the
    largest one."""
    size = eps * jnp.max(jnp.abs(matrix))
    signs = jr.rademacher(fast_key(jr.key(0)), matrix.shape, size.dtype)
    return matrix + size * signs


def power(
    matrix: Inexact[Array, "s s"], exponent: int
) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
    """A whole power and its derivative. A negative one is NaN where the matrix cannot be
    told from a singular one."""
    if exponent == 0:
        return jnp.eye(len(matrix), dtype=matrix.dtype), jnp.zeros_like(matrix)
    base = matrix
    if exponent < 0:
        base = inverse(matrix)
        condition = jnp.linalg.norm(matrix, ord=1) * jnp.linalg.norm(base, ord=1)
        lost = ~(condition * float(jnp.finfo(matrix.dtype).eps) < 0.1)
        base = jnp.where(lost, jnp.nan, base)
    with jax.default_matmul_precision("highest"):
        below = jnp.linalg.matrix_power(base, abs(exponent) - 1)
        value = below @ base
        return value, exponent * (value @ base if exponent < 0 else below)


@jax.custom_jvp
def exponential(scale: Scalar, matrix: Inexact[Array, "s s"]) -> Inexact[Array, "s s"]:
    """`exp(scale * matrix)`, with derivatives in the scale."""
    return expm(scale * matrix)


@exponential.defjvp
def _exponential_rule(primals, tangents) -> Any:
    value = exponential(*primals)
    slope = jnp.matmul(primals[1], value, precision="highest")
    return value, tangents[0] * slope


@jax.custom_jvp
def shifted_inverse(
    shift: Scalar, matrix: Inexact[Array, "s s"]
) -> Inexact[Array, "s s"]:
    """`(matrix + shift I)^(-1)`, with derivatives in the shift."""
    return power(matrix + shift * jnp.eye(len(matrix), dtype=matrix.dtype), -1)[0]


@shifted_inverse.defjvp
def _shifted_inverse_rule(primals, tangents) -> Any:
    value = shifted_inverse(*primals)
    slope = -jnp.matmul(value, value, precision="highest")
    return value, tangents[0] * slope
