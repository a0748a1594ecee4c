"""The one loop that spends a budget: all at once, or in rounds until it is enough."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real, Shaped

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .budget import Budget
from .callback import report
from .execution import AbstractExecution
from .fold import zeros_like_shapes


class Assessment(eqx.Module):
    """What decides whether another round is made: the estimate, its standard error, both
    in the norm of the budget, and the number of samples that they are from."""

    value: Inexact[Array, ""]
    std_err: Real[Array, ""]
    count: Real[Array, ""]


class LoopState(eqx.Module):
    """What a later call goes on from: the number of rounds made, the buffers that they
    filled, their assessment, and the number of rounds in a row, up to now, after which it
    was good enough. The smaller the `looseness`, the less is."""

    rounds: Int[Array, ""]
    streak: Int[Array, ""]
    buffers: PyTree[Array]
    assessment: Assessment
    looseness: Real[Array, "4"]
    round_size: int = eqx.field(static=True)
    norm: Callable[[PyTree], Any] = eqx.field(static=True)


class LoopResult(eqx.Module):
    """How a loop ended: the fields of [`Estimate`][] that it sets. With a fixed budget
    there is one round, and these are the defaults."""

    rounds: Int[Array, ""] | int = 1
    result: Any = None
    state: Any = None
    extra: dict[str, Array] = eqx.field(default_factory=dict)


def iterate(
    budget: Budget,
    step: Callable[[PyTree[Array], Int[Array, ""]], PyTree[Array]],
    assess: Callable[[PyTree[Array], Int[Array, ""]], Assessment],
    empty: PyTree[Array],
    *,
    independent: bool = False,
) -> LoopResult:
    """`buffers = step(buffers, rounds)` until `assess(buffers, rounds)` is good enough,
    `least_streak` times in a row, but at most `num_rounds` times, counting those of the
    earlier run that this one resumes.

    Where the samples are `independent`, the error falls as one over the root of their
    number, and the loop ends as soon as the exact answer costs less than what is missing.
    """
    num_rounds, rule = budget.num_rounds, budget.rule
    rest = [1 - rule.confidence, 1 / rule.min_samples]
    looseness = jnp.append(jnp.stack([rule.rtol, rule.atol]), jnp.asarray(rest))

    def good(seen):
        return rule.satisfied(seen.value, seen.std_err, seen.count)

    if budget.state is None:
        rounds = streak = jnp.zeros((), jnp.int32)
        buffers = empty
        assessment = zeros_like_shapes(jax.eval_shape(assess, empty, rounds))
    else:
        rounds, buffers, assessment = _resume(budget, empty)
        # The tolerance may be another one. Of rounds before the last one it is not known
        # whether they were good enough for a smaller one.
        known = jnp.all(looseness >= budget.state.looseness)
        streak = jnp.where(known, jnp.maximum(budget.state.streak, 1), 1)
        streak = jnp.where(good(assessment), streak, 0)
    real = assessment.std_err.dtype
    history = jnp.full((num_rounds if rule.history else 0, 3), jnp.inf, real)

    def unfinished(carry):
        rounds, streak, _, seen, _, _, interrupted = carry
        finite = jnp.isfinite(seen.value) | (seen.count == 0)
        ended = streak >= budget.least_streak
        if independent and budget.exact_cost is not None:
            excess = rule.excess(seen.value, seen.std_err, seen.count)
            missing = rounds * budget.round_size * (excess**2 - 1)
            enough = seen.count >= rule.min_samples
            ended |= enough & (missing > budget.exact_cost)
        return (rounds < num_rounds) & finite & ~ended & ~interrupted

    def one_round(carry):
        rounds, streak, buffers, _, history, meter, _ = carry
        buffers = step(buffers, rounds)
        rounds = rounds + 1
        seen = assess(buffers, rounds)
        spent = rounds * budget.round_size * budget.cost
        if budget.spent is not None:
            spent = spent + budget.spent
        news = spent, seen.value, seen.std_err
        rounds, interrupted = report(budget, rounds, *news)
        if rule.history:
            row = jnp.stack([spent.astype(real), seen.value.real, seen.std_err])
            history = history.at[rounds - 1].set(row)
        excess = rule.excess(seen.value, seen.std_err, seen.count)
        share = jnp.minimum(1 / excess**2, seen.count / rule.min_samples)
        share = jnp.clip(share, rounds / num_rounds, 1).astype(float)
        streak = jnp.where(good(seen), streak + 1, 0)
        meter = rule.progress.step(meter, share)
        return rounds, streak, buffers, seen, history, meter, interrupted

    meter, interrupted = rule.progress.init(), jnp.zeros((), bool)
    carry = (rounds, streak, buffers, assessment, history, meter, interrupted)
    rounds, streak, buffers, seen, history, meter, interrupted = jax.lax.while_loop(
        unfinished, one_round, carry
    )
    rule.progress.close(meter)
    missed = ~good(seen) & jnp.isfinite(seen.value)
    return LoopResult(
        rounds=rounds,
        result=first_failure(
            failure(interrupted, RESULTS.interrupted),
            failure(missed, RESULTS.max_matvecs_reached),
        ),
        state=LoopState(
            rounds, streak, buffers, seen, looseness, budget.round_size, rule.norm
        ),
        extra={"history": history} if rule.history else {},
    )


def _resume(
    budget: Budget, empty: PyTree[Array]
) -> tuple[Int[Array, ""], PyTree[Array], Assessment]:
    """The number of rounds of a shorter run, its buffers in those of a longer one, and
    its assessment."""
    earlier = budget.state
    current = {"round_size": budget.round_size, "norm": budget.rule.norm}
    for name, now in current.items():
        before = getattr(earlier, name)
        if before != now:
            raise ValueError(
                f"`state` must be of a call with the same `{name}`. Found {before} and "
                f"{now}."
            )
    return earlier.rounds, embed(empty, earlier.buffers), earlier.assessment


def embed(empty: PyTree[Array], earlier: PyTree[Array]) -> PyTree[Array]:
    """What a shorter run left in its buffers, in the buffers of a longer one."""
    (ours, tree), (theirs, other) = jax.tree.flatten(empty), jax.tree.flatten(earlier)
    kinds = lambda arrays: [(x.dtype, x.ndim) for x in arrays]  # noqa: E731
    if tree != other or kinds(ours) != kinds(theirs):
        raise ValueError(
            "`state` must be of a call with an operator with the same tags and dtype. "
            f"Found {_summary(theirs)}, where this call has {_summary(ours)}."
        )
    for large, small in zip(ours, theirs, strict=True):
        if any(a < b for a, b in zip(large.shape, small.shape, strict=True)):
            raise ValueError(
                f"`state` must fit into this call. Found an array of shape {small.shape} "
                f"for one of {large.shape}. Pass at least the `max_k` of the earlier "
                "call, and an operator of the same size."
            )

    def put(large, small):
        return jax.lax.dynamic_update_slice(large, small, (0,) * large.ndim)

    return jax.tree.map(put, empty, earlier)


def _summary(arrays: Sequence[Array]) -> str:
    dtypes = sorted({str(x.dtype) for x in arrays})
    return f"{len(arrays)} arrays of {', '.join(dtypes)}"


def sum_over_rounds(
    fn: Callable[[FlatOperator, PyTree], Array],
    operator: FlatOperator,
    xs: PyTree[Shaped[Array, "r b ..."]],
    rounds: Int[Array, ""] | int,
    like: Inexact[Array, "*q"],
    execution: AbstractExecution,
    width: int = 1,
) -> Inexact[Array, "*q"]:
    """The sum of `fn(operator, x)`, an array `like` this one, over the x of rounds that
    were made. Unlike the loop that made them, it has a derivative, which costs no product
    beyond those rounds."""
    num_rounds = jax.tree.leaves(xs)[0].shape[0]

    @jax.checkpoint
    def one(state, each):
        index, x = each

        def add(state):
            terms = execution.map(fn, operator, x, width)
            return state + jnp.sum(terms, axis=0, dtype=state.dtype)

        return jax.lax.cond(index < rounds, add, lambda state: state, state), None

    return jax.lax.scan(one, jnp.zeros_like(like), (jnp.arange(num_rounds), xs))[0]
