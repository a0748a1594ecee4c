"""Confidence intervals.

For a sampling error e = q std_err, with the quantile q of `sampling_quantiles`, an
interval is [L - e, U + e]. L and U are `value`, or for functions of operators the bounds
in `stats`, which allow for the errors of quadrature and rounding; each has its own e.
"""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .jax_interfaces import Tracer
from .moments import sampling_quantiles


# Up to this confidence measurements support the estimate of the quadrature error in
# `stats["bounds"]`.
TESTED_CONFIDENCE = 0.95


def check_confidence(confidence: Any) -> Array:
    """Convert a probability to an array, or raise unless it is between 0 and 1."""
    fix = "Pass, for example, 0.95."
    if isinstance(confidence, Tracer):
        valid = (confidence > 0) & (confidence < 1)
        return eqx.error_if(confidence, ~valid, "`confidence` must be between 0 and 1.")
    if not eqx.is_array_like(confidence) or isinstance(confidence, bool | complex):
        raise TypeError(
            f"`confidence` must be a number between 0 and 1. Found {confidence!r} of "
            f"type {type(confidence).__name__}. {fix}"
        )
    rounded = np.asarray(confidence, jax.dtypes.canonicalize_dtype(float))
    if rounded.ndim != 0 or not 0 < rounded < 1:
        raise ValueError(
            f"`confidence` must be between 0 and 1. Found {confidence!r}, as {rounded}. "
            f"{fix}"
        )
    return jax.device_put(rounded)


@eqx.filter_jit
def interval_of(
    value: PyTree[Array],
    std_err: PyTree[Array],
    stats: dict[str, Any],
    confidence: Array,
    proven: bool | None,
) -> tuple[PyTree[Array], PyTree[Array]]:
    quantiles = sampling_quantiles(confidence, value, stats)
    use_proven = confidence > TESTED_CONFIDENCE if proven is None else jnp.asarray(proven)

    def endpoint(side, value, std_err, quantile, bounds=None):
        distance = 0
        if bounds is not None:
            bound, std_err = bounds[0] if side < 0 else bounds[1]
            # A bound on the other side of the value must not narrow the interval.
            distance = jnp.maximum(side * (bound - value.real), 0)
            distance = jnp.where(bound == value.real, 0, distance)  # inf - inf is NaN
        half = side * (distance + quantile.astype(std_err.dtype) * std_err)
        return value + (jax.lax.complex(half, half) if jnp.iscomplexobj(value) else half)

    trees = [value, std_err, quantiles]
    if "bounds" in stats:
        select = ft.partial(jnp.where, use_proven)
        trees.append(jax.tree.map(select, stats["proven_bounds"], stats["bounds"]))
    low, high = (jax.tree.map(ft.partial(endpoint, side), *trees) for side in (-1, 1))
    return low, high
