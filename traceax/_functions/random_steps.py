"""Traces of functions from forms of a random number of steps, without quadrature error.

With kappa from the Ritz values of a first run, whose probe is its own,

    r = rho^(3/2),    rho = (sqrt(kappa) - 1) / (sqrt(kappa) + 1).

The choice is independent of the samples, so these stay unbiased. The operator's own
condition number kappa' is larger than kappa, and log(rho) is about -2 / sqrt(kappa). So
r > rho^4 holds, and the variance is finite, while kappa' < 7 kappa; four moments are
finite, as an estimate of the variance needs, while kappa' < 3 kappa (r > rho^(8/3)); and
the derivative has a finite variance while kappa' < 1.8 kappa (r > rho^2). N is about
`s0 + sqrt(kappa) / 3` in the mean. A smaller r saves at most the second part. A larger
one gains little, as the quadrature error after s0 steps is mostly small beside the
standard deviation of a probe.
"""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator, freeze
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import AbstractSampler, draw_for, require_key
from .._core.solution import Estimate
from .._krylov.base import AbstractKrylovMethod
from .._krylov.random_form import random_form
from .._quadrature.convergence import Convergence, SEEN_BY_ONE
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.random_steps import draw_steps, RandomSteps
from .._run.steps import AdaptiveSteps, advance_until, Steps
from .._run.stream import Streamed


# The power of rho above, and the smallest ratio, for operators near the identity.
_POWER, _MIN_RATIO = 1.5, 0.1

# The first run ends when the condition number of its Ritz values is at most so many times
# that of half of its steps. The margins above allow for more than what is left.
_GROWTH = 1.5

# The first probe's index: between those of the other probes and of preconditioners.
_FIRST_PROBE = 2**29

# The largest probability with which a probe may need more than `max_steps`. Calls that
# fail by chance are rare then, and fail all together where they would not be.
_MAX_TRUNCATED = 1e-3

# An eigenvalue that no run may have seen fails the call if it would move the value by
# more than this many error bars, as for steps that are chosen.
_BARS_OF_HIDDEN = 4


class RandomRuns(eqx.Module):
    """The runs of one call with random numbers of steps.

    - `num_steps`: the user's choice; its `ratio` may be None.
    - `ratio`: r, or 0 if it is not between 0 and 1.
    - `spent`: the number of steps of the first run; 0 if there was none.
    - `resolved`: whether that run found the condition number.
    """

    num_steps: RandomSteps
    krylov: AbstractKrylovMethod
    function: AbstractSpectralFunction
    lower_bound: Any
    key: PRNGKeyArray
    ratio: Real[Array, ""]
    spent: Int[Array, ""] | int
    resolved: Bool[Array, ""] | bool

    @classmethod
    def of(
        cls,
        num_steps: RandomSteps,
        krylov: AbstractKrylovMethod,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        lower_bound: Any,
        sampler: AbstractSampler,
        key: PRNGKeyArray | None,
        k: int | Budget,
        execution: AbstractExecution,
    ) -> "tuple[RandomRuns, int | Budget]":
        """The runs of a call, with the ratio that the user gave, that an earlier call of
        an adaptive run has found, or that a first run finds. Also returns k with the
        state that the loop resumes."""
        _check(krylov, function, num_steps)
        key, real = require_key(key), jnp.finfo(operator.dtype).dtype
        spent, resolved, ratio = 0, True, num_steps.ratio
        if isinstance(k, Budget) and k.state is not None:
            (ratio, resolved), loop = k.state
            k = dataclasses.replace(k, state=loop)
        elif ratio is None:
            probe = draw_for(operator, sampler, key, jnp.array([_FIRST_PROBE]))
            run = ft.partial(
                _first_run,
                krylov=krylov,
                most=num_steps.most,
                **freeze({"function": function, "lower_bound": lower_bound}),
            )
            found = execution.map(run, operator.frozen, probe.T, width=num_steps.most)
            rho, spent, resolved = jax.tree.map(lambda x: x[0], found)
            ratio = jnp.maximum(rho**_POWER, _MIN_RATIO)
        ratio = jax.lax.stop_gradient(jnp.asarray(ratio, real))
        ratio = jnp.where((ratio > 0) & (ratio < 1), ratio, 0)
        runs = cls(
            num_steps=num_steps,
            krylov=krylov,
            function=function,
            lower_bound=lower_bound,
            key=key,
            ratio=ratio,
            spent=spent,
            resolved=resolved,
        )
        return runs, k

    @property
    def steps(self) -> Steps:
        """The numbers of steps as far as all probes have them in common."""
        return Steps(self.num_steps.most, made=0, spent=self.spent, chosen=False)

    def _wanted(self, index: Int[Array, ""]) -> Int[Array, ""]:
        return draw_steps(self.key, index, self.num_steps.start, self.ratio)

    def form(
        self,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        index: Int[Array, ""],
        columns: int,
    ) -> QuadraticForm:
        """The form of the probe with this index."""
        most = self.num_steps.most
        form = random_form(
            self.krylov,
            operator,
            probe,
            function=self.function,
            start=self.num_steps.start,
            ratio=self.ratio,
            steps=jnp.minimum(self._wanted(index), most),
            most=most,
            lower_bound=self.lower_bound,
            columns=columns,
        )
        if self.num_steps.ratio is None:
            # The first run has seen that none is hidden.
            form = dataclasses.replace(form, hidden=None)
        return form

    def finish(
        self, estimate: Estimate, streamed: Streamed, operator: FlatOperator
    ) -> Estimate:
        """The estimate of `estimate_of_forms`, with what only the random numbers of steps
        tell: how many there were, and whether the variance is finite and no run was cut
        off."""
        indices = jnp.arange(len(streamed.others[2]))
        made, wanted = indices < streamed.count, jax.vmap(self._wanted)(indices)
        steps = jnp.where(made, jnp.minimum(wanted, self.num_steps.most), 0)
        total = jnp.sum(steps, dtype=jnp.int32)
        # The error of a Gauss rule is about the square of the relative residual.
        residuals = jnp.where(made, streamed.others[2], 0)
        unconverged = made & (residuals**2 > operator.eps)
        ratio = self.ratio
        is_infinite = ratio == 0
        if self.function.bracketed:
            rho = _rho(estimate.extra["ritz_values"], self.function)
            is_infinite |= (ratio <= rho**4) & jnp.any(unconverged)
        extra = {
            "num_steps": total / jnp.maximum(streamed.count, 1).astype(ratio.dtype),
            "ratio": ratio,
        }
        too_few = jnp.any(unconverged & (wanted > self.num_steps.most))
        out_of_reach = self._is_out_of_reach(estimate, streamed, operator.size)
        too_few |= out_of_reach & jnp.any(unconverged)
        return dataclasses.replace(
            estimate,
            num_matvecs=total,
            result=first_failure(
                estimate.result,
                failure(is_infinite, RESULTS.infinite_variance),
                failure(too_few, RESULTS.too_few_steps),
            ),
            extra=estimate.extra | extra,
            state=self._state(streamed.loop.state),
        )

    def _is_out_of_reach(
        self, estimate: Estimate, streamed: Streamed, n: int
    ) -> Bool[Array, ""]:
        """Whether `max_steps` is too small for the ratio that was chosen; or for a ratio
        that was given, an eigenvalue may be hidden from all runs."""
        if self.num_steps.ratio is None:
            further = self.num_steps.most - self.num_steps.start
            truncated = self.ratio**further > _MAX_TRUNCATED
            # After n steps the run has converged.
            truncated &= self.num_steps.most < n
            return truncated | ~jnp.asarray(self.resolved)
        convergence = streamed.summary[0].convergence
        largest = jnp.finfo(convergence.bracket.dtype).max / 4
        open_bracket = jnp.stack([-largest, largest])
        bar = _BARS_OF_HIDDEN * estimate.std_err
        convergence = dataclasses.replace(convergence, bracket=open_bracket)
        return convergence.hides(estimate.value, bar)

    def _state(self, loop: Any) -> Any:
        """The state of an adaptive run, whose later samples have the same ratio."""
        return None if loop is None else ((self.ratio, jnp.asarray(self.resolved)), loop)


