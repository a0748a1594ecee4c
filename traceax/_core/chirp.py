"""Vectors whose entries turn around a circle at a growing pace. Structured subspaces,
such as smooth vectors or indicators of a set, contain little of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Inexact


# 2^32 times the golden section (sqrt(5) - 1) / 2: of all numbers the worst to approximate
# by fractions, so that its multiples are spread evenly on a circle.
_GOLDEN_SECTION = np.uint32(0x9E3779B9)


def rotate(vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
    """Turn entry i of a vector by i^2 golden sections of a circle, so that few angles are
    near each other, and sums of a few entries with different signs hardly ever agree."""
    # In units of 2^-32 of a circle, where integers wrap around as angles do.
    index = jax.lax.iota(jnp.uint32, vector.size)
    turns = index * index * _GOLDEN_SECTION
    angle = turns.astype(vector.real.dtype) * (2 * math.pi / 2**32)
    return vector * jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def generic_vector(size: int, dtype: DTypeLike) -> Inexact[Array, " n"]:
    """A vector that is the same in each call, to take the place of a random one where
    any vector does. A program with random numbers from a known key would draw them while
    it is compiled."""
    turned = rotate(jnp.ones(size, jnp.finfo(dtype).dtype))
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return turned.astype(dtype) if is_complex else turned.real
