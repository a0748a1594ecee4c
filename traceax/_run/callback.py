"""The callback of an adaptive budget, and what becomes of its exceptions."""

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


# What callbacks have raised, by the numbers of their runs, which are not used again.
_raised: dict[int, BaseException] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def raising_for_callbacks(k: Any) -> Iterator[Any]:
    """The budget of a run that ends after the round in which its callback raises an
    exception. The block that makes the run raises it then."""
    number = None
    if isinstance(k, Budget) and k.rule.callback is not None:
        number = next(_numbers)
        run = jax.device_put(np.asarray(number, np.int32))
        # Where it is traced, the run comes later, if at all.
        k = k if isinstance(run, Tracer) else dataclasses.replace(k, run=run)
    try:
        yield k
    except Exception as error:
        if number in _raised:
            raise _raised.pop(number) from None
        # Python handles Ctrl-C in JAX's part of a callback, and JAX makes text of it.
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise
    if number in _raised:
        raise _raised.pop(number)


def report(
    budget: Budget, rounds: Int[Array, ""], *news: Array
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """`rounds`, after `callback(*news)` was called on the host, and whether that raised
    an exception, after which the run ends. To raise it inside of the program would, on
    one of several devices, leave the others waiting for it. A pure callback, for which
    the loop has reverse mode on any JAX; it is made because its results are used."""
    callback = budget.rule.callback
    if callback is None:
        return rounds, jnp.zeros((), bool)

    def call(run, rounds, *news):
        number = None if run is None else int(run)
        if number not in _raised:
            try:
                callback(*news)
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
    arguments = budget.run, rounds, *news
    return jax.pure_callback(call, shapes, *arguments, vmap_method="sequential")
