import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real


def sample_mean(samples: Inexact[Array, " m"]) -> Inexact[Array, ""]:
    """The mean, without rounding error where all samples are equal."""
    pivot = jax.lax.stop_gradient(samples[0])
    return pivot + jnp.mean(samples - pivot)


class Moments(eqx.Module):
    """Count, mean, spread and skewness of exchangeable samples.

    The spread is the Euclidean norm of the deviations from the mean, not its square, so
    that nothing overflows or underflows before the samples themselves do.
    """

    count: int = eqx.field(static=True)
    mean: Inexact[Array, ""]
    spread: Real[Array, ""]
    skewness: Real[Array, ""]

    @classmethod
    def of(cls, samples: Inexact[Array, " m"]) -> "Moments":
        count = samples.shape[0]
        mean = sample_mean(samples)
        deviation = samples - mean
        largest = jnp.max(jnp.abs(deviation))
        unit = deviation / jnp.where(largest > 0, largest, 1)
        square = jnp.sum(jnp.abs(unit) ** 2)
        cube = jnp.abs(jnp.sum(unit * jnp.abs(unit) ** 2))
        skewness = cube * count**0.5 / jnp.where(largest > 0, square, 1) ** 1.5
        return cls(count, mean, largest * jnp.sqrt(square), skewness)

    @property
    def independent_std_err(self) -> Real[Array, ""]:
        """The textbook standard error of the mean of independent samples, `s / sqrt(m)`
        with `ddof=1`; infinite for a single sample."""
        if self.count == 1:
            return jnp.full_like(self.spread, jnp.inf)
        return self.spread / (self.count * (self.count - 1)) ** 0.5

    def std_err(self, covariance: Real[Array, ""] | float = 0.0) -> Real[Array, ""]:
        """The standard error of the mean that we report.

        `covariance` is that of two samples; with it the variance of the mean is
        `s^2 / m + covariance`, and negative values, which are noise, count as 0.

        Quadratic forms are skewed, and then `s / sqrt(m)` is small just when the mean is
        far off: over 10 samples of a rank-one form a 95% interval covers 88%. To first
        order the interval of Student's t lacks a factor `1 + c skewness^2 / m` (the
        Edgeworth expansion of Hall, The Bootstrap and Edgeworth Expansion, 1992, section
        2.6). The sample skewness is itself too small in small samples, so `c` is rounded
        up, and a term for `E[s] < sigma` is added. The factor tends to 1 as m grows.
        """
        correlated = jnp.sqrt(jnp.maximum(covariance, 0))
        inflation = 1 + 2 * (1 + self.skewness**2) / self.count
        return inflation * jnp.hypot(self.independent_std_err, correlated)
