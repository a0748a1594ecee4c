"""From a task to its solution: the exact answer or an estimate, with its error bar.

The error bar of a solution adds three independent errors of the estimate t,

    std_err^2 = s^2 + floor^2 + unresolved^2,    floor = rounding max(|t|, magnitude),

with s the standard error of sampling (`estimate.std_err`), `rounding` the relative
rounding error of matvecs and of sums of n terms, and `unresolved` the part that rounding
errors near the singularity of a function may contribute. No sample makes the last two
smaller, so an adaptive budget whose tolerance is below them ends as
`RESULTS.precision_lost`.
"""

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
from .budget import Budget, default_max_k, first_budget
from .call import call
from .callback import raising_for_callbacks
from .execution import AbstractExecution
from .resume import check_state, RunState
from .symmetry import hint_for


class AbstractTask(eqx.Module):
    """An estimator, the quantity that it estimates, and the settings of one call."""

    quantity: eqx.AbstractVar[AbstractQuantity]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the estimator's class."""

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """What is estimated, in words."""

    @property
    @abc.abstractmethod
    def min_matvecs(self) -> int:
        """The smallest budget with which the estimator works."""

    @property
    @abc.abstractmethod
    def fallback(self) -> str:
        """The name of an estimator that works with any budget."""

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        """The cost of the exact answer, in units of the budget. A budget of so many units
        or more is spent on the exact answer, whatever the estimator."""
        return operator.size

    @property
    def chooses_steps(self) -> bool:
        """Whether the number of Krylov steps is chosen automatically."""
        return False

    def exact_limit(self, operator: FlatOperator) -> int:
        """The largest size of an operator for which the exact answer replaces, unasked,
        an estimate that ends as `RESULTS.too_few_steps` or misses its tolerance."""
        return default_max_k()

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        """The largest budget of an estimate where `Adaptive.max_k` is left out."""
        return default_max_k()

    @abc.abstractmethod
    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        """The exact answer, from at most n matvecs."""

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
) -> Solution[Any]:
    """The solution of a task, by a compiled program. `state` is the state of an earlier
    solution, or None."""
    budget = budget_of(task, operator.size, k=k, key=key, state=state)
    with raising_for_callbacks(budget) as budget:
        return call(
            solution_of,
            task,
            operator,
            budget,
            key,
            execution,
            name=task.name,
            execution=execution,
            throw=throw,
            hint=ft.partial(hint_for, operator),
        )


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
        budget = Budget.of(k, state)
        max_k = budget.max_k
        if state is not None:
            check_state(state, task, key)
    elif state is not None:
        raise ValueError(
            "`state` is for an adaptive budget, `k=traceax.Adaptive(...)`. Found "
            f"`k={k!r}`. Leave `state` out."
        )
    else:
        budget = max_k = check_positive("k", k)
    # For a smaller operator the budget is enough for the exact answer.
    if max_k < min(task.min_matvecs, size):
        raise ValueError(
            f"`{task.name}` needs at least k={task.min_matvecs}. Found k={max_k}. Raise "
            f"`k`, or use `traceax.{task.fallback}`, which needs 1."
        )
    return budget


