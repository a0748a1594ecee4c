"""Checks of the arguments of calls, made before anything is traced. Errors name the
argument, the value found and the fix."""

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


# Longer representations, such as those of arrays, would bury the message.
_LONGEST_REPR = 80


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    """Raise a `TypeError` unless `value` is an instance of the public class `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"`{name}` must be an instance of `traceax.{kind.__name__}`. Found "
            f"{describe(value)}. Pass, for example, `traceax.{example}`."
        )


def describe(value: Any) -> str:
    """A short description of a wrong argument, for error messages."""
    # Passing a class where an instance is needed is a common mistake, which its `repr`
    # would hardly show.
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    if len(text) > _LONGEST_REPR or "\n" in text:
        return f"an object of type {kind}"
    return text if kind in text else f"{text} of type {kind}"


def plain_integer(value: Any) -> Any:
    """Convert an integer of any kind to a Python integer; return other values as they
    are."""
    # True and False have an `__index__`, but are a mistake where a number is meant.
    if isinstance(value, bool | Tracer) or not hasattr(value, "__index__"):
        return value
    try:
        return _builtin.index(value)
    except TypeError:  # for arrays that have several entries, or no integer dtype
        return value


def check_positive(name: str, value: Any) -> int:
    """Convert a number on which array shapes depend to a Python integer, or raise unless
    it is an integer of 1 or more."""
    refuse_traced(name, value)
    number = plain_integer(value)
    if type(number) is not int:
        fix = ""
        if isinstance(value, numbers.Real):
            fix = f" Round it, for example `int({value!r})`."
        raise TypeError(f"`{name}` must be an integer. Found {describe(value)}.{fix}")
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1. Found {number}.")
    return number


# The public class that chooses a number at run time, by the name of the argument.
_CHOSEN_BY = {"k": "Adaptive", "num_steps": "AdaptiveSteps", "rank": "AutoPreconditioner"}


def refuse_traced(name: str, value: Any) -> None:
    """Raise if an integer on which array shapes depend is traced."""
    if not isinstance(value, Tracer):
        return
    choice = f" To have it chosen automatically, see `traceax.{_CHOSEN_BY.get(name)}`."
    raise TypeError(
        f"`{name}` must be a Python integer, because array shapes depend on it. Found a "
        f"traced value, {value}. Mark it static: `jax.jit(f, static_argnames='{name}')`, "
        "or use `equinox.filter_jit`, which does so for Python integers."
        f"{choice if name in _CHOSEN_BY else ''}"
    )


def check_scalar(name: str, value: Any, *, real: bool = True) -> None:
    """Raise unless `value` is a number or an array of shape `()`, which may be traced."""
    is_scalar = eqx.is_array_like(value) and not jnp.shape(value)
    if not is_scalar or (real and jnp.iscomplexobj(value)):
        raise TypeError(
            f"`{name}` must be a {'real ' if real else ''}number or array of shape (). "
            f"Found {value!r}. For several values use `jax.vmap`."
        )
    if isinstance(value, float | complex) and value != value:  # NaN
        raise ValueError(f"`{name}` must be a number. Found {value!r}.")


def check_scalar_function(name: str, fn: Any, x: Any, *, real: bool = True) -> None:
    """Raise unless `fn` maps the point `x` to a real scalar, or if not `real` to a real
    or complex one."""
    if not callable(fn):
        raise TypeError(
            f"`{name}` must be a function. Found an object of type {type(fn).__name__}. "
            "The point comes after it."
        )
    out = eqx.filter_eval_shape(fn, x)
    kind = jnp.floating if real else jnp.inexact
    if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, kind):
        fix = "Reduce it, for example with `jnp.sum` or `jnp.mean`."
        if getattr(out, "shape", None) == ():
            fix = _how_to_be_real(name, out.dtype, x)
        elif not any(map(eqx.is_array, jax.tree.leaves(x))):
            fix = "Pass an array as the point: a Python number is a constant."
        raise TypeError(
            f"`{name}` must return a {'real ' if real else ''}floating-point scalar, of "
            f"shape (). Found {out}. {fix}"
        )


def _how_to_be_real(name: str, dtype: Any, x: Any) -> str:
    """The fix for a scalar function whose result has a wrong dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (
            "Differentiate its real and its imaginary part separately, for example "
            f"`{name}(x).real`."
        )
    if any(map(eqx.is_inexact_array, jax.tree.leaves(x))):
        return "It must not be rounded, counted or compared, which has no derivative."
    return "Pass floating-point numbers, for example `x.astype(float)`."


