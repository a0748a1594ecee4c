"""Log-determinants of operators whose structure gives them without a matvec.

    diagonal, triangular    det A = prod_i a_ii
    products, multiples     det(A B) = det A det B,  det(c A) = c^n det A
    tridiagonal             f_i = a_ii f_(i-1) - a_(i,i-1) a_(i-1,i) f_(i-2),  det A = f_n

The last line is the recurrence of the leading principal minors f_i (the continuant), with
f_0 = 1 and f_(-1) = 0. In `_continuant` f_i is `following`, f_(i-1) `current` and f_(i-2)
`previous`. All are kept as a sign (or a phase) and a logarithm of the modulus.
"""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from .diagonal import diagonal_cost
from .structured import AbstractStructuredOperator, SignLog
from .tags import dtypes


def structured_log_det(operator: lx.AbstractLinearOperator) -> SignLog | None:
    """The determinant of diagonal, triangular, tridiagonal and identity operators, of
    their multiples and products, without a matvec; None for any other operator, such as
    a product of rectangular ones."""
    if operator.in_size() != operator.out_size():
        return None
    match operator:
        case AbstractStructuredOperator():
            return operator.determinant(structured_log_det)
        case lx.TaggedLinearOperator() if inner := structured_log_det(operator.operator):
            return inner
        case lx.ComposedLinearOperator():
            first = structured_log_det(operator.operator1)
            second = structured_log_det(operator.operator2)
            if first is None or second is None:
                return None
            return SignLog(first.sign * second.sign, first.log + second.log)
        case lx.NegLinearOperator():
            return _multiple(operator, factor=-1.0, power=1)
        case lx.MulLinearOperator():
            return _multiple(operator, factor=operator.scalar, power=1)
        case lx.DivLinearOperator():
            return _multiple(operator, factor=operator.scalar, power=-1)
    # `lx.diagonal` would apply a tagged function to vectors.
    if diagonal_cost(operator) > 0:
        return None
    dtype, _ = dtypes(operator)
    triangular = lx.is_lower_triangular(operator) or lx.is_upper_triangular(operator)
    if triangular or lx.is_diagonal(operator):
        return _product_of_entries(lx.diagonal(operator).astype(dtype))
    if lx.is_tridiagonal(operator):
        diagonal, lower, upper = lx.tridiagonal(operator)
        return _continuant(
            diagonal=diagonal.astype(dtype),
            lower=lower.astype(dtype),
            upper=upper.astype(dtype),
        )
    return None


def _multiple(
    operator: lx.NegLinearOperator | lx.MulLinearOperator | lx.DivLinearOperator,
    factor: Any,
    power: int,
) -> SignLog | None:
    """`det(c A) = c^n det A` for `operator = c A`, `c = factor ** power`."""
    inner = structured_log_det(operator.operator)
    if inner is None:
        return None
    n = operator.in_size()
    factor = jnp.asarray(factor, inner.sign.dtype)
    sign, log = _sign(factor), n * power * jnp.log(jnp.abs(factor))
    return SignLog(inner.sign * sign ** (n * power), inner.log + log)


def _product_of_entries(entries: Inexact[Array, " n"]) -> SignLog:
    return SignLog(jnp.prod(_sign(entries)), jnp.sum(jnp.log(jnp.abs(entries))))


def _sign(x: Array) -> Array:
    """`x / |x|`, and 0 for x = 0."""
    return jnp.where(x == 0, 0, x / jnp.where(x == 0, 1, jnp.abs(x)))


def _continuant(
    diagonal: Inexact[Array, " n"],
    lower: Inexact[Array, " n-1"],
    upper: Inexact[Array, " n-1"],
) -> SignLog:
    """The determinant of a tridiagonal matrix, by the recurrence of its leading minors.
    It is backward stable, entry by entry, and divides by no minor, so that it needs no
    pivoting where one is zero."""

    def step(state, entries):
        current, previous, log = state
        d, product = entries
        following = d * current - product * previous
        # Minors grow or fall exponentially. The recurrence is linear in the pair, which
        # is scaled in each step. The result does not depend on the scale, so neither does
        # its derivative.
        size = jax.lax.stop_gradient(jnp.maximum(jnp.abs(following), jnp.abs(current)))
        size = jnp.where(size > 0, size, 1)
        return (following / size, current / size, log + jnp.log(size)), None

    # Rows are scaled to a largest entry of 1 first, so that products of entries do not
    # overflow or underflow.
    zero = jnp.zeros_like(diagonal[:1])
    lower, upper = jnp.append(zero, lower), jnp.append(upper, zero)
    rows = jnp.maximum(jnp.abs(diagonal), jnp.maximum(jnp.abs(lower), jnp.abs(upper)))
    rows = jax.lax.stop_gradient(jnp.where(rows > 0, rows, 1))
    diagonal, lower, upper = diagonal / rows, lower / rows, upper / rows
    start = (diagonal[0], jnp.ones_like(diagonal[0]), jnp.zeros_like(rows[0]))
    entries = (diagonal[1:], lower[1:] * upper[:-1])
    (last, _, log), _ = jax.lax.scan(step, start, entries)
    return SignLog(_sign(last), log + jnp.log(jnp.abs(last)) + jnp.sum(jnp.log(rows)))
