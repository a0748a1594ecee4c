"""What is read of the estimates of an expansion: samples, their moments, and the error of
their mean. See `expansion.py`."""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.covariance import deviations, normalise_covariance
from .._core.joint import join, JointMoments, scalars_of
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity, sum_rows
from .dense import eigh
from .expansion import AbstractExpansion, AbstractLeaveOneOut, read_rows


class Reading(eqx.Module):
    """The estimates of a quantity from several estimates of an operator, and their error.

    - `samples`: the quantity of each estimate if it is a scalar; of several scalars, as
        in `Estimate`, shape `(m, q)`; else None.
    - `moments`: the moments of the samples.
    - `std_err`: the standard error of their mean.
    - `magnitude`: what rounding errors are relative to, one number or of the shape of
        `std_err`.
    - `extra`: entries for `Solution.stats`.
    - `correlation`: that of the means of several scalars; None for that of the samples.
    """

    samples: Inexact[Array, "m ..."] | None
    moments: JointMoments
    std_err: Real[Array, "*q"]
    magnitude: Real[Array, "*q"] | Real[Array, ""]
    extra: dict[str, Array] = eqx.field(default_factory=dict)
    correlation: Real[Array, "p p"] | None = None


def read(
    quantity: AbstractQuantity,
    expansion: AbstractExpansion,
    valid: Bool[Array, " m"] | None = None,
    *,
    skewed: bool,
) -> Reading:
    """The quantity of the `valid` estimates, which come first. Samples may be
    `skewed`."""
    ones = jnp.ones_like(expansion.products[0])
    shared = read_rows(quantity.read, [expansion.shared])
    common, own = sum_rows(shared), expansion.own()
    if quantity.diagonal_only:
        common = common + expansion.shift * quantity.read(ones, ones)
    elif expansion.probes is not None:
        own = [*own, (expansion.probes, expansion.shift * expansion.probes)]
    samples = common + read_rows(quantity.read, own)
    moments = Moments.of(samples, valid, skewed=skewed)
    covariance = _steady(expansion.covariance(quantity, valid), moments)
    std_err = moments.std_err(covariance)
    kept = samples if samples.ndim == 1 else jax.vmap(quantity.scalars)(samples)
    return Reading(
        samples=kept,
        moments=JointMoments((moments,), joined=False),
        std_err=std_err,
        magnitude=quantity.magnitude(expansion.products),
    )


def join_readings(
    quantity: AbstractQuantity,
    readings: Sequence[Reading],
    expansion: Callable[[], AbstractExpansion] | None,
    valid: Bool[Array, " m"] | None,
) -> Reading:
    """The reading of a quantity from those of its parts."""
    columns = [x.samples for x in readings if x.samples is not None]
    samples = columns[0] if columns and not quantity.joined else None
    if columns and quantity.joined:
        samples = jnp.concatenate([x.reshape(len(x), -1) for x in columns], axis=1)
    correlation = None
    if samples is not None and samples.ndim > 1 and expansion is not None:
        estimates = expansion()
        if samples.shape[1] > 1 and isinstance(estimates, AbstractLeaveOneOut):
            correlation = _correlation(quantity, estimates, samples, valid)
    if not quantity.joined:
        return dataclasses.replace(readings[0], correlation=correlation)
    moments = [part for reading in readings for part in reading.moments.parts]
    magnitudes = [jnp.broadcast_to(x.magnitude, x.std_err.shape) for x in readings]
    return Reading(
        samples=samples,
        moments=JointMoments(tuple(moments), joined=True),
        std_err=join([x.std_err for x in readings]),
        magnitude=join(magnitudes),
        correlation=correlation,
    )


def _correlation(
    quantity: AbstractQuantity,
    expansion: AbstractLeaveOneOut,
    samples: Inexact[Array, "m q"],
    valid: Bool[Array, " m"] | None,
) -> Real[Array, "p p"]:
    """The correlation of the means of scalars. Their covariance is `S / m + C`, with S
    that of the samples, and C that of two estimates."""

    def read(left, image):
        scalars = [scalars_of(x, x.read(left, image)) for x in quantity.parts]
        return jnp.concatenate([x for x in scalars if x is not None])

    valid = jnp.ones(len(samples), bool) if valid is None else valid
    unit, size = deviations(samples, valid)
    count = jnp.maximum(jnp.sum(valid), 2).astype(size.dtype)
    within = jnp.matmul(unit.T, unit, precision="highest") / count / (count - 1)
    known = size > 0
    scale = jnp.where(known, 1 / jnp.where(known, size, 1), 0)
    between = expansion.scalar_covariance(read, valid)
    # Noise makes the estimate of C indefinite; variances without it count as 0 too. With
    # the nearest semidefinite matrix, sums of scalars that vanish still do.
    values, vectors = eigh(scale[:, None] * between * scale)
    vectors = vectors * jnp.sqrt(jnp.maximum(values, 0))
    total = within + jnp.matmul(vectors, vectors.T, precision="highest")
    return normalise_covariance(total)


def noise_gain(
    quantity: AbstractQuantity,
    probes: Inexact[Array, "m n"],
    valid: Bool[Array, " m"] | None,
) -> Real[Array, "*q"]:
    """The standard deviation of the quantity for a matrix of independent entries of
    variance one, estimated from pairs of independent probes."""
    pairs = [(probes, jnp.roll(probes, 1, axis=0))]
    squares = jnp.abs(read_rows(quantity.read, pairs)) ** 2
    count = len(probes) if valid is None else jnp.maximum(jnp.sum(valid), 1)
    return jnp.sqrt(jnp.sum(squares, axis=0) / count)


def _steady(covariance: Real[Array, "*q"] | float, moments: Moments) -> Real[Array, "*q"]:
    """A covariance with less noise. The covariance of a single entry is noisy, and the
    correlation pooled over all entries is wrong where entries differ. So an entry gets
    the pooled one or, if larger, the mean of the pooled one and its own. A scalar
    quantity gets its own."""
    variance = moments.count * moments.independent_std_err**2
    variance = jnp.where(moments.count > 1, variance, 0)
    covariance = jnp.asarray(covariance, variance.dtype)
    total = jnp.sum(variance)
    pooled = jnp.maximum(jnp.sum(covariance), 0) / jnp.where(total > 0, total, 1)
    return jnp.maximum(pooled * variance, (covariance + pooled * variance) / 2)
