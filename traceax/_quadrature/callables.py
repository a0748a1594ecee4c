"""Plain callables as spectral functions."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, Literal
from jaxtyping import Array, DTypeLike

from .._core.arithmetic import standard_promotion
from .functions import AbstractSpectralFunction


class _Code:
    """The jaxpr of a callable, equal to any that says the same: so two lambdas with the
    same code share one compiled program."""

    def __init__(self, jaxpr: Jaxpr, function: Callable):
        self.jaxpr = jaxpr
        self._key = _content(jaxpr, _hashable(function))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return str(self.jaxpr)


class _Itself:
    """Something without a hash, equal to itself alone."""

    def __init__(self, x: Any):
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)


def _hashable(x: Any) -> Hashable:
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return x


def _content(jaxpr: Jaxpr, function: Hashable) -> Hashable:
    """The content of a jaxpr, with its variables numbered, to be compared with that of
    others. Derivative rules in it cannot be compared: a jaxpr that has some is equal only
    to that of the same `function`, which is kept alive by that alone."""
    numbers: dict[Any, int] = {}

    def atom(x):
        if isinstance(x, Literal):
            return x.aval, np.asarray(x.val).tobytes()
        return x.aval, numbers.setdefault(x, len(numbers))

    def parameter(x):
        if isinstance(x, ClosedJaxpr):
            return _content(x.jaxpr, function), tuple(map(id, x.consts))
        if isinstance(x, Jaxpr):
            return _content(x, function)
        if isinstance(x, tuple | list):
            return tuple(map(parameter, x))
        return _hashable(x)

    def equation(each):
        parameters = each.params.items()
        if ruled := each.primitive.name.startswith("custom_"):
            parameters = ((k, x) for k, x in parameters if isinstance(x, ClosedJaxpr))
        content = frozenset((name, parameter(x)) for name, x in parameters)
        atoms = tuple(map(atom, [*each.invars, *each.outvars]))
        return each.primitive, content, atoms, function if ruled else None

    inputs = tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars]))
    body = tuple(map(equation, jaxpr.eqns))
    return inputs, body, tuple(map(atom, jaxpr.outvars))


class _Callable(AbstractSpectralFunction):
    """A user's function of one number, traced for real or for complex ones. Arrays that
    it closes over are leaves."""

    arrays: list[Array]
    code: _Code = eqx.field(static=True)
    semidefinite_domain: ClassVar[bool] = False
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        function = jaxpr_as_fun(ClosedJaxpr(self.code.jaxpr, self.arrays))
        dtype = self.code.jaxpr.invars[0].aval.dtype  # pyright: ignore
        (values,) = jax.vmap(function)(_as_dtype(x, dtype))
        return _as_dtype(values, x.dtype)


def _as_dtype(x: Array, dtype: DTypeLike) -> Array:
    """Eigenvalues that are known to be real may come as complex numbers."""
    keep = jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return (x.real if keep else x).astype(dtype)


def as_spectral_function(
    function: Any, dtype: DTypeLike, *, hermitian: bool = True
) -> AbstractSpectralFunction:
    """The function, or a callable traced for an eigenvalue of an operator of `dtype`."""
    if isinstance(function, AbstractSpectralFunction):
        return function
    if isinstance(function, type) or not callable(function):
        is_class = isinstance(function, type)
        found = f"the class {function.__name__}" if is_class else repr(function)
        raise TypeError(
            "`function` must be a `traceax.AbstractSpectralFunction` or a callable of "
            f"the eigenvalues. Found {found}. Pass, for example, `traceax.Log()` or "
            "`jnp.tanh`."
        )
    real = jnp.finfo(dtype).dtype
    if hermitian:
        return _traced(function, real, jnp.floating)
    if real == dtype:
        _traced(function, real, jnp.floating)
    return _traced(function, np.result_type(real, np.complex64), jnp.inexact)


_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


def _traced(function: Callable[[Array], Any], dtype: DTypeLike, kind: Any) -> _Callable:
    try:
        with standard_promotion():
            closed = jax.make_jaxpr(lambda x: jnp.asarray(function(x)))(
                jax.ShapeDtypeStruct((), dtype)
            )
    except _UNTRACEABLE as error:
        raise TypeError(
            f"`function` must be one that JAX can trace. Found {function!r}, which needs "
            "the number that a traced array will have. Use `jnp` in the place of `numpy` "
            "and `math`, and `jnp.where` in the place of `if`."
        ) from error
    (value,) = closed.out_avals
    if value.shape != () or not jnp.issubdtype(value.dtype, kind):
        raise TypeError(
            "`function` must map a real number to a real number. Found that it maps "
            f"an array of shape () and dtype {dtype} to one of shape {value.shape} and "
            f"dtype {value.dtype}."
        )
    return _Callable(
        [jnp.asarray(x) for x in closed.consts], _Code(closed.jaxpr, function)
    )
