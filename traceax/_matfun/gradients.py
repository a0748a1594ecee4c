import abc

import equinox as eqx
import lineax as lx
from jaxtyping import Array, Inexact

from .._gradient import AbstractFrame, FirstOrderFrame, SolvedFrame
from .functions import AbstractSpectralFunction


class AbstractFunctionGradient(eqx.Module):
    """How $f'(A) z$ is made, from which $\\mathrm{tr}(f'(A)\\, dA)$, the derivative of
    $\\mathrm{tr} f(A)$, is estimated."""

    @abc.abstractmethod
    def frame(
        self,
        function: AbstractSpectralFunction,
        approximation: Inexact[Array, "n p"],
        right: Inexact[Array, "n p"],
        hermitian: bool = True,
    ) -> AbstractFrame:
        """The frame with the given R, where Lanczos says `L = approximation`."""


class LanczosGradient(AbstractFunctionGradient):
    """$f'(A) z$ from the Lanczos run that made the value: no further product with $A$
    beyond those of the derivative itself.

    Its bias is the error of that approximation: for a log-determinant, of a solve by as
    many conjugate gradient steps. `stats["gradient_residual"]` has the relative
    residuals. It has no second derivative: asking for one raises an error.
    """

    def frame(self, function, approximation, right, hermitian=True):
        return FirstOrderFrame(approximation, right)


class SolveGradient(AbstractFunctionGradient):
    """$f'(A) z$ by `lineax.linear_solve`, to the tolerance of a solver, and
    differentiable again: for log-determinants and traces of inverses only.

    Costs the solves (two for the inverse) when, and only when, a derivative is taken.

    **Attributes:**

    - `solver`: an iterative `lineax` solver, such as `lineax.CG(rtol, atol)` (for a
        general square operator `lineax.GMRES(rtol, atol)`).
    """

    solver: lx.AbstractLinearSolver

    def __check_init__(self):
        if not isinstance(self.solver, lx.AbstractLinearSolver):
            raise TypeError(
                "`solver` must be a `lineax.AbstractLinearSolver`. Found an object of "
                f"type {type(self.solver).__name__}. Pass, for example, "
                "`lineax.CG(rtol=1e-6, atol=1e-6)`."
            )

    def frame(self, function, approximation, right, hermitian=True):
        found = function.derivative_by_solves
        if found is None:
            raise ValueError(
                "`gradient=traceax.SolveGradient(...)` needs a function whose derivative "
                "is a negative whole power: `traceax.Log`, `traceax.Inverse` or "
                f"`traceax.Power` of a negative whole number. Found "
                f"`{type(function).__name__}`. Use `traceax.LanczosGradient()`."
            )
        coefficient, num_solves = found
        return SolvedFrame(right, self.solver, coefficient, num_solves, hermitian)


SolveGradient.__init__.__doc__ = """**Arguments:**

- `solver`: an iterative `lineax` solver.

**Raises:**

`TypeError` if it is not a `lineax` solver.
"""
