"""Linear quantities with a control variate: an operator B whose quantity is known.

Each probe gives a sample a_i of A and a sample b_i of B, and the samples of the estimate
are

    t_i = a_i - c_i (b_i - known).

Traces, of the whole or of leaves, take the coefficients c_i of `_core/control.py`, each
from all other samples. The samples of a diagonal are not kept. Its entries share one
coefficient, from two further probes (`_pilot`): with the differences da and db of the
samples of these two, in which diagonals cancel,

    c = sum_e da_e conj(db_e) / sum_e |db_e|^2.

Both kinds are independent of the sample that they are for, so the estimate is unbiased.
Its derivative is that of `mean(a_i - c_i (b_i - known))` with constant c_i.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.control import check_known, FEWEST_CONTROLLED, Regression
from .._core.flat import FlatOperator
from .._core.moments import align
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import first_failure
from .._core.sampler import check_full_support
from .._core.sign_moments import SignMoments
from .._core.solution import Estimate
from .._krylov.difference import unstack
from .._operators.control import Controlled, known_entries
from .._operators.door import Facts
from .._run.budget import Budget, largest_budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach_derivative
from .._run.stream import stream, Streamed
from .._run.wrapped import AbstractWrappedTask
from .auto import AutoTraceEstimator
from .auto_diagonal import AutoDiagonalEstimator
from .base import AbstractEstimator, Measurement
from .hutchinson import HutchinsonEstimator
from .pairs import Pairs
from .streaming import AbstractStreamingEstimator


# The number of probes that the coefficient of a diagonal is made from. It is a ratio of
# sums over all entries, which more probes hardly improve.
_PILOT = 2
# The index of the first of them, beyond those of all samples.
_FIRST_PILOT = 2**30


class _Moments(eqx.Module):
    """The moments of controlled samples, whose coefficients are made from them."""

    samples: Inexact[Array, "m ..."]
    signs: SignMoments
    fit: Regression

    @property
    def count(self) -> Real[Array, ""]:
        return self.signs.count

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        return self.signs.mean

    def std_err(self) -> Real[Array, "*q"]:
        return self.signs.std_err() * self.fit.widening


class ControlledMeasurement(AbstractWrappedTask):
    """A linear quantity of A with a control, for an operator that stacks A above B.

    - `task`: the quantity, with a streaming estimator.
    - `known`: the quantity of B, of the shape that it reads.
    - `hermitian`: whether A and B are Hermitian.
    """

    task: Measurement
    known: Inexact[Array, "*q"]
    hermitian: bool = eqx.field(static=True)

    @property
    def estimator(self) -> AbstractStreamingEstimator:
        assert isinstance(self.task.estimator, AbstractStreamingEstimator)
        return self.task.estimator

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        a, _ = unstack(operator)
        answer = self.task.exact(a, facts, execution)
        zero = jnp.zeros_like(answer.value)
        if self.quantity.entrywise:
            zero = jnp.zeros((), zero.dtype)
        extra = answer.extra | self._statistics(zero, zero.real, 0)
        return dataclasses.replace(answer, extra=extra)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        check_full_support("estimator.sampler", self.estimator.sampler)
        operator = dataclasses.replace(operator, hermitian=self.hermitian)
        run = self._run_entries if self.quantity.entrywise else self._run_scalars
        return run(operator, k, key, execution)

    def _run_scalars(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        pairs = Pairs.of(self.estimator, self.quantity, key, k)
        known = jax.lax.stop_gradient(self.known)

        def body(operator, index):
            readings = pairs.read(operator, index)
            return readings.samples, jax.lax.stop_gradient(readings)

        # Jitted so that it is traced once, for the loop and for the result.
        @jax.jit
        def moments_of(_, readings, valid):
            a, b = jnp.unstack(readings.samples, axis=1)
            fit = Regression.of(a, b, valid)
            parts = readings.controlled(fit.coefficients, known, axis=1)
            signs = pairs.moments(operator, parts, valid)
            rows = align(valid, parts.samples)
            return _Moments(jnp.where(rows, parts.samples, jnp.inf), signs, fit)

        streamed = stream(
            fn=body,
            reduce=lambda *_: (),
            merge=lambda parts: parts,
            operator=operator,
            k=k,
            execution=execution,
            quantity=self.quantity,
            moments_of=moments_of,
        )
        readings = streamed.others
        valid = jnp.arange(len(readings.samples)) < streamed.count
        moments = moments_of(None, readings, valid)
        control = pairs.moments(operator, readings.part(1, axis=1), valid)
        fit = moments.fit

        def live():
            ones = jnp.ones_like(fit.coefficients)
            weights = jnp.stack([ones, -fit.coefficients], axis=1)
            change = jnp.sum(streamed.mean(weights), axis=0)
            return change + fit.mean * self.known

        excess, consistent = check_known(control, known, operator.rounding)
        estimate = self._estimate(operator, streamed, moments.signs, consistent)
        return dataclasses.replace(
            estimate,
            value=attach_derivative(moments.mean, live),
            std_err=jnp.hypot(moments.std_err(), jnp.abs(fit.mean) * excess),
            samples=moments.samples,
            skewness=None if moments.mean.ndim == 0 else moments.signs.skewness,
            extra=estimate.extra
            | self._statistics(fit.mean, fit.correlation, streamed.count),
        )

    def _run_entries(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        pairs = Pairs.of(self.estimator, self.quantity, key, k)
        coefficient, correlation, spent = self._pilot(pairs, operator, k, execution)
        if isinstance(k, Budget):
            k = dataclasses.replace(
                k.limited_to(k.max_k - spent), spent=jnp.asarray(spent, jnp.int32)
            )
        else:
            k = k - spent
        pairs = Pairs.of(self.estimator, self.quantity, key, k)
        traces = Pairs.of(self.estimator, Trace(), key, k)
        known = jax.lax.stop_gradient(self.known)

        def body(operator, index):
            parts = pairs.read(operator, index).controlled(coefficient, known, axis=0)
            # Whether the known diagonal is consistent is read from traces of B.
            control = traces.read(operator.frozen, index).part(1, axis=0)
            return parts.samples, jax.lax.stop_gradient((parts, control))

        def reduce(outs, valid):
            _, (parts, control) = outs
            control = traces.moments(operator, control, valid)
            return pairs.moments(operator, parts, valid), control

        streamed = stream(
            fn=body,
            reduce=reduce,
            merge=lambda parts: tuple(SignMoments.merge(x) for x in parts),
            operator=operator,
            k=k,
            execution=execution,
            keep=lambda _: None,
            quantity=self.quantity,
        )
        moments, control = streamed.summary

        def live():
            return streamed.mean() + coefficient * (self.known - known)

        excess, consistent = check_known(control, jnp.sum(known), operator.rounding)
        # What is wrong in the sum may be spread over all entries.
        doubt = jnp.abs(coefficient) * excess / known.size
        estimate = self._estimate(operator, streamed, moments, consistent)
        count = streamed.count + spent
        return dataclasses.replace(
            estimate,
            value=attach_derivative(moments.mean, live),
            std_err=jnp.hypot(moments.std_err(), doubt),
            num_matvecs=count,
            skewness=moments.skewness,
            extra=estimate.extra | self._statistics(coefficient, correlation, count),
        )

    def _estimate(
        self,
        operator: FlatOperator,
        streamed: Streamed,
        moments: SignMoments,
        result: Any,
    ) -> Estimate:
        """What both kinds of estimates have in common."""
        return Estimate(
            value=moments.mean,
            std_err=moments.std_err(),
            samples=None,
            num_matvecs=streamed.count,
            rounding=operator.rounding,
            magnitude=0.0 if moments.size is None else moments.size,
            result=first_failure(result, streamed.loop.result),
            extra=streamed.loop.extra,
            state=streamed.loop.state,
            num_samples=streamed.count,
            method=f"{self.name} with a control",
        )

    def _pilot(
        self,
        pairs: Pairs,
        operator: FlatOperator,
        k: int | Budget,
        execution: AbstractExecution,
    ) -> tuple[Inexact[Array, ""], Real[Array, ""], int]:
        """The coefficient of a diagonal, the correlation of its entries with those of the
        control, and how many matvecs with each operator these take."""
        if largest_budget(k) < FEWEST_CONTROLLED:
            zero = jnp.zeros((), self.known.dtype)
            return zero, zero.real, 0

        def body(operator, index):
            return pairs.read(operator, index).samples

        indices = _FIRST_PILOT + jnp.arange(_PILOT)
        first, second = execution.map(body, operator.frozen, indices)
        sizes = jnp.max(jnp.abs(first - second), axis=1)
        units = jnp.where(sizes > 0, sizes, 1)
        a, b = (first - second) / units[:, None]
        aa, bb = (jnp.vdot(x, x, precision="highest").real for x in (a, b))
        ab = jnp.vdot(b, a, precision="highest")
        root = jnp.sqrt(aa * bb)
        correlation = jnp.abs(ab) / jnp.where(root > 0, root, 1)
        coefficient = ab / jnp.where(bb > 0, bb, 1) * (units[0] / units[1])
        return coefficient, jnp.minimum(correlation, 1), _PILOT

    def _statistics(
        self,
        coefficient: Inexact[Array, "*c"],
        correlation: Real[Array, "*c"],
        num_matvecs: Any,
    ) -> dict[str, PyTree[Array]]:
        def arrange(x):
            return x if self.quantity.entrywise else self.quantity.arrange(x)

        return {
            "control_coefficient": arrange(coefficient),
            "correlation_with_control": arrange(correlation),
            "num_control_matvecs": jnp.asarray(num_matvecs, jnp.int32),
        }


def controlled(
    quantity: AbstractQuantity, estimator: AbstractEstimator, operators: Controlled
) -> ControlledMeasurement:
    """The task of estimating the quantity of A with a control."""
    if isinstance(estimator, AutoTraceEstimator | AutoDiagonalEstimator):
        estimator = HutchinsonEstimator()
    if not isinstance(estimator, AbstractStreamingEstimator):
        raise ValueError(
            "`control` is for estimators with independent samples. Found "
            f"`{estimator.name}`, whose sketch of the operator is a control already. "
            "Pass `traceax.HutchinsonEstimator()`, or estimate the operator `A - c * B` "
            "and add c times the known answer."
        )
    dtype = operators.entered.flat.dtype
    vector = jax.ShapeDtypeStruct((operators.entered.size,), dtype)
    with standard_promotion():
        entries = eqx.filter_eval_shape(quantity.read, vector, vector)
        if operators.known is None:
            diagonal = operators.diagonal
            known = quantity.read(jnp.ones_like(diagonal), diagonal)
        else:
            like = jax.eval_shape(quantity.arrange, entries)
            known = known_entries(operators.known, like).reshape(entries.shape)
    return ControlledMeasurement(  # pyright: ignore
        task=Measurement(estimator=estimator, quantity=quantity),
        known=known,
        hermitian=operators.hermitian,
    )
