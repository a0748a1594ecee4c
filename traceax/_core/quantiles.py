import statistics

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Real


def normal_quantile(
    confidence: float | Real[Array, ""],
) -> float | Real[Array, ""]:
    """The z for which a standard normal `|Z| < z` with the given probability."""
    if isinstance(confidence, float):
        return statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    return -ndtri((1 - confidence) / 2)


def student_quantile(
    confidence: float | Real[Array, ""], freedom: Real[Array, ""]
) -> Real[Array, ""]:
    """The t for which `|T| < t` with the given probability. Abramowitz and Stegun,
    Handbook of Mathematical Functions, 1964, 26.7.5, and exactly for 1 and 2 degrees of
    freedom; from 3 on the relative error is below 2e-3 at 95%, and 5% at 99.9%."""
    z = normal_quantile(confidence)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    inverse = 1 / jnp.maximum(freedom, 1)
    quantile = jnp.full_like(inverse, terms[-1])
    for term in (*terms[-2::-1], z):
        quantile = quantile * inverse + term
    functions = np if isinstance(confidence, float) else jnp
    one = functions.tan(np.pi / 2 * confidence)
    two = confidence * functions.sqrt(2 / ((1 - confidence) * (1 + confidence)))
    few = jnp.where(freedom < 1.5, one, two)
    return jnp.where(freedom < 2.5, few.astype(quantile.dtype), quantile)


def widening(
    skewness: Real[Array, "*q"],
    count: Real[Array, "*parts"],
    confidence: float | Real[Array, ""] = 0.95,
) -> Real[Array, "*q"]:
    """By what factor intervals of Student's t are widened for the mean of `count` samples
    of this sample skewness.

    Quadratic forms are skewed, and then `s / sqrt(m)` is small just when the mean is far
    off: over 10 samples of a rank-one form a 95% interval covers 86%. To first order the
    interval of Student's t lacks a factor `1 + c skewness^2 / m` (the Edgeworth expansion
    of Hall, The Bootstrap and Edgeworth Expansion, 1992, section 2.6). The sample
    skewness is itself too small in small samples, and below `sqrt(m)` whatever the
    samples, so `c` is rounded up, and `(4 / m)^2` is added for what few samples cannot
    show. A term for `E[s] < sigma` is added too. The factor tends to 1 as m grows.

    That is enough up to 95%. What is missing beyond grows with the square of the normal
    quantile, as Hall's term does, and with the skewness of the distribution, of which
    `|skewness| + 4 / sqrt(m)` is an upper estimate: the skewness of normal samples has a
    standard deviation of `sqrt(6 / m)`.
    """
    factor = 1 + 2 * (1 + skewness**2 + (4 / count) ** 2) / count
    if isinstance(confidence, float) and confidence <= 0.95:
        return factor
    excess = (normal_quantile(confidence) / normal_quantile(0.95)) ** 2 - 1
    most = jnp.abs(skewness) + 4 / jnp.sqrt(count)
    return factor + 2 * jnp.maximum(excess, 0).astype(factor.dtype) * most**2 / count
