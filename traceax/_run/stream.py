"""The mean of independent samples, for a fixed or an adaptive budget.

With samples `t_i`, i = 0, ..., k - 1, from independent probes the estimate is their mean

    t = (1/k) sum_i t_i,        Var t = Var(t_i) / k.

Only the moments of the samples are merged over blocks, rounds and devices, and these
carry no derivatives: a derivative of the merged moments would communicate once more in
the backward pass. The function `mean` has the derivative of t instead, from the samples,
which stay on their devices. See "Architecture" in the developer documentation.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Shaped

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .budget import Budget
from .execution import AbstractExecution
from .fold import fold, prepend, zeros_like_shapes
from .loop import Assessment, iterate, LoopResult, sum_over_rounds


class Streamed(eqx.Module):
    """The samples of `stream`, and their summary.

    - `samples`: the samples, or what is kept of them, which may be None. Entries beyond
        `count` are infinite.
    - `others`: the second results of `fn`, filled likewise.
    - `summary`: the merged summary of all samples, whose first entry is their `Moments`.
    - `mean`: a function whose result has the derivatives of the mean. It may be given
        `weights` of the shape of `samples`, constant to derivatives, for that of the
        mean of `weights * samples`.
    - `count`: the number of samples.
    - `loop`: how the loop over rounds ended.
    """

    samples: Inexact[Array, "m ..."] | None
    others: PyTree[Shaped[Array, "m ..."]]
    summary: tuple
    mean: Callable[..., Inexact[Array, "*q"]]
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
    frozen_fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]]
    | None = None,
    keep: Callable[[Array], Array | None] | None = None,
    quantity: AbstractQuantity = Trace(),
    moments_of: Callable[[Array, PyTree, Bool[Array, " m"]], Any] | None = None,
) -> Streamed:
    """Draw independent samples for the whole budget. `fn(operator, i)` returns sample i
    and further results that belong to it.

    `reduce(outs, valid)` summarises the results of one device, with their `Moments`
    first, and `merge` turns several stacked summaries into one. A summary of no samples
    is all zeros. By default all results are kept. With `keep`, what this function takes
    from each sample is, which may be None, and `fold` holds one block of all else in
    memory. An adaptive budget compares the error of the value in the form that `quantity`
    presents to users with its tolerance. Arrays that `fn` closes over must be constant to
    derivatives, unless `frozen_fn` is the same function in which they are. Where samples
    do not add up, `moments_of(samples, others, valid)` takes the place of the moments in
    the summary: it makes them from all samples so far.
    """
    if isinstance(k, Budget):
        return _stream_rounds(
            fn,
            reduce,
            merge,
            operator,
            k,
            execution,
            width,
            frozen_fn=frozen_fn or fn,
            keep=keep,
            quantity=quantity,
            moments_of=moments_of,
        )
    if keep is not None:
        total, summary, samples = fold(
            fn, reduce, merge, operator, k, execution, width, keep=keep
        )
        return Streamed(
            samples=samples,
            others=(),
            summary=summary,
            mean=lambda: total / k,
            count=k,
            loop=LoopResult(),
        )
    # A loop of one round would make the first call of Hutchinson's estimator half as long
    # again, so a fixed budget is one call of the execution.
    outs, parts = execution.map_reduce(fn, reduce, operator, jnp.arange(k), width)
    samples, others = outs

    def mean(weights=None):
        weighted = samples if weights is None else weights * samples
        return jnp.mean(weighted, axis=0)

    return Streamed(
        samples=samples,
        others=others,
        summary=merge(parts),
        mean=mean,
        count=k,
        loop=LoopResult(),
    )


def _stream_rounds(
    fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    reduce: Callable[[PyTree, Bool[Array, " p"]], tuple],
    merge: Callable[[tuple], tuple],
    operator: FlatOperator,
    k: Budget,
    execution: AbstractExecution,
    width: int,
    *,
    frozen_fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    keep: Callable[[Array], Array | None] | None,
    quantity: AbstractQuantity,
    moments_of: Callable[[Array, PyTree, Bool[Array, " m"]], Any] | None,
) -> Streamed:
    """`stream` for an adaptive budget."""
    size, num_rounds = k.round_size, k.num_rounds
    # Frozen before the loop and not in its body: a `while_loop` with tangents and
    # effects, such as a callback, has no reverse mode.
    frozen = operator.frozen

    # Jitted so that it is traced once, for the shapes of the buffers and for the loop.
    @jax.jit
    def sample_round(rounds):
        indices = rounds * size + jnp.arange(size)
        outs, parts = execution.map_reduce(frozen_fn, reduce, frozen, indices, width)
        return outs if keep is None else (jax.vmap(keep)(outs[0]), ()), parts

    def step(buffers, rounds):
        outs, parts = sample_round(rounds)
        results, summary = buffers
        results = jax.tree.map(
            lambda buffer, new: jax.lax.dynamic_update_slice_in_dim(
                buffer, new, rounds * size, axis=0
            ),
            results,
            outs,
        )
        return results, merge(prepend(summary, parts))

    # Infinite and not NaN, at which `jax_debug_nans` would stop.
    outs, parts = jax.eval_shape(sample_round, jnp.zeros((), jnp.int32))
    empty_results = jax.tree.map(
        lambda x: jnp.full((num_rounds * size, *x.shape[1:]), _unmade(x.dtype), x.dtype),
        outs,
    )
    empty_summary = zeros_like_shapes(jax.eval_shape(merge, parts))

    indices = jnp.arange(num_rounds * size)

    def assess(buffers, rounds):
        if moments_of is None:
            moments = buffers[1][0]
        else:
            samples, others = buffers[0]
            moments = moments_of(samples, others, indices < rounds * size)
        value, std_err = quantity.present(moments.mean, moments.std_err())
        return Assessment.of(k.rule, value, std_err, moments.count)

    loop = iterate(k, step, assess, (empty_results, empty_summary), independent=True)
    (samples, others), summary = loop.state.buffers
    count = loop.rounds * size

    def mean(weights=None):
        def term(operator, x):
            index, weight = x
            sample = fn(operator, index)[0]
            return sample if weight is None else weight * sample

        if moments_of is None:
            like = summary[0].mean
        else:
            like = jnp.zeros(outs[0].shape[1:], outs[0].dtype)
        by_round = lambda x: x.reshape(num_rounds, size, *x.shape[1:])  # noqa: E731
        # `while_loop` has no reverse mode; this sum has. It is not run where no
        # derivative is taken.
        total = sum_over_rounds(
            term,
            operator,
            jax.tree.map(by_round, (indices, weights)),
            rounds=loop.rounds,
            like=like,
            execution=execution,
            width=width,
        )
        return total / jnp.maximum(count, 1).astype(total.dtype)

    return Streamed(samples, others, summary, mean, count, loop)


def _unmade(dtype: jnp.dtype) -> float:
    """The entries of samples that were not made."""
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else 0