def real_scalar(name: str, value: Any) -> Real[Array, ""]:
    """Convert a real number or scalar array, which may be traced, to an array."""
    check_scalar(name, value)
    if isinstance(value, jax.Array):
        return jnp.asarray(value, float)
    # Under `jax.transfer_guard("disallow")` an implicit transfer would be an error.
    return jax.device_put(np.asarray(value, jax.dtypes.canonicalize_dtype(float)))


def concrete_number(value: Any) -> float | None:
    """Convert a real scalar to a Python number; None if it is traced."""
    return None if isinstance(value, Tracer) else float(jax.device_get(value))


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is a Python boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Found {value!r}.")


def check_point(x: Any) -> None:
    """Raise unless `x` is a PyTree of real floating-point arrays."""
    leaves = jax.tree.leaves(x)
    dtypes = [jnp.result_type(leaf) for leaf in leaves if eqx.is_array_like(leaf)]
    real = [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]
    if not leaves or len(dtypes) < len(leaves) or not all(real):
        kinds = [
            str(jnp.result_type(leaf)) if eqx.is_array_like(leaf) else type(leaf).__name__
            for leaf in leaves
        ]
        raise TypeError(
            "`x` must be an array, or a PyTree of arrays, of real floating-point "
            f"numbers. Found leaves of {kinds}. Convert integers, for example by "
            "`x.astype(float)`, and close over everything that is a constant."
        )


def check_window(window: Any) -> int | None:
    """Convert the number of basis vectors for reorthogonalisation to a Python integer, or
    raise unless it is None or an integer of 0 or more."""
    number = plain_integer(window)
    if number is not None and (type(number) is not int or number < 0):
        raise ValueError(
            "`window` must be a Python integer, 0 or more, or None for all basis "
            f"vectors. Found {window!r}."
        )
    return number


def check_key(key: Any) -> None:
    """Raise unless `key` is one PRNG key, or None, which estimators without probes
    accept."""
    if key is None or is_key(key):
        return
    shape = f" of shape {key.shape}" if eqx.is_array(key) else ""
    raise TypeError(
        "`key` must be one JAX PRNG key. Found an object of type "
        f"{type(key).__name__}{shape}. Pass, for example, `jax.random.key(0)`; for "
        "several keys use `jax.vmap`."
    )


@contextlib.contextmanager
def explain_index_overflow() -> Iterator[None]:
    """A context for code that indexes long vectors. JAX raises an `OverflowError` where
    an index does not fit into 32 bits; this context turns it into an error that says
    what to do."""
    try:
        yield
    except OverflowError as error:
        raise ValueError(
            "Operators of more than 2^31 - 1 rows need integers of 64 bits: "
            "`jax.config.update('jax_enable_x64', True)`. Arrays in float32 stay in it. "
            f"JAX says: {error}"
        ) from error


def is_key(x: Any) -> bool:
    """Whether `x` is one PRNG key, either typed or an array of `jax.random.PRNGKey`."""
    if not eqx.is_array(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    impl = jax.config.jax_default_prng_impl  # pyright: ignore
    return x.dtype == jnp.uint32 and x.shape == _key_data_shape(impl)


@ft.cache
def _key_data_shape(impl: str) -> tuple[int, ...]:
    """The shape of the array of words that one key of this generator consists of."""
    key_data = lambda: jax.random.key_data(jax.random.key(0, impl=impl))  # noqa: E731
    return jax.eval_shape(key_data).shape
