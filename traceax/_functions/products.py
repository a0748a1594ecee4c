"""Products with f(A), alone or between other maps, and estimates of their errors.

With a preconditioner P of A and `M = P^(-1/2) A P^(-1/2)`,

    A^-1 = P^(-1/2) M^-1 P^(-1/2) = P^-1 + P^(-1/2) (M^-1 - I) P^(-1/2).

P^-1 is known. `PreconditionedAction` applies the second term: its `action` is Lanczos for
M with the function `InverseMinusOne`. M is close to the identity, so few steps suffice,
and M^-1 - I is small, so its diagonal has little variance.
"""

import abc
from typing import ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.flat import FlatOperator
from .._krylov.lanczos_recurrence import LanczosState
from .._preconditioners.base import AbstractPreconditioner
from .._quadrature.functions import AbstractSpectralFunction
from .action import Action


class InverseMinusOne(AbstractSpectralFunction):
    """`1 / x - 1`."""

    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = True
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        # `1 / x - 1` would cancel near 1, where the eigenvalues of a good M are.
        return (1 - x) / x


class RunReport(eqx.Module):
    """A product with f(A) and what its Lanczos run tells about its errors.

    - `product`: the product.
    - `extremes`: the smallest and the largest Ritz value.
    - `residual`: the relative residual of the derivative, as `Action.residual`.
    - `truncated`, `rounding`: for each entry of the product, the estimated size of its
        truncation error and of its rounding error.
    - `beyond`: how much further entries of the diagonal may lie below and above.
    """

    product: Inexact[Array, " m"]
    extremes: Real[Array, "2"]
    residual: Real[Array, ""]
    truncated: Real[Array, " m"]
    rounding: Real[Array, " m"]
    beyond: Real[Array, "2"]


class AbstractProduct(eqx.Module):
    """`v -> E F S v` for F the `action`: products that start and end with other maps.

    - `action`: F, by Lanczos.
    """

    action: eqx.AbstractVar[Action]

    @abc.abstractmethod
    def start(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """S v, from which Lanczos starts."""

    @abc.abstractmethod
    def end(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        """E v for a result of Lanczos, or for an error of it."""

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        return self.end(self.action(self.start(vector)))

    def after(self, steps: Int[Array, ""]) -> Self:
        """The same map by another number of steps."""
        return eqx.tree_at(lambda x: x.action.steps, self, steps)

    def look(
        self, state: LanczosState, steps: Int[Array, ""] | int, hidden: float
    ) -> RunReport:
        """Report on a run of `steps` steps that started from `start(vector)`. `hidden` is
        explained in `Action.lower_end`."""
        action = self.action
        run, nodes, vectors = action.read(state, steps)
        # The carry of a run begins with the basis vector of its next step.
        following = state.carry[0]
        truncated, rounding, beyond = action.errors(
            run, nodes, vectors, following=following, hidden=hidden
        )

        def largest_entries(errors):
            # Errors arise before the last map, which spreads them over entries.
            return jnp.max(jnp.abs(jax.vmap(self.end)(errors)), axis=0)

        return RunReport(
            product=self.end(action.evaluate(run, nodes, vectors)),
            extremes=jnp.stack([nodes[0], nodes[-1]]),
            residual=action.residual(run, nodes, vectors),
            truncated=largest_entries(truncated),
            rounding=largest_entries(rounding),
            beyond=beyond,
        )


class PreconditionedAction(AbstractProduct):
    """`v -> W^-* F W^-1 v` for F the `action` and `P = W W*`, or F itself without P."""

    action: Action
    preconditioner: AbstractPreconditioner | None

    def start(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        outer = self.preconditioner
        return vector if outer is None else outer.whiten(vector)

    def end(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        outer = self.preconditioner
        return vector if outer is None else outer.whiten_adjoint(vector)


class FactoredAction(AbstractProduct):
    """`v -> X F v` for F the `action` and X the `factor`, an m by n operator."""

    action: Action
    factor: FlatOperator

    def start(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return vector

    def end(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        return self.factor.mv(vector)
