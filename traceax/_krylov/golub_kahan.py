"""Quadratic forms of functions of singular values by Golub-Kahan bidiagonalisation.

With `A V = U B` from the probe z, and the singular value decomposition
`B = X diag(sigma) Y*` (`u`, `s`, `vh`), the Gauss rule is

    z* f((A* A)^(1/2)) z ~ ||z||^2 sum_j |Y_1j|^2 f(sigma_j)                 (`value`).

The sigma_j^2 are the Ritz values of Lanczos for `A* A`, whose tridiagonal matrix is B* B.
Singular values come from B itself, so the condition number of `A* A` costs no precision.
Rules for comparison are made of B over its largest singular value (`scale`), so that
squares do not overflow. Golub and Kahan, SIAM J. Numer. Anal. 2, 1965; Golub and Meurant,
Matrices, Moments and Quadrature with Applications, 2010; docs/devdocs/quadrature.md.
"""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.checks import check_window, plain_integer
from .._core.flat import FlatOperator
from .._numerics.dense import eigh, svd
from .._numerics.frechet import divided_differences, few_pairs
from .._numerics.gram_schmidt import unit
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.domain import subgradients_at, values_at
from .._quadrature.quadratic_form import (
    combine_ritz_vectors,
    deviation_of,
    gauss_rule,
    QuadraticForm,
)
from .._quadrature.rounding import unresolved_error
from .._quadrature.rules import (
    BOUND_TOLERANCE,
    bracket_end,
    bracket_of,
    change_at_lower_end,
    comparison_rules,
    gauss_changes,
    hidden_eigenvalues,
    integrals,
)
from .._quadrature.tridiagonal import (
    Compression,
    pad,
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
    with at least as many rows as columns. $A^* A$ is never formed.

    Cost for each probe and an m by n operator: `num_steps` matvecs with the operator and
    as many with its adjoint, and `O((m + n) num_steps^2)` operations, or with `window=0`
    `O((m + n) num_steps)`. Memory for each probe of a block: `num_steps` vectors of
    length n and as many of length m, or with `window=0` and no derivative only the
    vectors of one step. With [`traceax.AdaptiveSteps`][] the buffers have room for the
    largest number of steps.

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
    reads_earlier_steps: ClassVar[bool] = True

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
        return golub_kahan_advance(
            mv=operator.mv,
            adjoint_mv=operator.adjoint_mv,
            state=state,
            first=first,
            last=last,
            window=self.window,
            eps=operator.eps,
        )

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

        def decompose(diagonal, above):
            u, s, vh = svd(_bidiagonal(diagonal, above))
            return u, s, vh, values_at(function, s, eps)

        u, s, vh, values = decompose(run.diagonal, run.above[:-1])
        slopes = subgradients_at(function, s, eps)
        value, magnitude = gauss_rule(vh[:, 0] ** 2, s, values, slopes)
        # The rule again, with each entry of B from the other matvec.
        _, _, vh_again, values_again = decompose(
            run.projected_diagonal, run.projected_above
        )
        again = jnp.sum(vh_again[:, 0] ** 2 * values_again)

        scale = jnp.where(s[0] > 0, s[0], 1)
        diagonal, above, nodes = run.diagonal / scale, run.above / scale, s / scale
        # `roundoff` of the largest node, which is 1.
        floor = jnp.full_like(scale, eps / 8)
        lower = _lower_end(function, lower_bound, scale, nodes[-1], eps)
        # B* B in place of T, with the coupling `alpha_s beta_s` to the next step.
        alpha = diagonal**2 + jnp.append(0, above[:-1]) ** 2
        coupling = (diagonal[run.last] * above[-1:])[None]
        matrix = tridiagonal(alpha, diagonal * above)
        gram = Compression(matrix, coupling, run.last, nodes=nodes**2, vectors=vh.T)
        measured, degree = jnp.ones(1, bool), 2 * steps - 1
        changes = hidden = None
        if function.bracketed:
            # All points below are singular values, but those of `gram` are their squares.
            lowest, smallest = jnp.maximum(lower, floor), scale * nodes[-1]
            change, is_infinite = change_at_lower_end(
                function, smallest, lower=scale * lower, floor=scale * floor
            )
            hidden = hidden_eigenvalues(
                gram, square, at=lowest**2, change=change, is_infinite=is_infinite
            )
            end = jnp.sqrt(bracket_end(gram, square, lower**2, lowest**2))
            rules = _radau_and_gauss(diagonal, above, u, nodes, end=end, steps=steps)
            _, rule_nodes, rule_vh = svd(rules)
            # The prescribed node, the last in descending order, is known exactly.
            rule_nodes = jnp.maximum(rule_nodes.at[0, -1].set(end), lower)
            others = map(function, scale * rule_nodes)
            other, *earlier = integrals(others, rule_vh.mT, measured)
            bracket = bracket_of(function, value, [other], coupling, degree)
            changes = gauss_changes([value, *earlier], steps, square)
        else:

            def of_squares(squares):
                return function(scale * jnp.sqrt(jnp.maximum(squares, lower**2)))

            # Estimates are made of B* B, although its roundoff hides singular values
            # below the root of the machine epsilon.
            squares, rule_vectors = eigh(comparison_rules(function, gram, lower**2))
            others = integrals(map(of_squares, squares), rule_vectors, measured)
            bracket = bracket_of(function, value, others, coupling, degree, square)

        # With x = ||z|| U X f'(sigma) Y* e_1, `A* x` has the part
        # `||z|| beta_s v_(s+1) e_s* X f'(sigma) Y* e_1` outside the Krylov space: the
        # residual, relative to the part inside.
        slope = jnp.matmul(u, vh[:, 0] * slopes, precision="highest")
        _, size = unit(vh[:, 0] * slopes * s)
        residual = run.above[-1] * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        differences = _gram_differences(s, values, slopes)
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
            unresolved=unresolved_error(function, vh[:, 0] ** 2, s, values, eps, square),
            changes=changes,
            hidden=hidden,
        )


