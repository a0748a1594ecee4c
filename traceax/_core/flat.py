"""Linear operators as maps of flat vectors, and conversions between PyTrees and flat
vectors."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten
from jaxtyping import Array, Bool, DTypeLike, Inexact, PyTree

from .arithmetic import complex_dtype
from .results import failure, RESULTS


@contextlib.contextmanager
def explain_missing_adjoint() -> Iterator[None]:
    """A context for code that transposes an operator. Where JAX cannot do so, the error
    says why the call needs an adjoint, and which alternatives there are."""
    try:
        yield
    # The types that transposition raises in jax 0.10 to 0.12, depending on the primitive.
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise NotImplementedError(
            "This call needs matrix-vector products with the adjoint of `operator`, and "
            "JAX cannot transpose its product. If `operator` is symmetric or Hermitian, "
            "tag it so (`lineax.symmetric_tag`, `traceax.hermitian_tag`): then it needs "
            "no adjoint. `traceax.HutchinsonEstimator()` needs none for traces, "
            "diagonals, Frobenius norms and row norms. Otherwise pass an operator with "
            "an adjoint, such as a `scipy.sparse.linalg.LinearOperator` with `rmatvec`, "
            "whose products are made on the host. The cause: "
            f"{type(error).__name__}: {error}"
        ) from error


class FlatOperator(eqx.Module):
    """A linear operator as a map of flat vectors of one dtype, from `(n,)` to `(m,)`.
    Operators are square, m = n, except where a call allows rectangular ones.

    The matrix-vector product is traced once, when the object is constructed, after
    `lineax.linearise`: the parts that do not depend on the vector are computed once.
    Arrays that the operator closes over are leaves of this object, so that derivatives
    with respect to them are seen.

    - `fn`: the matrix-vector product, a function of one flat vector.
    - `size`: n, the length of the vectors that the operator is applied to.
    - `dtype`: of the vectors in and out: the operator's, but at least float32.
    - `precision`: the coarsest dtype that a matvec passes through.
    - `hermitian`: whether the operator is known to be Hermitian.
    - `sign`: 1 if it is known to be positive semidefinite, -1 if negative semidefinite,
        else 0.
    - `sign_holds`: whether the traced arrays that `sign` was derived from have the signs
        that were assumed; None where nothing was assumed. Whoever relies on the sign
        reports `sign_failure`.
    - `error`: the relative error of a matvec that is an approximation, such as a
        difference of gradients; 0 for others.
    """

    fn: Callable[[Array], Array]
    size: int = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    precision: jnp.dtype = eqx.field(static=True)
    hermitian: bool = eqx.field(static=True, default=False)
    sign: int = eqx.field(static=True, default=0)
    sign_holds: Bool[Array, ""] | None = None
    error: float = eqx.field(static=True, default=0.0)

    @property
    def sign_failure(self) -> Any:
        """`RESULTS.assumed_sign` if the sign was assumed and is wrong. None if it was not
        assumed."""
        if self.sign_holds is None:
            return None
        return failure(~self.sign_holds, RESULTS.assumed_sign)

    @property
    def num_rows(self) -> int:
        """m, the length of the images; n for a square operator."""
        vector = jax.ShapeDtypeStruct((self.size,), self.dtype)
        return eqx.filter_eval_shape(self.fn, vector).size

    @property
    def eps(self) -> float:
        """Relative error of the matvecs: machine epsilon, or more for approximations."""
        return max(float(jnp.finfo(self.precision).eps), self.error)

    @property
    def rounding(self) -> float:
        """Relative size of rounding errors in an estimate, an allowance by dtypes: those
        of n-term sums in the working dtype, and those of matvecs in the operator's."""
        # Rounding errors of n terms add up like a random walk, as sqrt(n). The image and
        # the vector that it is multiplied with are each rounded to `precision`: 2 eps.
        return 2 * self.eps + float(jnp.finfo(self.dtype).eps) * self.size**0.5

    @property
    def frozen(self) -> "FlatOperator":
        """The same operator, constant to all derivatives."""
        return freeze(self)

    @property
    def narrow(self) -> bool:
        """Whether matvecs pass through a dtype of a smaller range than the dtype of the
        vectors, as they do for an operator in float16."""
        return jnp.finfo(self.precision).maxexp < jnp.finfo(self.dtype).maxexp

    @property
    def negated(self) -> "FlatOperator":
        """-A."""
        return dataclasses.replace(self, fn=_Negated(self.fn), sign=-self.sign)

    @property
    def complexified(self) -> "FlatOperator":
        """The operator on complex vectors. For a real one a matvec takes two."""
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return self
        dtype, precision = map(complex_dtype, (self.dtype, self.precision))
        fn = _Complexified(self)
        return dataclasses.replace(self, fn=fn, dtype=dtype, precision=precision)

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        """A v for a flat vector v, of shape `(n,)`."""
        return self._apply_in_range(self.fn, vector)

    def adjoint_mv(self, vector: Inexact[Array, " m"]) -> Inexact[Array, " n"]:
        """A* v for a flat vector v, of shape `(m,)`; m is n for a square operator.

        **Raises:**

        `NotImplementedError` if the operator is not known to be Hermitian and JAX cannot
        transpose its matrix-vector product."""
        if self.hermitian:
            return self.mv(vector)
        like = jax.ShapeDtypeStruct((self.size,), self.dtype)

        def transpose_mv(vector):
            with explain_missing_adjoint():
                (image,) = jax.linear_transpose(self.fn, like)(vector)
            return image

        # A* v = conj(A^T conj(v)).
        return self._apply_in_range(transpose_mv, vector.conj()).conj()

    def _apply_in_range(self, fn: Callable[[Array], Array], vector: Array) -> Array:
        """`fn(vector)` for a linear `fn`. If the range of the dtype is narrow, the vector
        is scaled before and the image after, so that its largest entry is between
        `n^(-1/4)` and 1."""
        if not self.narrow:
            return fn(vector)
        # A vector of norm one has entries of about n^(-1/2). Products of these with small
        # entries of A might underflow in float16, and those of entries above 1 overflow.
        # The lower end n^(-1/4) is halfway on a logarithmic scale; a power of two, so
        # that scaling by it does not round.
        smallest = 2.0 ** -round(math.log2(vector.size) / 4)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vector)))
        small = (largest > 0) & (largest < smallest)
        scale = jnp.where(small, largest / smallest, jnp.maximum(largest, 1))
        scale = scale.astype(vector.dtype)
        return scale * fn(vector / scale)


