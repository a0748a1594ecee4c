"""Quantities of an operator that are estimated: its trace, its diagonal, its norms.

Estimators produce pairs of vectors (l_i, y_i) with E[sum_i y_i l_i*] = A, such as
(w, A w) for a random probe w. The estimate is a sum over pairs of what `read` returns:

    tr A        = E sum_i l_i* y_i           (`Trace`; for each leaf, `LeafTraces`)
    diag A      = E sum_i conj(l_i) y_i      (`Diagonal`, entry by entry)
    ||A||_F^2   = E ||A w||^2                (`FrobeniusNorm`)
    tr A_i* A_j = E (A_i w)* (A_j w)         (`FrobeniusProducts`)
    |e_i* A|^2  = E |(A w)_i|^2              (`RowNorms`)

In the code l is `left` and y is `image`. Only a quantity that is `linear` in the image
can be computed from pairs other than (w, A w).
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

from .chirp import rotate


class AbstractQuantity(eqx.Module):
    """A quantity of a matrix that is a sum of rank-one matrices `image left*`: `read`
    computes the contribution of one pair of vectors.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx
        import traceax.internal as txi

        class SumOfEntries(tx.AbstractQuantity):
            def read(self, left, image):
                return jnp.sum(image) * jnp.sum(left).conj()

        operator = tx.hessian(lambda v: jnp.sum(v) ** 2 / 2, jnp.zeros(100))
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(0)
        quantity = lambda structure: SumOfEntries()
        solution = txi.measure(quantity, operator, estimator, k=50, key=key)
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `linear`: whether the quantity is linear in the operator.
    - `diagonal_only`: whether it depends on the diagonal alone. Where lineax knows the
        diagonal, the quantity is then `read(ones, diagonal)`.
    - `rows_only`: whether it depends on the norms of the rows alone. Where the structure
        of the operator gives them, the quantity is then `read(ones, norms)`.
    - `entrywise`: whether it is `conj(left) * image`, entry by entry. Other quantities
        are quadratic forms of random vectors.
    """

    linear: ClassVar[bool] = True
    diagonal_only: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False
    entrywise: ClassVar[bool] = False

    @abc.abstractmethod
    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        """The contribution of one pair.

        **Arguments:**

        - `left`, `image`: flat vectors of shapes `(n,)` and `(m,)`; m is n but in norms.

        **Returns:**

        An array, of the same shape for every pair. If the quantity is linear, this is the
        quantity of the matrix `image left*`.
        """

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Real[Array, "..."] | None:
        """The size that rounding errors of `read` are relative to, of its shape: about
        the 2-norm of the terms that it sums. None if these cannot cancel."""
        return None

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Inexact[Array, "..."] | None:
        """Numbers of the shape and size of `read`, which show whether equal samples are
        equal by chance. If the operator is diagonal, they are the same for all vectors of
        signs; if not, they differ between almost any two."""
        return None

    def comparable(self, hermitian: bool) -> bool:
        """Whether samples spread about as much as `marks`, for an operator that is
        Hermitian or not."""
        return self.linear and hermitian

    def scalars(self, entries: Array) -> Array | None:
        """The q scalars of a result of `read` whose joint distribution is kept, shape
        `(q,)`, in the order of the leaves that users see. None for a single number, and
        for a quantity without scalars.

        **Arguments:**

        - `entries`: an array of the shape of `read`.
        """
        return None

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        """An estimate in the form that users see; by default by `arrange`.

        **Arguments:**

        - `value`, `std_err`: a sum of results of `read`, and its standard error, arrays
            of the same shape.

        **Returns:**

        The pair of value and standard error, two PyTrees of the same structure.
        """
        return self.arrange(value), self.arrange(std_err)

    def arrange(self, entries: Array) -> PyTree[Array]:
        """Convert an array of the shape of `read` to the structure that users see."""
        return entries

    def of_gram(self) -> "AbstractQuantity | None":
        """For a quadratic quantity, the same quantity as a function of `A A*`, in which
        it is linear; None for other quantities."""
        return None


class Trace(AbstractQuantity):
    """`tr A`, a scalar."""

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return jnp.vdot(left, image, precision="highest")

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, ""]:
        return _norm_bound(jnp.abs(left * image))

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        return self.read(rotate(left), image)


class _Structured(AbstractQuantity):
    """A quantity that is presented in the structure of the operator's vectors."""

    treedef: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, structure: PyTree[jax.ShapeDtypeStruct]) -> Any:
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


class LeafTraces(_Structured):
    """The trace of each diagonal block that belongs to a leaf: a scalar for each leaf."""

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        parts = zip(self._split(left), self._split(image), strict=True)
        return jnp.stack([jnp.vdot(x, y, precision="highest") for x, y in parts])

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, " p"]:
        return jnp.stack([_norm_bound(x) for x in self._split(jnp.abs(left * image))])

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, " p"]:
        return self.read(rotate(left), image)

    def scalars(self, entries: Array) -> Array:
        return entries

    def arrange(self, entries: Array) -> PyTree[Array]:
        return tree_unflatten(self.treedef, list(entries))


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
        # The bound of `_norm_bound`: sum x^2 <= (sum x) (max x), with x = |y_i| |y_j|.
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


def _norm_bound(sizes: Real[Array, " n"]) -> Real[Array, ""]:
    """An upper bound of the 2-norm, tight for vectors whose nonzero entries have one
    size: sum x^2 <= (sum x) (max x). Unlike a sum of squares, this does not overflow or
    underflow before the entries do."""
    return jnp.sqrt(jnp.sum(sizes)) * jnp.sqrt(jnp.max(sizes, initial=0))


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
