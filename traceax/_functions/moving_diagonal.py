"""The derivative of a diagonal of a function in the part that deflation reads exactly.

If A has the eigenpairs (t_j, v_j), and A' the same eigenvectors with other eigenvalues
there, then a direction dA with the blocks `P dA P`, `p_j = P dA v_j` and `C = V* dA V`
changes f(A) by that of f(A') in the direction `P dA P`, and by

    sum_j (f[A', t_j] p_j) v_j* + its adjoint + V (F o C) V*,

with divided differences F of f at the t_j (Daleckii and Krein). The traces of the first
two are zero, but not their diagonals. An estimator of f(A') knows the direction `P dA P`
alone; the others are exact up to the error of Lanczos, which applies f[A', t_j].
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._numerics.frechet import divided_differences
from .._operators.subspace import Subspace
from .._quadrature.domain import slopes_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps
from .action import Action, first_order_only


class MovingPairs(eqx.Module):
    """Eigenpairs and the operator A' without them, constant to derivatives.

    - `subspace`: the span of the `vectors`.
    - `values`, `vectors`: the t_j, and the v_j as columns.
    - `deflated`: A'.
    """

    subspace: Subspace
    values: Real[Array, " r"]
    vectors: Inexact[Array, "n r"]
    deflated: FlatOperator
    function: AbstractSpectralFunction


def attach_to_diagonal(
    operator: FlatOperator,
    known: Real[Array, " n"],
    pairs: MovingPairs,
    num_steps: int | AdaptiveSteps,
    execution: AbstractExecution,
) -> Real[Array, " n"]:
    """`known`, the deflated part of the diagonal of a real function, with its derivative
    of first order in the operator's arrays."""
    return _attach(operator, known, pairs, num_steps=num_steps, execution=execution)


@eqx.filter_custom_jvp
def _attach(operator, known, pairs, *, num_steps, execution):
    return known


@_attach.def_jvp
def _attach_rule(primals, tangents, *, num_steps, execution):
    known, tangent = primals[1], tangents[1]
    if all(t is None for t in jax.tree.leaves(tangents[0])):
        return known, tangent
    operator, _, pairs = first_order_only(primals)
    vectors, values = pairs.vectors, pairs.values
    function, eps = pairs.function, operator.eps
    most = num_steps.most if isinstance(num_steps, AdaptiveSteps) else num_steps

    def products(operator):
        return execution.matmat(operator, vectors)

    def apply_difference(deflated, pair):
        value, image = pair
        action = Action(deflated, function=function, most=most, steps=num_steps)
        ones = jnp.ones_like(value)[None]
        return action.derivative(value[None], ones, image[None])

    _, images = eqx.filter_jvp(products, (operator,), (tangents[0],))
    outside = pairs.subspace.remove(images)
    moved = execution.map(
        apply_difference, pairs.deflated, (values, outside.T), width=most
    )
    cross = 2 * jnp.sum(vectors.conj() * moved.T, axis=1).real
    differences = divided_differences(
        values, values_at(function, values, eps), slopes_at(function, values, eps)
    )
    with jax.default_matmul_precision("highest"):
        core = differences * (vectors.conj().T @ images)
        corner = jnp.sum((vectors @ core) * vectors.conj(), axis=1).real
    change = (cross + corner).astype(known.dtype)
    return known, change if tangent is None else tangent + change
