"""JAX's default random bits, Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), in a
form that compiles fast: the same numbers as `jax.random` gives.

On CPU `jax.random` leaves the rounds in a loop, of about 17 kernels. Here they are
written out. The two words of a hash are then the operands of a reduction, into which XLA
fuses the rounds, but which it does not compute again in each place that reads its result.
"""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, PRNGKeyArray, UInt32

from .jax_interfaces import define_prng_impl, threefry_prng_impl


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def _hashed(key: UInt32[Array, "2"], counts: UInt32[Array, "*shape"]) -> Array:
    """The two words of the hash of each count along a new first axis. Without the
    operators of `jax.numpy`, each of which would be a function to lower."""
    shape = 2, *counts.shape
    schedule = [key[0], key[1], key[0] ^ key[1] ^ _PARITY]
    words = [lax.broadcast(word, shape) for word in schedule]
    left, right = words[0], lax.add(lax.broadcast(counts, (2,)), words[1])
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = lax.add(left, right)
            ends = lax.shift_left(right, np.uint32(rotation))
            rest = lax.shift_right_logical(right, np.uint32(32 - rotation))
            right = lax.bitwise_xor(left, lax.bitwise_or(ends, rest))
        left = lax.add(left, words[(group + 1) % 3])
        right = lax.add(lax.add(right, words[(group + 2) % 3]), np.uint32(group + 1))
    return lax.select(_first(shape), left, right)


def _first(shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Which entries of an array of that shape are the first along its first axis."""
    index = lax.broadcasted_iota(jnp.uint32, shape, 0)
    return lax.eq(index, np.uint32(0))


def _bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    if size >= 2**32:
        return threefry_prng_impl.random_bits(key, bit_width, shape)
    words = _hashed(key, lax.iota(jnp.uint32, size).reshape(shape))
    dtype = jnp.dtype(f"uint{max(bit_width, 32)}")
    if bit_width == 64:
        words = words.astype(dtype)
        words = jnp.where(_first(words.shape), words << dtype.type(32), words)
    bits = lax.reduce(words, dtype.type(0), lax.bitwise_xor, (0,))
    return bits.astype(f"uint{bit_width}")


def _fold_in(key: UInt32[Array, "2"], index: ArrayLike) -> Array:
    return _hashed(key, jnp.asarray(index, jnp.uint32))


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Array:
    counts = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return jnp.moveaxis(_hashed(key, counts), 0, -1)


_FAST = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="traceax_threefry2x32",
    tag="traceax",
)


def fast(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key from which `jax.random` draws the same numbers as from the given one. Where
    that is of the default generator, the new one compiles in a third of the time."""
    default = jr.key_impl(key) == "threefry2x32"
    if default and jax.config.jax_threefry_partitionable:  # pyright: ignore
        return jr.wrap_key_data(jr.key_data(key), impl=_FAST)
    return key


def fold_in(key: PRNGKeyArray, index: Array) -> PRNGKeyArray:
    """`jax.random.fold_in`."""
    folded = jr.key_data(jr.fold_in(fast(key), index))
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return folded
    return jr.wrap_key_data(folded, impl=jr.key_impl(key))
