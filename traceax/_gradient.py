"""The derivative of an estimate that is not linear in the operator.

A sketch estimate picks its coefficients from factorisations of the products. Those are
never differentiated. Beside its value the estimator gives a *frame*: arrays `L, R` of
shape (n, p), made from the probes and products, with

    E[ sum(conj(L) * (dA R)) ] = d tr A    for every direction dA.

The rule below takes that sum as the derivative. The frame is held constant to all
orders, so the second derivative is `sum(conj(L) * (d2A R))`, which is unbiased too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree

from ._execution import AbstractExecution
from ._vectors import FlatOperator


Frame = tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]
_Aux = TypeVar("_Aux", bound=PyTree)


@eqx.filter_custom_jvp
def differentiate_by_frame(
    operator: FlatOperator,
    probes: Inexact[Array, "n m"],
    *,
    evaluate: Callable[..., tuple[Inexact[Array, ""], Frame, _Aux]],
    execution: AbstractExecution,
) -> tuple[Inexact[Array, ""], Frame, _Aux]:
    """`evaluate(matmat, probes)`, which gives a value, its frame and anything else; the
    value gets the derivative that the frame says, the rest none."""
    return evaluate(lambda x: execution.matmat(operator, x), probes)


@differentiate_by_frame.def_jvp
def _rule(primals, tangents, *, evaluate, execution) -> Any:
    operator, probes = primals
    out = differentiate_by_frame(operator, probes, evaluate=evaluate, execution=execution)
    left, right = jax.lax.stop_gradient(out[1])

    def contract(operator):
        terms = execution.map(
            lambda operator, column: jnp.vdot(
                column[0], operator.mv(column[1]), precision="highest"
            ),
            operator,
            (left.T, right.T),
        )
        return jnp.sum(terms)

    _, tangent = eqx.filter_jvp(contract, (operator,), (tangents[0],))
    return out, (tangent, *jax.tree.map(lambda _: None, out[1:]))
