"""Schatten norms, `(sum_i sigma_i^p)^(1/p)` for the singular values sigma_i.

The sum of powers is `tr (A* A)^(p/2)`, by stochastic quadrature with Golub-Kahan
bidiagonalisation (Ubaru, Chen and Saad 2017; Golub and Kahan 1965). `SchattenNorm` takes
the root, and its error bar.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.flat import explain_missing_adjoint, FlatOperator
from .._core.jax_interfaces import Tracer
from .._core.norms import SchattenNorm
from .._core.solution import Estimate, Solution
from .._functions.base import AbstractFunctionEstimator
from .._functions.gradients import LanczosGradient
from .._functions.slq import SLQEstimator
from .._functions.task import AbstractFunctionTask
from .._operators.checks import checked_operator
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._quadrature.singular_functions import SingularPower
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_steps
from .._run.undifferentiable import undifferentiable


class _Schatten(AbstractFunctionTask):
    """The sum of the p-th powers of the singular values of an operator with at least as
    many rows as columns. `quantity` takes its root."""

    function: SingularPower
    quantity: SchattenNorm = eqx.field(kw_only=True)

    @property
    def title(self) -> str:
        return f"Schatten {self.quantity.power:g}-norm"

    def finish(self, operator: FlatOperator, estimate: Estimate) -> Estimate:
        """The estimate, with three corrections: it is infinite if it underflowed, its
        derivative is NaN where the norm has none, and the error bar of its lower bound
        measures decreases of the norm."""
        smallest, largest = estimate.extra["ritz_values"]
        # A sum of powers that is 0 although a singular value is not would give a norm of
        # 0 with an error bar of 0. Infinity makes the call fail.
        lost = (largest > 0) & ~(estimate.value > 0)
        value = jnp.where(lost, jnp.inf, estimate.value)
        if self.function.exponent < 1:
            # The derivative p sigma^(p - 1) is infinite at sigma = 0. Below the rounding
            # errors a singular value may be 0.
            roundoff = operator.rounding * largest
            value = undifferentiable(value, (largest > 0) & (smallest <= roundoff))
        estimate = dataclasses.replace(estimate, value=value)
        return estimate.map_bounds(
            lambda x: x.at[0, 1].set(self.quantity.downward(*x[0]))
        )


def schatten_norm(
    operator: OperatorLike,
    p: int | float,
    estimator: SLQEstimator = SLQEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate the Schatten p-norm of a linear operator, $(\\sum_i \\sigma_i^p)^{1/p}$
    for its singular values $\\sigma_i$, from matvecs.

    `p=1` is the nuclear norm, `p=2` the Frobenius norm; for `p < 1` it is a quasi-norm.
    The operator may be rectangular. $\\mathrm{tr} (A^* A)^{p/2}$, or the same with
    $A A^*$ if that is smaller, is estimated by Golub-Kahan bidiagonalisation, which
    never forms these products. So singular values are resolved down to the machine
    epsilon times the largest, and not only to its square root. The estimate of
    $\\sum_i \\sigma_i^p$ is unbiased except for the quadrature error.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jax.random.normal(jax.random.key(0), (500, 200))
        operator = lx.MatrixLinearOperator(matrix)
        settings = {"k": 20, "num_steps": 20, "key": jax.random.key(1)}
        solution = tx.schatten_norm(operator, 1, **settings)
        exact = jnp.linalg.norm(matrix, "nuc")
        print(solution.value, "+-", solution.std_err, "exactly", exact)
        ```

    **Arguments:**

    - `operator`: any matrix, or an operator on arrays or PyTrees, real or complex; input
        and output may differ. See [`traceax.as_operator`][]. Let n be the smaller of its
        sizes.
    - `p`: a positive Python number.
    - `estimator`: a [`traceax.SLQEstimator`][]. Its `lower_bound` is a bound on the n
        singular values.
    - `k`: the number of probes, a Python integer. With `k >= n` the answer is exact, from
        n matvecs and a dense factorisation. Or [`traceax.Adaptive`][], whose tolerances
        apply to the norm. Default: 1% of it.
    - `num_steps`: the number of Golub-Kahan steps for each probe, a Python integer; more
        than n count as n. Or [`traceax.AdaptiveSteps`][], the default.
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][] with a real scalar `value`, from at most `k * num_steps`
    matvecs with the operator and as many with its transpose;
    [`traceax.AdaptiveSteps`][] adds one run. Memory: `2 num_steps` vectors for each probe
    of a block. `std_err` is the sampling error, with the effect of rounding on small
    singular values, and where steps are chosen the quadrature error. For `p < 1` the norm
    is a high power of the sum of powers, and `std_err` is half the increase of the norm
    when that sum rises by two of its standard errors. The interval is then wider above
    the value than below. `stats` has `"samples"` of the sum of powers; `"bracket"` and
    `"sample_brackets"` of the same sum, which bound the quadrature error where `p < 4`
    and not 2, and estimate it elsewhere; and `"ritz_values"`, the smallest and the
    largest singular value seen.

    Derivatives in the operator's arrays are of first order only. For the sum of powers
    they are estimates of $\\mathrm{Re}\\, \\mathrm{tr}(p (A^* A)^{p/2-1} A^* dA)$.
    Where singular values are zero, the norm with `p=1` has no derivative, and the
    result is a subgradient, 0 in those directions; with `p < 1` it is NaN.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer, or `p` not a Python number.
    - `ValueError`: `p` is not positive and finite; `k` or `num_steps` is too small; `key`
        is missing; `estimator` is not an `SLQEstimator`.
    - An `equinox` run-time error with `throw=True`: a matvec, or a power of a singular
        value, was not finite; rounding errors are a large part of the reported error; a
        tolerance was not met.

    ??? cite

        ```bibtex
        @article{ubaru2017fast,
            author  = {Ubaru, Shashanka and Chen, Jie and Saad, Yousef},
            title   = {Fast Estimation of $\\mathrm{tr}(f(A))$ via Stochastic {Lanczos}
                       Quadrature},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {38},
            number  = {4},
            pages   = {1075--1099},
            year    = {2017},
        }

        @article{golub1965calculating,
            author  = {Golub, Gene H. and Kahan, William},
            title   = {Calculating the Singular Values and Pseudo-Inverse of a Matrix},
            journal = {Journal of the Society for Industrial and Applied Mathematics,
                       Series B: Numerical Analysis},
            volume  = {2},
            number  = {2},
            pages   = {205--224},
            year    = {1965},
        }
        ```
    """
    operator = checked_operator(operator, square=False, second=p).operator
    p = _check_power(p)
    num_steps = check_steps(num_steps, min(operator.in_size(), operator.out_size()))
    check_instance("estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()")
    with explain_missing_adjoint():
        tall = operator if operator.out_size() >= operator.in_size() else operator.T
    task = _Schatten(
        estimator=estimator,
        function=SingularPower(p),
        gradient=LanczosGradient(),
        num_steps=num_steps,
        quantity=SchattenNorm(p),
    )
    return solve(
        task,
        enter(tall, square=False),
        k=k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )


def _check_power(p: Any) -> float:
    if isinstance(p, bool | Tracer) or not isinstance(p, int | float):
        raise TypeError(
            f"`p` must be a Python int or float. Found {p!r} of type "
            f"{type(p).__name__}. Pass, for example, `float(p)`; in compiled functions "
            "it must be static."
        )
    if not 0 < p < math.inf:
        fix = ""
        if p == math.inf:
            fix = (
                " The norm with `p=inf` is the largest singular value, of which "
                "`stats['ritz_values'][1]` of a call with another `p` is an estimate "
                "from below."
            )
        raise ValueError(f"`p` must be positive and finite. Found {p}.{fix}")
    return float(p)
