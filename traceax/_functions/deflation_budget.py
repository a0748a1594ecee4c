"""How many matvecs Krylov-aware deflation spends on the block, and how many on probes.

A growth of the block by `num_steps` steps costs `b * num_steps` matvecs, as much as b
probes. With Q before and Q' after it, it lowers the variance of a probe's form by

    2 (||G||_F^2 - ||G'||_F^2),    G = (I - Q Q*) (f(A) - c I) (I - Q Q*),

and G' the same with Q'. So it saves probes for the same tolerance (Chen and Hallman, SIAM
J. Matrix Anal. Appl. 44, 2023, section 5, where a tail bound takes the place of the
variance of the error bar). In the code `norm.square` is `||f(A) - c I||_F^2 - ||G||_F^2`.
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .._core.quantity import AbstractQuantity
from .._krylov.block_lanczos import BlockLanczosState
from .._run.budget import Budget
from .._run.steps import Steps
from .deflation import Deflation


# The largest number of deflated columns where `max_k` is left out. Each growth solves an
# eigenvalue problem of that size.
_DEFAULT_COLUMNS = 1024


class BlockRun(eqx.Module):
    """A deflation by `steps` steps of block Lanczos with blocks of size `b`, the `budget`
    for the other probes, and the `probe_steps` that the first probe took beforehand."""

    b: int
    deflation: Deflation
    run: BlockLanczosState
    steps: Int[Array, ""]
    budget: int | Budget
    probe_steps: Steps | None

    @property
    def num_matvecs(self) -> Int[Array, ""]:
        # The run that chose the steps is made besides, and none of its vectors is kept.
        spent = 0 if self.probe_steps is None else self.probe_steps.spent
        return self.steps * self.b + spent

    def budget_after(self, steps: Steps) -> int | Budget:
        """The budget for the other probes, of as many `steps`. The block counts as the
        number of probes that have as many matvecs."""
        if not isinstance(self.budget, Budget):
            return self.budget
        spent = -(-self.steps * self.b // steps.made)
        return dataclasses.replace(self.budget, spent=spent)

    def state(self, loop: PyTree[Array]) -> PyTree[Array]:
        """The state of an adaptive run, which a later call goes on from."""
        return (self.run, self.steps, loop) if isinstance(self.budget, Budget) else None


def split_budget(
    k: int | Budget, block: tuple[int, int] | None, probe_steps: Steps | None
) -> tuple[int, Int[Array, ""] | int, int, int | Budget]:
    """The number of vectors in a block, the first and the largest number of steps of
    block Lanczos, and the budget for the other probes."""
    if probe_steps is None:
        assert block is not None
        size, steps = block
        return size, steps, steps, k
    # A quarter of the probes with twice their steps: half of the matvecs.
    if not isinstance(k, Budget):
        b = max(1, k // 4)
        return b, 2 * probe_steps.made, 2 * probe_steps.most, k - 2 * b
    # Each growth costs as much as b probes, and all of them at most half of `max_k`.
    b = max(1, k.round_size // 4)
    most = k.max_k // (2 * b)
    if k.rule.max_k is None:
        most = min(most, _DEFAULT_COLUMNS // (b * probe_steps.most))
    growths = max(2, most)
    budget = k.limited_to(k.max_k - growths * b)
    return b, 2 * probe_steps.made, growths * probe_steps.most, budget


def grow_deflation(
    state: BlockLanczosState,
    steps: Int[Array, ""],
    budget: Budget,
    quantity: AbstractQuantity,
    advance: Callable[..., BlockLanczosState],
    deflate: Callable[[BlockLanczosState, Int[Array, ""]], Deflation],
    num_steps: Int[Array, ""] | int,
) -> tuple[BlockLanczosState, Int[Array, ""]]:
    """Deflate `num_steps` more blocks, again and again, while that saves more probes than
    it costs. The norm that the last growth has deflated predicts the gain of the next."""
    most, b, _ = state.diagonal.shape
    first = deflate(state, steps)
    # In units of the largest value of f, squares do not overflow.
    unit = jnp.max(jnp.abs(first.values))
    unit = jnp.where(unit > 0, unit, 1)

    def pays_off(carry):
        _, steps, norm, gain = carry
        # The tolerance is one of what users see, such as a root of the trace.
        value, _ = quantity.present(unit * norm.trace, jnp.zeros_like(unit))
        samples_saved = budget.rule.samples_saved(gain, value / unit, unit)
        return (steps < most) & (samples_saved > b)

    def grow(carry):
        state, steps, norm, _ = carry
        following = jnp.minimum(steps + num_steps, most)
        state = advance(state, steps, following)
        larger = deflate(state, following).deflated_norm(unit)
        return state, following, larger, larger.square - norm.square

    norm = first.deflated_norm(unit)
    carry = state, steps, norm, norm.square
    state, steps, *_ = jax.lax.while_loop(pays_off, grow, carry)
    return state, steps
