"""Means of samples and their standard errors, in a form that merges.

For samples t_1 .. t_m the error bar of the mean is

    std_err = f sqrt(s^2 / m + max(C, 0)),    gamma = sqrt(m) |sum d^3| / (sum d^2)^(3/2),

with d = t - mean, s^2 = sum d^2 / (m - 1), and C the covariance of two samples. In the
code m is `count`, s / sqrt(m) is `independent_std_err`, gamma is `skewness`, C is
`covariance`, and the factor f is `widening`, which depends on gamma and m.

Sets of samples, with counts m_j and means mu_j, merge to the mean mu = sum m_j mu_j / m.
With h_j = mu_j - mu (`shift`), the sums of powers about mu are

    sum d^2 = sum_j (S_j + m_j h_j^2),
    sum d^3 = sum_j (K_j + 3 h_j S_j + m_j h_j^3),

where S_j and K_j are the sums of squares and of cubes about mu_j: expand (d + h_j)^2 and
(d + h_j)^3, and note that the sum of d over a set is 0. Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance", The American Statistician 37, 1983.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .quantiles import student_quantile, widening
from .reductions import reduce_rows


# With this many samples from random signs, those of a quadratic form that is not constant
# are all equal with a probability of at most (3/4)^16 = 1%: a polynomial of degree d in
# signs that is not zero differs from zero with a probability of 2^-d or more, here 1/4
# for each sample. With fewer samples, equal ones may be so by chance.
FEW_SIGNS = 16


class Moments(eqx.Module):
    """Count, mean, spread and skewness of exchangeable samples, in a form that merges.

    Samples may be arrays of a shape `q`. All fields but the count then hold a number for
    each entry. Complex samples are pairs of real ones, along the axis c. Sums are in
    units of the size of the deviations, so that they do not overflow or underflow before
    the samples do.

    - `count`: the number m of samples, shape `()`.
    - `center`: their mean, shape `(c, *q)`, with c = 1, or 2 for complex samples.
    - `unit`: the unit of deviations from the mean, shape `q`: the largest deviation from
        the first sample, or from 0 if the first sample is not valid. No deviation from
        the mean is more than twice as large.
    - `squares`, `cubes`: sums of squares and of cubes of the deviations in that unit,
        shape `(c, *q)`. `cubes` is None where the samples are not skewed.
    """

    count: Real[Array, "*parts"]
    center: Real[Array, "*parts_c_q"]
    unit: Real[Array, "*parts_q"]
    squares: Real[Array, "*parts_c_q"]
    cubes: Real[Array, "*parts_c_q"] | None = None

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, "m ..."],
        valid: Bool[Array, " m"] | None = None,
        *,
        skewed: bool = True,
    ) -> "Moments":
        """The moments of stacked samples.

        **Arguments:**

        - `samples`: real or complex, stacked along a first axis: shape `(m, ...)`.
        - `valid`: which of the samples count, booleans of shape `(m,)`; the others may be
            anything, NaN included. Default: all.
        - `skewed`: whether samples may be skewed. If not, third moments are left out, and
            error bars are not widened for them. Default: `True`.

        **Returns:**

        `Moments`, of which `mean` and `std_err()` have the shape of one sample.
        """
        parts = [samples]
        if jnp.iscomplexobj(samples):
            parts = [samples.real, samples.imag]
        points = jnp.stack(parts, axis=1)
        count = jnp.ones(len(samples), points.dtype)
        if valid is not None:
            count = valid.astype(points.dtype)
            points = jnp.where(align(valid, points), points, 0)
        return cls._of_points(
            count=count, upper_count=len(samples), points=points, skewed=skewed
        )

    @classmethod
    def merge(cls, parts: "Moments") -> "Moments":
        """The moments of the union of several sets of samples.

        **Arguments:**

        - `parts`: moments of several sets of samples, stacked: all arrays have a first
            axis for the sets.

        **Returns:**

        `Moments` of their union, without that axis.
        """
        if len(parts.count) == 1:
            return jax.tree.map(lambda x: x[0], parts)
        skewed = parts.cubes is not None
        # The terms m_j h_j^2 and m_j h_j^3: moments of the means mu_j, counted m_j times.
        between = cls._of_points(
            count=parts.count,
            upper_count=jnp.maximum(jnp.sum(parts.count), 1),
            points=parts.center,
            skewed=skewed,
        )
        (largest,) = reduce_rows(lambda x: (x,), parts.unit, [jax.lax.max])
        unit = jnp.maximum(between.unit, largest)

        def powers(part):
            """S_j, and K_j + 3 h_j S_j, in the common unit."""
            ratio = _in_units(part.unit, unit)
            square = part.squares * ratio**2
            if not skewed:
                return (square,)
            shift = jnp.where(part.count > 0, part.center - between.center, 0)
            cube = part.cubes * ratio**3 + 3 * _in_units(shift, unit) * square
            return square, cube

        ratio = _in_units(between.unit, unit)
        squares, *cubes = reduce_rows(powers, parts)
        merged_cubes = None
        if between.cubes is not None:
            merged_cubes = cubes[0] + between.cubes * ratio**3
        return cls(
            count=between.count,
            center=between.center,
            unit=unit,
            squares=squares + between.squares * ratio**2,
            cubes=merged_cubes,
        )

    def scaled(self, factor: Real[Array, ""]) -> "Moments":
        """The moments of the samples times a positive factor."""
        # `squares` and `cubes` are in units of `unit`, and so do not change.
        return dataclasses.replace(
            self, center=self.center * factor, unit=self.unit * factor
        )

    @classmethod
    def _of_points(
        cls,
        count: Real[Array, " m"],
        upper_count: Real[Array, ""] | int,
        points: Real[Array, "m c *q"],
        skewed: bool,
    ) -> "Moments":
        """The moments of finite points. Point i counts as `count[i]` samples, which may
        be none; `upper_count` is an upper bound of their sum."""
        # Deviations from a sample, and not from 0, keep the digits of samples that are
        # nearly equal. Where all are equal, the pivot is their mean without rounding.
        pivot = jnp.where(count[0] > 0, points[0], 0)

        def about_pivot(part):
            count, point = part
            offset = jnp.where(count > 0, point - pivot, 0)
            # Divided by the count before it is summed: the sum might overflow.
            return (count / upper_count) * offset, jnp.abs(offset), count

        operations = jax.lax.add, jax.lax.max, jax.lax.add
        offset, largest, total = reduce_rows(about_pivot, (count, points), operations)
        center = pivot + offset * (upper_count / jnp.maximum(total, 1))
        total, unit = total.ravel()[0], jnp.max(largest, axis=0)

        def powers(part):
            count, point = part
            deviation = _in_units(jnp.where(count > 0, point - center, 0), unit)
            square = count * deviation**2
            return (square, square * deviation) if skewed else (square,)

        squares, *cubes = reduce_rows(powers, (count, points))
        return cls(
            count=total,
            center=center,
            unit=unit,
            squares=squares,
            cubes=cubes[0] if skewed else None,
        )

    @property
    def total(self) -> Real[Array, "*parts"]:
        """The number of samples; for samples from strata not their `count`."""
        return self.count

    def statistics(self, *, scalar: bool = True) -> dict[str, Array]:
        """Entries of `stats` from which intervals are made, beyond the samples."""
        return {}

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        """The mean, of the shape of one sample, complex if samples are."""
        if len(self.center) == 1:
            return self.center[0]
        return jax.lax.complex(self.center[0], self.center[1])

    @property
    def skewness(self) -> Real[Array, "*q"]:
        """The modulus of the third central moment over the 3/2 power of the second one,
        real, of the shape of one sample. Not available with `skewed=False`."""
        # The unit cancels.
        square = jnp.sum(self.squares, axis=0)
        cube = jnp.linalg.norm(self.cubes, axis=0)
        return jnp.sqrt(self.count) * cube / jnp.where(square > 0, square, 1) ** 1.5

    @property
    def independent_std_err(self) -> Real[Array, "*q"]:
        """The textbook standard error of the mean of independent samples, `s / sqrt(m)`
        with `ddof=1`; infinite for a single sample."""
        freedom = jnp.maximum(self.count * (self.count - 1), 1)
        # `spread` is about 1 at most: the result overflows only where a deviation does.
        spread = jnp.sqrt(jnp.sum(self.squares, axis=0) / freedom)
        return jnp.where(self.count > 1, self.unit * spread, jnp.inf)

    def std_err(self, covariance: Real[Array, "*q"] | None = None) -> Real[Array, "*q"]:
        """The standard error of the mean that calls report.

        It is the textbook standard error, widened where samples are few or skewed: see
        `widening`. Samples without third moments, such as those of an entry of the
        diagonal, are not widened.

        **Arguments:**

        - `covariance`: the covariance of two samples, real, of the shape of one sample.
            The variance of the mean is then `s^2 / m + covariance`. Negative values,
            which are noise, count as 0. Default: 0, for independent samples.

        **Returns:**

        A real array of the shape of one sample; infinite for a single sample.
        """
        std_err = self.independent_std_err
        if covariance is not None:
            std_err = jnp.hypot(std_err, jnp.sqrt(jnp.maximum(covariance, 0)))
        if self.cubes is None:
            return std_err
        return std_err * widening(self.skewness, self.count)


def sampling_quantiles(
    confidence: Real[Array, ""], value: PyTree[Array], stats: dict[str, Any]
) -> PyTree[Real[Array, "..."]]:
    """The half-width of a confidence interval for a mean of samples, in standard errors.

    **Arguments:**

    - `confidence`: the probability with which the interval covers the true mean.
    - `value`: the mean; only its structure is used.
    - `stats`: statistics of the samples, all of them optional: `"samples"`, with infinite
        entries where no sample was drawn, or their number `"num_samples"` and, where
        they are skewed, `"skewness"`, of the structure of `value`. Where they are from
        several strata, the degrees of freedom `"freedom"` take the place of both.

    **Returns:**

    Real arrays, in the structure of `value`.
    """
    # The error bar of `DynamicTrace` does not come from a number of samples: infinitely
    # many give the quantile of the normal distribution.
    count = jnp.asarray(stats.get("num_samples", jnp.inf), confidence.dtype)
    skewness = stats.get("skewness")
    if "freedom" in stats:
        count = 1 + stats["freedom"].astype(confidence.dtype)
    elif "samples" in stats:
        valid = jnp.isfinite(stats["samples"])
        count = jnp.sum(valid).astype(confidence.dtype)
        skewness = Moments.of(stats["samples"], valid).skewness
    student = student_quantile(confidence, count - 1)
    if skewness is None:
        return jax.tree.map(lambda _: student, value)
    count = jnp.maximum(count, 1)

    def quantile(skewness):
        skewness = skewness.astype(confidence.dtype)
        # The standard error has the factor for 95% already.
        ratio = widening(skewness, count, confidence) / widening(skewness, count)
        return student * ratio

    return jax.tree.map(quantile, skewness)


def _in_units(x: Real[Array, "..."], unit: Real[Array, "..."]) -> Real[Array, "..."]:
    """`x / unit`; 0 for a zero unit, where x is 0 too."""
    # XLA may compile a division to a product with the reciprocal. For a unit near the
    # largest number that is subnormal, and flushed to zero. A factor of 1/8, or of 8 for
    # small units, keeps the reciprocal normal; powers of two do not round.
    factor = jnp.where(unit > 1, jnp.asarray(0.125, unit.dtype), 8)
    return (factor * x) / (factor * jnp.where(unit > 0, unit, 1))


def align(x: Array, entries: Array) -> Array:
    """Append axes of length 1, so that a number for each sample broadcasts against the
    entries of the samples."""
    return x.reshape(x.shape + (1,) * (entries.ndim - x.ndim))
