import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real


class Moments(eqx.Module):
    """Count, mean, spread and skewness of exchangeable samples, in a form that merges.

    Complex samples are pairs of real ones, along the axis `c`. Sums are in units of the
    largest deviation, so that nothing overflows or underflows before the samples do.
    """

    count: Real[Array, "*parts"]
    center: Real[Array, "*parts c"]
    unit: Real[Array, "*parts"]
    squares: Real[Array, "*parts c"]
    cubes: Real[Array, "*parts c"]

    @classmethod
    def of(
        cls, samples: Inexact[Array, " m"], valid: Bool[Array, " m"] | None = None
    ) -> "Moments":
        """Of the samples that are `valid`; the others may be anything."""
        parts = [samples]
        if jnp.iscomplexobj(samples):
            parts = [samples.real, samples.imag]
        center = jnp.stack(parts, axis=1)
        if valid is not None:
            center = jnp.where(valid[:, None], center, 0)
        unit = jnp.zeros_like(center[:, 0])
        count = jnp.ones_like(unit) if valid is None else valid.astype(unit.dtype)
        zeros = jnp.zeros_like(center)
        return cls.merge(cls(count, center, unit, zeros, zeros))

    @classmethod
    def merge(cls, parts: "Moments") -> "Moments":
        """Of all samples together, for moments stacked along a first axis. Chan, Golub
        and LeVeque, The American Statistician 37, 1983; third moments likewise."""
        count = parts.count[:, None]
        total = jnp.sum(count)
        pivot = parts.center[jnp.argmax(parts.count > 0)]
        weight = count / jnp.maximum(total, 1)
        center = pivot + jnp.sum(weight * (parts.center - pivot), axis=0)
        shift = jnp.where(count > 0, parts.center - center, 0)
        unit = jnp.maximum(jnp.max(jnp.abs(shift)), jnp.max(parts.unit))
        safe = jnp.where(unit > 0, unit, 1)
        ratio, shift = parts.unit[:, None] / safe, shift / safe
        squares, cubes = parts.squares * ratio**2, parts.cubes * ratio**3
        cubes = cubes + 3 * shift * squares + count * shift**3
        squares = squares + count * shift**2
        return cls(total, center, unit, jnp.sum(squares, axis=0), jnp.sum(cubes, axis=0))

    @property
    def mean(self) -> Inexact[Array, ""]:
        if self.center.shape == (1,):
            return self.center[0]
        return jax.lax.complex(self.center[0], self.center[1])

    @property
    def skewness(self) -> Real[Array, ""]:
        square = jnp.sum(self.squares)
        cube = jnp.linalg.norm(self.cubes)
        return jnp.sqrt(self.count) * cube / jnp.where(square > 0, square, 1) ** 1.5

    @property
    def independent_std_err(self) -> Real[Array, ""]:
        """The textbook standard error of the mean of independent samples, `s / sqrt(m)`
        with `ddof=1`; infinite for a single sample."""
        spread = self.unit * jnp.sqrt(jnp.sum(self.squares))
        freedom = jnp.where(self.count > 1, self.count * (self.count - 1), 1)
        return jnp.where(self.count > 1, spread / jnp.sqrt(freedom), jnp.inf)

    def std_err(self, covariance: Real[Array, ""] | float = 0.0) -> Real[Array, ""]:
        """The standard error of the mean that we report.

        `covariance` is that of two samples; with it the variance of the mean is
        `s^2 / m + covariance`, and negative values, which are noise, count as 0.

        Quadratic forms are skewed, and then `s / sqrt(m)` is small just when the mean is
        far off: over 10 samples of a rank-one form a 95% interval covers 86%. To first
        order the interval of Student's t lacks a factor `1 + c skewness^2 / m` (the
        Edgeworth expansion of Hall, The Bootstrap and Edgeworth Expansion, 1992, section
        2.6). The sample skewness is itself too small in small samples, and below
        `sqrt(m)` whatever the samples, so `c` is rounded up, and `(4 / m)^2` is added for
        what few samples cannot show. A term for `E[s] < sigma` is added too. The factor
        tends to 1 as m grows.
        """
        correlated = jnp.sqrt(jnp.maximum(covariance, 0))
        unseen = (4 / self.count) ** 2
        inflation = 1 + 2 * (1 + self.skewness**2 + unseen) / self.count
        return inflation * jnp.hypot(self.independent_std_err, correlated)
