"""The interface of Krylov methods, which compute quadratic forms `z* f(A) z`."""

import abc
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm


class AbstractKrylovMethod(eqx.Module):
    """A method that computes quadratic forms $z^* f(A) z$ from matrix-vector products.
    Pass it to [`traceax.SLQEstimator`][].

    A run from a probe z is a PyTree of arrays. `start` makes it, `advance` makes steps,
    and `read` returns the quadratic form after the steps so far. So the number of steps
    can be chosen while a run goes on.

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

    - `products_per_step`: the number of matvecs in a step, with the operator or its
        adjoint.
    - `reads_earlier_steps`: whether `read` takes fewer steps than the run has made, and
        its right rows for one column are the same after any number of them, as
        [`traceax.RandomSteps`][] needs. Default: `False`.
    """

    products_per_step: eqx.AbstractClassVar[int]
    reads_earlier_steps: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """What `print` calls it; by default the name of the class."""
        return type(self).__name__

    @abc.abstractmethod
    def fits(self, operator: FlatOperator, function: AbstractSpectralFunction) -> bool:
        """Whether the method applies to this function of this operator.

        **Arguments:**

        - `operator`: A, as a map of flat vectors. `operator.hermitian` says whether it is
            known to be Hermitian.
        - `function`: f.

        **Returns:**

        A Python bool.
        """

    @abc.abstractmethod
    def start(
        self, operator: FlatOperator, probe: Inexact[Array, " n"], most: int
    ) -> PyTree[Array]:
        """A run, before its first step. No matvec is made.

        **Arguments:**

        - `operator`: A, as a map of flat vectors, constant to derivatives.
        - `probe`: z, of shape `(n,)` and the dtype of the operator.
        - `most`: the largest number of steps, a Python integer: the size of the buffers.

        **Returns:**

        A PyTree of arrays, whose shapes and dtypes stay the same as steps are made.
        """

    @abc.abstractmethod
    def advance(
        self,
        operator: FlatOperator,
        state: PyTree[Array],
        first: Int[Array, ""] | int,
        last: Int[Array, ""] | int,
    ) -> PyTree[Array]:
        """The run after more steps, of `products_per_step` matvecs each.

        **Arguments:**

        - `operator`: A.
        - `state`: the run after `first` steps.
        - `first`, `last`: the number of steps before and after this call, integers that
            may be traced.

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
        """The quadratic form, without a further matvec.

        **Arguments:**

        - `operator`: A.
        - `state`: the run.
        - `steps`: the number of steps that the run has made, an integer that may be
            traced.
        - `function`: f.
        - `lower_bound`: a lower bound of the eigenvalues, or of the singular values for a
            function of singular values, of shape `()`; `None` if none is known.
        - `columns`: the largest number of rows of `left` and `right`.

        **Returns:**

        A `traceax.internal.QuadraticForm`.
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
        """One quadratic form, from `start`, `advance` and `read`. Cost: `steps` times
        `products_per_step` matvecs.

        **Arguments:**

        - `operator`, `probe`, `function`, `most`, `lower_bound`, `columns`: as for the
            other methods.
        - `steps`: the number of steps to make, at most `most`, which is the default.

        **Returns:**

        A `traceax.internal.QuadraticForm`.
        """
        steps = most if steps is None else steps
        # By position: parameters of a user's method may have other names.
        state = self.start(operator, probe, most)
        state = self.advance(operator, state, 0, steps)
        return self.read(operator, state, steps, function, lower_bound, columns)
