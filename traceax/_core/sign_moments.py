"""Moments of samples from random signs, a few of which may be equal by chance.

A sample of a 3 x 3 block of ones, (+-1 +-1 +-1)^2, is 1 with probability 3/4. So all of 6
samples are equal for one key in six, and their standard error is 0, though their mean is
wrong. The remedy looks at `marks`: a fixed combination of the terms that a sample sums,
which differs between probes unless the operator is diagonal. See "Samples that are equal
by chance" in the documentation of error bars.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .moments import align, FEW_SIGNS, Moments
from .strata import merge_moments, moments_of, Strata, StratifiedMoments


# The error bar of tied samples, in standard errors of their marks. With this factor 95%
# intervals cover row norms and traces of blocks of up to seven equal entries.
_TIED_BAR = 3


class SignMoments(eqx.Module):
    """`Moments` of samples that are made from random signs, a few of which may be equal
    by chance.

    - `samples`: moments of the samples.
    - `size`: the largest size that rounding errors of samples are relative to, of the
        shape of a sample; None if they are relative to the mean.
    - `marks`: moments of numbers of the size of a sample, which all differ unless the
        operator is diagonal (`AbstractQuantity.marks`); None for many samples.
    - `floor`: the size of rounding errors, of the shape of a sample; None without marks.
    - `near`: samples whose spread is below this share of that of their marks are nearly
        equal. 0 where a much smaller spread may well be right.
    """

    samples: Moments | StratifiedMoments
    size: Real[Array, "*parts_q"] | None
    marks: Moments | StratifiedMoments | None
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
        strata: Strata | None = None,
        skewed: bool,
        rounding: float,
        near: float,
    ) -> "SignMoments":
        """The moments of stacked samples, of which `strata` says the strata if there are
        several, with sizes and marks of the same shape; `rounding` is the relative size
        of rounding errors."""

        def largest(x):
            return jnp.max(jnp.where(align(valid, x), x, 0), axis=0)

        mark_moments, floor = None, None
        if marks is not None:
            mark_moments = moments_of(marks, valid, strata, skewed=False)
            sizes = jnp.abs(samples)
            floor = rounding * largest(sizes if size is None else sizes + size)
        return cls(
            samples=moments_of(samples, valid, strata, skewed=skewed),
            size=None if size is None else largest(size),
            marks=mark_moments,
            floor=floor,
            near=near,
        )

    @classmethod
    def merge(cls, parts: "SignMoments") -> "SignMoments":
        """The moments of the union of several stacked sets of samples."""
        largest = lambda x: jnp.max(x, axis=0)  # noqa: E731
        size, floor = jax.tree.map(largest, (parts.size, parts.floor))
        return cls(
            samples=merge_moments(parts.samples),
            size=size,
            marks=None if parts.marks is None else merge_moments(parts.marks),
            floor=floor,
            near=parts.near,
        )

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
        """The standard error of the samples. Few samples that are equal, or nearly so,
        while their marks are not have not shown yet how far they spread: the error bar is
        then made from the marks."""
        std_err = self.samples.std_err()
        if self.marks is None or self.floor is None:
            return std_err
        spread = self.marks.independent_std_err
        tie = jnp.maximum(self.floor, self.near * spread) if self.near else self.floor
        tied = self.samples.independent_std_err <= tie
        # Marks that are equal to rounding mean that the operator is diagonal. The samples
        # are then exact, and their zero error bar is right.
        by_chance = tied & (spread > self.floor) & (self.count < FEW_SIGNS)
        return jnp.where(by_chance, jnp.maximum(std_err, _TIED_BAR * spread), std_err)
