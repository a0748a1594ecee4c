import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.checks import check_instance
from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity, Diagonal, Shifted
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import draw_for, RademacherSampler
from .._core.solution import Estimate, Solution
from .._estimators.auto_diagonal import AutoDiagonalEstimator
from .._estimators.base import AbstractEstimator
from .._functions.action import Action, check_of_eigenvalues
from .._functions.matrix_diagonal import exact_diagonal_of_function
from .._functions.preconditioned import check_preconditioner, Prepared
from .._functions.products import Between, BeyondOne, Look
from .._krylov.lanczos import Lanczos
from .._numerics.dense import two_norm
from .._operators.checks import check_hermitian
from .._operators.door import enter, Facts
from .._preconditioners.base import (
    AbstractPreconditioning,
)
from .._quadrature.callables import as_spectral_function
from .._quadrature.domain import check_domain, domain_result
from .._quadrature.functions import AbstractSpectralFunction, Inverse
from .._run.adaptive import Adaptive
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.solve import AbstractTask, solve
from .._run.steps import (
    AdaptiveSteps,
    check_steps,
    choose_steps,
    exact_limit,
    excess,
    Steps,
)


def _mean_size(entries: Inexact[Array, " n"]) -> Real[Array, ""]:
    """The root mean square."""
    return two_norm(entries) / entries.size**0.5


# The share of the mean weight of an eigenvector that a random vector may have by chance:
# one in seven where steps are chosen, which takes the fewer of them, and less than one
# in twenty where their number is given, and nobody is told that it is too small.
_HIDDEN = {True: 0.03, False: 0.003}


