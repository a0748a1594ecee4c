"""Several operators on one space, stacked above each other."""

from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import Array, PyTree

from .checks import checked_operator


class _Stacked(eqx.Module):
    operators: tuple[lx.AbstractLinearOperator, ...]

    def __call__(self, vector: PyTree[Array]) -> tuple[PyTree[Array], ...]:
        return tuple(operator.mv(vector) for operator in self.operators)


def stack_operators(
    operators: dict[str, Any],
) -> tuple[lx.FunctionLinearOperator, tuple[lx.AbstractLinearOperator, ...]]:
    """Stack square operators on the same space: `v -> (A v, B v, ...)`. The keys of
    `operators` are the names of the arguments, for error messages. Returns the stack, and
    the operators that it is made of, since matrices are converted."""
    checked = {name: checked_operator(x, name=name) for name, x in operators.items()}
    (name, first), *others = checked.items()
    for other, operator in others:
        if operator.inputs != first.inputs:
            raise ValueError(
                f"`{name}` and `{other}` must have the same structure, because they are "
                f"applied to the same vectors. Found in_structure()={first.inputs} and "
                f"{operator.inputs}."
            )
    parts = tuple(each.operator for each in checked.values())
    # A module, unlike a closure, is compiled once for all operators of its kind.
    fn = _Stacked(parts)
    return lx.FunctionLinearOperator(fn, first.inputs, closure_convert=False), parts
