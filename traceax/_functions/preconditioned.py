"""Log-determinants by way of a preconditioner P:

    log det A = log det P + tr log(M),    M = P^(-1/2) A P^(-1/2).

An estimator of functions estimates the trace for the operator M; everything that it
returns about the value is then moved by the exact `log det P`, `log_det` in the code.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree, Scalar

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler
from .._core.shifted import Shifted
from .._core.solution import Estimate
from .._preconditioners.base import (
    AbstractPreconditioner,
    AbstractPreconditioning,
    check_size,
)
from .._quadrature.function_tree import FunctionTree
from .._quadrature.functions import AbstractSpectralFunction, Log
from .._quadrature.singular_functions import SingularLog
from .._run.budget import Budget, default_max_k
from .._run.execution import AbstractExecution
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps
from .base import AbstractFunctionEstimator
from .gradients import AbstractFunctionGradient


def check_logarithm(
    operator: FlatOperator, function: AbstractSpectralFunction | FunctionTree
) -> None:
    """Raise unless the function is the logarithm of a Hermitian operator: for no other
    function does a preconditioner split the trace."""
    if not isinstance(function, Log | SingularLog):
        raise ValueError(
            "`preconditioner` is for `traceax.Log()`. Found the function "
            f"`{type(function).__name__}`. Leave `preconditioner` out."
        )
    if not isinstance(function, Log) or not operator.hermitian:
        raise ValueError(
            "`operator` must be tagged positive semidefinite where there is a "
            "`preconditioner`. Found `operator` without the tag. If it is semidefinite, "
            "say so: `traceax.as_operator(operator, "
            "tags=lineax.positive_semidefinite_tag)`; if not, leave `preconditioner` out."
        )


def check_preconditioner(preconditioner: Any, size: int | None = None) -> None:
    """Raise unless this is a preconditioner, of this size where the size is given, or a
    rule that makes one."""
    example = "nystrom_preconditioner(operator, rank, key=key)"
    if isinstance(preconditioner, lx.AbstractLinearOperator):
        raise TypeError(
            "`preconditioner` must be an instance of `traceax.AbstractPreconditioner`. "
            "Found a `lineax` operator, whose determinant is not known. Pass, for "
            f"example, `traceax.{example}`."
        )
    if not isinstance(preconditioner, AbstractPreconditioning):
        check_instance("preconditioner", preconditioner, AbstractPreconditioner, example)
    if isinstance(preconditioner, AbstractPreconditioner) and size is not None:
        check_size(preconditioner, size)


class Prepared(eqx.Module):
    """The preconditioner of a call, and the arguments for the estimator of the
    preconditioned operator.

    - `preconditioner`: P.
    - `call`: the arguments `k`, `num_steps`, `key` and `execution`.
    - `is_own`: whether this or the earlier run made P. Then a resumed run must take P
        from its state: the earlier samples belong to that P, and to no other.
    """

    preconditioner: AbstractPreconditioner
    call: dict[str, Any]
    is_own: bool

    @classmethod
    def of(
        cls,
        preconditioning: AbstractPreconditioning,
        operator: FlatOperator,
        call: dict[str, Any],
    ) -> "Prepared":
        """Prepare the preconditioner; `call` has the keyword arguments of `prepare`."""
        k, is_own = call["k"], not isinstance(preconditioning, AbstractPreconditioner)
        if not isinstance(k, Budget) or k.state is None:
            return cls(preconditioning.prepare(operator, **call), call, is_own)
        # A pair made by `state`: the estimator resumes from its own part alone.
        preconditioner, loop = k.state
        call = call | {"k": dataclasses.replace(k, state=loop)}
        if not is_own:
            preconditioner = preconditioning.prepare(operator, **call)
        return cls(preconditioner, call, is_own)

    def state(self, inner: PyTree[Array] | None) -> PyTree[Array] | None:
        """The state from which a later call resumes: the preconditioner, if this run made
        it, and the estimator's `inner` state. None unless the budget is adaptive."""
        if inner is None:
            return None
        return self.preconditioner if self.is_own else None, inner


