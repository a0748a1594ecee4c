import abc

import equinox as eqx
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm


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

            def start(self, operator, probe, most):
                return tx.Lanczos().start(operator, probe, 3)

            def advance(self, operator, state, first, last):
                return tx.Lanczos().advance(operator, state, first, jnp.minimum(last, 3))

            def read(self, operator, state, steps, *settings):
                steps = jnp.minimum(steps, 3)
                return tx.Lanczos().read(operator, state, steps, *settings)

        operator = lx.MatrixLinearOperator(2 * jnp.eye(100), lx.symmetric_tag)
        estimator = tx.SLQEstimator(krylov=Shallow())
        solution = tx.trace_of_function(
            operator, tx.Exp(), estimator, k=4, key=jax.random.key(0)
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
    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        """A run, before its first step.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, constant to derivatives.
        - `probe`: z, of shape `(n,)`.
        - `most`: the largest number of steps, for which room is made.

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
