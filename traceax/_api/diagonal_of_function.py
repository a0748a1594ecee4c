"""The diagonal of a function of an operator."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.quantity import Diagonal
from .._core.solution import Solution
from .._estimators.auto_diagonal import AutoDiagonalEstimator
from .._estimators.base import AbstractEstimator
from .._estimators.hutchinson import HutchinsonEstimator
from .._estimators.streaming import AbstractStreamingEstimator
from .._functions.base import check_of_eigenvalues
from .._functions.preconditioned import check_preconditioner
from .._functions.subspaces import with_subspaces
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._preconditioners.base import AbstractPreconditioning
from .._quadrature.callables import as_functions
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction, Inverse
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .._run.steps import (
    AdaptiveSteps,
    check_steps,
)
from .diagonal_of_function_task import DiagonalOfFunction
from .diagonals_of_functions_task import DiagonalsOfFunctions


def diagonal_of_function(
    operator: OperatorLike,
    function: PyTree[AbstractSpectralFunction | Callable[[Any], Any]],
    estimator: AbstractEstimator = AutoDiagonalEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    null_space: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    preconditioner: AbstractPreconditioning | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    r"""Estimate the diagonal of $f(A)$ for a Hermitian operator. For the inverse of a
    precision matrix these are the marginal variances. Or estimate the diagonals of
    several functions, from the same matvecs.

    This is `diagonal` of [`traceax.function_of`][], and also checks whether eigenvalues
    are outside the domain, estimates the error of the Krylov approximation, and uses a
    preconditioner of the inverse. With $M = P^{-1/2} A P^{-1/2}$

    $$\mathrm{diag}\, A^{-1} = \mathrm{diag}\, P^{-1} + \mathrm{diag}\, P^{-1/2} (M^{-1} -
    I) P^{-1/2},$$

    where the first part is known, the second one is small, and M needs few steps.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        preconditioner = tx.nystrom_preconditioner(
            operator, rank=15, key=key1, shift=0.1
        )
        solution = tx.diagonal_of_function(
            operator,
            tx.Inverse(),
            k=10,
            num_steps=5,
            key=key2,
            preconditioner=preconditioner,
        )
        error = solution.value / jnp.diag(jnp.linalg.inv(kernel)) - 1
        print(jnp.max(jnp.abs(error)) < 0.01)  # True
        ```

    **Arguments:**

    - `operator`, `function`: as for [`traceax.function_of`][]; or a PyTree of functions.
        Their products with a vector are read from one Lanczos run. If one has complex
        values, all diagonals are complex.
    - `estimator`, `key`, `state`, `execution`, `throw`: as for [`traceax.diagonal`][].
        Several functions take an estimator with independent samples, and
        [`traceax.HutchinsonEstimator`][] is their default.
    - `k`: the number of matvecs with $f(A)$, a Python integer or [`traceax.Adaptive`][].
        With `k >= n` the answer is exact, from n matvecs with `operator` and a dense
        factorisation. Default: to 1%, in the two-norm.
    - `num_steps`: the number of Lanczos steps for each, a Python integer; more than n
        count as n. Or [`traceax.AdaptiveSteps`][], the default: the error of the Krylov
        approximation is then a share of the tolerance, or of the standard error of `k`
        random signs. If `estimator` is far more accurate than random signs, pass a number
        or a smaller `share`.
    - `preconditioner`: for a single function, `Inverse()`, of an operator tagged positive
        semidefinite. See [`traceax.nystrom_preconditioner`][].
    - `null_space`: a basis of the null space of an operator tagged Hermitian, orthonormal
        or not, in the form of `deflation` of [`traceax.trace`][]. The value is then the
        diagonal of $f$ on the complement, for `Inverse()` that of the pseudo-inverse. It
        takes two or three matvecs more, one of which checks that the operator maps the
        basis to zero. A preconditioner need not know of it. Derivatives are valid in
        directions that keep it a null space.
    - `deflation`: eigenvectors of an operator tagged Hermitian, such as those of the
        smallest or the largest eigenvalues, in the form of `deflation` of
        [`traceax.trace`][]. Their part is exact, from r matvecs and one or two more; the
        rest varies less, and needs fewer steps. The error of vectors that are not quite
        eigenvectors is estimated and counted in `std_err` and in intervals, and flagged
        if it is more than the other errors. For derivatives the function must be real.

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` are PyTrees of the operator's
    structure, complex where those of `function` are, from at most `(k + 1) * num_steps`
    matvecs, or twice as many with a real operator for a complex function: one more run
    examines the spectrum, and with [`traceax.AdaptiveSteps`][] another one chooses the
    steps. Memory is that of `estimator`, and `num_steps` vectors for each probe of a
    block. `std_err` is the sampling error, and with [`traceax.AdaptiveSteps`][] counts
    the remaining error of the Krylov approximation. [`traceax.Solution.interval`][]
    always counts it: for each entry the error in that one run, and at least the root mean
    square. Too few steps do not show where the spectrum begins. The interval of a
    function that is infinite at zero, such as the inverse, then has an infinite end, and
    where the steps were chosen the call fails: allow more of them, pass a preconditioner,
    or shift the operator. `stats` has, beside the entries described there,

    - `"ritz_values"`: the smallest and the largest Ritz value of that run (of M, if there
        is a preconditioner);
    - `"truncation_error"`: an estimate, not a bound, of the root-mean-square error of
        the entries of one matvec, from the Krylov approximation and its rounding;
        infinite if an end of the interval is;
    - `"gradient_residual"`: the relative residual of $f'(A) z$ in the Krylov space of
        that run. If it is not small, derivatives are inaccurate;
    - `"num_steps"`: the number of steps of a matvec; 0 with `k >= n`.

    For a PyTree of functions `value` and `std_err` have a PyTree of the operator's
    structure in place of each function, and `"truncation_error"` and
    `"gradient_residual"` a number. Steps are chosen for the function that needs most. The
    tolerance of `k` applies to the sampling error of all diagonals together, and to the
    Krylov error of each diagonal by itself. There is no `null_space` and no `deflation`.
    A derivative takes one more run for each function and probe.

    First derivatives in the arrays of `operator` and of `function` estimate the
    derivatives of the diagonal, as with [`traceax.function_of`][]. They need more steps
    than the value, and take the preconditioner as constant.

    **Raises:**

    - `TypeError`: an argument is not of its kind.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `k` or
        `num_steps` is too small; `key` is missing; `preconditioner`, `null_space` or
        `deflation` does not fit, as for [`traceax.logdet`][];
        the estimator does not estimate diagonals.
    - An `equinox` run-time error with `throw=True`: an eigenvalue was seen outside the
        domain of the function; rounding may change the second digit; a matvec was not
        finite; a tolerance was not reached; or after the steps that
        [`traceax.AdaptiveSteps`][] allows, the error is larger than the tolerance, or
        than the standard error of `k` random signs.
    """
    entered = enter(operator, second=function)
    check_hermitian(entered.flat)
    check_instance("estimator", estimator, AbstractEstimator, "AutoDiagonalEstimator()")
    num_steps = check_steps(num_steps, entered.size)
    functions = as_functions(function, entered.flat.dtype)
    for each in members_of(functions):
        check_of_eigenvalues(each)
    if isinstance(functions, FunctionTree):
        given = {"preconditioner": preconditioner}
        given |= {"null_space": null_space, "deflation": deflation}
        _check_single(given)
        task = DiagonalsOfFunctions.of(
            estimator=_independent(estimator),
            diagonal=Diagonal().for_structure(entered.structure),
            function=functions,
            num_steps=num_steps,
            size=entered.size,
        )
        return solve(
            task, entered, k=k, key=key, state=state, execution=execution, throw=throw
        )
    function = functions
    if preconditioner is not None:
        _check_preconditioner(preconditioner, entered.flat, function)
    task = DiagonalOfFunction(
        estimator=estimator,
        quantity=Diagonal().for_structure(entered.structure),
        function=function,
        num_steps=num_steps,
        preconditioner=preconditioner,
    )
    task = with_subspaces(task, entered, null_space=null_space, deflation=deflation)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )


def _check_single(given: dict[str, Any]) -> None:
    """Raise for arguments that are given with several functions."""
    for name, argument in given.items():
        if argument is not None:
            raise ValueError(
                f"`{name}` is for a single function. Found a PyTree of functions. Make a "
                "call for each."
            )


def _independent(estimator: AbstractEstimator) -> AbstractStreamingEstimator:
    """The estimator for several functions: a basis of the images of one function does
    not help the others."""
    if isinstance(estimator, AutoDiagonalEstimator):
        return HutchinsonEstimator()
    if not isinstance(estimator, AbstractStreamingEstimator):
        raise ValueError(
            "`estimator` must have independent samples where `function` is a PyTree of "
            f"functions. Found `{estimator.name}`. Pass `traceax.HutchinsonEstimator()`, "
            "or make a call for each function."
        )
    return estimator


def _check_preconditioner(
    preconditioner: Any,
    operator: FlatOperator,
    function: AbstractSpectralFunction,
) -> None:
    check_preconditioner(preconditioner, operator.size)
    plain = isinstance(function, Inverse) and function.singular_at_zero
    if not plain or operator.sign <= 0:
        raise ValueError(
            "`preconditioner` is for `traceax.Inverse()` without a shift, of an operator "
            f"that is tagged positive semidefinite. Found `{type(function).__name__}`, "
            f"and an `operator` {'with' if operator.sign > 0 else 'without'} the tag. "
            "Leave `preconditioner` out, or shift the operator."
        )
