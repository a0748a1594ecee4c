"""The Gram operator `A A*` of an operator A, as a map of flat vectors."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._core.flat import FlatOperator


class _Gram(eqx.Module):
    operator: FlatOperator

    def __call__(self, vector: Inexact[Array, " m"]) -> Inexact[Array, " m"]:
        half = self.operator.adjoint_mv(vector)
        image = self.operator.mv(half)
        # If A* v is nonzero, so is A A* v. Where it underflows, it would pass for zero,
        # and the estimate for exact. Normal numbers have all their digits. In float16 the
        # smallest normal number is not small (6e-5), so subnormal numbers with four
        # binary digits count as well.
        limits, narrow = jnp.finfo(self.operator.precision), self.operator.narrow
        smallest = 16 * limits.smallest_subnormal if narrow else limits.tiny
        underflow = jnp.any(half != 0) & jnp.all(jnp.abs(image) < smallest)
        # The smallest normal numbers are a bound of the image that changes no estimate.
        # Those of float16 would: there the answer is infinite, and the call fails.
        replacement = jnp.inf if narrow else smallest * jnp.sign(vector)
        return jnp.where(underflow, replacement, image)


def gram(operator: FlatOperator) -> FlatOperator:
    """`A A*` of an operator A, which is positive semidefinite. A matvec with it takes one
    with A* and one with A."""
    fn, size = _Gram(operator), operator.num_rows
    facts = {"hermitian": True, "sign": 1, "sign_holds": None}
    return dataclasses.replace(operator, fn=fn, size=size, **facts)
