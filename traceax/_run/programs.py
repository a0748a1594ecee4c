"""A warning if the same line of user code compiles a call again and again."""

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
    """The number of programs that were traced so far (`traced`), and the compiled
    programs of each line of user code. Hashes stand for both: the settings of a call may
    have functions of the user, which would keep alive all that they close over."""

    def __init__(self):
        self.traced = 0
        self._codes: dict[int, set[int]] = {}

    def note(self, name: str, args: PyTree) -> None:
        """Count a program that was compiled for the call `name`. Warn if it is the third
        from the same line whose arguments differ only in the code of functions."""
        level, frame = 1, sys._getframe(1)
        while frame.f_back is not None and _is_internal(frame):
            level, frame = level + 1, frame.f_back
        shapes, codes = map(hash, _summary(args))
        line = hash((frame.f_code.co_filename, frame.f_lineno, name, shapes))
        earlier_codes = self._codes.setdefault(line, set())
        # With `jax_disable_jit` each call is traced, but none is compiled.
        if codes in earlier_codes or jax.config.jax_disable_jit:  # pyright: ignore
            return
        earlier_codes.add(codes)
        # Not `>=`: one warning for each line is enough.
        if len(earlier_codes) != _WARN_AT:
            return
        warnings.warn(
            f"`{name}` was compiled {_WARN_AT} times from this line, for functions that "
            "differ only in numbers, rules or callbacks. A Python number in a function "
            "is a part of its code: close over an array instead, such as "
            "`jnp.asarray(number)`. A callback, or a function with a derivative rule "
            "(`jax.custom_jvp`, `jax.custom_vjp`) that is not defined in a module, is "
            "compared by identity: make it, or the operator, once. Or make both the "
            "operator and the call inside `jax.jit`.",
            stacklevel=level + 1,
        )


programs = _Programs()


def _is_internal(frame: types.FrameType) -> bool:
    """Whether a frame belongs to traceax, or to a package between it and user code."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES


def _summary(args: PyTree) -> tuple[Hashable, Hashable]:
    """Two keys of the arguments of a call. The first has shapes, dtypes, settings and the
    primitives of functions: if it differs, compiling again is expected. The second has
    the code of the functions, by identity."""
    has_code = lambda x: isinstance(x, EnteredOperator | FlatFunction)  # noqa: E731
    leaves, treedef = jax.tree.flatten(args, is_leaf=has_code)
    codes = [leaf.code for leaf in leaves if has_code(leaf)]

    def summarise(leaf: Any) -> Hashable:
        if has_code(leaf):
            jaxpr = leaf.code.jaxpr
            avals = tuple(x.aval for x in [*jaxpr.constvars, *jaxpr.invars])
            return avals, tuple(equation.primitive.name for equation in jaxpr.eqns)
        return (leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf

    return (treedef, tuple(map(summarise, leaves))), tuple(map(id, codes))
