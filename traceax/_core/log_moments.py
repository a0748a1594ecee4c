"""Moments of exponentials, in logarithms."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .moments import Moments
from .strata import merge_moments, moments_of, Strata, StratifiedMoments


class LogMoments(eqx.Module):
    """`Moments` of exponentials of samples that may overflow: of `exp(sample - shift)`,
    where `shift` is the largest sample."""

    shift: Real[Array, "*parts"]
    scaled: Moments | StratifiedMoments

    @classmethod
    def of(
        cls,
        samples: Real[Array, " m"],
        valid: Bool[Array, " m"],
        strata: Strata | None = None,
    ) -> "LogMoments":
        """The moments of the exponentials of `samples`."""
        shift = _largest_valid(samples, valid)
        return cls(shift, moments_of(jnp.exp(samples - shift), valid, strata))

    @classmethod
    def merge(cls, parts: "LogMoments") -> "LogMoments":
        """The moments of the union of several stacked sets of samples."""
        nonempty = parts.total > 0
        shift = _largest_valid(parts.shift, nonempty)
        factor = jnp.where(nonempty, jnp.exp(parts.shift - shift), 0)
        scaled = jax.vmap(lambda part, factor: part.scaled(factor))(parts.scaled, factor)
        return cls(shift, merge_moments(scaled))

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.scaled.count

    @property
    def total(self) -> Real[Array, "*parts"]:
        """The number of samples."""
        return self.scaled.total

    @property
    def mean(self) -> Real[Array, ""]:
        """The logarithm of the mean."""
        return self.shift + jnp.log(self.scaled.mean)

    def std_err(self) -> Real[Array, ""]:
        """`log(mu) - log(mu - e)` for the mean mu and its standard error e: to first
        order the relative error e / mu, and infinite where that is 1 or more."""
        relative = self.scaled.std_err() / self.scaled.mean
        finite = relative < 1
        return jnp.where(finite, -jnp.log1p(-jnp.where(finite, relative, 0)), jnp.inf)


def _largest_valid(x: Real[Array, " m"], valid: Bool[Array, " m"]) -> Real[Array, ""]:
    """The largest valid entry, or 0 if there is none."""
    largest = jnp.max(jnp.where(valid, x, -jnp.inf))
    return jnp.where(valid.any(), largest, 0)
