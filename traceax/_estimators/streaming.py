"""The base class of estimators with independent samples."""

import abc
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.checks import check_instance
from .._core.covariance import about_strata
from .._core.flat import FlatOperator, freeze
from .._core.joint import JointMoments
from .._core.moments import FEW_SIGNS
from .._core.quantity import AbstractQuantity
from .._core.sampler import AbstractSampler, draw_for
from .._core.shifted import is_trace
from .._core.sign_moments import SignMoments
from .._core.solution import Estimate
from .._core.strata import StratifiedMoments
from .._run.budget import Budget, in_sweeps
from .._run.execution import AbstractExecution
from .._run.gradient import attach_derivative
from .._run.stream import stream
from .base import AbstractEstimator, refusal


# Samples of signs are nearly equal if they spread less than this share of their marks;
# then their error bar is raised. With this, 95% intervals of row norms and of traces of
# blocks with equal entries cover 0.96 or more from 4 samples on; without, 0.68 with 4. A
# larger share would also widen the bars of samples that do spread little.
_NEARLY_EQUAL = 0.2


def is_skewed(quantity: AbstractQuantity, sampler: AbstractSampler) -> bool:
    """Whether samples are skewed, so that error bars must be wider. Quadratic forms of
    the probes are skewed. Entries of a diagonal are not if all entries of the probes have
    modulus one."""
    return not (quantity.entrywise and sampler.unit_modulus)


