import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, Int, Real, Shaped

from .._core.arithmetic import standard_promotion
from .._core.checks import check_flag, check_positive, plain_integer
from .storage import AbstractStorage, storage


_ENTRIES = 2**24  # of a chunk, by default: 64 MiB in float32


class _Chunks(eqx.Module):
    """A matrix in chunks of one size. The last one may begin with rows or columns that
    the one before has shown."""

    storage: AbstractStorage
    size: int = eqx.field(static=True)

    @property
    def numbers(self) -> Int[Array, " c"]:
        return jnp.arange(-(-self.storage.shape[self.storage.axis] // self.size))

    def read(
        self, number: Int[Array, ""]
    ) -> tuple[Shaped[Array, "a b"], Int[Array, ""], Bool[Array, " s"]]:
        """A chunk, where it begins, and which of its rows or columns are new."""
        start = self.size * number
        first = jnp.minimum(start, self.storage.shape[self.storage.axis] - self.size)
        chunk = self.storage.chunk(first, self.size)
        return chunk, first, first + jnp.arange(self.size) >= start


class _Columns(eqx.Module):
    """Mean and standard deviation of each column. The mean is `row + offset`: some row
    of the matrix, and the mean of the differences from it, which keeps its digits where
    columns are far from zero."""

    row: Inexact[Array, " m"]
    offset: Inexact[Array, " m"]
    std: Real[Array, " m"]


class _DataGram(eqx.Module):
    """`v -> X X* v / m`; with `columns`, those of X are standardised."""

    chunks: _Chunks
    columns: _Columns | None

    @eqx.filter_jit
    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        _, m = self.chunks.storage.shape
        zeros, size = jnp.zeros_like(vector), self.chunks.size
        with standard_promotion():
            if self.chunks.storage.axis == 1:
                return self._sum(lambda x, _: x @ (x.conj().T @ vector), zeros) / m

            def adjoint(x, first):
                return x.conj().T @ _cut(vector, first, size)

            half = self._sum(adjoint, jnp.zeros_like(vector, shape=m))
            return self._sum(lambda x, _: x @ half, zeros) / m

    def _sum(self, fn: Callable[[Array, Array], Array], total: Array) -> Array:
        """The sum of `fn(x, first)` over all chunks `x`, one pass over the data. A result
        that is shorter than the total is added to it from the index `first` on."""

        # Chunks are kept neither forward nor in reverse.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def of(number):
            x, first = self._standardised(number)
            return fn(x, first), first

        def add(total, number):
            y, first = of(number)
            if y.shape == total.shape:
                return total + y, None
            y = _cut(total, first, y.size) + y
            return jax.lax.dynamic_update_slice(total, y, (first,)), None

        return jax.lax.scan(add, total, self.chunks.numbers)[0]

    def _standardised(
        self, number: Int[Array, ""]
    ) -> tuple[Inexact[Array, "a b"], Int[Array, ""]]:
        """A chunk, zero where it is not new, and where it begins."""
        x, first, new = self.chunks.read(number)
        x = x.astype(self.chunks.storage.dtype)
        by_rows = self.chunks.storage.axis == 0
        if self.columns is not None:
            columns = self.columns
            if not by_rows:
                columns = jax.tree.map(lambda all: _cut(all, first, new.size), columns)
            std = columns.std
            scale = jnp.where(std > 0, 1 / jnp.where(std > 0, std, 1), 0)
            x = ((x - columns.row) - columns.offset) * scale
        return jnp.where(new[:, None] if by_rows else new, x, 0), first


def _cut(x: Array, first: Int[Array, ""], size: int) -> Array:
    return jax.lax.dynamic_slice(x, (first,), (size,))


@eqx.filter_jit
def _columns(chunks: _Chunks) -> _Columns:
    """In one pass over the data."""
    store = chunks.storage
    zeros = jnp.zeros(store.shape[1], store.dtype)
    start = _Columns(zeros, zeros, zeros.real)

    def put(columns, number):
        x, first, _ = chunks.read(number)
        found = _of_rows(x, jnp.ones(len(x), bool), store)
        put = lambda all, some: jax.lax.dynamic_update_slice(all, some, (first,))  # noqa: E731
        return jax.tree.map(put, columns, found), None

    def merge(columns, number):
        x, first, new = chunks.read(number)
        found = _of_rows(x, new, store)
        # Chan, Golub and LeVeque, The American Statistician 37, 1983.
        share = (jnp.sum(new) / (first + new.size)).astype(columns.std.dtype)
        row = jnp.where(number == 0, found.row, columns.row)
        moved = (found.row - row) + found.offset - columns.offset
        unit = jnp.maximum(jnp.maximum(columns.std, found.std), jnp.abs(moved))
        unit = jax.lax.stop_gradient(unit)
        safe = jnp.where(unit > 0, unit, 1)
        square = (1 - share) * (columns.std / safe) ** 2 + share * (found.std / safe) ** 2
        square += share * (1 - share) * jnp.abs(moved / safe) ** 2
        return _Columns(row, columns.offset + share * moved, _root(unit, square)), None

    with standard_promotion():
        step = put if store.axis == 1 else merge
        return jax.lax.scan(step, start, chunks.numbers)[0]


def _of_rows(
    x: Shaped[Array, "a b"], new: Bool[Array, " a"], store: AbstractStorage
) -> _Columns:
    """Statistics of the rows that are new. Differences from one row are summed, so that
    constant columns are found to be constant; the choice of the row and of the unit only
    affects rounding."""
    axis = int(store.by_columns)
    x = x.T if store.by_columns else x  # as it lies in memory
    new = jnp.expand_dims(new, 1 - axis)
    row = jax.lax.slice_in_dim(x, -1, None, axis=axis).astype(store.dtype)
    row = jax.lax.stop_gradient(row)

    def reduce(reduction, fn, *arrays):
        # Behind the barrier each reduction casts for itself. One cast for all of them
        # would be written to memory, which takes five times as long.
        x_, row_, *arrays = jax.lax.optimization_barrier((x, row, *arrays))
        terms = jnp.where(new, fn(x_.astype(store.dtype) - row_, *arrays), 0)
        return reduction(terms, axis=axis, keepdims=True)

    count = jnp.sum(new)
    offset = reduce(jnp.sum, lambda d: d) / count
    largest = reduce(jnp.max, lambda d, offset: jnp.abs(d - offset), offset)
    unit = jax.lax.stop_gradient(largest)
    safe = jnp.where(unit > 0, unit, 1)
    squares = reduce(jnp.sum, lambda d, *c: jnp.abs((d - c[0]) / c[1]) ** 2, offset, safe)
    std = _root(unit, squares / count)
    return _Columns(row.reshape(-1), offset.reshape(-1), std.reshape(-1))


def _root(unit: Real[Array, "..."], square: Real[Array, "..."]) -> Real[Array, "..."]:
    """`unit * sqrt(square)`; zero, with the derivative zero, where that is."""
    return jnp.where(square > 0, unit * jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _checked_shape(shape: Any) -> tuple[int, int] | None:
    if shape is None:
        return None
    sizes = list(map(plain_integer, shape)) if isinstance(shape, Sequence) else []
    if [type(size) for size in sizes] != [int, int] or min(sizes) < 1:
        raise ValueError(
            "`shape` must be the shape of the matrix, two positive integers. Found "
            f"{shape!r}."
        )
    n, m = sizes
    return n, m


def data_gram(
    x: Any,
    shape: tuple[int, int] | None = None,
    *,
    axis: int = 1,
    chunk_size: int | None = None,
    standardise: bool = False,
) -> lx.FunctionLinearOperator:
    r"""The Gram matrix $X X^* / m$ of the rows of an n by m matrix, as an operator that
    reads $X$ a chunk at a time: small numbers in memory, a file, or what a function
    returns. A genetic relationship matrix and a linear kernel are examples.

    A product with a vector, or with a block of probes, is one pass over the data, where
    chunks are columns, and two where they are rows; $O(n m)$ operations for each vector.
    Two copies of a chunk are held in the dtype in which it is stored, and one in the
    dtype of products: 100 MB by default for int8. With rows, a vector of length m for
    each vector of the block comes on top.

    !!! Example

        ```python
        import jax
        import numpy as np
        import traceax as tx

        x = np.random.default_rng(0).integers(0, 3, (500, 2000)).astype(np.int8)
        operator = tx.data_gram(x, standardise=True)
        solution = tx.frobenius_norm(operator, k=50, key=jax.random.key(1))
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `x`: the matrix, of any integer, floating or complex dtype:
        - an array of NumPy or JAX, which stays in its dtype on the device;
        - a `numpy.memmap`, whose file is read at each pass. Fast where chunks are
            contiguous in the file: a file with columns one after the other is a memmap
            of shape `(m, n)`, and is passed as `numpy.memmap(...).T`;
        - a function `x(start, stop)`, which returns columns `start` to `stop - 1` as an
            array of shape `(n, stop - start)`; with `axis=0` rows. It is called on the
            host, once for each chunk of each pass, and must use NumPy, not JAX. Pass
            the same function again: another one compiles anew.
    - `shape`: `(n, m)`, where `x` is a function. For others it may be left out.
    - `axis`: whether chunks are columns, the default, or rows (0).
    - `chunk_size`: columns or rows in a chunk. By default a chunk has about 17 million
        numbers, 64 MB in float32.
    - `standardise`: whether the mean of each column is subtracted, and what is left
        divided by its standard deviation (with `ddof=0`), in each chunk when it is read.
        Constant columns become zero. Takes a pass over the data when the operator is
        made.

    **Returns:**

    An operator on vectors of length n, tagged positive semidefinite, in the dtype of
    `x` but at least float32: for a wider one, pass a function that returns it. It has
    derivatives in `x` where that is a floating array of JAX, and in vectors.

    **Raises:**

    - `ValueError`: `x` is a function without a `shape`, or its first two columns (or
        rows) have another shape; `shape` is not two positive integers, or not that of an
        array or memmap `x`; a memmap whose file is too short, or whose entries do not
        follow one another; `axis` is not 0 or 1; `chunk_size` is below 1.
    - `TypeError`: `x` is of another kind, of a dtype that is no number, or a masked
        array, or a function that returns one; `chunk_size` is not a Python integer;
        `standardise` is not a bool.
    - `jax.errors.JaxRuntimeError`, whose text ends with the message, where a chunk is
        read later, in a product or for `standardise`: a function raises, or returns a
        chunk of another shape, or of another dtype than that of its first columns; a
        file has become shorter.
    """
    axis = plain_integer(axis)
    if type(axis) is not int or axis not in (0, 1):
        raise ValueError(
            "`axis` must be 1, where `x` is read in chunks of columns, or 0 for rows. "
            f"Found {axis!r}."
        )
    check_flag("standardise", standardise)
    store = storage(x, _checked_shape(shape), axis)
    length, other = store.shape[axis], store.shape[1 - axis]
    if chunk_size is None:
        number = -(-length // max(1, _ENTRIES // other))
        chunk_size = -(-length // number)
    chunks = _Chunks(store, min(length, check_positive("chunk_size", chunk_size)))
    product = _DataGram(chunks, _columns(chunks) if standardise else None)
    structure = jax.ShapeDtypeStruct((store.shape[0],), store.dtype)
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(product, structure, tag, closure_convert=False)
