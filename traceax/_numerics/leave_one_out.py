"""Leaving probes out of a sketch without computing it again.

Let `X = Q diag(s) Vh` (n x m, from `dense.thin_svd`) have the columns `x_1 .. x_m`. The
range of the other columns, `x_i` left out, is `{Q y : y orthogonal to S[:, i]}` with

    S[:, i] = diag(1/s) Vh e_i / |diag(1/s) Vh e_i|,

and two columns are left out by the projector onto `span(S[:, i], S[:, j])`. Everything
below is arithmetic with m x m matrices. "Source" is Epperly, Tropp and Webber, XTrace:
making the most of every sample in stochastic trace estimation, SIMAX 45 (2024), sections
2.2 and 2.3, for leaving out one; leaving out two, and what follows from it, is ours.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.moments import Moments
from .._core.reductions import reduce_together
from .dense import diagonal, dual_rows, reveal


class LeaveOneOut(eqx.Module):
    """- `directions`: `S` above; a zero column where the probe is not `essential`.
    - `distance`: of `x_i` from the range of the other columns, 0 where not essential.
    - `essential`: whether leaving the column out lowers the rank.
    - `rank`: of `X`.
    """

    directions: Inexact[Array, "m m"]
    distance: Real[Array, " m"]
    essential: Bool[Array, " m"]
    rank: Real[Array, ""]


def leave_one_out(
    s: Real[Array, " m"], vh: Inexact[Array, "m m"], eps: float
) -> LeaveOneOut:
    """The directions to project out, from singular values (0 beyond the rank), right
    singular vectors, and the relative rounding error `eps` of `X`.

    A column is essential where all null vectors `v` of `X` have a zero in its place, up
    to their own rounding errors. The other columns give `x_i` with an error of
    `eps |X| / |v_i|`; if that is not below the part of `x_i` that they are to give, which
    is `distance`, then `x_i` is essential.
    """
    largest = jnp.max(s)
    return _from_dual(dual_rows(s, vh, largest), s > 0, largest, eps)


def _from_dual(rows: Array, kept: Array, unit: Array, eps: float) -> LeaveOneOut:
    squares, beside = jnp.abs(rows) ** 2, kept[:, None]
    raw, null = jnp.where(beside, squares, 0), jnp.where(beside, 0, squares)
    length, lost, ranks = reduce_together((raw, null, kept.astype(unit.dtype)))
    length, lost = jnp.sqrt(length), jnp.sqrt(lost)
    essential = (length > 0) & (lost <= 8 * eps * length)
    length = jnp.where(essential, length, 1)
    directions = jnp.where(beside & essential, rows / length, 0)
    distance = jnp.where(essential, unit / length, 0)
    return LeaveOneOut(directions, distance, essential, ranks[0])


def leave_one_out_of(
    r: Inexact[Array, "m m"], eps: float
) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"], LeaveOneOut]:
    """For `X = Q R`: `R = U T` with columns of U that are orthonormal, or zero where
    those of R are dependent but for rounding; and the directions, in the basis `Q U`.

    That is rounding of arithmetic. Errors of the products, larger in low precision, stay:
    leaving out a column is exact algebra for any columns. Without them Q would be the
    dominant part of the range, which depends on all columns, and also on the one that is
    left out."""
    u, t, rows, kept, unit = reveal(r, float(jnp.finfo(r.dtype).eps))
    return u, t, _from_dual(rows, kept, unit, eps)


class Pairs(eqx.Module):
    """Projectors `P_ij` onto `span(u_i, u_j)` of unit (or zero) vectors with Gram matrix
    `gram`, all pairs at once: entry `[i, j]` of each m x m result belongs to `P_ij`. The
    diagonal, where the pair is one vector, is meaningless and finite.
    """

    gram: Inexact[Array, "m m"]
    det: Real[Array, "m m"]

    @classmethod
    def of(cls, gram: Inexact[Array, "m m"]) -> "Pairs":
        det = 1 - jnp.abs(gram) ** 2
        return cls(gram, jnp.where(det > jnp.finfo(det.dtype).eps, det, 1))

    def trace(self, form: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """`tr(P_ij M)`, from `form[i, j] = u_i* M u_j`."""
        own = diagonal(form)
        mixed = self.gram * form.T + self.gram.T * form
        return (own[:, None] + own[None, :] - mixed) / self.det

    def coefficients(
        self, inner: Inexact[Array, "m m"]
    ) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"]]:
        """`alpha, beta` of `P_ij w_j = alpha u_i + beta u_j`, from
        `inner[i, j] = u_i* w_j`."""
        own = diagonal(inner)[None, :]
        alpha = (inner - self.gram * own) / self.det
        beta = (own - self.gram.T * inner) / self.det
        return alpha, beta


def resphere(
    n: int,
    rank: Real[Array, "..."] | int,
    norm_squared: Real[Array, "..."],
    inside_squared: Real[Array, "..."],
) -> Real[Array, "..."]:
    """`(n - rank) / |(I - P) w|^2`: scales a quadratic form in the part of a
    rotation-invariant probe outside a space of the given rank to the trace there. 1
    where nothing is outside."""
    outside = norm_squared - inside_squared
    safe = outside > jnp.finfo(norm_squared.dtype).eps * norm_squared
    return jnp.where(safe, (n - rank) / jnp.where(safe, outside, 1), 1)


def resphering(
    probes: Inexact[Array, "n m"],
    outside: Inexact[Array, "n m"],
    rank: Real[Array, ""] | int,
    wanted: bool,
) -> Real[Array, " m"]:
    """The factor of `resphere` for probes whose part `outside` a space is known, or 1
    where it is not `wanted`."""
    norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
    if not wanted:
        return jnp.ones_like(norms)
    inside = norms - jnp.sum(jnp.abs(outside) ** 2, axis=0)
    return resphere(len(probes), rank, norms, inside)


def leave_one_out_frame(
    probes: Inexact[Array, "n m"],
    q: Inexact[Array, "n m"],
    loo: LeaveOneOut,
    improved: bool,
    count: Int[Array, ""] | int | None = None,
    one_sided: bool = False,
) -> tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]:
    """Arrays `L, R` for which `sum(conj(L) * (B R))` is the mean over i of

        tr(P_i B P_i) + c_i v_i* B v_i,    v_i = (I - P_i) omega_i,

    with `P_i` the projector onto the range of `q` without probe i's direction, and `c_i`
    the resphering factor, or 1. As `P_i` does not depend on `omega_i`, the expectation
    for a fixed B is `tr B`. `count` is the number of probes that are not zero. Where it
    is `one_sided`, `omega_i* B v_i` takes the place of the second form.
    """
    n, m = probes.shape
    number = m if count is None else count
    directions = loo.directions
    w = q.conj().T @ probes
    own = jnp.sum(directions.conj() * w, axis=0)
    c = jnp.ones_like(own.real)
    if improved:
        norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
        inside = jnp.sum(jnp.abs(w) ** 2, axis=0) - jnp.abs(own) ** 2
        c = resphere(n, loo.rank - loo.essential.astype(int), norms, inside)
    v = probes - q @ (w - directions * own)
    left = q - q @ (directions @ directions.conj().T) / number
    sampled = (probes if one_sided else v * c) / number
    return jnp.concatenate([left, sampled], 1), jnp.concatenate([q, v], 1)


def change_without(
    samples: Inexact[Array, " m"],
    pairs: Inexact[Array, "m m"],
    valid: Bool[Array, " m"],
) -> Inexact[Array, "m m"]:
    """`samples[j]` is t_j, and `pairs[i, j]` is t_j with probe i left out as well: their
    difference, for two different `valid` probes, and else 0."""
    return jnp.where(two(valid), samples - pairs, 0)


def two(valid: Bool[Array, " m"]) -> Bool[Array, "m m"]:
    """Pairs of two different valid probes."""
    return valid[:, None] & valid & ~jnp.eye(valid.shape[0], dtype=bool)


def sample_covariance(
    change: Inexact[Array, "m m"], count: Real[Array, ""]
) -> Real[Array, ""]:
    """Unbiased estimate of the covariance of two leave-one-out samples, from the
    `change_without` of `count` probes.

    Given the other probes, t_j is unbiased over probe j, so it is uncorrelated with all
    that does not involve probe j. Hence

        cov(t_i, t_j) = E[(t_i - pairs[j, i]) conj(t_j - pairs[i, j])],

    and with it the variance of the mean of the samples is `s^2 / m` plus this, without
    bias: `E[s^2] = var(t_j) - cov`. See "Leave-one-out" in the developer documentation.
    """
    total = jnp.sum(diagonal(change @ change.conj())).real
    return total / jnp.maximum(count * (count - 1), 1)


def jackknife(
    samples: Inexact[Array, " m"],
    change: Inexact[Array, "m m"],
    valid: Bool[Array, " m"],
) -> Real[Array, ""]:
    """Standard error from the whole estimate without probe i, which but for a constant is
    `T_i = -(t_i + sum_j change[i, j]) / (m - 1)`.

    It is `sqrt((m-1)/m sum_i |T_i - mean T|^2)`. Its square is, in the mean, at least
    (m-1)/m times the variance of the estimate with m - 1 probes (Efron and Stein, Annals
    of Statistics 9, 1981). Infinite for m = 1.
    """
    moments = Moments.of(samples + jnp.sum(change, axis=1), valid, skewed=False)
    return moments.independent_std_err


def standard_errors(
    samples: Inexact[Array, " m"],
    pairs: Inexact[Array, "m m"],
    valid: Bool[Array, " m"] | None = None,
) -> tuple[Real[Array, ""], Real[Array, ""], dict[str, Array]]:
    """The standard error of the mean of leave-one-out samples, those of `valid` probes;
    how many times that is what the samples alone show; and two others by name: the
    jackknife, which is cautious, and the published one, which takes the samples to be
    independent and is too small."""
    valid = jnp.ones(samples.shape, bool) if valid is None else valid
    moments = Moments.of(samples, valid)
    change = change_without(samples, pairs, valid)
    std_err = moments.std_err(sample_covariance(change, moments.count))
    cautious = jackknife(samples, change, valid)
    # Where the error falls fast with each probe, a few draws make up the mean of the
    # estimated variance, and too many others are too small. The jackknife's are not.
    raised = jnp.maximum(std_err, cautious / 5)
    known = (std_err > 0) & jnp.isfinite(raised)
    factor = jnp.where(known, raised / jnp.where(known, std_err, 1), 1)
    return (
        raised,
        factor,
        {
            "jackknife_std_err": cautious,
            "independent_std_err": moments.independent_std_err,
        },
    )
