"""The task of `trace_of_solves`: means of the samples of `_functions/solves.py`.

With samples v_i and the errors e_i of their solves, the value is the mean of the v_i, and
its interval is longer at both ends by the mean of the e_i, which no further probe makes
smaller.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, PyTree, Real

from .._core.chirp import generic_vector
from .._core.flat import FlatOperator, freeze
from .._core.moments import FEW_SIGNS, Moments
from .._core.quantity import AbstractQuantity
from .._core.results import first_failure, RESULTS
from .._core.sampler import AbstractSampler, draw_for
from .._core.sign_moments import SignMoments
from .._core.solution import Estimate
from .._functions.inexact_solve import AbstractSolve, DenseSolve, IterativeSolve
from .._functions.solves import Operators, Sample, sample_words, suffixes, Word
from .._numerics.dense import inverse
from .._operators.door import EnteredOperator, Facts
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.fold import fold
from .._run.gradient import attach_derivative
from .._run.solve import AbstractTask
from .._run.stream import stream


class Words(AbstractQuantity):
    """A PyTree of traces, one for each word. They are not read from pairs of vectors."""

    treedef: Any = eqx.field(static=True)

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        raise NotImplementedError

    def arrange(self, entries: Array) -> PyTree[Array]:
        return jax.tree.unflatten(self.treedef, list(entries))


class _Moments(eqx.Module):
    """Moments of samples, and the mean errors of their solves."""

    samples: SignMoments
    errors: Moments

    @property
    def count(self) -> Real[Array, ""]:
        return self.samples.count

    @property
    def mean(self) -> Inexact[Array, " q"]:
        return self.samples.mean

    def std_err(self) -> Real[Array, " q"]:
        """For adaptive budgets: solves that are too inexact miss a tolerance."""
        return jnp.hypot(self.samples.std_err(), self.errors.mean)

    @classmethod
    def merge(cls, parts: "_Moments") -> "_Moments":
        return cls(SignMoments.merge(parts.samples), Moments.merge(parts.errors))


class TraceOfSolves(AbstractTask):
    """Traces of several words.

    - `others`: the operators of the words.
    - `words`: for each word the indices of its operators.
    """

    quantity: Words
    others: tuple[EnteredOperator, ...]
    solver: lx.AbstractLinearSolver
    sampler: AbstractSampler
    words: tuple[Word, ...] = eqx.field(static=True)

    @property
    def name(self) -> str:
        return "trace_of_solves"

    @property
    def title(self) -> str:
        return "Traces of solves"

    @property
    def min_matvecs(self) -> int:
        return 1

    @property
    def fallback(self) -> str:
        return self.name

    def _operators(
        self, operator: FlatOperator, solve: Callable[[FlatOperator], AbstractSolve]
    ) -> Operators:
        flats = (operator, *(other.open()[0] for other in self.others))
        if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in flats):
            flats = tuple(flat.complexified for flat in flats)
        flat, *others = flats
        return Operators(flat, tuple(others), solve(flat.frozen))

    @property
    def _num_solves(self) -> int:
        """For each probe."""
        return 2 * (1 + len(suffixes(self.words)))

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        size = operator.size

        def invert(flat):
            eye = jnp.eye(size, dtype=flat.dtype)
            return DenseSolve(inverse(execution.matmat(flat, eye)))

        operators = self._operators(operator, invert)

        def body(flat, index):
            every = eqx.tree_at(lambda x: x.flat, operators, flat)
            unit = jnp.zeros(size, flat.dtype).at[index].set(1)
            return _with_values_first(sample_words(every, self.words, unit))

        def reduce(outs, valid):
            total = lambda x: jnp.sum(jnp.where(valid[:, None], x, 0), axis=0)  # noqa: E731
            sample, report = outs[1], outs[1].report
            worst = jnp.max(jnp.where(valid, report.residual, 0))
            failed = _first(report.result, valid)
            return total(sample.errors), total(sample.sizes**2), failed, worst

        def merge(parts):
            errors, squares, results, worst = parts
            failed = _first(results, jnp.ones(len(worst), bool))
            return jnp.sum(errors, 0), jnp.sum(squares, 0), failed, jnp.max(worst)

        value, summary, _ = fold(
            body, reduce, merge, operators.flat, size, execution, width=len(self.words)
        )
        errors, squares, result, worst = summary
        return self._estimate(
            operator,
            value=value,
            std_err=jnp.zeros_like(errors),
            errors=errors,
            samples=value[None],
            num_matvecs=size + size * self._num_solves,
            magnitude=jnp.sqrt(squares),
            result=result,
            extra=self._stats(size, 0, worst, errors),
        )

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        scale_probe = generic_vector(operator.size, operator.dtype)
        operators = self._operators(
            operator, lambda flat: IterativeSolve.of(self.solver, flat, scale_probe)
        )
        count = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k

        def body(flat, index, operators):
            every = eqx.tree_at(lambda x: x.flat, operators, flat)
            probe = draw_for(flat, self.sampler, key, index[None])[:, 0]
            return _with_values_first(sample_words(every, self.words, probe))

        def reduce(outs, valid):
            samples, further = outs
            moments = SignMoments.of(
                samples=samples,
                size=further.sizes,
                marks=further.marks if count < FEW_SIGNS else None,
                valid=valid,
                skewed=True,
                rounding=operator.rounding,
                near=0.0,
            )
            return (_Moments(moments, Moments.of(further.errors, valid, skewed=False)),)

        def merge(summaries):
            (moments,) = summaries
            return (_Moments.merge(moments),)

        streamed = stream(
            fn=ft.partial(body, operators=operators),
            frozen_fn=ft.partial(body, operators=freeze(operators)),
            reduce=reduce,
            merge=merge,
            operator=operators.flat,
            k=k,
            execution=execution,
            width=4 + len(suffixes(self.words)),
            quantity=self.quantity,
        )
        (moments,) = streamed.summary
        report = streamed.others.report
        made = jnp.arange(len(report.steps)) < streamed.count
        steps = jnp.sum(jnp.where(made, report.steps, 0))
        worst = jnp.max(jnp.where(made, report.residual, 0))
        errors = moments.errors.mean
        products = streamed.count * self._num_solves
        return self._estimate(
            operator,
            value=attach_derivative(moments.mean, streamed.mean),
            std_err=moments.samples.std_err(),
            errors=errors,
            samples=streamed.samples,
            num_matvecs=1 + steps + products,
            magnitude=moments.samples.size,
            result=first_failure(_first(report.result, made), streamed.loop.result),
            extra=streamed.loop.extra | self._stats(streamed.count, steps, worst, errors),
            state=streamed.loop.state,
            skewness=moments.samples.skewness,
        )

    def _estimate(self, operator: FlatOperator, *, errors: Array, **fields) -> Estimate:
        value, std_err = jax.lax.stop_gradient((fields["value"].real, fields["std_err"]))
        ends = jnp.stack([value - errors, value + errors])
        bounds = jnp.stack([ends, jnp.broadcast_to(std_err, ends.shape)], axis=1)
        return Estimate(
            rounding=operator.rounding, unresolved=errors, bounds=bounds, **fields
        )

    def _stats(self, count: Any, steps: Any, worst: Array, errors: Array) -> dict:
        return {
            "num_solves": jnp.asarray(count * self._num_solves, jnp.int32),
            "solver_steps": jnp.asarray(steps, jnp.int32),
            "solve_residual": worst,
            "solve_error": self.quantity.arrange(errors),
        }


def _with_values_first(sample: Sample) -> tuple[Inexact[Array, " q"], Sample]:
    """As `stream` takes samples. No array is returned twice, for both are kept."""
    return sample.values, dataclasses.replace(sample, values=jnp.zeros(()))


def _first(results: Any, valid: Bool[Array, " m"]) -> Any:
    """The first failure of several results that are stacked."""
    failed = valid & ~(results == RESULTS.successful)
    return jax.tree.map(lambda x: x[jnp.argmax(failed)], results)
