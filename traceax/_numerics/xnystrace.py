"""The samples of XNysTrace, `tr A_i + c_i v_i* (A - A_i) v_i` with a Nystrom
approximation `A_i` without probe i, from small matrices; and the pairs that they are the
traces of.

Let `B B*` approximate `A + shift I` from all probes, `s_i` be the unit vector among the
probes' combinations that is orthogonal to the others, and `p_i` its coordinates in B: the
approximation without probe i is `B (I - p_i p_i* / |p_i|^2) B*`, and
`s_i* (A + shift I - A_i) s_i = 1 / |p_i|^2`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .dense import diagonal
from .expansion import AbstractExpansion, AbstractLeaveOneOut, OneSided, Pair
from .leave_one_out import LeaveOneOut, Pairs


def xnystrace_samples(
    loo: LeaveOneOut,
    p: Inexact[Array, "m m"],
    whitener: Inexact[Array, "m m"],
    gram: Inexact[Array, "m m"],
    shift: Real[Array, ""],
    n: int,
    improved: bool,
) -> tuple[Real[Array, " m"], Real[Array, "m m"]]:
    """The samples and, entry `[i, j]`, sample j without probe i. `loo` is that of the
    probes, and `gram` is B* B."""
    essential = loo.essential.astype(int)
    redundant = _redundant(p, whitener, shift)
    p, rest = _unit(p)
    form = p.conj().T @ gram @ p
    trace = jnp.sum(diagonal(gram)).real - shift * n

    c = (n - loo.rank + essential) if improved else loo.distance**2
    samples = trace - diagonal(form).real + c * rest

    p = jnp.where(redundant, 0, p)
    form = p.conj().T @ gram @ p
    pairs = Pairs.of(p.conj().T @ p)
    if improved:
        overlap = jnp.abs(loo.directions.conj().T @ loo.directions) ** 2
        c = (n - loo.rank + essential[:, None] + essential) * (1 - overlap)
    without = trace - pairs.trace(form).real + c * rest / pairs.det
    return samples, without


def _redundant(
    p: Inexact[Array, "m m"], whitener: Inexact[Array, "m m"], shift: Real[Array, ""]
) -> Bool[Array, " m"]:
    """Which probes add nothing to the others but the shift: those whose coordinates are
    nearly all along directions in which A itself is of the size of the shift or less."""
    null = shift * jnp.sum(jnp.abs(whitener) ** 2, axis=1) > 1 / 4
    weight = jnp.abs(p) ** 2
    inside = jnp.sum(jnp.where(null[:, None], 0, weight), axis=0)
    return jnp.sum(weight, axis=0) > 64 * inside


def _unit(p: Array) -> tuple[Array, Array]:
    """`p_i / |p_i|` and `1 / |p_i|^2`, both 0 for a zero vector."""
    weight = jnp.sum(jnp.abs(p) ** 2, axis=0)
    rest = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
    return p * jnp.sqrt(rest), rest


def xnystrace_expansion(
    probes: Inexact[Array, "n m"],
    directions: Inexact[Array, "n m"],
    products: Inexact[Array, "n m"],
    factor: Inexact[Array, "n m"],
    loo: LeaveOneOut,
    p: Inexact[Array, "m m"],
    whitener: Inexact[Array, "m m"],
    shift: Real[Array, ""],
    improved: bool,
) -> AbstractExpansion:
    """`directions` has the columns `s_i`, `factor` is B, and `products` those that it was
    made from."""
    redundant = _redundant(p, whitener, shift)
    p, rest = _unit(p)
    parts, shared = (factor @ p).T, (factor.T, factor.T)
    p = jnp.where(redundant, 0, p)
    lost, gram = (factor @ p).T, p.conj().T @ p
    if not improved:
        inside = (loo.distance * jnp.sqrt(rest))[:, None] * probes.T - parts
        return OneSided(shared, parts, lost, inside, gram, products.T, -shift, probes.T)
    number = len(probes) - loo.rank + loo.essential.astype(int)
    root = jnp.sqrt(rest)
    overlap = loo.directions.conj().T @ loo.directions
    arrays = shared, products.T, parts, lost, directions.T, number, root, gram, overlap
    return _Resphered(*arrays, -shift, probes.T)


class _Resphered(AbstractLeaveOneOut):
    """Estimate j is `B (I - p_j p_j*) B* + c_j |p_j|^-1 B p_j s_j*`, p_j a unit vector.

    - `parts`, `directions`: rows `B p_j` and `s_j`.
    - `lost`: what the others lack without probe j: `B p_j`, or 0 if it is redundant.
    - `number`, `root`: `c_j` and the inverse length of `p_j` before it was scaled.
    - `gram`, `overlap`: of the `p_j` and of the `s_j`.
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
        # Each probe that is left out and has a direction of its own adds 1 to c.
        more = self.number + (self.root > 0)[other]
        mixed = self.overlap[other, index][:, None] * self.directions[other]
        left = (more * self.root)[:, None] * (self.directions - mixed)
        image = self.parts - across.conj() / det * part
        before = (self.number * self.root)[:, None] * self.directions
        return [(-part / det, part), (left, image), (-before, self.parts)]
