"""A hint for operators without a tag that look Hermitian."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool

from .._core.arithmetic import standard_promotion
from .._core.solution import Solution
from .._operators.door import EnteredOperator


# The rounding error of a matvec, and that of an inner product, are about `eps |u| |A v|`.
# The factor has room for both and for operators of several steps. It was not measured:
# the answer is only a hint.
_ROUNDING_FACTOR = 8


@eqx.filter_jit
def looks_hermitian(operator: EnteredOperator) -> Bool[Array, ""]:
    """Whether `u* A v` and `(v* A u)*` are equal up to rounding for two random vectors u
    and v. It costs two matvecs."""
    with standard_promotion():
        flat, _ = operator.open()
        u, v = jr.normal(jr.key(0), (2, flat.size), flat.dtype)
        image_u, image_v = flat.mv(u), flat.mv(v)
        difference = jnp.abs(jnp.vdot(u, image_v) - jnp.vdot(v, image_u).conj())
        size = jnp.linalg.norm(u) * jnp.linalg.norm(jnp.stack([image_u, image_v]))
        return difference <= _ROUNDING_FACTOR * flat.eps * size


def hint_for(operator: EnteredOperator, solution: Solution) -> str:
    """Advice for the message of a failed call: a tag, if the operator looks Hermitian and
    has none. Otherwise an empty string."""
    flat = operator.flat
    # Only functions of operators report Ritz values, and only they gain from the tag.
    if "ritz_values" not in solution.stats or flat.hermitian or not operator.square:
        return ""
    if not looks_hermitian(operator):
        return ""
    is_complex = jnp.issubdtype(flat.dtype, jnp.complexfloating)
    tag = "traceax.hermitian_tag" if is_complex else "lineax.symmetric_tag"
    return (
        "The operator has no tag, but judging by its products with two random vectors it "
        "looks Hermitian. If it is, tag it with `lineax.positive_semidefinite_tag` if no "
        f"eigenvalue is negative, and with `{tag}` otherwise. The call then needs fewer "
        "steps, or no products with the adjoint."
    )
