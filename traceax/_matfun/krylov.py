import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._checks import check_window, plain_integer
from .._flat import FlatOperator
from .._kernel.dense import svd
from .._kernel.frechet import divided_differences, few_pairs
from .._kernel.golub_kahan import golub_kahan
from .._kernel.lanczos import lanczos, unit
from .._kernel.quadrature import apply_to_first, radau, ritz
from .functions import AbstractSpectralFunction
from .quadratic_form import (
    QuadraticForm,
    roundoff,
    slopes_at,
    subgradients_at,
    values_at,
)


class AbstractKrylovMethod(eqx.Module):
    """How quadratic forms $z^* f(A) z$ are made of products: pass it to
    [`traceax.SLQEstimator`][].

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Shallow(tx.AbstractKrylovMethod):
            # Lanczos of at most three steps.
            products_per_step: ClassVar[int] = 1

            def fits(self, operator, function):
                return tx.Lanczos().fits(operator, function)

            def form(self, operator, probe, function, num_steps, *settings):
                steps = min(num_steps, 3)
                return tx.Lanczos().form(operator, probe, function, steps, *settings)

        operator = lx.MatrixLinearOperator(2 * jnp.eye(100), lx.symmetric_tag)
        estimator = tx.SLQEstimator(krylov=Shallow())
        solution = tx.trace_of_function(
            operator, tx.Exp(), estimator, k=4, num_steps=9, key=jax.random.key(0)
        )
        print(f"{solution.value:.1f}")  # 738.9
        ```

    **Attributes:**

    - `products_per_step`: products with the operator, or its adjoint, in a step.
    """

    products_per_step: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        """Whether it can make this function of this operator.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, of which `operator.hermitian` says
            whether it is known to be Hermitian.
        - `function`: f.

        **Returns:**

        A Python bool.
        """

    @abc.abstractmethod
    def form(
        self,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        function: AbstractSpectralFunction,
        num_steps: int,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        """One quadratic form.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, constant to derivatives.
        - `probe`: z, of shape `(n,)`.
        - `function`: f.
        - `num_steps`: the dimension of the Krylov space.
        - `lower_bound`: a number not above the smallest eigenvalue, or singular value for
            a function of those; `None` if none is known.
        - `columns`: how many rows `left` and `right` may have.

        **Returns:**

        A `QuadraticForm` of `traceax.internal`.
        """


class Lanczos(AbstractKrylovMethod):
    """Lanczos, for functions of the eigenvalues of a Hermitian operator: one product in a
    step.

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
    """

    window: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    products_per_step: ClassVar[int] = 1

    def __check_init__(self):
        check_window(self.window)

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return operator.hermitian and not function.of_singular_values

    def form(
        self,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        function: AbstractSpectralFunction,
        num_steps: int,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        eps = operator.eps
        run = lanczos(operator.mv, probe, num_steps, window=self.window, eps=eps)
        nodes, vectors = ritz(run.alpha, run.beta)
        square = run.norm**2

        def gauss(nodes, vectors):
            return square * jnp.sum(vectors[0] ** 2 * values_at(function, nodes, eps))

        value = gauss(nodes, vectors)
        again = gauss(*ritz(run.alpha, jnp.append(run.projected, 0)))
        bracket = jnp.stack([value, value])
        if function.bracketed:
            end = (
                roundoff(nodes, eps)
                if function.singular_at_zero
                else jnp.zeros_like(value)
            )
            if lower_bound is not None:
                end = jnp.minimum(jnp.asarray(lower_bound, end.dtype), nodes[0])
            others, weights = ritz(*radau(run.alpha, run.beta, end))
            values = function(jnp.maximum(others.at[0].set(end), end))
            other = square * jnp.sum(weights[0] ** 2 * values)
            bracket = jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])

        values, slopes = (at(function, nodes, eps) for at in (values_at, slopes_at))
        slope = apply_to_first(nodes, vectors, slopes)
        _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
        residual = run.beta[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
        differences = divided_differences(nodes, values, slopes)
        left, right = few_pairs(differences, vectors[0], columns)
        return QuadraticForm(
            value=value,
            left=run.norm * _combine(left, vectors.T, run.basis),
            right=run.norm * _combine(right, vectors.T, run.basis),
            residual=residual,
            bracket=bracket,
            rounding=jnp.abs(again - value),
            extremes=nodes[jnp.array([0, -1])],
        )


class GolubKahan(AbstractKrylovMethod):
    """Golub-Kahan bidiagonalisation, for functions of the singular values of an operator
    with at least as many rows as columns: in a step one product with it and one with its
    adjoint. $A^* A$ is never formed.

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
    """

    window: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    products_per_step: ClassVar[int] = 2

    def __check_init__(self):
        check_window(self.window)

    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        return function.of_singular_values

    def form(
        self,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        function: AbstractSpectralFunction,
        num_steps: int,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        eps, products = operator.eps, (operator.mv, operator.adjoint_mv)
        run = golub_kahan(*products, probe, num_steps, window=self.window, eps=eps)
        square = run.norm**2

        def gauss(diagonal, above):
            u, s, vh = svd(jnp.diag(diagonal) + jnp.diag(above, 1))
            values = values_at(function, s, eps)
            return square * jnp.sum(vh[:, 0] ** 2 * values), (u, s, vh)

        value, (u, s, vh) = gauss(run.diagonal, run.above[:-1])
        again, _ = gauss(run.projected_diagonal, run.projected_above)
        bracket = jnp.stack([value, value])
        if function.bracketed:
            # Gauss-Radau for B* B, in units of the largest singular value so as not to
            # overflow.
            unit_of = jnp.where(s[0] > 0, s[0], 1)
            diagonal, above = run.diagonal / unit_of, run.above / unit_of
            alpha = diagonal**2 + jnp.append(0, above[:-1]) ** 2
            end = jnp.full_like(unit_of, eps / 8 if function.singular_at_zero else 0)
            if lower_bound is not None:
                end = jnp.minimum(jnp.asarray(lower_bound, s.dtype), s[-1]) / unit_of
            squares, vectors = ritz(*radau(alpha, diagonal * above, end**2))
            others = jnp.maximum(jnp.sqrt(jnp.maximum(squares.at[0].set(0), 0)), end)
            other = square * jnp.sum(vectors[0] ** 2 * function(others * unit_of))
            bracket = jnp.stack([jnp.minimum(value, other), jnp.maximum(value, other)])

        values, slopes = (at(function, s, eps) for at in (values_at, subgradients_at))
        slope = jnp.matmul(u, vh[:, 0] * slopes, precision="highest")
        _, size = unit(vh[:, 0] * slopes * s)
        residual = run.above[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
        # That of `f(sqrt x)` at A* A, in the direction dA* A + A* dA, with A V = U B.
        total = s[:, None] + s
        share = jnp.where(total > 0, 2 * s[:, None] / jnp.where(total > 0, total, 1), 1)
        differences = share * divided_differences(s, values, slopes)
        left, right = few_pairs(differences, vh[:, 0], columns)
        return QuadraticForm(
            value=value,
            left=run.norm * _combine(left, u.T, run.left),
            right=run.norm * _combine(right, vh, run.right),
            residual=residual,
            bracket=bracket,
            rounding=jnp.abs(again - value),
            extremes=s[jnp.array([-1, 0])],
        )


def _combine(
    coefficients: Real[Array, "r s"],
    vectors: Real[Array, "s s"],
    basis: Inexact[Array, "s n"],
) -> Inexact[Array, "r n"]:
    """Combinations of Ritz vectors, whose coordinates in the basis are rows."""
    weights = jnp.matmul(coefficients, vectors, precision="highest")
    return jnp.matmul(weights, basis, precision="highest")


Lanczos.__init__.__doc__ = GolubKahan.__init__.__doc__ = """**Arguments:**

- `window`: default is `None`, full reorthogonalisation.

**Raises:**

`ValueError` for a negative `window`.
"""
