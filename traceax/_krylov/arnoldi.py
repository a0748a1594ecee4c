"""Quadratic forms of any square A by Arnoldi.

With `A Q = Q H + r e_s*` from the probe z,

    z* f(A) z ~ ||z||^2 e_1* f(H) e_1                                        (`value`)

is exact for polynomials of degree up to s: for j < s, `A^j z = ||z|| Q H^j e_1`, and z* A
times this vector is `||z||^2 e_1* H^(j+1) e_1`. Saad, SIAM J. Numer. Anal. 29, 1992.

No bounds are known, so the quadrature error is extrapolated from the values
`v_j = e_1* f(H_j) e_1` of the leading submatrices H_j of H. With w = s / 4 (`window`),
the changes `|v_s - v_(s-1)|` (`step`), `|v_s - v_(s-w)|` (`late`) and
`|v_(s-w) - v_(s-2w)|` (`early`), and the ratio q of the last two,

    error = max(2 step, 4 late q / (1 - q)).

docs/devdocs/quadrature.md ("Operators that are not Hermitian") has the measurements.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.arithmetic import full_precision
from .._core.flat import FlatOperator
from .._numerics.dense import eigh, inverse
from .._numerics.small_matrix import perturb_entries
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.functions import Power
from .._quadrature.quadratic_form import QuadraticForm
from .._quadrature.rules import clip_to_finite, roundoff
from .arnoldi_recurrence import (
    arnoldi_advance,
    arnoldi_run,
    arnoldi_start,
    ArnoldiDecomposition,
)
from .base import AbstractKrylovMethod
from .lanczos_recurrence import unit


# The largest ratio of the changes over two successive quarters of the steps that counts
# as decay. A larger one is replaced by it, for which the factor `4 q / (1 - q)` is 6.
_MAX_RATIO = 0.6

# A change that is a larger part of ||f(H) e_1|| has not settled, and its error is
# infinite: the inverse of a kernel grows by a factor in each step until the smallest
# eigenvalues are found. The second number is for changes that do not shrink.
_SETTLED, _SETTLED_WITHOUT_SHRINKING = 0.2, 0.05

# Changes that decay geometrically leave `late q / (1 - q)`. Those of roots and logarithms
# decay like a power of s, for which four times as much is enough. With these constants,
# the mean error of ten probes was above the estimate in more than a tenth of eight draws
# in 5 of 1535 cases, all of 4 steps.
_ALGEBRAIC_DECAY = 4

# Terms of the sum `e_1* f(H) e_1` may cancel, which costs roundoffs of its largest terms.
# A smaller number misses rounding of long sums; a larger one hides small changes.
_CANCELLATION_ROUNDOFFS = 8

# The share of the mean squared component along an eigenvector near 0, below which a
# residual shows that there is none. Of calls with ten probes, 0.2% have all components
# below it.
_MIN_COMPONENT = 0.5


class Arnoldi(AbstractKrylovMethod):
    """Arnoldi, for functions of the eigenvalues of any square operator. Each new basis
    vector is orthogonalised against all others.

    With `num_steps` steps it is exact for polynomials of degree up to `num_steps`, half
    the degree that Lanczos reaches. Values are real for a real operator and complex for a
    complex one. A function that is not real on real numbers needs an operator of complex
    dtype.

    No bounds of the quadrature error are known. `stats["bounds"]`, and `"bracket"` for
    the functions that have one, are estimates: the value, plus and minus an error that is
    extrapolated from the changes over the last half of the steps. The error is infinite
    where large changes do not shrink, and after a single step, except for polynomials.

    For a function that is infinite at 0, the error includes the effect of an overlooked
    eigenvalue near 0, until the squared residual norm of $A x = z$, relative to the
    squared norm of z, is below 1/(2n). The size of such an eigenvalue is assumed to be an
    eighth of the machine epsilon times the largest entry of H, or the `lower_bound` of
    the estimator if that is larger.

    Cost for each probe: `num_steps` matvecs, and `O(n num_steps^2)` operations. Memory
    for each probe of a block: `num_steps` vectors of length n.

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
            matrix = _fill_diagonal(run.matrix, run.basis, function)
            # The effect of rounding, from H with perturbed entries. It is transposed,
            # since the eigenvectors of the transpose have other rounding errors.
            perturbed = perturb_entries(matrix, operator.eps).T
            leading = jax.vmap(lambda size: _leading_submatrix(matrix, size, function))
            matrices = jnp.concatenate([jnp.stack([matrix, perturbed]), leading(sizes)])
            functions, slopes = jax.vmap(function.of_matrix)(matrices)
            slope = slopes[0, :, 0]
            image = matrix @ slope
            size = unit(image)[1]
            gradient = run.norm * (slope @ run.basis)
        value, again, *earlier = functions[:, 0, 0]
        ends = eigh((matrix + matrix.conj().T) / 2)[0][jnp.array([0, -1])]
        column = functions[0, :, 0]
        total = unit(column)[1]
        floor = _CANCELLATION_ROUNDOFFS * float(jnp.finfo(matrix.dtype).eps) * total
        noise = jnp.abs(again - value)
        # One sample of rounding may be small by chance, so it counts four times.
        noise = floor + 4 * jnp.where(jnp.isfinite(noise), noise, 0)
        error = _extrapolated_error(value, earlier, steps=steps, total=total, noise=noise)
        smallest = roundoff(jnp.max(jnp.abs(matrix)), operator.eps)
        if lower_bound is not None:
            bound = jnp.asarray(lower_bound, smallest.dtype)
            smallest = jnp.maximum(smallest, jnp.minimum(bound, ends[0]))
        deviation = unit(column.at[0].set(0))[1]
        error = error + _hidden_error(
            matrix, run, function, value=value, deviation=deviation, smallest=smallest
        )
        # The rule is exact for an invariant subspace, and for polynomials. Rounding
        # remains.
        exact = (run.residual == 0) | (steps >= _exact_degree(function))
        error = jnp.where(exact, 0, error) + floor
        square = run.norm**2
        error = clip_to_finite(error, square)
        # Rounding may move the perturbed matrix out of the domain. Then it may change the
        # value by any amount.
        anything = clip_to_finite(jnp.full_like(square, jnp.inf), square)
        rounding = jnp.where(jnp.isfinite(again), again - value, anything)
        sensitivity = jnp.where(jnp.isfinite(image[0]), jnp.abs(image[0]), 0)
        return QuadraticForm(
            value=square.astype(value.dtype) * value,
            deviation=run.norm * deviation,
            # `z* dA f'(A) z`, whose mean is tr(dA f'(A)) = tr(f'(A) dA). So f'(A)* z,
            # and with it the adjoint of A, is not needed.
            left=probe[None],
            right=gradient[None],
            residual=run.residual * jnp.abs(slope[last]) / jnp.where(size > 0, size, 1),
            bracket=square * (value.real + jnp.stack([-error, error])),
            magnitude=square * jnp.maximum(jnp.abs(value), sensitivity),
            rounding=square * rounding,
            extremes=ends,
        )


