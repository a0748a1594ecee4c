"""A test of whether a traced function can be linear, by the primitives that it consists
of.

Each value of the function depends on the vector in a way, its kind: zero, constant,
linear, affine, nonlinear or unknown. The kinds of the results follow from those of the
arguments, primitive by primitive. A function is called affine or nonlinear only where
that is certain. Loops, branches, callbacks, functions with derivative rules of their own
and all primitives that are not named here may be linear. So may terms and factors that
cancel: `f(v) - f(0)`, `(v . A v) v / (v . v)`, or `|v| A (v / |v|)`.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .jax_interfaces import Jaxpr, JaxprEqn, Literal


class _Kind(enum.IntEnum):
    """How a value depends on the vector. A nonlinear function of an affine value is
    called affine too, since `f(x + v) - f(x)` may be linear up to rounding."""

    ZERO = enum.auto()
    CONSTANT = enum.auto()
    LINEAR = enum.auto()
    AFFINE = enum.auto()
    NONLINEAR = enum.auto()
    UNKNOWN = enum.auto()


_Z, _C, _L, _A, _N, _U = _Kind

# The kind of a sum, by the kinds of its nonzero terms, and the kind of a product, by the
# kinds of its factors, each named once, in the order of `_Kind`. Other combinations are
# unknown: two nonlinear terms or factors, for example, may cancel.
_SUM = {(): _Z, (_C,): _C, (_L,): _L, (_C, _L): _A, (_L, _A): _A, (_C, _N): _N}
_SUM |= {(_L, _N): _N}
_PRODUCT = {(_C,): _C, (_C, _L): _L, (_C, _A): _A, (_C, _N): _N, (_L,): _N, (_L, _N): _N}
# The kind of a nonlinear function, by the kind of its argument.
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
# Linear maps of one operand, or of the entries of several. `real`, `imag` and `conj` are
# linear over the reals only; they count as linear, since they may also cancel.
_MAPS = _names(
    """broadcast_in_dim concatenate conj convert_element_type copy cumsum dynamic_slice
    dynamic_update_slice expand_dims fft gather imag neg optimization_barrier pad real
    reduce_precision reduce_sum reshape rev scatter select_n sharding_constraint slice
    split squeeze stop_gradient transpose"""
)
# Which operands are values, for primitives whose other operands are indices or masks.
_VALUES = {
    "dynamic_slice": slice(1),
    "dynamic_update_slice": slice(2),
    "gather": slice(1),
    "scatter": slice(0, 3, 2),
    "scatter-add": slice(0, 3, 2),
    "select_n": slice(1, None),
}


def why_not_linear(code: Jaxpr) -> str | None:
    """The reason why a function of a vector cannot be linear, in words; None if it may
    be."""
    for eqn in code.eqns[-1:]:
        if eqn.primitive.name == "concatenate" and eqn.outvars == code.outvars:
            # A PyTree of results is joined to one vector. One leaf that is certainly not
            # linear is enough, whatever the kinds of the others.
            code = code.replace(outvars=eqn.invars)
    causes: dict[_Kind, str] = {}
    kinds = _kinds_of_results(code, [_L], causes)
    if _N in kinds:
        return f"`{causes[_N]}` in it is not linear in the vector"
    if _A in kinds:
        return (
            f"`{causes[_A]}` in it adds a term that does not depend on the vector (where "
            "that is zero, make it inside of the function, by `jnp.zeros`)"
        )
    return None


def _kinds_of_results(
    code: Jaxpr, arguments: Sequence[_Kind], causes: dict[_Kind, str]
) -> list[_Kind]:
    """The kinds of the results, by the kinds of the arguments. For each kind the name of
    the first primitive with such a result is put into `causes`."""
    kind_of: dict[Any, _Kind] = dict.fromkeys(code.constvars, _C)
    kind_of |= zip(code.invars, arguments, strict=True)

    def kind(x):
        if isinstance(x, Literal):
            return _Z if x.val == 0 else _C
        return kind_of[x]

    for eqn in code.eqns:
        kinds = [kind(x) for x in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            # Some calls hold a closed jaxpr, others an open one.
            results = _kinds_of_results(getattr(inner, "jaxpr", inner), kinds, causes)
        else:
            result = _kind_of_result(eqn, kinds)
            results = [result] * len(eqn.outvars)
            if result not in kinds:
                causes.setdefault(result, eqn.primitive.name)
        kind_of |= zip(eqn.outvars, results, strict=True)
    return [kind(x) for x in code.outvars]


def _kind_of_result(eqn: JaxprEqn, kinds: Sequence[_Kind]) -> _Kind:
    """The kind of the results of a primitive, by the kinds of its operands."""
    name = eqn.primitive.name
    values = kinds[_VALUES.get(name, slice(None))]
    otherwise = _U if any(map(_depends, kinds)) else _C
    # An index or a mask that depends on the vector makes any result possible, and so does
    # rounding to integers.
    chosen_by_vector = sum(map(_depends, values)) < sum(map(_depends, kinds))
    dtype = eqn.params.get("new_dtype", jnp.float32)
    if chosen_by_vector or not jnp.issubdtype(dtype, jnp.inexact):
        return otherwise
    nonzero = _sorted(kind for kind in values if kind is not _Z)
    if name in _MAPS and len(nonzero) < 2:
        return nonzero[0] if nonzero else _Z
    if name in _SUMS:
        return _SUM.get(nonzero, _U)
    if name == "div":  # the product with a reciprocal, which is not linear
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
