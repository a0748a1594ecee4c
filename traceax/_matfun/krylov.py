import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._checks import check_window, plain_integer
from .._flat import FlatOperator
from .._kernel.dense import svd
from .._kernel.frechet import divided_differences, few_pairs
from .._kernel.golub_kahan import (
    golub_kahan_advance,
    golub_kahan_run,
    golub_kahan_start,
)
from .._kernel.lanczos import lanczos_advance, lanczos_run, lanczos_start, unit
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

        class Centred(tx.AbstractKrylovMethod):
            # Lanczos on what is orthogonal to constant vectors, the kernel of the
            # Laplacian of a graph: its eigenvalues there count the spanning trees.
            products_per_step: ClassVar[int] = 1

            def fits(self, operator, function):
                return tx.Lanczos().fits(operator, function)

            def start(self, operator, probe, most):
                return tx.Lanczos().start(operator, probe - jnp.mean(probe), most)

            def advance(self, operator, state, first, last):
                return tx.Lanczos().advance(operator, state, first, last)

            def read(self, operator, state, steps, function, *settings):
                return tx.Lanczos().read(operator, state, steps, function, *settings)

        laplacian = 100 * jnp.eye(100) - jnp.ones((100, 100))
        operator = lx.MatrixLinearOperator(laplacian, lx.positive_semidefinite_tag)
        solution = tx.trace_of_function(
            operator, tx.Log(), tx.SLQEstimator(krylov=Centred()), k=50, num_steps=5,
            key=jax.random.key(0),
        )
        print(solution.value, "+-", solution.std_err, "exactly", 99 * jnp.log(100))
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
    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        """A run, before its first step.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, constant to derivatives.
        - `probe`: z, of shape `(n,)`.
        - `most`: the largest number of steps that there is to be room for.

        **Returns:**

        A PyTree of arrays.
        """

    @abc.abstractmethod
    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        """The run after some more steps, of `products_per_step` products each.

        **Arguments:**

        - `operator`: A.
        - `state`: of the run, after `first` steps.
        - `first`, `last`: how many steps have been made, and are to be; may be traced.

        **Returns:**

        A PyTree like `state`.
        """

    @abc.abstractmethod
    def read(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        steps: Int[Array, ""] | int,
        function: AbstractSpectralFunction,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
    ) -> QuadraticForm:
        """The quadratic form, from no further product.

        **Arguments:**

        - `operator`: A.
        - `state`: of the run.
        - `steps`: how many steps have been made; may be traced.
        - `function`: f.
        - `lower_bound`: a number not above the smallest eigenvalue, or singular value for
            a function of those; `None` if none is known.
        - `columns`: how many rows `left` and `right` may have.

        **Returns:**

        A `QuadraticForm` of `traceax.internal`.
        """

    def form(
        self,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        function: AbstractSpectralFunction,
        most: int,
        lower_bound: Real[Array, ""] | float | None,
        columns: int,
        steps: Int[Array, ""] | int | None = None,
    ) -> QuadraticForm:
        """One quadratic form, by all of the above.

        **Arguments:**

        - `operator`, `probe`, `function`, `most`, `lower_bound`, `columns`: as above.
        - `steps`: how many of `most` steps are to be made; by default all.

        **Returns:**

        A `QuadraticForm` of `traceax.internal`.
        """
        steps = most if steps is None else steps
        state = self.start(operator, probe, most)
        state = self.advance(operator, state, 0, steps)
        return self.read(operator, state, steps, function, lower_bound, columns)


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
        """As of every method. `largest` is an eigenvalue that there is for sure."""
        eps, run = operator.eps, lanczos_run(state, steps)
        nodes, vectors = ritz(run.alpha, run.beta)
        square, first = run.norm**2, jnp.ones(1, bool)
        values = values_at(function, nodes, eps)
        value = jnp.sum(vectors[0] ** 2 * values)
        again = tridiagonal(run.alpha, jnp.append(run.projected, 0))
        again = integral(lambda x: values_at(function, x, eps), again, first)

        matrix = tridiagonal(run.alpha, run.beta)
        border = jnp.zeros_like(nodes).at[run.last].set(run.beta[-1])
        compression = Compression(matrix, border[None], nodes, vectors)
        lower = lower_end(function, compression, lower_bound, eps)
        bracket = bracket_of(function, value, compression, first, lower, largest=largest)

        slopes = slopes_at(function, nodes, eps)
        slope = apply_to_first(nodes, vectors, slopes)
        _, size = unit(apply_to_first(nodes, vectors, slopes * nodes))
        residual = run.beta[-1] * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        differences = divided_differences(nodes, values, slopes)
        left, right = few_pairs(differences, vectors[0], columns)
        return QuadraticForm(
            value=square * value,
            square=square * jnp.sum((vectors[0] * values) ** 2),
            left=run.norm * _combine(left, vectors.T, run.basis),
            right=run.norm * _combine(right, vectors.T, run.basis),
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

        def gauss(diagonal, above):
            u, s, vh = svd(jnp.diag(diagonal) + jnp.diag(above, 1))
            values = values_at(function, s, eps)
            return jnp.sum(vh[:, 0] ** 2 * values), values, (u, s, vh)

        value, values, (u, s, vh) = gauss(run.diagonal, run.above[:-1])
        again, *_ = gauss(run.projected_diagonal, run.projected_above)
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

        border = jnp.zeros_like(s).at[run.last].set(diagonal[run.last] * above[-1])
        compression = Compression(
            tridiagonal(alpha, beta), border[None], (s / unit_of) ** 2, vh.T
        )
        first = jnp.ones(1, bool)
        bracket = bracket_of(function, value, compression, first, lower**2, of_squares)

        slopes = subgradients_at(function, s, eps)
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
            square=square * jnp.sum((vh[:, 0] * values) ** 2),
            left=run.norm * _combine(left, u.T, run.left),
            right=run.norm * _combine(right, vh, run.right),
            residual=residual,
            bracket=square * bracket,
            rounding=square * jnp.abs(again - value),
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
