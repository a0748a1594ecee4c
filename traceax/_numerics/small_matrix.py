"""Functions f(M) of small general matrices, and f'(M).

For a function without a better method, with the eigenvectors of M as the columns of X,

    f(M) = X f(L) X^-1,    f'(M) = X f'(L) X^-1,    M = X L X^-1.

The error is about `eps cond(X)`. Whole powers are products, or products of the inverse,
and the exponential is found by scaling and squaring: both need no eigenvectors.

In the code: the diagonal of L is `nodes`, X is `vectors`, and `X^-1` is `inverted`. M is
constant to derivatives; only the scalars `scale` and `shift` carry them.

Reference: Higham, Functions of Matrices, 2008.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Inexact, Real, Scalar

from .._core.threefry import fast_key
from .dense import eig, expm, inverse


# An eigenvalue cannot be told from zero if it is at most this many roundoffs of the
# largest. Singular matrices of small integers (n = 5 to 200, both precisions) had one of
# 2.8 at most in the place of zero: see "Quadrature" in the developer documentation. A
# larger number flags matrices that are only ill conditioned.
_ZERO_ROUNDOFFS = 4
# An inverse is refused where its relative error, `eps` times the condition number in the
# 1-norm, may exceed this: it would have no correct digit.
_LARGEST_INVERSE_ERROR = 0.1


def by_eigenvalues(
    function: Callable[[Array], Array],
    derivative: Callable[[Array], Array],
    matrix: Inexact[Array, "s s"],
    *,
    semidefinite_domain: bool,
    singular_at_zero: bool,
) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
    """The function of a matrix, and its derivative.

    The function is one of complex numbers. With `semidefinite_domain` it is not defined
    on the negative real axis, and if also `singular_at_zero`, not at 0. The result is NaN
    where M has such an eigenvalue. At an eigenvalue that cannot be told from zero the
    derivative is taken at the roundoff, since it may be infinite at 0."""
    nodes, vectors, inverted = eig(matrix)
    # The condition number of eigenvalue i is `|x_i| |y_i|`, with `y_i` row i of `X^-1`.
    condition = jnp.linalg.norm(vectors, axis=0) * jnp.linalg.norm(inverted, axis=1)
    largest = jnp.max(jnp.abs(nodes))
    roundoff = float(jnp.finfo(nodes.dtype).eps) * jnp.where(largest > 0, largest, 1)
    slope_nodes = nodes
    if semidefinite_domain:
        is_zero = is_numerically_zero(nodes, condition)
        outside = (nodes.real < 0) & (jnp.abs(nodes.imag) <= roundoff) & ~is_zero
        outside = outside | is_zero if singular_at_zero else outside
        nodes = jnp.where(outside, jnp.nan, nodes)
        slope_nodes = jnp.where(is_zero, roundoff.astype(nodes.dtype), nodes)

    def from_eigenvalues(values):
        of_matrix = jnp.matmul(vectors * values, inverted, precision="highest")
        return of_matrix if jnp.iscomplexobj(matrix) else of_matrix.real

    values = function(nodes)
    if not semidefinite_domain:
        values = with_pole(function, nodes, values, condition)
    return from_eigenvalues(values), from_eigenvalues(derivative(slope_nodes))


def zero_threshold(largest: Real[Array, ""]) -> Real[Array, ""]:
    """The size up to which an eigenvalue cannot be told from zero, if the largest one has
    the size `largest`."""
    return _ZERO_ROUNDOFFS * float(jnp.finfo(largest.dtype).eps) * largest


def is_numerically_zero(
    nodes: Inexact[Array, " s"], condition: Real[Array, " s"] | float = 1.0
) -> Bool[Array, " s"]:
    """Which eigenvalues, with these condition numbers, cannot be told from zero."""
    sizes = jnp.abs(nodes)
    return sizes <= zero_threshold(jnp.max(sizes)) * condition


def with_pole(
    function: Callable[[Array], Array],
    nodes: Inexact[Array, " s"],
    values: Inexact[Array, " s"],
    condition: Real[Array, " s"] | float = 1.0,
) -> Inexact[Array, " s"]:
    """The `values` of a function whose poles are not known. If it is infinite at zero,
    the values are also infinite at nodes that cannot be told from zero."""
    # Without `stop_gradient` the derivative at the pole, infinite times zero, would make
    # those of all parameters of the function NaN.
    at_zero = jax.lax.stop_gradient(function(jnp.zeros_like(nodes[:1])))
    return jnp.where(
        is_numerically_zero(nodes, condition) & jnp.isinf(at_zero), at_zero, values
    )


def perturb_entries(matrix: Inexact[Array, "s s"], eps: float) -> Inexact[Array, "s s"]:
    """Add a rounding error to each entry: `eps` times the largest one, with a random
    sign."""
    # A fixed key: the same matrix must give the same result in each call.
    size = eps * jnp.max(jnp.abs(matrix))
    signs = jr.rademacher(fast_key(jr.key(0)), matrix.shape, size.dtype)
    return matrix + size * signs


def power(
    matrix: Inexact[Array, "s s"], exponent: int
) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
    """An integer power and its derivative, `p M^(p-1)`. A negative power is NaN where the
    matrix cannot be told from a singular one."""
    if exponent == 0:
        return jnp.eye(len(matrix), dtype=matrix.dtype), jnp.zeros_like(matrix)
    base = matrix
    if exponent < 0:
        base = inverse(matrix)
        condition = jnp.linalg.norm(matrix, ord=1) * jnp.linalg.norm(base, ord=1)
        error = condition * float(jnp.finfo(matrix.dtype).eps)
        # Negated, so that an error of NaN, from an exactly singular M, is refused too.
        is_singular = ~(error < _LARGEST_INVERSE_ERROR)
        base = jnp.where(is_singular, jnp.nan, base)
    with jax.default_matmul_precision("highest"):
        # With p = |exponent| and B the matrix or its inverse: `B^(p-1)`, and `B^p`. The
        # derivative has the factor `M^(exponent-1)`, which is `B^(p+1)` or `B^(p-1)`.
        lower = jnp.linalg.matrix_power(base, abs(exponent) - 1)
        value = lower @ base
        return value, exponent * (value @ base if exponent < 0 else lower)


@jax.custom_jvp
def exponential(
    scale: Scalar, matrix: Inexact[Array, "s s"], shift: Scalar
) -> Inexact[Array, "s s"]:
    """`exp(scale * M - shift * I)`. It has a derivative in the scale, M times that."""
    return expm(scale * matrix - shift * jnp.eye(len(matrix), dtype=matrix.dtype))


@exponential.defjvp
def _exponential_rule(primals, tangents) -> Any:
    scale, matrix, shift = primals
    scale_tangent, *_ = tangents
    value = exponential(scale, matrix, shift)
    slope = jnp.matmul(matrix, value, precision="highest")
    return value, scale_tangent * slope


@jax.custom_jvp
def shifted_inverse(
    shift: Scalar, matrix: Inexact[Array, "s s"]
) -> Inexact[Array, "s s"]:
    """`(matrix + shift I)^(-1)`. It has a derivative in the shift, minus its square."""
    return power(matrix + shift * jnp.eye(len(matrix), dtype=matrix.dtype), -1)[0]


@shifted_inverse.defjvp
def _shifted_inverse_rule(primals, tangents) -> Any:
    shift, matrix = primals
    shift_tangent, _ = tangents
    value = shifted_inverse(shift, matrix)
    slope = -jnp.matmul(value, value, precision="highest")
    return value, shift_tangent * slope
