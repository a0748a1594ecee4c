"""Traced code that is compared by its content.

JAX compares the code of functions by the identity of Python objects: a lambda that is
created anew in each pass of a loop is compiled in each pass. Here two functions are equal
if tracing them gives the same equations between arrays of the same shapes and dtypes.
Arrays that they close over are arguments of the compiled program, and so are not part of
the code.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from .jax_interfaces import (
    ClosedJaxpr,
    has_derivative_rule,
    Jaxpr,
    jaxpr_as_fun,
    JaxprEqn,
    Literal,
    owner_of_rule,
)


class Code:
    """A jaxpr that is compared by its content. All jaxprs with the same content share one
    object, as long as any program uses it. So it can be compared and hashed by identity,
    which takes no time where JAX looks up compiled programs."""

    def __init__(self, jaxpr: Jaxpr, content: Hashable):
        self.jaxpr = jaxpr
        self._content = content

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> "Code":
        """The object for the content of `jaxpr`."""
        code = _by_jaxpr.get(jaxpr)
        if code is None:
            content = _content(jaxpr)
            code = _by_content.get(content)
            if code is None:
                code = _by_content[content] = cls(jaxpr, content)
            _by_jaxpr[jaxpr] = code
        return code

    def __repr__(self) -> str:
        return str(self.jaxpr)


# Weak references: code that no program uses any more is freed. The second dictionary
# saves computing the content again for a jaxpr that JAX returns from its cache of traces.
_by_content: weakref.WeakValueDictionary[Hashable, Code] = weakref.WeakValueDictionary()
_by_jaxpr: weakref.WeakKeyDictionary[Jaxpr, Code] = weakref.WeakKeyDictionary()


class _Itself:
    """A wrapper that is equal only for the same object. It keeps that object alive, since
    the id of a freed object may be used again."""

    def __init__(self, x: Any):
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)


def hashable(x: Any) -> Hashable:
    """`x` itself or, if it has no hash, a wrapper that is compared by identity."""
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return x


def _content(jaxpr: Jaxpr) -> Hashable:
    """The content of a jaxpr, with its variables numbered in the order of their first
    occurrence, so that their identities do not matter."""
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if isinstance(x, Literal):
            # By bytes: -0.0 equals 0.0, and NaN does not equal itself.
            return x.aval, np.asarray(x.val).tobytes()
        return x.aval, numbers.setdefault(x, len(numbers))

    def parameter(x: Any) -> Hashable:
        if isinstance(x, ClosedJaxpr):
            return _content(x.jaxpr), tuple(map(_Itself, x.consts))
        if isinstance(x, Jaxpr):
            return _content(x)
        if isinstance(x, tuple | list):
            return tuple(map(parameter, x))
        return hashable(x)

    def equation(each: JaxprEqn) -> Hashable:
        parameters, rule = each.params, None
        if has_derivative_rule(each):
            # Each tracing wraps the rules in new objects, which tell nothing. They are
            # identified by the function that owns them, where that is certain.
            owner = owner_of_rule(each)
            rule = _Itself(each) if owner is None else tuple(map(_Itself, owner))
            parameters = {"call_jaxpr": each.params["call_jaxpr"]}
        content = frozenset((name, parameter(x)) for name, x in parameters.items())
        atoms = tuple(map(atom, [*each.invars, *each.outvars]))
        return each.primitive, content, atoms, rule, each.ctx

    inputs = tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars]))
    body = tuple(map(equation, jaxpr.eqns))
    return inputs, body, tuple(map(atom, jaxpr.outvars))


class FlatFunction(eqx.Module):
    """A traced function of one array. Arrays that it closes over are leaves, so that
    derivatives with respect to them are seen, and batches and devices can split them."""

    arrays: list[Array]
    code: Code = eqx.field(static=True)

    @classmethod
    def of(
        cls, fn: Callable[[Array], Array], shape: tuple[int, ...], dtype: DTypeLike
    ) -> "FlatFunction":
        """Trace `fn` for an array of this shape and dtype."""
        return cls.of_closed(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, dtype)))

    @classmethod
    def of_closed(cls, closed: ClosedJaxpr) -> "FlatFunction":
        return cls([jnp.asarray(x) for x in closed.consts], Code.of(closed.jaxpr))

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return ClosedJaxpr(self.code.jaxpr, self.arrays)

    def __call__(self, x: Array) -> Array:
        (out,) = jaxpr_as_fun(self.jaxpr)(x)
        return out
