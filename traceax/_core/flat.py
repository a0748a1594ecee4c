"""Linear operators as maps of flat vectors, and PyTrees as flat vectors."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten
from jaxtyping import Array, DTypeLike, Inexact, PyTree


@contextlib.contextmanager
def needing_adjoint() -> Iterator[None]:
    """For what transposes a product, with an error that says why, and what to do where
    JAX cannot."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise NotImplementedError(
            "This call makes products with the adjoint of `operator`, and JAX cannot "
            "transpose its product. No adjoint is needed of an operator that is tagged "
            "as symmetric (`lineax.symmetric_tag`, `traceax.hermitian_tag`), if that is "
            "true; nor, for traces, diagonals, Frobenius and row norms, by "
            "`traceax.HutchinsonEstimator()`. Elsewhere give the product a transpose by "
            "`jax.custom_derivatives.linear_call`, and pass "
            "`execution=traceax.Local(block_size=1)`. JAX says: "
            f"{type(error).__name__}: {error}"
        ) from error


class FlatOperator(eqx.Module):
    """A linear operator seen as a map of flat vectors of one dtype; square, unless the
    caller says otherwise.

    The product is traced once, when the object is made (after `lineax.linearise`, so
    that what does not depend on the vector is computed once). Arrays that the operator
    closes over are leaves here, so that derivatives with respect to them are seen.

    - `size`: n, the length of the vectors that it is applied to.
    - `dtype`: of the vectors in and out: the operator's, but at least float32.
    - `precision`: the coarsest dtype that a product passes through.
    - `hermitian`: whether it is known to be.
    - `sign`: 1 if it is known to be positive semidefinite, -1 if negative semidefinite,
        else 0.

    Vectors in have the shape `(n,)`, vectors out `(m,)`, with m = n for a square one.
    """

    fn: Callable[[Array], Array]
    size: int = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    precision: jnp.dtype = eqx.field(static=True)
    hermitian: bool = eqx.field(static=True, default=False)
    sign: int = eqx.field(static=True, default=0)

    @property
    def eps(self) -> float:
        """Machine epsilon of the products."""
        return float(jnp.finfo(self.precision).eps)

    @property
    def rounding(self) -> float:
        """Relative size of rounding errors in an estimate: those of n-term sums in the
        working dtype, and those of single products in the operator's."""
        return 2 * self.eps + float(jnp.finfo(self.dtype).eps) * self.size**0.5

    @property
    def frozen(self) -> "FlatOperator":
        """The same operator, constant to all derivatives."""
        return freeze(self)

    @property
    def narrow(self) -> bool:
        """Whether products pass through a dtype of a smaller range than that of the
        vectors: float16."""
        return jnp.finfo(self.precision).maxexp < jnp.finfo(self.dtype).maxexp

    @property
    def negated(self) -> "FlatOperator":
        """-A."""
        return dataclasses.replace(self, fn=_Negated(self.fn), sign=-self.sign)

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        """A v for a flat vector v, of shape `(n,)`."""
        return self._scaled(self.fn, vector)

    def adjoint_mv(self, vector: Inexact[Array, " m"]) -> Inexact[Array, " n"]:
        """A* v for a flat vector v, of shape `(m,)`; m is n for a square operator.

        **Raises:**

        `NotImplementedError` if JAX cannot transpose the product of an operator that is
        not known to be Hermitian."""
        if self.hermitian:
            return self.mv(vector)
        like = jax.ShapeDtypeStruct((self.size,), self.dtype)

        def transposed(vector):
            with needing_adjoint():
                (product,) = jax.linear_transpose(self.fn, like)(vector)
            return product

        return self._scaled(transposed, vector.conj()).conj()

    def _scaled(self, fn: Callable[[Array], Array], vector: Array) -> Array:
        """`fn(vector)`; if the range is narrow, of a vector whose largest entry is from
        `n^(-1/4)` to 1: the product of a unit vector, with entries of `n^(-1/2)`, might
        underflow, and that of a larger one overflow."""
        if not self.narrow:
            return fn(vector)
        least = 2.0 ** -round(math.log2(vector.size) / 4)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vector)))
        small = (largest > 0) & (largest < least)
        size = jnp.where(small, largest / least, jnp.maximum(largest, 1))
        size = size.astype(vector.dtype)
        return size * fn(vector / size)


class _Negated(eqx.Module):
    fn: Callable[[Array], Array]

    def __call__(self, vector: Array) -> Array:
        return -self.fn(vector)


def freeze(tree: PyTree) -> PyTree:
    """The same PyTree, constant to all derivatives; its leaves may be anything."""
    arrays, static = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), static)


def to_flat(tree: PyTree, dtype: DTypeLike) -> Inexact[Array, " n"]:
    """The leaves joined one after another."""
    parts = [leaf.reshape(-1).astype(dtype) for leaf in tree_leaves(tree)]
    return jnp.concatenate(parts)


def from_flat(vector: Inexact[Array, " n"], structure: PyTree) -> PyTree:
    """The inverse of `to_flat`, for a PyTree of `jax.ShapeDtypeStruct`."""
    leaves = tree_leaves(structure)
    splits = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    pieces = [
        piece.reshape(leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(jnp.split(vector, splits), leaves, strict=True)
    ]
    return tree_unflatten(tree_structure(structure), pieces)
