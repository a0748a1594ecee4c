"""The derivative of an estimate that is not linear in the operator.

An estimate picks its coefficients from factorisations of the products. Those are never
differentiated. Beside its value an estimator gives a *frame*: arrays `L, R` of shape
(n, p), or for an operator of shape (m, n) of shapes (m, p) and (n, p), made from the
probes and products, with

    E[ sum(conj(L) * (dA R)) ] = d value    for every direction dA,

and the one rule below takes that sum as the derivative: for the trace that of all
entries, for another linear quantity what that reads of the pairs of columns. How `L`
depends on the operator decides about second derivatives, so it is not an array but a
function of the operator:

- `Frame`: constant to all orders. For a trace, where `E[R L*] = I`, the second derivative
  `sum(conj(L) * (d2A R))` is unbiased too.
- `FirstOrderFrame`: an approximation of `f'(A) R` for `tr f(A)`, whose own derivative is
  not known. A second derivative is refused.
- `SolvedFrame`: `f'(A) R` by linear solves, differentiable to all orders.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._numerics.dense import normalise
from .execution import AbstractExecution


class AbstractFrame(eqx.Module):
    """Arrays L and R from which the derivative of an estimate is made:
    `sum(conj(L) * (dA R))`, whose mean is the derivative of what is estimated.

    - `right`: R, of shape `(n, p)`.
    - `linear`: whether the value is a linear functional of the operator.
    """

    right: eqx.AbstractVar[Inexact[Array, "n p"]]
    linear: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        """L, made from the operator where second derivatives need that.

        **Arguments:**

        - `operator`: A, with derivatives. Second derivatives of the estimate see those
            that L has.

        **Returns:**

        An array of shape `(m, p)`, the counterpart of `right`.
        """


class Frame(AbstractFrame):
    """L is `constant`, of shape `(m, p)`, to derivatives of all orders: for traces and
    other linear quantities."""

    constant: Inexact[Array, "m p"]
    right: Inexact[Array, "n p"]
    linear: ClassVar[bool] = True

    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        return self.constant


class FirstOrderFrame(AbstractFrame):
    """L is an `approximation`, of shape `(m, p)`, whose own derivative is not known: a
    second derivative raises `NotImplementedError`."""

    approximation: Inexact[Array, "m p"]
    right: Inexact[Array, "n p"]
    linear: ClassVar[bool] = False

    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        return _refuse_second(operator, self.approximation)


class SolvedFrame(AbstractFrame):
    """L is `coefficient * A^(-num_solves) R`, with the adjoint of A if that is not
    Hermitian positive definite, by linear solves that can be differentiated again.

    The solves are with `A / unit`, and of vectors of size one, because the tolerances of
    a solver are relative to one, and `lineax.CG` breaks down where all eigenvalues are
    much below one.
    """

    right: Inexact[Array, "n p"]
    unit: Real[Array, ""]
    solver: lx.AbstractLinearSolver
    coefficient: float = eqx.field(static=True)
    num_solves: int = eqx.field(static=True)
    hermitian: bool = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def left(self, operator: FlatOperator) -> Inexact[Array, "n p"]:
        structure = jax.ShapeDtypeStruct((operator.size,), operator.dtype)
        definite = self.hermitian and operator.hermitian
        tags = lx.positive_semidefinite_tag if definite else ()
        matrix = lx.FunctionLinearOperator(
            lambda vector: operator.fn(vector) / self.unit, structure, tags
        )
        if not definite:
            matrix = lx.conj(matrix.transpose())
        solver = _OfUnitVectors(self.solver)

        def solve(column):
            for _ in range(self.num_solves):
                column = lx.linear_solve(matrix, column, solver).value
            return self.coefficient * column / self.unit**self.num_solves

        return jax.vmap(solve, in_axes=1, out_axes=1)(self.right)


class _OfUnitVectors(lx.AbstractLinearSolver):
    """A linear solver that is given vectors of size one, in the solves of derivatives
    too, whose vectors are as large as cotangents are."""

    solver: lx.AbstractLinearSolver

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> Any:
        return self.solver.init(operator, options)

    def compute(self, state: Any, vector: Array, options: dict[str, Any]) -> Any:
        unit_vector, size = normalise(vector)
        solution, result, stats = self.solver.compute(state, unit_vector, options)
        return size.astype(vector.dtype) * solution, result, stats

    def transpose(self, state: Any, options: dict[str, Any]) -> Any:
        return self.solver.transpose(state, options)

    def conj(self, state: Any, options: dict[str, Any]) -> Any:
        return self.solver.conj(state, options)

    def assume_full_rank(self) -> bool:
        return self.solver.assume_full_rank()


@eqx.filter_custom_jvp
def _refuse_second(operator: FlatOperator, x: Any) -> Any:
    return x


@_refuse_second.def_jvp
def _refuse_second_rule(primals, tangents) -> Any:
    perturbed = [t for t in jax.tree.leaves(tangents[0]) if t is not None]
    if perturbed:
        raise NotImplementedError(
            "The gradient comes from a Krylov run, or a factorisation with `k >= n`, "
            "and has no derivative of its own. For second derivatives of a "
            "log-determinant, or of the trace of an inverse or another negative whole "
            "power, pass `gradient=traceax.SolveGradient(lineax.CG(rtol, atol))`. For "
            "other functions there is no second derivative in the operator: take "
            "differences of first ones, with the same key. For second derivatives of "
            "`traceax.gaussian_log_prob` add up such a log-determinant and a "
            "`lineax.linear_solve`."
        )
    return primals[1], tangents[1]


def attach(
    operator: FlatOperator,
    value: Inexact[Array, "*q"],
    frame: AbstractFrame,
    *,
    execution: AbstractExecution,
    quantity: AbstractQuantity = Trace(),
) -> Inexact[Array, "*q"]:
    """Give an estimate the derivative in the operator's arrays that its frame defines.

    **Arguments:**

    - `operator`: A, as a map of flat vectors, with derivatives.
    - `value`: the estimate, made from `operator.frozen`.
    - `frame`: L and R, made from `operator.frozen`.
    - `execution`: where the derivative of A is applied to the p columns of R.
    - `quantity`: what is estimated. Default: the trace.

    **Returns:**

    An array equal to `value`. Without a derivative it costs nothing.
    """
    return _attach(operator, value, frame, execution=execution, quantity=quantity)


@eqx.filter_custom_jvp
def _attach(operator, value, frame, *, execution, quantity) -> Any:
    return value


@_attach.def_jvp
def _attach_rule(primals, tangents, *, execution, quantity) -> Any:
    operator, value, frame = primals
    out = _attach(operator, value, frame, execution=execution, quantity=quantity)
    left, right = frame.left(operator), frame.right

    def contract(operator):
        terms = execution.map(read_by(quantity), operator, (left.T, right.T))
        total = jnp.sum(terms, axis=0)
        return total if jnp.iscomplexobj(value) else total.real

    tangent = tangents[1]
    if tangent is not None and not frame.linear:
        # The refusal is put into a factor, not around the tangent: reverse mode would
        # drop a rule that is linear in the tangent.
        tangent = tangent * _refuse_second(operator, jnp.ones_like(tangent))
    if any(t is not None for t in jax.tree.leaves(tangents[0])):
        _, along = eqx.filter_jvp(contract, (operator,), (tangents[0],))
        along = along.astype(value.dtype)
        tangent = along if tangent is None else tangent + along
    return out, tangent


def attach_derivative(value: Array, surrogate: Callable[[], Array]) -> Array:
    """Give an array the derivative of another one.

    **Arguments:**

    - `value`: an array.
    - `surrogate`: a function without arguments, which returns an array like `value`.

    **Returns:**

    An array equal to `value`, whose derivative is its own plus that of `surrogate()` in
    the arrays that this function closes over. Without a derivative the surrogate is
    traced, but not run.
    """
    return _with_surrogate(value, eqx.filter_closure_convert(surrogate))


@eqx.filter_custom_jvp
def _with_surrogate(value: Array, surrogate: Callable[[], Array]) -> Array:
    return value


@_with_surrogate.def_jvp
def _with_surrogate_rule(primals, tangents) -> Any:
    out, tangent = _with_surrogate(*primals), tangents[0]
    if any(t is not None for t in jax.tree.leaves(tangents[1])):
        _, along = eqx.filter_jvp(lambda fn: fn(), primals[1:], tangents[1:])
        along = along.astype(out.dtype)
        tangent = along if tangent is None else tangent + along
    return out, tangent


def read_by(
    quantity: AbstractQuantity,
) -> Callable[[FlatOperator, tuple[Array, Array]], Array]:
    """A function that computes the part of the quantity from one pair of columns of a
    frame."""

    @eqx.filter_checkpoint
    def read(operator, columns):
        left, right = columns
        return quantity.read(left, operator.mv(right))

    return read
