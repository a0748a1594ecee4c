"""Traces of functions by a dense factorisation, from n products."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Real

from .._execution import AbstractExecution
from .._flat import FlatOperator
from .._gradient import AbstractFrame, attach
from .._kernel.dense import eigh, svd
from .._solution import Estimate, failure, first_failure, RESULTS
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .quadratic_form import check_domain, singular_slopes_at, slopes_at, values_at


def exact_trace_of_function(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    """The sum of `function` over the eigenvalues of a Hermitian operator."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    matrix = execution.matmat(operator.frozen, eye)
    nodes, vectors = eigh((matrix + matrix.conj().T) / 2)
    values = values_at(function, nodes, operator.eps)
    value = jnp.sum(values)
    slopes = slopes_at(function, nodes, operator.eps)
    left = jnp.matmul(vectors * slopes, vectors.conj().T, precision="highest")
    extremes = nodes[jnp.array([0, -1])]
    in_domain = check_domain(function, operator, extremes, value)
    skew = jnp.linalg.norm(matrix - matrix.conj().T) / (2**0.5 * operator.size)
    result = first_failure(in_domain, _check_precision(nodes, values, slopes, skew))
    extra = {"ritz_values": extremes}
    if function.bracketed:
        extra["bracket"] = jnp.stack([value, value])
    frame = gradient.frame(function, left, eye)
    return _package(operator, value, frame, execution, result, extra)


def exact_over_singular_values(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    """The sum of `function` over the singular values of an operator with at least as many
    rows as columns."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    u, s, vh = svd(execution.matmat(operator.frozen, eye))
    values = values_at(function, s, operator.eps)
    value = jnp.sum(values)
    left = u * singular_slopes_at(function, s, operator.eps)
    left = jnp.matmul(left, vh, precision="highest")
    extremes = s[jnp.array([-1, 0])]
    singular = RESULTS.zero_determinant
    in_domain = check_domain(function, operator, extremes, value, singular)
    slopes = slopes_at(function, s, operator.eps)
    result = first_failure(in_domain, _check_precision(s, values, slopes, 0.0))
    extra = {"ritz_values": extremes}
    if function.bracketed:
        extra["bracket"] = jnp.stack([value, value])
    frame = gradient.frame(function, left, eye, hermitian=False)
    return _package(operator, value, frame, execution, result, extra)


def _check_precision(
    nodes: Real[Array, " n"],
    values: Real[Array, " n"],
    slopes: Real[Array, " n"],
    noise: Real[Array, ""] | float,
) -> Any:
    """Whether rounding changes the sum of `values` in its second digit. Entries of the
    matrix have errors of size `noise`, and the factorisation has its own; to first order
    such an E changes `tr f(A)` by `tr(f'(A) E)`."""
    factorisation = jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes))
    change = jnp.hypot(factorisation, noise) * jnp.linalg.norm(slopes)
    size = jnp.sum(jnp.abs(values) + jnp.abs(nodes * slopes))
    lost = jnp.isfinite(change) & (change > 0.02 * size)
    return failure(lost, RESULTS.precision_lost)


def _package(
    operator: FlatOperator,
    value: Any,
    frame: AbstractFrame,
    execution: AbstractExecution,
    result: Any,
    extra: dict[str, Any],
) -> Estimate:
    value = attach(operator, value, frame, execution=execution)
    return Estimate(
        value=value,
        std_err=jnp.zeros_like(value),
        samples=value[None],
        num_matvecs=operator.size,
        rounding=0.0,
        result=result,
        extra=extra,
    )
