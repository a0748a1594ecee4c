"""The interface of functions of eigenvalues."""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._numerics.small_matrix import by_eigenvalues


class AbstractSpectralFunction(eqx.Module):
    """A function $f$ of the eigenvalues of an operator: for operators that are not
    Hermitian real on real numbers, unless they are complex, and analytic around their
    eigenvalues. For Hermitian ones it may be complex; then it is neither `bracketed` nor
    `nonnegative`.

    To write one, subclass, give the attributes and define `__call__`. A plain callable is
    accepted too, and taken as a function of all reals. A function may hold arrays, and
    derivatives with respect to them work.

    !!! Example

        ```python
        from typing import ClassVar

        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Fraction(tx.AbstractSpectralFunction):
            # x / (x + noise): its trace is the effective dimension of ridge regression.
            noise: float
            semidefinite_domain: ClassVar[bool] = True
            singular_at_zero: ClassVar[bool] = False
            bracketed: ClassVar[bool] = True
            nonnegative: ClassVar[bool] = True

            def __call__(self, x):
                return x / (x + self.noise)

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 3.0]))
        solution = tx.trace_of_function(operator, Fraction(1.0), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 1.250
        ```

    **Attributes:**

    - `semidefinite_domain`: whether negative numbers are outside the domain.
    - `singular_at_zero`: whether 0 is outside the domain.
    - `bracketed`: whether on positive numbers the derivatives from the second on
        alternate in sign, so that Gauss and Gauss-Radau rules bracket $z^* f(A) z$.
    - `nonnegative`: whether $f \\ge 0$ on the domain, so that $f(A)$ is positive
        semidefinite.
    - `of_singular_values`: whether $f$ is a function of the singular values of A, which
        need not be Hermitian, and not of its eigenvalues. In this case `bracketed` refers
        to $f(\\sqrt{x})$.
    """

    semidefinite_domain: eqx.AbstractVar[bool]
    singular_at_zero: eqx.AbstractVar[bool]
    bracketed: eqx.AbstractVar[bool]
    nonnegative: eqx.AbstractVar[bool]
    of_singular_values: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        """The function, elementwise.

        **Arguments:**

        - `x`: eigenvalues, an array of shape `(s,)`, real for Hermitian operators.

        **Returns:**

        An array of the same shape and dtype; complex for a complex function.
        """

    def derivative(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        """The derivative, elementwise; by default `jax.jvp` of `__call__`.

        **Arguments:**

        - `x`: as for `__call__`.

        **Returns:**

        An array of the shape of `x`.
        """
        return jax.jvp(self, (x,), (jnp.ones_like(x),))[1]

    def of_matrix(
        self, matrix: Inexact[Array, "s s"]
    ) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
        """The function and its derivative at a small matrix, for operators that are not
        Hermitian; by default from its eigenvalues and eigenvectors, in $O(s^3)$
        operations. Where the eigenvectors are too ill conditioned, only half of the
        digits are correct, and error bars count that. Override this method where there is
        a better one.

        **Arguments:**

        - `matrix`: M, of shape `(s, s)`, any real or complex matrix, constant to
            derivatives.

        **Returns:**

        $f(M)$ and $f'(M)$, of the shape and dtype of `matrix`. They are not finite where
        they are not defined.
        """
        return by_eigenvalues(
            self,
            self.derivative,
            matrix,
            semidefinite_domain=self.semidefinite_domain,
            singular_at_zero=self.singular_at_zero,
        )

    @property
    def title(self) -> str:
        """What `print` calls it; by default the name of the class."""
        return type(self).__name__

    @property
    def degree(self) -> int | None:
        """The degree of a polynomial, for which rules of enough steps are exact; `None`
        for other functions. For a function of singular values it is the degree in their
        squares."""
        return None

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        """`(c, p)` if the derivative is $c x^{-p}$ with an integer $p \\ge 1$, so that
        [`traceax.SolveGradient`][] can compute gradients; else `None`."""
        return None
