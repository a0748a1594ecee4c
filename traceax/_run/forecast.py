"""Which rounds of an adaptive sketch are worth a test of the tolerance.

A test factorises small matrices. Where matvecs are cheap, a test after each round takes
most of the time. Let e_0 be the `excess` at the last test, after r_0 rounds. After r
rounds it is about

    e = e_0 (s / s_0) (r_0 / r)^(1/2),

where s is the residual: the distance of the newest products from the range of those
before them, which falls with the error of each sample. While e is above a margin, rounds
are not tested.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from .adaptive import Adaptive
from .loop import Assessment


# How far above the tolerance the forecast must be for a round without a test, and the
# growth of the budget without one. With eigenvalues i^-2, i^-1/2, 0.7^i and a step, and
# tolerances of 1e-2 and 1e-3, runs make at most 1% more products than with a test after
# each round; XTrace on the step 4%.
_MARGIN, _GROWTH = 1.2, 1.5


class LastTest(eqx.Module):
    """What the last test has found. Before the first one all numbers are zero."""

    assessment: Assessment
    residual: Real[Array, ""]
    rounds: Int[Array, ""]

    def is_next_due(
        self, rule: Adaptive, residual: Real[Array, ""], rounds: Int[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether to test the tolerance after so many rounds. A run that has met it, or
        has had too few samples for an error bar, is tested after each round."""
        last, dtype = self.assessment, self.residual.dtype
        shrinkage = residual * jnp.sqrt(self.rounds / rounds).astype(dtype)
        # Not a ratio of residuals, which may be zero. NaN asks for a test.
        is_far = last.excess(rule) * shrinkage > _MARGIN * self.residual
        is_far &= (self.residual > 0) & (last.count >= rule.min_samples)
        return last.meets(rule) | ~is_far | (rounds >= _GROWTH * self.rounds)
