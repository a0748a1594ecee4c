"""The quadrature error that is left, as the course of a run shows it."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .quadratic_form import QuadraticForm
from .rules import finite


class Convergence(eqx.Module):
    """What one quadratic form, or several in the mean, tell of their quadrature error.
    Numbers that are not known are the largest finite ones.

    - `bracket`: shape `(2,)`, that of the forms.
    - `changes`, `hidden`: shapes `(2,)` and `(3,)`, as in `QuadraticForm`.
    """

    bracket: Real[Array, "2"]
    changes: Real[Array, "2"]
    hidden: Real[Array, "3"]

    @classmethod
    def of(cls, form: QuadraticForm) -> "Convergence":
        changes, hidden = form.changes, form.hidden
        if changes is None:
            changes = finite(jnp.full_like(form.bracket, jnp.inf), 1.0)
        if hidden is None:
            hidden = jnp.zeros(3, form.bracket.dtype)
        return cls(form.bracket, changes, hidden)

    @property
    def flat(self) -> Real[Array, "7"]:
        """All numbers, of which `from_flat` makes it again."""
        return jnp.concatenate([self.bracket, self.changes, self.hidden])

    @classmethod
    def from_flat(cls, numbers: Real[Array, "7"]) -> "Convergence":
        return cls(numbers[:2], numbers[2:4], numbers[4:])

    def errors(
        self, value: Inexact[Array, ""], apart: Real[Array, "2"] | float = 0.0
    ) -> Real[Array, "2"]:
        """Estimates of how far below and above the value the truth is: twice what is left
        if the number of steps were doubled again and again, and each time the value moved
        by the same share of what it moved before; at most as far as the bracket. What
        does not shrink by at least a tenth has not settled. An isolated eigenvalue at the
        lower end changes nothing before it is seen: where there may be one, it is added.
        `apart` are errors of a part of the value that does not depend on the steps."""
        latest, before = self.changes
        ratio = latest / jnp.where(before > 0, before, 1)
        settled = latest < 0.9 * before
        left = 2 * latest * ratio / (1 - jnp.where(settled, ratio, 0))
        left = jnp.where(settled, left, jnp.inf)
        hidden, change, _ = self.hidden
        unseen = jnp.where(hidden > SEEN, change, 0)
        return jnp.minimum(left + apart + unseen, self.widths(value))

    def widths(self, value: Inexact[Array, ""]) -> Real[Array, "2"]:
        """How far the bracket goes below and above the value."""
        low, high = self.bracket
        return jnp.maximum(jnp.stack([value.real - low, high - value.real]), 0)

    def may_be_singular(self, count: float) -> Bool[Array, ""]:
        """Whether the function is infinite at zero, and there may be more than `count`
        eigenvalues that cannot be told from it."""
        hidden, _, is_infinite = self.hidden
        return (hidden > count) & (is_infinite > 0)

    def hides(self, value: Inexact[Array, ""], error: Real[Array, ""]) -> Bool[Array, ""]:
        """Whether one eigenvalue that no run has seen may move the value by more than
        this, also as far as the bracket knows."""
        hidden, change, _ = self.hidden
        moved = jnp.minimum(change, jnp.max(self.widths(value)))
        return self.may_be_singular(SEEN) | ((hidden > SEEN) & (moved > error))

    def proven(self, value: Inexact[Array, ""]) -> Real[Array, "2"]:
        """The bracket, with an open end where the operator cannot be told from a singular
        one."""
        below, above = self.widths(value)
        is_open, (low, high) = self.may_be_singular(SEEN), self.bracket
        low = jnp.where(is_open & (below > above), -jnp.inf, low)
        return jnp.stack([low, jnp.where(is_open & (below <= above), jnp.inf, high)])


# Of one eigenvalue the mean weight over k random vectors is a chi-squared variable with k
# degrees of freedom over k. It is below 0.2 with a probability of 4e-3 for k = 10, and
# 5e-5 for k = 20. A run for a single vector makes sure with less.
SEEN, SEEN_BY_ONE = 0.2, 0.05
