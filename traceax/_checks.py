"""What calls check of their arguments before anything is traced."""

import operator as _builtin
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer

from ._flat import check_square, dtypes, hermitian_tag


def check_operator(operator: Any) -> None:
    if isinstance(operator, lx.AbstractLinearOperator):
        return check_square(operator)
    if eqx.is_array_like(operator):
        fix = "Wrap a matrix as `lineax.MatrixLinearOperator(matrix)`."
    elif callable(operator):
        fix = (
            "Wrap a function `v -> A v` as `lineax.FunctionLinearOperator(function, "
            "jax.ShapeDtypeStruct((n,), dtype))`."
        )
    else:
        fix = "See the operators of lineax."
    raise TypeError(
        "`operator` must be a `lineax.AbstractLinearOperator`. Found an object of type "
        f"{type(operator).__name__}. {fix}"
    )


def check_hermitian(operator: lx.AbstractLinearOperator) -> None:
    """Raise unless the tags say so; lineax has no tag for complex Hermitian operators."""
    is_complex = jnp.issubdtype(dtypes(operator)[0], jnp.complexfloating)
    if lx.is_positive_semidefinite(operator) or lx.is_negative_semidefinite(operator):
        return
    if hermitian_tag in getattr(operator, "tags", ()):
        return
    if not is_complex and lx.is_symmetric(operator):
        return
    tag = "traceax.hermitian_tag" if is_complex else "lineax.symmetric_tag"
    raise ValueError(
        "`operator` must be Hermitian, and say so by a tag. Found `operator` of type "
        f"{type(operator).__name__} without one. If it is, wrap it: "
        f"`lineax.TaggedLinearOperator(operator, {tag})`, or "
        "`lineax.positive_semidefinite_tag` where that holds."
    )


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        is_class = isinstance(value, type)
        found = f"the class {value.__name__}" if is_class else repr(value)
        raise TypeError(
            f"`{name}` must be an instance of `traceax.{kind.__name__}`. Found {found}. "
            f"Pass, for example, `traceax.{example}`."
        )


def check_positive(name: str, value: Any) -> int:
    """A Python integer, 1 or more, on which array shapes depend."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` must be a Python integer, because array shapes depend on it. "
            f"Found a traced value, {value}. Mark it static: `jax.jit(f, "
            f"static_argnames='{name}')`, or use `equinox.filter_jit`, which does so for "
            "Python integers. If the budget depends on the data, use `traceax.Adaptive`."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"`{name}` must be an integer. Found {value!r} of type "
            f"{type(value).__name__}. Round it, for example `int({value!r})`."
        )
    value = _builtin.index(value)
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1. Found {value}.")
    return value


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Found {value!r}.")


def check_window(window: Any) -> None:
    if window is not None and (type(window) is not int or window < 0):
        raise ValueError(
            "`window` must be a Python integer, 0 or more, or None for all basis "
            f"vectors. Found {window!r}."
        )


def check_key(key: Any) -> None:
    if key is None:
        return
    typed = eqx.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and key.shape == ():
        return
    if eqx.is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1:
        return
    shape = f" of shape {key.shape}" if eqx.is_array(key) else ""
    raise TypeError(
        "`key` must be one JAX PRNG key. Found an object of type "
        f"{type(key).__name__}{shape}. Pass, for example, `jax.random.key(0)`; for "
        "several keys use `jax.vmap`."
    )