def _bidiagonal(
    diagonal: Real[Array, " s"], above: Real[Array, " s-1"]
) -> Real[Array, "s s"]:
    """B, or one like it, from its entries on and above the diagonal."""
    return jnp.diag(diagonal) + jnp.diag(above, 1)


def _lower_end(
    function: AbstractSpectralFunction,
    lower_bound: Real[Array, ""] | float | None,
    scale: Real[Array, ""],
    smallest: Real[Array, ""],
    eps: float,
) -> Real[Array, ""]:
    """As `lower_end` of the rules, for singular values in units of `scale`, the largest
    of them. `smallest` is the smallest one in these units."""
    floor = jnp.full_like(scale, eps / 8)
    lower = floor if function.singular_at_zero else jnp.zeros_like(floor)
    if lower_bound is None:
        return lower
    bound = jnp.asarray(lower_bound, scale.dtype) / scale
    clipped = jnp.maximum(jnp.minimum(bound, smallest), lower)
    # The smallest singular value of B is never below the smallest of A.
    return jnp.where(bound - smallest > BOUND_TOLERANCE * eps, lower, clipped)


def _radau_and_gauss(
    diagonal: Real[Array, " s"],
    above: Real[Array, " s"],
    u: Real[Array, "s s"],
    nodes: Real[Array, " s"],
    end: Real[Array, ""],
    steps: Int[Array, ""] | int,
) -> Real[Array, "3 q q"]:
    """Factors of the Gauss-Radau rule with a node at `end`, and of the Gauss rules of
    half and a quarter of the steps, rounded up."""
    index = jnp.arange(len(diagonal))
    border = jnp.where(index == steps - 1, above[-1], 0)
    rules = [radau_factor(_bidiagonal(diagonal, above[:-1]), border, u, nodes, end)]
    for part in 2, 4:
        # A zero above the diagonal decouples later steps, which have no weight then.
        coupled = jnp.where(index == -(-steps // part) - 1, 0, above)
        rules.append(pad(_bidiagonal(diagonal, coupled[:-1]), 1))
    return jnp.stack(rules)


def _gram_differences(
    s: Real[Array, " s"], values: Real[Array, " s"], slopes: Real[Array, " s"]
) -> Real[Array, "s s"]:
    """The coefficients of the derivative of the form in a direction dA.

    With `g(x) = f(sqrt(x))` the form is `z* g(A* A) z`. With right Ritz vectors v_i, left
    ones u_i, and `A v_i = sigma_i u_i`, its derivative is, over ||z||^2,

        sum_ij Y_1i g[sigma_i^2, sigma_j^2] Y_1j v_i* (dA* A + A* dA) v_j
            = sum_ij Y_1i Y_1j 2 sigma_i g[sigma_i^2, sigma_j^2] Re(u_i* dA v_j),

    and `g[sigma_i^2, sigma_j^2] = f[sigma_i, sigma_j] / (sigma_i + sigma_j)`."""
    total = s[:, None] + s
    share = jnp.where(total > 0, 2 * s[:, None] / jnp.where(total > 0, total, 1), 1)
    return share * divided_differences(s, values, slopes)


GolubKahan.__init__.__doc__ = """**Arguments:**

- `window`: an integer, 0 or more, or `None`, the default: full reorthogonalisation.

**Raises:**

`ValueError` if `window` is neither None nor an integer, 0 or more.
"""
