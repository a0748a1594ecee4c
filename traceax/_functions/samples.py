"""Means of independent quadratic forms, and their error bars.

    tr f(A) ~ 1/k sum_i q_i,    l_i <= q_i <= h_i

for forms q_i of a quadrature rule with the brackets (l_i, h_i). If all brackets hold, the
mean of the l_i minus a quantile times its own standard error is below `tr f(A)` with the
requested probability. The mean of the h_i is an upper bound in the same way. So
`FormMoments` has moments of the q_i, the l_i and the h_i. Where brackets are much wider
than the error, an estimate takes their place: see `Convergence`, and
docs/devdocs/quadrature.md, "How much is left".
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.flat import FlatOperator
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import AbstractSampler
from .._core.solution import Estimate
from .._core.strata import merge_moments, moments_of, Strata, StratifiedMoments
from .._quadrature.convergence import Convergence
from .._quadrature.domain import check_domain
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm, spectral_range
from .._quadrature.rounding import check_precision
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach, attach_derivative
from .._run.gradient_steps import GradientTarget
from .._run.steps import Steps
from .._run.stream import stream, Streamed
from .gradients import AbstractFunctionGradient


# The errors of a form are 10 or 11 numbers: the two ends of its bracket; eight numbers
# that only need a mean (five of `Convergence`, then `rounding`, `magnitude` and
# `unresolved`); and the `spread` if there is one. `_SPREAD` is the index of the spread
# once the eight are left out.
_MEANS, _SPREAD = slice(2, 10), 2
# An eigenvalue that no run may have seen counts as too few steps if it would move the
# value by more than this many error bars. A smaller number makes calls fail whose error
# bars cover the true value; a larger one misses more of the others.
_BARS_OF_HIDDEN = 4


class FormMoments(eqx.Module):
    """A summary of quadratic forms and their errors, of one device or several.

    - `forms`: moments of the forms.
    - `errors`: moments of the ends of the brackets, and of the spreads if there are any.
    - `means`: means of the other errors, see `_MEANS`.
    - `factor`: a further factor of the standard errors; None for 1.
    """

    forms: Moments | StratifiedMoments
    errors: Moments | StratifiedMoments
    means: Real[Array, "*parts 8"]
    factor: Real[Array, "*parts"] | None = None

    @classmethod
    def of(
        cls,
        samples: Inexact[Array, " m"],
        errors: Real[Array, "m e"],
        valid: Bool[Array, " m"],
        strata: Strata | None = None,
    ) -> "FormMoments":
        """The summary of those forms that are `valid`, with `errors` as in `_MEANS`."""
        forms = moments_of(samples, valid, strata)
        ends = jnp.concatenate([errors[:, :2], errors[:, _MEANS.stop :]], axis=1)
        share = valid / jnp.maximum(forms.total, 1)
        means = jnp.where(valid[:, None], errors[:, _MEANS], 0)
        means = jnp.sum(share[:, None].astype(means.dtype) * means, axis=0)
        return cls(forms, moments_of(ends, valid, strata), means)

    @classmethod
    def merge(cls, parts: "FormMoments") -> "FormMoments":
        """One summary from several that are stacked."""
        forms = merge_moments(parts.forms)
        share = parts.total / jnp.maximum(forms.total, 1)
        means = jnp.sum(share[:, None].astype(parts.means.dtype) * parts.means, axis=0)
        return cls(forms, merge_moments(parts.errors), means)

    @property
    def count(self) -> Real[Array, "*parts"]:
        return self.forms.count

    @property
    def total(self) -> Real[Array, "*parts"]:
        """The number of forms."""
        return self.forms.total

    @property
    def mean(self) -> Inexact[Array, ""]:
        return self.forms.mean

    def std_err(self) -> Real[Array, ""]:
        """The standard error of the mean of the forms."""
        std_err = jnp.maximum(self.forms.std_err(), self._std_err_of_spreads)
        return std_err if self.factor is None else self.factor * std_err

    @property
    def _std_err_of_spreads(self) -> Real[Array, ""] | float:
        """The standard error that follows from the root mean square of the spreads, 0 if
        there are none. Few samples may agree by chance; each spread is an estimate of its
        own."""
        errors, count = self.errors, jnp.maximum(self.count, 1)
        # Samples from strata have no spreads.
        if isinstance(errors, StratifiedMoments) or errors.center.shape[-1] <= _SPREAD:
            return 0.0
        deviation = errors.unit[_SPREAD] * jnp.sqrt(errors.squares[0, _SPREAD] / count)
        spread = jnp.hypot(errors.center[0, _SPREAD], deviation)
        return spread / jnp.sqrt(count)

    @property
    def convergence(self) -> Convergence:
        bracket = self.errors.mean[:2]
        return Convergence.from_flat(jnp.concatenate([bracket, self.means[:5]]))

    @property
    def rounding(self) -> Real[Array, "3"]:
        """Means of the size of rounding, of the magnitude, and of `unresolved`."""
        return self.means[5:]

    def bounds(
        self, errors: Real[Array, "2"], common: Real[Array, ""] | float
    ) -> Real[Array, "2 2"]:
        """Bounds of the mean of the forms with these quadrature `errors` below and above,
        and the standard error of each. `common` is an error that all forms share."""
        ends = jnp.stack([self.mean.real - errors[0], self.mean.real + errors[1]])
        # Where the quadrature error is the whole bracket, the end is a mean of ends of
        # brackets, with their standard error.
        as_wide = errors >= self.convergence.widths(self.mean)
        std_errs = jnp.where(as_wide, self._std_errs_of_brackets, self.std_err())
        return self._bounds(ends, jnp.hypot(std_errs, common))

    def proven_bounds(self, common: Real[Array, ""] | float) -> Real[Array, "2 2"]:
        """The same bounds from the brackets alone, infinite where these prove nothing."""
        ends = self.convergence.proven(self.mean)
        return self._bounds(ends, jnp.hypot(self._std_errs_of_brackets, common))

    @property
    def _std_errs_of_brackets(self) -> Real[Array, "2"]:
        std_errs = jnp.maximum(self.errors.std_err()[:2], self._std_err_of_spreads)
        return std_errs if self.factor is None else self.factor * std_errs

    def _bounds(
        self, ends: Real[Array, "2"], std_errs: Real[Array, "2"]
    ) -> Real[Array, "2 2"]:
        # Rounding moves all forms alike, so it does not average out.
        rounding, _, unresolved = self.rounding
        further = jnp.array([-1, 1]) * (rounding + unresolved)
        return jnp.stack([ends + further, std_errs], axis=1)


class MomentsOfSeveral(eqx.Module):
    """The summaries of the forms of several functions."""

    parts: tuple[FormMoments, ...]

    @classmethod
    def merge(cls, stacked: "MomentsOfSeveral") -> "MomentsOfSeveral":
        """One summary from several that are stacked."""
        return cls(tuple(map(FormMoments.merge, stacked.parts)))

    @property
    def count(self) -> Real[Array, "*sets"]:
        """The number of samples; of strata, which have fewer degrees of freedom, the
        smallest one."""
        return jnp.min(jnp.stack([part.count for part in self.parts]), axis=0)

    @property
    def total(self) -> Real[Array, "*sets"]:
        return self.parts[0].total

    @property
    def mean(self) -> Inexact[Array, " f"]:
        return jnp.stack([part.mean for part in self.parts])

    def std_err(self) -> Real[Array, " f"]:
        return jnp.stack([part.std_err() for part in self.parts])


def errors_of(form: QuadraticForm) -> Real[Array, " e"]:
    """The errors of a form as one array, in the order of `_MEANS`."""
    convergence, rounding = Convergence.of(form), jnp.abs(form.rounding)
    errors = [*convergence.flat, rounding, form.magnitude]
    errors.append(jnp.asarray(form.unresolved, errors[0].dtype))
    if form.spread is not None:
        errors.append(form.spread)
    return jnp.stack(errors)


def stream_forms(
    forms: Callable[
        [FlatOperator, Int[Array, ""]],
        tuple[Sequence[QuadraticForm], Inexact[Array, " n"]],
    ],
    operator: FlatOperator,
    function: AbstractSpectralFunction | FunctionTree,
    gradient: AbstractFunctionGradient,
    k: int | Budget,
    execution: AbstractExecution,
    *,
    sampler: AbstractSampler,
    width: int,
    quantity: AbstractQuantity,
) -> Streamed:
    """Quadratic forms for the whole budget, with their derivatives. `forms(operator, i)`
    is the form of each function for probe i of the `sampler`, and that probe. Samples are
    numbers for one function, and arrays of shape `(f,)` for a tree of functions. Streamed
    with each sample are the errors of its forms as in `_MEANS`, the residuals of their
    derivatives, the extreme Ritz values, and i where there are several strata."""

    functions, single = members_of(function), not isinstance(function, FunctionTree)

    def numbers_of(flat, function, form, probe):
        frame = gradient.frame(function, form.left.T, form.right.T, probe[:, None])
        value = attach(flat, form.value, frame, execution=Local())
        return value, errors_of(form), form.residual

    def body(flat, index):
        # The run is constant to derivatives, which come from the frames alone.
        of_each, probe = forms(flat.frozen, index)
        pairs = zip(functions, of_each, strict=True)
        numbers = [numbers_of(flat, function, form, probe) for function, form in pairs]
        value, errors, residual = numbers[0]
        if not single:
            value, errors, residual = map(jnp.stack, zip(*numbers, strict=True))
        stratum = index if sampler.num_strata > 1 else None
        return value, (errors, of_each[0].extremes, residual, stratum)

    def reduce(outs, valid):
        samples, (errors, extremes, _, indices) = outs
        strata = None
        if indices is not None:
            strata = sampler.strata(indices, entrywise=False)
        if single:
            moments = FormMoments.of(samples, errors, valid, strata)
        else:
            each = range(len(functions))
            moments = [
                FormMoments.of(samples[:, i], errors[:, i], valid, strata) for i in each
            ]
            moments = MomentsOfSeveral(tuple(moments))
        return moments, spectral_range(extremes)

    def merge(parts):
        moments, extremes = parts
        return type(moments).merge(moments), spectral_range(extremes, moments.total)

    return stream(
        body, reduce, merge, operator, k, execution, width=width, quantity=quantity
    )


def estimate_of_forms(
    streamed: Streamed,
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    k: int | Budget,
    steps: Steps,
    excess: Callable[[Array, tuple[Array, Array], float], Real[Array, ""]],
    target: GradientTarget,
    *,
    live: Callable[[], Inexact[Array, ""]],
    extremes: Real[Array, "2"],
    common: Real[Array, ""] | float = 0.0,
    apart: Real[Array, "2"] | float = 0.0,
) -> Estimate:
    """The estimate from the forms of `stream_forms`. Its matvecs and its state are those
    of the samples alone.

    - `excess`: the quadrature error over its target, a function of a value, a bracket and
        a deviation.
    - `target`: what a derivative asks of the residuals.
    - `live`: a function whose result has the derivatives of the value.
    - `extremes`: the smallest and the largest Ritz value.
    - `common`: a rounding error that all samples share.
    - `apart`: quadrature errors, below and above, of a part that is not sampled.
    """
    moments = streamed.summary[0]
    sample_errors, _, residuals, _ = streamed.others
    convergence, mean = moments.convergence, moments.mean
    rounding, magnitude, unresolved = moments.rounding
    errors = convergence.errors(mean, apart)
    extra = {
        "gradient_residual": residuals,
        "ritz_values": extremes,
        "sample_brackets": sample_errors[:, :2],
        "bracket": convergence.bracket,
    } | moments.forms.statistics()
    in_domain = check_domain(function, operator, extremes, mean)
    std_err, unresolved = moments.std_err(), jnp.hypot(unresolved, common)
    precise = check_precision(
        operator,
        std_err=std_err,
        width=jnp.sum(errors),
        rounding=rounding,
        unresolved=unresolved,
        magnitude=magnitude,
    )
    bar = jnp.hypot(jnp.hypot(std_err, unresolved), operator.rounding * magnitude)
    # A value that is zero to rounding has no digits to lose. Rounding is part of its bar.
    is_zero = jnp.abs(mean) <= 2 * bar
    precise = RESULTS.where(is_zero, failure(False, RESULTS.precision_lost), precise)
    unresolved = jnp.hypot(unresolved, jnp.where(is_zero, rounding, 0))
    too_few = jnp.zeros((), bool)
    if steps.chosen:
        # Users who choose the steps look at the bracket. Of others the error bar has to
        # count the quadrature error, and the call fails where that is the larger part.
        ends = mean.real - errors[0], mean.real + errors[1]
        too_few = jnp.max(errors) > bar
        if isinstance(k, Budget):
            too_few = excess(mean, ends, 0) > 1
        hides = convergence.hides(mean, _BARS_OF_HIDDEN * bar)
        made = jnp.arange(len(residuals)) < streamed.count
        missing = jnp.where(made, target.excess(function, residuals, extremes), 0)
        too_few |= hides
        if steps.limited:
            too_few = jnp.zeros((), bool)
            errors = jnp.where(hides, convergence.widths(mean), errors)
        # A derivative has no error bar.
        too_few |= jnp.sum(missing) > streamed.count
        std_err = jnp.hypot(std_err, jnp.max(errors))
    step_stats, steps_result = steps.report(too_few)
    return Estimate(
        value=attach_derivative(mean, live),
        std_err=std_err,
        samples=streamed.samples,
        num_matvecs=streamed.count * steps.made,
        rounding=operator.rounding,
        magnitude=magnitude,
        unresolved=unresolved,
        result=first_failure(in_domain, precise, steps_result, streamed.loop.result),
        extra=extra | step_stats | streamed.loop.extra,
        state=steps.state(streamed.loop.state),
        bounds=moments.bounds(errors, common),
        proven_bounds=moments.proven_bounds(common),
    )
