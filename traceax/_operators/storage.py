"""Storage of matrices that are read one chunk of rows or columns at a time: an array on
the device, a file, or a user's function."""

import abc
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from .._core.arithmetic import standard_promotion


class AbstractStorage(eqx.Module):
    """A matrix that is read in chunks.

    - `axis`: 0 for chunks of rows, 1 for chunks of columns.
    - `shape`: the shape of the matrix.
    - `dtype`: the dtype of products with the matrix.
    - `by_columns`: whether the entries of chunks lie in memory column by column.
    """

    axis: eqx.AbstractVar[int]
    shape: eqx.AbstractVar[tuple[int, int]]
    dtype: eqx.AbstractVar[np.dtype]
    by_columns: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def chunk(self, start: Int[Array, ""], size: int) -> Shaped[Array, "a b"]:
        """Read `size` rows or columns from the index `start` on, in the dtype that they
        are stored in."""


class OnDevice(AbstractStorage):
    """A matrix in the memory of the device."""

    array: Shaped[Array, "n m"]
    axis: int = eqx.field(static=True)
    shape: tuple[int, int] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    by_columns: bool = eqx.field(static=True, default=False)

    def chunk(self, start: Int[Array, ""], size: int) -> Shaped[Array, "a b"]:
        return jax.lax.dynamic_slice_in_dim(self.array, start, size, self.axis)


@dataclasses.dataclass(frozen=True)
class _Function:
    """A user's function, with checks of the chunks that it returns. Two objects with the
    same function are equal, so that compiled programs are used again."""

    fn: Callable[[int, int], Any]
    shape: tuple[int, int]
    axis: int
    dtype: np.dtype | None = None

    def __call__(self, start: int, stop: int) -> np.ndarray:
        chunk = self.fn(start, stop)
        refuse_masked(f"x({start}, {stop})", chunk)
        chunk = np.asarray(chunk)
        expected = _chunk_shape(self.shape, self.axis, stop - start)
        lines = _describe_range(self.axis, start, stop)
        if chunk.shape != expected:
            raise ValueError(
                f"`x({start}, {stop})` must return {lines} of a matrix of shape "
                f"{self.shape}: an array of shape {expected}. Found shape {chunk.shape}."
            )
        if self.dtype is not None and chunk.dtype != self.dtype:
            raise TypeError(
                f"`x({start}, {stop})` must return {lines} in the dtype of the first "
                f"chunk, {self.dtype}. Found {chunk.dtype}."
            )
        return chunk


@dataclasses.dataclass(frozen=True)
class _File:
    """The part of a file that a `numpy.memmap` shows, as `offset` and `strides` in bytes.

    The file is read, not mapped. Reading is faster where the file is not cached, its
    pages do not count as memory of the process, and a file that has become shorter raises
    an error, where a mapped one would end the process.
    """

    filename: str
    shape: tuple[int, int]
    axis: int
    dtype: np.dtype
    offset: int
    strides: tuple[int, int]

    @classmethod
    def of(cls, x: np.memmap, axis: int) -> tuple["_File", int]:
        """The file of a memmap, and the row or column (along `axis`) at which the memmap
        begins. Parts of one file that begin at different rows or columns have equal
        objects, so that compiled programs are used again."""
        root = x
        while isinstance(root.base, np.memmap):
            root = root.base
        inner = int(np.argmin(x.strides))
        contiguous = x.strides[inner] == x.itemsize or x.shape[inner] == 1
        if x.mode == "c" or not contiguous:
            raise ValueError(
                "`x` must show a file as it is, with rows or columns that are not "
                f"scattered. Found a `numpy.memmap` of mode {x.mode!r} with strides "
                f"{x.strides}. Pass a function `x(start, stop)`, and `shape`."
            )
        # NumPy gives a new axis, of length 1, the stride 0.
        strides = x.strides[0] or x.itemsize, x.strides[1] or x.itemsize
        # The address gives the offset: the memmap attribute `offset` is that of its base.
        # The strides are those along the axis and along the other one.
        offset, step, other = _address(x) - _address(root), *strides[:: 1 - 2 * axis]
        origin = (offset % other if step < other else offset) // step
        start = root.offset + offset - origin * step
        n, m = x.shape
        file = cls(str(x.filename), (n, m), axis, x.dtype, start, strides)
        size, steps = os.path.getsize(file.filename), np.subtract(x.shape, 1)
        needed = root.offset + offset + int(steps @ x.strides) + x.itemsize
        if size < needed:
            raise file.too_short(f"{size} bytes of {needed}")
        return file, origin

    def too_short(self, evidence: str) -> ValueError:
        """The error for a file that is shorter than the matrix."""
        return ValueError(
            f"The file of `x`, {self.filename}, must hold a matrix of shape {self.shape} "
            f"and dtype {self.dtype}. Found {evidence}: it is shorter than the matrix."
        )

    def __call__(self, start: int, stop: int) -> np.ndarray:
        # The chunk consists of contiguous runs along the inner axis, one for each index
        # of the outer axis; of a single run if these follow one another.
        outer, inner = np.argsort(self.strides)[::-1]
        shape = _chunk_shape(self.shape, self.axis, stop - start)
        offset = self.offset + start * self.strides[self.axis]
        runs, length, step = shape[outer], shape[inner], self.strides[outer]
        if step == length * self.dtype.itemsize:
            runs, length = 1, runs * length
        entries = np.empty((runs, length), self.dtype)
        with open(self.filename, "rb") as file:
            for i, run in enumerate(entries.view(np.uint8)):
                file.seek(offset + i * step)
                if file.readinto(run.data) < run.size:
                    lines = _describe_range(self.axis, start, stop)
                    raise self.too_short(f"its end within {lines}")
        entries = entries.reshape(shape[outer], shape[inner])
        return entries if inner == 1 else entries.T


