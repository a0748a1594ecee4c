"""The count of programs of each line."""

import gc
import weakref

import jax.numpy as jnp

from traceax._run.programs import programs


def test_functions_among_the_settings_are_not_kept():
    def operator_of(size):
        return size

    programs.note("trace", (operator_of, jnp.ones(3)))
    gone = weakref.ref(operator_of)
    del operator_of
    gc.collect()
    assert gone() is None
