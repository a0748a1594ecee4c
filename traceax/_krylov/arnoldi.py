import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.arithmetic import full_precision
from .._core.flat import FlatOperator
from .._numerics.dense import eigh, inverse
from .._numerics.small_matrix import rounded
from .._quadrature.functions import AbstractSpectralFunction, Power
from .._quadrature.quadratic_form import QuadraticForm
from .._quadrature.rules import finite, roundoff
from .arnoldi_recurrence import (
    arnoldi_advance,
    arnoldi_run,
    arnoldi_start,
    ArnoldiDecomposition,
)
from .base import AbstractKrylovMethod
from .lanczos_recurrence import unit


class Arnoldi(AbstractKrylovMethod):
    """Arnoldi, for functions of the eigenvalues of any square operator: one product in a
    step, and each new basis vector is orthogonalised against all others.

    With `num_steps` steps it is exact for polynomials of degree up to `num_steps`, half
    of what Lanczos reaches. Values are real for a real operator and complex for a complex
    one; for a function that is not real on real numbers give an operator of complex
    dtype.

    No bounds of the quadrature error are known. `stats["bounds"]`, and `"bracket"` for
    the functions that have one, are estimates: the value, plus and minus an error that is
    extrapolated from the changes over the last half of the steps. It is infinite where
    large changes do not shrink, and after a single step, except for polynomials. A
    function that is infinite at 0 may change by an eigenvalue near 0 that no step has
    seen, and this counts until the squared residual of $A x = z$, relative to that of z,
    is below 1/(2n). Such an eigenvalue is taken to be an eighth of the machine epsilon
    times the largest entry of H, or the `lower_bound` of the estimator if that is larger.

    Cost: `num_steps` products for each probe, `O(n num_steps^2)` operations, and
    `num_steps` vectors of length n.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        weights = jnp.triu(jax.random.normal(jax.random.key(0), (300, 300)), 1) / 10
        operator = lx.MatrixLinearOperator(weights)  # nilpotent, so tr exp is 300
        solution = tx.trace_of_function(
            operator, tx.Exp(), k=20, num_steps=20, key=jax.random.key(1)
        )
        print(solution.value, "+-", solution.std_err)
        ```

    ??? cite

        ```bibtex
        @article{saad1992analysis,
            author  = {Saad, Yousef},
            title   = {Analysis of Some {Krylov} Subspace Approximations to the Matrix
                       Exponential Operator},
            journal = {SIAM Journal on Numerical Analysis},
            volume  = {29},
            number  = {1},
            pages   = {209--228},
            year    = {1992},
        }
        ```
    """

    products_per_step: ClassVar[int] = 1

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return not function.of_singular_values

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return probe, arnoldi_start(probe, most)

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        probe, run = state
        with full_precision(operator.mv) as mv:
            return probe, arnoldi_advance(mv, run, first, last, eps=operator.eps)

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        probe, run = state[0], arnoldi_run(state[1], steps)
        last = run.last
        window = jnp.maximum(steps // 4, 1)
        sizes = jnp.stack([steps - 1, steps - window, steps - 2 * window])
        with jax.default_matmul_precision("highest"):
            matrix = _fill(run.matrix, run.basis, function)
            # The effect of rounding: the same with perturbed entries, and transposed,
            # since then the eigenvectors have other errors.
            again = rounded(matrix, operator.eps).T
            shorter = jax.vmap(lambda size: _leading(matrix, size, function))(sizes)
            each, slopes = jax.vmap(function.of_matrix)(
                jnp.concatenate([jnp.stack([matrix, again]), shorter])
            )
            slope = slopes[0, :, 0]
            moved = matrix @ slope
            size = unit(moved)[1]
            gradient = run.norm * (slope @ run.basis)
        value, again, *before = each[:, 0, 0]
        ends = eigh((matrix + matrix.conj().T) / 2)[0][jnp.array([0, -1])]
        total = unit(each[0, :, 0])[1]
        # Terms may also cancel.
        floor = 8 * float(jnp.finfo(matrix.dtype).eps) * total
        noise = jnp.abs(again - value)
        noise = floor + 4 * jnp.where(jnp.isfinite(noise), noise, 0)
        error = _change(value, before, steps, total, noise)
        least = roundoff(jnp.max(jnp.abs(matrix)), operator.eps)
        if lower_bound is not None:
            bound = jnp.asarray(lower_bound, least.dtype)
            least = jnp.maximum(least, jnp.minimum(bound, ends[0]))
        deviation = unit(each[0, :, 0].at[0].set(0))[1]
        error = error + _hidden(matrix, run, function, value, deviation, least)
        exact = (run.residual == 0) | (steps >= _degree(function))
        error = jnp.where(exact, 0, error) + floor
        square = run.norm**2
        error = finite(error, square)
        # So may what rounding does to the matrix; then it may change anything.
        anything = finite(jnp.full_like(square, jnp.inf), square)
        rounding = jnp.where(jnp.isfinite(again), again - value, anything)
        sensitivity = jnp.where(jnp.isfinite(moved[0]), jnp.abs(moved[0]), 0)
        return QuadraticForm(
            value=square.astype(value.dtype) * value,
            deviation=run.norm * deviation,
            # In the mean tr(f'(A) dA), which is tr(dA f'(A)): no adjoint is needed.
            left=probe[None],
            right=gradient[None],
            residual=run.residual * jnp.abs(slope[last]) / jnp.where(size > 0, size, 1),
            bracket=square * (value.real + jnp.stack([-error, error])),
            magnitude=square * jnp.maximum(jnp.abs(value), sensitivity),
            rounding=square * rounding,
            extremes=ends,
        )


def _fill(
    matrix: Inexact[Array, "s s"],
    basis: Inexact[Array, "s n"],
    function: AbstractSpectralFunction,
) -> Inexact[Array, "s s"]:
    """H with numbers of the function's domain on the diagonal after a breakdown."""
    missing = jnp.max(jnp.abs(basis), axis=1) == 0
    return matrix + jnp.diag(jnp.where(missing, _inside(matrix, function), 0))


def _leading(
    matrix: Inexact[Array, "s s"],
    size: Int[Array, ""],
    function: AbstractSpectralFunction,
) -> Inexact[Array, "s s"]:
    """H of fewer steps, at least one, filled likewise."""
    made = jnp.arange(len(matrix)) < jnp.maximum(size, 1)
    leading = jnp.where(made[:, None] & made, matrix, 0)
    return leading + jnp.diag(jnp.where(made, 0, _inside(matrix, function)))


def _inside(
    matrix: Inexact[Array, "s s"], function: AbstractSpectralFunction
) -> Inexact[Array, ""]:
    first, largest = matrix[0, 0], jnp.max(jnp.abs(matrix))
    inside = jnp.where(largest > 0, largest, 1).astype(matrix.dtype)
    if not function.semidefinite_domain:
        # That of a skew operator is 0, where a callable may have a pole.
        eps = float(jnp.finfo(matrix.dtype).eps)
        inside = jnp.where(jnp.abs(first) > eps * largest, first, inside)
    return inside


def _degree(function: AbstractSpectralFunction) -> float:
    """Of a polynomial; infinite for other functions."""
    if isinstance(function, Power) and not function.semidefinite_domain:
        return function.exponent
    return math.inf


def _change(
    value: Inexact[Array, ""],
    before: Sequence[Inexact[Array, ""]],
    steps: Int[Array, ""] | int,
    total: Real[Array, ""],
    noise: Real[Array, ""],
) -> Real[Array, ""]:
    """The quadrature error, extrapolated from the changes over the last steps. `before`
    has the values one step earlier, and one and two quarters of the steps earlier;
    `total` is the norm of f(H) e_1; changes below `noise` are rounding.

    Where changes shrink by the same factor from one quarter to the next, those that
    follow are a geometric series. Four times its sum also covers algebraic decay, as of
    roots and logarithms. Where a large change does not shrink, nothing is known.
    docs/devdocs/quadrature.md has the measurements."""
    one, quarter, half = before
    changes = jnp.abs(jnp.stack([value - one, value - quarter, quarter - half]))
    # A shorter run may leave the domain.
    step, late, early = jnp.where(jnp.isfinite(changes), changes, jnp.inf)
    late, early = jnp.maximum(step, late), jnp.where(jnp.isfinite(early), early, 0)
    shrinks = late < 0.6 * early
    ratio = jnp.where(shrinks, late / jnp.where(shrinks, early, 1), 0.6)
    settled = late <= jnp.where(shrinks, 0.2, 0.05) * total
    following = jnp.where(settled, 4 * late * ratio / (1 - ratio), jnp.inf)
    following = jnp.where(late <= noise, 2 * late, following)
    # One step has no change to show.
    return jnp.where(steps > 1, jnp.maximum(2 * step, following), jnp.inf)


def _hidden(
    matrix: Inexact[Array, "s s"],
    run: ArnoldiDecomposition,
    function: AbstractSpectralFunction,
    value: Inexact[Array, ""],
    deviation: Real[Array, ""],
    least: Real[Array, ""],
) -> Real[Array, ""] | float:
    """For a function that is infinite at 0, what an eigenvalue of the size `least` would
    change that no step has seen. The residual of `A x = z` keeps the whole component of z
    in its direction, on average 1/n of the squared norm.

    If the residual is below half of that, there is no such eigenvalue: ten probes miss
    one in 0.2% of calls. A fast falling part of the deviation counts there, so that steps
    that are chosen from one probe are enough for the others, whose residuals differ."""
    if not function.singular_at_zero:
        if function.semidefinite_domain:
            return 0.0
        pole = ~jnp.isfinite(function(jnp.zeros_like(matrix[0, :1]))[0])
    else:
        pole = True
    n = run.basis.shape[1]
    left = n * (run.residual * jnp.abs(inverse(matrix)[run.last, 0])) ** 2
    jump = jnp.abs(function(least.astype(matrix.dtype)[None])[0] - value)
    hidden = jump / n * jnp.where(left < 1, left, 1)
    rest = jnp.minimum(hidden, 2 * left**2 * deviation)
    return jnp.where(pole, jnp.where(left < 0.5, rest, hidden), 0)
