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
    - `changes`, `hidden`: shape `(2,)`, as in `QuadraticForm`.
    """

    bracket: Real[Array, "2"]
    changes: Real[Array, "2"]
    hidden: Real[Array, "2"]

    @classmethod
    def of(cls, form: QuadraticForm) -> "Convergence":
        changes, hidden = form.changes, form.hidden
        if changes is None:
            changes = finite(jnp.full_like(form.bracket, jnp.inf), 1.0)
        if hidden is None:
            hidden = jnp.zeros_like(form.bracket)
        return cls(form.bracket, changes, hidden)

    @property
    def flat(self) -> Real[Array, "6"]:
        """All numbers, of which `from_flat` makes it again."""
        return jnp.concatenate([self.bracket, self.changes, self.hidden])

    @classmethod
    def from_flat(cls, numbers: Real[Array, "6"]) -> "Convergence":
        return cls(*numbers.reshape(3, 2))

    def errors(
        self, value: Inexact[Array, ""], apart: Real[Array, "2"] | float = 0.0
    ) -> Real[Array, "2"]:
        """Estimates of how far below and above the value the truth is: twice what is left
        if the number of steps were doubled again and again, and each time the value moved
        by the same share of what it moved before; at most as far as the bracket. What
        does not shrink by at least a tenth has not settled. `apart` are errors of a part
        of the value that does not depend on the steps."""
        low, high = self.bracket
        latest, before = self.changes
        ratio = latest / jnp.where(before > 0, before, 1)
        settled = latest < 0.9 * before
        left = 2 * latest * ratio / (1 - jnp.where(settled, ratio, 0))
        left = jnp.where(settled, left, jnp.inf)
        proven = jnp.stack([value.real - low, high - value.real])
        return jnp.clip(left + apart, 0, jnp.maximum(proven, 0))

    def hides(self, count: float, error: Real[Array, ""]) -> Bool[Array, ""]:
        """Whether there may be more than `count` eigenvalues at the lower end of the
        spectrum that no run has seen, of which one moves the value by so much."""
        hidden, change = self.hidden
        return (hidden > count) & (change > error)

    def proven(self, value: Inexact[Array, ""]) -> Real[Array, "2"]:
        """The bracket, with an open end where the function is infinite at zero and the
        operator cannot be told from a singular one."""
        low, high = self.bracket
        unknown = jnp.asarray(jnp.finfo(low.dtype).max / 100, low.dtype)
        is_open = self.hides(SEEN, unknown)
        downward = value.real - low > high - value.real
        ends = jnp.where(is_open & downward, -jnp.inf, low)
        return jnp.stack([ends, jnp.where(is_open & ~downward, jnp.inf, high)])


# Of one eigenvalue the mean weight over k random vectors is a chi-squared variable with k
# degrees of freedom over k. It is below 0.2 with a probability of 4e-3 for k = 10, and
# 5e-5 for k = 20. A run for a single vector makes sure with less.
SEEN, SEEN_BY_ONE = 0.2, 0.05
