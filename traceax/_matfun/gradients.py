import abc
from typing import ClassVar

import equinox as eqx
import lineax as lx
from jaxtyping import Array, Inexact

from .._checks import plain_integer
from .._gradient import AbstractFrame, FirstOrderFrame, SolvedFrame
from .functions import AbstractSpectralFunction


class AbstractFunctionGradient(eqx.Module):
    """How $f'(A) z$ is made, from which $\\mathrm{tr}(f'(A)\\, dA)$, the derivative of
    $\\mathrm{tr} f(A)$, is estimated.

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class SolvesIfPossible(tx.AbstractFunctionGradient):
            # By solves where the derivative is a power, else from the Lanczos run.
            solver: lx.AbstractLinearSolver
            columns: ClassVar[int] = 4

            def frame(self, function, left, right, probes):
                chosen = tx.SolveGradient(self.solver)
                if function.derivative_by_solves is None:
                    chosen = tx.LanczosGradient()
                return chosen.frame(function, left, right, probes)

        def trace_of_exp(scale):
            operator = lx.MatrixLinearOperator(scale * jnp.eye(100), lx.symmetric_tag)
            gradient = SolvesIfPossible(lx.CG(rtol=1e-6, atol=1e-6))
            settings = {"k": 4, "num_steps": 2, "key": jax.random.key(0)}
            return tx.trace_of_function(
                operator, tx.Exp(), gradient=gradient, **settings
            ).value

        print(f"{jax.jit(jax.grad(trace_of_exp))(2.0):.1f}")  # 738.9
        ```

    **Attributes:**

    - `columns`: how many pairs of vectors the Lanczos run of a probe is asked for.
    """

    columns: eqx.AbstractVar[int]

    @abc.abstractmethod
    def frame(
        self,
        function: AbstractSpectralFunction,
        left: Inexact[Array, "m p"],
        right: Inexact[Array, "n p"],
        probes: Inexact[Array, "n q"],
    ) -> AbstractFrame:
        """The frame from which a derivative is made.

        **Arguments:**

        - `function`: f.
        - `left`, `right`: L and R of shape `(n, p)`, so made from Lanczos runs that
            $\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)$ is about the derivative of the estimate.
        - `probes`: Z of shape `(n, q)`, with $E[\\mathrm{tr}(Z^* B Z)] = \\mathrm{tr}(B)$.

        **Returns:**

        A frame `(L, R)` of `traceax.internal` with
        $E[\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)] = d\\, \\mathrm{tr} f(A)$.
        """


class LanczosGradient(AbstractFunctionGradient):
    """The derivative of $z^* f(A) z$ from the Lanczos run that made the value: no further
    product with $A$ beyond those of the derivative itself.

    That is $\\langle dA, X \\rangle$ with a matrix X of low rank in the Krylov space, of which
    the `columns` largest parts are kept: two vectors of length n for each. Its bias is
    what the Krylov space and the columns leave out: `stats["gradient_residual"]` has the
    relative residuals. It has no second derivative: asking for one raises an error.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 3 * jnp.eye(100) - jnp.eye(100, k=1) - jnp.eye(100, k=-1)
        gradient = tx.LanczosGradient()

        def logdet(scale):
            tag = lx.positive_semidefinite_tag
            operator = lx.MatrixLinearOperator(scale * matrix, tag)
            settings = {"k": 4, "num_steps": 25, "key": jax.random.key(0)}
            return tx.logdet(operator, gradient=gradient, **settings).value

        print(f"{jax.jit(jax.grad(logdet))(2.0):.2f}")  # 50.00
        ```

    **Attributes:**

    - `columns`: how many products the derivative costs for each probe.
    """

    columns: int = eqx.field(static=True, default=4, converter=plain_integer)

    def __check_init__(self):
        if type(self.columns) is not int or self.columns < 1:
            raise ValueError(
                f"`columns` must be a positive Python integer. Found {self.columns!r}."
            )

    def frame(
        self,
        function: AbstractSpectralFunction,
        left: Inexact[Array, "m p"],
        right: Inexact[Array, "n p"],
        probes: Inexact[Array, "n q"],
    ) -> AbstractFrame:
        return FirstOrderFrame(left, right)


LanczosGradient.__init__.__doc__ = """**Arguments:**

- `columns`: default is 4.

**Raises:**

`ValueError` if it is not a positive integer.
"""


class SolveGradient(AbstractFunctionGradient):
    """$f'(A) z$ by `lineax.linear_solve`, to the tolerance of a solver, and
    differentiable again: for log-determinants and traces of inverses only.

    Costs the solves (two for the inverse) when, and only when, a derivative is taken.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 3 * jnp.eye(100) - jnp.eye(100, k=1) - jnp.eye(100, k=-1)
        gradient = tx.SolveGradient(lx.CG(rtol=1e-6, atol=1e-6))

        def logdet(scale):
            tag = lx.positive_semidefinite_tag
            operator = lx.MatrixLinearOperator(scale * matrix, tag)
            settings = {"k": 4, "num_steps": 25, "key": jax.random.key(0)}
            return tx.logdet(operator, gradient=gradient, **settings).value

        print(f"{jax.jit(jax.grad(jax.grad(logdet)))(2.0):.2f}")  # -25.00
        ```

    **Attributes:**

    - `solver`: an iterative `lineax` solver, such as `lineax.CG(rtol, atol)` (for a
        general square operator `lineax.GMRES(rtol, atol)`).
    """

    solver: lx.AbstractLinearSolver
    columns: ClassVar[int] = 1

    def __check_init__(self):
        if not isinstance(self.solver, lx.AbstractLinearSolver):
            raise TypeError(
                "`solver` must be a `lineax.AbstractLinearSolver`. Found an object of "
                f"type {type(self.solver).__name__}. Pass, for example, "
                "`lineax.CG(rtol=1e-6, atol=1e-6)`."
            )

    def frame(
        self,
        function: AbstractSpectralFunction,
        left: Inexact[Array, "m p"],
        right: Inexact[Array, "n p"],
        probes: Inexact[Array, "n q"],
    ) -> AbstractFrame:
        power = function.derivative_by_solves
        if power is None:
            raise ValueError(
                "`gradient=traceax.SolveGradient(...)` needs a function whose derivative "
                "is a negative whole power: `traceax.Log`, `traceax.Inverse` or "
                f"`traceax.Power` of a negative whole number. Found "
                f"`{type(function).__name__}`. Use `traceax.LanczosGradient()` for a "
                "first derivative. There is no second one in the operator for such a "
                "function: take differences of first ones, with the same key."
            )
        coefficient, num_solves = power
        hermitian = not function.of_singular_values
        return SolvedFrame(probes, self.solver, coefficient, num_solves, hermitian)


SolveGradient.__init__.__doc__ = """**Arguments:**

- `solver`: an iterative `lineax` solver.

**Raises:**

`TypeError` if it is not a `lineax` solver.
"""
