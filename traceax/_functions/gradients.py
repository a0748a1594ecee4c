"""Derivatives of traces of functions.

    d tr f(A) = tr(f'(A) dA) = E[Re tr(L* dA R)]

for frames (L, R) of few columns. With probes z, E[z z*] = I, one choice is `L = f'(A) z`
and `R = z`. For f(x) = x^m all m terms `A^i dA A^(m-1-i)` of d(A^m) have the same trace.
The frames here and their variance are derived in docs/devdocs/gradients.md, "Traces of
functions".
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from .._core.checks import plain_integer
from .._quadrature.functions import AbstractSpectralFunction
from .._run.gradient import AbstractFrame, FirstOrderFrame, SolvedFrame


# `lineax.CG` stops, as if it had broken down, once p* A p <= 100 rcond |r|^2 with
# rcond = 2 n eps: where an eigenvalue is below 200 n eps.
_BREAKDOWN_OF_CG = 200
# Where that limit is large, the mean eigenvalue is scaled this far above it. A larger
# factor takes solutions further from the size 1 that absolute tolerances are meant for.
_ROOM = 4


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

    - `columns`: the number of pairs of vectors from the Krylov space of each probe.
    - `from_runs`: whether the frame depends on these vectors. Then steps that are chosen
        automatically are enough for the derivative, too. Default: True.
    """

    columns: eqx.AbstractVar[int]
    from_runs: ClassVar[bool] = True

    @abc.abstractmethod
    def frame(
        self,
        function: AbstractSpectralFunction,
        left: Inexact[Array, "m p"],
        right: Inexact[Array, "n p"],
        probes: Inexact[Array, "n q"],
    ) -> AbstractFrame:
        """The frame of the derivative.

        **Arguments:**

        - `function`: f.
        - `left`, `right`: L of shape `(m, p)` and R of shape `(n, p)`, from the Krylov
            spaces of the probes: $\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)$ is close to
            the derivative of the estimate.
        - `probes`: Z of shape `(n, q)`, with $E[Z Z^*] = I$.

        **Returns:**

        A frame `(L, R)` of `traceax.internal` with
        $E[\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)] = d\\, \\mathrm{tr} f(A)$.
        """


class LanczosGradient(AbstractFunctionGradient):
    """The derivative of $z^* f(A) z$ from the Lanczos run of the value, without further
    matvecs with $A$.

    It is $\\mathrm{Re}\\,\\mathrm{tr}(L^* dA\\, R)$ with a few columns L, R in the
    Krylov space. Their number changes the variance but not the mean. (For random signs
    the mean changes a little, by less than 1% with four columns and n = 8.) With one
    column, $f'(A) z$ and $z$, the variance is several times larger on ill-conditioned
    operators. More than four gain little. The Krylov space causes a bias, which for a
    log-determinant is at most the error of as many conjugate gradient steps. Their
    relative residuals are in `stats["gradient_residual"]`. Asking for a second derivative
    raises an error.

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

    - `columns`: the number of columns of L and R for each probe. Each of them costs one
        matvec with the derivative of the operator, and two vectors of length n in memory.

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
    """$f'(A) z$ by `lineax.linear_solve`, to the tolerance of a solver. It can be
    differentiated again. It is for `Log`, `Inverse` without a shift, and negative whole
    powers.

    Solves are made only if a derivative is taken. For each probe there is one for `Log`,
    two for `Inverse`, and p + 1 for `Power(-p)`.

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
    from_runs: ClassVar[bool] = False

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
                "first derivative. Such a function has no second derivative in the "
                "operator: take finite differences of first derivatives, with the same "
                "key."
            )
        coefficient, num_solves = power
        hermitian = not function.of_singular_values
        # With f'(x) = c x^-p, the derivative along the identity is tr f'(A), c times the
        # sum of lambda^-p. So `unit` is a mean eigenvalue. `SolvedFrame` divides A by it,
        # as tolerances of solvers and their tests for breakdown are absolute.
        slope, count = jnp.vdot(left, right).real, jnp.vdot(probes, probes).real
        mean = jnp.abs(slope / (coefficient * count))
        unit = jnp.where(jnp.isfinite(mean) & (mean > 0), mean, 1) ** (-1 / num_solves)
        limit = _BREAKDOWN_OF_CG * len(right) * float(jnp.finfo(right.dtype).eps)
        unit = unit / max(1, _ROOM * limit)
        return SolvedFrame(probes, unit, self.solver, coefficient, num_solves, hermitian)


SolveGradient.__init__.__doc__ = """**Arguments:**

- `solver`: an iterative `lineax` solver.

**Raises:**

`TypeError` if it is not a `lineax` solver.
"""
