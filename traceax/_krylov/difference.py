"""Differences of two quadratic forms, from the same probe.

For `z* f(A) z - z* f(B) z` the operator is A stacked above B. Sampling errors of the two
forms mostly cancel where A and B are close. Bounds of the difference are the lower end of
one bracket minus the upper end of the other.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .base import AbstractKrylovMethod


class _Half(eqx.Module):
    """The first or the second half of what a function returns."""

    fn: Any
    index: int = eqx.field(static=True)

    def __call__(self, vector):
        return jnp.split(self.fn(vector), 2)[self.index]


def unstack(operator: FlatOperator) -> list[FlatOperator]:
    """A and B, from the `operator` that stacks them. Each calls the matvecs of both, and
    the compiler removes the one whose result is not used."""
    halves = _Half(operator.fn, index=0), _Half(operator.fn, index=1)
    return [dataclasses.replace(operator, fn=half) for half in halves]


class Difference(AbstractKrylovMethod):
    """`z* f(A) z - z* f(B) z`, for an operator that stacks A above B, by two runs of one
    method from the same probe. Matvecs are counted for each of the two operators."""

    method: AbstractKrylovMethod

    def __init__(self, method: AbstractKrylovMethod):
        self.method = method

    @property
    def title(self) -> str:
        return self.method.title

    @property
    def products_per_step(self) -> int:  # pyright: ignore
        return self.method.products_per_step

    @property
    def reads_earlier_steps(self) -> bool:  # pyright: ignore
        return self.method.reads_earlier_steps

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return self.method.fits(operator, function)

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return [self.method.start(half, probe, most) for half in unstack(operator)]

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        pairs = zip(unstack(operator), state, strict=True)
        return [self.method.advance(half, run, first, last) for half, run in pairs]

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        width = (columns + 1) // 2
        # By position: parameters of a user's method may have other names.
        a, b = (
            self.method.read(half, run, steps, function, lower_bound, width)
            for half, run in zip(unstack(operator), state, strict=True)
        )
        # The direction dA above dB has the derivative `sum L_a* dA R_a - sum L_b* dB
        # R_b`: each L is padded with zeros for the other operator.
        above, below = jnp.zeros_like(a.left), jnp.zeros_like(b.left)
        left = [jnp.append(a.left, above, axis=1), jnp.append(below, -b.left, axis=1)]
        return QuadraticForm(
            value=a.value - b.value,
            # The smallest possible value, by the triangle inequality.
            deviation=jnp.abs(a.deviation - b.deviation),
            left=jnp.concatenate(left),
            right=jnp.concatenate([a.right, b.right]),
            residual=jnp.maximum(a.residual, b.residual),
            bracket=a.bracket - b.bracket[::-1],
            magnitude=a.magnitude + b.magnitude,
            rounding=a.rounding - b.rounding,
            extremes=jnp.stack([a.extremes, b.extremes]),
            unresolved=a.unresolved + b.unresolved,
            changes=_combine_optional(jnp.add, a.changes, b.changes),
            hidden=_combine_optional(jnp.maximum, a.hidden, b.hidden),
        )


def _combine_optional(fn: Any, a: Array | None, b: Array | None) -> Array | None:
    """`fn(a, b)`, or `None` if one of them is not known."""
    return None if a is None or b is None else fn(a, b)