def solution_of(
    task: AbstractTask,
    opened: tuple[FlatOperator, Facts],
    k: int | Budget,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
) -> Solution[Any]:
    """The solution of a task, as part of a compiled program.

    A budget of `exact_cost` or more is spent on the exact answer, whatever the estimator.
    The exact answer also replaces an estimate that failed: an adaptive one, if n units
    were reserved for it, and any estimate of a small operator for which the chosen number
    of steps was too small."""
    operator, facts = opened
    size, quantity = operator.size, task.quantity

    def solve_exactly():
        solution = _package(task.exact(operator, facts, execution), task)
        stats = solution.stats | {"exact": jnp.ones((), bool)}
        return dataclasses.replace(solution, stats=stats)

    exact_cost = task.exact_cost(operator, facts)
    if first_budget(k) >= exact_cost or size < task.min_matvecs:
        solution = solve_exactly()
        if isinstance(k, Budget) and operator.error > 0:
            lost = _precision_failure(k.rule, solution, solution.std_err)
            result = first_failure(solution.result, lost)
            solution = dataclasses.replace(solution, result=result)
        return solution
    if isinstance(k, Budget):
        estimate, k = _run_adaptive(
            task, operator, k, key=key, execution=execution, exact_cost=exact_cost
        )
    else:
        estimate = task.run(operator, k, key, execution)
    solution = _package(estimate, task)
    # `failed` is known at run time only. `may_fail` is known while tracing: without it
    # the exact answer is not compiled at all.
    may_fail = task.chooses_steps and size <= task.exact_limit(operator)
    failed = jnp.zeros((), bool)
    # `ExactTraceEstimator` says itself that it is exact.
    stats = {"exact": failed} | solution.stats
    solution = dataclasses.replace(solution, stats=stats)
    if may_fail:
        failed |= solution.result == RESULTS.too_few_steps
    floor = jax.tree.map(jnp.zeros_like, solution.std_err)
    if isinstance(k, Budget):
        value = jax.lax.stop_gradient(estimate.value)
        rounding = jnp.hypot(_rounding_floor(estimate), estimate.unresolved)
        _, floor = quantity.present(value, jax.lax.stop_gradient(rounding))
        if k.exact_cost is not None:
            may_fail = True
            result = first_failure(
                solution.result, _precision_failure(k.rule, solution, floor)
            )
            failed |= solution.result == RESULTS.max_matvecs_reached
            failed |= result == RESULTS.precision_lost
    if may_fail:
        # Under `vmap` a condition that differs within the batch would compute both
        # branches for every member. So the batch takes the exact branch as soon as one
        # member fails, and the others keep their estimates. Without the checkpoint
        # reverse mode would store the intermediate results of n matvecs in either branch.
        @jax.checkpoint
        def replace_by_exact():
            exact = solve_exactly()
            replacement = _match_structure(exact, solution), exact.std_err
            return jax.tree.map(
                lambda new, old: jnp.where(failed, new, old),
                replacement,
                (solution, floor),
            )

        solution, floor = jax.lax.cond(
            eqxi.unvmap_any(failed), replace_by_exact, lambda: (solution, floor)
        )
    if isinstance(k, Budget):
        # Again, because the exact answer has rounding errors of its own.
        precision = _precision_failure(k.rule, solution, floor)
        result = first_failure(solution.result, precision)
        solution = dataclasses.replace(solution, result=result)
    return solution


def _run_adaptive(
    task: AbstractTask,
    operator: FlatOperator,
    k: Budget,
    *,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
    exact_cost: int,
) -> tuple[Estimate, Budget]:
    """The estimate, with the state from which a later call resumes, and the budget
    without the units that are reserved for the exact answer."""
    earlier = k.state
    # Buffers only grow, so a call that resumes reserves n units only if the remaining
    # budget is no smaller than the earlier one.
    min_budget = task.min_matvecs if earlier is None else earlier.max_k
    k = k.for_operator(
        exact_cost,
        min_budget,
        default=task.default_max_k(operator, k),
        exact_limit=task.exact_limit(operator),
    )
    if earlier is not None:
        if k.max_k < earlier.max_k:
            raise ValueError(
                "`max_k` must not be below that of the call that made `state`. Found "
                f"{k.max_k} for {earlier.max_k}."
            )
        k = dataclasses.replace(k, state=earlier.loop)
    estimate = task.run(operator, k, key, execution)
    state = RunState.of(estimate.state, task, key, k.max_k)
    return dataclasses.replace(estimate, state=state), k


def _precision_failure(rule: Adaptive, solution: Solution, floor: PyTree[Array]) -> Any:
    """`RESULTS.precision_lost` if rounding errors alone, of size `floor`, exceed the
    tolerance. It is not reported for a value with several entries, since the rounding
    error of the worst entry says little about the norm of all errors."""
    value = jax.lax.stop_gradient(solution.value)
    if not (eqx.is_array(value) and value.ndim == 0):
        return failure(False, RESULTS.precision_lost)
    return failure(~rule.reachable(value, floor), RESULTS.precision_lost)


def _rounding_floor(estimate: Estimate) -> Real[Array, "*q"]:
    """The part of the standard error that is due to rounding, without `unresolved`. It is
    0 for an infinite value, which does not tell the size of rounding errors."""
    size = jnp.maximum(jnp.abs(estimate.value), estimate.magnitude)
    return estimate.rounding * jnp.where(jnp.isinf(estimate.value), 0, size)


