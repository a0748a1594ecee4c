"""Quantities of an operator that are estimated: its trace, its diagonal, the trace of
each leaf, ...

Estimators make pairs `(left, image)` of vectors for which, in the mean, the sum of
`image left*` is the operator A. A *quantity* is computed from them. One that is `linear`
in the image can be computed from any such pairs; a quadratic one, as
`||A||_F^2 = E ||A w||^2`, only from images `A w` of random probes.
"""

import abc
import itertools
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten
from jaxtyping import Array, Inexact, PyTree, Real


class AbstractQuantity(eqx.Module):
    """A quantity of a matrix that is a sum over rank-one matrices `image left*`: `read`
    computes the part of one pair of vectors.

    **Attributes:**

    - `linear`: whether it is linear in the operator.
    - `diagonal_only`: whether it depends on the diagonal alone. It is then computed from
        that where lineax knows it, as `read(ones, diagonal)`.
    - `entrywise`: whether it is `conj(left) * image`, entry by entry. Other quantities
        are quadratic forms of random vectors.
    """

    linear: ClassVar[bool] = True
    diagonal_only: ClassVar[bool] = False
    entrywise: ClassVar[bool] = False

    @abc.abstractmethod
    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        """The part of one pair.

        **Arguments:**

        - `left`, `image`: flat vectors of shape `(n,)`.

        **Returns:**

        An array, of the same shape for any pair: the quantity of the matrix
        `image left*`, if that is linear.
        """

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, "..."] | None:
        """The size that rounding errors of `read` are relative to, of the same shape, if
        it adds up terms that may cancel: about their 2-norm."""
        return None

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, "..."] | None:
        """Numbers of the shape and size of `read`, which are the same for all vectors of
        signs if the operator is diagonal, and if not, hardly for any two: they tell
        whether samples that are equal are so by chance."""
        return None

    def comparable(self, hermitian: bool) -> bool:
        """Whether samples of an operator, Hermitian or not, spread as `marks` do."""
        return self.linear and hermitian

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        """An estimate in the form that users see: by default both as `arrange` has them.

        **Arguments:**

        - `value`, `std_err`: a sum of what `read` gives, and its standard error, arrays
            of that shape.

        **Returns:**

        The pair of value and standard error, two PyTrees of the same structure.
        """
        return self.arrange(value), self.arrange(std_err)

    def arrange(self, entries: Array) -> PyTree[Array]:
        """An array of the shape that `read` has, in the structure that users see."""
        return entries

    def of_gram(self) -> "AbstractQuantity | None":
        """Of a quadratic quantity: what it is of `A A*`, in which it is linear."""
        return None


class Trace(AbstractQuantity):
    """`tr A`, a scalar."""

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return jnp.vdot(left, image, precision="highest")

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, ""]:
        return _norm(jnp.abs(left * image))

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        return self.read(_rotated(left), image)


class _Structured(AbstractQuantity):
    """A quantity whose PyTree is that of the operator's vectors."""

    treedef: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, structure: PyTree[jax.ShapeDtypeStruct]) -> "_Structured":
        shapes = tuple(leaf.shape for leaf in tree_leaves(structure))
        return cls(treedef=tree_structure(structure), shapes=shapes)

    def _split(self, vector: Array) -> list[Array]:
        sizes = [math.prod(shape) for shape in self.shapes]
        return jnp.split(vector, list(itertools.accumulate(sizes))[:-1])

    def arrange(self, entries: Array) -> PyTree[Array]:
        parts = zip(self._split(entries), self.shapes, strict=True)
        return tree_unflatten(self.treedef, [x.reshape(shape) for x, shape in parts])


class Diagonal(_Structured):
    """`diag A`, with the structure of a vector."""

    diagonal_only: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return left.conj() * image


class RowNorms(_Structured):
    """`|e_i* A|` for each row i, from squares, with the structure of a vector."""

    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return _noticed((image * image.conj()).real, image != 0)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, " n"]:
        return left.conj() * image * jnp.abs(image)

    def comparable(self, hermitian: bool) -> bool:
        return True

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return super().present(*_root(value, std_err))

    def of_gram(self) -> AbstractQuantity:
        return _RootsOfDiagonal(treedef=self.treedef, shapes=self.shapes)


class _RootsOfDiagonal(Diagonal):
    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return super().present(*_root(value.real, std_err))


class LeafTraces(_Structured):
    """The trace of each diagonal block that belongs to a leaf: a scalar for each leaf."""

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        parts = zip(self._split(left), self._split(image), strict=True)
        return jnp.stack([jnp.vdot(x, y, precision="highest") for x, y in parts])

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, " p"]:
        return jnp.stack([_norm(x) for x in self._split(jnp.abs(left * image))])

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, " p"]:
        return self.read(_rotated(left), image)

    def arrange(self, entries: Array) -> PyTree[Array]:
        return tree_unflatten(self.treedef, list(entries))


