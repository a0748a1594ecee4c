"""Diagonal preconditioners. Jacobi's is the diagonal of A."""

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .base import AbstractPreconditioner


class DiagonalPreconditioner(AbstractPreconditioner):
    """A diagonal P: for [`traceax.logdet`][] and, through `inverse`, for `lineax.CG`.
    [`traceax.jacobi_preconditioner`][] makes one. It is constant to all derivatives.

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
    - `template`: a `lineax.IdentityLinearOperator` on the vectors that A applies to.
    - `num_matvecs`: the number of matvecs that it was made from.

    A power of P takes n operations for each vector, and P holds one vector of length n.
    """

    entries: Real[Array, " n"]
    template: lx.IdentityLinearOperator
    num_matvecs: int | Int[Array, ""]

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.template.in_structure()

    @property
    def size(self) -> int:
        """n, the number of entries."""
        return self.entries.size

    @property
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$."""
        return jnp.sum(jnp.log(self.entries))

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest entry, a real scalar."""
        return jnp.max(self.entries)

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p x$ for a flat vector x, or for the columns of x."""
        factors = (self.entries**exponent).astype(x.dtype)
        # The transposes serve shapes `(n,)` and `(n, k)` alike.
        return (factors * x.T).T

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$."""
        return self.entries**exponent