def _check(
    krylov: AbstractKrylovMethod,
    function: AbstractSpectralFunction,
    num_steps: RandomSteps,
) -> None:
    """Raise a `ValueError` unless random numbers of steps work for this call."""
    if not krylov.reads_earlier_steps:
        raise ValueError(
            "`num_steps=traceax.RandomSteps(...)` needs `traceax.Lanczos` or "
            f"`traceax.GolubKahan`. Found `{type(krylov).__name__}`. If the operator is "
            "Hermitian, tag it so; if not, pass `traceax.AdaptiveSteps()`."
        )
    if num_steps.ratio is None and not function.bracketed:
        raise ValueError(
            "`ratio` of `traceax.RandomSteps` must be given for a function without "
            f"brackets, whose convergence the condition number does not tell. Found "
            f"`{type(function).__name__}`. Pass a number between 0 and 1: the error of "
            "the Gauss rule must fall faster than its root at each step."
        )


def _first_run(
    operator: FlatOperator,
    probe: Inexact[Array, " n"],
    *,
    krylov: AbstractKrylovMethod,
    function: AbstractSpectralFunction,
    lower_bound: Any,
    most: int,
) -> tuple[Real[Array, ""], Int[Array, ""], Bool[Array, ""]]:
    """rho from the Ritz values of a run that continues until their condition number
    hardly grows and no eigenvalue may be hidden below them; the number of its steps; and
    whether it got so far."""

    def read(state, steps):
        # By position: parameters of a user's method may have other names.
        return krylov.read(operator, state, steps, function, lower_bound, 1)

    def excess_after(state, steps):
        form, half = read(state, steps), read(state, -(-steps // 2))
        root, earlier = (_root(x.extremes, function) for x in (form, half))
        grows = (root > _GROWTH**0.5 * earlier) & (form.residual > 0)
        hides = Convergence.of(form).hidden[0] > SEEN_BY_ONE
        return jnp.where(grows | hides, jnp.inf, 0).astype(form.bracket.dtype)

    state, steps, resolved = advance_until(
        ft.partial(krylov.advance, operator),
        krylov.start(operator, probe, most),
        adaptive=AdaptiveSteps(most),
        first=2,
        excess_after=excess_after,
        all_of=eqxi.unvmap_all,
    )
    return _rho(read(state, steps).extremes, function), steps, resolved


def _root(
    extremes: Real[Array, "*r 2"], function: AbstractSpectralFunction
) -> Real[Array, ""]:
    """sqrt(kappa), of the worst of several operators; infinite where the smallest Ritz
    value is not positive. For singular values kappa is that of A* A."""
    smallest, largest = extremes[..., 0], extremes[..., 1]
    positive = smallest > 0
    condition = jnp.where(positive, largest / jnp.where(positive, smallest, 1), jnp.inf)
    condition = jnp.max(condition)
    return condition if function.of_singular_values else jnp.sqrt(condition)


def _rho(
    extremes: Real[Array, "*r 2"], function: AbstractSpectralFunction
) -> Real[Array, ""]:
    root = _root(extremes, function)
    finite = jnp.where(jnp.isfinite(root), root, 1)
    return jnp.where(jnp.isfinite(root), (finite - 1) / (finite + 1), 1)