class _DiagonalOfFunction(AbstractTask):
    """An estimator of the diagonal of a function, with the settings of one call."""

    estimator: AbstractEstimator
    quantity: AbstractQuantity
    function: AbstractSpectralFunction
    num_steps: int | AdaptiveSteps
    preconditioner: AbstractPreconditioning | None

    @property
    def name(self) -> str:
        return self.estimator.name

    @property
    def min_matvecs(self) -> int:
        return self.estimator.min_matvecs

    @property
    def fallback(self) -> str:
        return self.estimator.fallback

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit(self.num_steps)

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        return exact_diagonal_of_function(operator, self.function, execution)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat, function, outer, prepared = operator, self.function, None, None
        if self.preconditioner is not None:
            arguments = {"k": k, "num_steps": self.num_steps}
            arguments |= {"key": key, "execution": execution}
            prepared = Prepared.of(freeze(self.preconditioner), flat.frozen, arguments)
            outer, k = prepared.preconditioner, prepared.call["k"]
        known, spent, quantity = jnp.zeros((), flat.dtype), 0, self.quantity
        if outer is not None:
            # A^-1 is P^-1 and, for M = P^(-1/2) A P^(-1/2), P^(-1/2) (M^-1 - I) P^(-1/2).
            flat, function = outer.apply_to(flat), BeyondOne()
            known, spent = outer.diagonal_of_power(-1.0), outer.num_matvecs
            quantity = Shifted(quantity, jax.lax.stop_gradient(known))
        most, adaptive = self.num_steps, isinstance(self.num_steps, AdaptiveSteps)
        if isinstance(most, AdaptiveSteps):
            most = most.most
        action = Action(flat, function, most, most)
        product = Between(action, outer)
        probe = draw_for(flat, RademacherSampler(), key, jnp.zeros(1, int))[:, 0]
        mean = jnp.mean(known)
        choose = lambda _: self._choose(product, probe, mean, k, execution)  # noqa: E731
        steps, rest = Steps.resumed(self.num_steps, choose, k)
        if adaptive:
            product = product.after(jnp.asarray(steps.made))
            spent = spent + steps.spent
        sign = 1 if function.nonnegative else 0
        of_function = dataclasses.replace(flat, fn=product, hermitian=True, sign=sign)
        estimate = self.estimator.measure(quantity, of_function, rest, key, execution)

        state = steps.state(estimate.state)
        if prepared is not None:
            state = prepared.state(state)
        constant, frozen = freeze(product), jax.lax.stop_gradient(probe)
        advanced = constant.action.advanced(constant.outside(frozen))
        look = constant.look(advanced, _HIDDEN[adaptive])
        in_domain = check_domain(function, flat, look.extremes, jnp.sum(look.product))
        # A product of the estimate is NaN if it met an eigenvalue outside the domain that
        # this probe did not.
        lost = jnp.isfinite(look.product).all() & ~jnp.isfinite(estimate.value).all()
        elsewhere = failure(lost, domain_result(function, flat))
        value = estimate.value + jax.lax.stop_gradient(known).astype(estimate.value.dtype)
        lost_digits = _mean_size(look.rounding) > 0.02 * _mean_size(value)
        precise = failure(lost_digits, RESULTS.precision_lost)
        # Some entries may be off by much more than others; and that of one which is may
        # by chance be small for this one probe, so the mean is counted at least.
        error = look.truncated + look.rounding
        typical = _mean_size(error)
        error = jnp.maximum(error, typical)
        reach = error + look.beyond[:, None]
        low, high = value.real - reach[0], value.real + reach[1]
        if self.function.nonnegative:
            low = jnp.maximum(low, jnp.minimum(value.real, 0))
        ends = jnp.stack([low, high])
        bars = jnp.broadcast_to(estimate.std_err, ends.shape)
        typical = typical + jnp.max(look.beyond)
        extra = {
            "ritz_values": look.extremes,
            "truncation_error": typical,
            "gradient_residual": look.residual,
            "num_steps": jnp.asarray(product.action.steps, jnp.int32),
        }
        unresolved, wide = 0.0, None
        if adaptive:
            settled = jax.lax.stop_gradient(value) if isinstance(k, Budget) else None
            missed = ~(self._excess(look, probe, k, mean, flat.rounding, settled) <= 1)
            wide = failure(missed, RESULTS.too_few_steps)
            # Of a call that fails the bar is that of sampling.
            unresolved = jnp.where(missed, 0, error)
        return dataclasses.replace(
            estimate,
            value=value,
            num_matvecs=(estimate.num_matvecs + 1) * product.action.steps + spent,
            unresolved=unresolved,
            result=first_failure(in_domain, elsewhere, precise, estimate.result, wide),
            extra=estimate.extra | extra,
            state=state,
            bounds=jnp.stack([ends, bars], axis=1),
        )

    def _choose(
        self,
        product: Between,
        probe: Inexact[Array, " n"],
        known: Inexact[Array, ""],
        k: int | Budget,
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """So many steps that the error of truncation is a share of the target: of the
        tolerance, for a diagonal of equal entries with the trace that the probe sees, or
        of the standard error of k random signs. An entry may be off by ten times as much
        as all are in the root mean square; where they are alike, none is by over five.
        `known` is the mean of what is added."""
        assert isinstance(self.num_steps, AdaptiveSteps)
        constant, flat = freeze((product, known, k)), product.action.operator

        def look(_, state, made):
            product, known, k = constant
            found = product.after(made).look(state, _HIDDEN[True])
            return self._excess(found, probe, k, known, flat.rounding)

        start = product.outside(probe)
        return choose_steps(self.num_steps, Lanczos(), flat, start, 4, look, execution)

    def _excess(
        self,
        look: Look,
        probe: Inexact[Array, " n"],
        k: int | Budget,
        known: Inexact[Array, ""],
        rounding: float,
        value: Inexact[Array, " n"] | None = None,
    ) -> Real[Array, ""]:
        """The error of truncation over the target, which for a tolerance is relative to
        the `value`, if there is one."""
        mean = jnp.vdot(probe, look.product, precision="highest") / probe.size
        if isinstance(k, Budget):
            value = jnp.full_like(look.product, mean + known) if value is None else value
            aimed = self._tolerance(k, value)
        else:
            deviation = _mean_size(look.product - mean * probe) / k**0.5
            aimed = jnp.maximum(deviation, rounding * _mean_size(look.product))
        worst = jnp.max(look.truncated) - jnp.max(look.rounding)
        error = self._size(k, look.truncated) - self._size(k, look.rounding)
        error = jnp.maximum(error, worst / 10) + jnp.max(look.beyond)
        return excess(error, aimed)

    def _tolerance(self, k: Budget, value: Inexact[Array, " n"]) -> Real[Array, ""]:
        """What errors of all entries may be, if they are alike."""
        size, one = (self._norm(k, x) for x in (value, jnp.ones_like(value)))
        return k.rule.tolerance(size) / one.real

    def _size(self, k: int | Budget, errors: Real[Array, " n"]) -> Real[Array, ""]:
        """The error of an entry, if all were alike: in the norm of an adaptive budget, or
        else the root mean square."""
        if isinstance(k, Budget):
            return self._norm(k, errors) / self._norm(k, jnp.ones_like(errors))
        return _mean_size(errors)

    def _norm(self, k: Budget, entries: Inexact[Array, " n"]) -> Inexact[Array, ""]:
        return k.rule.size(self.quantity.present(entries, entries)[0])


def diagonal_of_function(
    operator: lx.AbstractLinearOperator,
    function: AbstractSpectralFunction | Callable[[Any], Any],
    estimator: AbstractEstimator = AutoDiagonalEstimator(),
    *,
    k: int | Adaptive,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    preconditioner: AbstractPreconditioning | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution:
    r"""Estimate the diagonal of $f(A)$ for a Hermitian operator. The diagonal of the
    inverse of a precision matrix has the marginal variances.

    It is `diagonal` of [`traceax.function_of`][], and besides checks whether eigenvalues
    are outside the domain, estimates the error of the Krylov approximation, and uses a
    preconditioner of the inverse. With $M = P^{-1/2} A P^{-1/2}$

    $$\mathrm{diag}\, A^{-1} = \mathrm{diag}\, P^{-1} + \mathrm{diag}\, P^{-1/2} (M^{-1} -
    I) P^{-1/2},$$

    where the first part is known, the second one is small, and M takes few steps.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        preconditioner = tx.nystrom_preconditioner(
            operator, rank=15, key=key1, shift=0.1
        )
        solution = tx.diagonal_of_function(
            operator,
            tx.Inverse(),
            k=10,
            num_steps=5,
            key=key2,
            preconditioner=preconditioner,
        )
        error = solution.value / jnp.diag(jnp.linalg.inv(kernel)) - 1
        print(jnp.max(jnp.abs(error)) < 0.01)  # True
        ```

    **Arguments:**

    - `operator`, `function`: as for [`traceax.function_of`][].
    - `estimator`, `key`, `state`, `execution`, `throw`: as for [`traceax.diagonal`][].
    - `k`: the number of products with $f(A)$, a Python integer or
        [`traceax.Adaptive`][]. With `k >= n` the answer is exact, from n products with
        `operator` and a dense factorisation.
    - `num_steps`: the number of Lanczos steps for each, a Python integer; more than n
        count as n. Or [`traceax.AdaptiveSteps`][], as by default: the error of the Krylov
        approximation is then a share of the tolerance, or of the standard error of `k`
        random signs. Where `estimator` is far more accurate than those, pass a number or
        a smaller `share`.
    - `preconditioner`: for `Inverse()` of an operator tagged positive semidefinite. See
        [`traceax.nystrom_preconditioner`][].

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` are PyTrees of the operator's
    structure, from at most `(k + 1) * num_steps` products: one more run looks at the
    spectrum, and with [`traceax.AdaptiveSteps`][] another one chooses their number.
    Memory is that of `estimator`, and `num_steps` vectors for each probe of a block.
    `std_err` is the sampling error, and with [`traceax.AdaptiveSteps`][] counts what is
    left of the error of the Krylov approximation. [`traceax.Solution.interval`][] always
    counts it, for each entry as the one run shows it, and at least the root mean square.
    Too few steps do not show where the spectrum begins. The interval of a function that
    is infinite at zero, such as the inverse, then has an infinite end, and where the
    steps were chosen the call fails: allow more of them, pass a preconditioner, or shift
    the operator. `stats` has, beside the entries described there,

    - `"ritz_values"`: the smallest and the largest of that run (of M, if there is a
        preconditioner);
    - `"truncation_error"`: an estimate, not a bound, of the root-mean-square error of
        the entries of one product, from the Krylov approximation and rounding in it;
        infinite where an end of the interval is;
    - `"gradient_residual"`: of that run, the relative residual of $f'(A) z$ from its
        Krylov space. Where it is not small, derivatives are far off;
    - `"num_steps"`: how many steps a product makes; 0 with `k >= n`.

    Derivatives, of first order, in the arrays of `operator` and of `function` are
    estimates of those of the diagonal, as those of [`traceax.function_of`][]. They need
    more steps than the value. The preconditioner is constant to them.

    **Raises:**

    - `TypeError`: an argument is not of its kind.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `k` or
        `num_steps` is too small; `key` is missing; `preconditioner` does not fit;
        the estimator does not estimate diagonals.
    - An `equinox` run-time error with `throw=True`: an eigenvalue was seen outside the
        domain of the function; rounding may change the second digit; a product was not
        finite; a tolerance was not reached; or as many steps as
        [`traceax.AdaptiveSteps`][] allows leave an error larger than the tolerance, or
        than the standard error of `k` random signs.
    """
    entered = enter(operator, second=function)
    check_hermitian(operator)
    check_instance("estimator", estimator, AbstractEstimator, "AutoDiagonalEstimator()")
    num_steps = check_steps(num_steps, entered.size)
    function = as_spectral_function(function, entered.flat.dtype)
    check_of_eigenvalues(function)
    if preconditioner is not None:
        _check_preconditioner(preconditioner, operator, function)
    task = _DiagonalOfFunction(
        estimator=estimator,
        quantity=Diagonal.of(entered.structure),
        function=function,
        num_steps=num_steps,
        preconditioner=preconditioner,
    )
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )


def _check_preconditioner(
    preconditioner: Any,
    operator: lx.AbstractLinearOperator,
    function: AbstractSpectralFunction,
) -> None:
    check_preconditioner(preconditioner, operator.in_size())
    plain = isinstance(function, Inverse) and function.singular_at_zero
    if not plain or not lx.is_positive_semidefinite(operator):
        raise ValueError(
            "`preconditioner` is for `traceax.Inverse()` without a shift, of an operator "
            f"that is tagged positive semidefinite. Found `{type(function).__name__}`, "
            f"and an `operator` of type {type(operator).__name__}. Leave "
            "`preconditioner` out, or shift the operator."
        )
