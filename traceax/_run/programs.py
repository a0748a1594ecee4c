"""A warning where a call is compiled again and again from the same line."""

import collections
import sys
import warnings
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._core.code import FlatFunction
from .._operators.door import EnteredOperator


# The third time shows that the second was no change of mind.
_MOST = 3
_PACKAGES = ("traceax", "equinox", "jax", "jaxtyping", "beartype")


class _Programs:
    """Counts programs: those `traced` so far, and those that were compiled for calls from
    the same line."""

    def __init__(self):
        self.traced = 0
        self._of_line: collections.Counter[Hashable] = collections.Counter()

    def note(self, name: str, args: PyTree) -> None:
        """Warn after the third program for a call from the same line, if nothing but the
        code of functions can have changed."""
        level, frame = 1, sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
            level, frame = level + 1, frame.f_back
        line = frame.f_code.co_filename, frame.f_lineno, name, _summary(args)
        self._of_line[line] += 1
        if self._of_line[line] != _MOST or jax.config.jax_disable_jit:  # pyright: ignore
            return
        warnings.warn(
            f"`{name}` was compiled {_MOST} times from this line, for operators and "
            "settings that differ in the code of their functions alone. A Python number "
            "in a function is a part of its code: close over an array in its place, such "
            "as `jnp.asarray(number)`. A callback, or a function with a derivative rule "
            "(`jax.custom_jvp`, `jax.custom_vjp`) that is not defined in a module, is "
            "compared by identity: make it, or the operator, once. Or make the operator "
            "and the call inside of `jax.jit`.",
            stacklevel=level + 1,
        )


programs = _Programs()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _summary(args: PyTree) -> Hashable:
    """Shapes, dtypes and settings, without the code of functions."""
    has_code = lambda x: isinstance(x, EnteredOperator | FlatFunction)  # noqa: E731
    leaves, treedef = jax.tree.flatten(args, is_leaf=has_code)

    def one(leaf: Any) -> Hashable:
        if isinstance(leaf, EnteredOperator):
            return leaf.size, leaf.flat.dtype
        if isinstance(leaf, FlatFunction):
            return FlatFunction
        return (leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf

    return treedef, tuple(map(one, leaves))