class OnHost(AbstractStorage):
    """A matrix that `read(start, stop)` reads on the host, with indices that count from
    `origin`. Chunks are sent to the device in the dtype `sent`, one at a time."""

    read: Callable[[int, int], np.ndarray] = eqx.field(static=True)
    origin: Int[Array, ""]
    axis: int = eqx.field(static=True)
    shape: tuple[int, int] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    sent: np.dtype = eqx.field(static=True)
    by_columns: bool = eqx.field(static=True)

    @classmethod
    def of(cls, read: _File | _Function, origin: int, first: np.ndarray) -> "OnHost":
        """The storage of a function or a file. `first` is a chunk of it, which shows the
        dtype and the order of the entries."""
        return cls(
            read=read,
            origin=jax.device_put(np.asarray(origin, np.int32)),
            axis=read.axis,
            shape=read.shape,
            dtype=_working_dtype(first.dtype),
            sent=_device_dtype(first.dtype),
            by_columns=bool(first.strides[0] < first.strides[1]),
        )

    def chunk(self, start: Int[Array, ""], size: int) -> Shaped[Array, "a b"]:
        # Arrays on the device lie row by row: a chunk that lies column by column is sent
        # as its transpose, without a copy.
        def load(start):
            chunk = self.read(int(start), int(start) + size)
            chunk = chunk.T if self.by_columns else chunk
            return np.ascontiguousarray(chunk, self.sent)

        shape = _chunk_shape(self.shape, self.axis, size)
        like = jax.ShapeDtypeStruct(shape[::-1] if self.by_columns else shape, self.sent)
        # The only operand is a number. So the callback never waits for other arrays, and
        # for a block of vectors (`jax.vmap`), which is no operand, it runs once.
        chunk = jax.pure_callback(
            load, like, self.origin + start, vmap_method="sequential"
        )
        return chunk.T if self.by_columns else chunk


# How many rows or columns are read to learn the dtype and the order of the entries. The
# strides of a single one do not tell whether entries lie row by row or column by column.
_FIRST_CHUNK = 2


def open_storage(x: Any, shape: tuple[int, int] | None, axis: int) -> AbstractStorage:
    """The storage of a matrix that a user passes as an array, as a memmap, or as a
    function with the shape of the matrix."""
    if callable(x):
        if shape is None:
            raise ValueError(
                "`shape` must be the shape of the matrix, two positive integers, where "
                "`x` is a function that returns chunks of it. Found None."
            )
        first = _Function(x, shape, axis)(0, min(_FIRST_CHUNK, shape[axis]))
        return OnHost.of(_Function(x, shape, axis, first.dtype), 0, first)
    refuse_masked("x", x)
    if not eqx.is_array_like(x) or np.ndim(x) != 2 or 0 in np.shape(x):
        raise TypeError(
            "`x` must be an array or a `numpy.memmap` with two axes, of at least one row "
            "and one column, or a function `x(start, stop)` that returns columns. Found "
            f"{np.shape(x) if eqx.is_array_like(x) else type(x).__name__}."
        )
    if shape is not None and shape != x.shape:
        raise ValueError(f"`shape` must be `x.shape`. Found {shape} and {x.shape}.")
    dtype, size = _working_dtype(x.dtype), min(_FIRST_CHUNK, x.shape[axis])
    if isinstance(x, np.memmap) and x.filename is not None:
        file, origin = _File.of(x, axis)
        return OnHost.of(file, origin, file(origin, origin + size))
    if isinstance(x, np.ndarray):
        x = jax.device_put(x.astype(_device_dtype(x.dtype), copy=False))
    n, m = x.shape
    return OnDevice(array=x, axis=axis, shape=(n, m), dtype=dtype)


def refuse_masked(name: str, x: Any) -> None:
    """Raise for an array with a mask, which JAX would ignore."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"`{name}` must not be a `numpy.ma.MaskedArray`, whose mask would be lost. "
            "Replace masked entries by numbers, for example by `.filled(0)`."
        )


def _working_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of products with entries of this dtype: at least float32."""
    if not jnp.issubdtype(dtype, jnp.number) and dtype != np.dtype(bool):
        raise TypeError(f"`x` must hold numbers. Found dtype {dtype}.")
    with standard_promotion():
        wide = jnp.promote_types(dtype.newbyteorder("="), jnp.float32)
    return jax.dtypes.canonicalize_dtype(wide)


def _device_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of entries on the device: the dtype in which they are stored or, if JAX
    does not have it, that of products."""
    available = jax.dtypes.canonicalize_dtype(dtype) == dtype
    return dtype if available and dtype.isnative else _working_dtype(dtype)


def _chunk_shape(shape: tuple[int, int], axis: int, size: int) -> tuple[int, int]:
    return (size, shape[1]) if axis == 0 else (shape[0], size)


def _describe_range(axis: int, start: int, stop: int) -> str:
    return f"{('rows', 'columns')[axis]} {start} to {stop - 1}"


def _address(x: np.ndarray) -> int:
    """The address of the first entry in memory."""
    return x.__array_interface__["data"][0]
