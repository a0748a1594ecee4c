"""The point at which a function is differentiated: its variables and its constants."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def convert_bfloat16(x: PyTree) -> PyTree:
    """Convert NumPy arrays in bfloat16 to JAX arrays. NumPy does not know that bfloat16
    is inexact, so `equinox.is_inexact_array` would take them for constants."""

    def convert(leaf):
        unrecognised = isinstance(leaf, np.ndarray) and not eqx.is_inexact_array(leaf)
        inexact = unrecognised and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(leaf) if inexact else leaf

    return jax.tree.map(convert, x)


def split_point(x: PyTree) -> tuple[PyTree, PyTree]:
    """The floating-point arrays of `x`, which are the variables, and its other leaves,
    which are constants. Raise unless there are variables and all of them are real."""
    params, static = eqx.partition(convert_bfloat16(x), eqx.is_inexact_array)
    leaves = jax.tree.leaves(params)
    if not leaves or any(jnp.iscomplexobj(leaf) for leaf in leaves):
        arrays = filter(eqx.is_array_like, jax.tree.leaves(x))
        dtypes = sorted({str(jnp.result_type(leaf)) for leaf in arrays})
        raise TypeError(
            "`x` must hold at least one real floating-point array, and no complex one. "
            f"Found leaves of dtype {dtypes}. Pass complex parameters as their real and "
            "imaginary parts."
        )
    return params, static
