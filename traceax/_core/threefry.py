"""JAX's default random bits in a form that compiles fast: the same numbers as
`jax.random` gives.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, "Parallel
Random Numbers: As Easy as 1, 2, 3", SC 2011). It hashes a count by a key of two words
k_0 and k_1 (`key`), with k_2 = k_0 xor k_1 xor a parity constant (`schedule`). From

    x_0 = k_0,    x_1 = count + k_1

(`left`, `right`), each round is

    x_0 <- x_0 + x_1,    x_1 <- rotate(x_1, r) xor x_0,

and after the g-th group of four rounds k_g mod 3 is added to x_0, k_(g+1) mod 3 and g to
x_1.

On CPU `jax.random` leaves the rounds in a loop of about 17 kernels, which take 0.2 s to
compile. Here the rounds are written out. Alone, that would make XLA compute a word again
in each place that reads it. So the two words of a hash are made the operands of a
reduction: XLA fuses the rounds into it, and does not compute its result twice.
"""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, PRNGKeyArray, UInt32

from .jax_interfaces import define_prng_impl, threefry_prng_impl


# The rotation distances r of even and of odd groups, and the parity constant: both are
# part of the definition of Threefry-2x32.
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
_NUM_GROUPS = 5  # of four rounds: 20 rounds


def _hash(key: UInt32[Array, "2"], counts: UInt32[Array, "*shape"]) -> Array:
    """The two words of the hash of each count, along a new first axis."""
    # `lax` in the place of `jax.numpy`, whose operators would each be lowered as a
    # function, which takes longer than the rest.
    shape = 2, *counts.shape
    schedule = [key[0], key[1], key[0] ^ key[1] ^ _PARITY]
    words = [lax.broadcast(word, shape) for word in schedule]
    left, right = words[0], lax.add(lax.broadcast(counts, (2,)), words[1])
    for group in range(_NUM_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            left = lax.add(left, right)
            high = lax.shift_left(right, np.uint32(rotation))
            low = lax.shift_right_logical(right, np.uint32(32 - rotation))
            right = lax.bitwise_xor(left, lax.bitwise_or(high, low))
        left = lax.add(left, words[(group + 1) % 3])
        right = lax.add(lax.add(right, words[(group + 2) % 3]), np.uint32(group + 1))
    return lax.select(_is_first_word(shape), left, right)


def _is_first_word(shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """A mask of the entries with the index 0 along the first axis."""
    index = lax.broadcasted_iota(jnp.uint32, shape, 0)
    return lax.eq(index, np.uint32(0))


def _random_bits(
    key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]
) -> Array:
    size = math.prod(shape)
    # Counts of more than 32 bits have a second word, which JAX's own code handles.
    if size >= 2**32:
        return threefry_prng_impl.random_bits(key, bit_width, shape)
    words = _hash(key, lax.iota(jnp.uint32, size).reshape(shape))
    dtype = jnp.dtype(f"uint{max(bit_width, 32)}")
    if bit_width == 64:
        words = words.astype(dtype)
        words = jnp.where(_is_first_word(words.shape), words << dtype.type(32), words)
    # For 32 bits the exclusive or is what `jax.random` returns. For 64 the two words do
    # not overlap, and it joins them.
    bits = lax.reduce(words, dtype.type(0), lax.bitwise_xor, (0,))
    return bits.astype(f"uint{bit_width}")


def _fold_in(key: UInt32[Array, "2"], index: ArrayLike) -> Array:
    return _hash(key, jnp.asarray(index, jnp.uint32))


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Array:
    counts = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return jnp.moveaxis(_hash(key, counts), 0, -1)


_FAST = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="traceax_threefry2x32",
    tag="traceax",
)


def fast_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key from which `jax.random` draws the same numbers as from the given one. A key
    of the default generator is replaced by one that compiles in a third of the time;
    other keys are returned as they are."""
    default = jr.key_impl(key) == "threefry2x32"
    # Without the partitionable form, JAX numbers the counts of an array differently.
    if default and jax.config.jax_threefry_partitionable:  # pyright: ignore
        return jr.wrap_key_data(jr.key_data(key), impl=_FAST)
    return key


def fold_in(key: PRNGKeyArray, index: Array) -> PRNGKeyArray:
    """`jax.random.fold_in`, compiled faster; a key of the same kind as the given one."""
    folded = jr.key_data(jr.fold_in(fast_key(key), index))
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return folded
    return jr.wrap_key_data(folded, impl=jr.key_impl(key))
