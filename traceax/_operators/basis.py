"""The basis of a subspace, as users pass it."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, PyTree

from .._core.checks import describe


def basis_columns(
    name: str, basis: Any, structure: PyTree[jax.ShapeDtypeStruct], dtype: DTypeLike
) -> Inexact[Array, "n r"]:
    """Convert the basis of a subspace to columns, flat vectors of `dtype`, or raise.

    For vectors of shape `(n,)` an array of shape `(n, r)` has the basis vectors as
    columns. Any other basis has the structure of a vector, with a leading axis r; so has
    an array of shape `(r, n)`, unless r is n. A single vector needs no axis."""
    size = sum(leaf.size for leaf in jax.tree.leaves(structure))
    shapes = [leaf.shape for leaf in jax.tree.leaves(structure)]
    leaves, treedef = jax.tree.flatten(basis)
    if treedef != jax.tree.structure(structure) or not all(map(_is_numeric, leaves)):
        is_array = isinstance(structure, jax.ShapeDtypeStruct)
        expected = "an array" if is_array else "a PyTree of arrays"
        raise TypeError(
            f"`{name}` must be {expected} of the structure of the operator's vectors, "
            f"{jax.tree.structure(structure)}, with a leading axis. Found "
            f"{describe(basis)} with the structure {treedef}. For operators on one flat "
            "vector pass an array of columns."
        )
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    found = [leaf.shape for leaf in leaves]
    if found == shapes:
        leaves = [leaf[None] for leaf in leaves]
    elif len(shapes) == 1 and len(shapes[0]) == 1 and found[0][:1] == shapes[0]:
        leaves = [jnp.moveaxis(leaf, 0, -1) for leaf in leaves]
    counts = {leaf.shape[:1] for leaf in leaves}
    if len(counts) != 1 or [leaf.shape[1:] for leaf in leaves] != shapes:
        one_axis = f", or ({size}, r)" if shapes == [(size,)] else ""
        wanted = ", ".join(str(("r", *shape)).replace("'", "") for shape in shapes)
        raise ValueError(
            f"`{name}` must have the shapes {wanted}{one_axis}, for r vectors of the "
            f"operator. Found {', '.join(map(str, found))}. Stack the vectors along a "
            "leading axis, for example with `jax.tree.map(lambda *x: jnp.stack(x), "
            "*vectors)`."
        )
    ((count,),) = counts
    if count > size:
        raise ValueError(
            f"`{name}` must have at most as many vectors as the operator has rows. "
            f"Found {count} vectors for {size} rows. Pass a basis, without vectors that "
            "depend on others."
        )
    is_complex = any(map(jnp.iscomplexobj, leaves))
    if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`{name}` must be real for a real operator. Found complex arrays. Pass the "
            "real and the imaginary parts as vectors of their own."
        )
    rows = jnp.concatenate(
        [leaf.reshape(count, math.prod(leaf.shape[1:])).astype(dtype) for leaf in leaves],
        axis=1,
    )
    return rows.T


def _is_numeric(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
