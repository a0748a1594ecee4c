"""Distributions of probe vectors w with E[w w*] = I, for which E[w* A w] = tr A.

Probe i is drawn from `fold_in(key, i)`. It depends on the key and on i alone, and not on
the number of probes, on how they are grouped in blocks, or on the device that draws them.
"""

import abc
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, DTypeLike, Inexact, Num, PRNGKeyArray

from .arithmetic import standard_promotion
from .checks import check_instance
from .flat import FlatOperator
from .threefry import fast_key, fold_in


class AbstractSampler(eqx.Module):
    """A distribution of probe vectors $\\omega$ with $E[\\omega \\omega^*] = I$.

    To write one, subclass, give `dtype` and `rotation_invariant`, and define `sample`,
    which draws a single vector.

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import traceax as tx

        class Uniform(tx.AbstractSampler):
            # Uniform entries of variance one.
            dtype: None = None
            rotation_invariant: ClassVar[bool] = False

            def sample(self, key, n, dtype):
                return jax.random.uniform(key, (n,), dtype, -(3**0.5), 3**0.5)

        print(Uniform()(jax.random.key(0), 100, 5).shape)  # (100, 5)
        ```

    **Attributes:**

    - `dtype`: of the samples; `None` (the default everywhere) follows the operator.
    - `rotation_invariant`: whether $U \\omega$ is distributed as $\\omega$ for every
        unitary (for real dtypes, orthogonal) $U$.
    - `unit_modulus`: whether all entries have modulus one. Default: `False`. Error bars
        of diagonals are narrower if they have.
    """

    dtype: eqx.AbstractVar[DTypeLike | None]
    rotation_invariant: eqx.AbstractClassVar[bool]
    unit_modulus: ClassVar[bool] = False

    def __check_init__(self):
        try:
            jnp.dtype(float if self.dtype is None else self.dtype)
        except TypeError:
            name = type(self).__name__
            raise TypeError(
                f"`dtype` of `{name}` must be a dtype or None. Found {self.dtype!r}. It "
                f"is the first field: pass others by name, as `{name}(name=value)`."
            ) from None

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, n: int, dtype: DTypeLike) -> Num[Array, " n"]:
        """Draw one probe vector.

        **Arguments:**

        - `key`: a JAX PRNG key, another one for each vector.
        - `n`: the length of the vector.
        - `dtype`: the dtype of the vector: floating or complex, for `RademacherSampler`
            also a signed integer dtype.

        **Returns:**

        An array of shape `(n,)` and of the given dtype, with $E[\\omega \\omega^*] = I$.
        """

    def __call__(self, key: PRNGKeyArray, n: int, k: int) -> Num[Array, "n k"]:
        """Draw `k` probe vectors. Column `i` depends on `key` and `i` alone.

        **Arguments:**

        - `key`: a JAX PRNG key.
        - `n`: length of a vector.
        - `k`: number of vectors.

        **Returns:**

        An array of shape `(n, k)`, of the sampler's dtype, or of JAX's default float
        dtype if that is `None`.
        """
        dtype = jnp.dtype(float) if self.dtype is None else self.dtype
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        with standard_promotion():
            return draw(self, key, jnp.arange(k), n, dtype)


def draw(
    sampler: AbstractSampler,
    key: PRNGKeyArray,
    indices: Array,
    n: int,
    dtype: DTypeLike,
) -> Num[Array, "n k"]:
    """Draw the probes with the given global indices."""

    def draw_probe(index):
        probe = sampler.sample(fold_in(key, index), n, dtype)
        if jnp.shape(probe) != (n,):
            raise ValueError(
                f"`{type(sampler).__name__}.sample` must return an array of shape ({n},) "
                f"for n={n}. Found {jnp.shape(probe)}."
            )
        return probe

    return jax.vmap(draw_probe, out_axes=1)(indices)


def probe_dtype(sampler: AbstractSampler, operator_dtype: DTypeLike) -> DTypeLike:
    """The dtype of probes for an operator, or an error if the sampler's does not fit."""
    if sampler.dtype is None:
        return operator_dtype
    dtype = jax.dtypes.canonicalize_dtype(sampler.dtype)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    operator_complex = jnp.issubdtype(operator_dtype, jnp.complexfloating)
    name = type(sampler).__name__
    if is_complex and not operator_complex:
        raise ValueError(
            f"`{name}(dtype={dtype})` does not fit an operator of dtype "
            f"{operator_dtype}: complex probes need a complex operator. Leave the "
            "sampler's `dtype` unset to follow the operator."
        )
    if operator_complex and not is_complex and sampler.rotation_invariant:
        raise ValueError(
            f"`{name}(dtype={dtype})` does not fit an operator of dtype "
            f"{operator_dtype}: real probes are not invariant under unitary maps. "
            "Leave the sampler's `dtype` unset to follow the operator."
        )
    return dtype


def require_key(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """Return the key, or raise a `ValueError` if it is None."""
    if key is None:
        raise ValueError(
            "`key` is missing: the estimator draws random probes. Pass, for example, "
            "`key=jax.random.key(0)`."
        )
    return key


def draw_for(
    operator: FlatOperator,
    sampler: AbstractSampler,
    key: PRNGKeyArray | None,
    indices: Array,
) -> Inexact[Array, "n m"]:
    """Draw probes for an operator, rounded to its coarsest dtype: matvecs do not round
    them again.

    **Arguments:**

    - `operator`: a map of flat vectors of length n.
    - `sampler`: distribution of the probes.
    - `key`: a JAX PRNG key; `None` raises a `ValueError`.
    - `indices`: which probes, an integer array of shape `(m,)`.

    **Returns:**

    An array of shape `(n, m)`. Its column for the index i depends on `key` and i alone.
    """
    key = require_key(key)
    dtype = probe_dtype(sampler, operator.dtype)
    probes = draw(sampler, key, indices, operator.size, dtype)
    return probes.astype(operator.precision).astype(operator.dtype)


def is_resphered(sampler: AbstractSampler, improved: bool | None) -> bool:
    """Whether probes are resphered. Default: if the sampler is rotation invariant."""
    return sampler.rotation_invariant if improved is None else improved


def check_resphering(sampler: AbstractSampler, improved: bool | None) -> None:
    """Raise unless `sampler` is a sampler, and fit for resphering if it is asked for."""
    check_instance("sampler", sampler, AbstractSampler, "SphereSampler()")
    if improved and not sampler.rotation_invariant:
        raise ValueError(
            f"`improved=True` (resphering) needs a rotation-invariant `sampler`. Found "
            f"`{type(sampler).__name__}`. Use `traceax.SphereSampler` or "
            "`traceax.NormalSampler`, or pass `improved=False`."
        )


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