def _package(estimate: Estimate, task: AbstractTask) -> Solution[Any]:
    """The solution that an estimate is: the rounding floor is added to its error bar, the
    value takes the form that users see, and only the value keeps its derivatives."""
    value, quantity = estimate.value, task.quantity
    # Only the value has a defined derivative. Those of error bars would differentiate the
    # algorithm itself.
    std_err = jax.lax.stop_gradient(estimate.std_err)
    samples = jax.lax.stop_gradient(estimate.samples)
    extra = jax.lax.stop_gradient(estimate.extra)
    bounds = {"bounds": estimate.bounds, "proven_bounds": estimate.proven_bounds}
    if estimate.proven_bounds is None:
        bounds["proven_bounds"] = estimate.bounds
    bounds = {name: x for name, x in bounds.items() if x is not None}
    bounds = jax.lax.stop_gradient(bounds)
    rounding = jnp.zeros_like(std_err)
    if estimate.rounding > 0:
        floor = jax.lax.stop_gradient(_rounding_floor(estimate))
        unresolved = jax.lax.stop_gradient(estimate.unresolved)
        rounding = jnp.hypot(floor, unresolved)
        std_err = jnp.hypot(std_err, rounding)
        # The ends of the bounds contain `unresolved` already.
        bounds = {
            name: jnp.stack([ends[:, 0], jnp.hypot(ends[:, 1], floor)], axis=1)
            for name, ends in bounds.items()
        }
    value, std_err = quantity.present(value, std_err)
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(value)]).all()
    nonfinite = failure(~finite, RESULTS.nonfinite_product)
    result = first_failure(estimate.result, nonfinite)  # the first explains more
    std_err = jax.lax.stop_gradient(std_err)  # the root of a norm depends on the value
    joint = samples if samples is not None and samples.ndim == 2 else None
    stats = {
        "num_matvecs": estimate.num_matvecs,
        "num_samples": jnp.asarray(estimate.count).astype(jnp.int32),
        "num_steps": jnp.zeros((), jnp.int32),
        "std.err": std_err,
    }
    if joint is not None:
        stats["joint_samples"] = joint
        stats["rounding_std_err"] = quantity.arrange(rounding)
    if estimate.correlation is not None:
        stats["correlation"] = jax.lax.stop_gradient(estimate.correlation)
    if samples is None or joint is not None:
        skewness = estimate.skewness
        if skewness is None:
            skewness = jnp.zeros_like(estimate.value.real)
        stats["skewness"] = quantity.arrange(jax.lax.stop_gradient(skewness))
    else:
        stats["samples"] = samples
    for name, ends in bounds.items():
        stats[name] = _present_bounds(ends, quantity)
    return Solution(
        value=value,
        std_err=std_err,
        result=result,
        stats=stats | extra,
        state=estimate.state,
        quantity=task.title,
        method=estimate.method or task.name,
    )


def _present_bounds(
    bounds: Real[Array, "2 2 *q"], quantity: AbstractQuantity
) -> PyTree[Array]:
    """The two bounds and their standard errors in the form that users see; each leaf has
    two further axes in front."""
    (lower, lower_err), (upper, upper_err) = bounds

    def stack(*entries):
        return jnp.stack(entries).reshape(2, 2, *entries[0].shape)

    lower, lower_err = quantity.present(lower, lower_err)
    upper, upper_err = quantity.present(upper, upper_err)
    return jax.tree.map(stack, lower, lower_err, upper, upper_err)


def _match_structure(exact: Solution, solution: Solution) -> Solution[Any]:
    """The exact solution with the structure, shapes and dtypes of the solution that it
    replaces, as `lax.cond` needs them. Where that has an entry for each sample, the
    single entry of the exact solution is repeated. The matvecs of both are counted."""
    num_matvecs = exact.stats["num_matvecs"] + solution.stats["num_matvecs"]

    def repeat(entry, entries):
        repeated = jnp.broadcast_to(entry, jnp.shape(entries))
        return repeated.astype(jnp.result_type(entries))

    # Entries that the exact solution lacks, such as the history, are kept.
    stats = {
        name: jax.tree.map(repeat, exact.stats.get(name, x), x)
        for name, x in solution.stats.items()
    }
    stats["num_matvecs"] = num_matvecs
    # Further error bars belong to the estimate; the exact answer has none.
    error_bars = {name: x for name, x in stats.items() if name.endswith("_std_err")}
    stats |= jax.tree.map(jnp.zeros_like, error_bars)
    # These count the work of the estimate.
    counts = {"num_samples", "num_steps", "num_control_matvecs"} & stats.keys()
    stats |= {name: solution.stats[name] for name in sorted(counts)}
    return dataclasses.replace(
        exact, stats=stats, state=solution.state, method=solution.method
    )
