"""Checks of the operators that users pass to calls."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import tree_leaves, tree_structure
from jaxtyping import Array, PyTree

from .._core.checks import is_key
from .._core.flat import FlatOperator
from .convert import convert, explain_untraceable, type_name
from .tags import is_complex


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


class Checked(NamedTuple):
    """An operator, and the structures of its inputs and its outputs, which take time to
    compute."""

    operator: lx.AbstractLinearOperator
    inputs: PyTree[jax.ShapeDtypeStruct]
    outputs: PyTree[jax.ShapeDtypeStruct]


def checked_operator(
    operator: Any, *, name: str = "operator", square: bool = True, second: Any = None
) -> Checked:
    """Convert a matrix to an operator. Raise unless it is one, square if so asked, of
    real or of complex vectors. `second` is the argument that follows it, for the error
    message."""
    operator = convert(operator, name=name, second=second)
    for matrix in _matrices(operator):
        if not eqx.is_array_like(matrix):
            raise TypeError(
                f"`{name}` must hold arrays. Found a `lineax.MatrixLinearOperator` of an "
                f"object of type {type_name(matrix)}. Convert that by "
                "`traceax.as_operator(matrix)`."
            )
    with explain_untraceable(name):
        inputs, outputs = operator.in_structure(), operator.out_structure()
    if square:
        _check_square(name, inputs, outputs)
    _check_spaces(name, operator, inputs, outputs)
    return Checked(operator, inputs, outputs)


def _matrices(operator: lx.AbstractLinearOperator) -> list[Any]:
    """The matrices that the operator and its parts store."""
    matrices = [operator.matrix] if isinstance(operator, lx.MatrixLinearOperator) else []
    for part in _parts(operator):
        matrices += _matrices(part)
    return matrices


def check_hermitian(flat: FlatOperator) -> None:
    """Raise unless the operator is tagged as Hermitian."""
    if flat.hermitian:
        return
    is_real = jnp.issubdtype(flat.dtype, jnp.floating)
    tag = "lineax.symmetric_tag" if is_real else "traceax.hermitian_tag"
    raise ValueError(
        "`operator` must be Hermitian, and say so by a tag. Found `operator` without "
        f"one. If it is, say so: `traceax.as_operator(operator, tags={tag})`, or "
        "`lineax.positive_semidefinite_tag` where that holds."
    )
