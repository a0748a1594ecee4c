"""`r* A^-1 r` of a positive definite operator by a linear solve, and its derivative.

    M = [[A, r], [r*, 0]],  w = (x, -1),    -w* M w = 2 Re(x* r) - x* A x

At `x = A^-1 r` this is `r* A^-1 r`, and it is stationary in x there. So the value has an
error of second order in the error of x, and its derivative is `-w* dM w`, in A and in r.
In the code `residual` is r, `solution` is x, `vector` is w and `bordered` is M.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.results import RESULTS
from .._numerics.dense import two_norm
from .._numerics.gram_schmidt import dot, unit as unit_of
from .._preconditioners.base import AbstractPreconditioner
from .._run.execution import Local
from .._run.gradient import attach, FirstOrderFrame


# `lineax.CG` stops, as if it had broken down, once p* A p <= 100 rcond |r* P^-1 r| with
# rcond = 2 n eps: where an eigenvalue of P^-1 A is below 200 n eps.
_BREAKDOWN_OF_CG = 200
# Eigenvalues of about 1 are scaled this far above that limit, so that condition numbers
# of 1e4 are far from it. More room would come nearer to an overflow.
_ROOM = 1e4


class _Bordered(eqx.Module):
    """`M = [[A, r], [r*, 0]]`, as a map of vectors of length n + 1."""

    fn: Callable[[Array], Array]
    residual: Inexact[Array, " n"]

    def __call__(self, vector: Array) -> Array:
        inner, last = vector[:-1], vector[-1]
        top = self.fn(inner) + last * self.residual
        return jnp.append(top, dot(self.residual, inner))


def solve_scaled(
    flat: FlatOperator,
    residual: Inexact[Array, " n"],
    initial: Inexact[Array, " n"],
    preconditioner: AbstractPreconditioner | None,
    smallest: Real[Array, ""],
    solver: lx.AbstractLinearSolver,
) -> tuple[Inexact[Array, " n"], Any, dict[str, Any]]:
    """An approximation of `A^-1 r`, the result code of the solve, and the statistics of
    the solver.

    Tolerances and breakdown tests of `lineax` solvers have absolute parts. They would
    give other answers if A or r had other units, so the solver sees the scaled system

        (A / size) y = r / unit,    x = unit y / size,

    whose right-hand side and solution have entries of about 1. `smallest` is about the
    smallest eigenvalue of A, with a preconditioner of the preconditioned operator. If it
    is not positive, 1 is taken instead."""
    structure = jax.ShapeDtypeStruct((flat.size,), flat.dtype)
    # The absolute tolerance of a solver is meant for a right-hand side of size one.
    unit = two_norm(residual) / flat.size**0.5
    unit = jnp.where(unit > 0, unit, 1)
    right = residual / unit

    def precondition(x, factor):
        """`factor P^-1 x`, of a unit vector, so that no square overflows or vanishes."""
        if preconditioner is None:
            return factor * x
        x, length = unit_of(x)
        return length * (factor * preconditioner.power(-1.0, x))

    # P^-1 r shows how large the solution is.
    length = two_norm(precondition(right, 1.0))
    ratio = jnp.where(length > 0, two_norm(right) / jnp.where(length > 0, length, 1), 1)
    size = jnp.where(smallest > 0, smallest, 1) * ratio

    def scaled(x):
        x, length = unit_of(x)
        return length * (flat.mv(x) / size)

    # The steps of CG do not depend on the scale of its preconditioner, only its test for
    # breakdown does. GMRES measures residuals after preconditioning, so a factor would
    # change its tolerance.
    eps = float(jnp.finfo(flat.dtype).eps)
    factor = _ROOM * max(1, _BREAKDOWN_OF_CG * flat.size * eps)
    if isinstance(solver, lx.GMRES):
        factor = 1.0

    tags = lx.positive_semidefinite_tag
    options = {
        "y0": size * (initial / unit),
        "preconditioner": lx.FunctionLinearOperator(
            lambda x: precondition(x, factor * ratio), structure, tags
        ),
    }
    matrix = lx.FunctionLinearOperator(scaled, structure, tags)
    solved = lx.linear_solve(matrix, right, solver, options=options, throw=False)
    return unit * (solved.value / size), RESULTS.promote(solved.result), solved.stats


def inverse_form(
    flat: FlatOperator, residual: Inexact[Array, " n"], solution: Inexact[Array, " n"]
) -> tuple[Real[Array, ""], Inexact[Array, " n"]]:
    """`2 Re(x* r) - x* A x` for an approximation x of `A^-1 r`, and the residual
    `r - A x`. One matvec."""
    fn, size = _Bordered(flat.fn, residual), flat.size + 1
    bordered = dataclasses.replace(flat, fn=fn, size=size)
    vector = jnp.append(solution, -jnp.ones_like(solution, shape=1))
    # M w = (A x - r, r* x), whose first part is the residual with the other sign.
    image = bordered.frozen.mv(vector)
    frame = FirstOrderFrame(-vector[:, None], vector[:, None])
    value = attach(bordered, -dot(vector, image), frame, execution=Local())
    return value, -image[:-1]
