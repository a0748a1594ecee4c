"""Pairs of samples a_i and b_i of two operators, from the same probes.

The two operators are stacked, A above B. With a coefficient c and the mean `known` of the
b_i the pairs become samples `a_i - c (b_i - known)` with a control variate. What says how
far these can be trusted is as linear in A as they are: marks are combined with the same
coefficient, and sizes add up.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.moments import FEW_SIGNS
from .._core.quantity import AbstractQuantity
from .._core.sampler import draw_for
from .._core.sign_moments import SignMoments
from .._krylov.difference import unstack
from .._run.budget import Budget
from .streaming import AbstractStreamingEstimator, moments_of_part, read_sample


class Readings(eqx.Module):
    """Samples, or pairs of them, with the sizes that their rounding errors are relative
    to and with their marks, if they have any (see `SignMoments`). All have one shape."""

    samples: Inexact[Array, "..."]
    sizes: Real[Array, "..."] | None
    marks: Inexact[Array, "..."] | None

    def part(self, index: int, axis: int) -> "Readings":
        """Those of one operator, where pairs are along this axis."""
        return jax.tree.map(lambda x: jnp.take(x, index, axis), self)

    def controlled(
        self, coefficient: Inexact[Array, "..."], known: Inexact[Array, "..."], axis: int
    ) -> "Readings":
        """The controlled samples, where pairs are along this axis."""
        a, b = self.part(0, axis), self.part(1, axis)
        # Terms of this size may cancel, even if those of the two samples cannot.
        size = a.largest + jnp.abs(coefficient) * b.largest
        marks = None
        if a.marks is not None and b.marks is not None:
            marks = a.marks - coefficient * b.marks
        return Readings(a.samples - coefficient * (b.samples - known), size, marks)

    @property
    def largest(self) -> Real[Array, "..."]:
        """The size of samples and of their terms."""
        size = jnp.abs(jax.lax.stop_gradient(self.samples))
        return size if self.sizes is None else jnp.maximum(size, self.sizes)


class Pairs(eqx.Module):
    """How a streaming estimator reads a quantity of both operators from one probe."""

    estimator: AbstractStreamingEstimator
    quantity: AbstractQuantity
    key: PRNGKeyArray | None
    with_marks: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        estimator: AbstractStreamingEstimator,
        quantity: AbstractQuantity,
        key: PRNGKeyArray | None,
        k: int | Budget,
    ) -> "Pairs":
        count = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k
        with_marks = count < FEW_SIGNS and estimator.sampler.unit_modulus
        return cls(estimator, quantity, key, with_marks)

    def read(self, operator: FlatOperator, index: Int[Array, ""]) -> Readings:
        """The pair from probe `index`, along a first axis."""

        # As for plain samples, the backward pass draws the probe again.
        @eqx.filter_checkpoint
        def read_pair(operator, index, pairs):
            estimator, halves = pairs.estimator, unstack(operator)
            probe = draw_for(operator, estimator.sampler, pairs.key, index[None])[:, 0]
            settings = {"probe": probe, "with_marks": pairs.with_marks}
            readings = [
                read_sample(estimator, pairs.quantity, operator=half, **settings)
                for half in halves
            ]
            return jax.tree.map(lambda x, y: jnp.stack([x, y]), *readings)

        samples, ((sizes,), (marks,), _) = read_pair(operator, index, self)
        return Readings(samples, sizes, marks)

    def moments(
        self, operator: FlatOperator, readings: Readings, valid: Bool[Array, " m"]
    ) -> SignMoments:
        """The moments of single samples that are stacked along a first axis."""
        return moments_of_part(
            self.estimator,
            self.quantity,
            readings.samples,
            readings.sizes,
            readings.marks,
            valid=valid,
            operator=operator,
        )
