"""A warning where a call is compiled again and again from the same line."""

import sys
import types
import warnings
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._core.code import FlatFunction
from .._operators.door import EnteredOperator


# The number of programs from one line at which to warn. A second program may be a change
# of settings; a third shows that it happens again and again.
_WARN_AT = 3
# Frames of these packages lie between the user's line and this module.
_PACKAGES = ("traceax", "equinox", "jax", "jaxtyping", "beartype")


class _Programs:
    """Counts programs: in `traced` all that were traced so far, and apart from that the
    compiled programs of each line of the user's code."""

    def __init__(self):
        self.traced = 0
        self._codes: dict[Hashable, set[Hashable]] = {}

    def note(self, name: str, args: PyTree) -> None:
        """Count a program that was compiled for the call `name`. Warn if it is the third
        from the same line whose arguments differ in the code of functions alone."""
        level, frame = 1, sys._getframe(1)
        while frame.f_back is not None and _is_internal(frame):
            level, frame = level + 1, frame.f_back
        shapes, codes = _summary(args)
        line = frame.f_code.co_filename, frame.f_lineno, name, shapes
        earlier = self._codes.setdefault(line, set())
        if codes in earlier or jax.config.jax_disable_jit:  # pyright: ignore
            return
        earlier.add(codes)
        if len(earlier) != _WARN_AT:
            return
        warnings.warn(
            f"`{name}` was compiled {_WARN_AT} times from this line, for functions that "
            "differ in numbers, rules or callbacks alone. A Python number in a function "
            "is a part of its code: close over an array instead, such as "
            "`jnp.asarray(number)`. A callback, or a function with a derivative rule "
            "(`jax.custom_jvp`, `jax.custom_vjp`) that is not defined in a module, is "
            "compared by identity: make it, or the operator, once. Or make both the "
            "operator and the call inside `jax.jit`.",
            stacklevel=level + 1,
        )


programs = _Programs()


def _is_internal(frame: types.FrameType) -> bool:
    """Whether a frame is of a package between the user's code and ours, or of ours."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES


def _summary(args: PyTree) -> tuple[Hashable, Hashable]:
    """What compiled programs of the same call have in common, shapes, dtypes, settings
    and the primitives of functions; and the code of these functions, by identity."""
    has_code = lambda x: isinstance(x, EnteredOperator | FlatFunction)  # noqa: E731
    leaves, treedef = jax.tree.flatten(args, is_leaf=has_code)
    codes = [leaf.code for leaf in leaves if has_code(leaf)]

    def summarise(leaf: Any) -> Hashable:
        if has_code(leaf):
            jaxpr = leaf.code.jaxpr
            avals = tuple(x.aval for x in [*jaxpr.constvars, *jaxpr.invars])
            return avals, tuple(each.primitive.name for each in jaxpr.eqns)
        return (leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf

    return (treedef, tuple(map(summarise, leaves))), tuple(map(id, codes))
