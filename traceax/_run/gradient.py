"""The derivative of an estimate that is not linear in the operator.

An estimate picks its coefficients from factorisations of matvecs. Those are never
differentiated: their derivatives divide by gaps between eigenvalues and by small singular
values. Instead an estimator returns a *frame* with its value: arrays L and R of shape
(n, p), or for an operator of shape (m, n) of shapes (m, p) and (n, p), computed from
probes and matvecs, with

    E[ sum_a <L_a, dA R_a> ] = d value    for every direction dA,

where `<L_a, dA R_a> = L_a* dA R_a` for column a. In the code `L` is
`frame.left(operator)`, `R` is `frame.right`, and the sum is `contract` in `_attach_rule`,
which takes it as the derivative. For a linear quantity other than the trace, the matrix
`sum_a (dA R_a) L_a*` is dA in the mean, and the quantity of this matrix takes the place
of the sum.

How L depends on the operator decides about second derivatives. So it is not an array but
a function of the operator:

- `Frame`: constant to all orders. For a trace, where `E[R L*] = I`, the second derivative
  `sum_a <L_a, d2A R_a>` is unbiased too, since `tr A` is linear in A.
- `FirstOrderFrame`: an approximation of `f'(A) R` for `tr f(A)`, whose own derivative is
  not known. Since `d tr f(A) = tr(f'(A) dA)`, the second derivative has the further term
  `tr(d[f'(A)] dA)`, which a constant L would leave out. So it is refused.
- `PairFrame`: `u* dA v` for each of several eigenvalues or singular values. The
  derivative of the vectors, which a second derivative needs, is not known.
- `SolvedFrame`: `L = c A^(-p) R` for `f'(x) = c x^(-p)`, by linear solves, differentiable
  to all orders.

"Gradients" in the developer documentation derives the frame of each estimator.
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
    """Arrays L and R that define the derivative of an estimate, `sum(conj(L) * (dA R))`.
    Its mean is the derivative of the quantity that is estimated.

    - `right`: R, of shape `(n, p)`.
    - `linear`: whether the value is a linear functional of the operator.
    - `separate`: whether the value has an entry for each column, whose derivative is that
        column's term. Default: False.
    - `refusal`: the message for a second derivative that is not known.
    """

    right: eqx.AbstractVar[Inexact[Array, "n p"]]
    linear: eqx.AbstractClassVar[bool]
    separate: ClassVar[bool] = False
    refusal: ClassVar[str] = (
        "The gradient comes from a Krylov run, or a factorisation with `k >= n`, and has "
        "no derivative of its own. For second derivatives of a log-determinant, or of "
        "the trace of an inverse or another negative whole power, pass "
        "`gradient=traceax.SolveGradient(lineax.CG(rtol, atol))`. For other functions "
        "there is no second derivative in the operator: take finite differences of first "
        "derivatives, with the same key. For second derivatives of "
        "`traceax.gaussian_log_prob` add such a log-determinant and a "
        "`lineax.linear_solve`."
    )

    @abc.abstractmethod
    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        """Compute L, from the operator where second derivatives depend on that.

        **Arguments:**

        - `operator`: A, with derivatives. Second derivatives of the estimate contain the
            derivative of L.

        **Returns:**

        An array of shape `(m, p)`, the counterpart of `right`; m is n for a square
        operator.
        """


class Frame(AbstractFrame):
    """A frame for traces and other linear quantities: L is the array `constant`, of shape
    `(m, p)`, and constant to derivatives of all orders."""

    constant: Inexact[Array, "m p"]
    right: Inexact[Array, "n p"]
    linear: ClassVar[bool] = True

    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        return self.constant


class FirstOrderFrame(AbstractFrame):
    """A frame whose L is an `approximation`, of shape `(m, p)`, without a derivative of
    its own: a second derivative raises `NotImplementedError`."""

    approximation: Inexact[Array, "m p"]
    right: Inexact[Array, "n p"]
    linear: ClassVar[bool] = False

    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        return refuse_derivative(self.approximation, operator, message=self.refusal)


class PairFrame(AbstractFrame):
    """A frame for eigenvalues and singular values, one for each column: L has the left
    vectors `constant`, of shape `(m, p)`, and R the right ones."""

    constant: Inexact[Array, "m p"]
    right: Inexact[Array, "n p"]
    linear: ClassVar[bool] = False
    separate: ClassVar[bool] = True
    refusal: ClassVar[str] = (
        "Eigenvalues and singular values have first derivatives only. Take finite "
        "differences of those, with the same key and a small `rtol`."
    )

    def left(self, operator: FlatOperator) -> Inexact[Array, "m p"]:
        return refuse_derivative(self.constant, operator, message=self.refusal)


class SolvedFrame(AbstractFrame):
    """A frame whose L is `coefficient * A^(-num_solves) R`, by linear solves that can be
    differentiated again. If A is not Hermitian positive definite, its adjoint takes its
    place.

    The solves are with `A / unit` and right-hand sides of norm one, because the absolute
    tolerance of a solver is meant for numbers of size one, and `lineax.CG` breaks down
    where all eigenvalues are much smaller than one. They cost `num_solves` linear solves
    for each of the p columns, and only where a derivative is taken.
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
        scaled = lx.FunctionLinearOperator(
            lambda vector: operator.fn(vector) / self.unit, structure, tags
        )
        if not definite:
            scaled = lx.conj(scaled.transpose())
        solver = _UnitVectorSolver(self.solver)

        def solve(column):
            for _ in range(self.num_solves):
                column = lx.linear_solve(scaled, column, solver).value
            # (A / unit)^(-p) = unit^p A^(-p)
            return self.coefficient * column / self.unit**self.num_solves

        return jax.vmap(solve, in_axes=1, out_axes=1)(self.right)


