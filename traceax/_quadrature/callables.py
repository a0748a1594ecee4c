"""Plain callables as spectral functions."""

import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from .._core.arithmetic import standard_promotion
from .._core.code import FlatFunction
from .base import AbstractSpectralFunction
from .function_tree import FunctionTree


class _Callable(AbstractSpectralFunction):
    """A user's function of one number, traced for a real or for a complex number. Nothing
    is known of its domain, so it counts as defined on all reals, without a bracket."""

    traced: FlatFunction
    semidefinite_domain: ClassVar[bool] = False
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return "a function"

    def __call__(self, x):
        dtype = self.traced.code.jaxpr.invars[0].aval.dtype  # pyright: ignore
        return _as_dtype(jax.vmap(self.traced)(_as_dtype(x, dtype)), x.dtype)


def _as_dtype(x: Array, dtype: DTypeLike) -> Array:
    """The numbers in another dtype. Eigenvalues that are real may come as complex
    numbers; they lose their imaginary part without the warning of a plain cast."""
    drop = jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return (x.real if drop else x).astype(dtype)


def as_spectral_function(
    function: Any, dtype: DTypeLike, *, hermitian: bool = True
) -> AbstractSpectralFunction:
    """The function, or a callable traced for an eigenvalue of an operator of `dtype`."""
    if isinstance(function, AbstractSpectralFunction):
        return function
    if isinstance(function, type) or not callable(function):
        is_class = isinstance(function, type)
        description = f"the class {function.__name__}" if is_class else repr(function)
        raise TypeError(
            "`function` must be a `traceax.AbstractSpectralFunction` or a callable of "
            f"the eigenvalues. Found {description}. Pass, for example, `traceax.Log()` "
            "or `jnp.tanh`."
        )
    real = jnp.finfo(dtype).dtype
    if hermitian:
        return _trace_callable(function, real, jnp.floating)
    if real == dtype:
        # Values of a real operator are real, so a function that is not real on real
        # numbers is an error here, although its eigenvalues may be complex.
        _trace_callable(function, real, jnp.floating)
    return _trace_callable(function, np.result_type(real, np.complex64), jnp.inexact)


def as_functions(
    function: Any, dtype: DTypeLike, *, hermitian: bool = True
) -> AbstractSpectralFunction | FunctionTree:
    """`as_spectral_function` of a function, or of all functions of a PyTree."""
    if isinstance(function, type) or callable(function) or not jax.tree.leaves(function):
        return as_spectral_function(function, dtype, hermitian=hermitian)
    leaves, treedef = jax.tree.flatten(function, is_leaf=callable)
    convert = ft.partial(as_spectral_function, dtype=dtype, hermitian=hermitian)
    members = tuple(map(convert, leaves))
    if len({member.of_singular_values for member in members}) > 1:
        raise ValueError(
            "`function` must have functions of eigenvalues only, or of singular values "
            f"only. Found {[type(x).__name__ for x in members]}. Make two calls."
        )
    return FunctionTree(members, treedef)


# What JAX raises if a function needs the value of a traced number: as the condition of an
# `if`, or as an argument of a function of `numpy` or `math`.
_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


def _trace_callable(
    function: Callable[[Array], Any], dtype: DTypeLike, kind: Any
) -> _Callable:
    """The function, traced for a number of `dtype`; its value must be of this `kind`."""
    try:
        with standard_promotion():
            closed = jax.make_jaxpr(lambda x: jnp.asarray(function(x)))(
                jax.ShapeDtypeStruct((), dtype)
            )
    except _UNTRACEABLE as error:
        raise TypeError(
            f"`function` must be one that JAX can trace. Found {function!r}, which needs "
            "the value of a traced number. Use `jnp` instead of `numpy` and `math`, and "
            "`jnp.where` instead of `if`."
        ) from error
    (value,) = closed.out_avals
    if value.shape != () or not jnp.issubdtype(value.dtype, kind):
        raise TypeError(
            "`function` must map a real number to a real number. Found that it maps "
            f"an array of shape () and dtype {dtype} to one of shape {value.shape} and "
            f"dtype {value.dtype}. Return a scalar of floating-point dtype; for several "
            "functions pass a PyTree of them, such as a dictionary."
        )
    return _Callable(FlatFunction.of_closed(closed))