def _fill_diagonal(
    matrix: Inexact[Array, "s s"],
    basis: Inexact[Array, "s n"],
    function: AbstractSpectralFunction,
) -> Inexact[Array, "s s"]:
    """H, with a number of the function's domain on the diagonal after a breakdown."""
    missing = jnp.max(jnp.abs(basis), axis=1) == 0
    return matrix + jnp.diag(jnp.where(missing, _filling(matrix, function), 0))


def _leading_submatrix(
    matrix: Inexact[Array, "s s"],
    size: Int[Array, ""],
    function: AbstractSpectralFunction,
) -> Inexact[Array, "s s"]:
    """H of the first `size` steps, at least one, with a diagonal that is filled likewise:
    the filled part is decoupled and has no weight."""
    is_leading = jnp.arange(len(matrix)) < jnp.maximum(size, 1)
    leading = jnp.where(is_leading[:, None] & is_leading, matrix, 0)
    return leading + jnp.diag(jnp.where(is_leading, 0, _filling(matrix, function)))


def _filling(
    matrix: Inexact[Array, "s s"], function: AbstractSpectralFunction
) -> Inexact[Array, ""]:
    """A number of the function's domain, of the size of H: the largest modulus in H, or
    for a function of all numbers `h_11`, a Rayleigh quotient of A."""
    first, largest = matrix[0, 0], jnp.max(jnp.abs(matrix))
    filling = jnp.where(largest > 0, largest, 1).astype(matrix.dtype)
    if not function.semidefinite_domain:
        # For a skew operator h_11 is 0, where a callable may have a pole.
        eps = float(jnp.finfo(matrix.dtype).eps)
        filling = jnp.where(jnp.abs(first) > eps * largest, first, filling)
    return filling


