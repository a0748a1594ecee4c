"""Estimates of a whole operator from a sketch, from which any linear quantity is read.

A *pair* of arrays `(left, image)`, each with vectors of length n as its rows, stands for
the matrix of the sum over its rows of `image left*`. A sketch gives m estimates of the
operator, each the sum of pairs that all share and of pairs of its own.
"""

import abc
import functools as ft
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._moments import Moments
from .._quantity import AbstractQuantity
from .leave_one_out import Pairs


Pair = tuple[Inexact[Array, "r n"], Inexact[Array, "r n"]]


class AbstractExpansion(eqx.Module):
    """m estimates of an operator.

    - `shared`: a pair that all estimates have in common.
    - `shift`: a multiple of the identity that they have in common too.
    - `products`: an array of shape `(p, n)` whose columns have about the norms of the
        rows of the operator, or of the part of them that was seen.
    """

    shared: eqx.AbstractVar[Pair]
    shift: eqx.AbstractVar[Real[Array, ""] | float]
    products: eqx.AbstractVar[Inexact[Array, "p n"]]

    @abc.abstractmethod
    def own(self) -> Sequence[Pair]:
        """Pairs of which row j belongs to estimate j."""

    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair] | None:
        """Pairs for what estimate j changes by where probe `other[j]` is left out of it
        as well as its own. None where the estimates are independent."""
        return None


class Reading(eqx.Module):
    """A quantity, read of several estimates of an operator.

    - `samples`: that of each, if it is a scalar.
    - `moments`: of the samples.
    - `std_err`: the standard error of their mean.
    - `magnitude`: what rounding errors are relative to.
    - `extra`: entries for `Solution.stats`.
    """

    samples: Inexact[Array, " m"] | None
    moments: Moments
    std_err: Real[Array, "*q"]
    magnitude: Real[Array, "*q"]
    extra: dict[str, Array] = eqx.field(default_factory=dict)


def read(
    quantity: AbstractQuantity,
    expansion: AbstractExpansion,
    valid: Bool[Array, " m"] | None = None,
) -> Reading:
    """The quantity of the estimates that are `valid`, which are the first ones."""

    def rows(pairs):
        return ft.reduce(jnp.add, [jax.vmap(quantity.read)(*pair) for pair in pairs])

    own = rows(expansion.own())
    m = len(own)
    count = m if valid is None else jnp.sum(valid)
    common = jnp.sum(rows([expansion.shared]), axis=0)
    ones = jnp.ones_like(expansion.products[0])
    common = common + expansion.shift * quantity.read(ones, ones)
    samples = common + own
    moments = Moments.of(samples, valid)
    covariance = 0.0
    if expansion.changes(jnp.arange(m)) is not None:
        covariance = _covariance(lambda other: rows(expansion.changes(other)), own, count)
        covariance = _steady(covariance, moments)
    std_err = moments.std_err(covariance, skewed=quantity.skewed)
    size = jnp.sum(rows([(expansion.products, expansion.products)]).real, axis=0)
    kept = samples if samples.ndim == 1 else None
    return Reading(kept, moments, std_err, jnp.sqrt(size))


def _covariance(
    changes: Callable[[Int[Array, " m"]], Inexact[Array, "m ..."]],
    samples: Inexact[Array, "m ..."],
    count: Int[Array, ""] | int,
) -> Real[Array, "*q"]:
    """That of two samples, without bias: see `leave_one_out.sample_covariance`. All pairs
    of probes, by the distance between their indices around a circle."""
    index = jnp.arange(len(samples))
    around = jnp.maximum(count, 1)
    weight = (index < count).astype(samples.real.dtype)
    weight = weight.reshape(-1, *(1,) * (samples.ndim - 1))

    def add(distance, total):
        ahead, behind = (index + distance) % around, (index - distance) % around
        product = changes(ahead) * changes(behind)[ahead].conj()
        # Opposite ones are met twice.
        twice = jnp.where(2 * distance == count, 1, 2)
        return total + twice * jnp.sum(weight * product.real, axis=0)

    zeros = jnp.zeros_like(samples[0].real)
    total = jax.lax.fori_loop(1, jnp.asarray(count) // 2 + 1, add, zeros)
    return total / jnp.maximum(count * (count - 1), 1)


def _steady(covariance: Real[Array, "*q"], moments: Moments) -> Real[Array, "*q"]:
    """With less noise: that of an entry alone is noisy, and the correlation pooled over
    all entries is wrong where they differ. The pooled one, or if it is larger the mean
    of both, holds for each entry; for a single entry it is the entry's own."""
    variance = moments.count * moments.independent_std_err**2
    variance = jnp.where(moments.count > 1, variance, 0)
    total = jnp.sum(variance)
    pooled = jnp.maximum(jnp.sum(covariance), 0) / jnp.where(total > 0, total, 1)
    return jnp.maximum(pooled * variance, (covariance + pooled * variance) / 2)


class Independent(AbstractExpansion):
    """`own_pair` has what is sampled of a remainder, the estimates being independent."""

    shared: Pair
    own_pair: tuple[Inexact[Array, "g n"], Inexact[Array, "g n"]]
    products: Inexact[Array, "p n"]
    shift: float = 0.0

    def own(self) -> Sequence[Pair]:
        return [self.own_pair]


class OneSided(AbstractExpansion):
    """Estimate j is, with `P_j = I - s_j s_j*`,

        X P_j W* + X s_j (s_j* r_j) omega_j*,

    what a basis without probe j knows of A, and the rest by probe j: `A omega_j = X r_j`.
    Then X W* is shared, and `s_j` is the direction in which the coordinates `r_j` leave
    those of the other probes (Epperly, Tropp and Webber, SIMAX 45, 2024, section 2.2).

    - `images`, `lefts`: rows `X s_j` and `W s_j`.
    - `residuals`: rows `conj(s_j* r_j) omega_j - W s_j`.
    - `gram`: `S* S`.
    """

    shared: Pair
    images: Inexact[Array, "m n"]
    lefts: Inexact[Array, "m n"]
    residuals: Inexact[Array, "m n"]
    gram: Inexact[Array, "m m"]
    products: Inexact[Array, "p n"]
    shift: Real[Array, ""] | float = 0.0

    def own(self) -> Sequence[Pair]:
        return [(self.residuals, self.images)]

    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair]:
        index = jnp.arange(len(other))
        across = self.gram[index, other][:, None]  # s_j* s_i
        det = Pairs.of(self.gram).det[index, other][:, None]
        image = self.images[other] - across * self.images
        left = self.lefts[other] + across * self.residuals
        return [(-left / det, image)]
