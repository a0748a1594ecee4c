"""The one path from a public call to its answer."""

import abc
import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import wadler_lindig as wl
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Real, Shaped

from .._core.checks import check_key, check_positive
from .._core.flat import FlatFunction
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate, Solution
from .adaptive import Adaptive, first_budget, largest_budget
from .call import call
from .callback import raising_for_callbacks
from .execution import AbstractExecution
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

    def exact_limit(self, operator: lx.AbstractLinearOperator) -> int:
        """The largest size of such an operator for which the exact answer takes the place
        of one that ends as `RESULTS.too_few_steps`; 0 where no number of steps is
        chosen."""
        return 0

    @abc.abstractmethod
    def exact(
        self, operator: lx.AbstractLinearOperator, execution: AbstractExecution
    ) -> Estimate:
        """The exact answer, from at most n products."""

    @abc.abstractmethod
    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """The estimate, from a budget that is below n or adaptive."""


def solve(
    estimator: AbstractTask,
    operator: lx.AbstractLinearOperator,
    *,
    k: int | Adaptive,
    key: PRNGKeyArray | None,
    execution: AbstractExecution,
    throw: bool,
) -> Solution:
    """The call of an estimator. A budget of n or more is spent on the exact answer,
    whatever the estimator; an adaptive one, where that turns out to be cheaper; and any
    one, where a number of steps that was chosen turns out to be too small for an operator
    that is not large. The operator has been checked."""
    check_key(key)
    if not isinstance(k, Adaptive):
        k = check_positive("k", k)
    elif k.state is not None:
        _check_state(k.state, estimator, key)
    budget = largest_budget(k)
    if budget < min(estimator.min_matvecs, operator.in_size()):
        raise ValueError(
            f"`{estimator.name}` needs at least k={estimator.min_matvecs}. Found "
            f"k={budget}. Raise `k`, or use `traceax.{estimator.fallback}`, which needs "
            "1."
        )
    settings = {"name": estimator.name, "execution": execution, "throw": throw}
    settings["hint"] = ft.partial(hint_for, operator)
    with raising_for_callbacks(k) as k:
        return call(_solve, estimator, operator, k, key, execution, **settings)


class RunState(eqx.Module):
    """What a later call goes on from, and what it must have in common with this one: the
    data of the key, and the estimator with its settings, as text and by `_identities` of
    their arrays. `max_k` is the budget that buffers have room for."""

    loop: PyTree[Array]
    key: Array | None
    arrays: dict[str, Array]
    settings: str = eqx.field(static=True)
    max_k: int = eqx.field(static=True)


def _settings(estimator: AbstractTask) -> str:
    """Shapes and dtypes in the place of arrays, which are traced inside a program."""
    shapes = eqx.filter_eval_shape(lambda x: x, estimator)
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    shapes = jax.tree.map(lambda x: plain(x) if is_shape(x) else x, shapes)
    return wl.pformat(shapes, hide_defaults=False, short_arrays=True)


def _identities(estimator: AbstractTask) -> dict[str, Array]:
    """What tells the arrays of the settings from others, by their names: of a scalar
    itself. Arrays of operators are left out, as they are in all calls."""
    is_product = lambda x: isinstance(x, FlatFunction)  # noqa: E731
    leaves, _ = jax.tree.flatten_with_path(estimator, is_leaf=is_product)
    arrays = {jax.tree_util.keystr(path): x for path, x in leaves if eqx.is_array(x)}
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    data = {name: jr.key_data(x) if is_key(x) else x for name, x in arrays.items()}
    return {name: x if x.ndim == 0 else _hash(x) for name, x in data.items()}


@jax.jit
def _hash(x: Shaped[Array, "..."]) -> Int[Array, ""]:
    """The words, each mixed with its index by the finaliser of MurmurHash3, added modulo
    2^32: a sum that is the same in any order, and so on any mesh."""
    if jnp.iscomplexobj(x):
        return _hash(x.real) + jnp.uint32(3) * _hash(x.imag)
    if x.dtype.itemsize == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    elif jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    index = jnp.uint32(1)
    for axis, size in enumerate(x.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index * jnp.uint32(size) + place
    mixed = x.astype(jnp.uint32) + index * jnp.uint32(0x9E3779B1)
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(16)), dtype=jnp.uint32)


