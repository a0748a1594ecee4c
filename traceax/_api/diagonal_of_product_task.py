"""Diagonals of products, `diag X f(B) X*`, from probes of the length of B.

Row a of X is x_a*. For probes z with the identity as covariance and a real g with g^2 = f

    x_a* f(B) x_a = E |x_a* g(B) z|^2            (`f >= 0`: relative variance at most 2)
                  = E Re conj(x_a* z) x_a* f(B) z    (any f)

The second one has the variance `|x_a|^2 |f(B) x_a|^2 + (x_a* f(B) x_a)^2`, at least as
much as the first. A product `f(B) z` that is off by d changes `conj(l) y` by `conj(l) d`,
and `|y|^2` by up to `2 |y| |d| + |d|^2`.

In the code X is the `factor`, y is `report.product`, and `left` is l.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import draw_for
from .._core.samplers import RademacherSampler
from .._core.solution import Estimate
from .._estimators.hutchinson import HutchinsonEstimator
from .._functions.action import Action
from .._functions.matrix_diagonal import exact_diagonal_of_function
from .._functions.products import FactoredAction, RunReport
from .._krylov.lanczos import Lanczos
from .._operators.door import EnteredOperator, Facts
from .._quadrature.domain import check_domain, domain_result
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.solve import AbstractTask
from .._run.steps import AdaptiveSteps, choose_steps, exact_limit, excess, Steps
from .diagonal_of_function_task import HIDDEN, MAX_ROUNDING, root_mean_square


class _Root(AbstractSpectralFunction):
    """The square root of a function that is nowhere negative."""

    function: AbstractSpectralFunction
    bracketed: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = True

    def __init__(self, function: AbstractSpectralFunction):
        self.function = function

    @property
    def semidefinite_domain(self) -> bool:  # pyright: ignore
        return self.function.semidefinite_domain

    @property
    def singular_at_zero(self) -> bool:  # pyright: ignore
        return self.function.singular_at_zero

    def __call__(self, x):
        return jnp.sqrt(self.function(x))


class ProductDiagonal(AbstractQuantity):
    """`diag X f(B) X*`, with the structure of the images of X: from images `X g(B) z`
    their squares, or from images `(X z, X f(B) z)`, which are `paired`, their products.
    """

    rows: AbstractQuantity
    paired: bool = eqx.field(static=True)
    linear: ClassVar[bool] = False

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        if not self.paired:
            return self.rows.read(left, image)
        start, end = jnp.split(image, 2)
        return (start.conj() * end).real

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]
    ) -> Inexact[Array, " n"] | None:
        return None if self.paired else self.rows.marks(left, image)

    def comparable(self, hermitian: bool) -> bool:
        return not self.paired

    def arrange(self, entries: Array):
        return self.rows.arrange(entries)


class _Paired(eqx.Module):
    """`z -> (X z, X f(B) z)`."""

    product: FactoredAction

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        return jnp.concatenate([self.product.end(vector), self.product(vector)])


class DiagonalOfProduct(AbstractTask):
    """The diagonal of a function between an operator and its adjoint."""

    factor: EnteredOperator
    quantity: ProductDiagonal
    function: AbstractSpectralFunction
    num_steps: int | AdaptiveSteps

    @property
    def name(self) -> str:
        return "diagonal_of_product"

    @property
    def title(self) -> str:
        return f"Diagonal of a product with {self.function.title}"

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    @property
    def min_matvecs(self) -> int:
        return 1

    @property
    def fallback(self) -> str:
        return self.name

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit()

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        factor, _ = self.factor.open()
        answer = exact_diagonal_of_function(operator, self.function, execution, factor)
        return dataclasses.replace(answer, value=answer.value.real)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        adaptive, most = isinstance(self.num_steps, AdaptiveSteps), self.num_steps
        if isinstance(most, AdaptiveSteps):
            most = most.most
        paired = self.quantity.paired
        function = self.function if paired else _Root(self.function)
        factor, _ = self.factor.open()
        action = Action(operator, function=function, most=most, steps=most)
        product = FactoredAction(action, factor)
        probe = draw_for(operator, RademacherSampler(), key, jnp.zeros(1, int))[:, 0]
        steps, remaining = Steps.resumed(
            self.num_steps,
            lambda _: self._choose_steps(product, probe, k, execution),
            k,
        )
        if adaptive:
            product = product.after(jnp.asarray(steps.made))
        images = dataclasses.replace(
            operator,
            fn=_Paired(product) if paired else product,
            precision=max(operator, factor, key=lambda x: x.eps).precision,
            hermitian=False,
            sign=0,
        )
        sampler = HutchinsonEstimator()
        estimate = sampler.measure(self.quantity, images, remaining, key, execution)
        # One run more than those of the estimate, from `probe`.
        num_runs = estimate.num_matvecs + 1
        estimate = dataclasses.replace(
            estimate,
            num_matvecs=num_runs * steps.made + steps.spent,
            state=steps.state(estimate.state),
        )
        return self._with_truncation_error(estimate, product, probe, k)

    def _with_truncation_error(
        self,
        estimate: Estimate,
        product: FactoredAction,
        probe: Inexact[Array, " n"],
        k: int | Budget,
    ) -> Estimate:
        """The estimate, with what a run from `probe` shows of its errors."""
        flat, function = product.action.operator, product.action.function
        adaptive = isinstance(self.num_steps, AdaptiveSteps)
        constant, frozen = freeze(product), jax.lax.stop_gradient(probe)
        state, steps, _ = constant.action.advanced(constant.start(frozen))
        report = constant.look(state, steps, HIDDEN[adaptive])
        left = constant.end(frozen) if self.quantity.paired else report.product
        value = jax.lax.stop_gradient(estimate.value)
        extremes = report.extremes
        in_domain = check_domain(function, flat, extremes, jnp.sum(report.product))
        # Another probe may have met an eigenvalue that this one did not meet.
        lost = jnp.isfinite(report.product).all() & ~jnp.isfinite(value).all()
        in_domain_of_all = failure(lost, domain_result(function, flat))
        rounded = self._errors(left, report.rounding)
        size = root_mean_square(value)
        is_lost = root_mean_square(rounded) > MAX_ROUNDING * size
        precision = failure(is_lost, RESULTS.precision_lost)
        # The error of an entry relative to the spread of its samples is alike for all
        # entries in the mean, but small by chance for some. So its root mean square is
        # the smallest of any entry.
        error = self._errors(left, report.truncated) + rounded
        spread = jax.lax.stop_gradient(estimate.std_err) * estimate.count**0.5
        spread = jnp.where(jnp.isfinite(spread), spread, jnp.abs(value))
        typical = root_mean_square(error / jnp.where(spread > 0, spread, jnp.inf))
        error = jnp.maximum(error, typical * spread)
        reach = error + report.beyond[:, None]
        low, high = value - reach[0], value + reach[1]
        if self.function.nonnegative:
            low = jnp.maximum(low, jnp.minimum(value, 0))
        ends = jnp.stack([low, high])
        bars = jnp.broadcast_to(estimate.std_err, ends.shape)
        extra = {
            "ritz_values": extremes,
            "truncation_error": root_mean_square(error) + jnp.max(report.beyond),
            "gradient_residual": report.residual,
            "num_steps": jnp.asarray(steps, jnp.int32),
        }
        unresolved, too_few_steps = 0.0, None
        if adaptive:
            within = value if isinstance(k, Budget) else None
            missed = ~(self._excess(report, left, k, flat.rounding, within) <= 1)
            too_few_steps = failure(missed, RESULTS.too_few_steps)
            # If the call fails, the error bar is the sampling error alone.
            unresolved = jnp.where(missed, 0, error)
        return dataclasses.replace(
            estimate,
            unresolved=unresolved,
            result=first_failure(
                in_domain, in_domain_of_all, precision, estimate.result, too_few_steps
            ),
            extra=estimate.extra | extra,
            bounds=jnp.stack([ends, bars], axis=1),
        )

    def _errors(
        self, left: Inexact[Array, " m"], errors: Real[Array, " m"]
    ) -> Real[Array, " m"]:
        """The errors of a sample, from those of the images."""
        first_order = jnp.abs(left) * errors
        return first_order if self.quantity.paired else 2 * first_order + errors**2

    def _choose_steps(
        self,
        product: FactoredAction,
        probe: Inexact[Array, " n"],
        k: int | Budget,
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """The number of steps that make the truncation error a small share of the target:
        the tolerance, or the standard error of k probes."""
        assert isinstance(self.num_steps, AdaptiveSteps)
        constant, flat = freeze((product, k)), product.action.operator

        def excess_after(_, state, steps):
            product, k = constant
            report = product.look(state, steps, HIDDEN[True])
            left = product.end(probe) if self.quantity.paired else report.product
            return self._excess(report, left, k, flat.rounding)

        return choose_steps(
            self.num_steps,
            krylov=Lanczos(),
            operator=flat,
            probe=product.start(probe),
            # Not after one step, from which the error cannot be estimated.
            first=4,
            excess_after=excess_after,
            execution=execution,
        )

    def _excess(
        self,
        report: RunReport,
        left: Inexact[Array, " m"],
        k: int | Budget,
        rounding: float,
        value: Real[Array, " m"] | None = None,
    ) -> Real[Array, ""]:
        """The truncation error divided by the target. A tolerance is relative to `value`,
        or without it to the sample of this run, whose size is also about the standard
        deviation of samples."""
        sample = (left.conj() * report.product).real

        def size(entries):
            if not isinstance(k, Budget):
                return root_mean_square(entries)
            return k.rule.size(self.quantity.present(entries, entries)[0])

        if isinstance(k, Budget):
            target = k.rule.tolerance(size(sample if value is None else value))
        else:
            target = jnp.maximum(k**-0.5, rounding) * size(sample)
        # More steps do not reduce rounding errors, so these do not count.
        error = size(self._errors(left, report.truncated))
        error = error - size(self._errors(left, report.rounding))
        return excess(error + jnp.max(report.beyond), target)
