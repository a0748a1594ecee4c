"""How far rounding moves a quadratic form."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Real

from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .domain import values_at
from .functions import AbstractSpectralFunction
from .rules import finite


def moved_by(
    error: Real[Array, ""],
    function: AbstractSpectralFunction,
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    eps: float,
) -> tuple[Real[Array, " s"], Real[Array, " s"]]:
    """How far a function with these `values` rises if the nodes grow by `error`, and how
    far it falls if they shrink by it, singular values to zero at most."""
    less = nodes - error
    less = jnp.maximum(less, 0) if function.of_singular_values else less
    up = values_at(function, nodes + error, eps) - values
    return up, values - values_at(function, less, eps)


def unresolved_of(
    function: AbstractSpectralFunction,
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    eps: float,
    factor: Real[Array, ""] | float = 1.0,
) -> Real[Array, ""] | float:
    """By how much a rule, multiplied by a `factor`, may be off because of rounding errors
    of its nodes, which are relative to the largest of them: much where the function is
    steep. `QuadraticForm.rounding` is a sample of those of products.

    - Singular values move by `eps` times the largest (Weyl's inequality). Changes of
      first order, of the sum of which that is a sample, cancel, but for those that are
      smaller, which a run takes for zero.
    - A function without a bracket may be steep anywhere, where errors of the
      factorisation count too.
    - One with a bracket is steep near zero: nodes there that cannot be told from zero may
      all be zero, or none; negative ones show how large these may be. If it is not
      defined at zero, they end the run."""
    largest = jnp.max(jnp.abs(nodes))
    if function.of_singular_values:
        up, down = moved_by(eps * largest, function, nodes, values, eps)
        change = jnp.maximum(jnp.abs(up), jnp.abs(down))
        change = jnp.where(nodes > eps * largest, jnp.abs(up - down) / 2, change)
    elif not function.bracketed:
        error = 8 * jnp.finfo(nodes.dtype).eps * largest
        moved = jnp.stack(moved_by(error, function, nodes, values, eps))
        change = jnp.max(jnp.abs(moved), axis=0)
    elif function.singular_at_zero:
        return 0.0
    else:
        small = jnp.maximum(eps / 8 * largest, -jnp.min(nodes))
        ends = jnp.zeros_like(nodes), jnp.maximum(nodes, small)
        moved = jnp.stack([values_at(function, end, eps) - values for end in ends])
        hidden = nodes <= jnp.maximum(eps * largest, small)
        change = jnp.where(hidden, jnp.max(jnp.abs(moved), axis=0), 0)
    change = jnp.where((weights > 0) & ~jnp.isnan(change), change, 0)
    return factor * finite(jnp.sum(weights * change), factor)


def check_precision(
    operator: FlatOperator,
    std_err: Real[Array, ""],
    width: Real[Array, ""],
    rounding: Real[Array, ""],
    unresolved: Real[Array, ""],
    magnitude: Real[Array, ""],
) -> Any:
    """Whether rounding errors of the products are a large part of the error that is
    reported. `rounding`, `unresolved` and `magnitude` are those of the quadratic forms in
    the mean, `std_err` is that of sampling, and `width` that of the interval that
    quadrature leaves.

    What is `unresolved` is part of the reported error, up to the second digit of the
    value, and so is what is smaller. Where all of these are below the rounding floor of
    the standard error, up to twice that floor are as expected."""
    floor, half = operator.rounding * magnitude, (std_err + width) / 2
    large = jnp.maximum(jnp.maximum(half, unresolved), 2 * floor)
    hidden = jnp.maximum(half, 0.02 * magnitude)
    lost = (rounding > large) | (unresolved > hidden)
    return failure(lost, RESULTS.precision_lost)
