"""Traces of functions by a dense factorisation, from n products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate
from .._numerics.dense import determinant_sign, diagonal, eigh, svd, two_norm
from .._numerics.small_matrix import perturb_entries
from .._quadrature.domain import check_domain, slopes_at, subgradients_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.singular_functions import SingularLog
from .._run.execution import AbstractExecution
from .._run.gradient import attach
from .gradients import AbstractFunctionGradient


def exact_trace_of_function(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    """The sum of `function` over the eigenvalues of a square operator, or over the
    singular values of one with at least as many rows as columns."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    matrix = execution.matmat(operator.frozen, eye)
    if not operator.hermitian and not function.of_singular_values:
        return _of_general_matrix(operator, matrix, function, gradient, execution)
    tagged_wrongly = jnp.zeros((), bool)
    if function.of_singular_values:
        left, nodes, right = svd(matrix)
        noise, ends = 0.0, [-1, 0]
    else:
        skew = matrix - matrix.conj().T
        # In the second digit.
        tagged_wrongly = two_norm(skew) > 0.02 * two_norm(matrix)
        nodes, left = eigh((matrix + matrix.conj().T) / 2)
        right, ends = left.conj().T, [0, -1]
        noise = two_norm(skew) / (2**0.5 * operator.size)
    error = jnp.hypot(jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes)), noise)

    def at(nodes):
        return values_at(function, nodes, operator.eps)

    values, one_sided, bias = _near_zero(function, at, nodes, error)
    value, extremes = jnp.sum(values), nodes[jnp.array(ends)]
    slopes = slopes_at(function, nodes, operator.eps)
    in_domain = check_domain(function, operator, extremes, value)
    # Not defined where they leave the domain, or overflow.
    moved = at(nodes + error) - values
    moved = jnp.where(jnp.isfinite(moved) & ~one_sided, moved, 0)
    steep = jnp.where(one_sided, 0, slopes)
    change, lost = _rounding(nodes, values, steep, error, moved, bias)
    lost |= tagged_wrongly
    result = first_failure(in_domain, failure(lost, RESULTS.precision_lost))
    extra = entries_without_probes(function, value, extremes)
    if isinstance(function, SingularLog):
        extra["sign"] = determinant_sign(matrix)
    bounds = bounds_around(value, change)
    left = left * subgradients_at(function, nodes, operator.eps)
    left = jnp.matmul(left, right, precision="highest")
    frame = gradient.frame(function, left, eye, eye)
    value = attach(operator, value, frame, execution=execution)
    return Estimate(
        value=value,
        std_err=jnp.zeros_like(value),
        samples=value[None],
        num_matvecs=operator.size,
        rounding=0.0,
        result=result,
        extra=extra,
        bounds=bounds,
    )


def entries_without_probes(
    function: AbstractSpectralFunction,
    value: Real[Array, ""],
    extremes: Real[Array, "2"],
) -> dict[str, Array]:
    """`Estimate.extra` of an exact value, with the entries of a Krylov run that makes no
    steps and has one sample."""
    extra = {
        "ritz_values": extremes,
        "num_steps": jnp.zeros((), jnp.int32),
        "gradient_residual": jnp.zeros_like(value)[None],
    }
    if function.bracketed:
        bracket = jnp.stack([value, value])
        extra |= {"bracket": bracket, "sample_brackets": bracket[None]}
    return extra


def bounds_around(
    value: Real[Array, "*n"], change: Real[Array, "*n"]
) -> Real[Array, "2 2 *n"]:
    """`Estimate.bounds` of an exact value that rounding may `change` by so much."""
    zero = jnp.zeros_like(change)
    ends = jnp.stack([value - change, zero, value + change, zero])
    return ends.reshape(2, 2, *value.shape)


