"""How many matvecs a log-determinant will take, from two moments of `M - I`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Real

from .._run.budget import Budget
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps


def forecast_matvecs(
    moments: Real[Array, "2"],
    *,
    k: int | Budget,
    num_steps: int | AdaptiveSteps | RandomSteps,
    log_det: Real[Array, ""],
    offset: Real[Array, ""] | float,
    hidden: float,
    reference: Real[Array, ""] | None = None,
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """The number of matvecs that the probes will take, and the variance of one probe.

    `moments` are `tr(M - I)` and `||M - I||_F^2`, and `log_det` is `log det P`. For an
    adaptive k, the probes reach its tolerance for `log_det + offset + tr log(M)`. For a
    fixed number k, they reach the accuracy that k probes of the variance `reference`
    have.

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
        answer = log_det + offset + trace
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
