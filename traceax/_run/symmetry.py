"""Operators without a tag that look Hermitian."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool

from .._core.arithmetic import standard_promotion
from .._core.solution import Solution
from .._operators.door import EnteredOperator


@eqx.filter_jit
def looks_hermitian(operator: EnteredOperator) -> Bool[Array, ""]:
    """Whether `u* A v` and `(v* A u)*` differ by no more than rounding for two random
    vectors; two products."""
    with standard_promotion():
        flat, _ = operator.open()
        u, v = jr.normal(jr.key(0), (2, flat.size), flat.dtype)
        both = flat.mv(u), flat.mv(v)
        difference = jnp.abs(jnp.vdot(u, both[1]) - jnp.vdot(v, both[0]).conj())
        size = jnp.linalg.norm(u) * jnp.linalg.norm(jnp.stack(both))
        return difference <= 8 * flat.eps * size


def hint_for(operator: EnteredOperator, solution: Solution) -> str:
    """What may help where a function of an operator without a tag failed."""
    flat = operator.flat
    if "ritz_values" not in solution.stats or flat.hermitian or not operator.square:
        return ""
    if not looks_hermitian(operator):
        return ""
    complex_ = jnp.issubdtype(flat.dtype, jnp.complexfloating)
    tag = "traceax.hermitian" if complex_ else "lineax.symmetric"
    return (
        "The operator has no tag, and by products with two vectors it looks Hermitian. "
        "If it is, tag it `lineax.positive_semidefinite_tag` if no eigenvalue is "
        f"negative, or else `{tag}_tag`: fewer steps, or no products with the adjoint, "
        "are enough then."
    )
