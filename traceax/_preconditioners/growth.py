"""A Nystrom approximation that grows until it is good enough for a log-determinant.

With `P = A_hat + sigma I`, `A_hat` the Nystrom approximation of `A - sigma I`, let
`M = P^(-1/2) A P^(-1/2)`. A block of b normal probes Z has two uses. The matvecs with
`X = sigma^(1/2) P^(-1/2) Z` extend the approximation, and they give

    (M - I) Z = (1 / sigma) sigma^(1/2) P^(-1/2) (A - sigma I) X
                + (sigma^(1/2) P^(-1/2) X - Z),

from which follow the two moments that predict the cost of the remaining call,

    tr(M - I) ~ Re tr(Z* (M - I) Z) / b,    ||M - I||_F^2 ~ ||(M - I) Z||_F^2 / b.

In the code: sigma is `shift`, Z is `z`, X is `x`, `sigma^(1/2) P^(-1/2)` is `root`, its
product with `(A - sigma I) X` is `image`, `(M - I) Z` is `residual`, and the moments are
`first` and `second`. `image` is in units of `grown.scale`, and so is the shift that
divides it.

Reference: Cortinovis and Toni, Preconditioned log-determinant approximation: one Gaussian
probe vector is almost always enough, arXiv:2601.05778, 2026, for the test of an
approximation by the matvecs that extend it.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._core.sampler import draw_for
from .._core.samplers import NormalSampler
from .._numerics.dense import eigh
from .._numerics.shifted_nystrom import RitzPairs, ShiftedNystrom
from .forecast import ForecastOfError, ForecastOfMatvecs
from .low_rank import Preconditioner
from .make import assemble, FIRST_PROBE


# An approximation is used if it makes the remaining call and the second moment so many
# times smaller. Forecasts are uncertain, and on flat spectra approximations of a low rank
# add variance.
_MIN_GAIN, _MIN_REDUCTION = 2, 10


class _Moments(eqx.Module):
    """`tr(M - I)` and `||M - I||_F^2` for a P with this shift."""

    first: Real[Array, ""]
    second: Real[Array, ""]
    shift: Real[Array, ""]

    def relative_to(self, shift: Real[Array, ""], n: int) -> Real[Array, "2"]:
        """The moments after division of M by `shift / self.shift`, as if the spectrum of
        A began at `shift`."""
        ratio = shift / self.shift
        # M / ratio - I = (M - I + (1 - ratio) I) / ratio
        rest = 1 - ratio
        first = (self.first + n * rest) / ratio
        second = (self.second + 2 * rest * self.first + n * rest**2) / ratio**2
        return jnp.stack([jnp.abs(first), second])


class Growth(eqx.Module):
    """The approximation after some blocks, and what is known of it.

    - `grown`, `pairs`, `shift`: the matvecs, their Ritz pairs, and sigma, in units of
        `grown.scale`.
    - `earlier`, `plain`: the moments of the approximations before the last two blocks,
        and without one.
    - `expected`: the moments that are expected of the current approximation.
    - `log_det`: the logarithm of the determinant of the P that was tested last.
    """

    grown: ShiftedNystrom
    pairs: RitzPairs
    shift: Real[Array, ""]
    blocks: Int[Array, ""]
    num_matvecs: Int[Array, ""]
    earlier: tuple[_Moments, _Moments]
    plain: _Moments
    expected: Real[Array, "2"]
    log_det: Real[Array, ""]
    unfinished: Bool[Array, ""]

    @staticmethod
    def empty(n: int, rank: int, dtype: DTypeLike) -> "Growth":
        grown = ShiftedNystrom.empty(n, rank, dtype)
        one = jnp.ones_like(grown.scale)
        ones = _Moments(one, one, one)
        return Growth(
            grown=grown,
            pairs=RitzPairs(jnp.tile(one, rank), jnp.eye(rank, dtype=dtype), 0 * one),
            shift=one,
            blocks=jnp.zeros((), jnp.int32),
            num_matvecs=jnp.zeros((), jnp.int32),
            earlier=(ones, ones),
            plain=ones,
            expected=jnp.tile(one, 2),
            log_det=one,
            unfinished=jnp.ones((), bool),
        )

    @property
    def rank(self) -> int:
        return self.grown.basis.shape[1]

    def pays(self, forecast: ForecastOfMatvecs | ForecastOfError) -> Bool[Array, ""]:
        """Whether the probes need far fewer matvecs with P than without it."""
        n = self.grown.joint.shape[0]
        log_det = n * jnp.log(self.shift * self.grown.scale)
        plain = self.plain.relative_to(self.shift, n)
        spent = self.num_matvecs
        plain_cost, variance = forecast(plain, log_det=log_det, spent=spent)
        cost, _ = forecast(
            self.expected, log_det=self.log_det, spent=spent, reference=variance
        )
        return (cost < plain_cost / _MIN_GAIN) & (
            self.expected[1] < plain[1] / _MIN_REDUCTION
        )

    def preconditioner(
        self,
        flat: FlatOperator,
        known: Real[Array, ""] | None,
        lower_bound: Real[Array, ""] | None,
    ) -> Preconditioner:
        grown = self.grown
        scale = grown.scale.astype(flat.dtype)
        return assemble(
            flat,
            basis=grown.joint @ grown.basis,
            products=scale * (grown.joint @ grown.products),
            shift=self.shift * grown.scale if known is None else known,
            structure=self._structure,
            num_matvecs=self.num_matvecs,
            lower_bound=lower_bound,
        )

    def without_rank(
        self, known: Real[Array, ""] | None, lower_bound: Real[Array, ""] | None
    ) -> Preconditioner:
        """The shift alone, or the identity if the shift is an estimate."""
        n, rank = self.grown.joint.shape[0], self.rank
        return Preconditioner(
            vectors=jnp.zeros_like(self.grown.joint, shape=(n, rank)),
            values=jnp.zeros_like(self.shift, shape=rank),
            shift=jnp.ones_like(self.shift) if known is None else known,
            shift_direction=jnp.zeros_like(self.grown.joint, shape=n),
            template=lx.IdentityLinearOperator(self._structure),
            num_matvecs=self.num_matvecs,
            result=failure(False, RESULTS.nonfinite_product),
            least=lower_bound,
        )

    @property
    def _structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.grown.joint.shape[:1], self.grown.joint.dtype)


def _estimate(pairs: RitzPairs, block: int) -> Real[Array, ""]:
    """The shift if none is known, from the smallest Ritz values of as many as a block.

    Random directions orthogonal to those that are resolved see the mean of the remaining
    eigenvalues. Their smallest Ritz value exceeds the level of a flat tail by about as
    much as these Ritz values differ, so that difference is subtracted, which also keeps
    `A - sigma I` well away from singular on the basis."""
    smallest = pairs.values[0]
    spread = pairs.values[block - 1] - smallest
    return jnp.maximum(smallest - spread, smallest / 2)


class _InverseRoot(eqx.Module):
    """`sigma^(1/2) P^(-1/2)` as a map of columns, and `log det P - n log sigma`.

    With `A_hat = B B*`, `B* B = V diag(l) V*` and `P = B B* + sigma I`,

        sigma^(1/2) P^(-1/2) = I - B V diag(c) V* B*,
        c = (1 - (sigma / (l + sigma))^(1/2)) / l = 1 / (root (root + sigma^(1/2))),

    with `root = (l + sigma)^(1/2)`. The last form has no cancellation for a small l.
    `factor` are the coordinates of `B V`.
    """

    factor: Inexact[Array, "p m"]
    coefficients: Real[Array, " m"]
    log_ratio: Real[Array, ""]

    @classmethod
    def of(cls, growth: Growth) -> "_InverseRoot":
        factor = growth.grown.factor(growth.pairs, growth.shift)
        values, vectors = eigh(factor.conj().T @ factor)
        # Rounding makes zero eigenvalues of a Gram matrix slightly negative.
        values = jnp.maximum(values, 0)
        root = jnp.sqrt(values + growth.shift)
        coefficients = 1 / (root * (root + jnp.sqrt(growth.shift)))
        log_ratio = jnp.sum(jnp.log1p(values / growth.shift))
        return cls(factor @ vectors, coefficients, log_ratio)

    def apply(
        self, grown: ShiftedNystrom, x: Inexact[Array, "n b"]
    ) -> Inexact[Array, "n b"]:
        part = self.factor.conj().T @ (grown.joint.conj().T @ x)
        part = self.factor @ (self.coefficients[:, None] * part)
        return x - grown.joint @ part


def add_block(
    growth: Growth,
    *,
    flat: FlatOperator,
    matmat: Callable[[Array], Array],
    key: PRNGKeyArray | None,
    known: Real[Array, ""] | None,
    max_blocks: int,
    forecast: ForecastOfMatvecs | ForecastOfError,
) -> Growth:
    """The approximation with one more block, after a test of the one without it."""
    n, block = flat.size, growth.rank // max_blocks
    blocks, root = growth.blocks, _InverseRoot.of(growth)
    indices = FIRST_PROBE + blocks * block + jnp.arange(block)
    z = draw_for(flat, NormalSampler(), key, indices)
    x = root.apply(growth.grown, z)
    grown, coordinates = growth.grown.grow(matmat, x, blocks)
    pairs = grown.ritz(flat.eps)
    shift = _estimate(pairs, block) if known is None else known / grown.scale
    shift = jnp.maximum(shift, flat.eps)
    # Without a rank P is a multiple of the identity, and x does not depend on it.
    used = jnp.where(blocks == 0, shift, growth.shift)
    # The matvecs were made with an orthonormal basis of X, not with X itself.
    inner = (grown.products - used.astype(z.dtype) * grown.basis) @ coordinates
    image = root.apply(grown, grown.joint @ inner)
    # Off the range of A_hat, `root.apply(x)` equals z. They are subtracted first, since a
    # small residual would drown in the rounding errors of z.
    residual = image / used.astype(z.dtype) + (root.apply(grown, x) - z)
    moments = _Moments(
        first=jnp.sum((z.conj() * residual).real) / block,
        second=jnp.sum(jnp.abs(residual) ** 2) / block,
        shift=used,
    )
    # These moments describe the approximation before this block. The block itself is
    # assumed to reduce them by the square root of the rate, and each further block by the
    # whole rate. A rate is the mean of two blocks, where there are two.
    current = moments.relative_to(shift, n)
    reduction = current / growth.earlier[0].relative_to(shift, n)
    reduction = jnp.where((reduction < 1) & (blocks > 0), reduction, 1)
    rate = reduction ** (1 / jnp.clip(blocks, 1, 2).astype(reduction.dtype))
    expected = current * jnp.sqrt(rate)
    log_det = n * jnp.log(shift * grown.scale) + root.log_ratio
    blocks = blocks + 1
    cost, variance = forecast(expected, log_det=log_det, spent=block * blocks)
    later = [
        forecast(
            expected * rate**i,
            ahead=i * block,
            log_det=log_det,
            spent=block * blocks,
            reference=variance,
        )[0]
        for i in forecast.ahead
    ]
    saves = jnp.min(jnp.stack(later)) < cost
    saves |= forecast.too_early(cost, block * (blocks + 1))

    def first_or(old):
        return jax.tree.map(lambda x, y: jnp.where(blocks == 1, x, y), moments, old)

    return Growth(
        grown=grown,
        pairs=pairs,
        shift=shift,
        blocks=blocks,
        num_matvecs=blocks * block,
        earlier=(first_or(growth.earlier[1]), moments),
        plain=first_or(growth.plain),
        expected=expected,
        log_det=log_det,
        unfinished=(blocks < max_blocks) & saves,
    )
