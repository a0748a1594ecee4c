import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, Real

from .._execution import AbstractExecution, Local
from .._gradient import differentiate_by_frame, Frame
from .._moments import Moments, sample_mean
from .._sampler import AbstractSampler, draw, probe_dtype
from .._solution import Estimate
from .._solve import solve
from .._vectors import FlatOperator, flatten, standard_promotion


class AbstractTraceEstimator(eqx.Module):
    """An estimator of the trace. Hand one to [`traceax.trace`][].

    To write one, subclass [`traceax.AbstractStreamingEstimator`][] (independent samples)
    or [`traceax.AbstractSketchEstimator`][] (a block of probes taken together).
    """

    min_matvecs: eqx.AbstractClassVar[int]

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


def _probes(
    sampler: AbstractSampler,
    key: PRNGKeyArray | None,
    operator: FlatOperator,
    indices: Array,
) -> Inexact[Array, "n m"]:
    """Probes that the operator's own dtypes hold exactly."""
    if key is None:
        raise ValueError(
            "`key` is missing: the estimator draws random probes. Pass, for example, "
            "`key=jax.random.key(0)`."
        )
    dtype = probe_dtype(sampler, operator.dtype)
    probes = draw(sampler, key, indices, operator.size, dtype)
    return probes.astype(operator.precision).astype(operator.dtype)


def _rounding(operator: FlatOperator) -> float:
    """Relative size of rounding errors: those of n-term sums in the working dtype, and
    those of single products in the operator's."""
    working = float(jnp.finfo(operator.dtype).eps)
    return 2 * operator.eps + working * operator.size**0.5


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
            probe = _probes(self.sampler, key, flat, index[None])[:, 0]
            return self.sample(flat.mv, probe)

        # The backward pass draws a block's probes again instead of storing them all.
        body = eqx.filter_checkpoint(body, prevent_cse=False)
        samples = execution.map(body, flat, jnp.arange(k))
        moments = Moments.of(samples)
        return Estimate(
            value=moments.mean,
            std_err=moments.std_err(),
            samples=samples,
            num_matvecs=k,
            rounding=_rounding(flat),
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
    frame: Frame
    num_matvecs: int = eqx.field(static=True)
    scale: Real[Array, ""] | float = 1.0
    semidefinite: Bool[Array, ""] | None = None
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

        precision = jax.config.jax_default_matmul_precision  # pyright: ignore

        def evaluate(matmat, probes):
            def matmat_as_asked(x):
                with jax.default_matmul_precision(precision):
                    return matmat(x)

            # The sketch's own products must not fall to the low-precision default of an
            # accelerator; the operator's stay as the user has them.
            with jax.default_matmul_precision("highest"), standard_promotion():
                sketch = self.sketch(matmat_as_asked, probes, k, flat.eps)
                value = sketch.scale * sample_mean(sketch.samples)
            return value.astype(flat.dtype), sketch.frame, sketch

        value, _, sketch = differentiate_by_frame(
            flat,
            _probes(self.sampler, key, flat, jnp.arange(self.num_probes(k))),
            evaluate=evaluate,
            execution=execution,
        )
        return Estimate(
            value=sign * value,
            std_err=sketch.scale * sketch.std_err,
            samples=sign * sketch.scale * sketch.samples,
            num_matvecs=sketch.num_matvecs,
            rounding=_rounding(flat),
            semidefinite=sketch.semidefinite,
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