class Preconditioned(AbstractFunctionEstimator):
    """A log-determinant by way of a preconditioner P: the exact $\\log\\det P$, plus an
    estimate of $\\mathrm{tr} \\log(P^{-1/2} A P^{-1/2})$. `traceax.logdet(...,
    preconditioner=P)` uses it.

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
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key1)
        estimator = tx.Preconditioned(tx.KrylovAwareEstimator(), preconditioner)
        solution = tx.logdet(operator, estimator, k=8, num_steps=5, key=key2)
        print(solution.value, "+-", solution.std_err)
        ```

    Cost: the matvecs of the estimator, and twice as many products with $P^{-1/2}$. The
    matvecs that P was made from count in `"num_matvecs"`. Memory: the arrays of the
    estimator and of P.

    **Attributes:**

    - `estimator`: estimates the second term. Its `lower_bound` is a bound for A.
    - `preconditioner`: P, of the size of the operator; for a negative semidefinite
        operator, a preconditioner of its negative. Or [`traceax.AutoPreconditioner`][],
        which makes one for the call.
    """

    estimator: AbstractFunctionEstimator
    preconditioner: AbstractPreconditioning

    def __init__(
        self,
        estimator: AbstractFunctionEstimator,
        preconditioner: AbstractPreconditioning,
    ):
        """**Arguments:**

        - `estimator`: as above.
        - `preconditioner`: as above.

        **Raises:**

        `TypeError` if `estimator` is not an [`traceax.AbstractFunctionEstimator`][], or
        `preconditioner` not an [`traceax.AbstractPreconditioning`][].
        """
        check_instance(
            "estimator", estimator, AbstractFunctionEstimator, "SLQEstimator()"
        )
        check_preconditioner(preconditioner)
        self.estimator = estimator
        self.preconditioner = preconditioner

    @property
    def sampler(self) -> AbstractSampler:  # pyright: ignore
        return self.estimator.sampler

    @property
    def min_probes(self) -> int:  # pyright: ignore
        return self.estimator.min_probes

    @property
    def most_steps(self) -> int:  # pyright: ignore
        return self.estimator.most_steps

    def default_max_k(self, operator: FlatOperator) -> int:
        # A derivative takes all probes as one array.
        most = default_max_k(operator.size)
        return min(most, self.estimator.default_max_k(operator))

    def rescaled(self, factor: Scalar, least: Scalar | None = None) -> "Preconditioned":
        inner = self.estimator.rescaled(factor, least)
        return Preconditioned(inner, self.preconditioner)

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        check_logarithm(operator, function)
        call: dict[str, Any] = {"k": k, "num_steps": num_steps}
        call |= {"key": key, "execution": execution}
        prepared = Prepared.of(self.preconditioner, operator, call)
        preconditioner = prepared.preconditioner
        log_det = preconditioner.logdet
        # From A >= bound I follows P^(-1/2) A P^(-1/2) >= (bound / max P) I.
        estimator = self.estimator.rescaled(
            1 / preconditioner.largest, preconditioner.least
        )
        estimate = estimator.run(
            preconditioner.apply_to(operator),
            function,
            gradient,
            **prepared.call,
            # A relative tolerance is for the whole log-determinant, not for the estimated
            # term alone.
            quantity=Shifted(quantity, offset=jax.lax.stop_gradient(log_det)),
        )
        # This changes the derivative of the value alone, and needs the probes for it.
        if estimate.probes is not None:
            probes = estimate.probes()
            value = preconditioner.control(operator, estimate.value, probes, execution)
            estimate = dataclasses.replace(estimate, value=value)
        return dataclasses.replace(
            estimate.moved(log_det),
            num_matvecs=estimate.num_matvecs + preconditioner.num_matvecs,
            state=prepared.state(estimate.state),
            ends=preconditioner.ends(estimate.extra.get("ritz_values")),
            method=f"{estimate.method or type(self.estimator).__name__}, preconditioned",
        )
