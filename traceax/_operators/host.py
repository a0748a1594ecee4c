"""Products made on the host, by a SciPy `LinearOperator` or an object with its interface.

They are a JAX primitive. A callback alone (`jax.pure_callback`) has no transpose, and is
another program each time that it is traced. Under `vmap` the primitive makes one call for
a block of vectors.
"""

from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Inexact

from .._core.code import Itself
from .._core.jax_interfaces import ad, batching, mlir, Primitive, ShapedArray


@runtime_checkable
class HostOperator(Protocol):
    """The interface of a `scipy.sparse.linalg.LinearOperator`, which PyLops has too. The
    methods `rmatvec`, `matmat` and `rmatmat` are used where they exist."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def matvec(self, x: Any, /) -> Any: ...


class HostProduct(eqx.Module):
    """`v -> A v` for an operator A on the host. The operator is compared by identity, so
    that programs are used again where it is the same object."""

    operator: Itself = eqx.field(static=True)

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        return _product.bind(vector, operator=self.operator, transposed=False)


def _with_blocks(operator: HostOperator) -> Any:
    """The operator, with products with a block."""
    # SciPy would not use the `matmat` of an operator of PyLops.
    if hasattr(operator, "matmat") and hasattr(operator, "rmatmat"):
        return operator
    return import_module("scipy.sparse.linalg").aslinearoperator(operator)


def _multiply(operator: HostOperator, vectors: Any, transposed: bool) -> np.ndarray:
    """The products of A, or of its transpose, with the rows of an array."""
    # JAX called inside of a callback may wait forever: this is NumPy alone.
    vectors = np.asarray(vectors)
    linear = _with_blocks(operator)
    size = operator.shape[0 if transposed else 1]
    # In the precision of the operator, also where JAX has float32 alone.
    dtype = np.result_type(np.dtype(operator.dtype), vectors.dtype)
    columns = vectors.reshape(-1, size).T.astype(dtype)
    if transposed:  # A^T u = conj(A* conj(u))
        images = linear.rmatmat(columns.conj()).conj()
    else:
        images = linear.matmat(columns)
    if np.iscomplexobj(images) and not np.iscomplexobj(vectors):
        raise TypeError(
            "The products of an operator on the host must have the dtype that it "
            f"declares. Found {images.dtype} from an operator of dtype {operator.dtype}."
        )
    return np.asarray(images).T.reshape(*vectors.shape[:-1], -1).astype(vectors.dtype)


def _on_host(vectors: Array, *, operator: Itself, transposed: bool) -> Array:
    like = _abstract(vectors, operator=operator, transposed=transposed)
    return jax.pure_callback(
        lambda vectors: _multiply(operator.value, vectors, transposed),
        jax.ShapeDtypeStruct(like.shape, like.dtype),
        vectors,
    )


def _abstract(vectors: Any, *, operator: Itself, transposed: bool) -> ShapedArray:
    size = operator.value.shape[1 if transposed else 0]
    return ShapedArray((*vectors.shape[:-1], size), vectors.dtype)


def _transpose(
    cotangents: Any, vectors: Any, *, operator: Itself, transposed: bool
) -> list[Any]:
    if isinstance(cotangents, ad.Zero):
        return [ad.Zero(vectors.aval)]
    if not transposed:
        # One product shows whether there is an adjoint, before anything is compiled.
        zeros = np.zeros(operator.value.shape[0], operator.value.dtype)
        _with_blocks(operator.value).rmatvec(zeros)
    return [_product.bind(cotangents, operator=operator, transposed=not transposed)]


def _batch(vectors: list[Array], axes: list[int], **parameters: Any) -> tuple[Array, int]:
    (block,), (axis,) = vectors, axes
    block = batching.bdim_at_front(block, axis, block.shape[axis])
    return _product.bind(block, **parameters), 0


_product = Primitive("host_product")
_product.def_abstract_eval(_abstract)
_product.def_impl(_on_host)
ad.deflinear2(_product, _transpose)
batching.primitive_batchers[_product] = _batch
mlir.register_lowering(_product, mlir.lower_fun(_on_host, multiple_results=False))
