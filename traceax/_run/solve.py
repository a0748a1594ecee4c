"""From a task to its solution: the exact answer or an estimate, with its error bar."""

import abc
import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree, Real

from .._core.checks import check_key, check_positive
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate, Solution
from .._operators.door import EnteredOperator, Facts
from .adaptive import Adaptive
from .budget import Budget, first_budget
from .call import call
from .callback import raising_for_callbacks
from .execution import AbstractExecution
from .resume import check_state, RunState
from .symmetry import hint_for


class AbstractTask(eqx.Module):
    """An estimator, what it is to estimate, and the settings of one call."""

    quantity: eqx.AbstractVar[AbstractQuantity]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the estimator's class."""

    @property
    @abc.abstractmethod
    def min_matvecs(self) -> int:
        """The smallest budget that it works with."""

    @property
    @abc.abstractmethod
    def fallback(self) -> str:
        """The name of an estimator that works with any budget."""

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        """How many units of the budget the exact answer costs. A budget of as many or
        more is spent on that, whatever the estimator."""
        return operator.size

    def exact_limit(self, operator: FlatOperator) -> int:
        """The largest size of such an operator for which the exact answer takes the place
        of one that ends as `RESULTS.too_few_steps`; 0 where no number of steps is
        chosen."""
        return 0

    @abc.abstractmethod
    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        """The exact answer, from at most n products."""

    @abc.abstractmethod
    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """The estimate, from a budget that is below `exact_cost` or adaptive."""


def solve(
    task: AbstractTask,
    operator: EnteredOperator,
    *,
    k: int | Adaptive,
    key: PRNGKeyArray | None,
    state: PyTree[Array],
    execution: AbstractExecution,
    throw: bool,
) -> Solution:
    """The solution of a task, by a compiled program. `state` is that of an earlier
    solution, or None."""
    budget = budget_of(task, operator.size, k=k, key=key, state=state)
    settings = {"name": task.name, "execution": execution, "throw": throw}
    settings["hint"] = ft.partial(hint_for, operator)
    with raising_for_callbacks(budget) as budget:
        return call(_solve, task, operator, budget, key, execution, **settings)


def budget_of(
    task: AbstractTask,
    size: int,
    *,
    k: int | Adaptive,
    key: PRNGKeyArray | None,
    state: PyTree[Array],
) -> int | Budget:
    """The budget for an operator of this size, after checks of key, budget and state."""
    check_key(key)
    if isinstance(k, Adaptive):
        budget, most = Budget.of(k, state), k.max_k
        if state is not None:
            check_state(state, task, key)
    elif state is not None:
        raise ValueError(
            "`state` is for an adaptive budget, `k=traceax.Adaptive(...)`. Found "
            f"`k={k!r}`. Leave `state` out."
        )
    else:
        budget = most = check_positive("k", k)
    if most < min(task.min_matvecs, size):
        raise ValueError(
            f"`{task.name}` needs at least k={task.min_matvecs}. Found k={most}. Raise "
            f"`k`, or use `traceax.{task.fallback}`, which needs 1."
        )
    return budget


def _solve(task, operator, k, key, execution) -> Solution:
    flat, facts = operator.open()
    return solution_of(task, flat, facts, k, key, execution)


def solution_of(
    task: AbstractTask,
    operator: FlatOperator,
    facts: Facts,
    k: int | Budget,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
) -> Solution:
    """The solution, inside of a compiled program. A budget of `exact_cost` or more is
    spent on the exact answer, whatever the estimator; an adaptive one, where that turns
    out to be cheaper; and any one, where a number of steps that was chosen turns out to
    be too small for an operator that is not large."""
    size, quantity, limit = operator.size, task.quantity, task.exact_limit(operator)

    def exactly():
        solution = _package(task.exact(operator, facts, execution), quantity)
        if limit == 0:
            return solution
        stats = solution.stats | {"exact": jnp.ones((), bool)}
        return dataclasses.replace(solution, stats=stats)

    exact_cost = task.exact_cost(operator, facts)
    if first_budget(k) >= exact_cost or size < task.min_matvecs:
        return exactly()
    if isinstance(k, Budget):
        estimate, k = _run_adaptive(task, operator, k, key, execution)
    else:
        estimate = task.run(operator, k, key, execution)
    solution, ended = _package(estimate, quantity), jnp.zeros((), bool)
    if limit > 0:
        stats = solution.stats | {"exact": ended}
        solution = dataclasses.replace(solution, stats=stats)
    may_end = size <= limit
    if may_end:
        ended |= solution.result == RESULTS.too_few_steps
    floor = jax.tree.map(jnp.zeros_like, solution.std_err)
    if isinstance(k, Budget):
        pair = estimate.value, jnp.hypot(_floor(estimate), estimate.unresolved)
        _, floor = quantity.present(*jax.lax.stop_gradient(pair))
        if k.exact_cost is not None:
            may_end = True
            unknown = first_failure(solution.result, _too_coarse(k.rule, solution, floor))
            ended |= solution.result == RESULTS.max_matvecs_reached
            ended |= unknown == RESULTS.precision_lost
    if may_end:
        # Of a batch, all take the same branch: that of one would be made for each.
        @jax.checkpoint
        def take_exact():
            exact = exactly()
            pairs = (_replaced(solution, exact), exact.std_err), (solution, floor)
            return jax.tree.map(lambda *x: jnp.where(ended, *x), *pairs)

        branches = take_exact, lambda: (solution, floor)
        solution, floor = jax.lax.cond(eqxi.unvmap_any(ended), *branches)
    if isinstance(k, Budget):
        result = first_failure(solution.result, _too_coarse(k.rule, solution, floor))
        solution = dataclasses.replace(solution, result=result)
    return solution


