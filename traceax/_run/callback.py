"""The callback of an adaptive budget, and how its exceptions reach the caller.

A callback runs on the host while the compiled program waits. Its exception is stored
under the number of the run, and the program is told to stop after this round. The call
raises the exception when the program has ended: an error inside a program, on one of
several devices, would leave the others waiting at their next collective.
"""

import contextlib
import dataclasses
import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._core.jax_interfaces import Tracer
from .budget import Budget


# Exceptions of callbacks, by the numbers of their runs. No number is used twice.
_raised: dict[int, BaseException] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def raising_for_callbacks(k: Any) -> Iterator[Any]:
    """A context for one run, which is given the budget `k` with a number for that run. If
    the callback raises an exception, the run ends after that round, and the context
    raises the exception."""
    number = None
    if isinstance(k, Budget) and k.rule.callback is not None:
        number = next(_numbers)
        run = jax.device_put(np.asarray(number, np.int32))
        # Inside a user's `jit` the number is traced. That program may run later, more
        # than once or never, and so has no number: `report` prints the exception there.
        k = k if isinstance(run, Tracer) else dataclasses.replace(k, run=run)
    try:
        yield k
    except Exception as error:
        if number in _raised:
            raise _raised.pop(number) from None
        # Python may handle Ctrl-C in JAX's own code around a callback. JAX then raises
        # another exception, of which only the text tells.
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise
    if number in _raised:
        raise _raised.pop(number)


def report(
    budget: Budget,
    rounds: Int[Array, ""],
    *,
    spent: Array,
    value: Array,
    std_err: Array,
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Call the budget's callback on the host with `spent`, `value` and `std_err`.

    Returns `rounds`, and whether the callback raised an exception, after which the run
    ends. `jax.pure_callback` lets the loop be differentiated in reverse mode on all
    versions of JAX. It runs because the program uses its results; that is why `rounds`
    goes through it."""
    callback = budget.rule.callback
    if callback is None:
        return rounds, jnp.zeros((), bool)

    def call(run, rounds, spent, value, std_err):
        number = None if run is None else int(run)
        # The members of a batch share a number. After an exception of one, the callback
        # is not called for the others.
        if number not in _raised:
            try:
                callback(spent, value, std_err)
            except BaseException as error:
                if number is not None:
                    _raised[number] = error
                elif isinstance(error, Exception):
                    traceback.print_exc()
                    return rounds, np.True_
                else:
                    raise
        return rounds, np.bool_(number in _raised)

    shapes = rounds, jax.ShapeDtypeStruct((), bool)
    return jax.pure_callback(
        call,
        shapes,
        budget.run,
        rounds,
        spent,
        value,
        std_err,
        vmap_method="sequential",
    )
