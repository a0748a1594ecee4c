from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._execution import full_precision
from .._flat import FlatOperator
from .._kernel.arnoldi import Arnoldi as Run, arnoldi_advance, arnoldi_run, arnoldi_start
from .._kernel.dense import eigh
from .._kernel.lanczos import unit
from .._kernel.small_matrix import rounded
from .functions import AbstractSpectralFunction
from .krylov import AbstractKrylovMethod
from .quadratic_form import finite, QuadraticForm


class Arnoldi(AbstractKrylovMethod):
    """Arnoldi, for functions of the eigenvalues of any square operator: one product in a
    step, and each new basis vector is orthogonalised against all others.

    With `num_steps` steps it is exact for polynomials of degree up to `num_steps`, half
    of what Lanczos reaches. Values are real for a real operator and complex for a complex
    one; for a function that is not real on real numbers give an operator of complex
    dtype.

    No bounds of the quadrature error are known. `stats["bounds"]`, and `"bracket"` for
    the functions that have one, are estimates: around the value, to each side, twice the
    change by one step less, or by one step or as many again that are extrapolated as if
    the operator were Hermitian, whichever is larger.

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
        with jax.default_matmul_precision("highest"):
            matrix = _fill(run.matrix, run.basis, function)
            shorter = matrix.at[last, last - 1].set(0) if len(matrix) > 1 else matrix
            # The effect of rounding: the same with perturbed entries, and transposed,
            # since then the eigenvectors have other errors.
            again = rounded(matrix, operator.eps).T
            each, slopes = jax.vmap(function.of_matrix)(
                jnp.stack([matrix, shorter, again])
            )
            longer, _ = function.of_matrix(_extend(matrix, run, 1))
            # By one step little may change although many would change much.
            longest, _ = function.of_matrix(_extend(matrix, run, len(matrix)))
            slope = slopes[0, :, 0]
            moved = matrix @ slope
            size = unit(moved)[1]
            gradient = run.norm * (slope @ run.basis)
        value, before, again = each[:, 0, 0]
        change = jnp.abs(jnp.stack([before, longer[0, 0]]) - value)
        change = jnp.max(jnp.where(jnp.isnan(change), jnp.inf, change))
        # Many steps that are invented may leave the domain where the operator does not.
        far = jnp.abs(longest[0, 0] - value)
        change = jnp.maximum(change, jnp.where(jnp.isfinite(far), far, 0))
        # Terms may also cancel.
        floor = 8 * float(jnp.finfo(matrix.dtype).eps) * unit(each[0, :, 0])[1]
        error = jnp.where(run.residual > 0, 2 * change, 0) + floor
        square = run.norm**2
        error = finite(error, square)
        # So may what rounding does to the matrix; then it may change anything.
        anything = finite(jnp.full_like(square, jnp.inf), square)
        rounding = jnp.where(jnp.isfinite(again), again - value, anything)
        sensitivity = jnp.where(jnp.isfinite(moved[0]), jnp.abs(moved[0]), 0)
        ends = eigh((matrix + matrix.conj().T) / 2)[0][jnp.array([0, -1])]
        return QuadraticForm(
            value=square.astype(value.dtype) * value,
            deviation=run.norm * unit(each[0, :, 0].at[0].set(0))[1],
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
    first, largest = matrix[0, 0], jnp.max(jnp.abs(matrix))
    inside = jnp.where(largest > 0, largest, 1).astype(matrix.dtype)
    if not function.semidefinite_domain:
        # That of a skew operator is 0, where a callable may have a pole.
        eps = float(jnp.finfo(matrix.dtype).eps)
        inside = jnp.where(jnp.abs(first) > eps * largest, first, inside)
    return matrix + jnp.diag(jnp.where(missing, inside, 0))


def _extend(matrix: Inexact[Array, "s s"], run: Run, more: int) -> Inexact[Array, "p p"]:
    """H with so many steps more, or as many as were made if that is fewer: they repeat
    the last entry of the diagonal and, on either side of it, the last coupling."""
    s, last, coupling = len(matrix), run.last, run.residual.astype(matrix.dtype)
    links = jnp.where(jnp.arange(more - 1) < last, coupling, 0)
    again = jnp.diag(links, 1) + jnp.diag(links, -1)
    again = again + matrix[last, last] * jnp.eye(more, dtype=matrix.dtype)
    longer = jax.scipy.linalg.block_diag(matrix, again)
    return longer.at[s, last].set(coupling).at[last, s].set(coupling)
