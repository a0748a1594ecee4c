"""The cost of the diagonal of a lineax operator."""

import lineax as lx

from .structured import AbstractStructuredOperator


def diagonal_cost(operator: lx.AbstractLinearOperator) -> int:
    """The number of matvecs that `lineax.diagonal(operator)` takes: 0 where the diagonal
    is stored, n where lineax would build the whole matrix from matvecs."""
    match operator:
        case (
            lx.MatrixLinearOperator()
            | lx.PyTreeLinearOperator()
            | lx.DiagonalLinearOperator()
            | lx.IdentityLinearOperator()
            | lx.TridiagonalLinearOperator()
        ):
            return 0
        case (
            lx.TaggedLinearOperator()
            | lx.MulLinearOperator()
            | lx.DivLinearOperator()
            | lx.NegLinearOperator()
        ):
            return diagonal_cost(operator.operator)
        case AbstractStructuredOperator() if all(map(_is_known, operator.parts)):
            return 0
        case lx.AddLinearOperator():
            return _cost_of_parts(operator)
        # Diagonals of products come from those of the factors only if these are diagonal.
        case lx.ComposedLinearOperator() if lx.is_diagonal(operator):
            return _cost_of_parts(operator)
        # A function that is tagged diagonal is applied to a vector of ones.
        case lx.FunctionLinearOperator() | lx.JacobianLinearOperator():
            return 1 if lx.is_diagonal(operator) else operator.in_size()
        case _:
            return operator.in_size()


def _is_known(operator: lx.AbstractLinearOperator) -> bool:
    return diagonal_cost(operator) == 0


def _cost_of_parts(operator: lx.AddLinearOperator | lx.ComposedLinearOperator) -> int:
    costs = diagonal_cost(operator.operator1), diagonal_cost(operator.operator2)
    return min(sum(costs), operator.in_size())
