"""The samples of XTrace, `tr(A P_i) + c_i v_i* A v_i` with a basis without probe i, from
small matrices; and the pairs that they are the traces of."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import diagonal
from .expansion import AbstractLeaveOneOut, Pair
from .leave_one_out import LeaveOneOut, Pairs, resphere


class SmallMatrices(eqx.Module):
    """The products of the tall arrays that XTrace needs, where `A Omega = Q R`."""

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
    # e_j* A e_j. What `r` loses by its rank, the whole R has: it may be small beside the
    # largest singular value, and in low precision most of the trace.
    forms = small.w.conj() * small.r
    outside = jnp.sum(forms - w.conj() * r - across.T * w, axis=0)

    directions = loo.directions
    inner = directions.conj().T @ w
    form = directions.conj().T @ h @ directions
    across, back = (across @ directions).T, directions.conj().T @ back
    a_ss, a_es, a_se = (diagonal(x) for x in (form, across, back))

    def own_form(beta):
        return outside + beta * a_es + beta.conj() * a_se + jnp.abs(beta) ** 2 * a_ss

    def factor(removed, inside):
        if not improved:
            return jnp.ones_like(inside)
        return resphere(n, loo.rank - removed, small.norms, inside)

    all_inside = jnp.sum(jnp.abs(w) ** 2, axis=0)
    trace = jnp.sum(diagonal(h))

    beta = diagonal(inner)
    c = factor(essential, all_inside - jnp.abs(beta) ** 2)
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
    c_pair = factor(essential[:, None] + essential, all_inside - restored)
    without = trace - pairs.trace(form) + c_pair * (own_form(beta_pair) + cross_form)
    return samples, without


class TwoSided(AbstractLeaveOneOut):
    """Estimate j is `A Q P_j Q* + c_j A v_j v_j*`, with `P_j = I - s_j s_j*` and
    `v_j = omega_j - Q P_j w_j`; A Q Q* is shared.

    - `bases`, `images`: rows `Q s_j` and `A Q s_j`.
    - `rest`, `rest_images`: rows `v_j` and `A v_j`.
    - `inner`: `S* W`.
    - `norms`, `inside`: `|omega_j|^2` and `|w_j|^2`.
    """

    shared: Pair
    products: Inexact[Array, "m n"]
    bases: Inexact[Array, "m n"]
    images: Inexact[Array, "m n"]
    rest: Inexact[Array, "m n"]
    rest_images: Inexact[Array, "m n"]
    inner: Inexact[Array, "m m"]
    norms: Real[Array, " m"]
    inside: Real[Array, " m"]
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
        rest = self.rest + beta[:, None] * base
        rest_image = self.rest_images + beta[:, None] * image
        left, right = self._remainder()
        return [(-base, image), (c[:, None] * rest, rest_image), (-left, right)]

    def _remainder(self) -> Pair:
        c = self._factor(self.loo.essential.astype(int), 0.0)
        return c[:, None] * self.rest, self.rest_images

    def _factor(
        self, removed: Int[Array, " m"], restored: Real[Array, " m"] | float
    ) -> Real[Array, " m"]:
        if not self.improved:
            return jnp.ones_like(self.norms)
        inside = self.inside - jnp.abs(diagonal(self.inner)) ** 2 - restored
        return resphere(self.rest.shape[1], self.loo.rank - removed, self.norms, inside)
