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
