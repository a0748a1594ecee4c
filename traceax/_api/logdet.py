"""Log-determinants: `log |det A| = sum_i log |lambda_i| = sum_i log sigma_i`.

For a positive definite A this is `tr log A`, by stochastic Lanczos quadrature. For a
general A it is `tr log(A* A) / 2`, by Golub-Kahan. Facts that lineax knows, such as the
entries of a triangular operator, take precedence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate, Solution
from .._functions.base import AbstractFunctionEstimator
from .._functions.gradients import AbstractFunctionGradient, LanczosGradient
from .._functions.preconditioned import check_preconditioner, Preconditioned
from .._functions.slq import SLQEstimator
from .._functions.subspaces import with_subspaces
from .._functions.task import AbstractFunctionTask
from .._operators.control import Controlled
from .._operators.convert import OperatorLike
from .._operators.door import enter, EnteredOperator, Facts
from .._preconditioners.auto import AutoPreconditioner
from .._preconditioners.base import AbstractPreconditioning
from .._quadrature.functions import Log
from .._quadrature.singular_functions import SingularLog
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.matvecs import Matvecs
from .._run.random_steps import RandomSteps
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_any_steps
from .control import controlled_function, signs_of
from .within import within_matvecs


# With fewer matvecs in all, a preconditioner would be made from a block or two.
_FEWEST_WITH_RANK = 32


class LogDet(AbstractFunctionTask):
    """`log |det A|`: the trace of `log A` if A is positive definite, of `log(-A)` if it
    is negative definite, and else the sum of the logarithms of the singular values."""

    @property
    def title(self) -> str:
        return "Log-determinant"

    def is_known(self, facts: Facts) -> bool:
        return facts.determinant is not None or super().is_known(facts)

    def known(self, operator: FlatOperator, facts: Facts) -> Estimate:
        if facts.determinant is None:
            return super().known(operator, facts)
        sign, log = facts.determinant
        return Estimate(
            value=log,
            std_err=jnp.zeros_like(log),
            samples=log[None],
            num_matvecs=0,
            rounding=0.0,
            result=failure(sign == 0, RESULTS.zero_determinant),
            extra={"sign": sign},
        )

    def operand(self, operator: FlatOperator) -> FlatOperator:
        # The logarithm has the domain x > 0.
        return operator.negated if operator.sign < 0 else operator

    def finish(self, operator: FlatOperator, estimate: Estimate) -> Estimate:
        if operator.sign != 0:
            # The n eigenvalues of a definite operator have the same sign.
            sign = jnp.asarray(float(operator.sign), estimate.value.dtype)
            sign = sign**operator.size
        else:
            unknown = jnp.full((), jnp.nan, operator.dtype)
            sign = estimate.extra.get("sign", unknown)
        extra = estimate.extra | {"sign": sign}
        result = first_failure(operator.sign_failure, estimate.result)
        return _singular_if_zero(
            dataclasses.replace(estimate, extra=extra, result=result)
        )


def logdet_function(sign: int) -> Log | SingularLog:
    """The function whose trace is the log-determinant: the logarithm of the eigenvalues
    if a tag gives their sign, and else of the singular values."""
    return SingularLog() if sign == 0 else Log()


def _automatic(
    operator: EnteredOperator,
    estimator: AbstractFunctionEstimator,
    k: Any,
    num_steps: int | AdaptiveSteps | RandomSteps,
) -> AutoPreconditioner | None:
    """The preconditioner where none was chosen. A number for `k` or `num_steps` is a
    number of matvecs that was asked for, and a lower bound of the spectrum of A is worth
    more without a preconditioner."""
    is_adaptive = isinstance(k, Adaptive) and isinstance(num_steps, AdaptiveSteps)
    if isinstance(k, Matvecs):
        is_adaptive = k.total >= _FEWEST_WITH_RANK
    is_plain = isinstance(estimator, SLQEstimator) and estimator.lower_bound is None
    # A preconditioned operator has no entries that decay with the distance.
    is_plain = is_plain and estimator.sampler.num_strata == 1
    return (
        AutoPreconditioner() if is_adaptive and is_plain and operator.flat.sign else None
    )


def _singular_if_zero(estimate: Estimate) -> Estimate:
    """The estimate, or minus infinity if all matvecs were zero. Zero eigenvalues are
    detected relative to the largest one, so a zero operator is not detected elsewhere."""
    if "ritz_values" not in estimate.extra:
        return estimate
    zero = jnp.all(estimate.extra["ritz_values"] == 0)

    def infinite(x):
        # An added constant does not enter the derivative. A `where` would, and on a mesh
        # `zero` is a sum over devices.
        return x + jnp.where(zero, -jnp.inf, 0).astype(x.dtype)

    samples = estimate.samples
    extra = estimate.extra | {"sign": jnp.where(zero, 0, estimate.extra["sign"])}
    estimate = dataclasses.replace(
        estimate,
        value=infinite(estimate.value),
        samples=None if samples is None else infinite(samples),
        extra=extra,
    )
    return estimate.map_bounds(lambda ends: ends.at[:, 0].set(infinite(ends[:, 0])))


def logdet(
    operator: OperatorLike,
    estimator: AbstractFunctionEstimator = SLQEstimator(),
    *,
    k: int | Adaptive | Matvecs = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps | RandomSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    null_space: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    control: Any = None,
    preconditioner: AbstractPreconditioning | Literal["auto"] | None = "auto",
    gradient: AbstractFunctionGradient = LanczosGradient(),
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate $\\log|\\det A|$ from matvecs.

    - Operators tagged positive (or negative) semidefinite: $\\mathrm{tr} \\log A$ by
      `estimator`, with Lanczos; `k * num_steps` matvecs.
    - Diagonal, triangular, tridiagonal and identity operators that store their entries,
      and multiples and products of them: exactly, without a matvec.
    - Any other square operator: $\\mathrm{tr} \\log(A^* A) / 2$ by Golub-Kahan; `k *
      num_steps` matvecs with $A$ and as many with $A^*$. Needs an `SLQEstimator`.

    With `k >= n` the answer is exact, from n matvecs and a dense factorisation. For
    matrices that fit, a Cholesky factorisation is faster up to n of several thousand:
    see [Log-determinants](../logdet.md).

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key1)
        solution = tx.logdet(
            operator, k=10, num_steps=10, key=key2, preconditioner=preconditioner
        )
        print(solution.value, "+-", solution.std_err, solution.stats["bracket"])
        ```

    **Arguments:**

    - `operator`: a square matrix, or an operator on arrays or PyTrees, real or complex,
        of any floating dtype. See [`traceax.as_operator`][].
    - `estimator`: default: [`traceax.SLQEstimator`][].
    - `k`: the number of probes, a Python integer, or [`traceax.Adaptive`][]: as many as
        it takes to reach a tolerance of the sampling error. Default: 1%. Or
        [`traceax.Matvecs`][]: a total number of matvecs for the whole call, without
        `num_steps`, `deflation`, `null_space` or `control`.
    - `num_steps`: the number of Lanczos steps for each probe, a Python integer; more
        than n count as n. Or [`traceax.AdaptiveSteps`][], the default: one more run
        chooses a number that makes the quadrature error small compared with the sampling
        error or the tolerance. Or [`traceax.RandomSteps`][], for an unbiased value.
    - `key`: a JAX PRNG key. Not needed where nothing is random.
    - `state`: as for [`traceax.trace`][].
    - `preconditioner`: of an operator tagged positive semidefinite (or of the negative of
        one tagged negative), made from the same or from a similar operator. See
        [`traceax.nystrom_preconditioner`][] and [`traceax.Preconditioned`][]. Or
        [`traceax.AutoPreconditioner`][], which makes one and chooses its rank; it is the
        default, `"auto"`, for a tagged operator where neither `k` nor `num_steps` is a
        number and the estimator is an `SLQEstimator` without a `lower_bound`. It tries 8
        matvecs or more, and keeps the approximation if that pays. `None` makes none. With
        a number for `k` or `num_steps` there is none by default, and the call makes the
        matvecs that you asked for.
    - `null_space`: a basis of the null space of an operator tagged Hermitian, orthonormal
        or not, in the form of `deflation` of [`traceax.trace`][]. The value is then
        $\\log|A|_+$, the sum of the logarithms over the complement. It takes two or three
        matvecs more, one of which checks that the operator maps the basis to zero. A
        preconditioner need not know of it. Derivatives are valid in directions that keep
        it a null space.
    - `deflation`: eigenvectors of an operator tagged Hermitian, such as those of the
        smallest or the largest eigenvalues, in the form of `deflation` of
        [`traceax.trace`][]. Their part is exact, from r matvecs and one or two more; the
        rest varies less, and needs fewer steps. The error of vectors that are not quite
        eigenvectors is estimated and counted in `std_err` and in intervals, and flagged
        if it is more than the other errors. There are no second derivatives.
    - `control`: a control variate, as for [`traceax.trace`][]: a pair `(B, known)` of an
        operator with the structure and tags of A, and the known number $\\log|\\det B|$;
        or `control=B`, where the structure of B gives that. Each probe takes a Krylov run
        with B too. The estimator is an `SLQEstimator`, without a preconditioner.
    - `gradient`: how derivatives are computed: [`traceax.LanczosGradient`][], from the
        same run, or [`traceax.SolveGradient`][], which has second derivatives.
    - `execution`: where matvecs run, and how many at a time.
    - `throw`: whether to raise if the result is not `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][] with a real `value`. [`traceax.Solution.interval`][] counts
    the quadrature error. `std_err` counts it where steps are chosen; where `num_steps` is
    a number, `std_err` is the sampling error alone. `stats` has, beside
    the entries described there,

    - `"sign"`: of the determinant, where it is known: 1 or, for a negative semidefinite
        operator, $(-1)^n$; for structured operators, and with `k >= n` for general ones,
        the sign, or in complex arithmetic the phase. NaN where it is not known.
    - the entries of the estimator. For `SLQEstimator` these are `"bracket"`, shape
        `(2,)`, bounds of `value` without quadrature error, for the same probes;
        `"sample_brackets"`, the same for each probe, shape `(k, 2)`; `"ritz_values"`,
        shape `(2,)`, the smallest and the largest Ritz value (of the preconditioned
        operator, if there is a preconditioner), or for a general operator the smallest
        and the largest singular value of the bidiagonal matrices, both between the
        extreme singular values of $A$; `"gradient_residual"`, shape `(k,)`, the relative
        residuals of conjugate gradients after as many steps, which show whether the steps
        are enough for the gradient: the error of conjugate gradients, which bounds its
        bias, is at most the condition number times these.

    Memory: `num_steps` vectors of length n for each probe of a block, twice as many for a
    general operator, and for a derivative 8 vectors for each probe: see
    [`traceax.SLQEstimator`][].

    Derivatives in the operator's arrays are estimates of $\\mathrm{tr}(A^{-1} dA)$.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer.
    - `ValueError`: `operator` is not square; `k` or `num_steps` is too small; `key` is
        missing; `preconditioner` or `estimator` does not fit the operator; `null_space`
        or `deflation` has other shapes than its vectors, or the operator lacks a
        Hermitian tag; `null_space` is not mapped to zero (inside of a program a run-time
        error, `RESULTS.not_null_space`).
    - An `equinox` run-time error with `throw=True`: the operator was seen not to be
        positive definite; it is singular, or too ill conditioned for its precision; the
        steps that [`traceax.AdaptiveSteps`][] allows were too few, and n is too large
        for the exact answer; a matvec was not finite; a tolerance was not reached.
    """
    operators = None
    if control is None:
        entered = enter(operator, second=estimator)
        sign = entered.flat.sign
    else:
        operators = Controlled.of(operator, control)
        entered, (sign, _) = operators.entered, signs_of(operators)
    check_instance("estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()")
    num_steps = check_any_steps(num_steps, entered.size, estimator.most_steps)
    check_instance("gradient", gradient, AbstractFunctionGradient, "LanczosGradient()")
    if isinstance(preconditioner, str) and preconditioner == "auto":
        preconditioner = None
        if operators is None:
            preconditioner = _automatic(entered, estimator, k, num_steps)
    if isinstance(k, Matvecs):
        others = {"null_space": null_space, "deflation": deflation, "control": control}
        estimator, num_steps = within_matvecs(
            k, estimator, num_steps, preconditioner, state=state, **others
        )
        k = k.total
    elif preconditioner is not None and operators is None:
        check_preconditioner(preconditioner, entered.size)
        estimator = Preconditioned(estimator, preconditioner)
    task = LogDet(
        estimator=estimator,
        function=logdet_function(sign),
        gradient=gradient,
        num_steps=num_steps,
    )
    others = {"null_space": null_space, "deflation": deflation}
    if operators is None:
        task = with_subspaces(task, entered, **others)
    else:
        others["preconditioner"] = preconditioner
        task, entered = controlled_function(task, operators, **others)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
