"""Operators of matrices that are stored, dense or sparse, with what their entries show:
whether they are Hermitian, and whether they are diagonal."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import Tracer
from .structured import (
    AbstractStructuredOperator,
    of_full_precision,
    root,
    Rows,
    scale_of,
)
from .tags import hermitian_tag


# Rows and columns of blocks that are compared at a time. They fit into the cache of a
# core, so that a whole matrix takes the time of about two matvecs.
_BLOCK = 256


def of_dense(
    x: np.ndarray | Array, dtype: np.dtype, tags: frozenset[object]
) -> lx.AbstractLinearOperator:
    """The operator of an array with two axes, in `dtype`."""
    x = np.asarray(x, dtype) if isinstance(x, np.ndarray) else x.astype(dtype)
    entries = _visible(x) if x.shape[0] == x.shape[1] else None
    if entries is not None:
        # Inside of `jax.jit` JAX would trace the comparisons.
        with jax.ensure_compile_time_eval():
            tags |= _tags_of(_is_hermitian(entries), dtype)
            if _is_diagonal(entries):
                return _diagonal(entries.diagonal(), tags)
    return lx.MatrixLinearOperator(jax.device_put(x), tags)


def _visible(x: np.ndarray | Array) -> np.ndarray | Array | None:
    """An array whose entries can be compared at little cost: one of NumPy, unless they
    are on an accelerator. None if they are traced, or on several devices."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, Tracer) or len(x.sharding.device_set) > 1:
        return None
    (device,) = x.devices()
    return jax.device_get(x) if device.platform == "cpu" else x


def _blocks(x: np.ndarray | Array) -> Iterator[slice]:
    """Ranges of rows, all of them at once on an accelerator."""
    size = _BLOCK if isinstance(x, np.ndarray) else len(x)
    return (slice(i, i + size) for i in range(0, len(x), size))


def _is_hermitian(x: np.ndarray | Array) -> bool:
    """Whether `A = A*`, to the last bit. Others mostly fail in the first block."""
    return all(
        bool((x[rows, columns] == x[columns, rows].conj().T).all())
        for rows in _blocks(x)
        for columns in _blocks(x[: rows.stop])
    )


def _is_diagonal(x: np.ndarray | Array) -> bool:
    return all(
        bool((x[rows] != 0).sum() == (x.diagonal()[rows] != 0).sum())
        for rows in _blocks(x)
    )


def _tags_of(hermitian: bool, dtype: np.dtype) -> frozenset[object]:
    if not hermitian:
        return frozenset()
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return frozenset({hermitian_tag if is_complex else lx.symmetric_tag})


def _diagonal(
    entries: np.ndarray | Array, tags: frozenset[object]
) -> lx.AbstractLinearOperator:
    operator = lx.DiagonalLinearOperator(jax.device_put(entries))
    # lineax knows that it is symmetric.
    tags -= {lx.symmetric_tag}
    return lx.TaggedLinearOperator(operator, tags) if tags else operator


class SparseOperator(AbstractStructuredOperator):
    """A sparse matrix, BCOO or BCSR: see [`traceax.sparse`][]."""

    matrix: Any
    tags: frozenset[object] = eqx.field(static=True)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)

    def mv(self, vector):
        return self.matrix @ vector

    def as_matrix(self):
        return self.matrix.todense()

    def transpose(self):
        return SparseOperator(self._coordinates().T, lx.transpose_tags(self.tags))

    def conj(self):
        conjugate = eqx.tree_at(lambda x: x.data, self.matrix, self.matrix.data.conj())
        return SparseOperator(conjugate, self.tags)

    def has(self, tag):
        return tag in self.tags

    def diagonal(self):
        matrix = self._coordinates()
        rows, columns = matrix.indices.T
        entries = jnp.where(rows == columns, matrix.data, 0)
        # Entries outside of the matrix fill the arrays up.
        return (
            jnp.zeros(matrix.shape[0], entries.dtype).at[rows].add(entries, mode="drop")
        )

    def rows(self, of):
        matrix, size = self._coordinates(), self.matrix.shape[0]
        if not matrix.unique_indices:
            matrix = matrix.sum_duplicates(nse=matrix.nse, remove_zeros=False)
        rows, columns = matrix.indices.T
        sizes = jnp.abs(of_full_precision(matrix.data))
        diagonal, beside = None, True
        if size == matrix.shape[1]:
            diagonal, beside = of_full_precision(self.diagonal()), rows != columns
        sizes = jnp.where(beside & (columns < matrix.shape[1]), sizes, 0)
        zeros = jnp.zeros(size, sizes.dtype)
        scale = scale_of(zeros.at[rows].max(sizes, mode="drop"))
        squares = (sizes / scale.at[rows].get(mode="clip")) ** 2
        return Rows(diagonal, scale * root(zeros.at[rows].add(squares, mode="drop")))

    def _coordinates(self) -> Any:
        is_bcsr = hasattr(self.matrix, "indptr")
        return self.matrix.to_bcoo() if is_bcsr else self.matrix


