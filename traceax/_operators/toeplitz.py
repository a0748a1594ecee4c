"""Circulant and Toeplitz operators, applied by the fast Fourier transform.

A circulant with the first column c acts as the convolution with c on a circle, or for an
array c on a torus. The Fourier transform diagonalises it, and its eigenvalues are the
transform of c. A Toeplitz matrix of m rows and n columns is a corner of the circulant
with the first column `(column, 0 .. 0, reversed row without its first entry)`.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Complex, Inexact, Real

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import Tracer
from .._core.norms import keep_nonzero
from .convert import as_frozenset, working_dtype
from .storage import refuse_masked
from .structured import (
    AbstractStructuredOperator,
    norms_along_last,
    of_full_precision,
    root,
    Rows,
    scale_of,
)
from .tags import hermitian_tag


def _transform(column: Inexact[Array, "*n"]) -> Complex[Array, "*m"]:
    """The Fourier transform of an array; of a real one, the half that gives the rest."""
    column = of_full_precision(column)
    return jnp.fft.fftn(column) if jnp.iscomplexobj(column) else jnp.fft.rfftn(column)


def _convolve(operator: Any, x: Inexact[Array, "*n"]) -> Inexact[Array, "*n"]:
    """With the column of an operator that knows the transform of it."""
    transform = operator.transform
    if jnp.iscomplexobj(x):
        return jnp.fft.ifftn(transform * jnp.fft.fftn(x)).astype(x.dtype)
    image = jnp.fft.irfftn(transform * _transform(x), x.shape)
    return image.astype(x.dtype)


class CirculantOperator(AbstractStructuredOperator):
    """A circulant operator: see [`traceax.circulant`][]."""

    column: Inexact[Array, "*n"]
    transform: Complex[Array, "*m"] | None
    tags: frozenset[object] = eqx.field(static=True)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.column.shape, self.column.dtype)

    def out_structure(self):
        return self.in_structure()

    def mv(self, vector):
        with standard_promotion():
            return _convolve(self.linearise(), vector)

    def as_matrix(self):
        shape, places = self.column.shape, jnp.arange(self.column.size)
        points = jnp.unravel_index(places, shape)
        differences = (x[:, None] - x[None] for x in points)
        index = tuple(x % size for x, size in zip(differences, shape, strict=True))
        return self.column[index]

    def linearise(self):
        if self.transform is not None:
            return self
        return CirculantOperator(self.column, _transform(self.column), self.tags)

    def transpose(self):
        axes = range(self.column.ndim)
        reversed_column = jnp.roll(jnp.flip(self.column), (1,) * len(axes), axes)
        return CirculantOperator(reversed_column, None, lx.transpose_tags(self.tags))

    def conj(self):
        return CirculantOperator(self.column.conj(), None, self.tags)

    def has(self, tag):
        return tag in self.tags

    def diagonal(self):
        return jnp.full(self.column.size, self.column.reshape(-1)[0])

    def eigenvalues(self, of):
        return jnp.fft.fftn(of_full_precision(self.column)).real.reshape(-1)

    def rows(self, of):
        column = of_full_precision(self.column).reshape(-1)
        norm = norms_along_last(column[1:])
        return Rows(jnp.full(column.size, column[0]), jnp.full(column.size, norm))


class ToeplitzOperator(AbstractStructuredOperator):
    """A Toeplitz operator: see [`traceax.toeplitz`][]."""

    column: Inexact[Array, " m"]
    row: Inexact[Array, " n"]
    transform: Complex[Array, " l"] | None
    tags: frozenset[object] = eqx.field(static=True)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.row.shape, self.row.dtype)

    def out_structure(self):
        return jax.ShapeDtypeStruct(self.column.shape, self.column.dtype)

    @property
    def _length(self) -> int:
        """Of the circulant: a power of 2, for which transforms are fast."""
        return 2 ** (self.column.size + self.row.size - 2).bit_length()

    def mv(self, vector):
        with standard_promotion():
            x = jnp.pad(vector, (0, self._length - vector.size))
            return _convolve(self.linearise(), x)[: self.column.size]

    def as_matrix(self):
        rows, columns = jnp.arange(self.column.size), jnp.arange(self.row.size)
        entries = jnp.concatenate([self.row[:0:-1], self.column])
        return entries[rows[:, None] - columns[None] + self.row.size - 1]

    def linearise(self):
        if self.transform is not None:
            return self
        zeros = self._length - self.column.size - self.row.size + 1
        column = jnp.pad(self.column, (0, zeros))
        column = jnp.concatenate([column, self.row[:0:-1]])
        return ToeplitzOperator(self.column, self.row, _transform(column), self.tags)

    def transpose(self):
        tags = lx.transpose_tags(self.tags)
        return ToeplitzOperator(self.row, self.column, None, tags)

    def conj(self):
        return ToeplitzOperator(self.column.conj(), self.row.conj(), None, self.tags)

    def has(self, tag):
        return tag in self.tags

    def diagonal(self):
        return jnp.full(self.column.size, self.column[0])

    def rows(self, of):
        entries = of_full_precision(jnp.concatenate([self.row[:0:-1], self.column]))
        size, diagonal = self.row.size, None
        if size == self.column.size:
            diagonal = jnp.full(size, entries[size - 1])
            entries = entries.at[size - 1].set(0)
        return Rows(diagonal, _norms_of_windows(entries, size))


def _norms_of_windows(x: Inexact[Array, " l"], size: int) -> Real[Array, " m"]:
    """The norms of all runs of `size` entries. Each is the end of a block of that size
    and the start of the next, so that no sums are subtracted."""
    sizes = jnp.abs(x)
    scale = scale_of(jnp.max(sizes))
    squares = keep_nonzero((sizes / scale) ** 2, sizes != 0)
    count = x.size - size + 1
    blocks = jnp.pad(squares, (0, size - x.size % size)).reshape(-1, size)
    ends = jnp.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].reshape(-1)[:count]
    starts = jnp.pad(jnp.cumsum(blocks, axis=1)[:, :-1], ((0, 0), (1, 0)))
    return scale * root(ends + starts.reshape(-1)[size : size + count])


def circulant(column: Any, tags: Any = ()) -> lx.AbstractLinearOperator:
    """The circulant operator with this first column, or the convolution with an array on
    a torus: $(C x)_i = \\sum_j c_{i - j} x_j$ with indices modulo the shape.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        column = jnp.zeros(100).at[jnp.array([0, 1, -1])].set(jnp.array([2.5, -1, -1]))
        operator = tx.circulant(column, lx.positive_semidefinite_tag)
        print(f"{tx.logdet(operator).value:.3f}")  # 69.315
        ```

    **Arguments:**

    - `column`: an array with one axis or more, real or complex, of NumPy or JAX.
    - `tags`: a tag, or several. A column whose values are seen and that is symmetric or
        Hermitian gets that tag.

    **Returns:**

    A `lineax.AbstractLinearOperator` on arrays of the shape of `column`. A matvec takes
    two fast Fourier transforms. Traces of functions of a Hermitian one are exact: its
    eigenvalues are the transform of the column.

    **Raises:**

    `TypeError` if `column` does not hold numbers, `ValueError` if it has no entry.
    """
    column = _checked("column", column)
    tags = as_frozenset(tags)
    operator = CirculantOperator(column, None, tags)
    if isinstance(column, Tracer):
        return operator
    with jax.ensure_compile_time_eval():
        if jnp.all(operator.transpose().column == column.conj()):
            is_complex = jnp.iscomplexobj(column)
            tags |= {hermitian_tag if is_complex else lx.symmetric_tag}
    return CirculantOperator(column, None, tags)


def toeplitz(column: Any, row: Any = None, tags: Any = ()) -> lx.AbstractLinearOperator:
    """The Toeplitz operator with this first column and first row.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        correlation = 0.5 ** jnp.arange(500.0)
        operator = tx.toeplitz(correlation, tags=lx.positive_semidefinite_tag)
        print(tx.logdet(operator, key=jax.random.key(0)))
        print("exactly", 499 * jnp.log(0.75))
        ```

    **Arguments:**

    - `column`: an array of shape `(m,)`, real or complex, of NumPy or JAX.
    - `row`: an array of shape `(n,)`, whose first entry is not used; `column` has it.
        `None`, the default, is the complex conjugate of `column`, of a Hermitian matrix.
    - `tags`: a tag, or several. Without a `row` the operator gets the tag symmetric, or
        `traceax.hermitian_tag`.

    **Returns:**

    A `lineax.AbstractLinearOperator` from arrays of shape `(n,)` to arrays of shape
    `(m,)`. A matvec takes two fast Fourier transforms of length m + n.

    **Raises:**

    As [`traceax.circulant`][], and `ValueError` if an array has not one axis.
    """
    column, tags = _checked("column", column), as_frozenset(tags)
    if row is None:
        tags |= {hermitian_tag if jnp.iscomplexobj(column) else lx.symmetric_tag}
        # The diagonal of a Hermitian matrix is real.
        column = column.at[:1].set(column[:1].real)
        row = column.conj()
    row = _checked("row", row)
    for name, x in {"column": column, "row": row}.items():
        if x.ndim != 1:
            raise ValueError(f"`{name}` must have one axis. Found the shape {x.shape}.")
    dtype = jnp.promote_types(column.dtype, row.dtype)
    column, row = column.astype(dtype), row.astype(dtype)
    return ToeplitzOperator(column, row.at[0].set(column[0]), None, tags)


def _checked(name: str, x: Any) -> Inexact[Array, "*n"]:
    """An array of floating-point numbers."""
    if not isinstance(x, np.ndarray | jax.Array | np.generic):
        raise TypeError(
            f"`{name}` must be an array of numbers. Found an object of type "
            f"{type(x).__name__}."
        )
    refuse_masked(name, x)
    dtype = working_dtype(x.dtype, name)
    if x.size == 0 or x.ndim == 0:
        raise ValueError(f"`{name}` must have entries. Found the shape {x.shape}.")
    return jnp.asarray(x).astype(dtype)
