"""Exact diagonals of functions by a dense factorisation, from n matvecs.

    diag(X f(A) X*)_a = sum_i |(X u_i)_a|^2 f(lambda_i)

for a Hermitian A with eigenvalues lambda_i and eigenvectors u_i, and X = I or any other
operator. The derivative of U* f(A) U in a direction E of A, with U constant, is
`F o (U* E U)`, with F the divided differences of f at the lambda_i and `o` the entrywise
product (Daleckii and Krein; see Higham, Functions of Matrices, 2008, section 3.2). In the
code `nodes` are the lambda_i, `vectors` is U, `rows` is X U, and `factor` is X.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate
from .._numerics.dense import eigh, normalise, two_norm
from .._numerics.frechet import divided_differences
from .._quadrature.domain import check_domain, slopes_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.rounding import changes_under_shift
from .._run.execution import AbstractExecution
from .action import first_order_only
from .all_eigenvalues import bounds_around, SECOND_DIGIT


# Errors of factorisations are several machine epsilons times the largest eigenvalue: of
# zero eigenvalues of singular matrices up to 2.8 (docs/devdocs/quadrature.md, "The end
# point by default"). A smaller factor makes intervals that miss the true value.
_ERROR_OF_FACTORISATION = 4


# A, its eigenvalues and its eigenvectors, which are constant to derivatives.
Factorised = tuple[Inexact[Array, "n n"], Real[Array, " n"], Inexact[Array, "n n"]]


def factorise(operator: FlatOperator, execution: AbstractExecution) -> Factorised:
    """A factorisation of a Hermitian operator, from n matvecs."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    matrix = execution.matmat(operator, eye)
    matrix = (matrix + matrix.conj().T) / 2
    return matrix, *eigh(jax.lax.stop_gradient(matrix))


def exact_diagonal_of_function(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    execution: AbstractExecution,
    factor: FlatOperator | None = None,
    factorised: Factorised | None = None,
) -> Estimate:
    """The diagonal of f(A) for a Hermitian operator, or of X f(A) X* for a `factor` X. n
    matvecs with each, O(n^3 + m n^2) operations, and O(n^2 + m n) memory for m rows of X.
    If A is `factorised` already, there are no matvecs with it."""
    if factorised is None:
        factorised = factorise(operator, execution)
    matrix, nodes, vectors = factorised
    arrays, static = eqx.partition(function, eqx.is_array)
    compressed = _compressed(
        matrix, arrays, nodes, vectors, static=static, eps=operator.eps
    )
    rows = vectors if factor is None else execution.matmat(factor, vectors)
    products = jnp.matmul(rows, compressed, precision="highest")
    value = jnp.sum(products * rows.conj(), axis=1)

    values = values_at(function, nodes, operator.eps)
    slopes = slopes_at(function, nodes, operator.eps)
    ends = nodes[jnp.array([0, -1])]
    in_domain = check_domain(function, operator, ends, jnp.sum(values))
    # To first order an error E of A changes the diagonal of f(A) by about the diagonal of
    # f'(A) E. Where f has a steep part narrower than E, its slopes miss the change, so
    # values at nodes that are moved by the error count too.
    eps = jnp.finfo(nodes.dtype).eps
    error = eps * jnp.max(jnp.abs(nodes))
    moved = changes_under_shift(error, function, nodes, values, operator.eps)
    moved = jnp.abs(jnp.stack([*moved, error * slopes]))
    moved = jnp.max(jnp.where(jnp.isfinite(moved), moved, 0), axis=0)
    squares = jnp.abs(jax.lax.stop_gradient(rows)) ** 2
    # In units of the largest, so that squares neither overflow nor vanish.
    relative, largest = normalise(moved)
    norms = jnp.sqrt(jnp.sum(squares, axis=1))
    change = largest * norms * jnp.sqrt(_mean(squares, relative**2))
    change = change + eps * _mean(squares, jnp.abs(values))
    # The change when A is scaled: the logarithm is 0 at the identity, but not exact.
    change_by_scale = jnp.abs(nodes * slopes)
    change_by_scale = jnp.where(jnp.isfinite(change_by_scale), change_by_scale, 0)
    size = _mean(squares, jnp.abs(values) + change_by_scale)
    lost = two_norm(change) > SECOND_DIGIT * two_norm(size)
    zero, real = jnp.zeros_like(change), jax.lax.stop_gradient(value.real)
    return Estimate(
        value=value,
        std_err=zero,
        samples=None,
        num_matvecs=operator.size,
        rounding=0.0,
        result=first_failure(in_domain, failure(lost, RESULTS.precision_lost)),
        extra={
            "ritz_values": ends,
            "truncation_error": zero[0],
            "gradient_residual": zero[0],
            "num_steps": jnp.zeros((), jnp.int32),
        },
        bounds=bounds_around(real, _ERROR_OF_FACTORISATION * change),
    )


def _mean(squares: Real[Array, "m n"], values: Real[Array, " n"]) -> Real[Array, " m"]:
    """For each row, the mean of the values with the weights `squares`."""
    return jnp.matmul(squares, values, precision="highest")


@eqx.filter_custom_jvp
def _compressed(matrix, arrays, nodes, vectors, *, static, eps) -> Any:
    """`U* f(A) U` for the eigenvectors U, which are constant to its derivative."""
    values = values_at(eqx.combine(arrays, static), nodes, eps)
    return jnp.diag(values).astype(jnp.result_type(values, matrix))


@_compressed.def_jvp
def _compressed_rule(primals, tangents, *, static, eps) -> Any:
    """`F o (U* E U)`, which needs no gaps between eigenvalues, while the derivatives of
    eigenvectors would be infinite for equal ones."""
    out, tangent = _compressed(*primals, static=static, eps=eps), 0
    _, arrays, nodes, vectors = first_order_only(primals)

    def at_nodes(arrays):
        return values_at(eqx.combine(arrays, static), nodes, eps)

    if tangents[0] is not None:
        slopes = slopes_at(eqx.combine(arrays, static), nodes, eps)
        with jax.default_matmul_precision("highest"):
            rotated = vectors.conj().T @ tangents[0] @ vectors
            tangent = divided_differences(nodes, at_nodes(arrays), slopes) * rotated
    if jax.tree.leaves(tangents[1]):
        _, change = eqx.filter_jvp(at_nodes, (arrays,), (tangents[1],))
        tangent = tangent + jnp.diag(change).astype(out.dtype)
    return out, tangent
