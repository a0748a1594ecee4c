import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, Real

from .._exact import exact_trace
from .._execution import AbstractExecution, full_precision, Local
from .._gradient import attach, attach_derivative, Frame
from .._moments import Moments, sample_mean
from .._sampler import AbstractSampler, draw_for
from .._solution import Estimate, failure, RESULTS
from .._solve import solve
from .._vectors import flatten


class AbstractTraceEstimator(eqx.Module):
    """An estimator of the trace. Hand one to [`traceax.trace`][].

    To write one, subclass [`traceax.AbstractStreamingEstimator`][] (independent samples)
    or [`traceax.AbstractSketchEstimator`][] (a block of probes taken together).
    """

    min_matvecs: eqx.AbstractClassVar[int]
    fallback: ClassVar[str] = "HutchinsonEstimator"

    @property
    def name(self) -> str:
        return type(self).__name__

    def exact(
        self, operator: lx.AbstractLinearOperator, execution: AbstractExecution
    ) -> Estimate:
        """The trace itself, from at most n products."""
        return exact_trace(operator, execution)

    @abc.abstractmethod
    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """Estimate the trace with at most `k` products; `k` is valid and below n."""

    def estimate(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """The call of traceax 1.0: `value, stats = estimator.estimate(key, operator, k)`.

        Arguments, errors and numbers are those of [`traceax.trace`][], whose `value` and
        `stats` it returns.
        """
        solution = solve(self, operator, k=k, key=key, execution=Local(), throw=True)
        return solution.value, solution.stats

    def __call__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """An alias of `estimate`."""
        return self.estimate(key, operator, k)


class AbstractStreamingEstimator(AbstractTraceEstimator):
    """An estimator whose samples are independent, one from each probe.

    Holds one block of probes at a time, in the backward pass too, so k may be anything.
    """

    sampler: eqx.AbstractVar[AbstractSampler]

    @abc.abstractmethod
    def sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        """One unbiased estimate from one probe and one product; linear in the product."""

    def run(self, operator, k, key, execution):
        flat = flatten(operator)

        def body(flat, index):
            probe = draw_for(flat, self.sampler, key, index[None])[:, 0]
            return self.sample(flat.mv, probe)

        # The backward pass draws a block's probes again instead of storing them all.
        body = eqx.filter_checkpoint(body, prevent_cse=False)
        samples, parts = execution.map_reduce(body, Moments.of, flat, jnp.arange(k))
        moments = Moments.merge(parts)
        return Estimate(
            value=attach_derivative(moments.mean, jnp.mean(samples)),
            std_err=moments.std_err(),
            samples=samples,
            num_matvecs=k,
            rounding=flat.rounding,
        )


class Sketch(eqx.Module):
    """What a sketch estimator makes of its probes.

    **Attributes:**

    - `samples`: the per-sample estimates; their mean is the estimate.
    - `std_err`: the standard error of that mean.
    - `frame`: arrays `L, R` of shape `(n, p)` with `E[sum(conj(L) * (dA R))] = d tr A`,
        from which derivatives are made.
    - `num_matvecs`: columns that the operator was applied to.
    - `scale`: what `samples`, `std_err` and `extra` are still to be multiplied by.
    - `semidefinite`: False if the operator was seen not to be positive semidefinite.
    - `extra`: entries for `Solution.stats`.
    """

    samples: Inexact[Array, " m"]
    std_err: Real[Array, ""]
    frame: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]
    num_matvecs: int = eqx.field(static=True)
    scale: Real[Array, ""] | float = 1.0
    semidefinite: Bool[Array, ""] | bool = True
    extra: dict[str, Array] = eqx.field(default_factory=dict)


class AbstractSketchEstimator(AbstractTraceEstimator):
    """An estimator that takes its probes together. Holds arrays of shape `(n, m)`.

    **Attributes:**

    - `semidefinite`: whether the operator must be tagged positive or negative
        semidefinite. A negative one is negated before, and the estimate after.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    semidefinite: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def num_probes(self, k: int) -> int:
        """How many probes to draw for a budget of `k` products."""

    @abc.abstractmethod
    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        """Estimate from `probes`. `matmat` applies the operator to the columns of an
        array, at most `k` columns in all; `eps` is the unit roundoff of its products."""

    def run(self, operator, k, key, execution):
        negative = self.semidefinite and _is_negative(operator, type(self).__name__)
        sign = -1 if negative else 1
        flat = flatten(-operator if negative else operator)

        probes = draw_for(flat, self.sampler, key, jnp.arange(self.num_probes(k)))
        with full_precision(lambda x: execution.matmat(flat.frozen, x)) as matmat:
            sketch = self.sketch(matmat, probes, k, flat.eps)
            value = sketch.scale * sample_mean(sketch.samples)
        value = value.astype(flat.dtype)
        value = attach(flat, value, Frame(*sketch.frame), execution=execution)
        return Estimate(
            value=sign * value,
            std_err=sketch.scale * sketch.std_err,
            samples=sign * sketch.scale * sketch.samples,
            num_matvecs=sketch.num_matvecs,
            rounding=flat.rounding,
            result=failure(~jnp.asarray(sketch.semidefinite), RESULTS.not_semidefinite),
            extra=jax.tree.map(lambda x: sketch.scale * x, sketch.extra),
        )


def _is_negative(operator: lx.AbstractLinearOperator, name: str) -> bool:
    if lx.is_positive_semidefinite(operator):
        return False
    if lx.is_negative_semidefinite(operator):
        return True
    raise ValueError(
        f"`{name}` needs an operator tagged as positive or negative semidefinite. Found "
        f"`operator` of type {type(operator).__name__} without the tag. If it is "
        "semidefinite, say so: `lineax.TaggedLinearOperator(operator, "
        "lineax.positive_semidefinite_tag)`; if not, use `traceax.XTraceEstimator`."
    )
