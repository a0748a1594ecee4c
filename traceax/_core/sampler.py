"""Distributions of probe vectors w with E[w w*] = I, for which E[w* A w] = tr A.

Probe i is drawn from `fold_in(key, i)`. It depends on the key and on i alone, and not on
the number of probes, on how they are grouped in blocks, or on the device that draws them.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, Num, PRNGKeyArray

from .arithmetic import standard_promotion
from .checks import check_instance
from .flat import FlatOperator
from .strata import Strata
from .threefry import fold_in


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
    - `unit_modulus`: whether all entries have modulus one, but for those that are 0 in
        all probes of a stratum. Default: `False`. Error bars of diagonals are narrower if
        they have.
    - `num_strata`: p, if probe i belongs to the stratum `i mod p`, whose probes have a
        distribution of their own, such that the mean of $E[\\omega \\omega^*]$ over
        strata is I. Default: 1.
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

    @property
    def num_strata(self) -> int:
        return 1

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

    def draw(
        self, key: PRNGKeyArray, index: Int[Array, ""], n: int, dtype: DTypeLike
    ) -> Num[Array, " n"]:
        """The probe with this index, which depends on `key` and the index alone.

        **Arguments:**

        - `key`: the JAX PRNG key of all probes.
        - `index`: a traced integer.
        - `n`, `dtype`: as for `sample`.

        **Returns:**

        As `sample`.
        """
        return self.sample(fold_in(key, index), n, dtype)

    def draw_full(
        self, key: PRNGKeyArray, index: Int[Array, ""], n: int, dtype: DTypeLike
    ) -> Num[Array, " n"]:
        """The vector that the probe is the restriction of to the entries of its stratum,
        by default the probe itself. Arguments and result as for `draw`."""
        return self.draw(key, index, n, dtype)

    def strata(self, indices: Int[Array, " m"], *, entrywise: bool) -> Strata | None:
        """The strata of the probes with these indices.

        **Arguments:**

        - `indices`: integers of shape `(m,)`.
        - `entrywise`: whether samples have one entry for each entry of the probe, and
            none from a probe whose entry is 0.

        **Returns:**

        `None` if there is one stratum, the default.
        """
        return None

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
    *,
    full: bool = False,
) -> Num[Array, "n k"]:
    """Draw the probes with the given global indices, or the `full` vectors that they are
    restrictions of."""

    def draw_probe(index):
        draw_one = sampler.draw_full if full else sampler.draw
        probe = draw_one(key, index, n, dtype)
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
    *,
    full: bool = False,
) -> Inexact[Array, "n m"]:
    """Draw probes for an operator, rounded to its coarsest dtype: matvecs do not round
    them again.

    **Arguments:**

    - `operator`: a map of flat vectors of length n.
    - `sampler`: distribution of the probes.
    - `key`: a JAX PRNG key; `None` raises a `ValueError`.
    - `indices`: which probes, an integer array of shape `(m,)`.
    - `full`: whether to draw the full vectors that the probes are restrictions of.

    **Returns:**

    An array of shape `(n, m)`. Its column for the index i depends on `key` and i alone.
    """
    key = require_key(key)
    dtype = probe_dtype(sampler, operator.dtype)
    probes = draw(sampler, key, indices, operator.size, dtype, full=full)
    return probes.astype(operator.precision).astype(operator.dtype)


def check_full_support(name: str, sampler: AbstractSampler) -> None:
    """Raise if probes of the sampler have the support of one colour only."""
    if sampler.num_strata > 1:
        raise ValueError(
            f"`{name}` must draw probes of full support here. Found "
            f"`{type(sampler).__name__}`, whose probes have the support of one colour. "
            "Use `traceax.RademacherSampler`; or `traceax.HutchinsonEstimator` or "
            "`traceax.SLQEstimator`, which take colours."
        )


def is_resphered(sampler: AbstractSampler, improved: bool | None) -> bool:
    """Whether probes are resphered. Default: if the sampler is rotation invariant."""
    return sampler.rotation_invariant if improved is None else improved


def check_resphering(sampler: AbstractSampler, improved: bool | None) -> None:
    """Raise unless `sampler` is a sampler, and fit for resphering if it is asked for."""
    check_instance("sampler", sampler, AbstractSampler, "SphereSampler()")
    check_full_support("sampler", sampler)
    if improved and not sampler.rotation_invariant:
        raise ValueError(
            f"`improved=True` (resphering) needs a rotation-invariant `sampler`. Found "
            f"`{type(sampler).__name__}`. Use `traceax.SphereSampler` or "
            "`traceax.NormalSampler`, or pass `improved=False`."
        )
