"""Whether a traced function can be linear, as far as its primitives show that.

A function is called affine or nonlinear only where that is certain. Loops, branches,
callbacks, functions with rules of their own and other primitives that are not named here
may be linear, and so may terms and factors that cancel: `f(v) - f(0)`,
`(v . A v) v / (v . v)`, or `|v| A (v / |v|)`.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .jax_interfaces import Jaxpr, JaxprEqn, Literal


class _Kind(enum.IntEnum):
    """How a value depends on the vector. A nonlinear function of what is affine is called
    affine, too: `f(x + v) - f(x)` may be linear, up to rounding."""

    ZERO = enum.auto()
    CONSTANT = enum.auto()
    LINEAR = enum.auto()
    AFFINE = enum.auto()
    NONLINEAR = enum.auto()
    UNKNOWN = enum.auto()


_Z, _C, _L, _A, _N, _U = _Kind

# By the kinds of the terms that are not zero, and of the factors; others are unknown.
_SUM = {(): _Z, (_C,): _C, (_L,): _L, (_C, _L): _A, (_L, _A): _A, (_C, _N): _N}
_SUM |= {(_L, _N): _N}
_PRODUCT = {(_C,): _C, (_C, _L): _L, (_C, _A): _A, (_C, _N): _N, (_L,): _N, (_L, _N): _N}
# By the kind of the argument, for functions that are not linear.
_FUNCTION = {_Z: _C, _C: _C, _L: _N, _A: _A, _N: _N, _U: _U}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CALLS = _names("checkpoint jit pjit remat remat2")
_SUMS = _names("add add_any complex scatter-add sub")
_PRODUCTS = _names("conv_general_dilated div dot_general mul")
_FUNCTIONS = _names(
    """abs cos cosh erf exp exp2 expm1 integer_pow log1p logistic rsqrt sin sinh sqrt
    square tan tanh"""
)
# Linear maps of one operand, or of the entries of several.
_MAPS = _names(
    """broadcast_in_dim concatenate conj convert_element_type copy cumsum dynamic_slice
    dynamic_update_slice expand_dims fft gather imag neg optimization_barrier pad real
    reduce_precision reduce_sum reshape rev scatter select_n sharding_constraint slice
    split squeeze stop_gradient transpose"""
)
# Which operands are values, where others say which entries are meant.
_VALUES = {
    "dynamic_slice": slice(1),
    "dynamic_update_slice": slice(2),
    "gather": slice(1),
    "scatter": slice(0, 3, 2),
    "scatter-add": slice(0, 3, 2),
    "select_n": slice(1, None),
}


def why_not_linear(code: Jaxpr) -> str | None:
    """What makes a function of a vector certainly not linear, in words; or None."""
    for eqn in code.eqns[-1:]:
        if eqn.primitive.name == "concatenate" and eqn.outvars == code.outvars:
            # Of leaves that are joined, one is enough.
            code = code.replace(outvars=eqn.invars)
    causes: dict[_Kind, str] = {}
    found = _results(code, [_L], causes)
    if _N in found:
        return f"`{causes[_N]}` in it is not linear in the vector"
    if _A in found:
        return (
            f"`{causes[_A]}` in it adds a term that does not depend on the vector (where "
            "that is zero, make it inside of the function, by `jnp.zeros`)"
        )
    return None


def _results(
    code: Jaxpr, arguments: Sequence[_Kind], causes: dict[_Kind, str]
) -> list[_Kind]:
    """The kinds of the results, and the first primitive that makes one of each kind."""
    known: dict[Any, _Kind] = dict.fromkeys(code.constvars, _C)
    known |= zip(code.invars, arguments, strict=True)

    def kind(x):
        if isinstance(x, Literal):
            return _Z if x.val == 0 else _C
        return known[x]

    for eqn in code.eqns:
        kinds = [kind(x) for x in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            results = _results(getattr(inner, "jaxpr", inner), kinds, causes)
        else:
            result = _result(eqn, kinds)
            results = [result] * len(eqn.outvars)
            if result not in kinds:
                causes.setdefault(result, eqn.primitive.name)
        known |= zip(eqn.outvars, results, strict=True)
    return [kind(x) for x in code.outvars]


def _result(eqn: JaxprEqn, kinds: Sequence[_Kind]) -> _Kind:
    name = eqn.primitive.name
    values = kinds[_VALUES.get(name, slice(None))]
    otherwise = _U if any(map(_depends, kinds)) else _C
    chosen_by_vector = sum(map(_depends, values)) < sum(map(_depends, kinds))
    dtype = eqn.params.get("new_dtype", jnp.float32)
    if chosen_by_vector or not jnp.issubdtype(dtype, jnp.inexact):
        return otherwise
    nonzero = _sorted(kind for kind in values if kind is not _Z)
    if name in _MAPS and len(nonzero) < 2:
        return nonzero[0] if nonzero else _Z
    if name in _SUMS:
        return _SUM.get(nonzero, _U)
    if name == "div":
        values = [values[0], _FUNCTION[values[1]]]
    if name in _PRODUCTS:
        return _Z if _Z in values else _PRODUCT.get(_sorted(values), _U)
    if name in _FUNCTIONS:
        return _FUNCTION[values[0]]
    return otherwise


def _depends(kind: _Kind) -> bool:
    return kind not in (_Z, _C)


def _sorted(kinds: Iterable[_Kind]) -> tuple[_Kind, ...]:
    return tuple(sorted(set(kinds)))
