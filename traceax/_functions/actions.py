"""Products `f_1(A) v, ..., f_p(A) v` with several functions of a Hermitian operator.

The Krylov space does not depend on the function, so all products are read from the same
Lanczos run. A derivative is that of each product alone (`action.py`), and takes a run for
each function.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from .._core.flat import freeze
from .._krylov.lanczos_recurrence import LanczosState
from .._run.gradient import attach_derivative
from .action import Action


class Actions(eqx.Module):
    """`v -> [f_1(A) v, ..., f_p(A) v]`, joined to one vector. The `members` have the same
    operator, buffers and number of steps, which is not adaptive."""

    members: tuple[Action, ...]

    def run(
        self, vector: Inexact[Array, " n"]
    ) -> tuple[LanczosState, Int[Array, ""] | int]:
        """A run from this vector, constant to derivatives, and its number of steps."""
        first = freeze(self.members[0])
        state, steps, _ = first.advanced(jax.lax.stop_gradient(vector))
        return state, steps

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " pn"]:
        state, steps = self.run(vector)

        def product(action):
            constant = freeze(action)
            image = constant.evaluate(*constant.read(state, steps))
            return attach_derivative(image, lambda: action(vector))

        return jnp.concatenate([product(action) for action in self.members])
