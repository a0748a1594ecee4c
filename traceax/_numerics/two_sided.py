"""The samples of XTrace from small matrices, and the estimates of the operator that they
are traces of.

With `A Omega = Q R`, `W = Q* Omega` (columns `w_j`) and `s_j` the unit vector for which
`Q s_j` is orthogonal to the other columns of `A Omega`, sample j is

    t_j = tr(H) - s_j* H s_j + c_j v_j* A v_j,    H = Q* A Q,
    v_j = omega_j - Q (I - s_j s_j*) w_j,

with `c_j = 1`, or with resphering `c_j = (n - r + 1) / |v_j|^2` for R of rank r. No
further matvec is needed, as `A v_j = A omega_j - A Q (I - s_j s_j*) w_j`.

In the code: `s_j` is a column of `loo.directions`, r is `loo.rank`, `s_j* w_j` is `beta`,
and `e_j = omega_j - Q w_j` is the part of a probe outside the range of Q.

Reference: Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIMAX 45 (2024), sections 2.2 and 2.3 for leaving out one
probe. The page "Leave-one-out" of the developer documentation has the derivation, also
with two probes left out.
"""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import diagonal
from .expansion import AbstractLeaveOneOut, Pair
from .leave_one_out import LeaveOneOut, Pairs, resphering_factor


class SmallMatrices(eqx.Module):
    """The inner products of tall arrays that XTrace needs, where `A Omega = Q R`."""

    r: Inexact[Array, "m m"]
    h: Inexact[Array, "m m"]  # Q* A Q
    w: Inexact[Array, "m m"]  # Q* Omega
    across: Inexact[Array, "m m"]  # Omega* A Q
    norms: Real[Array, " m"]  # |omega_j|^2


def two_sided_samples(
    small: SmallMatrices,
    rotation: Inexact[Array, "m m"],
    r: Inexact[Array, "m m"],
    loo: LeaveOneOut,
    n: int,
    improved: bool,
) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"]]:
    """The samples and, entry `[i, j]`, sample j without probe i. `rotation` and `r`
    are U and T of `leave_one_out_of`, and `improved` is whether probes are resphered."""
    u = rotation
    essential = loo.essential.astype(int)

    # Below, e_j = omega_j - Q w_j is the part of probe j outside Q, and leaving out
    # the probes of a projector P changes it to e_j + Q P w_j:
    #   t = tr(H) - tr(P H) + c (e_j + Q P w_j)* A (e_j + Q P w_j).
    h, w = u.conj().T @ small.h @ u, u.conj().T @ small.w
    across = small.across @ u - w.conj().T @ h  # [j, :] = e_j* A Q
    back = r - h @ w  # [:, j] = Q* A e_j
    # e_j* A e_j. Its first term takes the whole R, not `r`, which is cut at its rank:
    # what is cut is small beside the largest singular value, but in low precision it may
    # be most of the trace.
    forms = small.w.conj() * small.r
    outside = jnp.sum(forms - w.conj() * r - across.T * w, axis=0)

    directions = loo.directions
    inner = directions.conj().T @ w
    form = directions.conj().T @ h @ directions
    across, back = (across @ directions).T, directions.conj().T @ back
    a_ss, a_es, a_se = (diagonal(x) for x in (form, across, back))

    def own_form(beta):
        return outside + beta * a_es + beta.conj() * a_se + jnp.abs(beta) ** 2 * a_ss

    def factor(removed, captured):  # of the squared length of a probe, by the basis
        if not improved:
            return jnp.ones_like(captured)
        return resphering_factor(n, loo.rank - removed, small.norms, captured)

    captured = jnp.sum(jnp.abs(w) ** 2, axis=0)
    trace = jnp.sum(diagonal(h))

    beta = diagonal(inner)
    c = factor(essential, captured - jnp.abs(beta) ** 2)
    samples = trace - a_ss + c * own_form(beta)

    pairs = Pairs.of(directions.conj().T @ directions)
    alpha, beta_pair = pairs.coefficients(inner)
    cross_form = (
        alpha * across
        + alpha.conj() * back
        + jnp.abs(alpha) ** 2 * a_ss[:, None]
        + alpha.conj() * beta_pair * form
        + beta_pair.conj() * alpha * form.T
    )
    restored = (inner.conj() * alpha + beta.conj() * beta_pair).real
    c_pair = factor(essential[:, None] + essential, captured - restored)
    without = trace - pairs.trace(form) + c_pair * (own_form(beta_pair) + cross_form)
    return samples, without


class TwoSided(AbstractLeaveOneOut):
    """Estimate j is `A Q P_j Q* + c_j A v_j v_j*`, with `P_j = I - s_j s_j*` and
    `v_j = omega_j - Q P_j w_j`. All share `A Q Q*`.

    - `bases`, `images`: rows `Q s_j` and `A Q s_j`.
    - `remainders`, `remainder_images`: rows `v_j` and `A v_j`.
    - `inner`: `S* W`, with S the matrix of the columns `s_j`.
    - `norms`, `captured`: `|omega_j|^2` and `|w_j|^2`.
    """

    shared: Pair
    products: Inexact[Array, "m n"]
    bases: Inexact[Array, "m n"]
    images: Inexact[Array, "m n"]
    remainders: Inexact[Array, "m n"]
    remainder_images: Inexact[Array, "m n"]
    inner: Inexact[Array, "m m"]
    norms: Real[Array, " m"]
    captured: Real[Array, " m"]
    loo: LeaveOneOut
    improved: bool = eqx.field(static=True)
    shift: float = 0.0
    probes: None = None

    def own(self) -> Sequence[Pair]:
        return [(-self.bases, self.images), self._remainder()]

    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair]:
        index, directions = jnp.arange(len(other)), self.loo.directions
        gram = directions.conj().T @ directions
        across, root = gram[index, other], jnp.sqrt(Pairs.of(gram).det[index, other])
        # The unit vector u for which P_i P_j = P_j - u u*.
        base = (self.bases[other] - across[:, None] * self.bases) / root[:, None]
        image = (self.images[other] - across[:, None] * self.images) / root[:, None]
        own = diagonal(self.inner)
        beta = (self.inner[other, index] - across.conj() * own) / root
        essential = self.loo.essential.astype(int)
        c = self._factor(essential + essential[other], jnp.abs(beta) ** 2)
        remainder = self.remainders + beta[:, None] * base
        remainder_image = self.remainder_images + beta[:, None] * image
        before, unchanged = self._remainder()
        after = c[:, None] * remainder, remainder_image
        return [(-base, image), after, (-before, unchanged)]

    def _remainder(self) -> Pair:
        c = self._factor(self.loo.essential.astype(int), 0.0)
        return c[:, None] * self.remainders, self.remainder_images

    def _factor(
        self, removed: Int[Array, " m"], restored: Real[Array, " m"] | float
    ) -> Real[Array, " m"]:
        if not self.improved:
            return jnp.ones_like(self.norms)
        captured = self.captured - jnp.abs(diagonal(self.inner)) ** 2 - restored
        n = self.remainders.shape[1]
        return resphering_factor(n, self.loo.rank - removed, self.norms, captured)
