"""What identifies a run that a later call goes on from."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped

from .._core.code import FlatFunction
from .._core.jax_interfaces import Tracer


class RunState(eqx.Module):
    """What a later call goes on from, and what it must have in common with this one: the
    data of the key, and the estimator with its settings, as text and by `identities` of
    their arrays. `max_k` is the budget that buffers have room for."""

    loop: PyTree[Array]
    key: Array | None
    arrays: dict[str, Array]
    settings: str = eqx.field(static=True)
    max_k: int = eqx.field(static=True)


def settings_of(estimator: eqx.Module) -> str:
    """Shapes and dtypes in the place of arrays, which are traced inside a program."""
    shapes = eqx.filter_eval_shape(lambda x: x, estimator)
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    shapes = jax.tree.map(lambda x: plain(x) if is_shape(x) else x, shapes)
    return wl.pformat(shapes, hide_defaults=False, short_arrays=True)


def identities(estimator: eqx.Module) -> dict[str, Array]:
    """What tells the arrays of the settings from others, by their names: of a scalar
    itself. Arrays of operators are left out, as they are in all calls."""
    is_product = lambda x: isinstance(x, FlatFunction)  # noqa: E731
    leaves, _ = jax.tree.flatten_with_path(estimator, is_leaf=is_product)
    arrays = {jax.tree_util.keystr(path): x for path, x in leaves if eqx.is_array(x)}
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    data = {name: jr.key_data(x) if is_key(x) else x for name, x in arrays.items()}
    return {name: x if x.ndim == 0 else _hash(x) for name, x in data.items()}


@jax.jit
def _hash(x: Shaped[Array, "..."]) -> Int[Array, ""]:
    """The words, each mixed with its index by the finaliser of MurmurHash3, added modulo
    2^32: a sum that is the same in any order, and so on any mesh."""
    if jnp.iscomplexobj(x):
        return _hash(x.real) + jnp.uint32(3) * _hash(x.imag)
    if x.dtype.itemsize == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    elif jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    index = jnp.uint32(1)
    for axis, size in enumerate(x.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index * jnp.uint32(size) + place
    mixed = x.astype(jnp.uint32) + index * jnp.uint32(0x9E3779B1)
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(16)), dtype=jnp.uint32)


def _differ(ours: Array, theirs: Array) -> bool:
    """Whether they are known to. Those that are traced cannot be compared."""
    if isinstance(ours, Tracer) or isinstance(theirs, Tracer):
        return False
    return np.asarray(ours).tobytes() != np.asarray(theirs).tobytes()


def check_state(state: Any, estimator: eqx.Module, key: PRNGKeyArray | None) -> None:
    """Raise if the state is of another call."""
    if not isinstance(state, RunState):
        raise TypeError(
            "`state` must be the `state` of a solution with an adaptive budget. Found an "
            f"object of type {type(state).__name__}."
        )
    settings = settings_of(estimator)
    if state.settings != settings:
        raise ValueError(
            "`state` must be of a call with the same estimator and settings. Found one "
            f"of\n{state.settings}\nfor\n{settings}"
        )
    # NumPy's are on the way into a program rounded to what JAX has.
    arrays = identities(jax.device_put(eqx.filter(estimator, eqx.is_array)))
    for name, theirs in state.arrays.items():
        if _differ(arrays[name], theirs):
            raise ValueError(
                "`state` must be of a call with the same estimator and settings. Found "
                f"other numbers in `{name.lstrip('.')}`."
            )
    if key is None or state.key is None:
        return
    ours, theirs = jr.key_data(key), state.key
    if _differ(ours, theirs):
        raise ValueError(
            "`state` must be of a call with the same `key`, from which all probes are "
            f"drawn. Found one with the data {ours}, and in the state {theirs}."
        )
