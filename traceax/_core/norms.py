"""Norms of an operator, from the powers of them that estimators read:

    ||A||_F^2   = E ||A w||^2                (`FrobeniusNorm`)
    tr A_i* A_j = E (A_i w)* (A_j w)         (`FrobeniusProducts`)
    |e_i* A|^2  = E |(A w)_i|^2              (`RowNorms`)

for random probes w, and `tr |A|^p` (`SchattenNorm`). See `quantity.py`.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree, Real

from .quantity import AbstractQuantity, Diagonal, StructuredQuantity, Trace


class RowNorms(StructuredQuantity):
    """`|e_i* A|` for each row i, from its square, with the structure of an image."""

    linear: ClassVar[bool] = False
    rows_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        return keep_nonzero((image * image.conj()).real, image != 0)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Inexact[Array, " m"]:
        return _repeat(left, image).conj() * image * jnp.abs(image)

    def comparable(self, hermitian: bool) -> bool:
        return True

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        root, root_err = _root(value, std_err)
        return super().present(root, root_err)

    def of_gram(self) -> AbstractQuantity:
        return _RootsOfDiagonal(treedef=self.treedef, shapes=self.shapes)


class _RootsOfDiagonal(Diagonal):
    """Row norms of A as roots of the diagonal of `A A*`."""

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        root, root_err = _root(value.real, std_err)
        return super().present(root, root_err)


class FrobeniusNorm(AbstractQuantity):
    """`||A||_F`, a real scalar, from its square."""

    linear: ClassVar[bool] = False
    rows_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        square = jnp.vdot(image, image, precision="highest").real
        return keep_nonzero(square, jnp.any(image != 0))

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Real[Array, ""]:
        # The terms of the trace, conj(w_i) (A w)_i, are the same for all signs exactly if
        # the operator is diagonal.
        return jnp.abs(Trace().marks(_repeat(left, image), image)) ** 2

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value, std_err)

    def of_gram(self) -> AbstractQuantity:
        return _RootOfTrace()


class _RootOfTrace(Trace):
    """The Frobenius norm of A as the root of the trace of `A A*`."""

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value.real, std_err)


class FrobeniusProducts(AbstractQuantity):
    """`tr(A_i* A_j)` for all pairs of the p operators that are stacked in A: a Hermitian
    array of shape `(p, p)`."""

    count: int = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        images = image.reshape(self.count, -1)
        gram = jnp.matmul(images.conj(), images.T, precision="highest")
        # The product of two matrices is Hermitian up to rounding only.
        return (gram + gram.conj().T) / 2

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Real[Array, "p p"]:
        sizes = jnp.abs(image)
        # The bound of `norm_bound`: sum x^2 <= (sum x) (max x), with x = |y_i| |y_j|.
        largest = jnp.sqrt(jnp.max(sizes.reshape(self.count, -1), axis=1))
        size = jnp.sqrt(self.read(left, sizes)) * largest[:, None] * largest
        limits = jnp.finfo(size.dtype)
        # Each term may underflow, and lose up to the smallest normal number. Divided by
        # eps, since the caller multiplies sizes by it.
        lost = image.size * limits.tiny / limits.eps
        return jnp.where(largest[:, None] * largest > 0, jnp.maximum(size, lost), 0)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Inexact[Array, "p p"]:
        images = image.reshape(self.count, -1)
        marks = jax.vmap(Trace().marks, in_axes=(None, 0))(left, images)
        return marks.conj()[:, None] * marks


class SchattenNorm(AbstractQuantity):
    """`(tr |A|^p)^(1/p)`, from pairs whose matrices sum to `|A|^p`; p is `power`."""

    power: float = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return jnp.vdot(left, image, precision="highest").real

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value, std_err, self.power)

    def downward(self, value: Array, std_err: Array) -> Array:
        """The standard error of `value` for the lower end of an interval. For powers
        below 1 the root is convex: one standard error of `value` lowers the norm by much
        less than it raises it. The result is the error e with which `present` reports
        that smaller decrease."""
        if self.power >= 1:
            return std_err
        # For v = `value`, s = `std_err` and the power p, the norm falls by the share
        #     d = 1 - (1 - s / v)^(1/p).
        # `_root` reports an error e as ((v + 2 e)^(1/p) - v^(1/p)) / 2. This is d v^(1/p)
        # for e = v ((1 + 2 d)^p - 1) / 2.
        positive = ~(value <= 0)  # NaN stays NaN
        relative = jnp.minimum(std_err / jnp.where(positive, value, 1), 1)
        decrease = -jnp.expm1(jnp.log1p(-relative) / self.power)
        error = value / 2 * jnp.expm1(self.power * jnp.log1p(2 * decrease))
        return jnp.where(positive, jnp.minimum(error, std_err), 0)


def _repeat(left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
    """The vector, repeated or cut off to the length of its image."""
    return left if left.shape == image.shape else jnp.resize(left, image.shape)


def keep_nonzero(square: Array, nonzero: Array) -> Array:
    """Raise the square of a nonzero number that underflows to the smallest normal number.
    As 0 it would pass for the exact answer, with a zero error bar."""
    smallest = jnp.finfo(square.dtype).tiny
    lost = nonzero & (square < smallest)
    return square + jax.lax.stop_gradient(jnp.where(lost, smallest, 0))


def _root(value: Array, std_err: Array, power: float = 2) -> tuple[Array, Array]:
    """The root v^(1/p) of an estimate v of a power p, and its standard error. The root is
    infinite where underflow has left no correct digit.

    For p >= 1 the error is e v^(1/p) / (p v), by the derivative of the root, and e^(1/p)
    at most. For p < 1 the root is convex, and where the samples happen to be small, its
    derivative at their mean is far too small. The error is then half the increase of the
    root when v rises by two standard errors.
    """
    # Below tiny / eps, a sum may consist of terms that have all underflowed.
    limits, largest = jnp.finfo(value.dtype), jnp.max(value)
    lost = (largest > 0) & (largest < limits.tiny / limits.eps)
    positive = ~(value <= 0)
    safe = jnp.where(positive, value, 1)
    root = jnp.sqrt(safe) if power == 2 else safe ** (1 / power)
    if power < 1:
        end = (jnp.where(positive, value, 0) + 2 * std_err) ** (1 / power)
        std_err = (end - jnp.where(positive, root, 0)) / 2
    else:
        upper, first_order = std_err ** (1 / power), std_err / safe * root / power
        std_err = jnp.where(positive & (first_order < upper), first_order, upper)
    return jnp.where(lost, jnp.inf, jnp.where(positive, root, 0)), std_err
