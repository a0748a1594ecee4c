"""Independent samples for a whole budget."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Shaped

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .budget import Budget
from .execution import AbstractExecution
from .fold import fold, stacked, zeros_like_shapes
from .loop import Assessment, iterate, LoopResult, sum_over_rounds


class Streamed(eqx.Module):
    """What `stream` has made of independent samples.

    - `samples`: the samples, infinite where none were made, if they are kept.
    - `others`: what came with each of them, likewise.
    - `summary`: what all of them reduce to, their `Moments` first.
    - `mean`: a function whose result has the derivatives of the mean.
    - `count`: the number of samples.
    """

    samples: Inexact[Array, " m"] | None
    others: PyTree[Shaped[Array, "m ..."]]
    summary: tuple
    mean: Callable[[], Inexact[Array, "*q"]]
    count: Int[Array, ""] | int
    loop: LoopResult


def stream(
    fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    reduce: Callable[[PyTree, Bool[Array, " p"]], tuple],
    merge: Callable[[tuple], tuple],
    operator: FlatOperator,
    k: int | Budget,
    execution: AbstractExecution,
    width: int = 1,
    *,
    keep: bool = True,
    quantity: AbstractQuantity = Trace(),
) -> Streamed:
    """Independent samples for the whole budget: `fn(operator, i)` is the pair of sample i
    and what comes with it.

    `reduce(pairs, valid)` summarises the pairs of one device, their `Moments` first, and
    `merge` makes one summary of several that are stacked. A summary of no samples is all
    zeros. Samples, and what comes with them, are kept, or else no more of them at a time
    than the execution takes. The error that an adaptive budget compares with its
    tolerance is that of what the `quantity` presents to users.
    """
    if not isinstance(k, Budget) and not keep:
        total, summary = fold(fn, reduce, merge, operator, k, execution, width)
        return Streamed(None, (), summary, lambda: total / k, k, LoopResult())
    if not isinstance(k, Budget):
        outs, parts = execution.map_reduce(fn, reduce, operator, jnp.arange(k), width)
        samples, others = outs
        summary, mean = merge(parts), lambda: jnp.mean(samples)
        return Streamed(samples, others, summary, mean, k, LoopResult())

    size, num_rounds = k.round_size, k.num_rounds
    # Before the loop: one with tangents and effects has no reverse mode.
    frozen = operator.frozen

    # Traced once, for the shapes of the buffers and for the loop.
    @jax.jit
    def one_round(rounds):
        indices = rounds * size + jnp.arange(size)
        return execution.map_reduce(fn, reduce, frozen, indices, width)

    def step(buffers, rounds):
        outs, parts = one_round(rounds)
        kept, summary = buffers
        kept = jax.tree.map(
            lambda all, new: jax.lax.dynamic_update_slice_in_dim(
                all, new, rounds * size, axis=0
            ),
            kept,
            outs if keep else (None, ()),
        )
        return kept, merge(stacked(summary, parts))

    outs, parts = jax.eval_shape(one_round, jnp.zeros((), jnp.int32))
    kept = jax.tree.map(
        lambda x: jnp.full((num_rounds * size, *x.shape[1:]), jnp.inf, x.dtype),
        outs if keep else (None, ()),
    )
    none = zeros_like_shapes(jax.eval_shape(merge, parts))

    def assess(buffers, _):
        moments = buffers[1][0]
        std_err = moments.std_err()
        value, std_err = quantity.present(moments.mean, std_err)
        return Assessment(k.rule.size(value), k.rule.size(std_err), moments.count)

    loop = iterate(k, step, assess, (kept, none), independent=True)
    (samples, others), summary = loop.state.buffers
    count = loop.rounds * size

    def mean():
        indices = jnp.arange(num_rounds * size).reshape(num_rounds, size)
        sample = lambda operator, i: fn(operator, i)[0]  # noqa: E731
        settings = loop.rounds, summary[0].mean, execution, width
        total = sum_over_rounds(sample, operator, indices, *settings)
        return total / jnp.maximum(count, 1).astype(total.dtype)

    return Streamed(samples, others, summary, mean, count, loop)
