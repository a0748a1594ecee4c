"""Several operators on one space, stacked above each other."""

from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import Array, PyTree

from .checks import check_is_operator


class _Stacked(eqx.Module):
    operators: tuple[lx.AbstractLinearOperator, ...]

    def __call__(self, vector: PyTree[Array]) -> tuple[PyTree[Array], ...]:
        return tuple(operator.mv(vector) for operator in self.operators)


def stack_operators(operators: dict[str, Any]) -> lx.FunctionLinearOperator:
    """Stack square operators on the same space: `v -> (A v, B v, ...)`. The keys of
    `operators` are the names of the arguments, for error messages."""
    for name, operator in operators.items():
        check_is_operator(operator, name=name)
    (name, first), *others = operators.items()
    structure = first.in_structure()
    for other, operator in others:
        if operator.in_structure() != structure:
            raise ValueError(
                f"`{name}` and `{other}` must have the same structure, because they are "
                f"applied to the same vectors. Found in_structure()={structure} and "
                f"{operator.in_structure()}."
            )
    # A module, unlike a closure, is compiled once for all operators of its kind.
    fn = _Stacked(tuple(operators.values()))
    return lx.FunctionLinearOperator(fn, structure, closure_convert=False)
