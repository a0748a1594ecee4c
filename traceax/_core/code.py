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
    object as long as any program uses it, so objects can be compared and hashed by
    identity. JAX does so in each call, to look up the compiled program."""

    def __init__(self, jaxpr: Jaxpr, content: Hashable):
        self.jaxpr = jaxpr
        self._content = content

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> "Code":
        """The object for the content of `jaxpr`."""
        known = _by_jaxpr.get(jaxpr)
        code = known and known()
        if code is None:
            content = _content(jaxpr)
            code = _by_content.get(content)
            if code is None:
                code = _by_content[content] = cls(jaxpr, content)
            _by_jaxpr[jaxpr] = weakref.ref(code)
        return code

    def __repr__(self) -> str:
        return str(self.jaxpr)


# The references are weak, so that code that no program uses any more is freed. The second
# dictionary avoids computing the content of a jaxpr again that JAX returns from its cache
# of traces. Its values are weak too: a code holds its jaxpr, which is the key.
_by_content: weakref.WeakValueDictionary[Hashable, Code] = weakref.WeakValueDictionary()
_by_jaxpr: weakref.WeakKeyDictionary[Jaxpr, weakref.ref[Code]] = (
    weakref.WeakKeyDictionary()
)


class Itself:
    """A wrapper that is equal only for the same object. It keeps that object alive, since
    the id of a freed object may be used again."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def hashable(x: Any) -> Hashable:
    """`x` itself or, if it has no hash, a wrapper that is compared by identity."""
    try:
        hash(x)
    except TypeError:
        return Itself(x)
    return x


def _content(jaxpr: Jaxpr) -> Hashable:
    """The content of a jaxpr: its inputs, equations and outputs. Variables are numbered
    in the order of their first occurrence, so that their identities do not matter."""
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if isinstance(x, Literal):
            # Bytes, because -0.0 equals 0.0, and NaN does not equal itself.
            return x.aval, np.asarray(x.val).tobytes()
        return x.aval, numbers.setdefault(x, len(numbers))

    def parameter(x: Any) -> Hashable:
        if isinstance(x, ClosedJaxpr):
            # Constants are a part of the program here, and arrays have no hash.
            return _content(x.jaxpr), tuple(map(Itself, x.consts))
        if isinstance(x, Jaxpr):
            return _content(x)
        if isinstance(x, tuple | list):
            return tuple(map(parameter, x))
        return hashable(x)

    def equation(eqn: JaxprEqn) -> Hashable:
        parameters, rule = eqn.params, None
        if has_derivative_rule(eqn):
            # Each tracing wraps the rules in new objects, which cannot be compared. They
            # are identified by the function that owns them, if that is certain.
            owner = owner_of_rule(eqn)
            rule = Itself(eqn) if owner is None else tuple(map(Itself, owner))
            parameters = {"call_jaxpr": eqn.params["call_jaxpr"]}
        content = frozenset((name, parameter(x)) for name, x in parameters.items())
        atoms = tuple(map(atom, [*eqn.invars, *eqn.outvars]))
        # The context has the mesh and the modes for which the equation was traced.
        return eqn.primitive, content, atoms, rule, eqn.ctx

    # In this order: `atom` numbers the variables as it meets them.
    inputs = tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars]))
    body = tuple(map(equation, jaxpr.eqns))
    return inputs, body, tuple(map(atom, jaxpr.outvars))


class FlatFunction(eqx.Module):
    """A traced function of one array. The arrays that it closes over are leaves, so that
    it can be differentiated with respect to them, and batches and devices can split
    them."""

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
        """Take over a function that is already traced."""
        return cls([jnp.asarray(x) for x in closed.consts], Code.of(closed.jaxpr))

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The code together with the arrays."""
        return ClosedJaxpr(self.code.jaxpr, self.arrays)

    def __call__(self, x: Array) -> Array:
        (out,) = jaxpr_as_fun(self.jaxpr)(x)
        return out
