"""Functions of a Hermitian operator with deflated eigenvectors.

A basis Q of r vectors gives Ritz pairs (t_i, v_i), from the eigenvalues and eigenvectors
of Q* A Q, with residuals `r_i = A v_i - t_i v_i`, which are orthogonal to Q. By (3) in
`_operators/subspace.py`, with an operator A' that has the level s in place of the t_i,

    tr f(A) = tr f(A') + sum_i (f(t_i) - f(s)),

and the same for each entry of the diagonal, if all r_i are zero. If not, the neglected
part of A has the entries x* r_i between v_i and an eigenvector x of A' with an eigenvalue
m. With divided differences, it changes

    tr f(A)       by about sum_i |r_i|^2 f'[t_i, m],         of second order, and
    diag f(A)_a   by about 2 sum_i |(v_i)_a| |r_i| f[t_i, m],     of first order.

The largest values over the m between the ends of the spectrum are counted in the error.
The derivative of `f(t_i)` is `f'(t_i) v_i* dA v_i`.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from .._core.flat import FlatOperator, freeze
from .._core.results import failure, first_failure, RESULTS
from .._core.shifted import is_trace
from .._core.solution import Estimate
from .._numerics.dense import eigh, two_norm
from .._operators.door import Facts
from .._operators.subspace import level_of, Subspace
from .._quadrature.domain import check_domain
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach, FirstOrderFrame
from .._run.random_steps import refuse_random_steps
from .moving_diagonal import attach_to_diagonal, MovingPairs
from .on_subspace import (
    AbstractFunctionSubspaceTask,
    FunctionOfEigenvalues,
    read_on_subspace,
)
from .task import AbstractTaskOfFunction


# Points between the ends of the spectrum at which divided differences are compared. For
# functions with a bracket the ends alone would do, since their derivatives are monotonic.
_NUM_POINTS = 32
# The neglected part may take away this share of the smallest eigenvalue. Beyond it an
# expansion of a function that is infinite at zero may be far off.
_MAX_SHARE = 0.25


class DeflatedFunction(AbstractFunctionSubspaceTask):
    """A quantity of a function whose part on the span of eigenvectors is exact. It takes
    r matvecs, and one or two more. The exact answer ignores the vectors."""

    task: AbstractTaskOfFunction
    columns: Inexact[Array, "n r"]

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        estimate = self.task.exact(operator, facts, execution)
        error = jnp.zeros_like(estimate.std_err)
        extra = estimate.extra | {"deflation_error": _largest(error)}
        return dataclasses.replace(estimate, extra=extra)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        pairs = RitzPairs.of(Subspace.of(self.columns), operator, execution)
        deflated = pairs.subspace.compress(operator, pairs.level)
        function = FunctionOfEigenvalues.of(self.task, operator)
        quantity = self.task.quantity
        known = read_on_subspace(
            quantity,
            function.values(pairs.values) - function.values(pairs.level[None]),
            pairs.vectors,
        )
        if is_trace(quantity):
            slopes = jax.lax.stop_gradient(function.slopes(pairs.values))
            frame = FirstOrderFrame(pairs.vectors * slopes.conj(), pairs.vectors)
            known = attach(operator, known, frame, execution=execution)
        elif jnp.iscomplexobj(known):
            known = _refuse_derivative(operator, known)
        else:
            moving = MovingPairs(
                subspace=pairs.subspace,
                values=pairs.values,
                vectors=pairs.vectors,
                deflated=deflated.frozen,
                function=freeze(self.task.function),
            )
            num_steps = refuse_random_steps(self.task.num_steps)
            known = attach_to_diagonal(operator, known, moving, num_steps, execution)
        estimate = self.task.beside(known).run(deflated, k, key, execution)
        return self._finish(estimate, pairs, function, operator)

    def _finish(
        self,
        estimate: Estimate,
        pairs: "RitzPairs",
        function: FunctionOfEigenvalues,
        operator: FlatOperator,
    ) -> Estimate:
        extra, count = estimate.extra, self.columns.shape[1]
        ends = estimate.ends
        if ends is None:
            # Estimators of users may have none.
            level = jnp.stack([pairs.level, pairs.level])
            ends = extra.get("ritz_values", function.eigenvalues(level))
        function = freeze(function)
        error, share = pairs.error(function, ends)
        if not is_trace(self.task.quantity):
            error = error + pairs.error_of_diagonal(function, ends)
        error = jnp.where(jnp.isnan(error), jnp.inf, error).astype(estimate.std_err.dtype)
        value = jax.lax.stop_gradient(estimate.value)
        bar = jnp.hypot(estimate.std_err, estimate.unresolved)
        bar = jnp.hypot(bar, estimate.rounding * jnp.abs(value))
        inexact = two_norm(error) > two_norm(bar)
        if function.function.singular_at_zero:
            inexact |= share > _MAX_SHARE
        # The values on the subspace must be in the domain, too.
        seen = pairs.values
        operand = jnp.stack([jnp.min(seen), jnp.max(seen)])
        if function.function.of_singular_values:
            operand = jnp.stack([jnp.min(jnp.abs(seen)), jnp.max(jnp.abs(seen))])
        operand = function.eigenvalues(operand)
        operand = operand.at[1].max(ends[1])
        in_domain = check_domain(
            function.function, operator, operand, jnp.sum(function.values(seen)).real
        )
        if "sign" in extra:
            signs = jnp.sign(pairs.values) * jnp.sign(pairs.level)
            extra = extra | {"sign": extra["sign"] * jnp.prod(signs)}
        widened = estimate.map_bounds(
            lambda x: x.at[0, 0].add(-error).at[1, 0].add(error)
        )
        return dataclasses.replace(
            widened,
            unresolved=jnp.hypot(estimate.unresolved, error),
            num_matvecs=estimate.num_matvecs + pairs.num_matvecs,
            result=first_failure(
                in_domain,
                estimate.result,
                failure(inexact, RESULTS.inexact_deflation),
            ),
            extra=extra | {"deflation_error": _largest(error)},
            method=f"{estimate.method or self.name}, {count} vectors deflated",
        )


class RitzPairs(eqx.Module):
    """Ritz pairs of a subspace.

    - `values`, `vectors`: the t_i, and the v_i as columns. If the basis has fewer than r
        vectors, further values are the level, and their vectors may be zero.
    - `residuals`: the norms of the r_i.
    - `level`: s.
    """

    subspace: Subspace
    values: Real[Array, " r"]
    vectors: Inexact[Array, "n r"]
    residuals: Real[Array, " r"]
    level: Real[Array, ""]
    num_matvecs: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, subspace: Subspace, operator: FlatOperator, execution: AbstractExecution
    ) -> "RitzPairs":
        def product(x):
            return execution.matmat(operator.frozen, x)

        _, outside = subspace.generic_vectors()
        basis = subspace.basis
        images = product(jnp.concatenate([basis, outside[:, None]], axis=1))
        level, further = level_of(
            outside,
            subspace.remove(images[:, -1]),
            operator.sign,
            lambda x: product(x[:, None])[:, 0],
        )
        images = images[:, :-1]
        core = subspace.coordinates(images)
        core = (core + core.conj().T) / 2
        core = core + jnp.diag(jnp.where(subspace.present, 0, level)).astype(core.dtype)
        values, rotation = eigh(core)
        rest = jnp.matmul(subspace.remove(images), rotation, precision="highest")
        return cls(
            subspace=subspace,
            values=values,
            vectors=subspace.combine(rotation),
            residuals=jax.vmap(two_norm, in_axes=1)(rest),
            level=level,
            num_matvecs=images.shape[1] + 1 + further,
        )

    def error(
        self, function: FunctionOfEigenvalues, ends: Real[Array, "2"]
    ) -> tuple[Real[Array, ""], Real[Array, ""]]:
        """The error of the trace, and the largest share of an eigenvalue that the
        neglected part may take away. `ends` are the ends of the spectrum of A'."""
        points = self._points(function, ends)
        differences = self._largest_difference(function.slopes, points)
        nearest = jnp.min(jnp.abs(points)) * jnp.abs(self.values)
        share = self.residuals**2 / jnp.where(nearest > 0, nearest, 1)
        share = jnp.where((nearest > 0) | (self.residuals == 0), share, jnp.inf)
        return jnp.sum(self.residuals**2 * differences), jnp.sum(share)

    def error_of_diagonal(
        self, function: FunctionOfEigenvalues, ends: Real[Array, "2"]
    ) -> Real[Array, " n"]:
        """The first-order error of each entry of the diagonal."""
        points = self._points(function, ends)
        differences = self._largest_difference(function.values, points)
        return 2 * jnp.abs(self.vectors) @ (self.residuals * differences)

    def _points(
        self, function: FunctionOfEigenvalues, ends: Real[Array, "2"]
    ) -> Real[Array, " p"]:
        low, high = function.eigenvalues(ends)
        points = jnp.linspace(low, high, _NUM_POINTS)
        if function.function.of_singular_values:
            points = jnp.concatenate([points, -points])
        return points

    def _largest_difference(self, fn, points: Real[Array, " p"]) -> Real[Array, " r"]:
        """The largest modulus of `fn[t_i, m]` over the points m, for each t_i."""
        values, points = self.values[:, None], points[None, :]
        # Near points of the grid are moved off: its other points are not near.
        size = jnp.maximum(jnp.abs(values), jnp.abs(points))
        near = jnp.abs(values - points) <= 1e-3 * size
        moved = jnp.where(near, points + 1e-2 * size, points)
        gap = jnp.abs(moved - values)
        flat = jnp.append(values, moved.reshape(-1))
        at = fn(flat)
        change = at[len(values) :].reshape(moved.shape) - at[: len(values), None]
        ratio = jnp.abs(change) / jnp.where(gap > 0, gap, 1)
        return jnp.max(ratio, axis=1)


def _largest(error: Real[Array, "*q"]) -> Real[Array, ""]:
    return jnp.max(error)


@eqx.filter_custom_jvp
def _refuse_derivative(operator: FlatOperator, x: Array) -> Array:
    return x


@_refuse_derivative.def_jvp
def _refuse_derivative_rule(primals, tangents):
    if any(t is not None for t in jax.tree.leaves(tangents[0])):
        raise NotImplementedError(
            "`traceax.diagonal_of_function` of a complex function has no derivative in "
            "the operator where there is a `deflation`. Leave `deflation` out, or take "
            "the real and the imaginary part of the function one after the other."
        )
    return primals[1], tangents[1]
