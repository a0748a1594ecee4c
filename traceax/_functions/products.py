"""A product with f(A), through a preconditioner if there is one, and what a run tells of
it."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._krylov.lanczos_recurrence import LanczosState
from .._preconditioners.base import AbstractPreconditioner
from .._quadrature.functions import AbstractSpectralFunction
from .action import Action


class BeyondOne(AbstractSpectralFunction):
    """`1 / x - 1`."""

    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = True
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        return (1 - x) / x


class Look(eqx.Module):
    """What a run tells: the product, the smallest and the largest Ritz value, the
    residual of the derivative, about how large the errors of each entry of the product
    are, those of truncation and those of rounding, and how far else entries of the
    diagonal may go down and up."""

    product: Inexact[Array, " n"]
    extremes: Real[Array, "2"]
    residual: Real[Array, ""]
    truncated: Real[Array, " n"]
    rounding: Real[Array, " n"]
    beyond: Real[Array, "2"]


class Between(eqx.Module):
    """`P^(-1/2) F P^(-1/2)` for a map F."""

    action: Action
    preconditioner: AbstractPreconditioner | None

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return self.outside(self.action(self.outside(vector)))

    def outside(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        if self.preconditioner is None:
            return vector
        return self.preconditioner.power(-0.5, vector)

    def after(self, steps: Int[Array, ""]) -> "Between":
        """The same, by so many steps."""
        return eqx.tree_at(lambda x: x.action.steps, self, steps)

    def look(self, state: LanczosState, hidden: float) -> Look:
        """Of a run from `outside(vector)`, that has made as many steps as there are to
        be. `hidden` is as for `Action.lower_end`."""
        action = self.action
        run, nodes, vectors = action.read(state)
        following = state.carry[0]
        errors = action.errors(run, nodes, vectors, following, hidden)
        truncated, rounding, beyond = errors

        def largest(errors):
            return jnp.max(jnp.abs(jax.vmap(self.outside)(errors)), axis=0)

        return Look(
            product=self.outside(action.applied(run, nodes, vectors)),
            extremes=jnp.stack([nodes[0], nodes[-1]]),
            residual=action.residual(run, nodes, vectors),
            truncated=largest(truncated),
            rounding=largest(rounding),
            beyond=beyond,
        )
