"""Differences of traces of functions, `tr f(A) - tr f(B)`, from common probes.

The samples are `z* f(A) z - z* f(B) z`, with one z for both operators, which are stacked
(`_krylov/difference.py`). Their variance is small where `f(A)` and `f(B)` are close,
while that of two independent estimates is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.results import first_failure
from .._core.solution import Estimate, Solution
from .._functions.all_eigenvalues import entries_without_probes, exact_traces
from .._functions.base import check_real_on_reals
from .._functions.gradients import LanczosGradient
from .._functions.preconditioned import (
    check_logarithm,
    check_preconditioner,
    Prepared,
)
from .._functions.several import join_members, quantity_of
from .._functions.slq import SLQEstimator
from .._functions.task import AbstractFunctionTask
from .._krylov.difference import Difference, unstack
from .._operators.convert import OperatorLike
from .._operators.door import enter, Facts
from .._operators.stacked import stack_operators
from .._operators.tags import is_hermitian
from .._preconditioners.base import AbstractPreconditioning, Congruence
from .._quadrature.callables import as_functions
from .._quadrature.domain import critical_extremes
from .._quadrature.function_tree import members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.random_steps import RandomSteps
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_any_steps, exact_limit


class _TraceDifference(AbstractFunctionTask):
    """The difference of traces of a function of two operators that are stacked."""

    estimator: SLQEstimator
    preconditioner: AbstractPreconditioning | None = eqx.field(kw_only=True)
    hermitian: bool = eqx.field(static=True, kw_only=True)

    @property
    def title(self) -> str:
        return f"Difference of traces of {self.function.title}"

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit(orthogonal=self.hermitian)

    def _with_symmetry(self, operator: FlatOperator) -> FlatOperator:
        return dataclasses.replace(operator, hermitian=self.hermitian)

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        functions = members_of(self.function)
        traces = [
            exact_traces(half, functions, self.gradient, execution)
            for half in unstack(self._with_symmetry(operator))
        ]
        estimates = [self._subtract(a, b) for a, b in zip(*traces, strict=True)]
        return join_members(self.function, estimates)

    def _subtract(self, a: Estimate, b: Estimate) -> Estimate:
        """The difference of the exact traces of one function."""
        assert a.bounds is not None
        assert b.bounds is not None
        # The lower end of the difference is the lower end of A minus the upper end of B.
        value, bounds = a.value - b.value, a.bounds - b.bounds[::-1]
        extremes = jnp.stack([x.extra["ritz_values"] for x in (a, b)])
        extra = entries_without_probes(value.real, critical_extremes(extremes))
        return dataclasses.replace(
            a,
            value=value,
            # Rounding errors of the two traces may be larger than their difference.
            std_err=(bounds[1, 0] - bounds[0, 0]) / 2,
            samples=value[None],
            result=first_failure(a.result, b.result),
            bounds=bounds,
            extra=extra,
        )

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat, estimator = self._with_symmetry(operator), self.estimator
        prepared, num_matvecs = None, 0
        call: dict[str, Any] = {"k": k, "num_steps": self.num_steps}
        call |= {"key": key, "execution": execution}
        krylov = Difference(estimator.method(flat, self.function))
        if self.preconditioner is not None:
            check_logarithm(flat, self.function)
            prepared = Prepared.of(self.preconditioner, unstack(flat)[0], call)
            outer, call = prepared.preconditioner, prepared.call
            num_matvecs = outer.num_matvecs
            # tr log A - tr log B = tr log(P^-1/2 A P^-1/2) - tr log(P^-1/2 B P^-1/2): the
            # determinant of P cancels, so it is not added here.
            fn = Congruence(flat.fn, outer, stacked=2)
            flat = dataclasses.replace(flat, fn=fn)
            # A lower bound of the eigenvalues of A is one for P^-1/2 A P^-1/2, if divided
            # by the largest eigenvalue of P.
            estimator = estimator.rescaled(1 / outer.largest)
        estimator = dataclasses.replace(estimator, krylov=krylov)
        call |= {"quantity": self.quantity}
        estimate = estimator.run(flat, self.function, self.gradient, **call)
        state = estimate.state if prepared is None else prepared.state(estimate.state)
        num_matvecs = num_matvecs + estimate.num_matvecs
        return dataclasses.replace(estimate, num_matvecs=num_matvecs, state=state)


def trace_difference(
    operator: OperatorLike,
    other: OperatorLike,
    function: PyTree[AbstractSpectralFunction | Callable[[Any], Any]],
    estimator: SLQEstimator = SLQEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps | RandomSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    preconditioner: AbstractPreconditioning | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    r"""Estimate $\mathrm{tr} f(A) - \mathrm{tr} f(B)$ from common probes.

    Both operators get the same probes, and the error bar is the standard error of the
    mean of $z^* f(A) z - z^* f(B) z$. So a small difference of two large traces is
    resolved if the operators are similar, as for the change of a log-determinant with a
    hyperparameter. If they are not, the bar is about as wide as for independent
    estimates.

    For the difference of plain traces pass `A - B`, which is an operator, to
    [`traceax.trace`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)

        def kernel(scale):
            matrix = jnp.exp(-(((x[:, None] - x) / scale) ** 2)) + 0.1 * jnp.eye(300)
            return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

        settings = {"k": 10, "num_steps": 20, "key": jax.random.key(0)}
        solution = tx.trace_difference(kernel(0.1), kernel(0.11), tx.Log(), **settings)
        print(solution.value, "+-", solution.std_err)
        print(tx.logdet(kernel(0.1), **settings).std_err, "of one alone")
        ```

    **Arguments:**

    - `operator`, `other`: A and B, square, of the same structure and dtype. Tags as for
        [`traceax.trace_of_function`][]; if one has no tag, the tag of the other is
        ignored.
    - `function`, `k`, `num_steps`, `key`, `state`, `execution`, `throw`: as for
        [`traceax.trace_of_function`][]. Tolerances apply to the difference.
    - `estimator`: a [`traceax.SLQEstimator`][]. Its `lower_bound` is a bound for both.
    - `preconditioner`: P, as for [`traceax.logdet`][], where the function is
        [`traceax.Log`][] and both operators are tagged. One P, made from either operator,
        serves both, and its determinant cancels:
        $\mathrm{tr} \log(P^{-1/2} A P^{-1/2}) - \mathrm{tr} \log(P^{-1/2} B P^{-1/2})$.

    **Returns:**

    A [`traceax.Solution`][], as from `trace_of_function`. `stats["num_matvecs"]` is the
    number of matvecs with each of the two, plus those that P was made from. `"samples"`
    and `"sample_brackets"` belong to the differences, and `"ritz_values"` to the
    (preconditioned) operator whose Ritz values are nearer to leaving the domain. The
    widths of the two brackets add up, as if their quadrature errors were unrelated. With
    `k >= n`, `std_err` is the rounding error of the two traces, which may be larger than
    their difference.
    Memory: `2 num_steps` vectors of length n for each probe of a block.

    Derivatives, of first order, are estimates of $\mathrm{tr}(f'(A)\, dA) -
    \mathrm{tr}(f'(B)\, dB)$, from the same Lanczos runs and the same probes.

    **Raises:**

    The errors of [`traceax.trace_of_function`][], a `TypeError` for another estimator,
    and a `ValueError` where structures differ.
    """
    stack, parts = stack_operators({"operator": operator, "other": other})
    entered = enter(stack, square=False)
    num_steps = check_any_steps(num_steps, entered.size)
    check_instance("estimator", estimator, SLQEstimator, "SLQEstimator()")
    if preconditioner is not None:
        check_preconditioner(preconditioner, entered.size)
    hermitian = all(map(is_hermitian, parts))
    functions = as_functions(function, entered.flat.dtype, hermitian=hermitian)
    if hermitian:
        for each in members_of(functions):
            check_real_on_reals(each, entered.flat.dtype)
    task = _TraceDifference(
        estimator=estimator,
        function=functions,
        gradient=LanczosGradient(),
        num_steps=num_steps,
        quantity=quantity_of(functions),
        preconditioner=preconditioner,
        hermitian=hermitian,
    )
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
