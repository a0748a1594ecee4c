"""The distributions of probe vectors: random signs, normal entries, points of a sphere,
and random phases."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, DTypeLike, Inexact, Num, PRNGKeyArray

from .sampler import AbstractSampler
from .threefry import fast_key


def _check_dtype(sampler: AbstractSampler, words: str, *kinds: type) -> None:
    """Raise unless the sampler's dtype is None or of one of the `kinds`, which are
    `words` in the message."""
    dtype = sampler.dtype
    if dtype is not None and not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise ValueError(
            f"`{type(sampler).__name__}` requires a {words} `dtype`. Found "
            f"{sampler.dtype}. Leave it unset to follow the operator."
        )


# XLA:CPU vectorises loops over multiples of this number. It unrolls loops of lengths such
# as 10, which take up to four times as long to compile.
_VECTOR_LENGTH = 16

# Probes of up to this length come in blocks of several, for which XLA:CPU does not repeat
# the drawing (see `_evaluate_in_halves`), and which a loop would slow down by a third.
_LONG_PROBE = 2**19


def _num_draws(n: int) -> int:
    """How many numbers to draw where `n` are used: a multiple of `_VECTOR_LENGTH`. A
    longer draw begins with the same numbers."""
    return -(-n // _VECTOR_LENGTH) * _VECTOR_LENGTH


def _evaluate_in_halves(fn: Callable[[Array], Array], x: Array, n: int) -> Array:
    """The first n entries of `fn(x)`, flattened, for an entrywise `fn`."""
    if n <= _LONG_PROBE:
        return fn(x).reshape(-1)[:n]
    # XLA:CPU fuses the drawing into all code that reads the probe: a stencil draws an
    # entry again for each neighbour, 50 ms in the place of 9 at n = 1e6. It ignores an
    # `optimization_barrier`, but stores the result of a loop, here over two halves.
    half = len(x) // 2

    def evaluate_half(i):
        return fn(jax.lax.dynamic_slice_in_dim(x, i * half, half))

    return jax.lax.map(evaluate_half, jnp.arange(2)).reshape(-1)[:n]


class RademacherSampler(AbstractSampler):
    """Random signs: each entry is +1 or -1 with equal probability.

    The signs are real also for complex operators. One random word of 32 bits gives 32
    signs. The `dtype` may be a signed integer dtype.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        probes = tx.RademacherSampler()(jax.random.key(0), 100, 5)
        print(probes.shape, jnp.unique(probes))  # (100, 5) [-1.  1.]
        ```
    """

    dtype: DTypeLike | None = eqx.field(static=True, default=None)
    rotation_invariant: ClassVar[bool] = False
    unit_modulus: ClassVar[bool] = True

    def __check_init__(self):
        _check_dtype(self, "signed numeric", jnp.signedinteger, jnp.inexact)

    def sample(self, key: PRNGKeyArray, n: int, dtype: DTypeLike) -> Num[Array, " n"]:
        # `jr.rademacher` draws a number for each sign, slower than a cheap matvec.
        words = jr.bits(fast_key(key), (_num_draws(-(-n // 32)),), jnp.uint32)
        minus, plus = jnp.asarray(-1, dtype), jnp.asarray(1, dtype)

        def signs(shifts):
            return jnp.where((words >> shifts[:, None]) & 1 == 1, minus, plus)

        # All first bits come first, so the shifts, and not the words, are halved.
        return _evaluate_in_halves(signs, jnp.arange(32, dtype=jnp.uint32), n)


class NormalSampler(AbstractSampler):
    """Standard normal entries; for complex dtypes $E|x|^2 = 1$.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        probes = tx.NormalSampler(jnp.complex64)(jax.random.key(0), 100, 5)
        print(probes.shape, probes.dtype)  # (100, 5) complex64
        ```
    """

    dtype: DTypeLike | None = eqx.field(static=True, default=None)
    rotation_invariant: ClassVar[bool] = True

    def __check_init__(self):
        _check_dtype(self, "floating or complex", jnp.inexact)

    def sample(self, key: PRNGKeyArray, n: int, dtype: DTypeLike) -> Inexact[Array, " n"]:
        normal = jr.normal(fast_key(key), (_num_draws(n),), dtype)
        return _evaluate_in_halves(lambda x: x, normal, n)


class SphereSampler(AbstractSampler):
    """Uniform on the real or complex sphere of radius $\\sqrt{n}$.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        probes = tx.SphereSampler()(jax.random.key(0), 100, 3)
        print(jnp.linalg.norm(probes, axis=0).round(3))  # [10. 10. 10.]
        ```
    """

    dtype: DTypeLike | None = eqx.field(static=True, default=None)
    rotation_invariant: ClassVar[bool] = True

    def __check_init__(self):
        _check_dtype(self, "floating or complex", jnp.inexact)

    def sample(self, key: PRNGKeyArray, n: int, dtype: DTypeLike) -> Inexact[Array, " n"]:
        normal = jr.normal(fast_key(key), (_num_draws(n),), dtype)[:n]
        # The sum of n squares may overflow in float16.
        norm = jnp.linalg.norm(normal.astype(jnp.promote_types(dtype, jnp.float32)))
        return normal * (n**0.5 / norm).astype(dtype)


class SteinhausSampler(AbstractSampler):
    """Random phases: each entry is uniform on the unit circle. Complex operators only.

    For a Hermitian operator one sample has the variance $\\sum_{i \\ne j} |a_{ij}|^2$.
    With random signs it is $2 \\sum_{i \\ne j} (\\mathrm{Re}\\, a_{ij})^2$, twice as much
    if the matrix is real, and less if it is mostly imaginary.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        probes = tx.SteinhausSampler(jnp.complex64)(jax.random.key(0), 100, 5)
        print(jnp.allclose(jnp.abs(probes), 1))  # True
        ```

    ??? cite

        ```bibtex
        @article{iitaka2004random,
            author  = {Iitaka, Toshiaki and Ebisuzaki, Toshikazu},
            title   = {Random Phase Vector for Calculating the Trace of a Large Matrix},
            journal = {Physical Review E},
            volume  = {69},
            pages   = {057701},
            year    = {2004},
        }
        ```
    """

    dtype: DTypeLike | None = eqx.field(static=True, default=None)
    rotation_invariant: ClassVar[bool] = False
    unit_modulus: ClassVar[bool] = True

    def __check_init__(self):
        _check_dtype(self, "complex", jnp.complexfloating)

    def sample(self, key: PRNGKeyArray, n: int, dtype: DTypeLike) -> Inexact[Array, " n"]:
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"`SteinhausSampler` draws complex phases, which do not fit the dtype "
                f"{dtype}. Use `RademacherSampler` for a real operator."
            )
        angle = jr.uniform(
            fast_key(key), (_num_draws(n),), jnp.finfo(dtype).dtype, maxval=2 * jnp.pi
        )

        def phases(angle):
            return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))

        return _evaluate_in_halves(phases, angle, n)


for _sampler in (RademacherSampler, NormalSampler, SphereSampler, SteinhausSampler):
    _sampler.__init__.__doc__ = """**Arguments:**

- `dtype`: dtype of the samples. Default is `None`: the operator's dtype.

**Raises:**

`ValueError` for a dtype that the distribution does not have. `NormalSampler` and
`SphereSampler` have floating and complex dtypes, `SteinhausSampler` complex ones,
`RademacherSampler` signed integer ones too. `TypeError` for an object that is no dtype.
"""
