"""Values that have no derivative, known only at run time: it becomes NaN.

A factor of NaN would do so too for whoever does not use the value, since reverse mode
multiplies it by a cotangent of zero. So the tangent passes through a primitive, linear
but for this, which leaves zeros as they are in either mode.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import ad, batching, mlir, Primitive, ShapedArray


@jax.custom_jvp
def undifferentiable(value: Real[Array, "*q"], where: Bool[Array, "*q"]) -> Array:
    """`value`, with a derivative of NaN `where` this is true."""
    return value


@undifferentiable.defjvp
def _rule(primals, tangents) -> Any:
    value, where = primals
    return undifferentiable(value, where), _spoil.bind(tangents[0], where)


_spoil = Primitive("spoil")


@jax.jit
def _evaluate(tangent, where):
    with standard_promotion():
        return jnp.where(where & (tangent != 0), jnp.nan, tangent)


def _batch(arrays, axes):
    sizes = [x.shape[d] for x, d in zip(arrays, axes, strict=True) if d is not None]
    arrays = map(batching.bdim_at_front, arrays, axes, [sizes[0]] * len(axes))
    return _spoil.bind(*arrays), 0


def _jvp(primals, tangents):
    tangent, where = primals
    change = tangents[0]
    if not isinstance(change, ad.Zero):
        change = _spoil.bind(change, where)
    return _spoil.bind(tangent, where), change


def _transpose(cotangent, _, where):
    if not isinstance(cotangent, ad.Zero):
        cotangent = _spoil.bind(cotangent, where)
    return [cotangent, None]


_spoil.def_impl(_evaluate)
_spoil.def_abstract_eval(lambda tangent, _: ShapedArray(tangent.shape, tangent.dtype))
batching.primitive_batchers[_spoil] = _batch
ad.primitive_jvps[_spoil] = _jvp
ad.primitive_transposes[_spoil] = _transpose
mlir.register_lowering(_spoil, mlir.lower_fun(_evaluate, multiple_results=False))
