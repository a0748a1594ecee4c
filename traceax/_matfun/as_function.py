"""Plain callables as spectral functions."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, Literal
from jaxtyping import Array, DTypeLike, Scalar

from .._flat import standard_promotion
from .functions import AbstractSpectralFunction


class _Program:
    """A jaxpr, equal to another one that says the same. Two traces of the same code are,
    so that nothing compiles anew for the second one."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.key = _canonical(jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return str(self.jaxpr)


def _canonical(jaxpr: Jaxpr) -> Hashable:
    """Everything that a jaxpr says, with variables as numbers."""
    numbers: dict[Any, int] = {}

    def name(atom):
        if isinstance(atom, Literal):
            return str(atom.aval), np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers)), str(atom.aval)

    def value(x):
        if isinstance(x, ClosedJaxpr):
            return _canonical(x.jaxpr), tuple(map(id, x.consts)), tuple(x.consts)
        if isinstance(x, Jaxpr):
            return _canonical(x)
        if isinstance(x, tuple | list):
            return tuple(map(value, x))
        return x

    heads = tuple(map(name, [*jaxpr.constvars, *jaxpr.invars]))
    body = tuple(
        (
            equation.primitive,
            tuple(map(name, [*equation.invars, *equation.outvars])),
            tuple((key, value(x)) for key, x in sorted(equation.params.items())),
        )
        for equation in jaxpr.eqns
    )
    return heads, body, tuple(map(name, jaxpr.outvars))
