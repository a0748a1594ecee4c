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
    solver: lx.AbstractLinearSolver | None = None,
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    r"""Estimate traces of products with the inverse of an operator, such as
    $\mathrm{tr}(A^{-1} B)$ and $\mathrm{tr}(A^{-1} B A^{-1} C)$, by linear solves: for
    Fisher information, REML and generalised cross-validation.

    All traces come from the same probes and share solves. `solution.covariance` is their
    covariance, and `solution.transform` gives a function of them one error bar. No solve
    is exact: each system is solved twice, the second time for the residual of the first.
    What the second solve changes is counted in the error bar, as the error of the first.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2)
        tag = lx.positive_semidefinite_tag
        ridge = lx.MatrixLinearOperator(kernel + jnp.eye(300), tag)
        words = {"fit": (kernel,), "squares": (kernel, kernel)}
        solution = tx.trace_of_solves(ridge, words, k=50, key=jax.random.key(0))
        print(solution)
        variance = solution.transform(lambda t: 300 - 2 * t["fit"] + t["squares"])
        print(variance.value, "+-", variance.std_err)
        ```

    **Arguments:**

    - `operator`: A, a square matrix or operator, real or complex
        ([`traceax.as_operator`][]).
    - `words`: a PyTree whose leaves are tuples of square matrices or operators on the
        same vectors: `(B,)` stands for $\mathrm{tr}(A^{-1} B)$, `(B, C)` for
        $\mathrm{tr}(A^{-1} B A^{-1} C)$, and so on; `()` for $\mathrm{tr}(A^{-1})$.
    - `solver`: an iterative solver of lineax. Its tolerances are relative to right-hand
        sides with entries of size one and to A in units of its norm, and the remaining
        residual is about their square. Default: `lineax.CG`, for operators with a
        semidefinite tag, whose tolerances are the fourth root of the machine epsilon. For
        others pass, for example, `lineax.GMRES(rtol=1e-3, atol=1e-3)`, which needs the
        adjoint of A.
    - `k`: the number of probes, or [`traceax.Adaptive`][]. With `k >= n` A is inverted as
        a matrix, by n products, and the traces are exact to rounding, which `std_err`
        counts.
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` have a scalar for each word,
    complex if an operator is. `stats` has, beside the entries described there and
    `"joint_samples"`, shape `(k, q)`, the samples of the q traces,

    - `"num_solves"`: two for each probe and each system. There is one system for x =
        $A^{-*} z$, and one for each word that another one continues to the left: `(B,)`
        and `()` need x alone, `(B, C)` and `(D, C)` share $A^{-1} C z$.
    - `"solver_steps"`, of all solves together; `"num_matvecs"` counts these, one more for
        each solve, and one more, or more if a step of the solver makes several products.
    - `"solve_error"`, for each word the part of its error that is due to solves, counted
        in `std_err` and, as a distance, in `interval()`; `"solve_residual"`, the largest
        relative residual of all.

    The error of a solve is seen only as far as the second solve removes it. An
    eigenvector is hidden from both if its share of a right-hand side is below the square
    of the tolerance; that of a probe is $1 / \sqrt{n}$. Memory: a few vectors of length n
    for each probe of a block; with a derivative, as many as the word has operators for
    each probe.

    Derivatives in the arrays of all operators, of first order: $-\mathrm{tr}(A^{-1} dA\,
    A^{-1} B) + \mathrm{tr}(A^{-1} dB)$, from the same probes and, beyond those of the
    value, as many further solves as make two for each letter of a word. They need the
    adjoint of B where a letter follows. Their error from solves is as large as for one
    solve, and is not counted.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][]; a leaf of `words` is not a tuple
        of operators on the vectors of A; `lineax.CG` for an operator without a
        semidefinite tag.
    - An `equinox` run-time error with `throw=True`: a solve failed, or left more than
        half of its right-hand side; a tolerance was not met.
    - `NotImplementedError` for a second derivative.

    ??? cite

        ```bibtex
        @article{pierce2000adjoint,
            author  = {Pierce, Niles A. and Giles, Michael B.},
            title   = {Adjoint Recovery of Superconvergent Functionals from {PDE}
                       Approximations},
            journal = {SIAM Review},
            volume  = {42},
            number  = {2},
            pages   = {247--264},
            year    = {2000},
        }
        ```
    """
    entered = enter(operator, second=words)
    solver = _solver_for(entered, solver)
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


def _solver_for(
    entered: EnteredOperator, solver: lx.AbstractLinearSolver | None
) -> lx.AbstractLinearSolver:
    flat = entered.flat
    if isinstance(solver, lx.CG | None) and flat.sign == 0:
        raise ValueError(
            "`solver` must fit the operator. Found `lineax.CG`, the default, for an "
            "`operator` without a semidefinite tag. Add one, `traceax.as_operator("
            "operator, tags=lineax.positive_semidefinite_tag)`, or pass a solver for any "
            "operator, such as `lineax.GMRES(rtol=1e-3, atol=1e-3)`."
        )
    if solver is None:
        # A system is solved twice, to the square of these tolerances.
        tolerance, limit = flat.eps**0.25, 10 * flat.size
        return lx.CG(tolerance, tolerance, stabilise_every=None, max_steps=limit)
    check_instance("solver", solver, lx.AbstractLinearSolver, "lineax.CG(rtol, atol)")
    return solver


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
