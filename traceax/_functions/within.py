"""Stochastic Lanczos quadrature with a total number of matvecs.

With `left` matvecs after a preconditioner, m probes of s steps have the squared error

    2 d^2 / m + e_s^2,    m s = left,

with `d = ||f(A) - c I||_F` (`deviation`) and the quadrature error e_s. The probes of a
first round, the pilot, make steps until

    e_s <= share d (2 s / left)^(1/2),

the sampling error that the rest of the matvecs can reach, or until they have made all of
them. Their runs are the first samples. Then there are as many rounds as `left` allows,
and steps are added to all runs where these leave some over.
"""

import dataclasses
import functools as ft
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Scalar

from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for
from .._core.solution import Estimate
from .._krylov.base import AbstractKrylovMethod
from .._preconditioners.auto import AutoPreconditioner
from .._quadrature.convergence import Convergence
from .._quadrature.domain import critical_extremes
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .._run.budget import some_rounds
from .._run.execution import AbstractExecution
from .._run.gradient_steps import GradientTarget
from .._run.matvecs import Matvecs, ROUND, SHARE_OF_BRACKET
from .._run.steps import AdaptiveSteps, advance_until, excess, standard_error, Steps
from .base import AbstractFunctionEstimator
from .gradients import AbstractFunctionGradient
from .preconditioned import check_logarithm, Preconditioned
from .samples import stream_forms
from .several import estimate_of_members
from .slq import SLQEstimator


# The quadrature error of the pilot over the sampling error that is expected. It adds an
# eighth to the error, where further steps would cost probes.
_SHARE = 0.5


