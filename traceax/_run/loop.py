"""The loop that spends an adaptive budget in rounds, until the estimate is good enough.

After each round the estimate t has a standard error s from m samples. The rule of
`Adaptive` is met where

    e = q(m - 1) s / max(atol, rtol |t|) <= 1,

with q the quantile of Student's t (`excess` in the code). Repeated tests pass a little
early more often than late, so small rounds must pass several times in a row
(`streak`). Where samples are independent, s falls as one over the root of the number of
samples: after N units of the budget a run needs N e^2 in all, N (e^2 - 1) more
(`missing`). An estimator may leave out tests that take long.

The loop is outside of the execution, so on a mesh of devices every device decides from
the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real, Shaped

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .adaptive import Adaptive
from .budget import Budget
from .callback import report
from .execution import AbstractExecution
from .fold import zeros_like_shapes


class Assessment(eqx.Module):
    """The numbers that decide whether the loop continues: the estimate and its standard
    error, both in the norm of the budget, and the number of samples behind them.

    `tested` is whether the tolerance is tested. Without a test the other numbers are of
    an earlier round, or for history, progress and callback only, which must not change
    where a run ends."""

    value: Inexact[Array, ""]
    std_err: Real[Array, ""]
    count: Real[Array, ""]
    tested: Bool[Array, ""]

    @classmethod
    def of(
        cls,
        rule: Adaptive,
        value: PyTree[Array],
        std_err: PyTree[Array],
        count: Real[Array, ""],
    ) -> "Assessment":
        """The assessment of a value in the form that users see."""
        value, std_err = rule.worst(value, std_err)
        return cls(value, std_err, count, tested=jnp.ones((), bool))

    def excess(self, rule: Adaptive) -> Real[Array, ""]:
        """e, the half-width of the confidence interval over the tolerance."""
        return rule.excess(self.value, self.std_err, self.count)

    def meets(self, rule: Adaptive) -> Bool[Array, ""]:
        """Whether the estimate is tested and good enough, from enough samples."""
        return self.tested & rule.satisfied(self.value, self.std_err, self.count)


class LoopState(eqx.Module):
    """The state from which a later call resumes the loop.

    - `rounds`: the number of rounds so far.
    - `streak`: the number of rounds in a row, up to the last one, that met the criteria.
    - `buffers`: the buffers that the rounds have filled.
    - `assessment`: the assessment after the last round.
    - `looseness`: the criteria. Smaller entries mean stricter criteria.
    """

    rounds: Int[Array, ""]
    streak: Int[Array, ""]
    buffers: PyTree[Array]
    assessment: Assessment
    looseness: Real[Array, "4"]
    round_size: int = eqx.field(static=True)
    norm: Callable[[PyTree], Any] = eqx.field(static=True)


class LoopResult(eqx.Module):
    """How a loop ended: the number of rounds, and fields of [`Estimate`][] that the loop
    sets. The defaults stand for a fixed budget, which is one round."""

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
    """Repeat `buffers = step(buffers, rounds)` until `assess(buffers, rounds)` is good
    enough, `min_streak` times in a row. There are at most `num_rounds` rounds, including
    those of the earlier run that this one resumes.

    If the samples are `independent`, the loop also ends as soon as the exact answer costs
    less than the samples that are missing.
    """
    num_rounds, rule = budget.num_rounds, budget.rule
    looseness = _looseness(rule)

    if budget.state is None:
        rounds = streak = jnp.zeros((), jnp.int32)
        buffers = empty
        assessment = zeros_like_shapes(jax.eval_shape(assess, empty, rounds))
    else:
        rounds, buffers, assessment = _resume(budget, empty)
        # The tolerance may have changed. Only the last assessment is stored, so earlier
        # rounds count if the criteria are no stricter than they were.
        no_stricter = jnp.all(looseness >= budget.state.looseness)
        streak = jnp.where(no_stricter, jnp.maximum(budget.state.streak, 1), 1)
        streak = jnp.where(assessment.meets(rule), streak, 0)
    dtype = assessment.std_err.dtype
    # Rows of rounds that are not made stay infinite.
    history = jnp.full((num_rounds if rule.history else 0, 3), jnp.inf, dtype)

    def unfinished(carry):
        rounds, streak, _, assessment, _, _, interrupted = carry
        # More samples do not repair NaN. Before the first round the value is not known.
        finite = jnp.isfinite(assessment.value) | (assessment.count == 0)
        ended = streak >= budget.min_streak
        if independent and budget.exact_cost is not None:
            # With fewer samples than the rule asks for, the excess is not reliable.
            enough = assessment.count >= rule.min_samples
            missing = rounds * budget.round_size * (assessment.excess(rule) ** 2 - 1)
            ended |= enough & (missing > budget.exact_cost)
        return (rounds < budget.limit) & finite & ~ended & ~interrupted

    def make_round(carry):
        rounds, streak, buffers, _, history, meter, _ = carry
        buffers = step(buffers, rounds)
        rounds = rounds + 1
        assessment = assess(buffers, rounds)
        spent = rounds * budget.round_size * budget.cost
        if budget.spent is not None:
            spent = spent + budget.spent
        value, std_err = assessment.value, assessment.std_err
        rounds, interrupted = report(
            budget, rounds, spent=spent, value=value, std_err=std_err
        )
        if rule.history:
            # The norm of a value is real; a complex trace loses its imaginary part here.
            row = jnp.stack([spent.astype(dtype), value.real, std_err])
            history = history.at[rounds - 1].set(row)
        # The run is through when the tolerance is met, by `min_samples` samples or more,
        # or when the budget is spent. The samples so far are 1 / e^2 of those needed.
        done = 1 / assessment.excess(rule) ** 2
        done = jnp.minimum(done, assessment.count / rule.min_samples)
        done = jnp.clip(done, rounds / num_rounds, 1).astype(float)
        meter = rule.progress.step(meter, done)
        streak = jnp.where(assessment.meets(rule), streak + 1, 0)
        return rounds, streak, buffers, assessment, history, meter, interrupted

    meter, interrupted = rule.progress.init(), jnp.zeros((), bool)
    carry = (rounds, streak, buffers, assessment, history, meter, interrupted)
    carry = jax.lax.while_loop(unfinished, make_round, carry)
    rounds, streak, buffers, assessment, history, meter, interrupted = carry
    rule.progress.close(meter)
    missed = ~assessment.meets(rule) & jnp.isfinite(assessment.value)
    return LoopResult(
        rounds=rounds,
        # The exception of a callback is the reason why the tolerance was missed.
        result=first_failure(
            failure(interrupted, RESULTS.interrupted),
            failure(missed, RESULTS.max_matvecs_reached),
        ),
        state=LoopState(
            rounds=rounds,
            streak=streak,
            buffers=buffers,
            assessment=assessment,
            looseness=looseness,
            round_size=budget.round_size,
            norm=rule.norm,
        ),
        extra={"history": history} if rule.history else {},
    )


def _looseness(rule: Adaptive) -> Real[Array, "4"]:
    """The criteria of a rule, ordered so that each is looser the larger its entry."""
    tolerances = jnp.stack([rule.rtol, rule.atol])
    demands = jnp.asarray([1 - rule.confidence, 1 / rule.min_samples])
    return jnp.append(tolerances, demands)


def _resume(
    budget: Budget, empty: PyTree[Array]
) -> tuple[Int[Array, ""], PyTree[Array], Assessment]:
    """The number of rounds of the earlier run, its buffers in the larger ones of this
    run, and its assessment."""
    earlier = budget.state
    # With another round size, round numbers would stand for other samples. Under another
    # norm, the assessment would be of other numbers.
    settings = {"round_size": budget.round_size, "norm": budget.rule.norm}
    for name, current in settings.items():
        previous = getattr(earlier, name)
        if previous != current:
            raise ValueError(
                f"`state` must be of a call with the same `{name}`. Found {previous} and "
                f"{current}."
            )
    return earlier.rounds, embed(empty, earlier.buffers), earlier.assessment


def embed(empty: PyTree[Array], earlier: PyTree[Array]) -> PyTree[Array]:
    """The arrays of an earlier run, at the beginning of the larger arrays of this run."""
    arrays, treedef = jax.tree.flatten(empty)
    earlier_arrays, earlier_treedef = jax.tree.flatten(earlier)
    kinds = lambda arrays: [(x.dtype, x.ndim) for x in arrays]  # noqa: E731
    if treedef != earlier_treedef or kinds(arrays) != kinds(earlier_arrays):
        raise ValueError(
            "`state` must be of a call with an operator with the same tags and dtype. "
            f"Found {_summary(earlier_arrays)}, where this call has {_summary(arrays)}."
        )
    for large, small in zip(arrays, earlier_arrays, strict=True):
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
    """The number and the dtypes of arrays, for a message."""
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
    """The sum of `fn(operator, x)` over all x of the first `rounds` of r rounds, an array
    of the shape and dtype of `like`.

    A `while_loop` has no reverse mode, so the derivative of an adaptive estimate is taken
    of this sum: a scan over all r rounds. It costs no matvec beyond the first
    `rounds`."""
    num_rounds = jax.tree.leaves(xs)[0].shape[0]

    # Without the checkpoint reverse mode would keep the intermediate results of all
    # rounds.
    @jax.checkpoint
    def add_round(total, indexed_round):
        index, x = indexed_round

        def add(total):
            terms = execution.map(fn, operator, x, width)
            return total + jnp.sum(terms, axis=0, dtype=total.dtype)

        return jax.lax.cond(index < rounds, add, lambda total: total, total), None

    indexed_rounds = (jnp.arange(num_rounds), xs)
    return jax.lax.scan(add_round, jnp.zeros_like(like), indexed_rounds)[0]
