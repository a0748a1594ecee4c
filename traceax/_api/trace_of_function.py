"""The trace of a function of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.solution import Solution
from .._functions.base import AbstractFunctionEstimator
from .._functions.gradients import AbstractFunctionGradient, LanczosGradient
from .._functions.several import quantity_of
from .._functions.slq import SLQEstimator
from .._functions.subspaces import with_subspaces
from .._functions.task import TraceOfFunction
from .._operators.control import Controlled
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._quadrature.callables import as_functions
from .._quadrature.function_tree import FunctionTree
from .._quadrature.functions import AbstractSpectralFunction
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.matvecs import Matvecs
from .._run.random_steps import RandomSteps
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_any_steps
from .control import controlled_function
from .within import within_matvecs


def trace_of_function(
    operator: OperatorLike,
    function: PyTree[AbstractSpectralFunction | Callable[[Any], Any]],
    estimator: AbstractFunctionEstimator = SLQEstimator(),
    *,
    k: int | Adaptive | Matvecs = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps | RandomSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    null_space: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    control: Any = None,
    gradient: AbstractFunctionGradient = LanczosGradient(),
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    """Estimate $\\mathrm{tr} f(A)$ for a square operator from matvecs, or the traces of
    several functions from the same matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 50)) / 50**0.5
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        solution = tx.trace_of_function(
            operator, tx.Exp(-1.0), k=20, num_steps=20, key=jax.random.key(1)
        )
        print(solution.value, "+-", solution.std_err)

        # The mean energy tr(A exp(-A)) / tr(exp(-A)), from one run.
        functions = {"Z": tx.Exp(-1.0), "energy": lambda x: x * jnp.exp(-x)}
        solution = tx.trace_of_function(
            operator, functions, k=20, num_steps=20, key=jax.random.key(1)
        )
        print(solution.transform(lambda t: t["energy"] / t["Z"]))
        ```

    **Arguments:**

    - `operator`: a square matrix or operator, as for [`traceax.trace`][]. If it is
        Hermitian, tag it so: symmetric, positive or negative semidefinite, or in complex
        arithmetic with `traceax.hermitian_tag`. Without a tag [`traceax.Arnoldi`][] takes
        the place of Lanczos, and more steps are needed.
    - `function`: [`traceax.Log`][], [`traceax.Inverse`][], [`traceax.Power`][],
        [`traceax.Exp`][], [`traceax.Entropy`][], another
        [`traceax.AbstractSpectralFunction`][], or a callable from a real number to a
        real number, differentiable by JAX; without a tag it is called with complex
        numbers. It is traced at each call. Callables with the same code, such as a
        lambda in a loop, share one compiled program: arrays that they close over are
        its arguments, Python numbers are constants. So do callables with derivative
        rules inside (`jax.custom_jvp`) that a module defines, as `jax.nn.relu`; one
        with a rule that is made inside another function compiles at each call. Or a
        PyTree of such functions, all of them read from one Krylov run of each probe.
    - `estimator`: default: [`traceax.SLQEstimator`][], the only one for several
        functions.
    - `k`: the number of probes, a Python integer. With `k >= n` the answer is exact, from
        n matvecs and a dense factorisation. Or [`traceax.Adaptive`][]: as many as
        it takes to reach a tolerance. Default: 1%. Or [`traceax.Matvecs`][]: a total
        number of matvecs, without `num_steps`.
    - `num_steps`: the number of Krylov steps for each probe, a Python integer; more than
        n count as n. Or [`traceax.AdaptiveSteps`][], the default, or
        [`traceax.RandomSteps`][], for an unbiased value.
    - `key`, `state`, `execution`, `throw`: as in [`traceax.trace`][].
    - `null_space`: a basis of the null space of an operator tagged Hermitian, orthonormal
        or not, in the form of `deflation` of [`traceax.trace`][]. The value is then the
        sum over the eigenvalues on the complement. It takes two or three matvecs more,
        one of which checks that the operator maps the basis to zero. Derivatives are
        valid in directions that keep it a null space.
    - `deflation`: eigenvectors of an operator tagged Hermitian, such as those of the
        smallest or the largest eigenvalues, in the form of `deflation` of
        [`traceax.trace`][]. Their part is exact, from r matvecs and one or two more; the
        rest varies less, and needs fewer steps. The error of vectors that are not quite
        eigenvectors is estimated and counted in `std_err` and in intervals, and flagged
        if it is more than the other errors. There are no second derivatives.
    - `control`: a control variate, as for [`traceax.trace`][]: a pair `(B, known)` of an
        operator with the structure and tags of A, and the known number
        $\\mathrm{tr} f(B)$; or `control=B`, where the structure of B gives that. Each
        probe takes a Krylov run with B too. The estimator is an `SLQEstimator`.
    - `gradient`: how derivatives are computed: [`traceax.LanczosGradient`][], from the
        same run, or [`traceax.SolveGradient`][], which has second derivatives, for `Log`,
        `Inverse` without a shift, and negative whole powers.

    **Returns:**

    A [`traceax.Solution`][] with a real `value`, or a complex one for a complex operator
    without a tag, or a function like `Exp(1j * t)` of a Hermitian one; the real and the
    imaginary part then have intervals of their own, and `stats["bracket"]` is that of the
    real part, with the error of either. It takes at most `k * num_steps` matvecs;
    [`traceax.AdaptiveSteps`][] adds a run or two, and n matvecs where the exact answer
    had to take the place of the estimate (`stats["exact"]`). `std_err` is the sampling
    error, with the effect of rounding where the function is steep. Where `num_steps` is a
    number, `std_err` does not count the quadrature error, but
    [`traceax.Solution.interval`][] does; where steps are chosen, both count it. `stats`
    has the entries of the estimator, among them the quadrature error. The estimator
    determines the memory: by default it takes `num_steps` vectors of length n for each
    probe of a block.

    For a PyTree of functions `value`, `std_err` and the entries of `stats` that belong to
    a function have its structure. Steps are chosen for the function that needs most, and
    a tolerance applies to all values together. `solution.covariance` is their covariance,
    and `solution.transform` gives a function of them, such as a ratio, one error bar.

    Derivatives in the operator's arrays are estimates of $\\mathrm{tr}(f'(A)\\, dA)$, and
    those in the function's own arrays of $\\mathrm{tr}(df(A))$.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer; `function` does not map real numbers to real numbers.
    - `ValueError`: `operator` is not square; `k` or `num_steps` is too small; `key` is
        missing; `gradient` does not fit the function, or `estimator` the operator;
        `null_space` or `deflation` does not, as for [`traceax.logdet`][].
    - An `equinox` run-time error with `throw=True`: an eigenvalue was seen outside the
        domain of the function; rounding errors are a large part of the reported error;
        the steps that [`traceax.AdaptiveSteps`][] allows were too few, and n is too
        large for the exact answer; a matvec was not finite; a tolerance was not reached.
    """
    operators = None
    if control is None:
        entered = enter(operator, second=function)
    else:
        operators = Controlled.of(operator, control)
        entered = operators.entered
    check_instance("estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()")
    num_steps = check_any_steps(num_steps, entered.size, estimator.most_steps)
    check_instance("gradient", gradient, AbstractFunctionGradient, "LanczosGradient()")
    hermitian = entered.flat.hermitian if operators is None else operators.hermitian
    functions = as_functions(function, entered.flat.dtype, hermitian=hermitian)
    if isinstance(functions, FunctionTree):
        check_instance("estimator", estimator, SLQEstimator, "SLQEstimator()")
    if isinstance(k, Matvecs):
        others = {"null_space": null_space, "deflation": deflation, "control": control}
        estimator, num_steps = within_matvecs(
            k, estimator, num_steps, state=state, **others
        )
        k = k.total
    task = TraceOfFunction(
        estimator=estimator,
        function=functions,
        gradient=gradient,
        num_steps=num_steps,
        quantity=quantity_of(functions),
    )
    subspaces = {"null_space": null_space, "deflation": deflation}
    if operators is None:
        task = with_subspaces(task, entered, **subspaces)
    else:
        task, entered = controlled_function(task, operators, **subspaces)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
