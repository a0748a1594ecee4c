"""The arguments `null_space` and `deflation` of functions of operators."""

from typing import Any

from .._operators.basis import basis_columns
from .._operators.checks import check_hermitian
from .._operators.door import EnteredOperator
from .._quadrature.function_tree import FunctionTree
from .._run.solve import AbstractTask
from .eigenpairs import DeflatedFunction
from .null_space import WithoutNullSpace
from .task import AbstractTaskOfFunction


def with_subspaces(
    task: AbstractTaskOfFunction,
    operator: EnteredOperator,
    *,
    null_space: Any,
    deflation: Any,
) -> AbstractTask:
    """The task without a null space, and with deflated eigenvectors, if there are any."""
    flat, chosen = operator.flat, task
    # The null space comes first: eigenvectors are those of the operator on the rest.
    for kind, name, basis in (
        (DeflatedFunction, "deflation", deflation),
        (WithoutNullSpace, "null_space", null_space),
    ):
        if basis is None:
            continue
        if isinstance(task.function, FunctionTree):
            raise ValueError(
                f"`{name}` is for a single function. Found a PyTree of functions. Make a "
                "call for each."
            )
        check_hermitian(flat)
        columns = basis_columns(name, basis, operator.structure, flat.dtype)
        if columns.shape[1] > 0:
            chosen = kind(task=chosen, columns=columns)  # pyright: ignore
    return chosen
