"""The budget of one call, divided into rounds."""

import dataclasses
import math

import equinox as eqx
import equinox.internal as eqxi
from jaxtyping import Array, Int, PyTree

from .adaptive import Adaptive


# The number of matvecs that the last good rounds in a row must have made before a run
# ends. Where rounds are smaller, the rule is tested more often, and one of many tests is
# easily passed by luck. More would delay the end of runs that are good enough; a round of
# the default size, 16, needs no second one.
_MIN_STREAK_MATVECS = 8


# The largest number of samples, and the largest size of an operator whose exact answer is
# kept in reserve, where `max_k` is left out: a tolerance of 1% takes fewer samples unless
# the trace is small beside the Frobenius norm.
_MAX_SAMPLES = 10_000
# The largest number of numbers in buffers where `max_k` is left out, 1 GiB in float32.
_MAX_NUMBERS = 2**28


def default_max_k(numbers: int = 0) -> int:
    """The largest adaptive budget where `max_k` is left out, for an estimator that holds
    so many `numbers` for each unit of its budget."""
    return max(1, min(_MAX_SAMPLES, _MAX_NUMBERS // max(numbers, 1)))


class Budget(eqx.Module):
    """An adaptive budget as estimators receive it: the user's rule, and what belongs to
    one call. It has at most `max_k` units, which are spent in rounds of `round_size`.

    - `rule`: decides when the estimate is good enough.
    - `state`: the state of the earlier run that this one resumes, or None.
    - `exact_cost`: the number of units, in addition to `max_k`, that are reserved for the
        exact answer; None if none are.
    - `cost`: how many units of the user's budget one unit of this budget costs.
    - `spent`: how many of the user's units were spent before the first round, or None.
    - `planned`: how many rounds are made, whatever the rule says; None if that is not
        known beforehand.
    - `run`: the number under which a call finds the exception of its callback.
    """

    rule: Adaptive
    max_k: int = eqx.field(static=True)
    round_size: int = eqx.field(static=True)
    state: PyTree[Array] = None
    exact_cost: int | None = eqx.field(static=True, default=None)
    cost: int = eqx.field(static=True, default=1)
    spent: Int[Array, ""] | None = None
    planned: Int[Array, ""] | None = None
    run: Int[Array, ""] | None = None

    @classmethod
    def of(cls, rule: Adaptive, state: PyTree[Array] = None) -> "Budget":
        """The whole budget of a rule, not yet fitted to an operator."""
        most = _MAX_SAMPLES if rule.max_k is None else rule.max_k
        return cls(rule.with_arrays(), most, rule.round_size, state)

    @property
    def num_rounds(self) -> int:
        """The largest number of rounds."""
        return max(1, self.max_k // self.round_size)

    @property
    def limit(self) -> Int[Array, ""] | int:
        """The largest number of rounds in this call."""
        return self.num_rounds if self.planned is None else self.planned

    @property
    def is_watched(self) -> bool:
        """Whether history, callback or progress meter are told of every round."""
        rule = self.rule
        silent = isinstance(rule.progress, eqxi.NoProgressMeter)
        return rule.history or rule.callback is not None or not silent

    @property
    def min_streak(self) -> int:
        """The number of rounds in a row whose estimates must be good enough before the
        run ends: as many as make `_MIN_STREAK_MATVECS` matvecs. A planned run ends by
        its number of rounds alone."""
        if self.planned is not None:
            return self.num_rounds + 1
        return -(-_MIN_STREAK_MATVECS // self.round_size)

    def for_operator(
        self,
        n: int,
        min_budget: int = 0,
        *,
        default: int,
        exact_limit: int,
    ) -> "Budget":
        """The budget for an operator whose exact answer costs n units.

        If n units leave enough for one round and for `min_budget`, they are reserved for
        the exact answer. The estimate itself never spends more than n units, since from
        there on the exact answer is cheaper. Where the rule has no `max_k`, the estimate
        spends at most `default` units, and n are reserved up to the size `exact_limit`.
        """
        if self.rule.max_k is None:
            most = max(default, self.round_size, min_budget)
            budget = self.limited_to(min(most, n))
            return dataclasses.replace(budget, exact_cost=n if n <= exact_limit else None)
        spare = self.max_k - n
        if spare < max(self.round_size, min_budget):
            return self.limited_to(min(self.max_k, n))
        return dataclasses.replace(self.limited_to(min(spare, n)), exact_cost=n)

    def limited_to(self, max_k: int) -> "Budget":
        """The same budget with at most `max_k` units. A round is not larger than that."""
        size = min(self.round_size, max_k)
        return dataclasses.replace(self, max_k=max_k, round_size=size)

    @property
    def one_round(self) -> "Budget":
        """A budget of a single round of the same size."""
        return self.limited_to(self.round_size)

    def in_sweeps(self, p: int) -> "Budget":
        """The budget in rounds that are multiples of p units."""
        size = max(1, self.round_size // p) * p
        max_k = max(1, self.max_k // p) * p
        return dataclasses.replace(self, round_size=size, max_k=max_k)

    def halved(self) -> "Budget":
        """The budget for an operator whose matvec costs two of the user's units."""
        # `Adaptive` has no rounds of fewer than 2 units either.
        size = max(2, self.round_size // 2)
        half = dataclasses.replace(self, round_size=size, cost=2)
        return half.limited_to(self.max_k // 2)


def in_sweeps(k: int | Budget, p: int) -> int | Budget:
    """The budget in whole sweeps over p strata, of which it has at least one."""
    if p == 1:
        return k
    return k.in_sweeps(p) if isinstance(k, Budget) else k // p * p


def one_round(k: int) -> Budget:
    """A fixed budget as a single round. Every estimate meets its infinite tolerance."""
    return Budget.of(Adaptive(atol=math.inf, max_k=k, round_size=max(k, 2)))


def some_rounds(planned: Int[Array, ""], most: int, round_size: int) -> Budget:
    """A budget of a number of rounds, at most `most`, that is known at run time. Every
    estimate meets its infinite tolerance, from the first round of four on."""
    max_k = most * round_size
    rule = Adaptive(atol=math.inf, max_k=max_k, round_size=round_size, min_samples=4)
    return dataclasses.replace(Budget.of(rule), planned=planned)


def largest_budget(k: int | Budget) -> int:
    """The number of units that a run spends at most."""
    return k.max_k if isinstance(k, Budget) else k


def first_budget(k: int | Budget) -> int:
    """The number of units in the first round; all of them for a fixed budget."""
    return k.round_size if isinstance(k, Budget) else k
