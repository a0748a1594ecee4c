from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.checks import check_window, plain_integer
from .._core.flat import FlatOperator
from .._numerics.dense import eigh
from .._numerics.frechet import divided_differences, few_pairs
from .._numerics.gram_schmidt import unit
from .._quadrature.domain import (
    clip_to_domain,
    mark_poles,
    slopes_at,
    used_nodes,
    values_at,
)
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
    lower_end,
    other_nodes,
    other_rules,
    roundoff,
    seen_above,
)
from .._quadrature.tridiagonal import (
    apply_to_first,
    Compression,
    first_steps,
    longer,
    tridiagonal,
)
from .base import AbstractKrylovMethod
from .lanczos_recurrence import lanczos_advance, lanczos_run, lanczos_start


class Lanczos(AbstractKrylovMethod):
    """Lanczos, for functions of the eigenvalues of a Hermitian operator: one product in a
    step, and with `window=None` one vector of length n kept for each step. Gauss and
    Gauss-Radau rules from the tridiagonal matrix give the value and its bracket.

    Cost: `num_steps` products for each probe, and `O(n num_steps^2)` operations, with
    `window=0` `O(n num_steps)`. Memory: `num_steps` vectors of length n for each probe
    of a block; with `window=0` and no derivative, those of a step. The buffers are of
    the largest number of steps that [`traceax.AdaptiveSteps`][] allows.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 3 * jnp.eye(300) - jnp.eye(300, k=1) - jnp.eye(300, k=-1)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        estimator = tx.SLQEstimator(krylov=tx.Lanczos(window=0))
        solution = tx.logdet(
            operator, estimator, k=20, num_steps=20, key=jax.random.key(0)
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `window`: how many of the last basis vectors each new one is orthogonalised against.
        `None`: all, so that rounding errors play no role. 0: none, which is fastest, and
        needs more steps for the same accuracy once Ritz values have converged.

    ??? cite

        ```bibtex
        @article{lanczos1950iteration,
            author  = {Lanczos, Cornelius},
            title   = {An Iteration Method for the Solution of the Eigenvalue Problem of
                       Linear Differential and Integral Operators},
            journal = {Journal of Research of the National Bureau of Standards},
            volume  = {45},
            number  = {4},
            pages   = {255--282},
            year    = {1950},
        }

        @book{golub2010matrices,
            author    = {Golub, Gene H. and Meurant, G{\\'e}rard},
            title     = {Matrices, Moments and Quadrature with Applications},
            publisher = {Princeton University Press},
            year      = {2010},
        }
        ```
    """

    window: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    products_per_step: ClassVar[int] = 1

    def __check_init__(self):
        check_window(self.window)

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return operator.hermitian and not function.of_singular_values

    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        return lanczos_start(probe, most, window=self.window)

    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        settings = {"window": self.window, "eps": operator.eps}
        return lanczos_advance(operator.mv, state, first, last, **settings)

    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
        largest: Real[Array, ""] | float = -jnp.inf,
    ) -> QuadraticForm:
        """As for every method. `largest` is an eigenvalue that is certain to exist."""
        eps, run = operator.eps, lanczos_run(state, steps)
        matrix = tridiagonal(run.alpha, run.beta)
        nodes, vectors = eigh(matrix)
        square, weights = run.norm**2, vectors[0] ** 2
        used = used_nodes(function, nodes, weights)
        values = values_at(function, used, eps)
        slopes = slopes_at(function, used, eps)
        value, magnitude = gauss_rule(weights, nodes, values, slopes)

        coupling = run.beta[-1:, None]
        compression = Compression(matrix, coupling, run.last, nodes, vectors)
        lower, hidden = lower_end(function, compression, lower_bound, eps), None
        floor = roundoff(compression.largest, eps)
        if function.bracketed:
            least = jnp.maximum(lower, floor)
            change = change_below(function, nodes[0], lower, floor)
            hidden = hidden_at(compression, square, least, *change)
            lower = seen_above(compression, square, lower, least)
        # All further rules together, which compiles faster; but not with the first one,
        # so that a call of which only the value is used does without.
        rules, made = other_rules(function, compression, lower, largest), run.last + 1
        again = longer(tridiagonal(run.alpha, run.projected), 1)
        shares = [again]
        if function.bracketed:
            shares += [first_steps(matrix, -(-made // part)) for part in (2, 4)]
        further, directions = eigh(jnp.concatenate([rules, jnp.stack(shares)]))
        bounds, further = further[: len(rules)], further[len(rules) :]
        others = [*map(function, other_nodes(function, bounds, lower))]
        for moved in further.at[0].add(run.neglected):
            inner = clip_to_domain(function, moved, floor)
            others.append(mark_poles(function, moved, function(inner)))
        others = integrals(others, directions, jnp.ones(1, bool))
        others, (again, *earlier) = others[: len(rules)], others[len(rules) :]
        degree = 2 * made - 1
        bracket = bracket_of(function, value, others, coupling, degree, square)
        changes = changes_of([value, *earlier], made, square) if earlier else None

        slope = apply_to_first(nodes, vectors, slopes)
        _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
        residual = run.beta[-1] * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        differences = divided_differences(used, values, slopes)
        left, right = few_pairs(differences, vectors[0], columns)
        return QuadraticForm(
            value=square * value,
            deviation=run.norm * deviation_of(vectors[0], values, value),
            left=run.norm * combine_ritz_vectors(left, vectors.T, run.basis),
            right=run.norm * combine_ritz_vectors(right, vectors.T, run.basis),
            residual=residual,
            bracket=square * bracket,
            magnitude=square * magnitude,
            rounding=square * (again - value),
            extremes=nodes[jnp.array([0, -1])],
            unresolved=unresolved_of(function, weights, used, values, eps, square),
            changes=changes,
            hidden=hidden,
        )


Lanczos.__init__.__doc__ = """**Arguments:**

- `window`: default is `None`, full reorthogonalisation.

**Raises:**

`ValueError` for a `window` that is neither None nor an integer, 0 or more.
"""
