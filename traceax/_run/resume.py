"""What identifies a run that a later call goes on from."""

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.jax_interfaces import Tracer


class RunState(eqx.Module):
    """What a later call goes on from.

    - `loop`: what the run left.
    - `key`: the data of its key, or `None` if it had none.
    - `settings`: the task, as text, with shapes and dtypes in the place of arrays.
    - `max_k`: the budget that buffers have room for.
    """

    loop: PyTree[Array]
    key: Array | None
    settings: str = eqx.field(static=True)
    max_k: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, loop: PyTree[Array], task: eqx.Module, key: PRNGKeyArray | None, max_k: int
    ) -> "RunState":
        data = None if key is None else jr.key_data(key)
        return cls(loop, data, _settings(task), max_k)


def _settings(task: eqx.Module) -> str:
    shapes = eqx.filter_eval_shape(lambda x: x, task)
    # Arrays may be committed to a device in one call, and be traced in another one.
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    shapes = jax.tree.map(lambda x: plain(x) if is_shape(x) else x, shapes)
    return eqx.tree_pformat(shapes)


def check_state(state: Any, task: eqx.Module, key: PRNGKeyArray | None) -> None:
    """Raise if the state is of another call, as far as settings, shapes and key show."""
    if not isinstance(state, RunState):
        raise TypeError(
            "`state` must be the `state` of a solution with an adaptive budget. Found an "
            f"object of type {type(state).__name__}."
        )
    settings = _settings(task)
    if state.settings != settings:
        raise ValueError(
            "`state` must be of a call with the same estimator and settings. Found one "
            f"of\n{state.settings}\nfor\n{settings}"
        )
    if key is None or state.key is None:
        return
    data = jr.key_data(key)
    # Traced keys cannot be compared.
    if isinstance(data, Tracer) or isinstance(state.key, Tracer):
        return
    if not np.array_equal(data, state.key):
        raise ValueError(
            "`state` must be of a call with the same `key`, from which all probes are "
            f"drawn. Found one with the data {data}, and in the state {state.key}."
        )
