"""The argument `control` of traces of functions and of log-determinants."""

from typing import Any

import jax.numpy as jnp

from .._core.arithmetic import standard_promotion
from .._functions.controlled import ControlledFunction
from .._functions.slq import SLQEstimator
from .._functions.task import AbstractFunctionTask
from .._operators.control import Controlled, known_entries
from .._operators.door import enter, EnteredOperator
from .._operators.tags import sign_of
from .._quadrature.function_tree import FunctionTree
from .._run.execution import AbstractExecution, Local
from .._run.random_steps import refuse_random_steps
from .._run.solve import AbstractTask, solve


def signs_of(operators: Controlled) -> tuple[int, ...]:
    """The signs of A and of B that tags give; 0 for both if one is not known."""
    signs = tuple(map(sign_of, operators.parts))
    return signs if all(signs) else (0, 0)


def controlled_function(
    task: AbstractFunctionTask, operators: Controlled, **others: Any
) -> tuple[AbstractTask, EnteredOperator]:
    """The task with a control, and the operators that are stacked for it. Where the
    structure of A gives the answer, the task itself, and A. `others` are arguments that
    may not be used beside a control."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"`control` and `{given[0]}` exclude each other. Found both. Leave one out."
        )
    if not isinstance(task.estimator, SLQEstimator):
        raise ValueError(
            "`control` is for independent quadratic forms, of `traceax.SLQEstimator()`. "
            f"Found `{task.name}`. Leave one of the two out."
        )
    if isinstance(task.function, FunctionTree):
        raise ValueError(
            "`control` is for one function. Found several. Leave `control` out, or call "
            "once for each of them."
        )
    refuse_random_steps(task.num_steps)
    first, other = operators.parts
    entered = enter(first)
    if task.is_known(entered.facts):
        return task, entered
    known = operators.known
    if known is None:
        known = _known_by_structure(task, enter(other, name="control"), Local())
    hermitian = operators.hermitian
    like = jnp.zeros((), _dtype_of(task, operators))
    with standard_promotion():
        known = known_entries(known, like).reshape(())
    controlled = ControlledFunction(  # pyright: ignore
        task=task, known=known, hermitian=hermitian, signs=signs_of(operators)
    )
    return controlled, operators.entered


def _dtype_of(task: AbstractFunctionTask, operators: Controlled) -> jnp.dtype:
    dtype = operators.entered.flat.dtype
    assert not isinstance(task.function, FunctionTree)
    is_real = task.function.of_singular_values or operators.hermitian
    return jnp.finfo(dtype).dtype if is_real else dtype


def _known_by_structure(
    task: AbstractFunctionTask, control: EnteredOperator, execution: AbstractExecution
) -> Any:
    if not task.is_known(control.facts):
        raise ValueError(
            "`control` must be a pair of an operator and its known answer. Found the "
            "operator alone, whose structure does not give it. Pass `control=(B, known)`."
        )
    solution = solve(
        task, control, k=1, key=None, state=None, execution=execution, throw=True
    )
    return solution.value