def _libraries() -> tuple[Any, Any]:
    """The sparse matrices of JAX and those of SciPy. To import them takes a third of a
    second, which users of other operators do not wait for."""
    return import_module("jax.experimental.sparse"), import_module("scipy.sparse")


def is_sparse(x: Any) -> bool:
    """Whether this is a sparse matrix of SciPy, or a BCOO or BCSR without batches."""
    if not hasattr(x, "shape") or isinstance(x, np.ndarray | jax.Array | np.generic):
        return False
    jax_sparse, scipy_sparse = _libraries()
    if isinstance(x, jax_sparse.BCOO | jax_sparse.BCSR):
        return x.ndim == 2 and x.n_batch == x.n_dense == 0
    return scipy_sparse.issparse(x) and x.ndim == 2


def of_sparse(
    x: Any, dtype: np.dtype, tags: frozenset[object]
) -> lx.AbstractLinearOperator:
    """The operator of a sparse matrix, in `dtype`."""
    jax_sparse, scipy_sparse = _libraries()
    if scipy_sparse.issparse(x):
        # By way of rows, which adds duplicates up.
        entries = scipy_sparse.coo_array(x).astype(dtype).tocsr().tocoo()
        # On a CPU a BCSR takes as long as this for blocks of vectors, and five times as
        # long for one: it finds the rows of its entries anew in each product.
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int32)
        stored = jax.device_put((entries.data, indices))
        matrix = jax_sparse.BCOO(stored, shape=entries.shape, unique_indices=True)
    else:
        matrix = eqx.tree_at(lambda x: x.data, x, x.data.astype(dtype))
        entries = _entries(matrix)
    if entries is not None and x.shape[0] == x.shape[1]:
        rows = entries.tocsr()
        tags |= _tags_of((rows != rows.conj().T).nnz == 0, dtype)
        if (entries.row == entries.col).all():
            return _diagonal(entries.diagonal().astype(dtype), tags)
    return SparseOperator(matrix, tags)


def _entries(x: Any) -> Any:
    """The entries of a BCOO or BCSR as a `scipy.sparse.coo_array`; None if they cannot be
    seen."""
    jax_sparse, scipy_sparse = _libraries()
    if any(_visible(leaf) is None for leaf in jax.tree.leaves(x)):
        return None
    data, *indices = map(np.asarray, jax.device_get(jax.tree.leaves(x)))
    with standard_promotion():
        # SciPy has neither float16 nor bfloat16.
        data = data.astype(jnp.promote_types(data.dtype, jnp.float32))
    if isinstance(x, jax_sparse.BCOO):
        # Entries outside of the matrix fill the arrays up.
        inside = (indices[0] < x.shape).all(axis=1)
        rows, columns = indices[0][inside].T
        return scipy_sparse.coo_array((data[inside], (rows, columns)), shape=x.shape)
    count = indices[1][-1]
    parts = data[:count], indices[0][:count], indices[1]
    return scipy_sparse.csr_array(parts, shape=x.shape).tocoo()
