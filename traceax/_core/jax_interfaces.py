"""The interfaces of JAX that may change between its minor releases, in one place: the
types of traced code, registries of primitives, backends, the generator of random bits,
and the debug information of an equation.

"JAX versions" in the developer documentation says what each is needed for.
"""

import functools as ft
import inspect
import sys
from typing import Any

import jax
from jax.core import Tracer as Tracer
from jax.extend.backend import backends as backends
from jax.extend.core import (
    ClosedJaxpr as ClosedJaxpr,
    Jaxpr as Jaxpr,
    jaxpr_as_fun as jaxpr_as_fun,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    Primitive as Primitive,
)
from jax.extend.random import (
    define_prng_impl as define_prng_impl,
    threefry_prng_impl as threefry_prng_impl,
)
from jax.interpreters import batching as batching, mlir as mlir


def mesh_of(equation: JaxprEqn) -> jax.sharding.AbstractMesh:
    """The mesh that was set where an equation was traced, maybe an empty one."""
    return equation.ctx.cur_abstract_mesh


def has_derivative_rule(equation: JaxprEqn) -> bool:
    """Whether it calls a function with a derivative rule of its own, which is a Python
    function and no part of the traced code."""
    return equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def owner_of_rule(equation: JaxprEqn) -> tuple[Any, ...] | None:
    """The function of a module, such as `jax.nn.relu`, that such an equation calls, and
    its rules; `None` where another one could have the same code and other rules."""
    source = equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info
    owner = _function_at(source or "")
    if owner is None or getattr(owner, "nondiff_argnums", ()):
        return None
    return owner, *(getattr(owner, name, None) for name in ("jvp", "fwd", "bwd"))


@ft.lru_cache(maxsize=256)
def _function_at(source: str) -> Any:
    """The function with a derivative rule that a module defines under this name, in this
    line: `source` is "name at file:line". One that is defined inside of another function
    may be there several times, with other rules."""
    name, _, place = source.partition(" at ")
    file, _, line = place.rpartition(":")
    for module in tuple(sys.modules.values()):
        if getattr(module, "__file__", None) != file:
            continue
        owner = vars(module).get(name)
        if isinstance(owner, jax.custom_jvp | jax.custom_vjp):
            inner: Any = inspect.unwrap(owner)
            at_line = str(inner.__code__.co_firstlineno) == line
            if at_line and inner.__qualname__ == name:
                return owner
    return None
