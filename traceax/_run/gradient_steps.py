"""Krylov steps that the derivative of a log-determinant needs.

The derivative of `z* log(A) z` from a run is as good as its solution of `A x = z`. The
residual is `r = p(A) z`, for a polynomial p with p(0) = 1 that is small at the
eigenvalues that the run has resolved. For probes with E[z z*] = I and |z|^2 = n,

    n rho^2 = E |p(A) z|^2 = sum_i p(lambda_i)^2,        rho = |r| / |z|,

so this is about how many eigenvalues are missing in the derivative. k probes measure the
part of one eigenvalue with a relative standard error of sqrt(2 / k). So the bias is below
the sampling error if

    n rho^2 <= sqrt(2 / k).

docs/devdocs/gradients.md, "How many steps", has the measurements.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .._core.flat import FlatOperator
from .._quadrature.functions import AbstractSpectralFunction
from .budget import Budget, largest_budget


@eqx.filter_custom_jvp
def is_differentiated(operator: FlatOperator) -> Bool[Array, ""]:
    """Whether the program takes a derivative with respect to the operator's arrays."""
    return jnp.zeros((), bool)


@is_differentiated.def_jvp
def _is_differentiated_rule(primals, tangents) -> Any:
    found = any(t is not None for t in jax.tree.leaves(tangents[0]))
    return jnp.asarray(found), None


class GradientTarget(eqx.Module):
    """What the derivative of a log-determinant asks of the runs of a call.

    - `asked`: whether a derivative is taken that comes from the runs.
    - `size`, `eps`: n, and the relative error of a matvec.
    - `k`: the largest number of probes.
    """

    asked: Bool[Array, ""] | bool
    size: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    k: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, operator: FlatOperator, k: int | Budget, from_runs: bool
    ) -> "GradientTarget":
        """The target for an operator with derivatives. `from_runs` says whether they come
        from the runs, and not from solves."""
        asked = from_runs and is_differentiated(operator)
        return cls(asked, operator.size, operator.eps, largest_budget(k))

    def excess(
        self,
        function: AbstractSpectralFunction,
        residuals: Real[Array, "*m"],
        extremes: Real[Array, "*r 2"],
    ) -> Real[Array, "*m"]:
        """`n rho^2 / sqrt(2 / k)` for the relative residuals of one run or several, or 0
        for another function, or if no derivative is asked for. `extremes` are the
        smallest and the largest Ritz value."""
        power = function.derivative_by_solves
        if power is None or power[1] != 1:
            return jnp.zeros_like(residuals)
        smallest, largest = jnp.min(extremes[..., 0]), jnp.max(extremes[..., 1])
        condition = jnp.where(smallest > 0, largest / smallest, jnp.inf)
        # Rounding errors leave a residual that no further step makes smaller.
        residuals = jnp.maximum(residuals - self.eps * condition, 0)
        ratio = self.size * residuals**2 * (self.k / 2) ** 0.5
        return jnp.where(self.asked, ratio, 0)
