import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._checks import check_window, plain_integer
from .._flat import FlatOperator
from .._kernel.dense import svd
from .._kernel.golub_kahan import golub_kahan
from .._kernel.lanczos import lanczos, unit
from .._kernel.quadrature import apply_to_first, Compression, ritz, tridiagonal
from .functions import AbstractSpectralFunction
from .quadratic_form import (
    bracket_of,
    integral,
    lower_end,
    QuadraticForm,
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

            def form(self, operator, probe, function, num_steps, lower_bound):
                steps = min(num_steps, 3)
                return tx.Lanczos().form(operator, probe, function, steps, lower_bound)

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
    ) -> QuadraticForm:
        """One quadratic form.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, constant to derivatives.
        - `probe`: z, of shape `(n,)`.
        - `function`: f.
        - `num_steps`: the dimension of the Krylov space.
        - `lower_bound`: a number not above the smallest eigenvalue, or singular value for
            a function of those; `None` if none is known.

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
        largest: Real[Array, ""] | float = -jnp.inf,
    ) -> QuadraticForm:
        """As of every method. `largest` is an eigenvalue that there is for sure."""
        eps = operator.eps
        run = lanczos(operator.mv, probe, num_steps, window=self.window, eps=eps)
        nodes, vectors = ritz(run.alpha, run.beta)
        square, first = run.norm**2, jnp.ones(1, bool)
        value = jnp.sum(vectors[0] ** 2 * values_at(function, nodes, eps))
        again = tridiagonal(run.alpha, jnp.append(run.projected, 0))
        again = integral(lambda x: values_at(function, x, eps), again, first)

        matrix = tridiagonal(run.alpha, run.beta)
        compression = Compression(matrix, run.beta[-1:, None], nodes, vectors)
        lower = lower_end(function, compression, lower_bound, eps)
        bracket = bracket_of(function, value, compression, first, lower, largest=largest)

        slopes = slopes_at(function, nodes, eps)
        slope = apply_to_first(nodes, vectors, slopes)
        _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
        residual = run.beta[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
        gradient = run.norm * jnp.matmul(slope, run.basis, precision="highest")
        return QuadraticForm(
            value=square * value,
            gradient=gradient,
            residual=residual,
            bracket=square * bracket,
            rounding=square * jnp.abs(again - value),
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
    ) -> QuadraticForm:
        eps, products = operator.eps, (operator.mv, operator.adjoint_mv)
        run = golub_kahan(*products, probe, num_steps, window=self.window, eps=eps)
        square = run.norm**2

        def gauss(diagonal, above):
            u, s, vh = svd(jnp.diag(diagonal) + jnp.diag(above, 1))
            values = values_at(function, s, eps)
            return jnp.sum(vh[:, 0] ** 2 * values), (u, s, vh)

        value, (u, s, vh) = gauss(run.diagonal, run.above[:-1])
        again, _ = gauss(run.projected_diagonal, run.projected_above)
        # Other rules are for B* B, in units of the largest singular value so as not to
        # overflow.
        unit_of = jnp.where(s[0] > 0, s[0], 1)
        diagonal, above = run.diagonal / unit_of, run.above / unit_of
        alpha = diagonal**2 + jnp.append(0, above[:-1]) ** 2
        beta = diagonal * above
        lower = jnp.full_like(unit_of, eps / 8 if function.singular_at_zero else 0)
        if lower_bound is not None:
            lower = jnp.minimum(jnp.asarray(lower_bound, s.dtype), s[-1]) / unit_of

        def of_squares(squares):
            return function(unit_of * jnp.sqrt(jnp.maximum(squares, lower**2)))

        compression = Compression(
            tridiagonal(alpha, beta), beta[-1:, None], (s / unit_of) ** 2, vh.T
        )
        first = jnp.ones(1, bool)
        bracket = bracket_of(function, value, compression, first, lower**2, of_squares)

        slopes = subgradients_at(function, s, eps)
        slope = jnp.matmul(u, vh[:, 0] * slopes, precision="highest")
        _, size = unit(vh[:, 0] * slopes * s)
        residual = run.above[-1] * jnp.abs(slope[-1]) / jnp.where(size > 0, size, 1)
        gradient = run.norm * jnp.matmul(slope, run.left, precision="highest")
        return QuadraticForm(
            value=square * value,
            gradient=gradient,
            residual=residual,
            bracket=square * bracket,
            rounding=square * jnp.abs(again - value),
            extremes=s[jnp.array([-1, 0])],
        )


Lanczos.__init__.__doc__ = GolubKahan.__init__.__doc__ = """**Arguments:**

- `window`: default is `None`, full reorthogonalisation.

**Raises:**

`ValueError` for a negative `window`.
"""
