"""Estimates of a whole operator from a sketch, from which any linear quantity is read.

A *pair* of arrays `(left, image)`, each with vectors of length n as its rows, stands for
the sum over its rows of the matrices `image left*`. A sketch gives m estimates of the
operator, each the sum of a pair that all share and of pairs of its own. A quantity of
estimate j is a sample `t_j`; with `t_(j|i)` the sample with probe i left out as well, the
variance of the mean of the samples is estimated by

    s^2 / m + sum_(i != j) (t_i - t_(i|j)) conj(t_j - t_(j|i)) / (m (m - 1)).

In the code: the rows of `own` are the estimates' own pairs, `changes` gives the pairs of
`t_(j|i) - t_j`, and the second term is `covariance`. It is derived on the page
"Leave-one-out" of the developer documentation.
"""

import abc
import functools as ft
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.covariance import real_parts
from .._core.quantity import AbstractQuantity, sum_rows
from .leave_one_out import distinct_pairs, Pairs


Pair = tuple[Inexact[Array, "r n"], Inexact[Array, "r n"]]

# The largest number of partners of a probe in a covariance. With all pairs, error bars
# are at most 6% shorter and their coverage is the same, but the cost grows with the
# square of the number of probes ("Not all pairs" on the page "Leave-one-out").
_MAX_PARTNERS = 32


class AbstractExpansion(eqx.Module):
    """m estimates of an operator, as sums of pairs `left, image`: arrays of shape
    `(r, n)`, which stand for the sum over their rows of `image left*`.

    - `shared`: a pair that all estimates have in common.
    - `shift`: a multiple of the identity that they also have in common.
    - `probes`: rows, one for each estimate, with `E[probe probe*] = I`. They represent
        the identity for a quantity that depends on more than the diagonal. `None` if the
        shift is zero.
    - `products`: an array of shape `(p, n)` whose columns have about the norms of the
        rows of the operator, or of the part of it that the probes reveal.
    """

    shared: eqx.AbstractVar[Pair]
    shift: eqx.AbstractVar[Real[Array, ""] | float]
    probes: eqx.AbstractVar[Inexact[Array, "m n"] | None]
    products: eqx.AbstractVar[Inexact[Array, "p n"]]

    @abc.abstractmethod
    def own(self) -> Sequence[Pair]:
        """The part of each estimate that the others do not share.

        **Returns:**

        Pairs `left, image` of arrays of shape `(m, n)`. Estimate j is `shared` plus the
        sum over the pairs of their rows j.
        """

    @abc.abstractmethod
    def covariance(
        self, quantity: AbstractQuantity, valid: Bool[Array, " m"] | None
    ) -> Real[Array, "*q"] | float:
        """An unbiased estimate of the covariance of the quantity in two estimates.

        **Arguments:**

        - `quantity`: what is read from the estimates.
        - `valid`: which estimates count, booleans of shape `(m,)`; `None` for all.

        **Returns:**

        A real array of the shape that the quantity reads, or 0.
        """


class Independent(AbstractExpansion):
    """Estimates that are independent given what they share: row j of the pair `own_pair`,
    arrays of shape `(m, n)`, is the sample of the remainder by probe j."""

    shared: Pair
    own_pair: tuple[Inexact[Array, "g n"], Inexact[Array, "g n"]]
    products: Inexact[Array, "p n"]
    shift: Real[Array, ""] | float = 0.0
    probes: Inexact[Array, "g n"] | None = None

    def own(self) -> Sequence[Pair]:
        return [self.own_pair]

    def covariance(
        self, quantity: AbstractQuantity, valid: Bool[Array, " m"] | None
    ) -> Real[Array, "*q"] | float:
        return 0.0


