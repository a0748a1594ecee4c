"""The state of a run, and checks that a later call may resume it."""

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.jax_interfaces import Tracer


class RunState(eqx.Module):
    """The state from which a later call resumes a run.

    - `loop`: the state of its loop.
    - `key`: the data of its key, or `None` if it had none.
    - `settings`: the task as text, with shapes and dtypes instead of arrays.
    - `max_k`: the budget for which the buffers have room.
    """

    loop: PyTree[Array]
    key: Array | None
    settings: str = eqx.field(static=True)
    max_k: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, loop: PyTree[Array], task: eqx.Module, key: PRNGKeyArray | None, max_k: int
    ) -> "RunState":
        """The state of a run of `task` with this key."""
        data = None if key is None else jr.key_data(key)
        return cls(loop=loop, key=data, settings=_settings(task), max_k=max_k)


def _settings(task: eqx.Module) -> str:
    """The task as text. Text is static, so it can be compared while a program is traced,
    and two calls compare equal although their arrays are different objects."""
    shapes = eqx.filter_eval_shape(lambda x: x, task)
    # Structs of `filter_eval_shape` may name a sharding: one call has arrays that are
    # committed to a device, where another one has traced arrays.
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    shapes = jax.tree.map(lambda x: plain(x) if is_shape(x) else x, shapes)
    return eqx.tree_pformat(shapes)


def check_state(state: Any, task: eqx.Module, key: PRNGKeyArray | None) -> None:
    """Raise an error if the state is of another call, as far as settings, shapes and key
    show. Numbers in the arrays of the task are not compared."""
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
    # Traced keys have no numbers to compare.
    if isinstance(data, Tracer) or isinstance(state.key, Tracer):
        return
    if not np.array_equal(data, state.key):
        raise ValueError(
            "`state` must be of a call with the same `key`, from which all probes are "
            f"drawn. Found one with the data {data}, and in the state {state.key}."
        )
