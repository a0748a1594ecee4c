"""Traces of functions with a control variate: an operator B with a known `tr f(B)`.

Each probe z gives two quadratic forms, and the samples of the estimate are

    t_i = a_i - c_i (b_i - known),    a_i = z* f(A) z,    b_i = z* f(B) z,

with the coefficients c_i of `_core/control.py`, each from all other samples. Bounds and
rounding errors of a_i and of c_i b_i add up, as if they were unrelated
(`controlled_forms.py`). The derivative is that of
`mean(a_i - c_i (b_i - known))` with constant c_i.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.results import first_failure
from .._core.sampler import check_full_support, draw_for
from .._core.solution import Estimate
from .._krylov.base import AbstractKrylovMethod
from .._krylov.difference import unstack
from .._operators.door import Facts
from .._quadrature.domain import critical_extremes
from .._quadrature.function_tree import FunctionTree
from .._quadrature.quadratic_form import spectral_range
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach
from .._run.gradient_steps import GradientTarget
from .._run.steps import choose_steps_of_form, excess_of_bracket, Steps
from .._run.stream import stream
from .._run.wrapped import AbstractWrappedTask
from .controlled_forms import as_streamed, check_known_forms, controlled_moments
from .samples import estimate_of_forms
from .slq import SLQEstimator
from .task import AbstractFunctionTask


# What a control leaves of the standard error, where steps are chosen for it: before the
# run it is not known. A share of 3% is a correlation of 0.9995. The quadrature error
# falls exponentially, so the steps for a smaller share than needed are few.
_SHARE_LEFT = 0.03


class ControlledFunction(AbstractWrappedTask):
    """The trace of a function of A with a control, for an operator that stacks A above B.

    - `task`: the trace of the function.
    - `known`: that of B.
    - `hermitian`, `signs`: what is known of A and B.
    """

    task: AbstractFunctionTask
    known: Inexact[Array, ""]
    hermitian: bool = eqx.field(static=True)
    signs: tuple[int, ...] = eqx.field(static=True)

    def exact_limit(self, operator: FlatOperator) -> int:
        return self.task.exact_limit(self._parts(operator)[0])

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return self.task.default_max_k(self._parts(operator)[0], k)

    def _parts(self, operator: FlatOperator) -> list[FlatOperator]:
        """A and B, with their tags."""
        pairs = zip(unstack(operator), self.signs, strict=True)
        return [
            dataclasses.replace(half, hermitian=self.hermitian, sign=sign)
            for half, sign in pairs
        ]

    def _operands(self, operator: FlatOperator) -> list[FlatOperator]:
        return [self.task.operand(part) for part in self._parts(operator)]

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        answer = self.task.exact(self._parts(operator)[0], facts, execution)
        zero = jnp.zeros_like(answer.value)
        extra = answer.extra | _statistics(zero, zero.real, 0)
        return dataclasses.replace(answer, extra=extra)

    def _body(
        self, krylov: AbstractKrylovMethod, steps: Steps, draw: Callable[[Array], Array]
    ) -> Callable[[FlatOperator, Array], tuple[Array, Any]]:
        """The function from a probe's index to the values of its two forms, with their
        derivatives, and to these forms."""
        task = self.task
        assert not isinstance(task.function, FunctionTree)
        assert isinstance(task.estimator, SLQEstimator)
        function, gradient = task.function, task.gradient
        bound = task.estimator.lower_bound

        def body(operator, index):
            probe, forms = draw(index), []
            for flat in self._operands(operator):
                form = krylov.form(
                    flat.frozen,
                    probe,
                    function=function,
                    most=steps.most,
                    lower_bound=bound,
                    columns=gradient.columns,
                    steps=steps.made,
                )
                frame = gradient.frame(
                    function, form.left.T, form.right.T, probe[:, None]
                )
                value = attach(flat, form.value, frame, execution=Local())
                # The vectors of the derivative are in the frame, and not kept.
                empty = {"left": form.left[:0], "right": form.right[:0], "spread": None}
                forms.append((value, dataclasses.replace(form, **empty)))
            values, kept = zip(*forms, strict=True)
            return jnp.stack(values), jax.lax.stop_gradient(kept)

        return body

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        task, estimator = self.task, self.task.estimator
        assert isinstance(estimator, SLQEstimator)
        assert not isinstance(task.function, FunctionTree)
        check_full_support("estimator.sampler", estimator.sampler)
        function, bound = task.function, estimator.lower_bound
        first = self._operands(operator)[0]
        krylov = estimator.method(first, function)
        target = GradientTarget.of(first, k, task.gradient.from_runs)

        def draw(index):
            return draw_for(operator, estimator.sampler, key, index[None])[:, 0]

        def excess(value, bracket, deviation):
            left = _SHARE_LEFT * deviation
            return excess_of_bracket(value, bracket, left, first, k, task.quantity)

        def choose(adaptive):
            # For both operators, since the errors of both count.
            settings = {"krylov": krylov, "function": function, "bound": bound}
            settings |= {"probe": draw(jnp.zeros((), int)), "execution": execution}
            settings |= {"target": target}
            steps = [
                choose_steps_of_form(adaptive, operator=x, excess=excess, **settings)
                for x in self._operands(operator)
            ]
            return jnp.maximum(*steps)

        num_steps: Any = task.num_steps  # `controlled_function` refuses random ones
        steps, k = Steps.resumed(num_steps, choose, k)

        body = self._body(krylov, steps, draw)
        known = jax.lax.stop_gradient(self.known)
        # Jitted so that it is traced once, for the loop and for the result.
        moments_of = jax.jit(
            lambda _, forms, valid: controlled_moments(forms, known, valid)[0]
        )
        streamed = stream(
            fn=body,
            reduce=lambda *_: (),
            merge=lambda parts: parts,
            operator=operator,
            k=k,
            execution=execution,
            width=2 * steps.most,
            quantity=task.quantity,
            moments_of=moments_of,
        )
        forms = streamed.others
        valid = jnp.arange(len(forms[0].value)) < streamed.count
        moments, fit, controlled = controlled_moments(forms, known, valid)

        def live():
            ones = jnp.ones_like(fit.coefficients)
            weights = jnp.stack([ones, -fit.coefficients], axis=1)
            return jnp.sum(streamed.mean(weights)) + fit.mean * self.known

        extremes = spectral_range(controlled.extremes, valid.astype(jnp.int32))
        estimate = estimate_of_forms(
            as_streamed(streamed, controlled, moments, extremes, valid),
            operator=first,
            function=function,
            k=k,
            steps=steps,
            excess=excess,
            target=target,
            live=live,
            extremes=critical_extremes(extremes),
        )
        error, consistent = check_known_forms(forms[1], known, valid, first)
        error = jnp.abs(fit.mean) * error
        products = (streamed.count * steps.made + steps.spent) * krylov.products_per_step
        estimate = dataclasses.replace(
            estimate.map_bounds(lambda x: x.at[:, 1].set(jnp.hypot(x[:, 1], error))),
            std_err=jnp.hypot(estimate.std_err, error),
            num_matvecs=products,
            result=first_failure(consistent, estimate.result),
            extra=estimate.extra | _statistics(fit.mean, fit.correlation, products),
            method=f"{self.name} with {krylov.title} and a control",
        )
        return task.finish(self._parts(operator)[0], estimate)


def _statistics(
    coefficient: Inexact[Array, ""], correlation: Real[Array, ""], num_matvecs: Any
) -> dict[str, Array]:
    return {
        "control_coefficient": coefficient,
        "correlation_with_control": correlation,
        "num_control_matvecs": jnp.asarray(num_matvecs, jnp.int32),
    }
