"""Quantities of an operator that are estimated: its trace, its diagonal.

Estimators produce pairs of vectors (l_i, y_i) with E[sum_i y_i l_i*] = A, such as
(w, A w) for a random probe w. The estimate is a sum over pairs of what `read` returns:

    tr A        = E sum_i l_i* y_i           (`Trace`; for each leaf, `LeafTraces`)
    diag A      = E sum_i conj(l_i) y_i      (`Diagonal`, entry by entry)

In the code l is `left` and y is `image`. Only a quantity that is `linear` in the image
can be computed from pairs other than (w, A w). Norms, which are not, are in `norms.py`;
several quantities from the same pairs in `joint.py`.
"""

import abc
import dataclasses
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

        class SumOfEntries(tx.AbstractQuantity):
            def read(self, left, image):
                return jnp.sum(image) * jnp.sum(left).conj()

        operator = tx.hessian(lambda v: jnp.sum(v) ** 2 / 2, jnp.zeros(100))
        solution = tx.estimate(operator, SumOfEntries(), k=50, key=jax.random.key(0))
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
    - `joined`: whether it is several quantities, whose entries are joined to one array.
    """

    linear: ClassVar[bool] = True
    diagonal_only: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False
    entrywise: ClassVar[bool] = False
    joined: ClassVar[bool] = False

    @property
    def parts(self) -> "tuple[AbstractQuantity, ...]":
        """The quantities that it consists of; of a single one, itself."""
        return (self,)

    def for_structure(
        self, structure: PyTree[jax.ShapeDtypeStruct]
    ) -> "AbstractQuantity":
        """The quantity of an operator whose images have this structure; by default
        itself. A call uses the result in its place.

        **Arguments:**

        - `structure`: a PyTree of `jax.ShapeDtypeStruct`.
        """
        return self

    def open(self) -> "AbstractQuantity":
        """The quantity inside of a compiled program, before any pair is read; by default
        itself. What `read` needs and no pair changes can be computed here."""
        return self

    @abc.abstractmethod
    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        """The contribution of one pair.

        **Arguments:**

        - `left`, `image`: flat vectors of shapes `(n,)` and `(m,)`; m is n but in norms.

        **Returns:**

        An array, of the same shape for every pair. If the quantity is linear, this is the
        quantity of the matrix `image left*`.
        """

    def split(self, entries: Array) -> list[Array]:
        """An array of the shape of `read`, as one array for each of `parts`."""
        return [entries]

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Real[Array, "..."] | None:
        """The size that rounding errors of `read` are relative to, of its shape: about
        the 2-norm of the terms that it sums. None if these cannot cancel."""
        return None

    def magnitude(self, images: Inexact[Array, "p m"]) -> Real[Array, ""]:
        """The size that rounding errors of the quantity are relative to, if the rows of
        `images` have the norms of the rows of the operator's transpose. By default that
        of a quantity whose `size` is about `|left| |image|`."""
        # One number for all entries: a basis is accurate to the roundoff of its columns,
        # whatever the size of an entry.
        squares = jnp.abs(jax.vmap(self.read)(images, images))
        return jnp.sqrt(jnp.max(sum_rows(squares)))

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
        `(q,)`: the leaves that users see as numbers, in their order. None for a quantity
        that is a single number, and for one without any.

        **Arguments:**

        - `entries`: an array of the shape of `read`.
        """
        if entries.ndim == 0 or not self.linear:
            return None
        numbers = [x for x in tree_leaves(self.arrange(entries)) if x.ndim == 0]
        return jnp.stack(numbers) if numbers else None

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
    """The trace of an operator, a scalar, for [`traceax.estimate`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0]))
        print(tx.estimate(operator, tx.Trace(), k=3).value)  # 6.0
        ```
    """

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return _inner_product(left, image)

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, ""]:
        return norm_bound(jnp.abs(left * image))

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        return self.read(rotate(left), image)


class StructuredQuantity(AbstractQuantity):
    """A quantity that is presented in the structure of the operator's vectors, which
    calls find out by `for_structure`."""

    treedef: Any = eqx.field(static=True, default=None, kw_only=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True, default=(), kw_only=True)

    def for_structure(self, structure: PyTree[jax.ShapeDtypeStruct]) -> Any:
        shapes = tuple(leaf.shape for leaf in tree_leaves(structure))
        changes = {"treedef": tree_structure(structure), "shapes": shapes}
        return dataclasses.replace(self, **changes)

    def _split(self, vector: Array) -> list[Array]:
        sizes = [math.prod(shape) for shape in self.shapes]
        return jnp.split(vector, list(itertools.accumulate(sizes))[:-1])

    def arrange(self, entries: Array) -> PyTree[Array]:
        parts = zip(self._split(entries), self.shapes, strict=True)
        return tree_unflatten(self.treedef, [x.reshape(shape) for x, shape in parts])


class Diagonal(StructuredQuantity):
    """The diagonal of an operator, in the structure of its vectors, for
    [`traceax.estimate`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0]))
        print(tx.estimate(operator, tx.Diagonal(), k=3).value)  # [1. 2. 3.]
        ```
    """

    diagonal_only: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return left.conj() * image


class LeafTraces(StructuredQuantity):
    """The trace of each diagonal block that belongs to a leaf of the operator's vectors,
    a scalar for each leaf, for [`traceax.estimate`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator({"a": jnp.ones(3), "b": jnp.ones(2)})
        print(tx.estimate(operator, tx.LeafTraces(), k=5).value["b"])  # 2.0
        ```
    """

    diagonal_only: ClassVar[bool] = True

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        parts = zip(self._split(left), self._split(image), strict=True)
        return jnp.stack([_inner_product(x, y) for x, y in parts])

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, " p"]:
        return jnp.stack([norm_bound(x) for x in self._split(jnp.abs(left * image))])

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, " p"]:
        return self.read(rotate(left), image)

    def arrange(self, entries: Array) -> PyTree[Array]:
        return tree_unflatten(self.treedef, list(entries))


for _class in (Diagonal, LeafTraces):
    _class.__init__.__doc__ = """**Arguments:** none. Calls fill in `treedef` and
    `shapes`, the structure of the operator's vectors."""


def _inner_product(
    left: Inexact[Array, " n"], image: Inexact[Array, " n"]
) -> Inexact[Array, ""]:
    """left* image. The condition is always true, unless the result is NaN: a sum with a
    condition is not fused with the product of a dense matrix that makes the image. XLA on
    CPU in JAX 0.10 fuses `jnp.vdot` with it, in a kernel that takes three times as long
    as the product (100 vectors, n = 4096 or 8000)."""
    return jnp.sum(jnp.where(left == left, left.conj() * image, jnp.nan))


def sum_rows(rows: Inexact[Array, "m ..."]) -> Inexact[Array, "..."]:
    """The sum of the rows. For long rows a reduction takes forty times as long on CPU as
    this matrix product."""
    return jnp.tensordot(jnp.ones(len(rows), rows.dtype), rows, 1, precision="highest")


def norm_bound(sizes: Real[Array, " n"]) -> Real[Array, ""]:
    """An upper bound of the 2-norm, tight for vectors whose nonzero entries have one
    size: sum x^2 <= (sum x) (max x). Unlike a sum of squares, this does not overflow or
    underflow before the entries do."""
    return jnp.sqrt(jnp.sum(sizes)) * jnp.sqrt(jnp.max(sizes, initial=0))
