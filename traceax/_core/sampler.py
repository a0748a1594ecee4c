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
    - `unit_modulus`: whether all entries have modulus one, as by default they need not.
        Error bars of diagonals are narrower then.
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
        - `dtype`: that of the vector: real or complex, floating, for
            `RademacherSampler` also a signed integer one.

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

        An array of shape `(n, k)`, of the sampler's dtype (JAX's default float where
        that is `None`).
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
    """Probes with the given global indices: probe `i` is drawn from `fold_in(key, i)`."""

    def one(index):
        probe = sampler.sample(fold_in(key, index), n, dtype)
        if jnp.shape(probe) != (n,):
            raise ValueError(
                f"`{type(sampler).__name__}.sample` must return an array of shape ({n},) "
                f"for n={n}. Found {jnp.shape(probe)}."
            )
        return probe

    return jax.vmap(one, out_axes=1)(indices)


def probe_dtype(sampler: AbstractSampler, operator_dtype: DTypeLike) -> DTypeLike:
    """The dtype in which to sample probes for an operator, or a `ValueError`."""
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


def needed(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key, or a `ValueError` if there is none."""
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
    """Draw probes for an operator, rounded to its coarsest dtype, so that they enter
    products exactly.

    **Arguments:**

    - `operator`: a map of flat vectors of length n.
    - `sampler`: distribution of the probes.
    - `key`: a JAX PRNG key; `None` raises a `ValueError`.
    - `indices`: which probes, an integer array of shape `(m,)`.

    **Returns:**

    An array of shape `(n, m)`. Its column for the index i depends on `key` and i alone.
    """
    key = needed(key)
    dtype = probe_dtype(sampler, operator.dtype)
    probes = draw(sampler, key, indices, operator.size, dtype)
    return probes.astype(operator.precision).astype(operator.dtype)


def is_resphered(sampler: AbstractSampler, improved: bool | None) -> bool:
    """Whether probes are resphered; with None they are where the sampler is rotation
    invariant."""
    return sampler.rotation_invariant if improved is None else improved


def check_resphering(sampler: AbstractSampler, improved: bool | None) -> None:
    check_instance("sampler", sampler, AbstractSampler, "SphereSampler()")
    if improved and not sampler.rotation_invariant:
        raise ValueError(
            f"`improved=True` (resphering) needs a rotation-invariant `sampler`. Found "
            f"`{type(sampler).__name__}`. Use `traceax.SphereSampler` or "
            "`traceax.NormalSampler`, or pass `improved=False`."
        )


def _check_dtype(sampler: AbstractSampler, words: str, *kinds: type) -> None:
    dtype = sampler.dtype
    if dtype is not None and not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise ValueError(
            f"`{type(sampler).__name__}` requires a {words} `dtype`. Found "
            f"{sampler.dtype}. Leave it unset to follow the operator."
        )


def _drawn(n: int) -> int:
    """How many numbers to draw where `n` are used. The first ones of a longer draw are
    the same. XLA:CPU unrolls loops of a length such as 10, which takes seconds to
    compile; loops over multiples of 16 it vectorises."""
    return -(-n // 16) * 16


def _by_halves(fn: Callable[[Array], Array], x: Array, n: int) -> Array:
    """The first n entries of `fn(x)`, in a line, where `fn` is of each entry of `x`.

    XLA on CPU would compute entries of a long vector again in each place where a product
    reads them, even behind an `optimization_barrier`, but not those of a loop: here one
    over the two halves of `x`.
    """
    if n <= 2**19:
        return fn(x).reshape(-1)[:n]
    half = len(x) // 2

    def part(i):
        return fn(jax.lax.dynamic_slice_in_dim(x, i * half, half))

    return jax.lax.map(part, jnp.arange(2)).reshape(-1)[:n]


class RademacherSampler(AbstractSampler):
    """Random signs: each entry is +1 or -1 with equal probability.

    Real signs also for complex operators. 32 signs are made from one random word. The
    `dtype` may be an integer one.

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
        words = jr.bits(fast_key(key), (_drawn(-(-n // 32)),), jnp.uint32)
        minus, plus = jnp.asarray(-1, dtype), jnp.asarray(1, dtype)

        def signs(shifts):
            return jnp.where((words >> shifts[:, None]) & 1 == 1, minus, plus)

        return _by_halves(signs, jnp.arange(32, dtype=jnp.uint32), n)


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
        normal = jr.normal(fast_key(key), (_drawn(n),), dtype)
        return _by_halves(lambda x: x, normal, n)


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
        normal = jr.normal(fast_key(key), (_drawn(n),), dtype)[:n]
        # The sum of n squares may be too large for float16.
        norm = jnp.linalg.norm(normal.astype(jnp.promote_types(dtype, jnp.float32)))
        return normal * (n**0.5 / norm).astype(dtype)


class SteinhausSampler(AbstractSampler):
    """Random phases: each entry is uniform on the unit circle. Complex operators only.

    For a Hermitian operator one sample has the variance $\\sum_{i \\ne j} |a_{ij}|^2$.
    With random signs it is $2 \\sum_{i \\ne j} (\\mathrm{Re}\\, a_{ij})^2$: twice that if
    the matrix is real, less if it is mostly imaginary.

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
            fast_key(key), (_drawn(n),), jnp.finfo(dtype).dtype, maxval=2 * jnp.pi
        )

        def phases(angle):
            return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))

        return _by_halves(phases, angle, n)


for _sampler in (RademacherSampler, NormalSampler, SphereSampler, SteinhausSampler):
    _sampler.__init__.__doc__ = """**Arguments:**

- `dtype`: dtype of the samples. Default is `None`: the operator's dtype.

**Raises:**

`ValueError` for a dtype of another kind than the distribution has: floating or complex,
for `SteinhausSampler` complex, for `RademacherSampler` also signed integer. `TypeError`
for what is no dtype.
"""