def _run_adaptive(
    task: AbstractTask,
    operator: FlatOperator,
    k: Budget,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
) -> tuple[Estimate, Budget]:
    """The estimate, with the state that a later call goes on from; and the budget, less
    what is kept back for the exact answer."""
    size, earlier = operator.size, k.state
    k = k.within(size, task.min_matvecs if earlier is None else earlier.max_k)
    if earlier is not None:
        if k.max_k < earlier.max_k:
            raise ValueError(
                "`max_k` must not be below that of the call that `state` is of. Found "
                f"{k.max_k} for {earlier.max_k}."
            )
        k = dataclasses.replace(k, state=earlier.loop)
    estimate = task.run(operator, k, key, execution)
    state = RunState.of(estimate.state, task, key, k.max_k)
    return dataclasses.replace(estimate, state=state), k


def _too_coarse(rule: Adaptive, solution: Solution, floor: PyTree[Array]) -> Any:
    """Whether rounding errors alone, of the size `floor`, are above the tolerance. Of
    values with several entries only that of the worst one is known."""
    value = jax.lax.stop_gradient(solution.value)
    if not (eqx.is_array(value) and value.ndim == 0):
        return failure(False, RESULTS.precision_lost)
    return failure(~rule.reachable(value, floor), RESULTS.precision_lost)


def _floor(estimate: Estimate) -> Real[Array, "*q"]:
    """The standard error that is due to rounding, but for what is unresolved; an infinite
    value has none."""
    size = jnp.maximum(jnp.abs(estimate.value), estimate.magnitude)
    return estimate.rounding * jnp.where(jnp.isinf(estimate.value), 0, size)


def _package(estimate: Estimate, quantity: AbstractQuantity) -> Solution:
    """The solution: with the rounding floor in the error bar, derivatives of the value
    alone, and the value in the form that users see."""
    value = estimate.value
    others = estimate.std_err, estimate.samples, estimate.extra
    std_err, samples, extra = jax.lax.stop_gradient(others)
    kinds = {"bounds": estimate.bounds, "proven_bounds": estimate.proven_bounds}
    if estimate.proven_bounds is None:
        kinds["proven_bounds"] = estimate.bounds
    kinds = jax.lax.stop_gradient({name: x for name, x in kinds.items() if x is not None})
    if estimate.rounding > 0:
        errors = _floor(estimate), estimate.unresolved
        floor, unresolved = jax.lax.stop_gradient(errors)
        std_err = jnp.hypot(std_err, jnp.hypot(floor, unresolved))
        kinds = {
            name: jnp.stack([ends[:, 0], jnp.hypot(ends[:, 1], floor)], axis=1)
            for name, ends in kinds.items()
        }
    value, std_err = quantity.present(value, std_err)
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(value)]).all()
    nonfinite = failure(~finite, RESULTS.nonfinite_product)
    result = first_failure(estimate.result, nonfinite)
    std_err = jax.lax.stop_gradient(std_err)
    stats = {"num_matvecs": estimate.num_matvecs, "std.err": std_err}
    if samples is None:
        stats["num_samples"] = estimate.num_samples
        if estimate.skewness is not None:
            skewness = jax.lax.stop_gradient(estimate.skewness)
            stats["skewness"] = quantity.arrange(skewness)
    else:
        stats["samples"] = samples
    for name, ends in kinds.items():
        lower, upper = (quantity.present(*end) for end in ends)
        stats[name] = jax.tree.map(_two_by_two, *lower, *upper)
    return Solution(value, std_err, result, stats | extra, estimate.state)


def _two_by_two(*entries: Array) -> Array:
    return jnp.stack(entries).reshape(2, 2, *entries[0].shape)


def _replaced(solution: Solution, exact: Solution) -> Solution:
    """`exact`, in the form of the adaptive solution that it replaces, and with the
    products of both. What that has for each sample, `exact` has for one."""
    products = exact.stats["num_matvecs"] + solution.stats["num_matvecs"]

    def repeated(one, all):
        return jnp.broadcast_to(one, jnp.shape(all)).astype(jnp.result_type(all))

    stats = {
        name: jax.tree.map(repeated, exact.stats.get(name, x), x)
        for name, x in solution.stats.items()
    }
    stats["num_matvecs"] = products
    bars = {name: x for name, x in stats.items() if name.endswith("_std_err")}
    stats |= jax.tree.map(jnp.zeros_like, bars)
    made = ("num_samples", "num_steps")
    stats |= {name: solution.stats[name] for name in made if name in stats}
    return dataclasses.replace(exact, stats=stats, state=solution.state)
