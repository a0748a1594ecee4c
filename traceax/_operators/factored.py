"""Kronecker products and sums, and block diagonal operators, from their factors.

For factors A_1 .. A_d of sizes n_1 .. n_d,

    product    A_1 (x) ... (x) A_d                     n = n_1 ... n_d
    sum        sum_i I (x) ... (x) A_i (x) ... (x) I   n = n_1 ... n_d
    blocks     diag(A_1, ..., A_d)                     n = n_1 + ... + n_d

A product or a sum applies to arrays with the axes of all factors, and each factor acts
along its own axes. Flattened in C order, that is the order of `numpy.kron`.
"""

import abc
import functools as ft
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.flat import from_flat, to_flat
from .convert import convert, OperatorLike
from .structured import AbstractStructuredOperator, has_all, hypot, Rows, SignLog
from .tags import dtypes, is_complex


class _Factored(AbstractStructuredOperator):
    """An operator that its factors define. It has the properties that all of them
    have."""

    factors: tuple[lx.AbstractLinearOperator, ...]

    @property
    def parts(self):
        return self.factors

    def has(self, tag):
        return has_all(self.factors, tag)

    def conj(self):
        return self._map(lx.conj)

    def linearise(self):
        return self._map(lx.linearise)

    def transpose(self):
        return self._map(lambda factor: factor.T)

    def _map(self, fn: Callable):
        return type(self)(tuple(map(fn, self.factors)))

    def eigenvalues(self, of):
        parts = [x for x in map(of, self.factors) if x is not None]
        return self._joined(parts) if len(parts) == len(self.factors) else None

    @abc.abstractmethod
    def _joined(self, parts: list[Real[Array, " m"]]) -> Real[Array, " n"]:
        """What diagonal factors with these entries make."""

    def diagonal(self):
        # Rectangular factors may make a square operator.
        if any(x.in_structure() != x.out_structure() for x in self.factors):
            return jnp.diagonal(self.as_matrix())
        return self._joined(list(map(lx.diagonal, self.factors)))

    def rows(self, of):
        parts = [part for part in map(of, self.factors) if part is not None]
        return self._joined_rows(parts) if len(parts) == len(self.factors) else None

    @abc.abstractmethod
    def _joined_rows(self, parts: list[Rows]) -> Rows | None:
        """The rows, from those of the factors."""


class _OnGrid(_Factored):
    """A factored operator on arrays with the axes of all factors."""

    def has(self, tag):
        # Factors with entries beside the diagonal put them far from it.
        tag = lx.diagonal_tag if tag == lx.tridiagonal_tag else tag
        return super().has(tag)

    def in_structure(self):
        return _grid([factor.in_structure() for factor in self.factors])

    def out_structure(self):
        return _grid([factor.out_structure() for factor in self.factors])

    def mv(self, vector):
        with standard_promotion():
            return self._apply(vector).reshape(self.out_structure().shape)

    @abc.abstractmethod
    def _apply(self, vector: Array) -> Array:
        """The image, of any shape."""

    def _along(self, index: int, x: Array, before: int) -> Inexact[Array, "l m r"]:
        """Apply one factor to the middle axis of x, where the axes `before` it have this
        size in all."""
        factor = self.factors[index]
        structure, image = factor.in_structure(), factor.out_structure()
        dtype = jnp.result_type(*jax.tree.leaves(image))

        def apply(vector):
            return to_flat(factor.mv(from_flat(vector, structure)), dtype)

        columns = jax.vmap(apply, in_axes=1, out_axes=1)
        return jax.vmap(columns)(x.reshape(before, factor.in_size(), -1))


def _grid(structures: list[PyTree[jax.ShapeDtypeStruct]]) -> jax.ShapeDtypeStruct:
    """An array with the axes of all structures. A PyTree has one axis, of its size."""
    shape = ()
    for structure in structures:
        leaves = jax.tree.leaves(structure)
        is_array = isinstance(structure, jax.ShapeDtypeStruct)
        shape += structure.shape if is_array else (sum(leaf.size for leaf in leaves),)
    dtype = jnp.result_type(*jax.tree.leaves(structures))
    return jax.ShapeDtypeStruct(shape, dtype)


