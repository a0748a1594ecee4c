"""A A* of an operator A."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._core.flat import FlatOperator


class _Gram(eqx.Module):
    operator: FlatOperator

    def __call__(self, vector: Inexact[Array, " m"]) -> Inexact[Array, " m"]:
        limits, narrow = jnp.finfo(self.operator.precision), self.operator.narrow
        # With four binary digits.
        smallest = 16 * limits.smallest_subnormal if narrow else limits.tiny
        half = self.operator.adjoint_mv(vector)
        image = self.operator.mv(half)
        # Where the product underflows, the smallest normal numbers take its place, so
        # that it is not taken for zero; but those of float16 are not small.
        lost = jnp.any(half != 0) & jnp.all(jnp.abs(image) < smallest)
        instead = jnp.inf if narrow else smallest * jnp.sign(vector)
        return jnp.where(lost, instead, image)


def gram(operator: FlatOperator) -> FlatOperator:
    """A A* of a square operator, positive semidefinite: a product with A*, and one with
    A."""
    fn = _Gram(operator)
    return dataclasses.replace(operator, fn=fn, hermitian=True, sign=1)
