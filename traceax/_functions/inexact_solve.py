"""One linear solve with a flat operator or its adjoint, by a matrix or by lineax."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, Real

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._numerics.dense import two_norm


# `lineax.CG` stops, as if it had broken down, once p* A p <= 100 rcond |r* P^-1 r| with
# rcond = 2 n eps. With P^-1 = 200 n I this is where an eigenvalue of A is below the
# epsilon times its typical size.
_BREAKDOWN_OF_CG = 200


class AbstractSolve(eqx.Module):
    """How a system is solved."""

    @abc.abstractmethod
    def __call__(
        self, flat: FlatOperator, vector: Inexact[Array, " n"], *, adjoint: bool
    ) -> tuple[Inexact[Array, " n"], Any, Int[Array, ""]]:
        """About `A^-1 v`, or `A^-* v`; the result, and the number of steps."""


class DenseSolve(AbstractSolve):
    """By the inverse matrix."""

    inverse: Inexact[Array, "n n"]

    def __call__(
        self, flat: FlatOperator, vector: Inexact[Array, " n"], *, adjoint: bool
    ) -> tuple[Inexact[Array, " n"], Any, Int[Array, ""]]:
        matrix = self.inverse.conj().T if adjoint else self.inverse
        successful: Any = RESULTS.successful
        image = jnp.matmul(matrix, vector, precision="highest")
        return image, successful, jnp.zeros((), jnp.int32)


class IterativeSolve(AbstractSolve):
    """By a solver of lineax. It sees `(A / scale) y = b / unit`, with entries of size one
    on the right, because tolerances and tests for breakdown have absolute parts."""

    solver: lx.AbstractLinearSolver
    scale: Real[Array, ""]

    @classmethod
    def of(
        cls, solver: lx.AbstractLinearSolver, flat: FlatOperator, probe: Array
    ) -> "IterativeSolve":
        scale = two_norm(flat.mv(probe)) / two_norm(probe)
        scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
        return cls(solver, scale * (-1 if flat.sign < 0 else 1))

    def __call__(
        self, flat: FlatOperator, vector: Inexact[Array, " n"], *, adjoint: bool
    ) -> tuple[Inexact[Array, " n"], Any, Int[Array, ""]]:
        apply = flat.adjoint_mv if adjoint else flat.mv
        unit = two_norm(vector) / flat.size**0.5
        unit = jnp.where(unit > 0, unit, 1)
        right, mv = vector / unit, lambda x: apply(x) / self.scale
        is_complex = jnp.iscomplexobj(right)
        if is_complex:
            # Solvers of lineax are for real vectors.
            complex_mv, right = mv, _split(right)
            mv = lambda x: _split(complex_mv(_join(x)))  # noqa: E731
        # Inside of `shard_map` the mesh is a part of the type.
        structure = jax.eval_shape(lambda x: x, right)
        definite = flat.sign != 0
        tags = lx.positive_semidefinite_tag if definite else ()
        options = {}
        if isinstance(self.solver, lx.CG):
            factor = float(_BREAKDOWN_OF_CG * right.size)
            scaled = lx.FunctionLinearOperator(
                lambda x: factor * x, structure, lx.positive_semidefinite_tag
            )
            options["preconditioner"] = scaled
        operator = lx.FunctionLinearOperator(mv, structure, tags)
        # Not by `lineax.linear_solve`: nothing here is differentiated, and that primitive
        # is not for `shard_map`.
        state = self.solver.init(operator, options)
        solution, result, stats = self.solver.compute(state, right, options)
        if is_complex:
            solution = _join(solution)
        finite = jnp.isfinite(solution).all()
        result = first_failure(
            RESULTS.promote(result), failure(~finite, RESULTS.breakdown)
        )
        steps = jnp.asarray(stats.get("num_steps", 0), jnp.int32)
        return solution * (unit / self.scale), result, steps


def _split(vector: Inexact[Array, " n"]) -> Real[Array, " m"]:
    return jnp.concatenate([vector.real, vector.imag])


def _join(parts: Real[Array, " m"]) -> Inexact[Array, " n"]:
    return jax.lax.complex(*jnp.split(parts, 2))
