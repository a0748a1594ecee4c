"""What a log-determinant will cost, from two moments of `M - I`.

If `P <= A`, also `M >= I`. The Gauss-Radau rule with the fixed node 1 replaces the
spectrum of M by `weight` eigenvalues `1 + t` and ones. It has the right moments:
`weight t` and `weight t^2`.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from .._run.budget import Budget
from .._run.matvecs import ROUND
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps


# Growth goes on while the probes are expected to need more than this many times the
# matvecs spent on the rank, so that at least a fifth of all expected matvecs is spent on
# it. Otherwise a single noisy forecast could end the growth much too early.
_PROBES_TO_RANK = 4
# As much of a total goes to the rank, for the same reason. Where that does not pay, as on
# flat spectra, the error is larger by a fifth.
_LEAST_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The spectrum of M by the rule above, and what follows for real normal probes."""

    weight: Real[Array, ""]
    t: Real[Array, ""]

    @classmethod
    def of(cls, moments: Real[Array, "2"]) -> "_Rule":
        first, second = moments
        t = second / jnp.where(first > 0, first, 1)
        return cls(first / jnp.where(t > 0, t, 1), t)

    @property
    def trace(self) -> Real[Array, ""]:
        return self.weight * jnp.log1p(self.t)

    @property
    def variance(self) -> Real[Array, ""]:
        # `z* log(M) z` has the variance `2 ||log(M)||_F^2`.
        return 2 * self.weight * jnp.log1p(self.t) ** 2

    @property
    def contraction(self) -> Real[Array, ""]:
        """The width of a bracket is taken to be `4 weight contraction^steps`: Lanczos has
        this rate for eigenvalues between 1 and `root**2`. If they fall geometrically, the
        largest is up to `1 + 2 t`. A weight at zero that is hidden falls at the same
        rate."""
        root = jnp.sqrt(1 + 2 * self.t)
        return ((root - 1) / (root + 1)) ** 2


@dataclasses.dataclass(frozen=True)
class ForecastOfMatvecs:
    """The number of matvecs that the probes will take, and the variance of one probe.

    `moments` are `tr(M - I)` and `||M - I||_F^2`, and `log_det` is `log det P`. For an
    adaptive k, the probes reach its tolerance for `log_det + offset + tr log(M)`. For a
    fixed number k, they reach the accuracy that k probes of the variance `reference`
    have.

    `hidden` is the number of eigenvalues at zero, over the number that is tolerated, for
    which one step leaves room; 0 if a lower bound is known.
    """

    k: int | Budget
    num_steps: int | AdaptiveSteps | RandomSteps
    offset: Real[Array, ""] | float
    hidden: float
    # How many further blocks are looked ahead: one alone may not save a step.
    ahead: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def __call__(
        self,
        moments: Real[Array, "2"],
        *,
        log_det: Real[Array, ""],
        spent: Int[Array, ""] | int,
        ahead: int = 0,
        reference: Real[Array, ""] | None = None,
    ) -> tuple[Real[Array, ""], Real[Array, ""]]:
        """The cost if `ahead` more matvecs than those `spent` make these moments."""
        rule, k, num_steps = _Rule.of(moments), self.k, self.num_steps
        variance, probes = rule.variance, jnp.asarray(k if isinstance(k, int) else 0)
        if isinstance(k, Budget):
            # Whole rounds, as many as the first test needs.
            min_probes = k.round_size * -(-k.rule.min_samples // k.round_size)
            answer = log_det + self.offset + rule.trace
            aim = k.rule.tolerance(answer)
            std_err = jnp.sqrt(variance / min_probes)
            count = jnp.full_like(std_err, min_probes)
            excess = k.rule.excess(answer, std_err, count)
            probes = min_probes * jnp.maximum(excess**2, 1)
        else:
            aim = jnp.sqrt(variance / k)
            if reference is not None:
                probes = k * variance / jnp.where(reference > 0, reference, 1)
        if isinstance(num_steps, RandomSteps):
            # The condition number, on which the further steps depend, is not known yet.
            num_steps = num_steps.start
        if not isinstance(num_steps, AdaptiveSteps):
            return probes * num_steps + ahead, variance
        ratio = 4 * rule.weight / jnp.where(aim > 0, num_steps.share * aim, 1)
        ratio = jnp.maximum(ratio, 4 * self.hidden)
        steps = jnp.log(jnp.maximum(ratio, 1)) / -jnp.log(rule.contraction)
        # `advance_until` looks after one step, and then after even numbers.
        steps = jnp.where(steps <= 1, 1, 2 * jnp.ceil(steps / 2))
        return probes * jnp.clip(steps, 1, num_steps.most) + ahead, variance

    def too_early(
        self, cost: Real[Array, ""], spent: Int[Array, ""] | int
    ) -> Bool[Array, ""]:
        """Whether too little is spent on the rank for the growth to end."""
        return cost > _PROBES_TO_RANK * spent


@dataclasses.dataclass(frozen=True)
class ForecastOfError:
    """The squared error that is left once `total` matvecs are made, with the best number
    of `steps`,

        variance steps / left + (share width)^2,
        width = (n log(1 + first / n) - trace) contraction^(steps - 1) / steps,

    where the second term is for the quadrature error, and `left` is what the rank leaves.
    The width of the bracket after one step follows from the moments. Later it falls a
    little faster than the contraction says, as it is one of a logarithm.
    """

    n: int
    total: int
    most_steps: int
    share: float
    hidden: float
    # Blocks may have to be many before the approximation is good enough to pay.
    ahead: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)

    def __call__(
        self,
        moments: Real[Array, "2"],
        *,
        log_det: Real[Array, ""],
        spent: Int[Array, ""] | int,
        ahead: int = 0,
        reference: Real[Array, ""] | None = None,
    ) -> tuple[Real[Array, ""], Real[Array, ""]]:
        """As for `ForecastOfMatvecs`."""
        rule, dtype = _Rule.of(moments), moments.dtype
        left = jnp.asarray(self.total - spent - ahead, dtype)
        steps = jnp.arange(1, self.most_steps + 1, dtype=dtype)
        first_width = self.n * jnp.log1p(jnp.abs(moments[0]) / self.n) - rule.trace
        width = jnp.maximum(first_width, 0) * rule.contraction ** (steps - 1) / steps
        # Each eigenvalue at zero that may be hidden counts like an error of 1.
        hidden = jnp.maximum(4 * self.hidden * rule.contraction**steps - 1, 0)
        errors = rule.variance * steps / jnp.maximum(left, 1)
        errors = errors + (self.share * width + hidden) ** 2
        allowed = ROUND * steps <= left
        return jnp.min(jnp.where(allowed, errors, jnp.inf)), rule.variance

    def too_early(
        self, cost: Real[Array, ""], spent: Int[Array, ""] | int
    ) -> Bool[Array, ""]:
        return jnp.asarray(_LEAST_SHARE * self.total > spent)
