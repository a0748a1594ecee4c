"""Checks of the operators that users pass to calls."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import tree_leaves, tree_structure
from jaxtyping import Array, PyTree

from .._core.checks import is_key
from .tags import is_complex, is_hermitian


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _check_square(name: str, inputs: PyTree, outputs: PyTree) -> None:
    """Raise unless inputs and outputs have the same structure."""
    # Only the shapes: leaves may differ in dtype, as from float16 in to float32 out.
    shapes_in = [leaf.shape for leaf in tree_leaves(inputs)]
    shapes_out = [leaf.shape for leaf in tree_leaves(outputs)]
    if tree_structure(inputs) == tree_structure(outputs) and shapes_in == shapes_out:
        return
    size_in, size_out = sum(map(math.prod, shapes_in)), sum(map(math.prod, shapes_out))
    fix = (
        "For a real rectangular operator J, `J.T @ J` is square; "
        "`traceax.schatten_norm` takes J itself."
    )
    if size_in == size_out:
        fix = "The result of `operator.mv` must have the structure of the vector."
    raise ValueError(
        f"`{name}` must be square, with the same structure in and out. Found "
        f"out_size={size_out}, in_size={size_in}, with in_structure()={inputs} and "
        f"out_structure()={outputs}. {fix}"
    )


def _check_spaces(
    name: str, operator: lx.AbstractLinearOperator, inputs: PyTree, outputs: PyTree
) -> None:
    """Raise unless the operator maps real vectors to real ones, or complex vectors to
    complex ones."""
    for structure in inputs, outputs:
        if all(leaf.size == 0 for leaf in tree_leaves(structure)):
            raise ValueError(f"`{name}` must have at least one row. Found size 0.")
    leaves = [*tree_leaves(inputs), *tree_leaves(outputs), *_scalars(operator)]
    dtypes = {leaf.dtype for leaf in leaves}
    kinds = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes}
    if len(kinds) > 1 or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        raise TypeError(
            f"`{name}` must map real vectors to real ones or complex vectors to "
            f"complex ones. Found the dtypes {sorted(map(str, dtypes))} in its "
            "in_structure(), out_structure() and factors. Cast the operator's arrays and "
            "its input structure to one floating or complex dtype."
        )


def _scalars(operator: lx.AbstractLinearOperator) -> list[Array]:
    """Complex factors of real operators, which the structures of lineax do not show."""
    scalars = []
    multiple = isinstance(operator, lx.MulLinearOperator | lx.DivLinearOperator)
    if multiple and jnp.iscomplexobj(operator.scalar):
        scalars += [] if is_complex(operator.operator) else [operator.scalar]
    for part in _parts(operator):
        scalars += _scalars(part)
    return scalars


def _parts(operator: lx.AbstractLinearOperator) -> list[lx.AbstractLinearOperator]:
    """The operators that an operator is composed of; lineax calls them by these names."""
    parts = [getattr(operator, x, None) for x in ("operator", "operator1", "operator2")]
    return [part for part in parts if isinstance(part, lx.AbstractLinearOperator)]


def operator_first(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a call with an error that explains the order of its arguments to callers
    who use another order, as in `trace(key, operator, k, estimator)`."""

    @ft.wraps(fn)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 2 or (args and is_key(args[0])):
            types = ", ".join(type(each).__name__ for each in args)
            raise TypeError(
                f"`traceax.{fn.__name__}` takes the operator first and all but the "
                f"estimator by name. Found positional arguments of the types {types}. "
                f"Call `traceax.{fn.__name__}(operator, estimator, k=k, key=key)`."
            )
        return fn(*args, **kwargs)

    return checked


# The errors that JAX raises where a function needs the values of a traced array.
_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


_ON_HOST = (
    "Wrap a product that is made outside of JAX as `lineax.FunctionLinearOperator("
    "lambda v: jax.pure_callback(lambda v: (matrix @ np.asarray(v)).astype(v.dtype), v, "
    "v, vmap_method='sequential'), jax.ShapeDtypeStruct((n,), dtype))`. See the guide "
    '"Products made on the host".'
)


def check_is_operator(
    operator: Any, *, name: str = "operator", square: bool = True, second: Any = None
) -> tuple[PyTree, PyTree]:
    """Raise unless `operator` is a lineax operator, square if so asked, of real or of
    complex vectors. `second` is the argument that follows it, for the error message.
    Returns the structures of its inputs and its outputs, which take time to compute."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        fix = _how_to_wrap(operator)
        if isinstance(second, lx.AbstractLinearOperator):
            fix = "The operator comes first: exchange it and the argument before it."
        raise TypeError(
            f"`{name}` must be a `lineax.AbstractLinearOperator`. Found an object of "
            f"type {_type_name(operator)}. {fix}"
        )
    for matrix in _matrices(operator):
        if not eqx.is_array_like(matrix) and hasattr(matrix, "__matmul__"):
            raise TypeError(
                f"`{name}` must hold arrays. Found a `lineax.MatrixLinearOperator` of an "
                f"object of type {_type_name(matrix)}. {_how_to_wrap(matrix)}"
            )
    try:
        inputs, outputs = operator.in_structure(), operator.out_structure()
    except _UNTRACEABLE as error:
        raise TypeError(
            f"The product of `{name}` must be one that JAX can trace. Found a function "
            "that needs the values of traced arrays. Use `jnp` in the place of `numpy` "
            f"and `math`. {_ON_HOST}"
        ) from error
    if square:
        _check_square(name, inputs, outputs)
    _check_spaces(name, operator, inputs, outputs)
    return inputs, outputs


def _type_name(x: Any) -> str:
    """The name of the type of `x`, with its module, since other libraries have classes
    with the names of those of lineax."""
    kind = type(x)
    plain = kind.__module__ == "builtins" or eqx.is_array_like(x)
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _how_to_wrap(x: Any) -> str:
    """How to make an operator from an object that is none, for error messages."""
    function = "`lineax.FunctionLinearOperator({}, jax.ShapeDtypeStruct((n,), dtype))`"
    if eqx.is_array_like(x):
        return "Wrap a matrix as `lineax.MatrixLinearOperator(matrix)`."
    if isinstance(x, list | tuple):
        return "Wrap a matrix as `lineax.MatrixLinearOperator(jnp.asarray(matrix))`."
    if type(x).__module__.startswith("jax."):
        product = function.format("lambda v: matrix @ v")
        return f"Wrap the product of a sparse matrix as {product}."
    if hasattr(x, "__matmul__"):
        return _ON_HOST
    if callable(x):
        return f"Wrap a function `v -> A v` as {function.format('function')}."
    return (
        f"Wrap its product as {function.format('function')}, by a callback if JAX cannot "
        "trace it."
    )


def _matrices(operator: lx.AbstractLinearOperator) -> list[Any]:
    """The matrices that the operator and its parts store."""
    matrices = [operator.matrix] if isinstance(operator, lx.MatrixLinearOperator) else []
    for part in _parts(operator):
        matrices += _matrices(part)
    return matrices


def check_hermitian(operator: lx.AbstractLinearOperator) -> None:
    """Raise unless the operator is tagged as Hermitian."""
    if is_hermitian(operator):
        return
    tag = "traceax.hermitian_tag" if is_complex(operator) else "lineax.symmetric_tag"
    raise ValueError(
        "`operator` must be Hermitian, and say so by a tag. Found `operator` of type "
        f"{type(operator).__name__} without one. If it is, wrap it: "
        f"`lineax.TaggedLinearOperator(operator, {tag})`, or "
        "`lineax.positive_semidefinite_tag` where that holds."
    )
