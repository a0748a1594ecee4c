"""All eigenvalues of Hermitian operators whose structure gives them.

Those of a Kronecker product are the products of those of the factors, those of a sum
their sums. A multiple of the operator multiplies them, and a multiple of the identity
that is added moves them. The factors are factorised; a matrix by itself is not, for that
is the exact answer for `k >= n`, which has a cost.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Real

from .._numerics.dense import eigh
from .structured import AbstractStructuredOperator, of_full_precision
from .tags import dtypes, is_hermitian


# Larger factors are not factorised: it would take a minute, and as much memory as a
# thousand vectors.
MAX_SIZE = 4096


class Spectrum(eqx.Module):
    """All n eigenvalues, in any order."""

    eigenvalues: Real[Array, " n"]


def spectrum_of(operator: lx.AbstractLinearOperator) -> Spectrum | None:
    """The eigenvalues of a structured Hermitian operator, or None."""
    eigenvalues = _eigenvalues(operator) if is_hermitian(operator) else None
    if eigenvalues is None:
        return None
    # Scalars may be of a wider dtype than the operator.
    return Spectrum(eigenvalues.astype(jnp.finfo(dtypes(operator)[0]).dtype))


def _eigenvalues(operator: lx.AbstractLinearOperator) -> Real[Array, " n"] | None:
    match operator:
        case AbstractStructuredOperator():
            return operator.eigenvalues(_of_part)
        case lx.TaggedLinearOperator():
            return _eigenvalues(operator.operator)
        case lx.NegLinearOperator():
            return _map(lambda x: -x, operator.operator)
        case lx.MulLinearOperator():
            return _map(lambda x: x * operator.scalar.real, operator.operator)
        case lx.DivLinearOperator():
            return _map(lambda x: x / operator.scalar.real, operator.operator)
        case lx.AddLinearOperator():
            for first, second in (
                (operator.operator1, operator.operator2),
                (operator.operator2, operator.operator1),
            ):
                if (shift := _multiple_of_identity(second)) is not None:
                    return _map(lambda x, shift=shift: x + shift.real, first)
    return None


def _map(fn, operator: lx.AbstractLinearOperator) -> Real[Array, " n"] | None:
    eigenvalues = _eigenvalues(operator)
    return None if eigenvalues is None else fn(eigenvalues)


def _multiple_of_identity(
    operator: lx.AbstractLinearOperator,
) -> Inexact[Array, ""] | float | None:
    """The number by which the operator multiplies all vectors, or None."""
    match operator:
        case lx.IdentityLinearOperator():
            return 1.0
        case lx.TaggedLinearOperator():
            return _multiple_of_identity(operator.operator)
        case lx.NegLinearOperator():
            factor, inner = -1.0, operator.operator
        case lx.MulLinearOperator():
            factor, inner = operator.scalar, operator.operator
        case lx.DivLinearOperator():
            factor, inner = 1 / operator.scalar, operator.operator
        case _:
            return None
    number = _multiple_of_identity(inner)
    return None if number is None else factor * number


def _of_part(operator: lx.AbstractLinearOperator) -> Real[Array, " m"] | None:
    """The eigenvalues of a part of a structured operator, which may be factorised."""
    if not is_hermitian(operator):
        return None
    if (eigenvalues := _eigenvalues(operator)) is not None:
        return eigenvalues
    if lx.is_diagonal(operator):
        return of_full_precision(lx.diagonal(operator).real)
    if operator.in_size() > MAX_SIZE:
        return None
    return _eigenvalues_of_matrix(of_full_precision(operator.as_matrix()))


@jax.custom_jvp
def _eigenvalues_of_matrix(matrix: Inexact[Array, "m m"]) -> Real[Array, " m"]:
    return eigh((matrix + matrix.conj().T) / 2)[0]


@_eigenvalues_of_matrix.defjvp
def _rule(primals, tangents):
    """`d lambda_i = u_i* dA u_i`, which needs no gaps in sums over all eigenvalues. Who
    takes such a sum refuses second derivatives."""
    matrix = jax.lax.stop_gradient(primals[0])
    _, vectors = eigh((matrix + matrix.conj().T) / 2)
    with jax.default_matmul_precision("highest"):
        change = jnp.sum(vectors.conj() * (tangents[0] @ vectors), axis=0)
    return _eigenvalues_of_matrix(*primals), change.real