class AbstractStreamingEstimator(AbstractEstimator):
    """An estimator whose samples are independent, one from each probe.

    Cost: `k` matvecs. It holds one block of probes of its `sampler` at a time, also in
    the backward pass, so memory does not depend on `k`.

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Plain(tx.AbstractStreamingEstimator):
            # Hutchinson's estimator.
            sampler: tx.AbstractSampler = tx.RademacherSampler()
            min_matvecs: ClassVar[int] = 1

            def sample(self, mv, probe):
                return probe, mv(probe)

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Plain(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    quadratic: ClassVar[bool] = True

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")

    @property
    def num_strata(self) -> int:
        return self.sampler.num_strata

    @property
    def fallback(self) -> str:  # pyright: ignore
        # The sampler is what asks for more than one probe.
        return "RademacherSampler" if self.num_strata > 1 else "HutchinsonEstimator"

    @abc.abstractmethod
    def sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> tuple[Inexact[Array, " n"], Inexact[Array, " m"]] | Inexact[Array, ""]:
        """One unbiased estimate of the operator, or of its trace alone.

        **Arguments:**

        - `mv`: the operator as a function of flat vectors, shape `(n,)` to `(n,)`, to be
            called once.
        - `probe`: a random vector of the `sampler`, shape `(n,)`.

        **Returns:**

        A pair of vectors `left, image` of shape `(n,)`, such that the mean of
        `image left*` is the operator, and `image` is linear in the result of `mv`. Every
        quantity is computed from them. For norms, `image` must be the result of `mv`
        itself. Or a scalar of the dtype of `probe`, linear in the result of `mv`, for the
        trace alone.
        """

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        # An adaptive run may stop at its first test, which sees this many samples.
        count = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k
        # Few samples of signs may be equal by chance. Their marks show whether they are.
        with_marks = count < FEW_SIGNS and self.sampler.unit_modulus
        num_strata = self.num_strata
        k = in_sweeps(k, num_strata)

        # The backward pass draws a block's probes again instead of storing them all. What
        # is traced is passed, and not closed over, which would look like a leak of it.
        @ft.partial(eqx.filter_checkpoint, prevent_cse=False)
        def sample_of(operator, quantity, index, key, estimator):
            sampler, indices = estimator.sampler, index[None]
            probe = draw_for(operator, sampler, key, indices)[:, 0]
            full = None
            if num_strata > 1 and is_trace(quantity):
                full = draw_for(operator, sampler, key, indices, full=True)[:, 0]
            return read_sample(
                estimator, quantity, operator, probe, with_marks=with_marks, full=full
            )

        def body(operator, index, quantity=quantity):
            value, further = sample_of(operator, quantity, index, key, self)
            return value, (further, index if num_strata > 1 else None)

        def reduce(outs, valid):
            samples, ((sizes, marks, _), indices) = outs
            every = jax.vmap(quantity.split)(samples), sizes, marks
            settings = {"indices": indices, "valid": valid, "operator": operator}
            moments = [
                moments_of_part(self, part, *of_part, **settings)
                for part, *of_part in zip(quantity.parts, *every, strict=True)
            ]
            return (JointMoments(tuple(moments), quantity.joined),)

        def merge(summaries):
            (moments,) = summaries
            return (JointMoments.merge(moments),)

        # Samples are kept for `Solution.stats` if they are numbers, one or several.
        # Arrays, such as diagonals, would take memory that grows with k.
        sample = eqx.filter_eval_shape(body, operator, jnp.zeros((), int))[0]
        scalar = sample.ndim == 0
        scalars = eqx.filter_eval_shape(quantity.scalars, sample)
        all_kept = scalar or (scalars is not None and scalars.size == sample.size)
        streamed = stream(
            fn=body,
            frozen_fn=ft.partial(body, quantity=freeze(quantity)),
            reduce=reduce,
            merge=merge,
            operator=operator,
            k=k,
            execution=execution,
            keep=None if all_kept else quantity.scalars,
            quantity=quantity,
        )
        (moments,) = streamed.summary
        extra = streamed.loop.extra | moments.statistics(scalar=scalar)
        samples = moments.parts[0].samples
        if isinstance(samples, StratifiedMoments) and is_trace(quantity):
            changes = streamed.others[0][2]
            extra |= {"gain": _gain(changes, samples, streamed.count)}
        kept = streamed.samples
        if num_strata > 1 and kept is not None and kept.ndim > 1:
            valid = jnp.arange(len(kept)) < streamed.count
            kept = about_strata(kept, valid, num_strata)
        return Estimate(
            value=attach_derivative(moments.mean, streamed.mean),
            std_err=moments.std_err(),
            samples=kept,
            num_matvecs=streamed.count,
            rounding=operator.rounding,
            magnitude=moments.size,
            result=streamed.loop.result,
            extra=extra,
            state=streamed.loop.state,
            num_samples=streamed.count,
            skewness=None if scalar else moments.skewness,
        )


def read_sample(
    estimator: AbstractStreamingEstimator,
    quantity: AbstractQuantity,
    operator: FlatOperator,
    probe: Inexact[Array, " n"],
    *,
    with_marks: bool,
    full: Inexact[Array, " n"] | None = None,
) -> tuple[Inexact[Array, "*q"], tuple[list[Any], list[Any], Array | None]]:
    """One sample; for each part the size of its terms, if they may cancel, and
    `with_marks` its marks; and for a probe that is a part of a `full` vector the
    change of the sample if that takes the place of `left`."""
    images = []

    def counting_mv(vector):
        images.append(operator.mv(vector))
        return images[-1]

    sample: Any = estimator.sample(counting_mv, probe)
    shapes = jax.tree.map(jnp.shape, sample)
    is_pair = shapes == (probe.shape, *map(jnp.shape, images))
    if len(images) != 1 or not (is_pair or shapes == ()):
        raise ValueError(
            f"`{estimator.name}.sample` must return a pair of vectors of length n, or a "
            f"scalar, made from one matvec. Found the shape {shapes}, n = "
            f"{operator.size}, and {len(images)} matvecs. Sum over the entries; "
            "for several matvecs write a `traceax.AbstractSketchEstimator`."
        )
    if is_pair:
        left, image = sample
        # Error bars have no derivative.
        frozen = jax.lax.stop_gradient(sample)
        sizes = [part.size(*frozen) for part in quantity.parts]
        marks = [part.marks(*frozen) if with_marks else None for part in quantity.parts]
        value = quantity.read(left, image)
        change = None
        if full is not None:
            change = quantity.read(full - probe, frozen[1])
        return value, (sizes, marks, change)
    if not is_trace(quantity):
        raise refusal(estimator, quantity)
    return sample, ([None], [None], None)


def moments_of_part(
    estimator: AbstractStreamingEstimator,
    part: AbstractQuantity,
    samples: Inexact[Array, "m ..."],
    size: Real[Array, "m ..."] | None,
    marks: Inexact[Array, "m ..."] | None,
    *,
    indices: Int[Array, " m"] | None = None,
    valid: Bool[Array, " m"],
    operator: FlatOperator,
) -> SignMoments:
    """The moments of the samples of one part of a quantity."""
    strata = None
    if indices is not None:
        strata = estimator.sampler.strata(indices, entrywise=part.entrywise)
    return SignMoments.of(
        samples=samples,
        size=size,
        marks=marks,
        valid=valid,
        strata=strata,
        skewed=is_skewed(part, estimator.sampler),
        rounding=operator.rounding,
        near=_NEARLY_EQUAL if part.comparable(operator.hermitian) else 0.0,
    )


def _gain(
    changes: Inexact[Array, " m"],
    moments: StratifiedMoments,
    count: Int[Array, ""] | int,
) -> Real[Array, ""]:
    """The variance of plain probes over that of as many probes of p strata; 0 after one
    sweep, whose variance is not known. `changes` are the changes of samples if the vector
    s of a sweep takes the place of its restriction to a stratum."""
    # The mean change of a sweep is s* A s minus the estimate of the sweep. It has mean
    # zero, and is what the variance of s* A s has beyond that of the sweep.
    p, sweeps = moments.num_strata, count // moments.num_strata
    by_sweep = jnp.mean(changes.reshape(-1, p), axis=1)
    in_use = jnp.arange(len(by_sweep)) < sweeps
    size = jnp.max(jnp.where(in_use, jnp.abs(by_sweep), 0))
    unit = jnp.where(size > 0, size, 1)
    squares = jnp.where(in_use, jnp.abs(by_sweep) / unit, 0) ** 2
    error = moments.independent_std_err / unit
    of_sweep = sweeps * error**2
    plain = jnp.sum(squares) / sweeps + of_sweep
    has_bar = jnp.isfinite(error)
    # Without any variance both are exact.
    gain = jnp.where(plain > 0, plain / (p * jnp.where(has_bar, of_sweep, 1)), 1)
    return jnp.where(has_bar, gain, 0).astype(moments.cells.unit.dtype)
