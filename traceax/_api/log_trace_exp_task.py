"""`log tr exp(s A)` of a Hermitian A, from quadratic forms in the logarithm.

For probes z_i with the identity as covariance, `tr exp(s A)` is the mean of
`exp(x_i)` with `x_i = log z_i* exp(s A) z_i`, which Lanczos gives without overflow
(`_functions/log_exponential.py`; Jaklic and Prelovsek 1994). With k probes

    value = log((1 / k) sum_i exp(x_i)),    d value / d x_i = exp(x_i - value) / k.

In the code s is `scale`, the x_i are the `samples`, and `LogMoments` has the mean and its
error bar.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.log_moments import LogMoments
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import first_failure
from .._core.sampler import AbstractSampler, draw_for
from .._core.solution import Estimate
from .._functions.all_eigenvalues import bounds_around, with_slopes
from .._functions.log_exponential import (
    first_two_moments,
    log_magnitude,
    LogExponentialForm,
    sum_of_shares,
    unbiased_log,
)
from .._krylov.lanczos import Lanczos
from .._numerics.dense import eigh
from .._operators.door import Facts
from .._quadrature.quadratic_form import spectral_range
from .._run.budget import Budget, in_sweeps
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach, attach_derivative, FirstOrderFrame
from .._run.loop import sum_over_rounds
from .._run.solve import AbstractTask
from .._run.steps import (
    AdaptiveSteps,
    choose_steps,
    exact_limit,
    excess,
    standard_error,
    Steps,
)
from .._run.stream import stream


class LogTraceExp(AbstractTask):
    """The logarithm of the trace of an exponential."""

    scale: Real[Array, ""]
    num_steps: int | AdaptiveSteps
    sampler: AbstractSampler
    krylov: Lanczos
    quantity: AbstractQuantity = Trace()

    @property
    def name(self) -> str:
        return "log_trace_exp"

    @property
    def title(self) -> str:
        return "Logarithm of the trace of an exponential"

    @property
    def min_matvecs(self) -> int:
        return self.sampler.num_strata

    @property
    def fallback(self) -> str:
        return "RademacherSampler"

    def _scale_of(self, operator: FlatOperator) -> Real[Array, ""]:
        """The scale in the real dtype of the operator, so that nothing is promoted."""
        return self.scale.astype(jnp.finfo(operator.dtype).dtype)

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit()

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        return operator.size if facts.spectrum is None else 0

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        scale = self._scale_of(operator)
        if facts.spectrum is not None:
            eigenvalues = facts.spectrum.eigenvalues
            nodes, num_matvecs = jax.lax.stop_gradient(eigenvalues), 0
            value = logsumexp(scale * nodes)
            value = with_slopes(value, self._slopes(nodes, value), eigenvalues)
        else:
            eye = jnp.eye(operator.size, dtype=operator.dtype)
            matrix = execution.matmat(operator.frozen, eye)
            # The mean of both triangles, of which `eigh` reads one: so their rounding
            # errors, or those of an inexact operator, count alike.
            nodes, vectors = eigh((matrix + matrix.conj().T) / 2)
            value, num_matvecs = logsumexp(scale * nodes), operator.size
            # d value = tr(L* dA), with L = s exp(s A) / tr exp(s A).
            left = vectors * self._slopes(nodes, value)
            left = jnp.matmul(left, vectors.conj().T, precision="highest")
            frame = FirstOrderFrame(left, eye)
            value = attach(operator, value, frame, execution=execution)
        ends = jnp.stack([jnp.min(nodes), jnp.max(nodes)])
        zero, size = jnp.zeros_like(value), log_magnitude(scale, ends) + jnp.abs(value)
        # Eigenvalues have errors of epsilon times the largest one.
        change = max(float(jnp.finfo(nodes.dtype).eps), operator.error) * size
        return Estimate(
            value=value,
            std_err=jnp.where(operator.error > 0, change, zero),
            samples=value[None],
            num_matvecs=num_matvecs,
            rounding=0.0,
            extra={
                "gradient_residual": zero[None],
                "ritz_values": ends,
                "quadrature_error": zero,
                "num_steps": jnp.zeros((), jnp.int32),
            },
            bounds=bounds_around(value, change),
        )

    def _slopes(self, nodes: Real[Array, " n"], value: Array) -> Real[Array, " n"]:
        """`d value / d lambda_i = s exp(s lambda_i) / tr exp(s A)` at the `nodes`."""
        scale = self.scale.astype(nodes.dtype)
        return scale * jnp.exp(scale * nodes - value)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat, krylov, scale = operator, self.krylov, self._scale_of(operator)

        def draw(flat, index):
            return draw_for(flat, self.sampler, key, index[None])

        def choose(adaptive):
            probe = draw(flat, jnp.zeros((), int))[:, 0]
            return self._choose_steps(adaptive, flat, probe, k, execution)

        k = in_sweeps(k, self.sampler.num_strata)
        steps, k = Steps.resumed(self.num_steps, choose, k)

        def sample(flat, index):
            probe = draw(flat, index)
            state = krylov.start(flat, probe[:, 0], steps.most)
            state = krylov.advance(flat.frozen, state, 0, steps.made)
            form = LogExponentialForm.read(state, steps=steps.made, scale=scale)
            frame = FirstOrderFrame(form.left[:, None], probe)
            value = attach(flat, form.value, frame, execution=Local())
            return value, (form.error, form.extremes, form.residual, index)

        streamed = stream(
            sample,
            reduce=self._summarise,
            merge=_merge,
            operator=flat,
            k=k,
            execution=execution,
            width=steps.most,
        )
        (moments, extremes), samples = streamed.summary, streamed.samples
        assert samples is not None
        value = jax.lax.stop_gradient(moments.mean)

        def differentiable_value():
            if isinstance(k, Budget):
                total = sum_over_rounds(
                    lambda flat, i: first_two_moments(sample(flat, i)[0] - value),
                    operator=flat,
                    xs=jnp.arange(len(samples)).reshape(k.num_rounds, k.round_size),
                    rounds=streamed.loop.rounds,
                    like=jnp.stack([value, value]),
                    execution=execution,
                    width=steps.most,
                )
            else:
                total = jnp.sum(jax.vmap(first_two_moments)(samples - value), axis=0)
            # The first two moments of exp(x_i - value), with the constant `value`.
            return value + self._log_of_mean(total, streamed.count)

        errors, _, residuals, _ = streamed.others
        error = sum_of_shares(errors, samples, value) / streamed.count
        std_err = moments.std_err()
        bounds = jnp.stack([value, std_err, value + error, std_err]).reshape(2, 2)
        size = log_magnitude(scale, extremes)
        rounding = flat.rounding * size
        target = jnp.hypot(std_err, rounding)
        if isinstance(k, Budget):
            target = k.rule.tolerance(value)
        # Half the width of the bracket, without rounding, which steps do not reduce.
        missed = excess(error / 2 - rounding, target) > 1
        step_stats, too_few_steps = steps.report(missed)
        return Estimate(
            value=attach_derivative(value, differentiable_value),
            std_err=std_err,
            samples=samples,
            num_matvecs=streamed.count * steps.made + steps.spent,
            rounding=flat.rounding,
            magnitude=size,
            result=first_failure(streamed.loop.result, too_few_steps),
            extra={
                "gradient_residual": residuals,
                "ritz_values": extremes,
                "quadrature_error": error,
                **(step_stats | streamed.loop.extra | moments.scaled.statistics()),
            },
            state=steps.state(streamed.loop.state),
            bounds=bounds,
            method=f"Gauss rules of {self.krylov.title}",
        )

    def _log_of_mean(
        self, total: Real[Array, "2"], count: Int[Array, ""] | int
    ) -> Real[Array, ""]:
        """The logarithm of the mean, from the sums of samples and of their squares."""
        first, second = total / count
        if self.sampler.num_strata > 1:
            # The mean square has the differences between strata, which are no variance.
            # Without the correction the bias is below the error bar.
            second = first**2
        return unbiased_log(first, second, count)

    def _summarise(self, outs, valid) -> tuple:
        """The moments of the samples of a device, and the range of their Ritz values."""
        samples, (_, extremes, _, indices) = outs
        strata = self.sampler.strata(indices, entrywise=False)
        return LogMoments.of(samples, valid, strata), spectral_range(extremes)

    def _choose_steps(
        self,
        adaptive: AdaptiveSteps,
        flat: FlatOperator,
        probe: Inexact[Array, " n"],
        k: int | Budget,
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """The number of steps that make the quadrature error a small share of the target:
        the tolerance, or the standard error of k probes."""
        # The number of steps is an integer, and the loop that chooses it has no reverse
        # mode.
        scale = jax.lax.stop_gradient(self._scale_of(flat))

        def excess_after(flat, state, steps):
            form = LogExponentialForm.read(state, steps=steps, scale=scale)
            if isinstance(k, Budget):
                target = k.rule.tolerance(form.value)
            else:
                strata = self.sampler.num_strata
                target = standard_error(form.deviation, k, strata)
            size = log_magnitude(scale, form.extremes)
            return excess(form.error / 2 - flat.rounding * size, target)

        return choose_steps(
            adaptive,
            krylov=self.krylov,
            operator=flat,
            probe=probe,
            # Not after one step, from which the error cannot be estimated.
            first=4,
            excess_after=excess_after,
            execution=execution,
        )


def _merge(parts) -> tuple:
    """One summary from several that are stacked."""
    moments, extremes = parts
    return LogMoments.merge(moments), spectral_range(extremes, moments.total)