def _differ(ours: Array, theirs: Array) -> bool:
    """Whether they are known to. Those that are traced cannot be compared."""
    if isinstance(ours, Tracer) or isinstance(theirs, Tracer):
        return False
    return np.asarray(ours).tobytes() != np.asarray(theirs).tobytes()


def _check_state(state: Any, estimator: AbstractTask, key: PRNGKeyArray | None) -> None:
    """Raise if the state is of another call."""
    if not isinstance(state, RunState):
        raise TypeError(
            "`state` must be the `state` of a solution with an adaptive budget. Found an "
            f"object of type {type(state).__name__}."
        )
    settings = _settings(estimator)
    if state.settings != settings:
        raise ValueError(
            "`state` must be of a call with the same estimator and settings. Found one "
            f"of\n{state.settings}\nfor\n{settings}"
        )
    # NumPy's are on the way into a program rounded to what JAX has.
    arrays = _identities(jax.device_put(eqx.filter(estimator, eqx.is_array)))
    for name, theirs in state.arrays.items():
        if _differ(arrays[name], theirs):
            raise ValueError(
                "`state` must be of a call with the same estimator and settings. Found "
                f"other numbers in `{name.lstrip('.')}`."
            )
    if key is None or state.key is None:
        return
    ours, theirs = jr.key_data(key), state.key
    if _differ(ours, theirs):
        raise ValueError(
            "`state` must be of a call with the same `key`, from which all probes are "
            f"drawn. Found one with the data {ours}, and in the state {theirs}."
        )


def _solve(estimator, operator, k, key, execution) -> Solution:
    size, quantity = operator.in_size(), estimator.quantity
    limit = estimator.exact_limit(operator)

    def exactly():
        solution = _package(estimator.exact(operator, execution), quantity)
        if limit == 0:
            return solution
        stats = solution.stats | {"exact": jnp.ones((), bool)}
        return dataclasses.replace(solution, stats=stats)

    if first_budget(k) >= size or size < estimator.min_matvecs:
        return exactly()
    if isinstance(k, Adaptive):
        estimate, k = _run_adaptive(estimator, operator, k, key, execution)
    else:
        estimate = estimator.run(operator, k, key, execution)
    solution, ended = _package(estimate, quantity), jnp.zeros((), bool)
    if limit > 0:
        stats = solution.stats | {"exact": ended}
        solution = dataclasses.replace(solution, stats=stats)
    may_end = size <= limit
    if may_end:
        ended |= solution.result == RESULTS.too_few_steps
    floor = jax.tree.map(jnp.zeros_like, solution.std_err)
    if isinstance(k, Adaptive):
        pair = estimate.value, jnp.hypot(_floor(estimate), estimate.unresolved)
        _, floor = quantity.present(*jax.lax.stop_gradient(pair))
        if k.exact_cost is not None:
            may_end = True
            unknown = first_failure(solution.result, _too_coarse(k, solution, floor))
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
    if isinstance(k, Adaptive):
        result = first_failure(solution.result, _too_coarse(k, solution, floor))
        solution = dataclasses.replace(solution, result=result)
    return solution


def _run_adaptive(estimator, operator, k, key, execution) -> tuple[Estimate, Adaptive]:
    """The estimate, with the state that a later call goes on from; and the budget, less
    what is kept back for the exact answer."""
    size, earlier = operator.in_size(), k.state
    k = k.within(size, estimator.min_matvecs if earlier is None else earlier.max_k)
    if earlier is not None:
        if k.max_k < earlier.max_k:
            raise ValueError(
                "`max_k` must not be below that of the call that `state` is of. Found "
                f"{k.max_k} for {earlier.max_k}."
            )
        k = dataclasses.replace(k, state=earlier.loop)
    estimate = estimator.run(operator, k, key, execution)
    data = None if key is None else jr.key_data(key)
    arrays, settings = _identities(estimator), _settings(estimator)
    state = RunState(estimate.state, data, arrays, settings, k.max_k)
    return dataclasses.replace(estimate, state=state), k


def _too_coarse(k: Adaptive, solution: Solution, floor: PyTree[Array]) -> Any:
    """Whether rounding errors alone, of the size `floor`, are above the tolerance. Of
    values with several entries only that of the worst one is known."""
    value = jax.lax.stop_gradient(solution.value)
    if not (eqx.is_array(value) and value.ndim == 0):
        return failure(False, RESULTS.precision_lost)
    return failure(~k.reachable(value, floor), RESULTS.precision_lost)


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