class FrobeniusNorm(AbstractQuantity):
    """`||A||_F`, a real scalar, from its square."""

    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        square = jnp.vdot(image, image, precision="highest").real
        return _noticed(square, jnp.any(image != 0))

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, ""]:
        return jnp.abs(Trace().marks(left, image)) ** 2

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value, std_err)

    def of_gram(self) -> AbstractQuantity:
        return _RootOfTrace()


class _RootOfTrace(Trace):
    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value.real, std_err)


class FrobeniusProducts(AbstractQuantity):
    """`tr(A_i* A_j)` for all pairs of operators of which A is a stack: a Hermitian array,
    of shape `(p, p)`."""

    count: int = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        images = image.reshape(self.count, -1)
        gram = jnp.matmul(images.conj(), images.T, precision="highest")
        return (gram + gram.conj().T) / 2

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Real[Array, "p p"]:
        sizes = jnp.abs(image)
        largest = jnp.sqrt(jnp.max(sizes.reshape(self.count, -1), axis=1))
        size = jnp.sqrt(self.read(left, sizes)) * largest[:, None] * largest
        limits = jnp.finfo(size.dtype)
        # Terms that underflow are lost, each of them below the smallest normal number.
        lost = image.size * limits.tiny / limits.eps
        return jnp.where(largest[:, None] * largest > 0, jnp.maximum(size, lost), 0)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Inexact[Array, "p p"]:
        images = image.reshape(self.count, -1)
        marks = jax.vmap(Trace().marks, in_axes=(None, 0))(left, images)
        return marks.conj()[:, None] * marks


class SchattenNorm(AbstractQuantity):
    """`(tr |A|^p)^(1/p)`, from pairs for `|A|^p`."""

    power: float = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return jnp.vdot(left, image, precision="highest").real

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return _root(value, std_err, self.power)

    def downward(self, value: Array, std_err: Array) -> Array:
        """The error of `value` whose root, by `present`, is what one standard error takes
        from the norm. Below 1 the root is convex: it is much less than the same adds."""
        if self.power >= 1:
            return std_err
        positive = ~(value <= 0)
        share = jnp.minimum(std_err / jnp.where(positive, value, 1), 1)
        taken = -jnp.expm1(jnp.log1p(-share) / self.power)
        error = value / 2 * jnp.expm1(self.power * jnp.log1p(2 * taken))
        return jnp.where(positive, jnp.minimum(error, std_err), 0)


class Shifted(AbstractQuantity):
    """A quantity plus an `offset` that is known exactly."""

    quantity: AbstractQuantity
    offset: Array

    @property
    def diagonal_only(self) -> bool:  # pyright: ignore
        return self.quantity.diagonal_only

    @property
    def entrywise(self) -> bool:  # pyright: ignore
        return self.quantity.entrywise

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return self.quantity.read(left, image)

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return self.quantity.present(value + self.offset, std_err)


def _norm(sizes: Real[Array, " n"]) -> Real[Array, ""]:
    """An upper bound of the 2-norm, tight for vectors with entries of one size. Unlike a
    sum of squares it does not overflow or underflow before the entries do."""
    return jnp.sqrt(jnp.sum(sizes)) * jnp.sqrt(jnp.max(sizes, initial=0))


def _rotated(vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
    """A vector whose entry i is turned by i^2 golden sections of a circle, so that few
    angles are near each other."""
    index = jax.lax.iota(jnp.uint32, vector.size)
    turns = index * index * jnp.uint32(0x9E3779B9)
    angle = turns.astype(vector.real.dtype) * (2 * math.pi / 2**32)
    return vector * jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def _noticed(square: Array, nonzero: Array) -> Array:
    """A square, raised to the smallest normal number where it underflows without being
    zero."""
    smallest = jnp.finfo(square.dtype).tiny
    lost = nonzero & (square < smallest)
    return square + jax.lax.stop_gradient(jnp.where(lost, smallest, 0))


def _root(value: Array, std_err: Array, power: float = 2) -> tuple[Array, Array]:
    """The root of a power and its error: for powers of 1 or more that of the power times
    the derivative of the root, and at most the root of the error. For smaller ones it is
    half of what two standard errors of the power add, as the root is convex then: where
    the samples happen to be small, its derivative at their mean is by far too small. The
    root is infinite where underflow has left no correct digit."""
    limits = jnp.finfo(value.dtype)
    largest = jnp.max(value)
    lost = (largest > 0) & (largest < limits.tiny / limits.eps)
    positive = ~(value <= 0)
    safe = jnp.where(positive, value, 1)
    root = jnp.sqrt(safe) if power == 2 else safe ** (1 / power)
    if power < 1:
        end = (jnp.where(positive, value, 0) + 2 * std_err) ** (1 / power)
        std_err = (end - jnp.where(positive, root, 0)) / 2
    else:
        most, slope = std_err ** (1 / power), std_err / safe * root / power
        std_err = jnp.where(positive & (slope < most), slope, most)
    return jnp.where(lost, jnp.inf, jnp.where(positive, root, 0)), std_err
