from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.checks import check_window, plain_integer
from .._core.flat import FlatOperator
from .._numerics.dense import eigh, svd
from .._numerics.frechet import divided_differences, few_pairs
from .._numerics.gram_schmidt import unit
from .._quadrature.domain import subgradients_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import (
    combine_ritz_vectors,
    deviation_of,
    gauss_rule,
    QuadraticForm,
)
from .._quadrature.rounding import unresolved_of
from .._quadrature.rules import (
    bracket_of,
    change_below,
    changes_of,
    hidden_at,
    integrals,
    other_rules,
    seen_above,
)
from .._quadrature.tridiagonal import (
    Compression,
    longer,
    radau_factor,
    tridiagonal,
)
from .base import AbstractKrylovMethod
from .golub_kahan_recurrence import (
    golub_kahan_advance,
    golub_kahan_run,
    golub_kahan_start,
)


class GolubKahan(AbstractKrylovMethod):
    """Golub-Kahan bidiagonalisation, for functions of the singular values of an operator
    with at least as many rows as columns: in a step one product with it and one with its
    adjoint. $A^* A$ is never formed.

    Cost: `num_steps` products for each probe and as many with the adjoint, and for an
    m by n operator `O((m + n) num_steps^2)` operations, with `window=0` `O((m + n)
    num_steps)`. Memory: `num_steps` vectors of length n and as many of length m for each
    probe of a block; with `window=0` and no derivative, those of a step. The buffers are
    of the largest number of steps that [`traceax.AdaptiveSteps`][] allows.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.MatrixLinearOperator(3 * jnp.eye(300) - jnp.eye(300, k=1))
        estimator = tx.SLQEstimator(krylov=tx.GolubKahan(window=0))
        solution = tx.logdet(
            operator, estimator, k=20, num_steps=20, key=jax.random.key(0)
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `window`: as for [`traceax.Lanczos`][].

    ??? cite

        ```bibtex
        @article{golub1965calculating,
            author  = {Golub, Gene H. and Kahan, William},
            title   = {Calculating the Singular Values and Pseudo-Inverse of a Matrix},
            journal = {Journal of the Society for Industrial and Applied Mathematics,
                       Series B: Numerical Analysis},
            volume  = {2},
            number  = {2},
            pages   = {205--224},
            year    = {1965},
        }
        ```
    """

    window: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    products_per_step: ClassVar[int] = 2

    def __check_init__(self):
        check_window(self.window)

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return function.of_singular_values

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return golub_kahan_start(operator.mv, probe, most)

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        settings = {"window": self.window, "eps": operator.eps}
        products = operator.mv, operator.adjoint_mv
        return golub_kahan_advance(*products, state, first, last, **settings)

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        eps, run = operator.eps, golub_kahan_run(state, steps)
        square = run.norm**2

        def decomposed(diagonal, above):
            u, s, vh = svd(_bidiagonal(diagonal, above))
            return u, s, vh, values_at(function, s, eps)

        u, s, vh, values = decomposed(run.diagonal, run.above[:-1])
        slopes = subgradients_at(function, s, eps)
        value, magnitude = gauss_rule(vh[:, 0] ** 2, s, values, slopes)
        _, _, rows, moved = decomposed(run.projected_diagonal, run.projected_above)
        again = jnp.sum(rows[:, 0] ** 2 * moved)
        # Other rules in units of the largest singular value, so as not to overflow.
        unit_of = jnp.where(s[0] > 0, s[0], 1)
        diagonal, above, nodes = run.diagonal / unit_of, run.above / unit_of, s / unit_of
        floor, made = jnp.full_like(unit_of, eps / 8), run.last + 1
        lower = floor if function.singular_at_zero else jnp.zeros_like(floor)
        if lower_bound is not None:
            bound = jnp.asarray(lower_bound, s.dtype) / unit_of
            known = jnp.maximum(jnp.minimum(bound, nodes[-1]), lower)
            # A bound that is above a Ritz value is none.
            lower = jnp.where(bound - nodes[-1] > 8 * eps, lower, known)
        alpha = diagonal**2 + jnp.append(0, above[:-1]) ** 2
        edge = (diagonal[run.last] * above[-1:])[None]
        parts = tridiagonal(alpha, diagonal * above), edge, run.last, nodes**2, vh.T
        squared, changes, hidden = Compression(*parts), None, None
        if function.bracketed:
            least, smallest = jnp.maximum(lower, floor), unit_of * nodes[-1]
            change = change_below(function, smallest, unit_of * lower, unit_of * floor)
            hidden = hidden_at(squared, square, least**2, *change)
            end = jnp.sqrt(seen_above(squared, square, lower**2, least**2))
            index = jnp.arange(len(s))
            border = jnp.where(index == run.last, above[-1], 0)
            factor = _bidiagonal(diagonal, above[:-1])
            rules = [radau_factor(factor, border, u, nodes, end)]
            for part in 2, 4:
                kept = jnp.where(index == -(-made // part) - 1, 0, above)
                rules.append(longer(_bidiagonal(diagonal, kept[:-1]), 1))
            _, further, rows = svd(jnp.stack(rules))
            further = jnp.maximum(further.at[0, -1].set(end), lower)
            others = map(function, unit_of * further)
            other, *earlier = integrals(others, rows.mT, jnp.ones(1, bool))
            bracket = bracket_of(function, value, [other], edge, 2 * made - 1)
            changes = changes_of([value, *earlier], made, square)
        else:

            def of_squares(squares):
                return function(unit_of * jnp.sqrt(jnp.maximum(squares, lower**2)))

            squares, rows = eigh(other_rules(function, squared, lower**2))
            others = integrals(map(of_squares, squares), rows, jnp.ones(1, bool))
            bracket = bracket_of(function, value, others, edge, 2 * made - 1, square)

        slope = jnp.matmul(u, vh[:, 0] * slopes, precision="highest")
        _, size = unit(vh[:, 0] * slopes * s)
        residual = run.above[-1] * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        # That of `f(sqrt x)` at A* A, in the direction dA* A + A* dA, with A V = U B.
        total = s[:, None] + s
        share = jnp.where(total > 0, 2 * s[:, None] / jnp.where(total > 0, total, 1), 1)
        differences = share * divided_differences(s, values, slopes)
        left, right = few_pairs(differences, vh[:, 0], columns)
        return QuadraticForm(
            value=square * value,
            deviation=run.norm * deviation_of(vh[:, 0], values, value),
            left=run.norm * combine_ritz_vectors(left, u.T, run.left),
            right=run.norm * combine_ritz_vectors(right, vh, run.right),
            residual=residual,
            bracket=square * bracket,
            magnitude=square * magnitude,
            rounding=square * (again - value),
            extremes=s[jnp.array([-1, 0])],
            unresolved=unresolved_of(function, vh[:, 0] ** 2, s, values, eps, square),
            changes=changes,
            hidden=hidden,
        )


def _bidiagonal(
    diagonal: Real[Array, " s"], above: Real[Array, " s-1"]
) -> Real[Array, "s s"]:
    return jnp.diag(diagonal) + jnp.diag(above, 1)


GolubKahan.__init__.__doc__ = """**Arguments:**

- `window`: default is `None`, full reorthogonalisation.

**Raises:**

`ValueError` for a `window` that is neither None nor an integer, 0 or more.
"""
