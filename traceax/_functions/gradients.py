import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from .._core.checks import plain_integer
from .._quadrature.functions import AbstractSpectralFunction
from .._run.gradient import AbstractFrame, FirstOrderFrame, SolvedFrame


class AbstractFunctionGradient(eqx.Module):
    """How $\\mathrm{tr}(f'(A)\\, dA)$, the derivative of $\\mathrm{tr} f(A)$, is
    estimated.

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

    - `columns`: how many pairs of vectors the Krylov space of each probe is asked for.
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
        - `left`, `right`: L of shape `(m, p)` and R of shape `(n, p)`, from the Krylov
            spaces of the probes: $\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)$ is close to
            the derivative of the estimate.
        - `probes`: Z of shape `(n, q)`, of which $E[Z Z^*] = I$.

        **Returns:**

        A frame `(L, R)` of `traceax.internal` with
        $E[\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)] = d\\, \\mathrm{tr} f(A)$.
        """


class LanczosGradient(AbstractFunctionGradient):
    """The derivative of $z^* f(A) z$ from the Lanczos run that made the value: no further
    product with $A$ beyond those of the derivative itself.

    It is $\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)$ with a few columns L, R in the
    Krylov space. Their number changes the variance but not the mean (with signs, hardly:
    by less than 1% where four were tried on n = 8): with one column, $f'(A) z$ and $z$,
    the variance is several times larger on ill-conditioned operators; more than four
    gain little. The bias is that of the Krylov space, which
    for a log-determinant is at most the error of as many conjugate gradient steps:
    `stats["gradient_residual"]` has their relative residuals. It has no second
    derivative: asking for one raises an error.

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

    - `columns`: of L and R, for each probe. The derivative costs as many products with
        that of the operator, and keeps two vectors of length n for each.

    ??? cite

        With one column, for log-determinants:

        ```bibtex
        @inproceedings{dong2017scalable,
            author    = {Dong, Kun and Eriksson, David and Nickisch, Hannes and Bindel,
                         David and Wilson, Andrew Gordon},
            title     = {Scalable Log Determinants for {Gaussian} Process Kernel
                         Learning},
            booktitle = {Advances in Neural Information Processing Systems},
            volume    = {30},
            year      = {2017},
        }
        ```
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

`ValueError` if it is not a positive Python integer.
"""


class SolveGradient(AbstractFunctionGradient):
    """$f'(A) z$ by `lineax.linear_solve`, to the tolerance of a solver, and
    differentiable again: for `Log`, `Inverse` without a shift, and negative whole powers.

    Costs the solves when, and only when, a derivative is taken: for each probe one for
    `Log`, two for `Inverse`, and p + 1 for `Power(-p)`.

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
                "is a negative whole power: `traceax.Log`, `traceax.Inverse` without a "
                f"shift or `traceax.Power` of a negative whole number. Found "
                f"`{type(function).__name__}`. Use `traceax.LanczosGradient()` for a "
                "first derivative. There is no second one in the operator for such a "
                "function: take differences of first ones, with the same key."
            )
        coefficient, num_solves = power
        hermitian = not function.of_singular_values
        # The derivative along the identity, tr f'(A), is a mean of powers of eigenvalues.
        slope, count = jnp.vdot(left, right).real, jnp.vdot(probes, probes).real
        mean = jnp.abs(slope / (coefficient * count))
        unit = jnp.where(jnp.isfinite(mean) & (mean > 0), mean, 1) ** (-1 / num_solves)
        # `lineax.CG` breaks down where an eigenvalue is below 200 n eps.
        limit = 200 * len(right) * float(jnp.finfo(right.dtype).eps)
        unit = unit / max(1, 4 * limit)
        return SolvedFrame(probes, unit, self.solver, coefficient, num_solves, hermitian)


SolveGradient.__init__.__doc__ = """**Arguments:**

- `solver`: an iterative `lineax` solver.

**Raises:**

`TypeError` if it is not a `lineax` solver.
"""
