"""`log tr exp(s A)` of a Hermitian A, from quadratic forms in the logarithm.

For probes z_i with the identity as covariance, `tr exp(s A)` is the mean of
`exp(x_i)` with `x_i = log z_i* exp(s A) z_i`, which Lanczos gives without overflow
(`_functions/log_exponential.py`; Jaklic and Prelovsek 1994). With k probes

    value = log((1 / k) sum_i exp(x_i)),    d value / d x_i = exp(x_i - value) / k.

In the code s is `scale`, the x_i are the `samples`, and `LogMoments` has the mean and its
error bar.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real, Scalar

from .._core.checks import check_instance, real_scalar
from .._core.flat import FlatOperator
from .._core.log_moments import LogMoments
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import first_failure
from .._core.sampler import AbstractSampler, draw_for
from .._core.solution import Estimate, Solution
from .._core.strata import StratifiedMoments
from .._functions.all_eigenvalues import bounds_around
from .._functions.log_exponential import (
    first_two_moments,
    log_magnitude,
    LogExponentialForm,
    sum_of_shares,
    unbiased_log,
)
from .._functions.slq import lanczos_of, SLQEstimator
from .._krylov.arnoldi import Arnoldi
from .._krylov.lanczos import Lanczos
from .._numerics.dense import eigh
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter, Facts
from .._quadrature.quadratic_form import spectral_range
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.budget import Budget, in_sweeps
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach, attach_derivative, FirstOrderFrame
from .._run.loop import sum_over_rounds
from .._run.solve import AbstractTask, solve
from .._run.steps import (
    AdaptiveSteps,
    check_steps,
    choose_steps,
    exact_limit,
    excess,
    standard_error,
    Steps,
)
from .._run.stream import stream
from .log_trace_exp_untagged import LogTraceExpUntagged


class _LogTraceExp(AbstractTask):
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

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        eye = jnp.eye(operator.size, dtype=operator.dtype)
        matrix = execution.matmat(operator.frozen, eye)
        # The mean of both triangles, of which `eigh` reads one: so their rounding errors,
        # or those of an inexact operator, count alike.
        nodes, vectors = eigh((matrix + matrix.conj().T) / 2)
        scale = self.scale.astype(nodes.dtype)
        value = logsumexp(scale * nodes)
        # d value = tr(L* dA), with L = s exp(s A) / tr exp(s A).
        slopes = scale * jnp.exp(scale * nodes - value)
        left = jnp.matmul(vectors * slopes, vectors.conj().T, precision="highest")
        value = attach(operator, value, FirstOrderFrame(left, eye), execution=execution)
        zero, extremes = jnp.zeros_like(value), nodes[jnp.array([0, -1])]
        size = log_magnitude(scale, extremes) + jnp.abs(value)
        # Eigenvalues have errors of epsilon times the largest one.
        change = float(jnp.finfo(nodes.dtype).eps) * size
        return Estimate(
            value=value,
            std_err=zero,
            samples=value[None],
            num_matvecs=operator.size,
            rounding=0.0,
            extra={
                "gradient_residual": zero[None],
                "ritz_values": extremes,
                "quadrature_error": zero,
                "num_steps": jnp.zeros((), jnp.int32),
            },
            bounds=bounds_around(value, change),
        )

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
            first, second = total / streamed.count
            if self.sampler.num_strata > 1:
                # The mean square has the differences between strata, which are no
                # variance. Without the correction the bias is below the error bar.
                second = first**2
            return value + unbiased_log(first, second, streamed.count)

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
        if isinstance(moments.scaled, StratifiedMoments):
            step_stats |= moments.scaled.statistics(scalar=True)
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
                **(step_stats | streamed.loop.extra),
            },
            state=steps.state(streamed.loop.state),
            bounds=bounds,
            method=f"Gauss rules of {self.krylov.title}",
        )

    def _summarise(self, outs, valid) -> tuple:
        """The moments of the samples of one device, and the range of their Ritz values."""
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


def log_trace_exp(
    operator: OperatorLike,
    scale: Scalar | float = 1.0,
    estimator: SLQEstimator = SLQEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate $\\log \\mathrm{tr} \\exp(s A)$: the logarithm of a partition function or
    of an Estrada index, or a smooth maximum of eigenvalues.

    Only differences from the largest exponent are exponentiated, so $s A$ may be of any
    size that the dtype can hold. `traceax.trace_of_function` with `Exp` overflows in
    float32 where an eigenvalue of $s A$ is above 88.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        energies = jnp.diag(1e3 * x) + jnp.eye(300, k=1) + jnp.eye(300, k=-1)
        hamiltonian = lx.MatrixLinearOperator(energies, lx.symmetric_tag)

        def log_partition_function(beta):
            settings = {"k": 30, "key": jax.random.key(0)}
            solution = tx.log_trace_exp(hamiltonian, -beta, **settings)
            return solution.value, solution.std_err

        slope = jax.grad(log_partition_function, has_aux=True)
        mean_energy, bar = slope(jnp.array(0.1))
        print(-mean_energy, log_partition_function(0.1), bar)
        ```

    **Arguments:**

    - `operator`: a Hermitian matrix or operator, tagged so, as for
        [`traceax.trace_of_function`][]. Or a real one without a tag, with a positive
        trace of the exponential, for which [`traceax.Arnoldi`][] takes the place of
        Lanczos, with more steps and one run more.
    - `scale`: s, a real number or array of shape `()`.
    - `estimator`: sampler and `window`, `SLQEstimator(sampler, Lanczos(window))`; without
        a tag the sampler alone. A `lower_bound` is of no use here.
    - `k`: the number of probes, a Python integer. With `k >= n` the answer is exact. Or
        [`traceax.Adaptive`][], whose tolerances are those of the logarithm: `atol=0.1` is
        10% of the trace. Default: 1% of the logarithm.
    - `num_steps`: the number of Lanczos steps for each probe, a Python integer; more
        than n count as n. It takes somewhat more than
        $\\sqrt{|s| (\\lambda_{\\max} - \\lambda_{\\min})}$ steps. Or
        [`traceax.AdaptiveSteps`][], the default: one more run chooses a number that makes
        the quadrature error small compared with the sampling error or the tolerance.
    - `key`, `state`, `execution`, `throw`: as in [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][] with a real `value`, the logarithm. It takes at most `k *
    num_steps` matvecs, and one probe more where the steps are adaptive. `std_err` is the
    standard error of the logarithm: with m the mean of the exponentials and s its
    standard error, $\\log m - \\log(m - s)$. It is infinite where $m \\le s$, since the
    samples then give no lower bound. If a single eigenvalue outweighs the others, it is
    about $\\sqrt{2/k}$ for any n. The value is biased downward by about half the square
    of `std_err`.

    `stats` has `"samples"`, the logarithm of $z^* \\exp(s A) z$ for each probe: `value`
    is the logarithm of the mean of their exponentials. It also has `"quadrature_error"`,
    an estimate of the error of `value` from too few steps, which make it too small;
    `"ritz_values"`, the smallest and the largest Ritz value of $A$; and
    `"gradient_residual"` as in [`traceax.SLQEstimator`][]. Without a tag the forms may be
    negative, so `"samples"` are the forms themselves, times $e^{-c}$ with c the
    `"shift"`.

    Derivatives in the operator's arrays are estimates of $s\\, \\mathrm{tr}(e^{sA} dA) /
    \\mathrm{tr}\\, e^{sA}$, by [`traceax.LanczosGradient`][], of first order only.
    Derivatives in `scale` are estimates of $\\mathrm{tr}(A e^{sA}) / \\mathrm{tr}\\,
    e^{sA}$, to all orders. They are corrected for the bias of a logarithm, and so are not
    derivatives of `value`. Memory: `num_steps` vectors of length n for each probe of a
    block, or with `window=0` and no derivative the vectors of one step; and for a
    derivative two vectors for each probe.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer.
    - `ValueError`: `operator` is not square, or is complex and not known to be Hermitian;
        `k` or `num_steps` is too small; `key` is missing.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite; the budget,
        or the largest number of adaptive steps, is too small for the tolerance; the
        estimate of the trace is not positive.

    ??? cite

        ```bibtex
        @article{jaklic1994lanczos,
            author  = {Jakli{\\v{c}}, J. and Prelov{\\v{s}}ek, P.},
            title   = {{Lanczos} Method for the Calculation of Finite-Temperature
                       Quantities in Correlated Systems},
            journal = {Physical Review B},
            volume  = {49},
            pages   = {5065},
            year    = {1994},
        }
        ```
    """
    entered = enter(operator)
    num_steps, scale = check_steps(num_steps, entered.size), real_scalar("scale", scale)
    is_complex = jnp.issubdtype(entered.flat.dtype, jnp.complexfloating)
    if entered.flat.hermitian or is_complex:
        # The trace of a complex one without a tag is complex, and so is the logarithm.
        check_hermitian(entered.flat)
        sampler, krylov = lanczos_of(estimator)
        task = _LogTraceExp(
            scale=scale, num_steps=num_steps, sampler=sampler, krylov=krylov
        )
    else:
        check_instance("estimator", estimator, SLQEstimator, "SLQEstimator()")
        krylov = Arnoldi() if estimator.krylov is None else estimator.krylov
        check_instance("estimator.krylov", krylov, Arnoldi, "Arnoldi()")
        task = LogTraceExpUntagged(scale=scale, num_steps=num_steps, estimator=estimator)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
