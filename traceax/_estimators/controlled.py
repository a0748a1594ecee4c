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
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.control import check_known, FEWEST_CONTROLLED, Regression
from .._core.flat import FlatOperator
from .._core.moments import align, FEW_SIGNS
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import first_failure
from .._core.sampler import check_full_support, draw_for
from .._core.sign_moments import SignMoments
from .._core.solution import Estimate
from .._krylov.difference import unstack
from .._operators.control import Controlled, known_entries
from .._operators.door import Facts
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach_derivative
from .._run.solve import AbstractTask
from .._run.stream import stream
from .auto import AutoTraceEstimator
from .auto_diagonal import AutoDiagonalEstimator
from .base import AbstractEstimator, Measurement
from .hutchinson import HutchinsonEstimator
from .streaming import (
    AbstractStreamingEstimator,
    is_skewed,
    NEARLY_EQUAL,
    read_sample,
)


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


class ControlledMeasurement(AbstractTask):
    """A linear quantity of A with a control, for an operator that stacks A above B.

    - `task`: the quantity, with a streaming estimator.
    - `known`: the quantity of B, of the shape that it reads.
    - `hermitian`: whether A and B are Hermitian.
    """

    task: Measurement
    known: Inexact[Array, "*q"]
    hermitian: bool = eqx.field(static=True)

    @property
    def quantity(self) -> AbstractQuantity:  # pyright: ignore
        return self.task.quantity

    @property
    def estimator(self) -> AbstractStreamingEstimator:
        assert isinstance(self.task.estimator, AbstractStreamingEstimator)
        return self.task.estimator

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def title(self) -> str:
        return self.task.title

    @property
    def min_matvecs(self) -> int:
        return self.task.min_matvecs

    @property
    def fallback(self) -> str:
        return self.task.fallback

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
        estimate = run(operator, k, key, execution)
        return dataclasses.replace(estimate, method=f"{self.name} with a control")

    def _run_scalars(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        known, with_marks = jax.lax.stop_gradient(self.known), self._with_marks(k)

        def body(operator, index):
            return self._pair(operator, index, key, self.quantity, with_marks)

        def moments_of(pairs, others, valid):
            fit = Regression.of(pairs[:, 0], pairs[:, 1], valid)
            parts = _controlled(pairs, others, fit.coefficients, known, axis=1)
            signs = self._moments(operator, parts, valid, self.quantity)
            samples = jnp.where(align(valid, parts[0]), parts[0], jnp.inf)
            return _Moments(samples, signs, fit)

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
        assert streamed.samples is not None
        pairs, others = jax.lax.stop_gradient((streamed.samples, streamed.others))
        valid = jnp.arange(len(pairs)) < streamed.count
        moments = moments_of(pairs, others, valid)
        fit = moments.fit
        of_control = jax.tree.map(lambda x: x[:, 1], (pairs, others))
        parts = of_control[0], *of_control[1]
        control = self._moments(operator, parts, valid, self.quantity)

        def live():
            ones = jnp.ones_like(fit.coefficients)
            weights = jnp.stack([ones, -fit.coefficients], axis=1)
            change = jnp.sum(streamed.mean(weights), axis=0)
            return change + fit.mean * self.known

        scalar = pairs.ndim == 2
        statistics = self._statistics(fit.mean, fit.correlation, streamed.count)
        return Estimate(
            value=attach_derivative(moments.mean, live),
            std_err=moments.std_err(),
            samples=moments.samples,
            num_matvecs=streamed.count,
            rounding=operator.rounding,
            magnitude=_size_of(moments.signs),
            result=first_failure(
                check_known(control, known, operator.rounding), streamed.loop.result
            ),
            extra=streamed.loop.extra | statistics,
            state=streamed.loop.state,
            num_samples=streamed.count,
            skewness=None if scalar else moments.signs.skewness,
        )

    def _run_entries(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        coefficient, correlation, spent = self._pilot(operator, k, key, execution)
        if isinstance(k, Budget):
            k = dataclasses.replace(
                k.limited_to(k.max_k - spent), spent=jnp.asarray(spent, jnp.int32)
            )
        else:
            k = k - spent
        known, with_marks = jax.lax.stop_gradient(self.known), self._with_marks(k)
        quantity, trace = self.quantity, Trace()

        def body(operator, index):
            pair, others = self._pair(operator, index, key, quantity, with_marks)
            parts = _controlled(pair, others, coefficient, known, axis=0)
            # Numbers show whether the known diagonal is consistent, and take no memory.
            traces = self._pair(operator.frozen, index, key, trace, with_marks)
            control = jax.tree.map(lambda x: x[1], traces)
            return parts[0], (parts[1:], (control[0], *control[1]))

        def reduce(outs, valid):
            samples, (others, control) = outs
            signs = self._moments(operator, (samples, *others), valid, quantity)
            return signs, self._moments(operator, control, valid, trace)

        streamed = stream(
            fn=body,
            reduce=reduce,
            merge=lambda parts: tuple(SignMoments.merge(x) for x in parts),
            operator=operator,
            k=k,
            execution=execution,
            keep=False,
            quantity=quantity,
        )
        moments, control = streamed.summary
        num_matvecs = streamed.count + spent

        def live():
            return streamed.mean() + coefficient * (self.known - known)

        statistics = self._statistics(coefficient, correlation, num_matvecs)
        return Estimate(
            value=attach_derivative(moments.mean, live),
            std_err=moments.std_err(),
            samples=None,
            num_matvecs=num_matvecs,
            rounding=operator.rounding,
            magnitude=_size_of(moments),
            result=first_failure(
                check_known(control, jnp.sum(known), operator.rounding),
                streamed.loop.result,
            ),
            extra=streamed.loop.extra | statistics,
            state=streamed.loop.state,
            num_samples=streamed.count,
            skewness=moments.skewness,
        )

    def _pilot(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> tuple[Inexact[Array, ""], Real[Array, ""], int]:
        """The coefficient of a diagonal, the correlation of its entries with those of the
        control, and how many matvecs with each operator these take."""
        if (k.max_k if isinstance(k, Budget) else k) < FEWEST_CONTROLLED:
            zero = jnp.zeros((), self.known.dtype)
            return zero, zero.real, 0

        def body(operator, index):
            return self._pair(operator, index, key, self.quantity, False)[0]

        indices = _FIRST_PILOT + jnp.arange(_PILOT)
        first, second = execution.map(body, operator.frozen, indices)
        sizes = jnp.max(jnp.abs(first - second), axis=1)
        units = jnp.where(sizes > 0, sizes, 1)
        a, b = (first - second) / units[:, None]
        aa, bb = (jnp.vdot(x, x, precision="highest").real for x in (a, b))
        ab = jnp.vdot(b, a, precision="highest")
        root = jnp.sqrt(aa * bb)
        correlation = jnp.where(root > 0, jnp.abs(ab) / jnp.where(root > 0, root, 1), 0)
        coefficient = ab / jnp.where(bb > 0, bb, 1) * (units[0] / units[1])
        return coefficient, jnp.minimum(correlation, 1), _PILOT

    def _pair(
        self,
        operator: FlatOperator,
        index: Int[Array, ""],
        key: PRNGKeyArray | None,
        quantity: AbstractQuantity,
        with_marks: bool,
    ) -> tuple[Inexact[Array, "2 ..."], tuple[Array | None, Array | None]]:
        """The samples of A and of B from probe `index`, their sizes and their marks."""

        # As for plain samples, the backward pass draws the probe again.
        @eqx.filter_checkpoint
        def read(operator, index, key, estimator):
            a, b = unstack(operator)
            probe = draw_for(a, estimator.sampler, key, index[None])[:, 0]
            pair = [
                read_sample(estimator, quantity, x, probe, with_marks=with_marks)
                for x in (a, b)
            ]
            return jax.tree.map(lambda x, y: jnp.stack([x, y]), *pair)

        value, (sizes, marks, _) = read(operator, index, key, self.estimator)
        return value, (sizes, marks)

    def _with_marks(self, k: int | Budget) -> bool:
        count = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k
        return count < FEW_SIGNS and self.estimator.sampler.unit_modulus

    def _moments(
        self,
        operator: FlatOperator,
        parts: tuple[Array, Array | None, Array | None],
        valid: Bool[Array, " m"],
        quantity: AbstractQuantity,
    ) -> SignMoments:
        """The moments of samples with these sizes and marks."""
        samples, size, marks = parts
        near = NEARLY_EQUAL if quantity.comparable(operator.hermitian) else 0.0
        return SignMoments.of(
            samples=samples,
            size=size,
            marks=marks,
            valid=valid,
            skewed=is_skewed(quantity, self.estimator.sampler),
            rounding=operator.rounding,
            near=near,
        )

    def _statistics(
        self,
        coefficient: Inexact[Array, "*c"],
        correlation: Real[Array, "*c"],
        num_matvecs: Any,
    ) -> dict[str, PyTree[Array]]:
        arrange = self.quantity.arrange
        if self.quantity.entrywise:
            arrange = lambda x: x  # noqa: E731
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


def _controlled(
    pairs: Inexact[Array, "..."],
    others: tuple[Array | None, Array | None],
    coefficient: Inexact[Array, "..."],
    known: Inexact[Array, "*q"],
    axis: int,
) -> tuple[Array, Array, Array | None]:
    """The controlled samples, with their sizes and marks. The two operators are along an
    `axis` of each array."""
    a, b = jnp.unstack(pairs, axis=axis)
    sizes, marks = others
    # Terms of this size may cancel, even if those of the two samples cannot.
    size_a, size_b = jnp.abs(jax.lax.stop_gradient(a)), jnp.abs(jax.lax.stop_gradient(b))
    if sizes is not None:
        of_a, of_b = jnp.unstack(sizes, axis=axis)
        size_a, size_b = jnp.maximum(size_a, of_a), jnp.maximum(size_b, of_b)
    if marks is not None:
        marks_a, marks_b = jnp.unstack(marks, axis=axis)
        marks = marks_a - coefficient * marks_b
    size = size_a + jnp.abs(coefficient) * size_b
    return a - coefficient * (b - known), size, marks


def _size_of(moments: SignMoments) -> Real[Array, "*q"]:
    assert moments.size is not None
    return moments.size
