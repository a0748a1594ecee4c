"""The norms of the rows of operators whose structure gives them without a matvec. They
give the Frobenius norm too.

A multiple of the operator multiplies them, and a diagonal that is added changes one entry
of each row.
"""

from collections.abc import Callable

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from .diagonal import diagonal_cost
from .spectrum import MAX_SIZE
from .structured import (
    AbstractStructuredOperator,
    norms_along_last,
    of_full_precision,
    Rows,
)


def rows_of(operator: lx.AbstractLinearOperator) -> Rows | None:
    """The rows of a structured operator, or None. A matrix by itself has none: its norms
    are estimated as those of other operators."""
    match operator:
        case AbstractStructuredOperator():
            return operator.rows(_of_part)
        case lx.TaggedLinearOperator():
            return rows_of(operator.operator)
        case lx.NegLinearOperator():
            return _map(lambda x: -x, operator.operator)
        case lx.MulLinearOperator():
            return _map(lambda x: x * operator.scalar, operator.operator)
        case lx.DivLinearOperator():
            return _map(lambda x: x / operator.scalar, operator.operator)
        case lx.AddLinearOperator():
            for first, second in (
                (operator.operator1, operator.operator2),
                (operator.operator2, operator.operator1),
            ):
                rows = rows_of(first) if _is_stored_diagonal(second) else None
                if rows is not None and rows.diagonal is not None:
                    diagonal = rows.diagonal + lx.diagonal(second)
                    return rows._replace(diagonal=diagonal)
    return None


def _map(
    fn: Callable[[Array], Array], operator: lx.AbstractLinearOperator
) -> Rows | None:
    rows = rows_of(operator)
    if rows is None:
        return None
    diagonal = None if rows.diagonal is None else fn(rows.diagonal)
    return Rows(diagonal, jnp.abs(fn(rows.others)))


def _is_stored_diagonal(operator: lx.AbstractLinearOperator) -> bool:
    return diagonal_cost(operator) == 0 and lx.is_diagonal(operator)


def _of_part(operator: lx.AbstractLinearOperator) -> Rows | None:
    """The rows of a part of a structured operator, which may be a stored matrix."""
    if (rows := rows_of(operator)) is not None:
        return rows
    if _is_stored_diagonal(operator):
        diagonal = of_full_precision(lx.diagonal(operator))
        return Rows(diagonal, jnp.zeros_like(diagonal.real))
    size = operator.out_size()
    # Other entries take matvecs.
    if diagonal_cost(operator) > 0 or size > MAX_SIZE:
        return None
    matrix = of_full_precision(operator.as_matrix())
    if size != operator.in_size():
        return Rows(None, norms_along_last(matrix))
    others = jnp.where(jnp.eye(size, dtype=bool), 0, matrix)
    return Rows(jnp.diagonal(matrix), norms_along_last(others))
