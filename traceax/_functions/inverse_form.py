"""`r* A^-1 r` of a positive definite operator by a linear solve, and its derivative."""

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
    """An approximation of `A^-1 r`, how the solve ended, and what the solver counted."""
    structure = jax.ShapeDtypeStruct((flat.size,), flat.dtype)
    # The absolute tolerance of a solver is meant for a right-hand side of size one.
    unit = two_norm(residual) / flat.size**0.5
    unit = jnp.where(unit > 0, unit, 1)
    right = residual / unit

    def outside(x, factor):
        if preconditioner is None:
            return factor * x
        x, length = unit_of(x)
        return length * (factor * preconditioner.power(-1.0, x))

    # And for a solution of size one, as it is about in units of `1 / size`.
    length = two_norm(outside(right, 1.0))
    ratio = jnp.where(length > 0, two_norm(right) / jnp.where(length > 0, length, 1), 1)
    size = jnp.where(smallest > 0, smallest, 1) * ratio

    def scaled(x):
        x, length = unit_of(x)
        return length * (flat.mv(x) / size)

    # `lineax.CG` does not depend on the scale of its preconditioner, but breaks down
    # where an eigenvalue of the preconditioned operator is below 200 n eps. GMRES
    # measures residuals after it.
    factor = 1e4 * max(1, 200 * flat.size * float(jnp.finfo(flat.dtype).eps))
    if isinstance(solver, lx.GMRES):
        factor = 1.0

    tags = lx.positive_semidefinite_tag
    options = {
        "y0": size * (initial / unit),
        "preconditioner": lx.FunctionLinearOperator(
            lambda x: outside(x, factor * ratio), structure, tags
        ),
    }
    matrix = lx.FunctionLinearOperator(scaled, structure, tags)
    found = lx.linear_solve(matrix, right, solver, options=options, throw=False)
    return unit * (found.value / size), RESULTS.promote(found.result), found.stats


def inverse_form(
    flat: FlatOperator, residual: Inexact[Array, " n"], solution: Inexact[Array, " n"]
) -> tuple[Real[Array, ""], Inexact[Array, " n"]]:
    """`2 x* r - x* A x` for `x = A^-1 r`, and what x leaves of r.

    It is `-w* M w` for `w = (x, -1)` and M bordered by r: `r* A^-1 r`, stationary in x.
    So its derivative is `-w* dM w`, and its error of second order in that of x.
    """
    fn, size = _Bordered(flat.fn, residual), flat.size + 1
    bordered = dataclasses.replace(flat, fn=fn, size=size)
    vector = jnp.append(solution, -jnp.ones_like(solution, shape=1))
    image = bordered.frozen.mv(vector)
    frame = FirstOrderFrame(-vector[:, None], vector[:, None])
    value = attach(bordered, -dot(vector, image), frame, execution=Local())
    return value, -image[:-1]
