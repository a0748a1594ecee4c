"""What calls check of their arguments before anything is traced."""

import functools as ft
import numbers
import operator as _builtin
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Real

from ._flat import check_spaces, check_square, is_complex, is_hermitian


_P = ParamSpec("_P")
_T = TypeVar("_T")


def operator_first(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """`fn`, with an error that explains our order of arguments to callers who use another
    one, as in `trace(key, operator, k, estimator)`."""

    @ft.wraps(fn)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 2 or (args and _is_key(args[0])):
            found = ", ".join(type(each).__name__ for each in args)
            raise TypeError(
                f"`traceax.{fn.__name__}` takes the operator first and all but the "
                f"estimator by name. Found positional arguments of the types {found}. "
                f"Call `traceax.{fn.__name__}(operator, estimator, k=k, key=key)`."
            )
        return fn(*args, **kwargs)

    return checked


def check_is_operator(
    operator: Any, *, name: str = "operator", square: bool = True
) -> None:
    if isinstance(operator, lx.AbstractLinearOperator):
        return check_square(operator, name) if square else check_spaces(operator, name)
    if eqx.is_array_like(operator):
        fix = "Wrap a matrix as `lineax.MatrixLinearOperator(matrix)`."
    elif callable(operator):
        fix = (
            "Wrap a function `v -> A v` as `lineax.FunctionLinearOperator(function, "
            "jax.ShapeDtypeStruct((n,), dtype))`."
        )
    elif isinstance(operator, list | tuple):
        fix = "Wrap a matrix as `lineax.MatrixLinearOperator(jnp.asarray(matrix))`."
    else:
        fix = (
            "Wrap its product as `lineax.FunctionLinearOperator(function, "
            "jax.ShapeDtypeStruct((n,), dtype))`, by a callback if JAX cannot trace it."
        )
    raise TypeError(
        f"`{name}` must be a `lineax.AbstractLinearOperator`. Found an object of type "
        f"{type(operator).__name__}. {fix}"
    )


def check_hermitian(operator: lx.AbstractLinearOperator) -> None:
    """Raise unless the operator is Hermitian, and says so."""
    if is_hermitian(operator):
        return
    tag = "traceax.hermitian_tag" if is_complex(operator) else "lineax.symmetric_tag"
    raise ValueError(
        "`operator` must be Hermitian, and say so by a tag. Found `operator` of type "
        f"{type(operator).__name__} without one. If it is, wrap it: "
        f"`lineax.TaggedLinearOperator(operator, {tag})`, or "
        "`lineax.positive_semidefinite_tag` where that holds."
    )


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
            fix = "Pass floating-point numbers, for example `x.astype(float)`."
        elif not any(map(eqx.is_array, jax.tree.leaves(x))):
            fix = "Pass an array as the point: a number of Python is a constant."
        raise TypeError(
            f"`{name}` must return a real floating-point scalar, of shape (). Found "
            f"{out}. {fix}"
        )


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
    if key is None or _is_key(key):
        return
    shape = f" of shape {key.shape}" if eqx.is_array(key) else ""
    raise TypeError(
        "`key` must be one JAX PRNG key. Found an object of type "
        f"{type(key).__name__}{shape}. Pass, for example, `jax.random.key(0)`; for "
        "several keys use `jax.vmap`."
    )


def _is_key(x: Any) -> bool:
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
