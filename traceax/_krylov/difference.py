import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .base import AbstractKrylovMethod


class _Part(eqx.Module):
    fn: Any
    which: int = eqx.field(static=True)

    def __call__(self, vector):
        return jnp.split(self.fn(vector), 2)[self.which]


def unstack(operator: FlatOperator) -> list[FlatOperator]:
    """A and B, from the `operator` that stacks them. Each makes the products of both, and
    the compiler leaves out the one that is not used."""
    fns = _Part(operator.fn, 0), _Part(operator.fn, 1)
    return [dataclasses.replace(operator, fn=fn) for fn in fns]


class Difference(AbstractKrylovMethod):
    """`z* f(A) z - z* f(B) z`, of an operator that is A above B, by two runs from the
    same probe with the same method. Numbers of products are those with each of them."""

    method: AbstractKrylovMethod

    def __init__(self, method: AbstractKrylovMethod):
        self.method = method

    @property
    def products_per_step(self) -> int:  # pyright: ignore
        return self.method.products_per_step

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return self.method.fits(operator, function)

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return [self.method.start(part, probe, most) for part in unstack(operator)]

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        pairs = zip(unstack(operator), state, strict=True)
        return [self.method.advance(part, each, first, last) for part, each in pairs]

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        settings = steps, function, lower_bound, (columns + 1) // 2
        a, b = (
            self.method.read(part, each, *settings)
            for part, each in zip(unstack(operator), state, strict=True)
        )
        above, below = jnp.zeros_like(a.left), jnp.zeros_like(b.left)
        left = [jnp.append(a.left, above, axis=1), jnp.append(below, -b.left, axis=1)]
        return QuadraticForm(
            value=a.value - b.value,
            # The smallest that is possible.
            deviation=jnp.abs(a.deviation - b.deviation),
            left=jnp.concatenate(left),
            right=jnp.concatenate([a.right, b.right]),
            residual=jnp.maximum(a.residual, b.residual),
            bracket=a.bracket - b.bracket[::-1],
            magnitude=a.magnitude + b.magnitude,
            rounding=a.rounding - b.rounding,
            extremes=jnp.stack([a.extremes, b.extremes]),
            unresolved=a.unresolved + b.unresolved,
            changes=_both(jnp.add, a.changes, b.changes),
            hidden=_both(jnp.maximum, a.hidden, b.hidden),
        )


def _both(fn: Any, a: Array | None, b: Array | None) -> Array | None:
    return None if a is None or b is None else fn(a, b)
