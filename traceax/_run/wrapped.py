"""A task that solves another one for an operator made from the user's."""

import equinox as eqx

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._operators.door import Facts
from .budget import Budget
from .solve import AbstractTask


class AbstractWrappedTask(AbstractTask):
    """A task that answers as another `task` does, by another way: with a subspace apart,
    or with a control."""

    task: eqx.AbstractVar[AbstractTask]

    @property
    def quantity(self) -> AbstractQuantity:  # pyright: ignore
        return self.task.quantity

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def title(self) -> str:
        return self.task.title

    @property
    def min_matvecs(self) -> int:
        return self.task.min_matvecs

    @property
    def fallback(self) -> str:
        return self.task.fallback

    @property
    def chooses_steps(self) -> bool:
        return self.task.chooses_steps

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        return self.task.exact_cost(operator, facts)

    def exact_limit(self, operator: FlatOperator) -> int:
        return self.task.exact_limit(operator)

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return self.task.default_max_k(operator, k)
