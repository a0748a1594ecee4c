"""Jacobi's preconditioner: the diagonal of A."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .base import AbstractPreconditioner


class DiagonalPreconditioner(AbstractPreconditioner):
    """A diagonal P: for [`traceax.logdet`][] and, through `inverse`, for `lineax.CG`.
    Made by [`traceax.jacobi_preconditioner`][]. Constant to all derivatives.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(jnp.linspace(1.0, 1e4, 300)) + 0.1
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        jacobi = tx.jacobi_preconditioner(operator, k=1)
        key = jax.random.key(0)
        solution = tx.logdet(operator, k=10, key=key, preconditioner=jacobi)
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `entries`: the diagonal of P, positive, shape `(n,)`.
    - `template`: the structure of the vectors that A applies to, a PyTree of
        `jax.ShapeDtypeStruct`.
    - `num_matvecs`: how many matvecs it was made from.

    Cost: n operations for a product with a power of P, and one vector of memory.
    """

    entries: Real[Array, " n"]
    template: PyTree[jax.ShapeDtypeStruct]
    num_matvecs: int | Int[Array, ""]

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.template

    @property
    def size(self) -> int:
        """n."""
        return self.entries.size

    @property
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$."""
        return jnp.sum(jnp.log(self.entries))

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest entry."""
        return jnp.max(self.entries)

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p$ times flat vectors, the columns of x."""
        factors = (self.entries**exponent).astype(x.dtype)
        return (factors * x.T).T

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$."""
        return self.entries**exponent