class AbstractLeaveOneOut(AbstractExpansion):
    """Estimates that share a basis, each with its own probe left out of the basis."""

    @abc.abstractmethod
    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair]:
        """How estimates change when a second probe is left out of each.

        **Arguments:**

        - `other`: for each estimate, the index of the second probe, integers of shape
            `(m,)`.

        **Returns:**

        Pairs `left, image` of arrays of shape `(m, n)`. The change of estimate j is the
        sum over the pairs of their rows j.
        """

    def covariance(
        self, quantity: AbstractQuantity, valid: Bool[Array, " m"] | None
    ) -> Real[Array, "*q"] | float:
        """See `leave_one_out.sample_covariance`. It uses only pairs of nearby indices,
        cyclically: all pairs have the same expectation."""

        def product(change, mirrored, weight):
            return jnp.tensordot(weight, (change * mirrored.conj()).real, 1)

        return self._mean_of_pairs(quantity.read, product, valid)

    def scalar_covariance(
        self, read: Callable[[Array, Array], Array], valid: Bool[Array, " m"] | None
    ) -> Real[Array, "p p"]:
        """The covariance of the scalars that `read` returns, in two different estimates.
        Complex scalars count as in `real_parts`."""

        def product(change, mirrored, weight):
            change, mirrored = real_parts(change), real_parts(mirrored)
            total = jnp.matmul(weight * change.T, mirrored, precision="highest")
            return (total + total.T) / 2

        return self._mean_of_pairs(read, product, valid)

    def _mean_of_pairs(
        self,
        read: Callable[[Array, Array], Array],
        product: Callable[[Array, Array, Array], Array],
        valid: Bool[Array, " m"] | None,
    ) -> Array:
        """The mean of a product of two changes, `t_(i|j) - t_i` and `t_(j|i) - t_j`."""
        m = len(self.own()[0][0])
        index, count = jnp.arange(m), m if valid is None else jnp.sum(valid)
        period = jnp.maximum(count, 1)

        def term(distance):
            ahead, behind = (index + distance) % period, (index - distance) % period
            change = read_rows(read, self.changes(ahead))
            mirrored = read_rows(read, self.changes(behind))[ahead]
            # Twice for (i, j) and (j, i), which are conjugate; at half of the period both
            # are among the rows already.
            weight = jnp.where(index < count, jnp.where(2 * distance == count, 1, 2), 0)
            return product(change, mirrored, weight.astype(change.real.dtype))

        shape = jax.eval_shape(term, index[0])
        farthest = jnp.minimum(count // 2, _MAX_PARTNERS // 2)
        total = jax.lax.fori_loop(
            1,
            farthest + 1,
            lambda distance, total: total + term(distance),
            jnp.zeros(shape.shape, shape.dtype),
        )
        return total / jnp.maximum(count * jnp.minimum(count - 1, _MAX_PARTNERS), 1)


def read_rows(
    read: Callable[[Array, Array], Array], pairs: Sequence[Pair]
) -> Inexact[Array, "m ..."]:
    """What is read of each row, summed over the pairs."""
    return ft.reduce(jnp.add, [jax.vmap(read)(*pair) for pair in pairs])


class OneSided(AbstractLeaveOneOut):
    """Estimate j is, with `P_j = I - s_j s_j*`,

        X P_j W* + X s_j (s_j* r_j) omega_j*,

    the part of A in the range of a basis without probe j, plus the sample of the
    remainder by probe j, where `A omega_j = X r_j`. All share `X W*`, and `s_j` is the
    unit vector orthogonal to the coordinates `r_i` of the other probes (Epperly, Tropp
    and Webber, SIMAX 45, 2024, section 2.2).

    - `images`, `lefts`: rows `X s_j` and `W s_j`.
    - `residuals`: rows `conj(s_j* r_j) omega_j - W s_j`.
    - `gram`: `S* S`, with S the matrix of the columns `s_j`.
    - `dropped`: rows `omega_j` and `A omega_j - X r_j`, if X has less than the rank of
        the products. These differences are too small to span a basis, but in low
        precision they may be most of the diagonal.
    """

    shared: Pair
    images: Inexact[Array, "m n"]
    lefts: Inexact[Array, "m n"]
    residuals: Inexact[Array, "m n"]
    gram: Inexact[Array, "m m"]
    products: Inexact[Array, "p n"]
    shift: Real[Array, ""] | float = 0.0
    probes: Inexact[Array, "m n"] | None = None
    dropped: tuple[Inexact[Array, "m n"], Inexact[Array, "m n"]] | None = None

    def own(self) -> Sequence[Pair]:
        pairs = [(self.residuals, self.images)]
        return pairs if self.dropped is None else [*pairs, self.dropped]

    def changes(self, other: Int[Array, " m"]) -> Sequence[Pair]:
        index = jnp.arange(len(other))
        across = self.gram[index, other][:, None]  # s_j* s_i
        det = Pairs.of(self.gram).det[index, other][:, None]
        image = self.images[other] - across * self.images
        left = self.lefts[other] + across * self.residuals
        return [(-left / det, image)]

    def covariance(
        self, quantity: AbstractQuantity, valid: Bool[Array, " m"] | None
    ) -> Real[Array, "*q"] | float:
        if not quantity.entrywise:
            return super().covariance(quantity, valid)
        # The first probes are enough: all pairs have the same expectation.
        first = slice(_MAX_PARTNERS)
        g = self.gram[first, first]
        det = Pairs.of(g).det
        counted = jnp.ones(len(g), bool) if valid is None else valid[first]
        # Nearly equal directions are left out: all digits would cancel below.
        used = distinct_pairs(counted) & (det > jnp.finfo(det.dtype).eps ** 0.25)
        w = jnp.where(used, 1 / jnp.where(used, det, 1) ** 2, 0)
        # The sum over i and j of w_ij (a_i - G_ji a_j) conj(a_j - G_ij a_i) (conj(b_i) +
        # G_ij e_j) (b_j + G_ij conj(e_i)), multiplied out: each term is a matrix between
        # a factor of i and one of j, and no array of pairs times n is needed.
        a, b, e = self.images[first], self.lefts[first], self.residuals[first].conj()
        size, g2 = jnp.abs(a) ** 2, jnp.abs(g) ** 2
        terms = [
            (a * b.conj(), w, a.conj() * b),
            (2 * a, w * g, a.conj() * b * e),
            (a * e.conj(), w * g**2, a.conj() * e),
        ]
        mirrored = [
            (a.conj() * b.conj(), w * g.conj() ** 2, a * b),
            (2 * a.conj(), w * g2 * g.conj(), a * b * e),
            (a.conj() * e.conj(), w * g2**2, a * e),
        ]
        if jnp.iscomplexobj(g):
            terms += mirrored
        else:
            # Real terms and their mirror images differ in the matrix only.
            both = zip(terms, mirrored, strict=True)
            terms = [(x, one + other, y) for (x, one, y), (_, other, _) in both]
        terms += [
            (-2 * size * b.conj(), w * g.conj(), b),
            (-2 * size, w * g2, e * b),
            (-2 * size * e.conj(), w * g2 * g, e),
        ]
        alone = -2 * size * b * e * jnp.sum(w * g2, axis=1)[:, None]
        total = sum_rows(alone.real)
        total += sum(sum_rows((x * (mixed @ y)).real) for x, mixed, y in terms)
        return total / jnp.maximum(jnp.sum(used), 1)
