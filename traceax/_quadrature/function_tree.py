"""Several functions of one operator."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from .base import AbstractSpectralFunction


class FunctionTree(eqx.Module):
    """A PyTree of functions, all of eigenvalues or all of singular values.

    - `members`: its leaves.
    - `treedef`: its structure.
    """

    members: tuple[AbstractSpectralFunction, ...]
    treedef: Any = eqx.field(static=True)

    @property
    def of_singular_values(self) -> bool:
        return self.members[0].of_singular_values

    @property
    def title(self) -> str:
        first, *others = self.members
        return f"{len(self.members)} functions" if others else first.title

    def arrange(self, items: list[Any]) -> PyTree[Array]:
        """An item for each function, in the structure of the tree."""
        return jax.tree.unflatten(self.treedef, items)


def members_of(
    function: AbstractSpectralFunction | FunctionTree,
) -> tuple[AbstractSpectralFunction, ...]:
    """The functions of a tree; of a single function, itself."""
    return function.members if isinstance(function, FunctionTree) else (function,)