class WithinMatvecs(AbstractFunctionEstimator):
    """An estimate from at most `budget.total` matvecs.

    - `estimator`: what makes the quadratic forms.
    - `budget`: the total.
    - `preconditioning`: makes a preconditioner first, if there is one.
    - `spent`: the number of matvecs that were made before.
    - `begins_at_bound`: whether the spectrum is known to begin at the lower bound of
        `estimator`.
    """

    estimator: SLQEstimator
    budget: Matvecs
    preconditioning: AutoPreconditioner | None = None
    spent: Int[Array, ""] | int = 0
    begins_at_bound: bool = eqx.field(static=True, default=False)
    min_probes: ClassVar[int] = 1

    @property
    def sampler(self) -> AbstractSampler:  # pyright: ignore
        return self.estimator.sampler

    def rescaled(self, factor: Scalar, least: Scalar | None = None) -> "WithinMatvecs":
        estimator = self.estimator.rescaled(factor, least)
        return dataclasses.replace(self, estimator=estimator)

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction | FunctionTree,
        gradient: AbstractFunctionGradient,
        *,
        k: Any,
        num_steps: Any,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        settings = {"key": key, "execution": execution, "quantity": quantity}
        if self.preconditioning is None:
            return self._sample(operator, function, gradient, num_steps, **settings)
        preconditioner = self.preconditioning.prepare(
            operator, k=self.budget, num_steps=num_steps, key=key, execution=execution
        )
        after = dataclasses.replace(
            self,
            preconditioning=None,
            spent=preconditioner.num_matvecs,
            begins_at_bound=self.preconditioning.shift is not None,
        )
        check_logarithm(operator, function)
        assert not isinstance(function, FunctionTree)
        run = Preconditioned(after, preconditioner).run
        return run(operator, function, gradient, k=k, num_steps=num_steps, **settings)

    def _sample(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction | FunctionTree,
        gradient: AbstractFunctionGradient,
        most: int,
        *,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity,
    ) -> Estimate:
        """The estimate from the matvecs that are left, with at most `most` steps."""
        krylov = self.estimator.method(operator, function)
        functions, bound = members_of(function), self.estimator.lower_bound
        left = (self.budget.total - self.spent) // krylov.products_per_step
        left = jnp.asarray(left, jnp.int32)
        target = GradientTarget.of(operator, ROUND, gradient.from_runs)
        draw = ft.partial(draw_for, operator, self.sampler, key)
        probes = draw(jnp.arange(ROUND)).T
        settings: dict[str, Any] = {"left": left, "target": target}
        settings |= {"execution": execution}
        pilot, of_pilot = self._pilot(
            krylov, operator, function, probes, most, **settings
        )
        most_rounds = max(1, self.budget.total // ROUND**2)
        rounds = jnp.clip(left // (ROUND * of_pilot), 1, most_rounds)
        made = jnp.minimum(left // (ROUND * rounds), most)
        steps = Steps(most=most, made=made, spent=0, chosen=True, limited=True)

        def forms(flat, index):
            probe, is_pilot = draw(index[None])[:, 0], index < ROUND
            states = pilot, krylov.start(flat, probe, most)
            state = jax.tree.map(
                lambda pilot, start: jnp.where(
                    is_pilot, pilot[jnp.minimum(index, ROUND - 1)], start
                ),
                *states,
            )
            first = jnp.where(is_pilot, of_pilot, 0)
            state = krylov.advance(flat, state, first, made)
            read = ft.partial(krylov.read, flat, state, made)
            read = [read(each, bound, gradient.columns) for each in functions]
            return [self._adjusted(form) for form in read], probe

        k = some_rounds(rounds, most_rounds, ROUND)
        streamed = stream_forms(
            forms,
            operator=operator,
            function=function,
            gradient=gradient,
            k=k,
            execution=execution,
            sampler=self.sampler,
            width=most,
            quantity=quantity,
        )
        moments, extremes = streamed.summary
        estimate = estimate_of_members(
            streamed,
            function=function,
            operator=operator,
            k=k,
            steps=steps,
            # There is no tolerance.
            excess=lambda *_, **__: jnp.zeros(()),
            target=target,
            extremes=critical_extremes(extremes),
        )
        isotropic = self.estimator.isotropic_columns
        return dataclasses.replace(
            estimate,
            num_matvecs=estimate.num_matvecs * krylov.products_per_step,
            num_samples=streamed.count,
            state=None,
            probes=ft.partial(isotropic, operator, key, k.max_k, moments.total),
            method=f"{type(self.estimator).__name__} with {krylov.title}",
        )

    def _adjusted(self, form: QuadraticForm) -> QuadraticForm:
        """The form with the standard deviation that its own run suggests: four samples
        agree by chance too often to be the only witnesses of their spread. Where the
        spectrum begins at the bound, also with the value from within the bracket."""
        value = form.value
        if self.begins_at_bound:
            low, high = form.bracket
            value = low + SHARE_OF_BRACKET * (high - low)
        spread = standard_error(form.deviation, 1)
        return dataclasses.replace(form, value=value, spread=spread)

    def _pilot(
        self,
        krylov: AbstractKrylovMethod,
        operator: FlatOperator,
        function: AbstractSpectralFunction | FunctionTree,
        probes: Array,
        most: int,
        *,
        left: Int[Array, ""],
        target: GradientTarget,
        execution: AbstractExecution,
    ) -> tuple[PyTree[Array], Int[Array, ""]]:
        """The runs of the first round, and the number of their steps."""
        functions, bound = freeze((members_of(function), self.estimator.lower_bound))
        mapped = ft.partial(execution.map, width=most)
        frozen = operator.frozen

        def advance(states, first, last):
            fn = lambda flat, state: krylov.advance(flat, state, first, last)  # noqa: E731
            return mapped(fn, frozen, states)

        def excess_after(states, steps):
            def read(flat, state):
                # The derivative is not read here.
                forms = [krylov.read(flat, state, steps, f, bound, 1) for f in functions]
                forms = [self._adjusted(form) for form in forms]
                numbers = [
                    (
                        form.value,
                        form.deviation,
                        Convergence.of(form).flat,
                        target.excess(each, form.residual, form.extremes),
                    )
                    for each, form in zip(functions, forms, strict=True)
                ]
                return jax.tree.map(lambda *x: jnp.stack(x), *numbers)

            def of_each(values, deviations, convergences, missing):
                """The excess of one function, from the numbers of each probe."""
                convergence = Convergence.from_flat(jnp.mean(convergences, axis=0))
                mean = jnp.mean(values)
                error = jnp.max(convergence.errors(mean))
                if self.begins_at_bound:
                    error = jnp.min(convergence.widths(mean))
                deviation = jnp.sqrt(jnp.mean(deviations**2))
                affordable = left / steps.astype(deviation.dtype)
                ratio = excess(error, standard_error(deviation, affordable))
                return jnp.maximum(ratio, jnp.mean(missing))

            numbers = mapped(read, frozen, states)
            return jnp.max(jax.vmap(of_each, in_axes=1)(*numbers))

        start = lambda flat, probe: krylov.start(flat, probe, most)  # noqa: E731
        states, steps, _ = advance_until(
            advance,
            mapped(start, frozen, jax.lax.stop_gradient(probes)),
            adaptive=AdaptiveSteps(most, _SHARE),
            first=1,
            excess_after=excess_after,
            most=jnp.minimum(most, left // ROUND),
        )
        return jax.lax.stop_gradient((states, steps))
