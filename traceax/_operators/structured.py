"""Operators with a structure that lineax has no class for. Their base class registers
them once for all functions of lineax."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Real

from .._core.arithmetic import standard_promotion


_PROPERTIES: dict[Any, Any] = {
    lx.symmetric_tag: lx.is_symmetric,
    lx.diagonal_tag: lx.is_diagonal,
    lx.tridiagonal_tag: lx.is_tridiagonal,
    lx.unit_diagonal_tag: lx.has_unit_diagonal,
    lx.lower_triangular_tag: lx.is_lower_triangular,
    lx.upper_triangular_tag: lx.is_upper_triangular,
    lx.positive_semidefinite_tag: lx.is_positive_semidefinite,
    lx.negative_semidefinite_tag: lx.is_negative_semidefinite,
}


class SignLog(NamedTuple):
    """`det A = sign * exp(log)`; for singular A sign 0 and log -inf."""

    sign: Inexact[Array, ""]
    log: Real[Array, ""]


class Rows(NamedTuple):
    """The sizes of the rows of an operator, in float32 at least.

    - `diagonal`: the diagonal; None for rectangular operators.
    - `others`: the norm of the other entries of each row; of all entries where `diagonal`
        is None.

    The diagonal is kept by itself because what is added to it may cancel. Norms are kept
    instead of squares, which over- or underflow.
    """

    diagonal: Inexact[Array, " m"] | None
    others: Real[Array, " m"]

    @property
    def norms(self) -> Real[Array, " m"]:
        """The norm of each row."""
        if self.diagonal is None:
            return self.others
        return hypot(jnp.abs(self.diagonal), self.others)


def norms_along_last(x: Inexact[Array, "*m n"]) -> Real[Array, "*m"]:
    """Euclidean norms, whose squares may be out of range."""
    sizes = jnp.abs(x)
    scale = scale_of(jnp.max(sizes, axis=-1, initial=0))
    return scale * root(jnp.sum((sizes / scale[..., None]) ** 2, axis=-1))


def hypot(x: Real[Array, "*m"], y: Real[Array, "*m"]) -> Real[Array, "*m"]:
    """`sqrt(x^2 + y^2)`. The derivative of `jnp.hypot` at 0 is NaN in some versions."""
    return norms_along_last(jnp.stack(jnp.broadcast_arrays(x, y), axis=-1))


def scale_of(largest: Real[Array, "*m"]) -> Real[Array, "*m"]:
    """Divisors of vectors with these largest entries; not 0."""
    largest = jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)
    return jax.lax.stop_gradient(largest)


def root(x: Real[Array, "*m"]) -> Real[Array, "*m"]:
    """The square root, whose derivative at 0 is taken as 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def of_full_precision(x: Inexact[Array, "*n"]) -> Inexact[Array, "*n"]:
    """In float32 at least."""
    with standard_promotion():
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class AbstractStructuredOperator(lx.AbstractLinearOperator):
    """An operator with exact rules, perhaps made of `parts`, other operators."""

    @property
    def parts(self) -> tuple[lx.AbstractLinearOperator, ...]:
        """The operators that this one is made of."""
        return ()

    @abc.abstractmethod
    def has(self, tag: object) -> bool:
        """Whether the operator has the property of this tag of lineax."""

    @abc.abstractmethod
    def conj(self) -> "AbstractStructuredOperator":
        """The complex conjugate."""

    @abc.abstractmethod
    def diagonal(self) -> Inexact[Array, " n"]:
        """The diagonal of a square operator, without a matvec."""

    def linearise(self) -> "AbstractStructuredOperator":
        """The operator with all done that does not depend on the vector."""
        return self

    def determinant(
        self, of: Callable[[lx.AbstractLinearOperator], SignLog | None]
    ) -> SignLog | None:
        """The determinant of a square operator, from those `of` its parts, if the
        structure gives it without a factorisation."""
        return None

    def eigenvalues(
        self, of: Callable[[lx.AbstractLinearOperator], Real[Array, " m"] | None]
    ) -> Real[Array, " n"] | None:
        """All eigenvalues of a Hermitian operator, in any order, from those `of` its
        parts, if the structure gives them."""
        return None

    def rows(self, of: Callable[[lx.AbstractLinearOperator], Rows | None]) -> Rows | None:
        """The rows, from those `of` its parts, if the structure gives them."""
        return None


def has_all(parts: tuple[lx.AbstractLinearOperator, ...], tag: object) -> bool:
    """Whether all these operators have the property of a tag of lineax."""
    return all(map(_PROPERTIES[tag], parts))


for _tag, _function in _PROPERTIES.items():
    _function.register(
        AbstractStructuredOperator, lambda operator, tag=_tag: operator.has(tag)
    )


@lx.linearise.register(AbstractStructuredOperator)
def _(operator):
    return operator.linearise()


@lx.materialise.register(AbstractStructuredOperator)
def _(operator):
    # As for diagonals of lineax: the structure is cheaper than the matrix.
    return operator.linearise()


@lx.conj.register(AbstractStructuredOperator)
def _(operator):
    return operator.conj()


@lx.diagonal.register(AbstractStructuredOperator)
def _(operator):
    return operator.diagonal()


@lx.tridiagonal.register(AbstractStructuredOperator)
def _(operator):
    matrix = operator.as_matrix()
    return tuple(jnp.diagonal(matrix, offset) for offset in (0, -1, 1))
