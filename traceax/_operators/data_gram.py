"""Gram matrices of data that is read one chunk at a time.

For an n by m matrix X, a matvec computes X (X* v) / m. In chunks X_c of columns, it is
the sum over c of X_c (X_c* v) / m, one pass over the data; in chunks of rows, a first
pass sums h = X* v (`half`) and a second one gives each chunk X_c h of the result.

Standardised columns are (x - mean) / std. For chunks of rows, the statistics of the rows
so far, with the means mu and variances s^2, merge with those of a chunk, mu_c and s_c^2,
that has the share p of all these rows:

    mu <- mu + p (mu_c - mu),
    s^2 <- (1 - p) s^2 + p s_c^2 + p (1 - p) (mu_c - mu)^2.

Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", The American
Statistician 37, 1983. In the code p is `share` and mu_c - mu is `shift`.
"""

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
from .storage import AbstractStorage, open_storage


# The number of entries of a chunk by default: 64 MiB in float32. Smaller chunks take less
# memory; larger ones spread the overhead of reading over more entries.
_DEFAULT_ENTRIES = 2**24


class _Chunks(eqx.Module):
    """A matrix in chunks of one size, since shapes in a loop are static. The last chunk
    ends with the matrix, and so may begin with rows or columns of the chunk before it."""

    storage: AbstractStorage
    size: int = eqx.field(static=True)

    @property
    def numbers(self) -> Int[Array, " c"]:
        """The numbers of all chunks, 0, 1, ..."""
        return jnp.arange(-(-self.storage.shape[self.storage.axis] // self.size))

    def read(
        self, number: Int[Array, ""]
    ) -> tuple[Shaped[Array, "a b"], Int[Array, ""], Bool[Array, " s"]]:
        """A chunk, the index of its first row or column, and a mask of those that are not
        in the chunk before it."""
        start = self.size * number
        first = jnp.minimum(start, self.storage.shape[self.storage.axis] - self.size)
        chunk = self.storage.chunk(first, self.size)
        return chunk, first, first + jnp.arange(self.size) >= start


class _ColumnStatistics(eqx.Module):
    """The mean and the standard deviation of each column. The mean is `row + offset`: a
    row of the matrix, and the mean of the differences from it. Their sum would lose the
    digits of the offset where columns are far from zero."""

    row: Inexact[Array, " m"]
    offset: Inexact[Array, " m"]
    std: Real[Array, " m"]


class _DataGram(eqx.Module):
    """`v -> X X* v / m`, with standardised columns if `columns` is not None."""

    chunks: _Chunks
    columns: _ColumnStatistics | None

    @eqx.filter_jit
    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        _, m = self.chunks.storage.shape
        zeros, size = jnp.zeros_like(vector), self.chunks.size
        with standard_promotion():
            if self.chunks.storage.axis == 1:
                return self._sum(lambda x, _: x @ (x.conj().T @ vector), zeros) / m

            def adjoint(x, first):
                return x.conj().T @ _slice_from(vector, first, size)

            half = self._sum(adjoint, jnp.zeros_like(vector, shape=m))
            return self._sum(lambda x, _: x @ half, zeros) / m

    def _sum(self, fn: Callable[[Array, Array], Array], total: Array) -> Array:
        """The sum of `fn(x, first)` over all chunks `x`, one pass over the data. A result
        that is shorter than the total is added to it from the index `first` on."""

        # With the checkpoint, derivatives read chunks again instead of keeping them all.
        # `prevent_cse` is not needed inside `scan`.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def contribution(number):
            x, first = self._read_standardised(number)
            return fn(x, first), first

        def add(total, number):
            y, first = contribution(number)
            if y.shape == total.shape:
                return total + y, None
            y = _slice_from(total, first, y.size) + y
            return jax.lax.dynamic_update_slice(total, y, (first,)), None

        return jax.lax.scan(add, total, self.chunks.numbers)[0]

    def _read_standardised(
        self, number: Int[Array, ""]
    ) -> tuple[Inexact[Array, "a b"], Int[Array, ""]]:
        """A chunk, with zeros for rows or columns of the chunk before it, and the index
        of its first one."""
        x, first, new = self.chunks.read(number)
        x = x.astype(self.chunks.storage.dtype)
        by_rows = self.chunks.storage.axis == 0
        if self.columns is not None:
            columns = self.columns
            if not by_rows:
                columns = jax.tree.map(lambda x: _slice_from(x, first, new.size), columns)
            std = columns.std
            # Constant columns become zero.
            scale = jnp.where(std > 0, 1 / jnp.where(std > 0, std, 1), 0)
            x = ((x - columns.row) - columns.offset) * scale
        return jnp.where(new[:, None] if by_rows else new, x, 0), first


def _slice_from(x: Array, first: Int[Array, ""], size: int) -> Array:
    return jax.lax.dynamic_slice(x, (first,), (size,))


@eqx.filter_jit
def _column_statistics(chunks: _Chunks) -> _ColumnStatistics:
    """The statistics of all columns, in one pass over the data."""
    store = chunks.storage
    zeros = jnp.zeros(store.shape[1], store.dtype)
    start = _ColumnStatistics(row=zeros, offset=zeros, std=zeros.real)

    def insert(columns, number):
        """Insert the statistics of a chunk of whole columns."""
        x, first, _ = chunks.read(number)
        chunk = _statistics_of_rows(x, jnp.ones(len(x), bool), store)
        update = lambda x, part: jax.lax.dynamic_update_slice(x, part, (first,))  # noqa: E731
        return jax.tree.map(update, columns, chunk), None

    def merge(columns, number):
        """Merge the statistics so far with those of a chunk of rows."""
        x, first, new = chunks.read(number)
        chunk = _statistics_of_rows(x, new, store)
        share = (jnp.sum(new) / (first + new.size)).astype(columns.std.dtype)
        row = jnp.where(number == 0, chunk.row, columns.row)
        shift = (chunk.row - row) + chunk.offset - columns.offset
        # Squares in units of the largest term do not overflow or underflow.
        unit = jnp.maximum(jnp.maximum(columns.std, chunk.std), jnp.abs(shift))
        unit = jax.lax.stop_gradient(unit)
        safe = jnp.where(unit > 0, unit, 1)
        square = (1 - share) * (columns.std / safe) ** 2 + share * (chunk.std / safe) ** 2
        square += share * (1 - share) * jnp.abs(shift / safe) ** 2
        merged = _ColumnStatistics(
            row=row,
            offset=columns.offset + share * shift,
            std=_scaled_root(unit, square),
        )
        return merged, None

    with standard_promotion():
        step = insert if store.axis == 1 else merge
        return jax.lax.scan(step, start, chunks.numbers)[0]


def _statistics_of_rows(
    x: Shaped[Array, "a b"], new: Bool[Array, " a"], store: AbstractStorage
) -> _ColumnStatistics:
    """The statistics of the rows that are new. Sums are of differences from one row, so
    that the standard deviation of a constant column is exactly zero. The choice of the
    row and of the unit only affects rounding."""
    # Reduce along the axis in memory: a transpose of stored entries would be a copy.
    axis = int(store.by_columns)
    x = x.T if store.by_columns else x
    new = jnp.expand_dims(new, 1 - axis)
    row = jax.lax.slice_in_dim(x, -1, None, axis=axis).astype(store.dtype)
    row = jax.lax.stop_gradient(row)

    def reduce(reduction, fn, *arrays):
        # The barrier makes each reduction cast for itself. XLA would share one cast
        # between them and write it to memory, which takes five times as long.
        x_, row_, *arrays = jax.lax.optimization_barrier((x, row, *arrays))
        terms = jnp.where(new, fn(x_.astype(store.dtype) - row_, *arrays), 0)
        return reduction(terms, axis=axis, keepdims=True)

    count = jnp.sum(new)
    offset = reduce(jnp.sum, lambda d: d) / count
    largest = reduce(jnp.max, lambda d, offset: jnp.abs(d - offset), offset)
    unit = jax.lax.stop_gradient(largest)
    safe = jnp.where(unit > 0, unit, 1)
    square = lambda d, offset, unit: jnp.abs((d - offset) / unit) ** 2  # noqa: E731
    squares = reduce(jnp.sum, square, offset, safe)
    return _ColumnStatistics(
        row=row.reshape(-1),
        offset=offset.reshape(-1),
        std=_scaled_root(unit, squares / count).reshape(-1),
    )


def _scaled_root(
    unit: Real[Array, "..."], square: Real[Array, "..."]
) -> Real[Array, "..."]:
    """`unit * sqrt(square)`. Where `square` is zero, the result and its derivative are
    zero; the derivative of the root itself would be NaN."""
    return jnp.where(square > 0, unit * jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _check_shape(shape: Any) -> tuple[int, int] | None:
    """Convert the shape of a matrix to Python integers, or raise unless it is one."""
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
    reads $X$ one chunk at a time, from an array of a small dtype in memory, a file, or a
    function. A genetic relationship matrix and a linear kernel are examples.

    A matvec, or a product with a block of probes, is one pass over the data if chunks are
    columns, and two passes if they are rows; $O(n m)$ operations for each vector. The
    memory is that of two copies of a chunk in the dtype in which it is stored, and one in
    the dtype of products: 100 MB by default for int8. Chunks of rows take in addition a
    vector of length m for each vector of the block.

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
    - `standardise`: whether the mean of each column is subtracted, and the difference
        divided by its standard deviation (with `ddof=0`), in each chunk when it is read.
        Constant columns become zero. This takes one pass over the data when the operator
        is constructed.

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
    - `jax.errors.JaxRuntimeError`, whose text ends with the message, if a chunk is read
        later, in a matvec or for `standardise`: a function raises, or returns a chunk of
        another shape, or of another dtype than that of its first columns; a file has
        become shorter.
    """
    axis = plain_integer(axis)
    if type(axis) is not int or axis not in (0, 1):
        raise ValueError(
            "`axis` must be 1, where `x` is read in chunks of columns, or 0 for rows. "
            f"Found {axis!r}."
        )
    check_flag("standardise", standardise)
    store = open_storage(x, _check_shape(shape), axis)
    length, other = store.shape[axis], store.shape[1 - axis]
    if chunk_size is None:
        # Chunks of nearly equal sizes: the last one repeats few rows or columns.
        num_chunks = -(-length // max(1, _DEFAULT_ENTRIES // other))
        chunk_size = -(-length // num_chunks)
    chunks = _Chunks(store, min(length, check_positive("chunk_size", chunk_size)))
    gram_mv = _DataGram(chunks, _column_statistics(chunks) if standardise else None)
    structure = jax.ShapeDtypeStruct((store.shape[0],), store.dtype)
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(gram_mv, structure, tag, closure_convert=False)