class _Complexified(eqx.Module):
    operator: FlatOperator

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        return self.operator.mv(vector.real) + 1j * self.operator.mv(vector.imag)


class _Negated(eqx.Module):
    fn: Callable[[Array], Array]

    def __call__(self, vector: Array) -> Array:
        return -self.fn(vector)


def as_complex(structure: PyTree[jax.ShapeDtypeStruct]) -> PyTree[jax.ShapeDtypeStruct]:
    """The same shapes in complex dtypes of the same precision."""

    def convert(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, complex_dtype(leaf.dtype))

    return jax.tree.map(convert, structure)


def freeze(tree: PyTree) -> PyTree:
    """Make a PyTree constant to all derivatives; leaves that are no arrays may be
    anything."""
    arrays, static = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), static)


def to_flat(tree: PyTree, dtype: DTypeLike) -> Inexact[Array, " n"]:
    """Join the leaves one after another."""
    return jnp.concatenate([x.reshape(-1).astype(dtype) for x in tree_leaves(tree)])


def from_flat(vector: Inexact[Array, " n"], structure: PyTree) -> PyTree:
    """The inverse of `to_flat`, for a PyTree of `jax.ShapeDtypeStruct`."""
    leaves = tree_leaves(structure)
    splits = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    pieces = [
        piece.reshape(leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(jnp.split(vector, splits), leaves, strict=True)
    ]
    return tree_unflatten(tree_structure(structure), pieces)