class KroneckerOperator(_OnGrid):
    """A Kronecker product: see [`traceax.kronecker`][]."""

    def _apply(self, vector):
        before = 1
        for index, factor in enumerate(self.factors):
            vector = self._along(index, vector, before)
            before *= factor.out_size()
        return vector

    def as_matrix(self):
        return ft.reduce(jnp.kron, [factor.as_matrix() for factor in self.factors])

    def has(self, tag):
        match tag:
            case lx.positive_semidefinite_tag:
                return self._sign() > 0
            case lx.negative_semidefinite_tag:
                return self._sign() < 0
        return super().has(tag)

    def _sign(self) -> int:
        """The product of the signs of semidefinite factors, 0 if one has none."""
        return math.prod(
            lx.is_positive_semidefinite(x) - lx.is_negative_semidefinite(x)
            for x in self.factors
        )

    def _joined(self, parts):
        return ft.reduce(jnp.kron, parts)

    def _joined_rows(self, parts):
        def join(a, b):
            if a.diagonal is None or b.diagonal is None:
                return Rows(None, jnp.kron(a.norms, b.norms))
            # (d_a + o_a) (d_b + o_b) without d_a d_b; subtracted, it would cancel.
            beside = jnp.kron(jnp.abs(a.diagonal), b.others)
            others = hypot(beside, jnp.kron(a.others, b.norms))
            return Rows(jnp.kron(a.diagonal, b.diagonal), others)

        return ft.reduce(join, parts)

    def determinant(self, of):
        """`det(A (x) B) = det(A)^m det(B)^n` for sizes n and m."""
        dets = [det for det in map(of, self.factors) if det is not None]
        if len(dets) < len(self.factors):
            return None
        size = self.in_size()
        powers = [size // factor.in_size() for factor in self.factors]
        pairs = list(zip(dets, powers, strict=True))
        sign = ft.reduce(jnp.multiply, [det.sign**power for det, power in pairs])
        return SignLog(sign, ft.reduce(jnp.add, [m * det.log for det, m in pairs]))


class KroneckerSumOperator(_OnGrid):
    """A Kronecker sum: see [`traceax.kronecker_sum`][]."""

    def _apply(self, vector):
        total, before = jnp.zeros((), vector.dtype), 1
        for index, factor in enumerate(self.factors):
            total = total + self._along(index, vector, before).reshape(vector.shape)
            before *= factor.in_size()
        return total

    def as_matrix(self):
        def add(a, b):
            eye_a, eye_b = (jnp.eye(len(x), dtype=x.dtype) for x in (a, b))
            return jnp.kron(a, eye_b) + jnp.kron(eye_a, b)

        return ft.reduce(add, [factor.as_matrix() for factor in self.factors])

    def _joined(self, parts):
        return ft.reduce(lambda a, b: (a[:, None] + b).reshape(-1), parts)

    def _joined_rows(self, parts):
        diagonals = [x.diagonal for x in parts if x.diagonal is not None]
        if len(diagonals) < len(parts):
            return None
        # The other entries of the factors never meet.
        add = lambda a, b: hypot(a[:, None], b).reshape(-1)  # noqa: E731
        others = ft.reduce(add, [part.others for part in parts])
        return Rows(self._joined(diagonals), others)

    def has(self, tag):
        return tag != lx.unit_diagonal_tag and super().has(tag)


class BlockDiagonalOperator(_Factored):
    """A block diagonal operator: see [`traceax.block_diagonal`][]."""

    def in_structure(self):
        return tuple(block.in_structure() for block in self.factors)

    def out_structure(self):
        return tuple(block.out_structure() for block in self.factors)

    def mv(self, vector):
        return tuple(
            block.mv(part) for block, part in zip(self.factors, vector, strict=True)
        )

    def as_matrix(self):
        blocks = [block.as_matrix() for block in self.factors]
        return jax.scipy.linalg.block_diag(*blocks)

    def _joined(self, parts):
        return jnp.concatenate(parts)

    def _joined_rows(self, parts):
        diagonals = [x.diagonal for x in parts if x.diagonal is not None]
        if len(diagonals) < len(parts):
            return Rows(None, self._joined([part.norms for part in parts]))
        others = self._joined([part.others for part in parts])
        return Rows(self._joined(diagonals), others)

    def determinant(self, of):
        dets = [det for det in map(of, self.factors) if det is not None]
        if len(dets) < len(self.factors):
            return None
        sign = ft.reduce(jnp.multiply, [det.sign for det in dets])
        return SignLog(sign, ft.reduce(jnp.add, [det.log for det in dets]))


def kronecker(*operators: OperatorLike) -> lx.AbstractLinearOperator:
    """The Kronecker product of several operators, which is never formed.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.kronecker(jnp.diag(jnp.arange(1.0, 4.0)), 2 * jnp.ones((5, 5)))
        print(tx.trace(operator).value)  # 60.0
        ```

    **Arguments:**

    - `operators`: one or more matrices or operators, of any shapes.

    **Returns:**

    A `lineax.AbstractLinearOperator` on arrays with the axes of the vectors of all
    factors: of shape `(n, m)` for two factors on vectors of lengths n and m. A factor on
    PyTrees has one axis. Flattened, the order is that of `numpy.kron`. A matvec applies
    each factor to as many vectors as the others make: for factors of n and m columns, to
    m and n. It is symmetric, triangular, diagonal or semidefinite where all factors are.

    **Raises:**

    `TypeError` or `ValueError` if there is no operator, if one is no operator or has no
    rows, or if some are real and others complex.
    """
    return KroneckerOperator(_converted(operators))


def kronecker_sum(*operators: OperatorLike) -> lx.AbstractLinearOperator:
    """The Kronecker sum of several square operators, $A \\otimes I + I \\otimes B$ for
    two, which is never formed: the Laplacian of a grid, from those of its axes.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        line = 2 * jnp.eye(20) - jnp.eye(20, k=1) - jnp.eye(20, k=-1)
        print(tx.trace(tx.kronecker_sum(line, line)).value)  # 1600.0
        ```

    **Arguments:**

    - `operators`: one or more square matrices or operators.

    **Returns:**

    An operator on the same arrays as that of [`traceax.kronecker`][].

    **Raises:**

    As [`traceax.kronecker`][], and `ValueError` if an operator is not square.
    """
    factors = _converted(operators)
    for factor in factors:
        if factor.in_structure() != factor.out_structure():
            raise ValueError(
                "`operators` of a Kronecker sum must be square. Found one of "
                f"{factor.out_size()} rows and {factor.in_size()} columns."
            )
    return KroneckerSumOperator(factors)


def block_diagonal(*operators: OperatorLike) -> lx.AbstractLinearOperator:
    """The block diagonal operator of several operators.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.block_diagonal(jnp.eye(3), 2 * jnp.ones((2, 2)))
        print(tx.trace(operator).value)  # 7.0
        ```

    **Arguments:**

    - `operators`: one or more matrices or operators, of any shapes.

    **Returns:**

    An operator on tuples of the vectors of all blocks. A matvec applies each block once.
    It is symmetric, triangular, diagonal or semidefinite where all blocks are.

    **Raises:**

    As [`traceax.kronecker`][].
    """
    return BlockDiagonalOperator(_converted(operators))


def _converted(operators: tuple) -> tuple[lx.AbstractLinearOperator, ...]:
    if not operators:
        raise ValueError("`operators` must be one or more operators. Found none.")
    factors = tuple(convert(operator, name="operators") for operator in operators)
    for factor in factors:
        if 0 in (factor.in_size(), factor.out_size()):
            raise ValueError(
                "`operators` must have entries. Found one of "
                f"{factor.out_size()} rows and {factor.in_size()} columns."
            )
    if len(set(map(is_complex, factors))) > 1:
        raise TypeError(
            "`operators` must all be real, or all complex. Found the dtypes "
            f"{[str(dtypes(factor)[0]) for factor in factors]}. Cast the arrays of the "
            "real ones."
        )
    return factors
