"""The one loop that spends a budget: all at once, or in rounds until it is enough."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real, Shaped

from ._adaptive import Adaptive
from ._execution import AbstractExecution
from ._flat import FlatOperator
from ._solution import failure, RESULTS


class Look(eqx.Module):
    """What decides whether to go on: the estimate, its standard error, and the number of
    samples that they are from."""

    value: Inexact[Array, ""]
    std_err: Real[Array, ""]
    count: Real[Array, ""]


class LoopState(eqx.Module):
    """What another loop goes on from: the rounds made, and what they left."""

    rounds: Int[Array, ""]
    state: PyTree[Array]
    round_size: int = eqx.field(static=True)


class Ended(eqx.Module):
    """How a loop ended; without one, nothing to tell."""

    rounds: Int[Array, ""] | int = 1
    result: Any = None
    state: Any = None
    extra: dict[str, Array] = eqx.field(default_factory=dict)


def iterate(
    adaptive: Adaptive,
    step: Callable[[PyTree[Array], Int[Array, ""]], PyTree[Array]],
    look: Callable[[PyTree[Array], Int[Array, ""]], Look],
    fresh: PyTree[Array],
) -> Ended:
    """`state = step(state, rounds)` until `look(state, rounds)` is good enough, at most
    `num_rounds` times, in all runs of which this one resumes the last."""
    num_rounds = adaptive.num_rounds
    state, rounds = fresh, jnp.zeros((), jnp.int32)
    if adaptive.state is not None:
        rounds, state = _resume(adaptive.state, adaptive.round_size, fresh)
    seen = look(state, rounds)
    history = jnp.full((num_rounds, 3), jnp.nan, seen.std_err.dtype)

    def go_on(carry):
        rounds, _, seen, _, _ = carry
        sound = jnp.isfinite(seen.value) | (seen.count == 0)
        done = adaptive.satisfied(seen.value, seen.std_err, seen.count)
        return (rounds < num_rounds) & sound & ~done

    def one(carry):
        rounds, state, _, history, meter = carry
        state = step(state, rounds)
        rounds = rounds + 1
        seen = look(state, rounds)
        spent = rounds * adaptive.round_size
        value = seen.value + adaptive.offset.astype(history.dtype)
        rounds = _tell(adaptive.callback, rounds, spent, value, seen.std_err)
        row = jnp.stack([spent.astype(history.dtype), value.real, seen.std_err])
        history = history.at[rounds - 1].set(row)
        way = adaptive.excess(seen.value, seen.std_err, seen.count)
        share = jnp.minimum(1 / way**2, seen.count / adaptive.min_samples)
        share = jnp.clip(share, rounds / num_rounds, 1).astype(float)
        return rounds, state, seen, history, adaptive.progress.step(meter, share)

    meter = adaptive.progress.init()
    carry = (rounds, state, seen, history, meter)
    rounds, state, seen, history, meter = jax.lax.while_loop(go_on, one, carry)
    adaptive.progress.close(meter)
    done = adaptive.satisfied(seen.value, seen.std_err, seen.count)
    return Ended(
        rounds=rounds,
        result=failure(~done & jnp.isfinite(seen.value), RESULTS.max_matvecs_reached),
        state=LoopState(rounds, state, adaptive.round_size),
        extra={"history": history} if adaptive.history else {},
    )


def _tell(
    callback: Callable[..., None] | None, rounds: Int[Array, ""], *seen: Array
) -> Int[Array, ""]:
    """`rounds`, from a call on the host: pure, so that the loop has reverse mode on any
    JAX, and needed, so that it is made."""
    if callback is None:
        return rounds

    def call(rounds, *seen):
        callback(*seen)
        return rounds

    return jax.pure_callback(call, rounds, rounds, *seen, vmap_method="sequential")


def _resume(
    earlier: PyTree[Array], round_size: int, fresh: PyTree[Array]
) -> tuple[Int[Array, ""], PyTree[Array]]:
    """The rounds of a shorter run, and its state in the buffers of a longer one."""
    if not isinstance(earlier, LoopState):
        raise TypeError(
            "`state` must be the `state` of a solution with an adaptive budget. Found an "
            f"object of type {type(earlier).__name__}."
        )
    same = jax.tree.structure(earlier.state) == jax.tree.structure(fresh)
    pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(earlier.state), strict=False)
    if not same or earlier.round_size != round_size:
        raise ValueError(
            "`state` must be of a call with the same operator, estimator and "
            f"`round_size`. Found `round_size` {earlier.round_size} and {round_size}"
            f"{'' if same else ', and another estimator'}."
        )
    for large, small in pairs:
        if any(a < b for a, b in zip(large.shape, small.shape, strict=True)):
            raise ValueError(
                f"`state` must fit into this call. Found an array of shape {small.shape} "
                f"for one of {large.shape}. Pass at least the `max_k` of the earlier "
                "call, and an operator of the same size."
            )

    def embed(large, small):
        return jax.lax.dynamic_update_slice(large, small, (0,) * large.ndim)

    return earlier.rounds, jax.tree.map(embed, fresh, earlier.state)


def sum_over_rounds(
    fn: Callable[[FlatOperator, PyTree], Array],
    operator: FlatOperator,
    xs: PyTree[Shaped[Array, "r b ..."]],
    rounds: Int[Array, ""] | int,
    execution: AbstractExecution,
    width: int = 1,
) -> Inexact[Array, ""]:
    """The sum of `fn(operator, x)` over the x of rounds that were made. Unlike the loop
    that made them, it has a derivative, which costs no product beyond those rounds."""
    num_rounds = jax.tree.leaves(xs)[0].shape[0]
    first = jax.tree.map(lambda x: x[0, 0], xs)
    shape = eqx.filter_eval_shape(fn, operator, first)

    @jax.checkpoint
    def one(state, each):
        index, x = each

        def add(state):
            return state + jnp.sum(execution.map(fn, operator, x, width))

        return jax.lax.cond(index < rounds, add, lambda state: state, state), None

    start = jnp.zeros(shape.shape, shape.dtype)
    return jax.lax.scan(one, start, (jnp.arange(num_rounds), xs))[0]


class Streamed(eqx.Module):
    """Independent samples: their moments first in `summary`, and `others` beside them.
    `mean` is a function whose result has the derivatives of the mean."""

    samples: Inexact[Array, " m"]
    others: PyTree[Shaped[Array, "m ..."]]
    summary: tuple
    mean: Callable[[], Inexact[Array, ""]]
    count: Int[Array, ""] | int
    ended: Ended


def stream(
    fn: Callable[[FlatOperator, Int[Array, ""]], tuple[Array, PyTree]],
    reduce: Callable[[PyTree, Bool[Array, " p"]], tuple],
    merge: Callable[[tuple], tuple],
    operator: FlatOperator,
    k: int | Adaptive,
    execution: AbstractExecution,
    width: int = 1,
) -> Streamed:
    """`fn(operator, i)` is sample i and what comes with it. What `reduce` makes of some,
    `merge` puts together, moments first; of no samples it is zeros."""
    if not isinstance(k, Adaptive):
        outs, parts = execution.map_reduce(fn, reduce, operator, jnp.arange(k), width)
        samples, others = outs
        summary, mean = merge(parts), lambda: jnp.mean(samples)
        return Streamed(samples, others, summary, mean, k, Ended())

    size, num_rounds = k.round_size, k.num_rounds

    def one_round(rounds):
        indices = rounds * size + jnp.arange(size)
        return execution.map_reduce(fn, reduce, operator.frozen, indices, width)

    def step(state, rounds):
        outs, parts = one_round(rounds)
        kept, summary = state
        kept = jax.tree.map(
            lambda all, new: jax.lax.dynamic_update_slice_in_dim(
                all, new, rounds * size, axis=0
            ),
            kept,
            outs,
        )
        parts = jax.tree.map(
            lambda one, more: jnp.append(one[None], more, axis=0), summary, parts
        )
        return kept, merge(parts)

    def look(state, rounds):
        moments = state[1][0]
        return Look(moments.mean, moments.std_err(), moments.count)

    outs, parts = jax.eval_shape(one_round, jnp.zeros((), jnp.int32))
    kept = jax.tree.map(
        lambda x: jnp.full((num_rounds * size, *x.shape[1:]), jnp.nan, x.dtype), outs
    )
    none = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(merge, parts)
    )
    ended = iterate(k, step, look, (kept, none))
    (samples, others), summary = ended.state.state
    count = ended.rounds * size

    def mean():
        indices = jnp.arange(num_rounds * size).reshape(num_rounds, size)
        sample = lambda operator, i: fn(operator, i)[0]  # noqa: E731
        rounds = ended.rounds
        total = sum_over_rounds(sample, operator, indices, rounds, execution, width)
        return total / jnp.maximum(count, 1).astype(total.dtype)

    return Streamed(samples, others, summary, mean, count, ended)
