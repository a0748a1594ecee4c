"""The interfaces of JAX that may change between its minor releases, collected in one
module: the types of traced code, registries of primitives, backends, the generator of
random bits, and the debug information of an equation.

"JAX versions" in the developer documentation says why we need them.
"""

import inspect
import sys
from typing import Any

import jax
from jax.core import ShapedArray as ShapedArray, Tracer as Tracer
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
from jax.interpreters import ad as ad, batching as batching, mlir as mlir


# The largest number of objects that are searched for a rule, which lies at the end of a
# chain of closures, 16 deep in the JAX versions of today. The bound keeps a search short
# in a version that stores the rule elsewhere; the rule then counts as unknown.
_MAX_SEARCHED = 200


def mesh_of(equation: JaxprEqn) -> jax.sharding.AbstractMesh:
    """The mesh that was set when an equation was traced, possibly an empty one."""
    return equation.ctx.cur_abstract_mesh


def has_derivative_rule(equation: JaxprEqn) -> bool:
    """Whether an equation calls a function with its own derivative rule. Such a rule is a
    Python function, which the traced code does not contain."""
    return equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def owner_of_rule(equation: JaxprEqn) -> tuple[Any, ...] | None:
    """The function with a derivative rule that an equation calls, such as `jax.nn.relu`,
    and its rules. None if no module defines that function, since another function could
    then have the same code but other rules."""
    source = equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info
    owner = _function_at(source or "")
    # The rule depends on arguments in `nondiff_argnums`, which the traced code may lack.
    if owner is None or getattr(owner, "nondiff_argnums", ()):
        return None
    if isinstance(owner, jax.custom_jvp):
        rules = {"jvp_jaxpr_fun": owner.jvp}
    else:
        rules = {"fwd_jaxpr_thunk": owner.fwd, "bwd": owner.bwd}
    # The same Python function may have been wrapped a second time, with other rules.
    params = equation.params
    if not all(_contains(params[name], rule) for name, rule in rules.items()):
        return None
    return owner, *rules.values()


def _contains(wrapper: Any, rule: Any) -> bool:
    """Whether JAX's `wrapper` contains this rule: a breadth-first search through closures
    and through the attributes in which JAX's wrappers store functions."""
    visited, queue = set(), [wrapper]
    while queue and len(visited) < _MAX_SEARCHED:
        node = queue.pop(0)
        if node is rule:
            return True
        # By identity: the objects may have no hash, or compare as arrays.
        if id(node) not in visited:
            visited.add(id(node))
            cells = getattr(node, "__closure__", None) or ()
            queue += [cell.cell_contents for cell in cells]
            queue += [getattr(node, name, None) for name in ("f", "f_transformed")]
    return False


def _function_at(source: str) -> Any:
    """The function with a derivative rule that a module defines at `source`, which has
    the form "name at file:line"; None if there is none. Functions that are defined inside
    other functions do not count: several of them, with different rules, may have the same
    source."""
    name, _, place = source.partition(" at ")
    file, _, line = place.rpartition(":")
    # A copy, since another thread may import a module during the loop.
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