class _UnitVectorSolver(lx.AbstractLinearSolver):
    """A linear solver whose right-hand sides are scaled to norm one. This is a solver and
    not a factor around the solve, because derivatives of the solve make further ones with
    it, whose right-hand sides have the size of cotangents."""

    solver: lx.AbstractLinearSolver

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> Any:
        return self.solver.init(operator, options)

    def compute(self, state: Any, vector: Array, options: dict[str, Any]) -> Any:
        unit_vector, norm = normalise(vector)
        solution, result, stats = self.solver.compute(state, unit_vector, options)
        return norm.astype(vector.dtype) * solution, result, stats

    def transpose(self, state: Any, options: dict[str, Any]) -> Any:
        return self.solver.transpose(state, options)

    def conj(self, state: Any, options: dict[str, Any]) -> Any:
        return self.solver.conj(state, options)

    def assume_full_rank(self) -> bool:
        return self.solver.assume_full_rank()


@eqx.filter_custom_jvp
def refuse_derivative(x: Any, of: Any, *, message: str) -> Any:
    """`x`, which has no derivative in `of`. Where one is asked for, this raises a
    `NotImplementedError` with the message."""
    return x


@refuse_derivative.def_jvp
def _refuse_derivative_rule(primals, tangents, *, message) -> Any:
    if any(t is not None for t in jax.tree.leaves(tangents[1])):
        raise NotImplementedError(message)
    return primals[0], tangents[0]


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
    - `value`: the estimate, an array computed from `operator.frozen`.
    - `frame`: L and R, computed from `operator.frozen`.
    - `execution`: where, and in blocks of which size, the derivative of A is applied to
        the p columns of R.
    - `quantity`: the quantity that is estimated. Default: the trace.

    **Returns:**

    An array equal to `value`, of the same shape and dtype. A derivative costs about p
    matvecs, in reverse mode with their transposes; L and R are kept until then. Without a
    derivative `attach` costs nothing.

    **Raises:**

    `NotImplementedError` for a second derivative, if the frame has none.
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

    # sum_a <L_a, A R_a>. It is linear in A, so its derivative is sum_a <L_a, dA R_a>.
    def contract(operator):
        terms = execution.map(column_reader(quantity), operator, (left.T, right.T))
        total = terms if frame.separate else jnp.sum(terms, axis=0)
        return total if jnp.iscomplexobj(value) else total.real

    tangent = tangents[1]
    if tangent is not None and not frame.linear:
        # The refusal is in a factor of 1. Around the tangent itself it would be lost in
        # reverse mode, which transposes what is linear in the tangent and drops its rule.
        one = jnp.ones_like(tangent)
        tangent = tangent * refuse_derivative(one, operator, message=frame.refusal)
    if any(t is not None for t in jax.tree.leaves(tangents[0])):
        _, derivative = eqx.filter_jvp(contract, (operator,), (tangents[0],))
        derivative = derivative.astype(value.dtype)
        tangent = derivative if tangent is None else tangent + derivative
    return out, tangent


def attach_derivative(value: Array, surrogate: Callable[[], Array]) -> Array:
    """Give an array the derivative of another one.

    **Arguments:**

    - `value`: an array.
    - `surrogate`: a function without arguments, which returns an array of the shape of
        `value`.

    **Returns:**

    An array equal to `value`. Its derivative is the sum of two: the derivative of
    `value`, and the derivative of `surrogate()` in the arrays that this function closes
    over. Without a derivative the surrogate is traced, but not run.
    """
    # A custom rule sees derivatives of its arguments only. The conversion makes the
    # arrays that the function closes over leaves of an argument.
    return _with_surrogate(value, eqx.filter_closure_convert(surrogate))


@eqx.filter_custom_jvp
def _with_surrogate(value: Array, surrogate: Callable[[], Array]) -> Array:
    return value


@_with_surrogate.def_jvp
def _with_surrogate_rule(primals, tangents) -> Any:
    value, surrogate = primals
    tangent, surrogate_tangent = tangents
    # Through the rule again, so that a derivative of higher order meets it, too.
    out = _with_surrogate(value, surrogate)
    if any(t is not None for t in jax.tree.leaves(surrogate_tangent)):
        _, derivative = eqx.filter_jvp(
            lambda fn: fn(), (surrogate,), (surrogate_tangent,)
        )
        derivative = derivative.astype(out.dtype)
        tangent = derivative if tangent is None else tangent + derivative
    return out, tangent


def column_reader(
    quantity: AbstractQuantity,
) -> Callable[[FlatOperator, tuple[Array, Array]], Array]:
    """A function that computes the part of the quantity for one pair of columns of a
    frame."""

    # The checkpoint makes reverse mode repeat a matvec instead of keeping its
    # intermediate results for all columns.
    @eqx.filter_checkpoint
    def read(operator, columns):
        left, right = columns
        return quantity.read(left, operator.mv(right))

    return read
