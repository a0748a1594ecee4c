"""Traces of words in the inverse of an operator."""

from __future__ import annotations

from typing import Any

import jax
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance, describe
from .._core.flat import as_complex
from .._core.samplers import RademacherSampler
from .._core.solution import Solution
from .._operators.convert import OperatorLike
from .._operators.door import enter, EnteredOperator
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .trace_of_solves_task import TraceOfSolves, Words


def trace_of_solves(
    operator: OperatorLike,
    words: PyTree[tuple[OperatorLike, ...]],
    solver: lx.AbstractLinearSolver = lx.CG(rtol=1e-6, atol=1e-6),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    entered = enter(operator, second=words)
    check_instance("solver", solver, lx.AbstractLinearSolver, "lineax.CG(rtol, atol)")
    _check_solver(solver, entered)
    leaves, treedef = jax.tree.flatten(words, is_leaf=lambda x: isinstance(x, tuple))
    example = 'Pass, for example, `{"fisher": (B, B), "inverse": ()}`.'
    if not leaves:
        raise ValueError(
            f"`words` must have at least one tuple of operators. Found none. {example}"
        )
    others: dict[int, EnteredOperator] = {}
    indices = []
    for leaf in leaves:
        if not isinstance(leaf, tuple):
            raise TypeError(
                f"`words` must be a PyTree of tuples of operators. Found {describe(leaf)}"
                f" outside of a tuple. {example}"
            )
        for other in leaf:
            if id(other) not in others:
                others[id(other)] = _enter_other(other, entered)
        names = list(others)
        indices.append(tuple(names.index(id(other)) for other in leaf))
    task = TraceOfSolves(
        quantity=Words(treedef),
        others=tuple(others.values()),
        solver=solver,
        sampler=RademacherSampler(),
        words=tuple(indices),
    )
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )


def _check_solver(solver: lx.AbstractLinearSolver, entered: EnteredOperator) -> None:
    if isinstance(solver, lx.CG) and entered.flat.sign == 0:
        raise ValueError(
            "`solver` must fit the operator. Found `lineax.CG` for an `operator` without "
            "a semidefinite tag. Add one, `traceax.as_operator(operator, "
            "tags=lineax.positive_semidefinite_tag)`, or pass a solver for any operator, "
            "such as `lineax.GMRES(rtol=1e-6, atol=1e-6)`."
        )


def _enter_other(other: Any, entered: EnteredOperator) -> EnteredOperator:
    result = enter(other, name="words")
    structures = entered.structure, as_complex(entered.structure)
    if result.structure in structures or as_complex(result.structure) in structures:
        return result
    raise ValueError(
        "The operators of `words` must be applied to vectors of the structure of "
        f"`operator`. Found in_structure()={result.structure} for "
        f"operator.in_structure()={entered.structure}. Cast or reshape one of them."
    )
