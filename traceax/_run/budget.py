"""The budget of one call, as it is divided into rounds."""

import dataclasses
import math

import equinox as eqx
from jaxtyping import Array, Int, PyTree

from .adaptive import Adaptive


class Budget(eqx.Module):
    """What the calls of estimators are given for an adaptive budget: its rule, and what
    belongs to one call. At most `max_k` units, in rounds of `round_size`.

    - `rule`: decides when the estimate is good enough.
    - `state`: what an earlier run left, from which this one goes on.
    - `exact_cost`: the cost of the exact answer, which is kept back beside `max_k`, if it
        is.
    - `cost`: how many units of the user's budget one unit of this budget costs.
    - `spent`: how many of the user's units were spent before the first round, if any.
    - `run`: the number by which a call finds what its callback raised.
    """

    rule: Adaptive
    max_k: int = eqx.field(static=True)
    round_size: int = eqx.field(static=True)
    state: PyTree[Array] = None
    exact_cost: int | None = eqx.field(static=True, default=None)
    cost: int = eqx.field(static=True, default=1)
    spent: Int[Array, ""] | None = None
    run: Int[Array, ""] | None = None

    @classmethod
    def of(cls, rule: Adaptive, state: PyTree[Array] = None) -> "Budget":
        return cls(rule, rule.max_k, rule.round_size, state)

    @property
    def num_rounds(self) -> int:
        """How many rounds there are at most."""
        return max(1, self.max_k // self.round_size)

    @property
    def least_streak(self) -> int:
        """After how many rounds in a row the estimate must be good enough, to end a run:
        as many as make 8 products. Where samples are added a few at a time, one of many
        tests is easily passed by luck."""
        return -(-8 // self.round_size)

    def within(self, n: int, least: int = 0) -> "Budget":
        """The same for an operator of size n, where n units of the budget are enough for
        the exact answer. A budget for that and for a round besides, or the `least` one if
        that is more, keeps n units back, and spends no more than n before it takes
        them."""
        spare = self.max_k - n
        if spare < max(self.round_size, least):
            return self.limited_to(min(self.max_k, n))
        return dataclasses.replace(self.limited_to(min(spare, n)), exact_cost=n)

    def limited_to(self, max_k: int) -> "Budget":
        """The same with at most so many units. A round is not larger than the budget."""
        size = min(self.round_size, max_k)
        return dataclasses.replace(self, max_k=max_k, round_size=size)

    def halved(self) -> "Budget":
        """The same for an operator of which a product costs two."""
        size = max(2, self.round_size // 2)
        half = dataclasses.replace(self, round_size=size, cost=2)
        return half.limited_to(self.max_k // 2)


def one_round(k: int) -> Budget:
    """A fixed budget, as one round."""
    return Budget.of(Adaptive(atol=math.inf, max_k=k, round_size=max(k, 2)))


def largest_budget(k: int | Budget) -> int:
    return k.max_k if isinstance(k, Budget) else k


def first_budget(k: int | Budget) -> int:
    """That of the first round."""
    return k.round_size if isinstance(k, Budget) else k
