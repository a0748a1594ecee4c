"""Exact traces of functions by a dense factorisation, from n matvecs.

    tr f(A) = sum_i f(lambda_i),    d tr f(A) = tr(f'(A) dA)

for a Hermitian A with the eigenvalues lambda_i, or with singular values in their place;
the derivative is a frame with `L = f'(A)` and `R = I`. A general A takes
`AbstractSpectralFunction.of_matrix`. In the code `nodes` are the lambda_i, and `values`
and `slopes` are f and f' at the nodes.

The value is exact up to rounding. The computed factorisation is one of A + E, and to
first order E changes the trace by `tr(f'(A) E)`. See docs/devdocs/quadrature.md, "Where a
function is steep".
"""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
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
from .action import first_order_only
from .gradients import AbstractFunctionGradient


# A relative error from which the second digit of a result is wrong. Such results are
# flagged, here as in estimates.
SECOND_DIGIT = 0.02
# Eigenvalues up to this many times the rounding error may be zero. Zero eigenvalues of
# singular matrices of small integers came out at up to 2.8 machine epsilons times the
# largest (docs/devdocs/quadrature.md, "The end point by default").
_WIDTH_OF_ZERO = 8
# How many machine epsilons f(A) may be off where it is computed from eigenvectors. A
# larger factor flags more traces whose terms cancel, a smaller one misses some.
_ERROR_OF_FUNCTION = 32