def _of_general_matrix(
    operator: FlatOperator,
    matrix: Inexact[Array, "n n"],
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    with jax.default_matmul_precision("highest"):
        of_matrix, slopes = function.of_matrix(matrix)
        again, _ = function.of_matrix(perturb_entries(matrix, operator.eps).T)
    terms = diagonal(of_matrix)
    value, change = jnp.sum(terms), jnp.abs(jnp.sum(diagonal(again) - terms))
    # Outside of the domain rounding may change anything.
    change = jnp.where(jnp.isfinite(change), change, jnp.inf)
    real_parts, _ = eigh((matrix + matrix.conj().T) / 2)
    extremes = real_parts[jnp.array([0, -1])]
    in_domain = check_domain(function, operator, extremes, value)
    # Terms may also cancel within each entry of the diagonal.
    floor = 32 * float(jnp.finfo(matrix.dtype).eps) * two_norm(of_matrix)
    size = 0.02 * jnp.sum(jnp.abs(terms)) + floor
    lost = change > size
    left, eye = slopes.conj().T, jnp.eye(operator.size, dtype=operator.dtype)
    frame = gradient.frame(function, left, eye, eye)
    extra = entries_without_probes(function, value.real, extremes)
    return Estimate(
        value=attach(operator, value, frame, execution=execution),
        std_err=jnp.zeros_like(value.real),
        samples=value[None],
        num_matvecs=operator.size,
        rounding=0.0,
        result=first_failure(in_domain, failure(lost, RESULTS.precision_lost)),
        extra=extra,
        bounds=bounds_around(value.real, change),
    )


def _near_zero(
    function: AbstractSpectralFunction,
    at: Callable[[Array], Array],
    nodes: Real[Array, " n"],
    error: Real[Array, ""],
) -> tuple[Real[Array, " n"], Bool[Array, " n"], Real[Array, ""]]:
    """The values of a function whose domain ends at zero; at which nodes, which cannot be
    told from zero, their errors have one sign; and by how much these change the sum.

    Of a function that goes on beyond zero, values at negative nodes are taken there.
    Errors then cancel, but for the curvature of the function. Elsewhere negative nodes
    count as zero, and all errors of zeros have one sign, as those of singular values."""
    values = at(nodes)
    if not function.semidefinite_domain or function.singular_at_zero:
        return values, jnp.zeros_like(nodes, bool), jnp.zeros_like(error)
    # Negative nodes show how large errors are.
    least = -jnp.min(nodes)
    width, error = jnp.maximum(8 * error, least), jnp.maximum(error, least)
    unseen, zeros = nodes <= width, jnp.zeros_like(nodes)
    rise = jnp.abs(jnp.stack([values - at(zeros), at(nodes + error) - values]))
    bias = jnp.sum(jnp.where(unseen, jnp.max(rise, axis=0), 0))
    if function.of_singular_values:
        return values, unseen, bias
    low, middle, high = function(jnp.stack([-width, zeros[0], width]))
    curved = jax.lax.stop_gradient(jnp.abs(low + high - 2 * middle) / 2)
    beyond = jnp.isfinite(curved)
    bias = jnp.where(beyond, jnp.sum(unseen) * curved, bias)
    within = beyond & (jnp.abs(nodes) <= width)
    # Not evaluated, nor differentiated, outside.
    inside = function(jnp.where(within, nodes, width))
    return jnp.where(within, inside, values), unseen & ~beyond, bias


def _rounding(
    nodes: Real[Array, " n"],
    values: Real[Array, " n"],
    slopes: Real[Array, " n"],
    error: Real[Array, ""],
    moved: Real[Array, " n"],
    bias: Real[Array, ""],
) -> tuple[Real[Array, ""], Bool[Array, ""]]:
    """By how much rounding changes the sum of `values`, and whether it changes the second
    digit.
    The matrix has errors E of size `error`, of its entries and of the factorisation. To
    first order they change `tr f(A)` by `tr(f'(A) E)`. Where f has a steep part of less
    than that size, they change values by as much as these have `moved` with the nodes.
    A `bias` does not average out."""
    change = two_norm(jnp.maximum(error * jnp.abs(slopes), jnp.abs(moved))) + bias
    size = jnp.sum(jnp.abs(values) + jnp.abs(nodes * slopes))
    change = change + jnp.finfo(nodes.dtype).eps * jnp.sum(jnp.abs(values))
    return change, jnp.isfinite(change) & (change > 0.02 * size)
