"""Stochastic Lanczos quadrature: quadratic forms of a Hermitian A by Lanczos.

With `A V = V T + beta_s v_(s+1) e_s*` from the probe z, and the eigenpairs
`(theta_j, y_j)` of T (`nodes`, `vectors`), the Gauss rule is

    z* f(A) z ~ ||z||^2 e_1* f(T) e_1 = ||z||^2 sum_j |y_1j|^2 f(theta_j)    (`value`)

with ||z||^2 (`square`) and |y_1j|^2 (`weights`). Its derivative in a direction dA is that
of `e_1* f(T) e_1` for `dT = V* dA V`: with the divided differences F_ij of f at the nodes
(`differences`)

    ||z||^2 sum_ij y_1i F_ij y_1j (V y_i)* dA (V y_j)                (`left`, `right`).

Golub and Meurant, Matrices, Moments and Quadrature with Applications, 2010, chapters 6
and 7; Higham, Functions of Matrices, 2008, section 3.2 for F. docs/devdocs/quadrature.md
and docs/devdocs/gradients.md have the derivations.
"""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.checks import check_window, plain_integer
from .._core.flat import FlatOperator
from .._numerics.dense import eigh
from .._numerics.frechet import divided_differences, few_pairs
from .._numerics.gram_schmidt import unit
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.domain import (
    clip_to_domain,
    mark_poles,
    slopes_at,
    used_nodes,
    values_at,
)
from .._quadrature.quadratic_form import (
    combine_ritz_vectors,
    deviation_of,
    gauss_rule,
    QuadraticForm,
)
from .._quadrature.rounding import unresolved_error
from .._quadrature.rules import (
    bracket_end,
    bracket_of,
    change_at_lower_end,
    comparison_nodes,
    comparison_rules,
    gauss_changes,
    hidden_eigenvalues,
    integrals,
    lower_end,
    roundoff,
)
from .._quadrature.tridiagonal import (
    apply_to_first,
    Compression,
    first_steps,
    pad,
    tridiagonal,
)
from .base import AbstractKrylovMethod
from .lanczos_recurrence import lanczos_advance, lanczos_run, lanczos_start


class Lanczos(AbstractKrylovMethod):
    """Lanczos, for functions of the eigenvalues of a Hermitian operator. Gauss and
    Gauss-Radau rules from the tridiagonal matrix give the value and its bracket.

    Cost for each probe: `num_steps` matvecs, and `O(n num_steps^2)` operations, or with
    `window=0` `O(n num_steps)`. Memory for each probe of a block: `num_steps` vectors of
    length n, or with `window=0` and no derivative only the vectors of one step. With
    [`traceax.AdaptiveSteps`][] the buffers have room for the largest number of steps.

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
        `None` means all, so that rounding errors play no role. 0 means none, which is
        fastest, and needs more steps for the same accuracy once Ritz values have
        converged.

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
    reads_earlier_steps: ClassVar[bool] = True

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
        return lanczos_advance(
            operator.mv, state, first, last, window=self.window, eps=operator.eps
        )

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
            smallest = jnp.maximum(lower, floor)
            change, is_infinite = change_at_lower_end(function, nodes[0], lower, floor)
            hidden = hidden_eigenvalues(
                compression, square, at=smallest, change=change, is_infinite=is_infinite
            )
            # Below this end the run excludes eigenvalues. A Radau node there, and not at
            # `lower`, makes the bracket of a steep function narrower.
            lower = bracket_end(compression, square, lower, smallest)
        # All further rules are factorised together, which compiles faster. The Gauss rule
        # is apart, so that a call which uses nothing but the value makes no other rule.
        rules = comparison_rules(function, compression, lower, largest)
        gauss_rules = [pad(tridiagonal(run.alpha, run.projected), 1)]
        if function.bracketed:
            gauss_rules += [first_steps(matrix, -(-steps // part)) for part in (2, 4)]
        stack = jnp.concatenate([rules, jnp.stack(gauss_rules)])
        rule_nodes, rule_vectors = eigh(stack)
        others = comparison_nodes(function, rule_nodes[: len(rules)], lower)
        # A function evaluated once for all rules would be a kernel of its own.
        others = [*map(function, others)]
        # Ritz values may be off by the residual that counted as zero at a breakdown.
        for shifted in rule_nodes[len(rules) :].at[0].add(run.neglected):
            clipped = clip_to_domain(function, shifted, floor)
            others.append(mark_poles(function, shifted, function(clipped)))
        others = integrals(others, rule_vectors, measured=jnp.ones(1, bool))
        others, (again, *earlier) = others[: len(rules)], others[len(rules) :]
        # A Gauss rule of s steps is exact for polynomials up to degree 2s - 1.
        bracket = bracket_of(
            function, value, others, coupling, degree=2 * steps - 1, factor=square
        )
        changes = gauss_changes([value, *earlier], steps, square) if earlier else None

        # With x = ||z|| V f'(T) e_1 for f'(A) z, `A x` has the part
        # `||z|| beta_s v_(s+1) e_s* f'(T) e_1` outside the Krylov space. It is the
        # residual; the part inside, `||z|| V T f'(T) e_1`, is what it is relative to.
        slope = apply_to_first(nodes, vectors, slopes)
        _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
        residual = run.beta[-1] * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        differences = divided_differences(used, values, slopes)
        left, right = few_pairs(differences, vectors[0], columns)
        return QuadraticForm(
            value=square * value,
            deviation=run.norm * deviation_of(vectors[0], values, value),
            left=run.norm * combine_ritz_vectors(left.conj(), vectors.T, run.basis),
            right=run.norm * combine_ritz_vectors(right, vectors.T, run.basis),
            residual=residual,
            bracket=square * bracket,
            magnitude=square * magnitude,
            rounding=square * (again - value),
            extremes=nodes[jnp.array([0, -1])],
            unresolved=unresolved_error(function, weights, used, values, eps, square),
            changes=changes,
            hidden=hidden,
        )


Lanczos.__init__.__doc__ = """**Arguments:**

- `window`: an integer, 0 or more, or `None`, the default: full reorthogonalisation.

**Raises:**

`ValueError` if `window` is neither None nor an integer, 0 or more.
"""
