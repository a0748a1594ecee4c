"""A Nystrom preconditioner that chooses its own rank.

With `P = A_hat + sigma I`, `A_hat` the Nystrom approximation of `A - sigma I`, let
`M = P^(-1/2) A P^(-1/2)`. A block of b normal probes Z has two uses. The matvecs with
`X = sigma^(1/2) P^(-1/2) Z` extend the approximation, and they give

    (M - I) Z = (1 / sigma) sigma^(1/2) P^(-1/2) (A - sigma I) X
                + (sigma^(1/2) P^(-1/2) X - Z),

from which follow the two moments that predict the cost of the remaining call,

    tr(M - I) ~ Re tr(Z* (M - I) Z) / b,    ||M - I||_F^2 ~ ||(M - I) Z||_F^2 / b.

In the code: sigma is `shift`, Z is `z`, X is `x`, `sigma^(1/2) P^(-1/2)` is `half`,
`(A - sigma I) X` is `image`, `(M - I) Z` is `residual`, and the moments are `first` and
`second`. `image` is in units of `grown.scale`, and so is the shift that divides it.

Reference: Cortinovis and Toni, Preconditioned log-determinant approximation: one Gaussian
probe vector is almost always enough, arXiv:2601.05778, 2026, for the test of an
approximation by the matvecs that extend it.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import (
    Array,
    Bool,
    DTypeLike,
    Inexact,
    Int,
    PRNGKeyArray,
    Real,
    Scalar,
)

from .._core.arithmetic import full_precision
from .._core.checks import check_positive, concrete_number, real_scalar
from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._core.sampler import draw_for, NormalSampler
from .._numerics.dense import eigh
from .._numerics.shifted_nystrom import RitzPairs, ShiftedNystrom
from .._quadrature.convergence import SEEN_BY_ONE
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps
from .base import AbstractPreconditioning
from .low_rank import Preconditioner
from .make import assemble, FIRST_PROBE


# The rank grows by this many columns at a time. Larger blocks overshoot the best rank by
# more; smaller ones have noisier moments, and solve eigenvalue problems more often.
_BLOCK_SIZE = 8
# Growth goes on while the probes are expected to need more than this many times the
# matvecs spent on the rank, so that at least a fifth of all expected matvecs is spent on
# it. Otherwise a single noisy forecast could end the growth much too early.
_PROBES_TO_RANK = 4
# How many further blocks are looked ahead: one alone may not save a step.
_MOST_AHEAD = 3
# An approximation is used if it makes the remaining call and the second moment so many
# times smaller. Forecasts are uncertain, and on flat spectra approximations of a low rank
# add variance.
_MIN_GAIN, _MIN_REDUCTION = 2, 10
# The largest rank by default, and where vectors are long, as many numbers as its buffers
# have at most: 1 GiB in float32.
_MAX_RANK, _MAX_ENTRIES = 256, 2**28


class AutoPreconditioner(AbstractPreconditioning):
    r"""A Nystrom preconditioner whose rank is chosen automatically: pass it as
    `preconditioner` to [`traceax.logdet`][], [`traceax.trace_difference`][] or
    [`traceax.gaussian_log_prob`][].

    The approximation grows by 8 matvecs at a time. Each block of matvecs enlarges the
    approximation and tests the previous one: matvecs with the probes $P^{-1/2} z$ give
    $(M - I) z$ for $M = P^{-1/2} A P^{-1/2}$, and hence estimates of the variance of
    $z^* \log(M) z$ and of the number of steps. Growth ends when another block is not
    expected to save as many matvecs as it costs, for the tolerance of an adaptive `k`, or
    for the error that `k` probes would have; but not before a fifth of all expected
    matvecs have been spent on it. `stats["num_matvecs"]` counts them.

    One compiled program serves all ranks up to `max_rank`. It holds `2 max_rank` vectors
    of length n while the rank grows, and several arrays of `max_rank` such vectors when
    the preconditioner is assembled. For each block it computes eigenvalues of matrices of
    `max_rank` rows. A derivative takes `max_rank` matvecs with the derivative of the
    operator.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        solution = tx.logdet(
            operator,
            k=tx.Adaptive(rtol=1e-5, max_k=320),
            preconditioner=tx.AutoPreconditioner(0.1),
            key=jax.random.key(0),
        )
        print(solution.value, "+-", solution.std_err, solution.stats["num_matvecs"])
        ```

    **Attributes:**

    - `shift`: a positive scalar, at most the smallest eigenvalue of A: the noise variance
        of a Gaussian process, a ridge, a jitter. A shift above that eigenvalue costs
        steps and accuracy. Then `Solution.interval` is wider, if the mean eigenvalue of
        $P^{-1} A$ is below 1; but the mistake goes unnoticed if only a few eigenvalues
        are below the shift, or if `max_rank` leaves others far above it. The shift may be
        traced, and is constant to derivatives. If no such number is known,
        [`traceax.nystrom_preconditioner`][] estimates one for a given rank.
    - `max_rank`: the largest rank, a Python integer; more than n counts as n.

    ??? cite

        ```bibtex
        @article{cortinovis2026nystrom,
            author  = {Cortinovis, Alice and Toni, Daniele},
            title   = {Preconditioned log-determinant approximation: one {Gaussian} probe
                       vector is almost always enough},
            journal = {arXiv:2601.05778},
            year    = {2026},
        }
        ```
    """

    shift: Scalar | None
    max_rank: int | None = eqx.field(static=True)

    def __init__(self, shift: Scalar | float | None = None, max_rank: int | None = None):
        """**Arguments:**

        - `shift`: as above.
        - `max_rank`: default is 256.

        **Raises:**

        `TypeError` or `ValueError` if `max_rank` is not a Python integer of 1 or more,
        or if `shift` is not a positive, finite number.
        """
        self.shift = None if shift is None else real_scalar("shift", shift)
        number = None if shift is None else concrete_number(shift)
        if number is not None and not 0 < number < math.inf:
            raise ValueError(
                f"`shift` must be positive and finite. Found {number}. If nothing is "
                "known of the smallest eigenvalue, use `traceax.nystrom_preconditioner`."
            )
        if max_rank is not None:
            max_rank = check_positive("max_rank", max_rank)
        self.max_rank = max_rank

    def prepare(
        self,
        operator: FlatOperator,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Preconditioner:
        flat, known = operator.frozen, self.shift
        n, real = flat.size, jnp.finfo(flat.dtype).dtype
        rank = min(self.max_rank or _default_rank(n), n)
        block = min(_BLOCK_SIZE, rank)
        if known is not None:
            known = jax.lax.stop_gradient(jnp.asarray(known, real))
        # Without a lower bound, steps are made until no eigenvalue can be hidden.
        hidden = n / SEEN_BY_ONE if known is None else 0.0
        forecast = ft.partial(_forecast, k=k, num_steps=num_steps, hidden=hidden)
        with full_precision(lambda x: execution.matmat(flat, x)) as matmat:
            add_block = ft.partial(
                _add_block,
                flat=flat,
                matmat=matmat,
                key=key,
                known=known,
                max_blocks=rank // block,
                forecast=forecast,
            )
            start = _Growth.empty(n, rank // block * block, flat.dtype)
            end = jax.lax.while_loop(lambda x: x.unfinished, add_block, start)
            # As P <= A for a shift that is a lower bound, no eigenvalue of M is below 1,
            # up to rounding. Its mean is below 1 if the shift is above eigenvalues of A.
            lower_bound = None
            if known is not None:
                above = end.earlier[1].first > -n * flat.eps**0.5
                lower_bound = jnp.where(above, jnp.asarray(0.5, real), 0)
            return jax.lax.cond(
                end.pays(forecast),
                lambda: end.preconditioner(flat, known, lower_bound),
                lambda: end.without_rank(known, lower_bound),
            )


def _add_block(
    growth: "_Growth",
    *,
    flat: FlatOperator,
    matmat: Callable[[Array], Array],
    key: PRNGKeyArray | None,
    known: Real[Array, ""] | None,
    max_blocks: int,
    forecast: Callable[..., tuple[Array, Array]],
) -> "_Growth":
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
    cost, variance = forecast(expected, log_det=log_det)
    later = [
        forecast(expected * rate**i, log_det=log_det, reference=variance)[0] + i * block
        for i in range(1, _MOST_AHEAD + 1)
    ]
    blocks = blocks + 1
    saves = jnp.min(jnp.stack(later)) < cost
    saves |= cost > _PROBES_TO_RANK * block * (blocks + 1)

    def first_or(old):
        return jax.tree.map(lambda x, y: jnp.where(blocks == 1, x, y), moments, old)

    return _Growth(
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


class _Growth(eqx.Module):
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
    def empty(n: int, rank: int, dtype: DTypeLike) -> "_Growth":
        grown = ShiftedNystrom.empty(n, rank, dtype)
        one = jnp.ones_like(grown.scale)
        ones = _Moments(one, one, one)
        return _Growth(
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

    def pays(self, forecast: Callable[..., tuple[Array, Array]]) -> Bool[Array, ""]:
        """Whether the probes need far fewer matvecs with P than without it."""
        n = self.grown.joint.shape[0]
        log_det = n * jnp.log(self.shift * self.grown.scale)
        plain = self.plain.relative_to(self.shift, n)
        plain_cost, variance = forecast(plain, log_det=log_det)
        cost, _ = forecast(self.expected, log_det=self.log_det, reference=variance)
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
    def of(cls, growth: _Growth) -> "_InverseRoot":
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


def _default_rank(n: int) -> int:
    """The largest rank by default, for which there is memory."""
    return max(1, min(_MAX_RANK, _MAX_ENTRIES // (2 * n)))


def _forecast(
    moments: Real[Array, "2"],
    *,
    k: int | Budget,
    num_steps: int | AdaptiveSteps,
    log_det: Real[Array, ""],
    hidden: float,
    reference: Real[Array, ""] | None = None,
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """The number of matvecs that the probes will take, and the variance of one probe.

    `moments` are `tr(M - I)` and `||M - I||_F^2`, and `log_det` is `log det P`. For an
    adaptive k, the probes reach its tolerance. For a fixed number k, they reach the
    accuracy that k probes of the variance `reference` have.

    `hidden` is the number of eigenvalues at zero, over the number that is tolerated, for
    which one step leaves room; 0 if a lower bound is known.

    If `P <= A`, also `M >= I`. The Gauss-Radau rule with the fixed node 1 replaces the
    spectrum of M by `weight` eigenvalues `1 + t` and ones. It has the right moments:
    `weight t` and `weight t^2`.
    """
    first, second = moments
    t = second / jnp.where(first > 0, first, 1)
    weight = first / jnp.where(t > 0, t, 1)
    # For a real normal probe, `z* log(M) z` has the variance `2 ||log(M)||_F^2`.
    trace, variance = weight * jnp.log1p(t), 2 * weight * jnp.log1p(t) ** 2
    probes: Any = k
    if isinstance(k, Budget):
        # Whole rounds, as many as the first test needs.
        min_probes = k.round_size * -(-k.rule.min_samples // k.round_size)
        aim = k.rule.tolerance(log_det + trace)
        std_err = jnp.sqrt(variance / min_probes)
        count = jnp.full_like(std_err, min_probes)
        excess = k.rule.excess(log_det + trace, std_err, count)
        probes = min_probes * jnp.maximum(excess**2, 1)
    else:
        aim = jnp.sqrt(variance / k)
        if reference is not None:
            probes = k * variance / jnp.where(reference > 0, reference, 1)
    if not isinstance(num_steps, AdaptiveSteps):
        return probes * num_steps, variance
    # The width of the bracket is taken to be `4 weight contraction^steps`: Lanczos has
    # this rate for eigenvalues between 1 and `root**2`. If they fall geometrically, the
    # largest is up to `1 + 2 t`.
    root = jnp.sqrt(1 + 2 * t)
    contraction = ((root - 1) / (root + 1)) ** 2
    ratio = 4 * weight / jnp.where(aim > 0, num_steps.share * aim, 1)
    # A weight at zero that is hidden falls at the same rate.
    ratio = jnp.maximum(ratio, 4 * hidden)
    steps = jnp.log(jnp.maximum(ratio, 1)) / -jnp.log(contraction)
    # `advance_until` looks after one step, and then after even numbers.
    steps = jnp.where(steps <= 1, 1, 2 * jnp.ceil(steps / 2))
    return probes * jnp.clip(steps, 1, num_steps.most), variance