def exact_trace_of_function(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    """The sum of `function` over the eigenvalues of a square operator, or over the
    singular values of an operator with at least as many rows as columns. n matvecs,
    O(n^3) operations, and O(n^2) memory."""
    return exact_traces(operator, (function,), gradient, execution)[0]


def exact_traces(
    operator: FlatOperator,
    functions: Sequence[AbstractSpectralFunction],
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> list[Estimate]:
    """As `exact_trace_of_function`, for several functions of eigenvalues or several of
    singular values, from the same matvecs and the same factorisation."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    matrix = execution.matmat(operator.frozen, eye)
    of_singular_values = functions[0].of_singular_values
    if not operator.hermitian and not of_singular_values:
        return [
            _of_general_matrix(operator, matrix, function, gradient, execution)
            for function in functions
        ]
    factors = _factorise(operator, matrix, of_singular_values=of_singular_values)
    return [
        _of_factors(operator, matrix, factors, function, gradient, execution)
        for function in functions
    ]


class _Factors(eqx.Module):
    """`A = U diag(nodes) V*`.

    - `left`, `right`: U and V*.
    - `extremes`: the smallest and the largest node.
    - `error`: the size of errors of nodes.
    - `tagged_wrongly`: whether the operator is not Hermitian but was tagged so.
    """

    left: Inexact[Array, "m n"]
    nodes: Real[Array, " n"]
    right: Inexact[Array, "n n"]
    extremes: Real[Array, "2"]
    error: Real[Array, ""]
    tagged_wrongly: Bool[Array, ""]


def _factorise(
    operator: FlatOperator, matrix: Inexact[Array, "m n"], *, of_singular_values: bool
) -> _Factors:
    tagged_wrongly = jnp.zeros((), bool)
    if of_singular_values:
        left, nodes, right = svd(matrix)
        noise, ends = 0.0, [-1, 0]  # descending
    else:
        # The skew part of a Hermitian A is rounding. If it is more, the tag is wrong.
        skew = matrix - matrix.conj().T
        tagged_wrongly = two_norm(skew) > SECOND_DIGIT * two_norm(matrix)
        nodes, left = eigh((matrix + matrix.conj().T) / 2)
        right, ends = left.conj().T, [0, -1]
        # The size of an entry of E, as ||E - E*||_F is about 2^(1/2) ||E||_F.
        noise = two_norm(skew) / (2**0.5 * operator.size)
    eps = max(float(jnp.finfo(nodes.dtype).eps), operator.error)
    error = jnp.hypot(eps * jnp.max(jnp.abs(nodes)), noise)
    extremes = nodes[jnp.array(ends)]
    return _Factors(left, nodes, right, extremes, error, tagged_wrongly)


def _of_factors(
    operator: FlatOperator,
    matrix: Inexact[Array, "m n"],
    factors: _Factors,
    function: AbstractSpectralFunction,
    gradient: AbstractFunctionGradient,
    execution: AbstractExecution,
) -> Estimate:
    """The trace of a function of a factorised operator."""
    nodes = factors.nodes
    estimate = _sum_over(operator, function, nodes, factors.extremes, factors.error)
    lost = failure(factors.tagged_wrongly, RESULTS.precision_lost)
    if isinstance(function, SingularLog):
        estimate.extra["sign"] = determinant_sign(matrix)
    # L = f'(A)*, or U f'(S) V* for functions of singular values.
    left = factors.left * subgradients_at(function, nodes, operator.eps).conj()
    left = jnp.matmul(left, factors.right, precision="highest")
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    frame = gradient.frame(function, left, eye, eye)
    value = attach(operator, estimate.value, frame, execution=execution)
    result = first_failure(estimate.result, lost)
    return dataclasses.replace(estimate, value=value, samples=value[None], result=result)


def trace_from_eigenvalues(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    eigenvalues: Real[Array, " n"],
) -> Estimate:
    """The sum of `function` over the known eigenvalues of a Hermitian operator, or over
    their moduli, its singular values, without a matvec. It has a derivative of first
    order in the eigenvalues."""
    frozen = jax.lax.stop_gradient(eigenvalues)
    nodes = jnp.abs(frozen) if function.of_singular_values else frozen
    ends = jnp.stack([jnp.min(nodes), jnp.max(nodes)])
    error = jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes))
    estimate = _sum_over(operator, function, nodes, ends, error)
    signs = jnp.sign(frozen)
    if isinstance(function, SingularLog):
        estimate.extra["sign"] = jnp.prod(signs)
    slopes = subgradients_at(function, nodes, operator.eps)
    slopes = jnp.where(function.of_singular_values, signs, 1) * slopes
    value = with_slopes(estimate.value, slopes, eigenvalues)
    return dataclasses.replace(estimate, value=value, samples=value[None], num_matvecs=0)


def with_slopes(
    value: Inexact[Array, ""],
    slopes: Inexact[Array, " n"],
    eigenvalues: Real[Array, " n"],
) -> Inexact[Array, ""]:
    """The value, with the derivatives `slopes` in the eigenvalues, of first order."""
    return value + _zero_with_slopes(slopes, eigenvalues)


@eqx.filter_custom_jvp
def _zero_with_slopes(slopes, eigenvalues):
    return jnp.zeros((), slopes.dtype)


@_zero_with_slopes.def_jvp
def _zero_with_slopes_rule(primals, tangents):
    zero, change = _zero_with_slopes(*primals), tangents[1]
    if change is None:
        return zero, None
    slopes, _ = first_order_only(primals)
    return zero, jnp.sum(slopes * change)


def _sum_over(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    nodes: Real[Array, " n"],
    extremes: Real[Array, "2"],
    error: Real[Array, ""],
) -> Estimate:
    """The sum of `function` over nodes with errors of the size `error`, and how far off
    it may be, without derivatives."""

    def at(nodes):
        return values_at(function, nodes, operator.eps)

    values, one_sided, bias = _near_zero(function, at, nodes, error)
    value = jnp.sum(values)
    slopes = slopes_at(function, nodes, operator.eps)
    in_domain = check_domain(function, operator, extremes, value)
    # Changes are not finite where nodes leave the domain, or values overflow. Nodes with
    # one-sided errors are in `bias`, and do not count twice.
    shifts = at(nodes + error) - values
    shifts = jnp.where(jnp.isfinite(shifts) & ~one_sided, shifts, 0)
    change, lost = _rounding(
        nodes=nodes,
        values=values,
        slopes=jnp.where(one_sided, 0, slopes),
        error=error,
        shifts=shifts,
        bias=bias,
    )
    return Estimate(
        value=value,
        std_err=jnp.where(operator.error > 0, change, jnp.zeros_like(value.real)),
        samples=value[None],
        num_matvecs=operator.size,
        rounding=0.0,
        result=first_failure(in_domain, failure(lost, RESULTS.precision_lost)),
        extra=entries_without_probes(value.real, extremes),
        bounds=bounds_around(value.real, change),
    )


def entries_without_probes(
    value: Real[Array, ""], extremes: Real[Array, "2"]
) -> dict[str, Array]:
    """`Estimate.extra` of an exact value: the entries of an estimate from one sample and
    no Krylov steps."""
    bracket = jnp.stack([value, value])
    return {
        "ritz_values": extremes,
        "num_steps": jnp.zeros((), jnp.int32),
        "gradient_residual": jnp.zeros_like(value)[None],
        "bracket": bracket,
        "sample_brackets": bracket[None],
    }


def bounds_around(
    value: Real[Array, "*n"], change: Real[Array, "*n"]
) -> Real[Array, "2 2 *n"]:
    """`Estimate.bounds` of an exact value, which rounding may move by `change`."""
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
    """The trace of f(A) for an A that is not Hermitian.

    Rounding is measured by a second evaluation, at the transpose with entries changed by
    roundoff. f(A^T) has the same trace, but its eigenvectors have other errors."""
    with jax.default_matmul_precision("highest"):
        of_matrix, slopes = function.of_matrix(matrix)
        of_transpose, _ = function.of_matrix(perturb_entries(matrix, operator.eps).T)
    terms, eps = diagonal(of_matrix), float(jnp.finfo(matrix.dtype).eps)
    value, size = jnp.sum(terms), jnp.sum(jnp.abs(terms))
    change = jnp.abs(jnp.sum(diagonal(of_transpose) - terms))
    # The two may agree by chance, but no sum is without rounding. Outside of the domain
    # rounding may change the value by any amount.
    change = jnp.where(jnp.isfinite(change), change + eps * size, jnp.inf)
    real_parts, _ = eigh((matrix + matrix.conj().T) / 2)
    extremes = real_parts[jnp.array([0, -1])]
    in_domain = check_domain(function, operator, extremes, value)
    # Terms may cancel within each entry of the diagonal too. Without the floor, traces
    # that are zero would be flagged.
    floor = _ERROR_OF_FUNCTION * eps * two_norm(of_matrix)
    lost = change > SECOND_DIGIT * size + floor
    left, eye = slopes.conj().T, jnp.eye(operator.size, dtype=operator.dtype)
    frame = gradient.frame(function, left, eye, eye)
    extra = entries_without_probes(value.real, extremes)
    return Estimate(
        value=attach(operator, value, frame, execution=execution),
        std_err=jnp.where(operator.error > 0, change, jnp.zeros_like(value.real)),
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
) -> tuple[Inexact[Array, " n"], Bool[Array, " n"], Inexact[Array, ""]]:
    """Values at the nodes, corrected near zero for a function whose domain ends there;
    the nodes near zero whose errors all have one sign; and the bias of the sum that these
    errors make.

    Nodes near zero cannot be told from zero. If the formula of the function is finite for
    negative numbers too, it is evaluated at negative nodes. Errors of both signs then
    cancel, up to the curvature of the function. Otherwise negative nodes count as zero,
    so all errors of zeros have one sign, as they have for singular values."""
    values = at(nodes)
    if not function.semidefinite_domain or function.singular_at_zero:
        return values, jnp.zeros_like(nodes, bool), jnp.zeros_like(error)
    # Negative nodes show how large errors are.
    overshoot = -jnp.min(nodes)
    width = jnp.maximum(_WIDTH_OF_ZERO * error, overshoot)
    error = jnp.maximum(error, overshoot)
    near_zero, zeros = nodes <= width, jnp.zeros_like(nodes)
    # The true node may be zero, or larger by the error.
    rise = jnp.abs(jnp.stack([values - at(zeros), at(nodes + error) - values]))
    bias = jnp.sum(jnp.where(near_zero, jnp.max(rise, axis=0), 0))
    if function.of_singular_values:
        return values, near_zero, bias
    # Half of the second difference is the mean change by errors of either sign.
    low, middle, high = function(jnp.stack([-width, zeros[0], width]))
    curvature = jax.lax.stop_gradient(jnp.abs(low + high - 2 * middle) / 2)
    continues = jnp.isfinite(curvature)
    bias = jnp.where(continues, jnp.sum(near_zero) * curvature, bias)
    continued = continues & (jnp.abs(nodes) <= width)
    # NaN outside of the domain, if it were evaluated there, would spoil derivatives.
    values_near_zero = function(jnp.where(continued, nodes, width))
    values = jnp.where(continued, values_near_zero, values)
    return values, near_zero & ~continues, bias


def _rounding(
    nodes: Real[Array, " n"],
    values: Inexact[Array, " n"],
    slopes: Inexact[Array, " n"],
    error: Real[Array, ""],
    shifts: Inexact[Array, " n"],
    bias: Real[Array, ""],
) -> tuple[Real[Array, ""], Bool[Array, ""]]:
    """How far rounding may move the sum of `values`, and whether it reaches the second
    digit.

    The matrix has an error E, with entries of size `error`, from the matvecs and from the
    factorisation. To first order it changes `tr f(A)` by `tr(f'(A) E)`. Where f has a
    steep part narrower than that, its slopes miss the change, and `shifts`, the changes
    of the values when nodes move by `error`, show it. A `bias` does not average out."""
    # Errors of different eigenvalues are unrelated, so their squares add up.
    change = two_norm(jnp.maximum(error * jnp.abs(slopes), jnp.abs(shifts))) + bias
    # With the change when A is scaled: the logarithm is 0 at the identity, but not exact.
    size = jnp.sum(jnp.abs(values) + jnp.abs(nodes * slopes))
    change = change + jnp.finfo(nodes.dtype).eps * jnp.sum(jnp.abs(values))
    return change, jnp.isfinite(change) & (change > SECOND_DIGIT * size)
