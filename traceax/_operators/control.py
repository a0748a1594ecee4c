"""The argument `control`: an operator like the one of the call, and its known answer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from .._core.jax_interfaces import Tracer
from .diagonal import diagonal_cost
from .door import enter, EnteredOperator
from .stacked import stack_operators
from .tags import is_hermitian


_EXAMPLE = "Pass `control=(B, known)`"


class Controlled(NamedTuple):
    """An operator A stacked above a control B.

    - `entered`: the stack.
    - `parts`: A and B.
    - `known`: the known answer of B as it was passed; None where B came alone.
    """

    entered: EnteredOperator
    parts: tuple[lx.AbstractLinearOperator, ...]
    known: Any

    @classmethod
    def of(cls, operator: Any, control: Any) -> "Controlled":
        """Check the two operators and trace them."""
        other, known = control, None
        if isinstance(control, tuple):
            if len(control) != 2:
                raise ValueError(
                    "`control` must be a pair of an operator and its known answer. Found "
                    f"a tuple of length {len(control)}. {_EXAMPLE}."
                )
            other, known = control
            if known is None:
                raise ValueError(
                    "`control` must have a known answer. Found None. Pass the number, or "
                    "leave out the pair where the structure of the control gives it: "
                    "`control=B`."
                )
        stack, parts = stack_operators({"operator": operator, "control": other})
        return cls(enter(stack, square=False), parts, known)

    @property
    def hermitian(self) -> bool:
        return all(map(is_hermitian, self.parts))

    @property
    def diagonal(self) -> Inexact[Array, " n"]:
        """The diagonal of the control, if its structure gives it."""
        _, control = self.parts
        if diagonal_cost(control) > 0:
            raise ValueError(
                "`control` must be a pair of an operator and its known answer. Found the "
                f"operator alone, `{type(control).__name__}`, whose diagonal takes "
                f"matvecs. {_EXAMPLE}."
            )
        return lx.diagonal(control).astype(self.entered.flat.dtype)


def known_entries(
    known: PyTree[Any], like: PyTree[jax.ShapeDtypeStruct]
) -> Inexact[Array, " p"]:
    """A known answer with the structure of `like`, whose leaves have one dtype, as one
    vector."""
    leaves, treedef = jax.tree.flatten(known)
    expected, expected_treedef = jax.tree.flatten(like)
    shapes = [getattr(x, "shape", np.shape(x)) for x in leaves]
    if treedef != expected_treedef or shapes != [x.shape for x in expected]:
        raise ValueError(
            "The known answer of `control` must have the structure of the value. Found "
            f"{_describe(treedef, shapes)}, for a value of "
            f"{_describe(expected_treedef, [x.shape for x in expected])}."
        )
    dtype = expected[0].dtype
    for leaf in leaves:
        kind = jnp.result_type(leaf)
        real = not jnp.issubdtype(kind, jnp.complexfloating)
        if not jnp.issubdtype(kind, jnp.number) or not (
            real or jnp.issubdtype(dtype, jnp.complexfloating)
        ):
            raise TypeError(
                f"The known answer of `control` must be of dtype {dtype}. Found {kind}. "
                "Convert it."
            )
        if not isinstance(leaf, Tracer) and not np.all(np.isfinite(leaf)):
            raise ValueError(
                "The known answer of `control` must be finite. Found NaN or infinite "
                f"entries. {_EXAMPLE}, with numbers."
            )
    return jnp.concatenate([jnp.ravel(jnp.asarray(x, dtype)) for x in leaves])


def _describe(treedef: Any, shapes: list[tuple[int, ...]]) -> str:
    if len(shapes) == 1 and treedef == jax.tree.structure(0):
        return f"an array of shape {shapes[0]}"
    return f"the structure {treedef} with shapes {shapes}"
