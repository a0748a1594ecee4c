"""The diagonal of a function by a dense factorisation, from n products."""

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
from .all_eigenvalues import bounds_around


def exact_diagonal_of_function(
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    execution: AbstractExecution,
) -> Estimate:
    """That of a Hermitian operator."""
    eye = jnp.eye(operator.size, dtype=operator.dtype)
    matrix = execution.matmat(operator, eye)
    matrix = (matrix + matrix.conj().T) / 2
    arrays, static = eqx.partition(function, eqx.is_array)
    value = _diagonal(matrix, arrays, static=static, eps=operator.eps)

    nodes, vectors = eigh(jax.lax.stop_gradient(matrix))
    values = values_at(function, nodes, operator.eps)
    slopes = slopes_at(function, nodes, operator.eps)
    ends = nodes[jnp.array([0, -1])]
    in_domain = check_domain(function, operator, ends, jnp.sum(values))
    # To first order an E changes the diagonal of f(A) by about that of f'(A) E, and where
    # f has a steep part of less than the size of E, by what that moves its values.
    eps = jnp.finfo(nodes.dtype).eps
    error = eps * jnp.max(jnp.abs(nodes))
    moved = changes_under_shift(error, function, nodes, values, operator.eps)
    moved = jnp.abs(jnp.stack([*moved, error * slopes]))
    moved = jnp.max(jnp.where(jnp.isfinite(moved), moved, 0), axis=0)
    squares = jnp.abs(vectors) ** 2
    relative, largest = normalise(moved)
    change = largest * jnp.sqrt(_mean(squares, relative**2))
    change = change + eps * _mean(squares, jnp.abs(values))
    change_of_all = jnp.abs(nodes * slopes)
    change_of_all = jnp.where(jnp.isfinite(change_of_all), change_of_all, 0)
    size = _mean(squares, jnp.abs(values) + change_of_all)
    lost = two_norm(change) > 0.02 * two_norm(size)
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
        bounds=bounds_around(real, 4 * change),  # factorisations are off by several eps
    )


def _mean(squares: Real[Array, "n n"], values: Real[Array, " n"]) -> Real[Array, " n"]:
    return jnp.matmul(squares, values, precision="highest")


@eqx.filter_custom_jvp
def _diagonal(matrix: Inexact[Array, "n n"], arrays: Any, *, static, eps) -> Any:
    nodes, vectors = eigh(matrix)
    values = values_at(eqx.combine(arrays, static), nodes, eps)
    return _mean(jnp.abs(vectors) ** 2, values).astype(matrix.dtype)


@_diagonal.def_jvp
def _diagonal_rule(primals, tangents, *, static, eps) -> Any:
    """In an eigenbasis the derivative has the entries `F_ij E_ij`: see `frechet`."""
    out, tangent = _diagonal(*primals, static=static, eps=eps), 0
    matrix, arrays = first_order_only(primals)
    nodes, vectors = eigh(matrix)

    def at_nodes(arrays):
        return values_at(eqx.combine(arrays, static), nodes, eps)

    if tangents[0] is not None:
        slopes = slopes_at(eqx.combine(arrays, static), nodes, eps)
        with jax.default_matmul_precision("highest"):
            inside = vectors.conj().T @ tangents[0] @ vectors
            inside = divided_differences(nodes, at_nodes(arrays), slopes) * inside
            tangent = jnp.sum((vectors @ inside) * vectors.conj(), axis=1)
    if jax.tree.leaves(tangents[1]):
        _, along = eqx.filter_jvp(at_nodes, (arrays,), (tangents[1],))
        tangent = tangent + _mean(jnp.abs(vectors) ** 2, along).astype(out.dtype)
    return out, tangent
