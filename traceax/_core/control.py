"""Means of samples with a control variate: samples of the same probes, of known mean.

For samples a_i, and samples b_i with the mean `known`, the estimate is the mean of

    t_i = a_i - c_i (b_i - known),    E t_i = E a_i for any c_i that is independent of
                                      sample i,    Var t_i = (1 - rho^2) Var a_i at best.

Here c_i is the regression coefficient of the m - 1 other samples, shrunk towards zero as
far as it may be noise (James and Stein):

    c_i = S_ab / S_bb max(0, 1 - 1 / F),    F = (m - 3) |S_ab|^2 / (S_aa S_bb - |S_ab|^2),
    S_ab = sum_{j != i} (a_j - mean) conj(b_j - mean) = S - m / (m - 1) da_i conj(db_i),

with S the sum over all samples, and da_i, db_i the deviations from the mean over all.
Lavenberg and Welch, "A Perspective on the Use of Control Variables to Increase the
Efficiency of Monte Carlo Simulations", Management Science 27, 1981, who leave one out.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .moments import align, sampling_quantiles
from .quantiles import student_quantile
from .results import failure, RESULTS
from .sign_moments import SignMoments


# With fewer samples the others fit any two lines, and the coefficients are 0.
FEWEST_CONTROLLED = 4
# The share of a sum of squares, in machine epsilons for each sample, that may be rounding
# where one sample is left out.
_ROUNDING = 8
# A known answer is wrong if the control's own samples exclude it with this confidence,
# and by so many standard errors. Rank-one controls raise a false alarm once in 1e5 calls.
_CONFIDENCE, _MIN_ERRORS = 1 - 1e-6, 6
# Beyond this confidence its distance from the samples counts as an error of it: few
# samples cannot exclude an answer that is far off.
_DOUBTFUL = 0.999
# The allowance for rounding in the known answer, in rounding errors of the samples.
_KNOWN_ROUNDING = 20


class Regression(eqx.Module):
    """The regression of samples on those of a control.

    - `coefficients`: c_i, of the shape of the samples, 0 for samples that are not valid.
    - `correlation`: |rho| of the samples, of the shape of one.
    - `count`: the number m of samples.
    """

    coefficients: Inexact[Array, "m ..."]
    correlation: Real[Array, "*q"]
    count: Real[Array, ""]

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, "m ..."],
        control: Inexact[Array, "m ..."],
        valid: Bool[Array, " m"],
    ) -> "Regression":
        rows = align(valid, samples)
        count = jnp.sum(valid).astype(samples.real.dtype)
        (a, size_a), (b, size_b) = (
            _deviations(x, rows, count) for x in (samples, control)
        )
        share = count / jnp.maximum(count - 1, 1)

        def left_out(x, y):
            """The sums over all samples, and without each of them."""
            products = x * y.conj()
            total = jnp.sum(products, axis=0)
            return total, total - share * products

        (aa, aa_i), (bb, bb_i), (ab, ab_i) = (
            left_out(x, y) for x, y in ((a, a), (b, b), (a, b))
        )
        aa, bb, aa_i, bb_i = (x.real for x in (aa, bb, aa_i, bb_i))
        eps = jnp.finfo(samples.dtype).eps
        usable = (
            rows & (count >= FEWEST_CONTROLLED) & (bb_i > _ROUNDING * count * eps * bb)
        )
        safe = jnp.where(usable, bb_i, 1)
        explained = jnp.abs(ab_i) ** 2 / safe
        noise = jnp.maximum(aa_i - explained, 0) / jnp.maximum(count - 3, 1)
        ratio = noise / jnp.where(explained > 0, explained, 1)
        kept = jnp.where(explained > 0, jnp.maximum(1 - ratio, 0), 0)
        scale = size_a / jnp.where(size_b > 0, size_b, 1)
        coefficients = jnp.where(usable, scale * kept * ab_i / safe, 0)
        root = jnp.sqrt(aa) * jnp.sqrt(bb)
        correlation = jnp.abs(ab) / jnp.where(root > 0, root, 1)
        return cls(coefficients, jnp.minimum(correlation, 1), count)

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        """The mean coefficient."""
        return jnp.sum(self.coefficients, axis=0) / jnp.maximum(self.count, 1)

    @property
    def widening(self) -> Real[Array, ""]:
        """The factor of the error bar. The samples t_i share the noise of the
        coefficients, of a relative variance of 1 / m: with this factor intervals cover no
        less than those of plain samples, from four samples on."""
        return 1 + jnp.where(
            self.count >= FEWEST_CONTROLLED, 2 / jnp.maximum(self.count, 1), 0
        )


def _deviations(
    samples: Inexact[Array, "m ..."], rows: Bool[Array, "m ..."], count: Real[Array, ""]
) -> tuple[Inexact[Array, "m ..."], Real[Array, "*q"]]:
    """Deviations from the mean, in units of the largest one; and that unit."""
    # From a sample, and not from 0, so that nearly equal samples keep their digits.
    offset = jnp.where(rows, samples - samples[0], 0)
    mean = jnp.sum(offset / jnp.maximum(count, 1), axis=0)
    deviations = jnp.where(rows, offset - mean, 0)
    size = jnp.max(jnp.abs(deviations), axis=0)
    return deviations / jnp.where(size > 0, size, 1), size


def check_known(
    moments: SignMoments,
    known: Inexact[Array, "*q"],
    rounding: float,
    *,
    least: Real[Array, "*q"] | float = 0.0,
    apart: Real[Array, "*q"] | float = 0.0,
) -> tuple[Real[Array, "*q"], RESULTS]:
    """The error of the `known` mean of the control, as far as samples with these moments
    show one; and `RESULTS.inconsistent_control` if they exclude it, or if it is not
    finite. `rounding` is the relative size of rounding errors, `least` a lower bound of
    the standard error of the samples, and `apart` an error that all samples have."""
    error, count = jnp.maximum(moments.std_err(), least), moments.count
    stats = {"num_samples": count, "skewness": moments.skewness}
    confidence = jnp.asarray(_CONFIDENCE, error.dtype)
    quantile = jnp.maximum(sampling_quantiles(confidence, error, stats), _MIN_ERRORS)
    size = jnp.abs(known) if moments.size is None else moments.size
    floor = apart + _KNOWN_ROUNDING * rounding * jnp.maximum(jnp.abs(known), size)
    distance = jnp.abs(moments.mean - known)
    wrong = (distance > quantile * error + floor) | ~jnp.isfinite(known)
    doubtful = student_quantile(_DOUBTFUL, count - 1) * error + floor
    error = jnp.where(distance > doubtful, distance, 0)
    return error, failure(jnp.any(wrong), RESULTS.inconsistent_control)
