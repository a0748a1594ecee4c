"""The covariance of several means of the same samples.

Means t_1 .. t_q of samples t_ij have error bars e_j, which are wider than the samples
alone show: for skewed samples, and where samples share a basis. The covariance that goes
with them has the correlation r of the samples,

    C_jl = r_jl e_j e_l,    r_jl = sum_i d_ij d_il / sqrt(sum_i d_ij^2 sum_i d_il^2),

with d = t - mean. Complex numbers count as pairs of real ones: all real parts, and then
all imaginary parts (`real_parts`).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real


class Correlation(eqx.Module):
    """The correlation of the means of p numbers.

    - `matrix`: shape `(p, p)`.
    - `deviations`: of their samples from the mean, shape `(m, p)`, scaled such that D* D
        is the correlation of the samples; None without samples. A number without any
        spread has a row of its own, as an independent one.
    - `of_samples`: whether that correlation is `matrix`.
    """

    matrix: Real[Array, "p p"]
    deviations: Real[Array, "m p"] | None
    of_samples: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, "m q"],
        valid: Bool[Array, " m"],
        matrix: Real[Array, "p p"] | None = None,
    ) -> "Correlation":
        """That of the `valid` samples, or the `matrix`."""
        unit, size = deviations(samples, valid)
        count = jnp.maximum(jnp.sum(valid), 1)
        alone = jnp.diag(jnp.where(size > 0, 0, 1).astype(unit.dtype))
        rows = jnp.concatenate([unit / jnp.sqrt(count), alone])
        if matrix is None:
            return cls(correlation_of(samples, valid), rows, of_samples=True)
        return cls(matrix, rows, of_samples=False)

    def covariance(self, u: Real[Array, "o p"]) -> Real[Array, "o o"]:
        """`u R u*`, not negative on its diagonal."""
        if self.deviations is not None and self.of_samples:
            # Of nearly equal numbers with different signs more digits are left in this
            # product than in the matrix.
            parts = jnp.matmul(u, self.deviations.T, precision="highest")
            return jnp.matmul(parts, parts.T, precision="highest")
        form = jnp.einsum("oi,ij,lj->ol", u, self.matrix, u, precision="highest")
        # Of a difference below the rounding errors of the matrix nothing is known.
        rounding = jnp.finfo(u.dtype).eps * jnp.sum(jnp.abs(u), axis=1) ** 2
        known = jnp.maximum(jnp.diagonal(form), rounding)
        return jnp.where(jnp.eye(len(u), dtype=bool), known, form)

    def third_moments(self, u: Real[Array, "o p"]) -> Real[Array, " o"]:
        """Third central moments of the samples of `u t`, up to a factor; 0 without
        samples."""
        if self.deviations is None:
            return jnp.zeros(len(u), u.dtype)
        return jnp.sum((u @ self.deviations.T) ** 3, axis=1)


def real_parts(x: Inexact[Array, "*m q"]) -> Real[Array, "*m p"]:
    """Real numbers along the last axis: x itself, or its real and its imaginary parts."""
    if not jnp.iscomplexobj(x):
        return x
    return jnp.concatenate([x.real, x.imag], axis=-1)


def join_parts(parts: Real[Array, "*m p"], dtype: jnp.dtype) -> Inexact[Array, "*m q"]:
    """The inverse of `real_parts`, for numbers of this dtype."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return parts
    return jax.lax.complex(*jnp.split(parts, 2, axis=-1))


def deviations(
    samples: Inexact[Array, "m q"], valid: Bool[Array, " m"]
) -> tuple[Real[Array, "m p"], Real[Array, " p"]]:
    """Deviations of the `valid` samples from their mean, in units of their root mean
    square, and these units. Where all samples are equal, both are 0."""
    rows, count = valid[:, None], jnp.maximum(jnp.sum(valid), 1)
    parts = real_parts(jnp.where(rows, samples, 0))
    # From a sample, and not from 0, so that nearly equal samples keep their digits.
    offset = jnp.where(rows, parts - parts[0], 0)
    centred = jnp.where(rows, offset - jnp.sum(offset / count, axis=0), 0)
    largest = jnp.max(jnp.abs(centred), axis=0)
    centred = centred / jnp.where(largest > 0, largest, 1)
    size = jnp.sqrt(jnp.sum(centred**2, axis=0) / count)
    return centred / jnp.where(size > 0, size, 1), largest * size


def correlation_of(
    samples: Inexact[Array, "m q"], valid: Bool[Array, " m"]
) -> Real[Array, "p p"]:
    """The correlation of the columns of the `valid` samples, the first of which is one.
    Columns without any spread are taken to be uncorrelated."""
    unit, _ = deviations(samples, valid)
    return normalise_covariance(jnp.matmul(unit.T, unit, precision="highest"))


def normalise_covariance(covariance: Real[Array, "p p"]) -> Real[Array, "p p"]:
    """The correlation that goes with a covariance. Numbers without any variance are taken
    to be uncorrelated."""
    size = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), 0))
    size = jnp.where(size > 0, size, 1)
    correlation = jnp.clip(covariance / size / size[:, None], -1, 1)
    return jnp.where(jnp.eye(len(size), dtype=bool), 1, correlation)


def errors_of_parts(
    std_err: Real[Array, " q"], samples: Inexact[Array, "m q"], valid: Bool[Array, " m"]
) -> Real[Array, " p"]:
    """The error bars of real numbers. That of a complex number is divided among its two
    parts by the spread of their samples."""
    if not jnp.iscomplexobj(samples):
        return std_err
    _, spread = deviations(samples, valid)
    real, imag = jnp.split(spread, 2)
    total = jnp.hypot(real, imag)
    # Without any spread each part may have the whole error.
    share = jnp.stack([real, imag]) / jnp.where(total > 0, total, 1)
    return (jnp.where(total > 0, share, 1) * std_err).ravel()


def covariance_of(
    correlation: Real[Array, "p p"], std_err: Real[Array, " p"]
) -> Real[Array, "p p"]:
    """The covariance with these error bars. An infinite bar beside one of 0, or of a
    number that is not correlated, gives 0."""
    zero = (correlation == 0) | (std_err == 0) | (std_err[:, None] == 0)
    rows, columns = (jnp.where(zero, 0, x) for x in (std_err[:, None], std_err))
    return correlation * rows * columns
