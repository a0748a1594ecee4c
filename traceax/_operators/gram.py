import jax
import jax.numpy as jnp
import lineax as lx

from .._core.flat import flatten, unflatten


def gram(operator: lx.AbstractLinearOperator) -> lx.FunctionLinearOperator:
    """A A*, positive semidefinite: a product with A*, and one with A."""
    flat = flatten(operator)
    limits = jnp.finfo(flat.precision)
    # With four binary digits.
    smallest = 16 * limits.smallest_subnormal if flat.narrow else limits.tiny

    def mv(vector):
        half = flat.adjoint_mv(vector)
        image = flat.mv(half)
        # Where the product underflows, the smallest normal numbers take its place, so
        # that it is not taken for zero; but those of float16 are not small.
        lost = jnp.any(half != 0) & jnp.all(jnp.abs(image) < smallest)
        instead = jnp.inf if flat.narrow else smallest * jnp.sign(vector)
        return jnp.where(lost, instead, image)

    def coarser(x, y):
        return max(x, y, key=lambda leaf: float(jnp.finfo(leaf.dtype).eps))

    structure = jax.tree.map(coarser, operator.in_structure(), operator.out_structure())
    return unflatten(mv, structure, flat.dtype, lx.positive_semidefinite_tag)
