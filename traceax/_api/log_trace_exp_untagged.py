"""`log tr exp(s A)` of a real A that is not known to be Hermitian.

With a number c near the largest exponent, the exponentials of

    log tr exp(s A) = c + log tr exp(s A - c I)

do not overflow, and the trace on the right is one of a function by Arnoldi. The largest
eigenvalue of the Hermitian part of `s H`, for the Hessenberg matrix H of a run, is such a
number: it bounds the growth of the exponential on the Krylov space,
`||exp(s H)|| <= exp(c)`. In the code c is `shift`.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import draw_for
from .._core.solution import Estimate
from .._functions.all_eigenvalues import exact_trace_of_function
from .._functions.gradients import LanczosGradient
from .._functions.slq import SLQEstimator
from .._krylov.arnoldi import Arnoldi
from .._krylov.base import AbstractKrylovMethod
from .._numerics.dense import eigh
from .._numerics.small_matrix import exponential
from .._operators.door import Facts
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .._quadrature.rules import clip_to_finite
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.solve import AbstractTask
from .._run.steps import AdaptiveSteps, advance_until, exact_limit


# A run is far from the largest exponent if it is this much below. A smaller number takes
# more steps for flat spectra, and with a larger one forms are noise beside 1 in float32.
_FAR = 10


class _ShiftedExp(AbstractSpectralFunction):
    """`exp(s x - c)`, with c constant to derivatives."""

    scale: Real[Array, ""]
    shift: Real[Array, ""]
    semidefinite_domain: ClassVar[bool] = False
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        # Finite where there may be no eigenvalue, so that it does not look like a pole.
        exponent = self.scale.astype(x.dtype) * x - self.shift.astype(x.dtype)
        return jnp.exp(jnp.where(exponent.real > 0, 0, exponent))

    def of_matrix(self, matrix):
        scale, shift = (x.astype(matrix.dtype) for x in (self.scale, self.shift))
        value = exponential(scale, matrix, shift)
        return value, scale * value


class _ShiftedArnoldi(AbstractKrylovMethod):
    """Arnoldi for a shifted exponential. Runs that are far from the largest exponent have
    forms that underflow, and so look converged: their bracket is as wide as it can be."""

    function: _ShiftedExp
    products_per_step: ClassVar[int] = 1

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return True

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return Arnoldi().start(operator, probe, most)

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        return Arnoldi().advance(operator, state, first, last)

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        form = Arnoldi().read(operator, state, steps, function, lower_bound, columns)
        scale, shift = jax.lax.stop_gradient((self.function.scale, self.function.shift))
        is_far = _largest(scale, form.extremes) < shift - _FAR
        anything = clip_to_finite(jnp.full_like(shift, jnp.inf), factor=1.0)
        bracket = jnp.where(is_far, jnp.stack([-anything, anything]), form.bracket)
        return dataclasses.replace(form, bracket=bracket)


class _LogOfTrace(Trace):
    """`c + log t` for a trace t, in which the tolerance of a budget is."""

    shift: Real[Array, ""]

    def present(self, value: Array, std_err: Array) -> tuple[Array, Array]:
        return _logarithm(value, std_err, self.shift)


def _logarithm(
    value: Real[Array, "*n"], std_err: Real[Array, "*n"], shift: Real[Array, ""]
) -> tuple[Real[Array, "*n"], Real[Array, "*n"]]:
    """`c + log(v)`, and `log(v) - log(v - e)` for an error e of v, to first order the
    relative error; where v or `v - e` is not positive, minus and plus infinity."""
    positive = value > 0
    safe = jnp.where(positive, value, 1)
    resolved = positive & (std_err < safe)
    error = -jnp.log1p(-jnp.where(resolved, std_err / safe, 0))
    log = jnp.where(positive, shift + jnp.log(safe), -jnp.inf)
    return log, jnp.where(resolved, error, jnp.inf)


class LogTraceExpUntagged(AbstractTask):
    """The logarithm of the trace of an exponential, by Arnoldi."""

    scale: Real[Array, ""]
    num_steps: int | AdaptiveSteps
    estimator: SLQEstimator
    quantity: AbstractQuantity = Trace()

    @property
    def name(self) -> str:
        return "log_trace_exp"

    @property
    def title(self) -> str:
        return "Logarithm of the trace of an exponential"

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    @property
    def min_matvecs(self) -> int:
        return self.estimator.sampler.num_strata

    @property
    def fallback(self) -> str:
        return self.name

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit(orthogonal=False)

    def _scale_of(self, operator: FlatOperator) -> Real[Array, ""]:
        return self.scale.astype(operator.dtype)

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        eye = jnp.eye(operator.size, dtype=operator.dtype)
        matrix = execution.matmat(operator, eye)
        dense = dataclasses.replace(operator, fn=_Matrix(matrix))
        scale, frozen = self._scale_of(operator), jax.lax.stop_gradient(matrix)
        nodes, _ = eigh((frozen + frozen.T) / 2)
        shift = _largest(jax.lax.stop_gradient(scale), nodes)
        function, gradient = _ShiftedExp(scale, shift), LanczosGradient()
        estimate = exact_trace_of_function(dense, function, gradient, execution)
        return self._in_logarithms(estimate, shift)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        scale = self._scale_of(operator)
        frozen = jax.lax.stop_gradient(scale)
        probe = draw_for(operator, self.estimator.sampler, key, jnp.zeros(1, int))
        width = self.num_steps
        if isinstance(width, AdaptiveSteps):
            width = width.most
        shifts, spent = execution.map(
            lambda flat, probe: self._shift(flat, probe, frozen),
            operator.frozen,
            probe.T,
            width=width,
        )
        shift = shifts[0]
        function = _ShiftedExp(scale, shift)
        krylov = _ShiftedArnoldi(function)
        estimate = SLQEstimator(self.estimator.sampler, krylov).run(
            operator,
            function,
            LanczosGradient(),
            k=k,
            num_steps=self.num_steps,
            key=key,
            execution=execution,
            quantity=_LogOfTrace(shift=shift),
        )
        num_matvecs = estimate.num_matvecs + spent[0]
        estimate = dataclasses.replace(estimate, num_matvecs=num_matvecs)
        return self._in_logarithms(estimate, shift)

    def _shift(
        self, flat: FlatOperator, probe: Inexact[Array, " n"], scale: Real[Array, ""]
    ) -> tuple[Real[Array, ""], Int[Array, ""]]:
        """c from one run, and the number of its steps. A run whose steps are chosen ends
        when the last quarter of them has raised c by less than 1."""
        krylov, steps = Arnoldi(), self.num_steps
        function = _ShiftedExp(scale, jnp.zeros_like(scale))

        def shift_after(state, steps):
            form = krylov.read(flat, state, steps, function, None, 1)
            return _largest(scale, form.extremes)

        def advance(state, first, last):
            return krylov.advance(flat, state, first, last)

        if not isinstance(steps, AdaptiveSteps):
            state = advance(krylov.start(flat, probe, steps), 0, steps)
            return shift_after(state, steps), jnp.asarray(steps, jnp.int32)

        def rise(state, steps):
            earlier = steps - jnp.maximum(steps // 4, 1)
            return shift_after(state, steps) - shift_after(state, earlier)

        start = krylov.start(flat, probe, steps.most)
        one = dataclasses.replace(steps, share=1.0)
        state, made, _ = advance_until(advance, start, one, first=4, excess_after=rise)
        return shift_after(state, made), made

    def _in_logarithms(self, estimate: Estimate, shift: Real[Array, ""]) -> Estimate:
        """The estimate of the logarithm, from one of the trace times `exp(-c)`."""
        value, std_err = _logarithm(estimate.value, estimate.std_err, shift)
        frozen = jax.lax.stop_gradient(estimate.value)
        positive = frozen > 0
        # A relative error of the trace is an absolute one of its logarithm.
        unit = jnp.where(positive, frozen, 1)
        size = jnp.maximum(estimate.magnitude / unit, 1)

        def of_bounds(bounds):
            ends, errors = _logarithm(bounds[:, 0], bounds[:, 1], shift)
            return jnp.stack([ends, errors], axis=1)

        extra = dict(estimate.extra)
        del extra["sample_brackets"]
        error = jnp.max(jnp.abs(extra.pop("bracket") - frozen))
        extra["quadrature_error"] = jnp.log1p(error / unit)
        extra["shift"] = shift
        not_positive = failure(~positive, RESULTS.not_positive)
        return dataclasses.replace(
            estimate.map_bounds(of_bounds),
            value=value,
            std_err=std_err,
            magnitude=jnp.maximum(size, jnp.abs(shift)),
            unresolved=estimate.unresolved / unit,
            result=first_failure(estimate.result, not_positive),
            extra=extra,
        )


class _Matrix(eqx.Module):
    matrix: Inexact[Array, "n n"]

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return jnp.matmul(self.matrix, vector, precision="highest")


def _largest(scale: Real[Array, ""], nodes: Real[Array, " s"]) -> Real[Array, ""]:
    """The largest exponent."""
    return jnp.max(scale * nodes[jnp.array([0, -1])])
