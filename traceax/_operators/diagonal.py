import lineax as lx


def diagonal_cost(operator: lx.AbstractLinearOperator) -> int:
    """Products with the operator that `lineax.diagonal(operator)` makes: 0 where the
    diagonal is stored, n where lineax would build the whole matrix from products."""
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
        case lx.AddLinearOperator():
            return _both(operator)
        case lx.ComposedLinearOperator() if lx.is_diagonal(operator):
            return _both(operator)
        case lx.FunctionLinearOperator() | lx.JacobianLinearOperator():
            return 1 if lx.is_diagonal(operator) else operator.in_size()
        case _:
            return operator.in_size()


def _both(operator: lx.AddLinearOperator | lx.ComposedLinearOperator) -> int:
    costs = diagonal_cost(operator.operator1), diagonal_cost(operator.operator2)
    return min(sum(costs), operator.in_size())
