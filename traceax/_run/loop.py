"""The loop that spends an adaptive budget in rounds, until the estimate is good enough.

After each round the estimate t has a standard error s from m samples. The rule of
`Adaptive` is met where

    e = q(m - 1) s / max(atol, rtol |t|) <= 1,

with q the quantile of Student's t (`excess` in the code). A test after every round passes
a little early more often than late, so small rounds must pass several times in a row
(`streak`). Where samples are independent, s falls as one over the root of the number of
samples: after N units of the budget a run needs N e^2 in all, N (e^2 - 1) more
(`missing`).

Not every round needs a test: see `forecast.py`.

The loop is outside of the execution, so on a mesh of devices every device decides from
the same numbers.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .._core.results import failure, first_failure, RESULTS
from .adaptive import Adaptive
from .budget import Budget
from .callback import report
from .fold import zeros_like_shapes
from .forecast import Forecast


class Assessment(eqx.Module):
    """The numbers that decide whether the loop continues: the estimate and its standard
    error, both in the norm of the budget, and the number of samples behind them."""

    value: Inexact[Array, ""]
    std_err: Real[Array, ""]
    count: Real[Array, ""]

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
        return cls(value=value, std_err=std_err, count=count)

    def excess(self, rule: Adaptive) -> Real[Array, ""]:
        """e, the half-width of the confidence interval over the tolerance."""
        return rule.excess(self.value, self.std_err, self.count)

    def meets(self, rule: Adaptive) -> Bool[Array, ""]:
        """Whether the estimate is good enough, from enough samples."""
        return rule.satisfied(self.value, self.std_err, self.count)


class LoopState(eqx.Module):
    """The state from which a later call resumes the loop.

    - `rounds`: the number of rounds so far.
    - `streak`: the number of tests in a row, up to the last one, that met the criteria.
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


class _Verdict(eqx.Module):
    """What the last test has decided.

    - `rounds`, `count`: the numbers of rounds and of samples at that test.
    - `streak`: the number of tests in a row, up to this one, that met the criteria.
    - `ended`: whether no more rounds are wanted.
    - `unit`: for the forecast; 0 asks for a test after the next round.
    """

    rounds: Int[Array, ""]
    count: Real[Array, ""]
    streak: Int[Array, ""]
    ended: Bool[Array, ""]
    unit: Real[Array, ""]


class _Run(eqx.Module):
    """The state of the loop. `assessment` is of the last round that was assessed."""

    rounds: Int[Array, ""]
    buffers: PyTree[Array]
    assessment: Assessment
    verdict: _Verdict
    history: Real[Array, "r 3"]
    meter: PyTree
    interrupted: Bool[Array, ""]