def _exact_degree(function: AbstractSpectralFunction) -> float:
    """The degree of a polynomial; infinite for other functions."""
    if isinstance(function, Power) and not function.semidefinite_domain:
        return function.exponent
    return math.inf


def _extrapolated_error(
    value: Inexact[Array, ""],
    earlier: Sequence[Inexact[Array, ""]],
    steps: Int[Array, ""] | int,
    total: Real[Array, ""],
    noise: Real[Array, ""],
) -> Real[Array, ""]:
    """The quadrature error, extrapolated from changes over the last half of the steps.

    - `earlier`: the values one step, one window and two windows earlier.
    - `total`: the norm of f(H) e_1.
    - `noise`: the size of changes that are only rounding.
    """
    one_step, one_window, two_windows = earlier
    changes = jnp.abs(
        jnp.stack([value - one_step, value - one_window, one_window - two_windows])
    )
    # The Ritz values of a shorter run may leave the domain: a late change that is not
    # known counts as infinite, and an early one as 0, which shows no decay.
    step, late, early = jnp.where(jnp.isfinite(changes), changes, jnp.inf)
    late, early = jnp.maximum(step, late), jnp.where(jnp.isfinite(early), early, 0)
    shrinks = late < _MAX_RATIO * early
    ratio = jnp.where(shrinks, late / jnp.where(shrinks, early, 1), _MAX_RATIO)
    limit = jnp.where(shrinks, _SETTLED, _SETTLED_WITHOUT_SHRINKING)
    settled = late <= limit * total
    series = _ALGEBRAIC_DECAY * late * ratio / (1 - ratio)
    remaining = jnp.where(settled, series, jnp.inf)
    # Changes by rounding do not shrink, and say nothing of the quadrature error.
    remaining = jnp.where(late <= noise, 2 * late, remaining)
    # A single step has no change to extrapolate from.
    return jnp.where(steps > 1, jnp.maximum(2 * step, remaining), jnp.inf)


def _hidden_error(
    matrix: Inexact[Array, "s s"],
    run: ArnoldiDecomposition,
    function: AbstractSpectralFunction,
    value: Inexact[Array, ""],
    deviation: Real[Array, ""],
    smallest: Real[Array, ""],
) -> Real[Array, ""] | float:
    """The change of a form by an overlooked eigenvalue of the size `smallest`, for a
    function that is infinite at 0.

    An isolated eigenvalue near 0 changes nothing before it is found. But the residual of
    `A x = z` in the Krylov space is `p(A) z` with p(0) = 1, so it keeps the whole
    component of z along the eigenvector. The mean of this component, squared, is 1/n of
    ||z||^2, so the squared residual times n (`count`) is at least about 1 while there is
    such an eigenvalue."""
    if not function.singular_at_zero:
        if function.semidefinite_domain:
            return 0.0
        # A callable does not say whether it has a pole at 0.
        pole = ~jnp.isfinite(function(jnp.zeros_like(matrix[0, :1]))[0])
    else:
        pole = True
    n = run.basis.shape[1]
    # The residual of x = Q H^(-1) e_1 is -r e_s* H^(-1) e_1, for ||z|| = 1.
    count = n * (run.residual * jnp.abs(inverse(matrix)[run.last, 0])) ** 2
    jump = jnp.abs(function(smallest.astype(matrix.dtype)[None])[0] - value)
    hidden = jump / n * jnp.where(count < 1, count, 1)
    # Below the limit there is no such eigenvalue. A part of the deviation that falls fast
    # counts there: steps are chosen from one probe, and the residuals of others differ.
    excluded = jnp.minimum(hidden, 2 * count**2 * deviation)
    return jnp.where(pole, jnp.where(count < _MIN_COMPONENT, excluded, hidden), 0)
