"""Which rounds of an adaptive budget are worth a test of the tolerance.

Let e_0 be the `excess` at the last test: the half-width of the confidence interval over
the tolerance. A later round has about

    e = e_0 s / s_0,

where s is a number to which standard errors are proportional, and s_0 is that number at
the last test. For r rounds of independent samples, s = r^(-1/2). A sketch has a residual:
the part of the newest products outside the range of the earlier ones, which falls with
the error. A round with e above a `margin` is not tested: where products are cheap, tests
of sketches, which factorise small matrices, would take most of the time, and between
tests several rounds can be made at once. Fewer tests also make it less likely that one is
passed by luck.

In the code: s is `scale`, and e_0 / s_0 is `unit`.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Real


# The squared excess of m independent samples has a relative standard deviation of about
# sqrt(2 / m). With as many of these, runs on simulated samples make 1% more products than
# with a test after each round, and with one, 3%.
_DEVIATIONS = 1.5
# For sketches: how far above the tolerance the forecast must be for a round without a
# test, and the growth of the budget without one. On nine spectra with tolerances from
# 1e-1 to 1e-4, runs make 1% more products than with a test after each round; on the worst
# one, a step, 9%. There the residual falls a round after the error.
_SKETCH_MARGIN, _SKETCH_GROWTH = 1.2, 1.5


class Forecast(eqx.Module):
    """How the excess changes between tests.

    - `scale`: a function of buffers and the number of rounds.
    - `margin`: a function of the number of samples at the last test. Rounds with a larger
        excess are not tested.
    - `growth`: the run is tested before its rounds grow by this factor.
    """

    scale: Callable[[PyTree, Int[Array, ""]], Real[Array, ""]]
    margin: Callable[[Real[Array, ""]], Real[Array, ""] | float]
    growth: float = math.inf

    def unit(
        self, excess: Real[Array, ""], buffers: PyTree[Array], rounds: Int[Array, ""]
    ) -> Real[Array, ""]:
        """`e_0 / s_0`, or 0, which asks for a test, where `s_0` is 0."""
        scale = self.scale(buffers, rounds).astype(excess.dtype)
        return jnp.where(scale > 0, excess / jnp.where(scale > 0, scale, 1), 0)

    def exceeds(
        self,
        unit: Real[Array, ""],
        count: Real[Array, ""],
        buffers: PyTree[Array],
        rounds: Int[Array, ""],
    ) -> Bool[Array, ""]:
        """Whether the excess is above the margin, for `count` samples at the last
        test."""
        scale = self.scale(buffers, rounds).astype(unit.dtype)
        # An infinite unit times 0 would be NaN.
        excess = jnp.where(scale > 0, unit * jnp.where(scale > 0, scale, 1), 0)
        return excess > self.margin(count)


def independent_margin(count: Real[Array, ""]) -> Real[Array, ""]:
    share = 1 - _DEVIATIONS * jnp.sqrt(2 / jnp.maximum(count, 1))
    return jnp.where(share > 0, 1 / jnp.sqrt(jnp.where(share > 0, share, 1)), jnp.inf)


def independent_scale(_: PyTree, rounds: Int[Array, ""]) -> Real[Array, ""]:
    return 1 / jnp.sqrt(jnp.maximum(rounds, 1).astype(float))


INDEPENDENT = Forecast(independent_scale, independent_margin)


def forecast_of_residual(
    residual: Callable[[PyTree, Int[Array, ""]], Any],
) -> Forecast:
    """The forecast of a sketch with the `residual` of its newest round."""

    def scale(buffers, rounds):
        size = residual(buffers, rounds)
        return size / jnp.sqrt(jnp.maximum(rounds, 1).astype(size.dtype))

    return Forecast(scale, lambda _: _SKETCH_MARGIN, _SKETCH_GROWTH)