def iterate(
    budget: Budget,
    step: Callable[[PyTree[Array], Int[Array, ""], int], PyTree[Array]],
    assess: Callable[[PyTree[Array], Int[Array, ""]], tuple[PyTree[Array], Assessment]],
    empty: PyTree[Array],
    *,
    forecast: Forecast | None = None,
    independent: bool = False,
    leap: int = 1,
) -> LoopResult:
    """Make rounds until the estimate is good enough in `min_streak` tests in a row. There
    are at most `num_rounds` rounds, including those of the earlier run that this one
    resumes.

    `step(buffers, rounds, r)` returns the buffers with r more rounds; r is 1, or `leap`
    where no test is due before. `assess(buffers, rounds)` returns the buffers and their
    assessment. Without a `forecast` every round is tested. If the samples are
    `independent`, the loop also ends as soon as the exact answer costs less than the
    samples that are missing.
    """
    rule = budget.rule
    rounds = _Rounds(budget, step, assess, forecast, independent, leap)
    run = jax.lax.while_loop(
        lambda run: (
            (run.rounds < budget.num_rounds) & ~run.verdict.ended & ~run.interrupted
        ),
        rounds.make,
        rounds.start(empty),
    )
    rule.progress.close(run.meter)
    assessment = run.assessment
    missed = ~assessment.meets(rule) & jnp.isfinite(assessment.value)
    return LoopResult(
        rounds=run.rounds,
        # The exception of a callback is the reason why the tolerance was missed.
        result=first_failure(
            failure(run.interrupted, RESULTS.interrupted),
            failure(missed, RESULTS.max_matvecs_reached),
        ),
        state=LoopState(
            rounds=run.rounds,
            streak=run.verdict.streak,
            buffers=run.buffers,
            assessment=assessment,
            looseness=_looseness(rule),
            round_size=budget.round_size,
            norm=rule.norm,
        ),
        extra={"history": run.history} if rule.history else {},
    )


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """What the loop does in rounds and at tests. The fields are the arguments of
    `iterate`."""

    budget: Budget
    step: Callable[[PyTree[Array], Int[Array, ""], int], PyTree[Array]]
    assess: Callable[[PyTree[Array], Int[Array, ""]], tuple[PyTree[Array], Assessment]]
    forecast: Forecast | None
    independent: bool
    leap: int

    @property
    def watched(self) -> bool:
        """Whether history, callback or progress meter are told of every round, so that
        every round is assessed. The run still ends where it would end unwatched."""
        rule = self.budget.rule
        silent = isinstance(rule.progress, eqxi.NoProgressMeter)
        return rule.history or rule.callback is not None or not silent

    def start(self, empty: PyTree[Array]) -> _Run:
        """The loop before its first round, or where the earlier run has ended."""
        budget, rule = self.budget, self.budget.rule
        if budget.state is None:
            rounds = streak = jnp.zeros((), jnp.int32)
            buffers = empty
            shapes = jax.eval_shape(self.assess, empty, rounds)[1]
            assessment = zeros_like_shapes(shapes)
        else:
            rounds, buffers, assessment = _resume(budget, empty)
            # The tolerance may have changed. Only the last assessment is stored, so
            # earlier rounds count if the criteria are no stricter than they were.
            no_stricter = jnp.all(_looseness(rule) >= budget.state.looseness)
            streak = jnp.where(no_stricter, jnp.maximum(budget.state.streak, 1), 1)
            streak = jnp.where(assessment.meets(rule), streak, 0)
        # Rows of rounds that are not made stay infinite.
        shape = (budget.num_rounds if rule.history else 0, 3)
        return _Run(
            rounds=rounds,
            buffers=buffers,
            assessment=assessment,
            verdict=self.test(rounds, buffers, assessment, streak),
            history=jnp.full(shape, jnp.inf, assessment.std_err.dtype),
            meter=rule.progress.init(),
            interrupted=jnp.zeros((), bool),
        )

    def test(
        self,
        rounds: Int[Array, ""],
        buffers: PyTree[Array],
        assessment: Assessment,
        streak: Int[Array, ""],
    ) -> _Verdict:
        """The decisions that follow from an assessment."""
        budget = self.budget
        # More samples do not repair NaN. Before the first round the value is not known.
        ended = ~jnp.isfinite(assessment.value) & (assessment.count > 0)
        ended |= streak >= budget.min_streak
        excess = assessment.excess(budget.rule)
        # With fewer samples than the rule asks for, the excess is not reliable.
        enough = assessment.count >= budget.rule.min_samples
        if self.independent and budget.exact_cost is not None:
            missing = rounds * budget.round_size * (excess**2 - 1)
            ended |= enough & (missing > budget.exact_cost)
        unit = jnp.zeros_like(assessment.std_err)
        if self.forecast is not None:
            unit = self.forecast.unit(excess, buffers, rounds)
            unit = jnp.where(enough & (streak == 0), unit, 0)
        return _Verdict(rounds, assessment.count, streak, ended, unit)

    def waits(
        self, run: _Run, buffers: PyTree[Array], rounds: Int[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether no test is due after so many rounds."""
        if self.forecast is None:
            return jnp.zeros((), bool)
        early = rounds < self.budget.num_rounds
        early &= rounds < self.forecast.growth * run.verdict.rounds
        unit, count = run.verdict.unit, run.verdict.count
        return early & self.forecast.exceeds(unit, count, buffers, rounds)

    def advance(self, run: _Run) -> tuple[PyTree[Array], Int[Array, ""]]:
        """Buffers and number of rounds when a test is due, after one more round or
        several."""
        # Tests of independent samples cost nothing, so a loop of single rounds would not
        # help, and on a mesh it would gather their samples.
        single = self.independent and self.leap == 1
        if self.watched or self.forecast is None or single:
            return self.step(run.buffers, run.rounds, 1), run.rounds + 1

        def unfinished(carry):
            buffers, rounds = carry
            return (rounds == run.rounds) | self.waits(run, buffers, rounds)

        def make_one(buffers, rounds):
            return self.step(buffers, rounds, 1), rounds + 1

        def make_several(buffers, rounds):
            return self.step(buffers, rounds, self.leap), rounds + self.leap

        def body(carry):
            if self.leap == 1:
                return make_one(*carry)
            buffers, rounds = carry
            fits = self.waits(run, buffers, rounds + self.leap - 1)
            # Under `vmap` a condition that differs within the batch would make both.
            every = eqxi.unvmap_all(fits | run.verdict.ended | ~unfinished(carry))
            return jax.lax.cond(every, make_several, make_one, *carry)

        return jax.lax.while_loop(unfinished, body, (run.buffers, run.rounds))

    def make(self, run: _Run) -> _Run:
        """Make rounds, and assess and report them."""
        budget, rule = self.budget, self.budget.rule
        buffers, rounds = self.advance(run)
        is_due = ~self.waits(run, buffers, rounds)
        buffers, assessment = self.assess(buffers, rounds)
        spent = rounds * budget.round_size * budget.cost
        if budget.spent is not None:
            spent = spent + budget.spent
        value, std_err = assessment.value, assessment.std_err
        rounds, interrupted = report(
            budget, rounds, spent=spent, value=value, std_err=std_err
        )
        history = run.history
        if rule.history:
            # The norm of a value is real; a complex trace loses its imaginary part here.
            row = jnp.stack([spent.astype(history.dtype), value.real, std_err])
            history = history.at[rounds - 1].set(row)
        # The run is through when the tolerance is met, by `min_samples` samples or more,
        # or when the budget is spent. The samples so far are 1 / e^2 of those needed.
        done = 1 / assessment.excess(rule) ** 2
        done = jnp.minimum(done, assessment.count / rule.min_samples)
        done = jnp.clip(done, rounds / budget.num_rounds, 1).astype(float)
        verdict = run.verdict
        streak = jnp.where(assessment.meets(rule), verdict.streak + 1, 0)
        tested = self.test(rounds, buffers, assessment, streak)
        return _Run(
            rounds=rounds,
            buffers=buffers,
            assessment=assessment,
            verdict=jax.tree.map(ft.partial(jnp.where, is_due), tested, verdict),
            history=history,
            meter=rule.progress.step(run.meter, done),
            interrupted=interrupted,
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
