"""What calls check of their arguments before anything is traced."""

import contextlib
import functools as ft
import numbers
import operator as _builtin
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Real

from .jax_interfaces import Tracer


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"`{name}` must be an instance of `traceax.{kind.__name__}`. Found "
            f"{described(value)}. Pass, for example, `traceax.{example}`."
        )


def described(value: Any) -> str:
    """What was found, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    if len(text) > 80 or "\n" in text:
        return f"an object of type {kind}"
    return text if kind in text else f"{text} of type {kind}"


def plain_integer(value: Any) -> Any:
    """An integer of any kind as a Python integer; anything else unchanged."""
    if isinstance(value, bool | Tracer) or not hasattr(value, "__index__"):
        return value
    try:
        return _builtin.index(value)
    except TypeError:  # of an array that is not an integer, or several
        return value


def check_positive(name: str, value: Any) -> int:
    """A Python integer, 1 or more, on which array shapes depend."""
    refuse_traced(name, value)
    number = plain_integer(value)
    if type(number) is not int:
        found, fix = described(value), ""
        if isinstance(value, numbers.Real):
            fix = f" Round it, for example `int({value!r})`."
        raise TypeError(f"`{name}` must be an integer. Found {found}.{fix}")
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1. Found {number}.")
    return number


_CHOSEN_BY = {"k": "Adaptive", "num_steps": "AdaptiveSteps", "rank": "AutoPreconditioner"}


def refuse_traced(name: str, value: Any) -> None:
    """Raise if an integer on which array shapes depend is traced."""
    if not isinstance(value, Tracer):
        return
    choice = f" To have the data choose, see `traceax.{_CHOSEN_BY.get(name)}`."
    raise TypeError(
        f"`{name}` must be a Python integer, because array shapes depend on it. Found a "
        f"traced value, {value}. Mark it static: `jax.jit(f, static_argnames='{name}')`, "
        "or use `equinox.filter_jit`, which does so for Python integers."
        f"{choice if name in _CHOSEN_BY else ''}"
    )


def check_scalar(name: str, value: Any, *, real: bool = True) -> None:
    fits = eqx.is_array_like(value) and not jnp.shape(value)
    if not fits or (real and jnp.iscomplexobj(value)):
        raise TypeError(
            f"`{name}` must be a {'real ' if real else ''}number or array of shape (). "
            f"Found {value!r}. For several of them use `jax.vmap`."
        )
    if isinstance(value, float | complex) and value != value:
        raise ValueError(f"`{name}` must be a number. Found {value!r}.")


def check_scalar_function(name: str, fn: Any, x: Any) -> None:
    """Raise unless `fn` maps the point `x` to a real scalar."""
    if not callable(fn):
        raise TypeError(
            f"`{name}` must be a function. Found an object of type {type(fn).__name__}. "
            "The point comes after it."
        )
    out = eqx.filter_eval_shape(fn, x)
    if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
        fix = "Reduce it, for example with `jnp.sum` or `jnp.mean`."
        if getattr(out, "shape", None) == ():
            fix = _how_to_be_real(name, out.dtype, x)
        elif not any(map(eqx.is_array, jax.tree.leaves(x))):
            fix = "Pass an array as the point: a number of Python is a constant."
        raise TypeError(
            f"`{name}` must return a real floating-point scalar, of shape (). Found "
            f"{out}. {fix}"
        )


def _how_to_be_real(name: str, dtype: Any, x: Any) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return f"Take its real and its imaginary part one by one, `{name}(x).real`."
    if any(map(eqx.is_inexact_array, jax.tree.leaves(x))):
        return "It must not be rounded, counted or compared, which has no derivative."
    return "Pass floating-point numbers, for example `x.astype(float)`."


def real_scalar(name: str, value: Any) -> Real[Array, ""]:
    """A real number or scalar array, which may be traced, as an array. Numbers are sent
    to the device explicitly, as some users ask for."""
    check_scalar(name, value)
    if isinstance(value, jax.Array):
        return jnp.asarray(value, float)
    return jax.device_put(np.asarray(value, jax.dtypes.canonicalize_dtype(float)))


def known_number(value: Any) -> float | None:
    """A real scalar as a number, unless it is traced."""
    return None if isinstance(value, Tracer) else float(jax.device_get(value))


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Found {value!r}.")


def check_point(x: Any) -> None:
    """Raise unless `x` is a PyTree of real floating-point arrays."""
    leaves = jax.tree.leaves(x)
    dtypes = [jnp.result_type(leaf) for leaf in leaves if eqx.is_array_like(leaf)]
    real = [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]
    if not leaves or len(dtypes) < len(leaves) or not all(real):
        found = [
            str(jnp.result_type(leaf)) if eqx.is_array_like(leaf) else type(leaf).__name__
            for leaf in leaves
        ]
        raise TypeError(
            "`x` must be an array, or a PyTree of arrays, of real floating-point "
            f"numbers. Found leaves of {found}. Convert integers, for example by "
            "`x.astype(float)`, and close over what is not to be differentiated."
        )


def check_window(window: Any) -> int | None:
    number = plain_integer(window)
    if number is not None and (type(number) is not int or number < 0):
        raise ValueError(
            "`window` must be a Python integer, 0 or more, or None for all basis "
            f"vectors. Found {window!r}."
        )
    return number


def check_key(key: Any) -> None:
    if key is None or is_key(key):
        return
    shape = f" of shape {key.shape}" if eqx.is_array(key) else ""
    raise TypeError(
        "`key` must be one JAX PRNG key. Found an object of type "
        f"{type(key).__name__}{shape}. Pass, for example, `jax.random.key(0)`; for "
        "several keys use `jax.vmap`."
    )


@contextlib.contextmanager
def needing_wide_integers() -> Iterator[None]:
    """For what indexes long vectors, with an error that says what to do where an index
    does not fit into 32 bits."""
    try:
        yield
    except OverflowError as error:
        raise ValueError(
            "Operators of more than 2^31 - 1 rows need integers of 64 bits: "
            "`jax.config.update('jax_enable_x64', True)`. Arrays in float32 stay in it. "
            f"JAX says: {error}"
        ) from error


def is_key(x: Any) -> bool:
    if not eqx.is_array(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    impl = jax.config.jax_default_prng_impl  # pyright: ignore
    words = _words_of_key(impl)
    return x.dtype == jnp.uint32 and x.shape == words


@ft.cache
def _words_of_key(impl: str) -> tuple[int, ...]:
    """The shape of the data of one key, of either kind."""
    key_data = lambda: jax.random.key_data(jax.random.key(0, impl=impl))  # noqa: E731
    return jax.eval_shape(key_data).shape
