import functools as ft
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .quantiles import student_quantile, widening
from .reductions import pairwise, reduce_together


class Moments(eqx.Module):
    """Count, mean, spread and skewness of exchangeable samples, in a form that merges.

    Samples may be arrays, of shape `q`: all but the count is for each of their entries.
    Complex samples are pairs of real ones, along the axis c. Sums are in units of the
    size of deviations, so that nothing overflows or underflows before the samples do.

    - `count`: how many samples there are, shape `()`.
    - `center`: their mean, shape `(c, *q)`, with c = 1, or 2 for complex samples.
    - `unit`: of deviations from it, none of which is more than twice as large: the
        largest one from the first sample, or if that does not count from 0, shape `q`.
    - `squares`, `cubes`: sums of powers of deviations in that unit, shape `(c, *q)`; no
        `cubes` where the samples are not skewed.
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
        """Of some samples.

        **Arguments:**

        - `samples`: real or complex, stacked along a first axis: shape `(m, ...)`.
        - `valid`: which of them count, booleans of shape `(m,)`; the others may be
            anything. Default: all.
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
            points = jnp.where(_beside(valid, points), points, 0)
        return cls._of_points(count, len(samples), points, skewed)

    @classmethod
    def merge(cls, parts: "Moments") -> "Moments":
        """Of all samples together. Chan, Golub and LeVeque, The American Statistician 37,
        1983; third moments likewise.

        **Arguments:**

        - `parts`: moments of several sets of samples, stacked: all arrays have a first
            axis for the sets.

        **Returns:**

        `Moments` of their union, without that axis.
        """
        if len(parts.count) == 1:
            return jax.tree.map(lambda x: x[0], parts)
        skewed = parts.cubes is not None
        most = jnp.maximum(jnp.sum(parts.count), 1)
        between = cls._of_points(parts.count, most, parts.center, skewed)
        (largest,) = _over_first(lambda x: (x,), parts.unit, [jax.lax.max])
        unit = jnp.maximum(between.unit, largest)

        def powers(part):
            ratio = _in_units(part.unit, unit)
            square = part.squares * ratio**2
            if not skewed:
                return (square,)
            moved = jnp.where(part.count > 0, part.center - between.center, 0)
            cube = part.cubes * ratio**3 + 3 * _in_units(moved, unit) * square
            return square, cube

        ratio = _in_units(between.unit, unit)
        squares, *cubes = _over_first(powers, parts)
        squares = squares + between.squares * ratio**2
        if between.cubes is not None:
            cubes = [cubes[0] + between.cubes * ratio**3]
        return cls(between.count, between.center, unit, squares, *cubes)

    @classmethod
    def _of_points(
        cls,
        count: Real[Array, " m"],
        most: Real[Array, ""] | int,
        points: Real[Array, "m c *q"],
        skewed: bool,
    ) -> "Moments":
        """Of finite points, each of which counts as `count` samples, or as none; these
        are `most` or fewer in all."""
        # Where all samples are alike, the first one is exactly their mean.
        pivot = jnp.where(count[0] > 0, points[0], 0)

        def about_pivot(part):
            count, point = part
            offset = jnp.where(count > 0, point - pivot, 0)
            return (count / most) * offset, jnp.abs(offset), count

        operations = jax.lax.add, jax.lax.max, jax.lax.add
        offset, largest, total = _over_first(about_pivot, (count, points), operations)
        center = pivot + offset * (most / jnp.maximum(total, 1))
        total, unit = total.ravel()[0], jnp.max(largest, axis=0)

        def powers(part):
            count, point = part
            deviation = _in_units(jnp.where(count > 0, point - center, 0), unit)
            square = count * deviation**2
            return (square, square * deviation) if skewed else (square,)

        squares, *cubes = _over_first(powers, (count, points))
        return cls(total, center, unit, squares, *cubes)

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        """The mean, of the shape of one sample, complex if samples are."""
        if len(self.center) == 1:
            return self.center[0]
        return jax.lax.complex(self.center[0], self.center[1])

    @property
    def skewness(self) -> Real[Array, "*q"]:
        """The modulus of the third central moment over the 3/2 power of the second one,
        real, of the shape of one sample. Not there with `skewed=False`."""
        square = jnp.sum(self.squares, axis=0)
        cube = jnp.linalg.norm(self.cubes, axis=0)
        return jnp.sqrt(self.count) * cube / jnp.where(square > 0, square, 1) ** 1.5

    @property
    def independent_std_err(self) -> Real[Array, "*q"]:
        """The textbook standard error of the mean of independent samples, `s / sqrt(m)`
        with `ddof=1`; infinite for a single sample."""
        freedom = jnp.maximum(self.count * (self.count - 1), 1)
        # About 1 at most, so that the product overflows only where a deviation does.
        spread = jnp.sqrt(jnp.sum(self.squares, axis=0) / freedom)
        return jnp.where(self.count > 1, self.unit * spread, jnp.inf)

    def std_err(self, covariance: Real[Array, "*q"] | None = None) -> Real[Array, "*q"]:
        """The standard error of the mean that we report.

        It is that of the textbook, widened for few and for skewed samples: see
        `widening`. Samples without third moments, as those of an entry of the diagonal,
        need none of it.

        **Arguments:**

        - `covariance`: that of two samples, real, of the shape of one. With it the
            variance of the mean is `s^2 / m + covariance`; negative values, which are
            noise, count as 0. Default: 0, for independent samples.

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
    """How many standard errors a mean of samples is off at most, with the given
    probability.

    **Arguments:**

    - `confidence`: the probability.
    - `value`: the mean, of which only the structure counts.
    - `stats`: what is known of the samples, which all may be missing: `"samples"`,
        infinite where none were made, or their number `"num_samples"` and, where they are
        skewed, `"skewness"`, of the structure of `value`.

    **Returns:**

    Real arrays, in the structure of `value`.
    """
    # The bar of `DynamicTrace` is not that of a number of samples.
    count = jnp.asarray(stats.get("num_samples", jnp.inf), confidence.dtype)
    skewness = stats.get("skewness")
    if "samples" in stats:
        made = jnp.isfinite(stats["samples"])
        count = jnp.sum(made).astype(confidence.dtype)
        skewness = Moments.of(stats["samples"], made).skewness
    student = student_quantile(confidence, count - 1)
    if skewness is None:
        return jax.tree.map(lambda _: student, value)
    count = jnp.maximum(count, 1)

    def quantile(skewness):
        skewness = skewness.astype(confidence.dtype)
        ratio = widening(skewness, count, confidence) / widening(skewness, count)
        return student * ratio

    return jax.tree.map(quantile, skewness)


def _in_units(x: Real[Array, "..."], unit: Real[Array, "..."]) -> Real[Array, "..."]:
    """`x / unit`, and 0 for a zero unit. A division may be compiled to a product with the
    reciprocal, which for a unit near the largest number is below the smallest one."""
    factor = jnp.where(unit > 1, jnp.asarray(0.125, unit.dtype), 8)
    return (factor * x) / (factor * jnp.where(unit > 0, unit, 1))


# As many random signs as leave a sample of a quadratic form with another value than the
# others in all but 1% of cases, whatever the form: the chance of it is 1/4 or more for
# each of them. (A polynomial of degree d in signs that is not zero differs from zero with
# a probability of 2^-d.)
FEW_SIGNS = 16


class SignMoments(eqx.Module):
    """`Moments` of samples that are made from random signs, a few of which may be equal
    by chance.

    - `samples`: those of the samples.
    - `size`: the largest size that rounding errors of samples are relative to, if that is
        not the mean; of the shape of a sample.
    - `marks`: those of numbers of the size of a sample, which are equal too where the
        operator is diagonal; only for few samples.
    - `floor`: the size of rounding errors, of the shape of a sample, beside marks.
    - `near`: samples that spread less than this share of their marks are nearly equal. 0
        where samples may well spread much less.
    """

    samples: Moments
    size: Real[Array, "*parts_q"] | None
    marks: Moments | None
    floor: Real[Array, "*parts_q"] | None
    near: float = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, "m ..."],
        size: Real[Array, "m ..."] | None,
        marks: Inexact[Array, "m ..."] | None,
        valid: Bool[Array, " m"],
        *,
        skewed: bool,
        rounding: float,
        near: float,
    ) -> "SignMoments":
        largest = lambda x: jnp.max(jnp.where(_beside(valid, x), x, 0), axis=0)  # noqa: E731
        moments, marked, floor = Moments.of(samples, valid, skewed=skewed), None, None
        if marks is not None:
            marked = Moments.of(marks, valid, skewed=False)
            sizes = jnp.abs(samples)
            floor = rounding * largest(sizes if size is None else sizes + size)
        return cls(moments, None if size is None else largest(size), marked, floor, near)

    @classmethod
    def merge(cls, parts: "SignMoments") -> "SignMoments":
        most = lambda x: jnp.max(x, axis=0)  # noqa: E731
        size, floor = jax.tree.map(most, (parts.size, parts.floor))
        marks = None if parts.marks is None else Moments.merge(parts.marks)
        return cls(Moments.merge(parts.samples), size, marks, floor, parts.near)

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.samples.count

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        return self.samples.mean

    @property
    def skewness(self) -> Real[Array, "*q"] | None:
        return None if self.samples.cubes is None else self.samples.skewness

    def std_err(self) -> Real[Array, "*q"]:
        """That of the samples. Where few of them are equal, or nearly so, and their marks
        are not, it is three times that of the marks: the samples have not shown yet how
        far they spread. The factor makes 95% intervals cover row norms and traces of
        blocks of up to seven equal entries."""
        std_err = self.samples.std_err()
        if self.marks is None or self.floor is None:
            return std_err
        spread = self.marks.independent_std_err
        equal = jnp.maximum(self.floor, self.near * spread) if self.near else self.floor
        tied = self.samples.independent_std_err <= equal
        chance = tied & (spread > self.floor) & (self.count < FEW_SIGNS)
        return jnp.where(chance, jnp.maximum(std_err, 3 * spread), std_err)


class LogMoments(eqx.Module):
    """`Moments` of the exponentials of samples, in log units: these would overflow."""

    shift: Real[Array, "*parts"]
    scaled: Moments

    @classmethod
    def of(cls, samples: Real[Array, " m"], valid: Bool[Array, " m"]) -> "LogMoments":
        shift = _largest(samples, valid)
        return cls(shift, Moments.of(jnp.exp(samples - shift), valid))

    @classmethod
    def merge(cls, parts: "LogMoments") -> "LogMoments":
        scaled, made = parts.scaled, parts.scaled.count > 0
        shift = _largest(parts.shift, made)
        factor = jnp.where(made, jnp.exp(parts.shift - shift), 0)
        entries = lambda x: (x.center, x.unit)  # noqa: E731
        rescaled = scaled.center * factor[:, None], scaled.unit * factor
        return cls(shift, Moments.merge(eqx.tree_at(entries, scaled, rescaled)))

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.scaled.count

    @property
    def mean(self) -> Real[Array, ""]:
        """The logarithm of the mean."""
        return self.shift + jnp.log(self.scaled.mean)

    def std_err(self) -> Real[Array, ""]:
        """`log(m) - log(m - s)` for the mean m and its standard error s. To first order
        this is the relative error s / m; it is infinite where that is 1 or more."""
        relative = self.scaled.std_err() / self.scaled.mean
        known = relative < 1
        return jnp.where(known, -jnp.log1p(-jnp.where(known, relative, 0)), jnp.inf)


def _largest(x: Real[Array, " m"], valid: Bool[Array, " m"]) -> Real[Array, ""]:
    """Of those that are `valid`, or 0."""
    largest = jnp.max(jnp.where(valid, x, -jnp.inf))
    return jnp.where(valid.any(), largest, 0)


def _beside(x: Array, entries: Array) -> Array:
    """A number for each sample, reshaped to broadcast against the entries of the
    samples."""
    return x.reshape(x.shape + (1,) * (entries.ndim - x.ndim))


# Reductions over the first axis of large arrays are ten times slower on CPU than the same
# arithmetic on whole slices, one after another: written out where they are few, else in a
# loop.
_SHORT, _LARGE = 8, 1024


def _over_first(
    fn: Callable[[PyTree[Array]], tuple[Array, ...]],
    parts: PyTree[Real[Array, "m ..."]],
    operations: Iterable[Callable[[Array, Array], Array]] = repeat(jax.lax.add),
) -> Sequence[Array]:
    """The arrays that `fn` makes of each of the stacked `parts`, combined as in
    `reduce_together`."""
    leaves, tree = jax.tree.flatten(parts)
    num_parts = len(leaves[0])
    if max(leaf.size for leaf in leaves) < num_parts * _LARGE:
        return reduce_together(jax.vmap(fn)(parts), operations)

    def add(total, part):
        return pairwise(operations, total, fn(part)), None

    if num_parts > _SHORT:
        first = jax.tree.map(lambda x: x[0], parts)
        rest = jax.tree.map(lambda x: x[1:], parts)
        return jax.lax.scan(add, fn(first), rest)[0]
    first, *rest = map(tree.unflatten, zip(*map(list, leaves), strict=True))
    return ft.reduce(lambda total, part: add(total, part)[0], rest, fn(first))
