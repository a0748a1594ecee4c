"""Moments of samples from strata: sample i belongs to the stratum `i mod p`.

Samples of different strata have different means, so their common variance says nothing
about the error of the mean. With R samples in each of p strata, and the variance s_c^2 of
the samples of stratum c,

    t = 1/p sum_c mean_c,    Var t = 1/p^2 sum_c s_c^2 / R,
    freedom = (R - 1) (sum_c s_c^2)^2 / sum_c s_c^4,

the degrees of freedom of Satterthwaite, "An Approximate Distribution of Estimates of
Variance Components", Biometrics Bulletin 2, 1946. In the code a stratum is a *cell*,
`center` of whose moments is mean_c, and s_c^2 / R is the square of its
`independent_std_err`. Entry i of a diagonal is a cell of its own, for only probes of one
stratum have that entry: its mean is over R samples, and divided by p.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .moments import FEW_SIGNS, Moments
from .quantiles import widening


class Strata(eqx.Module):
    """Which samples belong to which cells.

    - `members`: whether sample i belongs to cell c, shape `(m, c)`.
    - `num_strata`: p.
    - `entrywise`: whether the cells are the entries of samples of shape `(c,)`, and not
        strata.
    """

    members: Bool[Array, "m c"]
    num_strata: int = eqx.field(static=True)
    entrywise: bool = eqx.field(static=True)

    def moments(
        self,
        samples: Inexact[Array, "m ..."],
        valid: Bool[Array, " m"],
        *,
        skewed: bool = True,
    ) -> "StratifiedMoments":
        """The moments of stacked samples. Arguments as in `Moments.of`."""

        def of_cell(samples, members):
            return Moments.of(samples, valid & members, skewed=skewed)

        axes = (1 if self.entrywise else None, 1)
        cells = jax.vmap(of_cell, in_axes=axes)(samples, self.members)
        return StratifiedMoments(cells, self.num_strata, self.entrywise)


class StratifiedMoments(eqx.Module):
    """The counterpart of `Moments` for samples from strata.

    - `cells`: the moments of each cell, stacked.
    - `num_strata`, `entrywise`: as in `Strata`.
    """

    cells: Moments
    num_strata: int = eqx.field(static=True)
    entrywise: bool = eqx.field(static=True)

    @classmethod
    def merge(cls, parts: "StratifiedMoments") -> "StratifiedMoments":
        """The moments of the union of several stacked sets of samples."""
        cells = jax.vmap(Moments.merge, in_axes=1)(parts.cells)
        return cls(cells, parts.num_strata, parts.entrywise)

    def scaled(self, factor: Real[Array, ""]) -> "StratifiedMoments":
        """The moments of the samples times a positive factor."""
        cells = jax.vmap(Moments.scaled, in_axes=(0, None))(self.cells, factor)
        return dataclasses.replace(self, cells=cells)

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        means = jax.vmap(lambda cell: cell.mean)(self.cells)
        return means / self.num_strata if self.entrywise else jnp.mean(means, axis=0)

    @property
    def total(self) -> Real[Array, "*parts"]:
        """The number of samples, if cells are strata."""
        return jnp.sum(self.cells.count, axis=-1)

    @property
    def count(self) -> Real[Array, "*parts"]:
        """The number of samples of one distribution that have as many degrees of freedom,
        or 0 if there is no sample."""
        count = jnp.min(self.cells.count)
        return jnp.where(jnp.max(self.cells.count) > 0, 1 + self._freedom(count), 0)

    def _freedom(self, count: Real[Array, ""]) -> Real[Array, ""]:
        freedom = jnp.maximum(count - 1, 0)
        if self.entrywise:
            return freedom
        errors, largest = self._errors
        shares = errors**2
        total, squares = jnp.sum(shares, axis=0), jnp.sum(shares**2, axis=0)
        # Without any spread all strata count alike.
        ratio = jnp.where(largest > 0, total**2 / jnp.where(squares > 0, squares, 1), 0)
        ratio = jnp.where(largest > 0, ratio, self.num_strata)
        return freedom * jnp.min(ratio)

    @property
    def _errors(self) -> tuple[Real[Array, "cells ..."], Real[Array, "*q"]]:
        """The standard error of each cell in units of the largest one, and that unit."""
        errors = self.cells_std_err
        largest = jnp.max(errors, axis=0)
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
        return jnp.where(jnp.isfinite(errors), errors / unit, 1), largest

    @property
    def cells_std_err(self) -> Real[Array, "cells ..."]:
        """The standard error of the mean of each cell, infinite for a single sample."""
        return jax.vmap(lambda cell: cell.independent_std_err)(self.cells)

    @property
    def independent_std_err(self) -> Real[Array, "*q"]:
        """The standard error of the mean, without a factor for skewed samples."""
        if self.entrywise:
            return self.cells_std_err / self.num_strata
        errors, largest = self._errors
        return largest * jnp.sqrt(jnp.sum(errors**2, axis=0)) / self.num_strata

    @property
    def cubes(self) -> Real[Array, "..."] | None:
        """None where the samples are not skewed."""
        return self.cells.cubes

    @property
    def skewness(self) -> Real[Array, "*q"]:
        """The skewness of `count` samples of one distribution whose mean is as skewed.
        Not available with `skewed=False`."""
        if self.entrywise:
            return jax.vmap(lambda cell: cell.skewness)(self.cells)
        # The mean of m samples has the skewness gamma / sqrt(m), and the third cumulants
        # of the means of strata add up.
        skewness = jax.vmap(lambda cell: cell.skewness)(self.cells)
        errors, _ = self._errors
        per_cell = jnp.sqrt(jnp.maximum(jnp.min(self.cells.count), 1))
        third = jnp.sum(skewness / per_cell * errors**3, axis=0)
        total = jnp.sum(errors**2, axis=0)
        return jnp.sqrt(self.count) * third / jnp.where(total > 0, total, 1) ** 1.5

    def statistics(self, *, scalar: bool = True) -> dict[str, Array]:
        """Entries of `stats` from which intervals are made: samples do not show from
        which stratum they are. Samples that are no `scalar` have a skewness already."""
        statistics = {"freedom": self.count - 1}
        if scalar:
            statistics["skewness"] = self.skewness
        return statistics

    def std_err(self) -> Real[Array, "*q"]:
        """The standard error of the mean that calls report: see `Moments.std_err`."""
        std_err = self.independent_std_err
        count = jnp.min(self.cells.count) if self.entrywise else self.count
        if self.cubes is not None:
            return std_err * widening(self.skewness, jnp.maximum(count, 1))
        if not self.entrywise:
            return std_err
        # Few samples of an entry that interacts with one or two others of its colour are
        # often equal by chance. So an entry gets the mean of its own variance and that of
        # the entries near it, if that is larger.
        errors, largest = self._errors
        pooled = jnp.sqrt((errors**2 + _mean_of_group(errors**2)) / 2)
        steady = largest * jnp.maximum(errors, pooled) / self.num_strata
        return jnp.where(count < FEW_SIGNS, steady, std_err)


# So many consecutive entries have samples that are equal by chance with a probability of
# 2^-32 at most. They are few, so that the bars of a grid follow its regions: with a mean
# over all entries the widest bars would widen all others, by up to 300 where it was seen.
_GROUP = 32


def _mean_of_group(x: Real[Array, " n"]) -> Real[Array, " n"]:
    """For each entry the mean of the `_GROUP` consecutive entries that it is among."""
    num_groups = -(-x.size // _GROUP)
    group = jnp.arange(x.size) // _GROUP
    ones = jnp.ones_like(x)
    sums, counts = (
        jax.ops.segment_sum(y, group, num_groups, indices_are_sorted=True)
        for y in (x, ones)
    )
    return (sums / counts)[group]


def merge_moments(parts: Moments | StratifiedMoments) -> Moments | StratifiedMoments:
    """The moments of the union of several stacked sets of samples."""
    if isinstance(parts, Moments):
        return Moments.merge(parts)
    return StratifiedMoments.merge(parts)


def moments_of(
    samples: Inexact[Array, "m ..."],
    valid: Bool[Array, " m"],
    strata: Strata | None,
    *,
    skewed: bool = True,
) -> Moments | StratifiedMoments:
    """The moments of samples from strata; from one distribution if `strata` is None."""
    if strata is None:
        return Moments.of(samples, valid, skewed=skewed)
    return strata.moments(samples, valid, skewed=skewed)
