"""The samples of XNysTrace, and the estimates of the operator that they are traces of.

Let Q be an orthonormal basis of the probes, `A_nu = A + nu I`, and `C = Q* A_nu Q`. With
T such that `T* T = C^-1`, the Nystrom approximation from all probes is `B B*`,
`B = A_nu Q T*`. Let `s_i` be the unit vector for which `Q s_i` is orthogonal to all
probes but probe i. The approximation without that probe is

    A_(i) = B (I - p_i p_i*) B*,    p_i = T s_i / |T s_i|,    kappa_i = |T s_i|^2,

and as `(Q s_i)* (A_nu - A_(i)) Q s_i = 1 / kappa_i`, its sample is

    t_i = tr A_(i) + omega_i* (A_nu - A_(i)) omega_i - nu n
        = |B|_F^2 - p_i* B* B p_i + c_i / kappa_i - nu n.

Here `c_i = d_i^2`, with `d_i` the distance of probe i from the span of the others, or
with resphering `c_i = n - r + 1`, with r the rank of the probes.

In the code: T is `whitener`, B is `factor`, nu is `shift`, `B* B` is `gram`, the columns
`T s_i` are `whitened`, `1 / kappa_i` is `residual`, and `loo` holds `s_i` (`directions`),
`d_i` (`distance`) and r (`rank`).

Reference: Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIMAX 45 (2024). The page "Leave-one-out" of the developer
documentation has the derivation, also with two probes left out.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .dense import diagonal
from .expansion import AbstractExpansion, AbstractLeaveOneOut, OneSided, Pair
from .leave_one_out import LeaveOneOut, Pairs


# An eigenvalue h of C counts as zero where `shift / h` exceeds this, that is, where the
# operator itself contributes less than three times the shift.
_SHIFT_SHARE = 1 / 4
# A probe is redundant if less than one part in so many of its coordinates is along the
# other eigenvectors. Without this rule, r + 1 probes for an operator of rank r gave an
# error bar of 0.6 for a trace of 5 that was exact to 1e-12: leaving out two probes leaves
# fewer than the rank.
_REDUNDANCY = 64


def xnystrace_samples(
    loo: LeaveOneOut,
    whitened: Inexact[Array, "m m"],
    whitener: Inexact[Array, "m m"],
    gram: Inexact[Array, "m m"],
    shift: Real[Array, ""],
    n: int,
    improved: bool,
) -> tuple[Real[Array, " m"], Real[Array, "m m"]]:
    """The samples and, entry `[i, j]`, sample j without probe i; resphered if
    `improved`."""
    essential = loo.essential.astype(int)
    redundant = _redundant(whitened, whitener, shift)
    p, residual = _unit(whitened)
    form = p.conj().T @ gram @ p
    trace = jnp.sum(diagonal(gram)).real - shift * n

    c = (n - loo.rank + essential) if improved else loo.distance**2
    samples = trace - diagonal(form).real + c * residual

    # A redundant probe changes nothing as the second one left out. Its own sample, above,
    # keeps its p: the spread of the samples shows how much rounding was magnified.
    p = jnp.where(redundant, 0, p)
    form = p.conj().T @ gram @ p
    pairs = Pairs.of(p.conj().T @ p)
    if improved:
        # Without probe i as well, the squared distance of probe j grows by the factor
        # 1 / (1 - overlap), by which resphering divides.
        overlap = jnp.abs(loo.directions.conj().T @ loo.directions) ** 2
        c = (n - loo.rank + essential[:, None] + essential) * (1 - overlap)
    without = trace - pairs.trace(form).real + c * residual / pairs.det
    return samples, without


def _redundant(
    whitened: Inexact[Array, "m m"],
    whitener: Inexact[Array, "m m"],
    shift: Real[Array, ""],
) -> Bool[Array, " m"]:
    """Which probes add nothing to the others but the shift: those whose coordinates are
    nearly all along directions in which A itself is of the size of the shift or less."""
    null = shift * jnp.sum(jnp.abs(whitener) ** 2, axis=1) > _SHIFT_SHARE
    weight = jnp.abs(whitened) ** 2
    of_operator = jnp.sum(jnp.where(null[:, None], 0, weight), axis=0)
    return jnp.sum(weight, axis=0) > _REDUNDANCY * of_operator


def _unit(whitened: Array) -> tuple[Array, Array]:
    """`p_i` and `1 / kappa_i`, both 0 where `T s_i` is zero."""
    kappa = jnp.sum(jnp.abs(whitened) ** 2, axis=0)
    residual = jnp.where(kappa > 0, 1 / jnp.where(kappa > 0, kappa, 1), 0)
    return whitened * jnp.sqrt(residual), residual


def xnystrace_expansion(
    probes: Inexact[Array, "n m"],
    directions: Inexact[Array, "n m"],
    products: Inexact[Array, "n m"],
    factor: Inexact[Array, "n m"],
    loo: LeaveOneOut,
    whitened: Inexact[Array, "m m"],
    whitener: Inexact[Array, "m m"],
    shift: Real[Array, ""],
    improved: bool,
) -> AbstractExpansion:
    """The estimates whose traces are the samples. `directions` has the columns `Q s_i`,
    and `products` those that `factor` was made from."""
    redundant = _redundant(whitened, whitener, shift)
    p, residual = _unit(whitened)
    parts, shared = (factor @ p).T, (factor.T, factor.T)
    p = jnp.where(redundant, 0, p)
    lost, gram = (factor @ p).T, p.conj().T @ p
    if not improved:
        length = loo.distance * jnp.sqrt(residual)  # |p_i* B* omega_i|
        return OneSided(
            shared=shared,
            images=parts,
            lefts=lost,
            residuals=length[:, None] * probes.T - parts,
            gram=gram,
            products=products.T,
            shift=-shift,
            probes=probes.T,
        )
    return _Resphered(
        shared=shared,
        products=products.T,
        parts=parts,
        lost=lost,
        directions=directions.T,
        number=len(probes) - loo.rank + loo.essential.astype(int),
        root=jnp.sqrt(residual),
        gram=gram,
        overlap=loo.directions.conj().T @ loo.directions,
        shift=-shift,
        probes=probes.T,
    )


class _Resphered(AbstractLeaveOneOut):
    """Estimate j is `B (I - p_j p_j*) B* + c_j / sqrt(kappa_j) B p_j (Q s_j)* - nu I`.

    - `parts`, `directions`: rows `B p_j` and `Q s_j`.
    - `lost`: what the other estimates lack without probe j: `B p_j`, or 0 if the probe is
        redundant.
    - `number`, `root`: `c_j` and `1 / sqrt(kappa_j)`.
    - `gram`, `overlap`: inner products of the `p_j` and of the `s_j`.
    """

    shared: Pair
    products: Inexact[Array, "m n"]
    parts: Inexact[Array, "m n"]
    lost: Inexact[Array, "m n"]
    directions: Inexact[Array, "m n"]
    number: Real[Array, " m"]
    root: Real[Array, " m"]
    gram: Inexact[Array, "m m"]
    overlap: Inexact[Array, "m m"]
    shift: Real[Array, ""]
    probes: Inexact[Array, "m n"]

    def own(self) -> Sequence[Pair]:
        left = (self.number * self.root)[:, None] * self.directions
        return [(-self.parts, self.parts), (left, self.parts)]

    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair]:
        index = jnp.arange(len(other))
        across = self.gram[index, other][:, None]
        det = Pairs.of(self.gram).det[index, other][:, None]
        part = self.lost[other] - across * self.parts
        # Leaving out a probe that has a direction of its own adds 1 to c.
        more = self.number + (self.root > 0)[other]
        mixed = self.overlap[other, index][:, None] * self.directions[other]
        left = (more * self.root)[:, None] * (self.directions - mixed)
        image = self.parts - across.conj() / det * part
        before = (self.number * self.root)[:, None] * self.directions
        return [(-part / det, part), (left, image), (-before, self.parts)]
