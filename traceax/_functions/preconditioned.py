import dataclasses
from typing import Any

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree, Scalar

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Shifted, Trace
from .._core.sampler import AbstractSampler
from .._core.solution import Estimate
from .._preconditioners.base import (
    AbstractPreconditioner,
    AbstractPreconditioning,
    check_size,
)
from .._quadrature.functions import AbstractSpectralFunction, Log
from .._quadrature.singular_functions import SingularLog
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps
from .base import AbstractFunctionEstimator
from .gradients import AbstractFunctionGradient


def check_logarithm(operator: FlatOperator, function: AbstractSpectralFunction) -> None:
    """Raise where a preconditioner says nothing of the function."""
    if not isinstance(function, Log | SingularLog):
        raise ValueError(
            "`preconditioner` is for `traceax.Log()`. Found the function "
            f"`{type(function).__name__}`. Leave `preconditioner` out."
        )
    if not isinstance(function, Log) or not operator.hermitian:
        raise ValueError(
            "`operator` must be tagged positive semidefinite where there is a "
            "`preconditioner`. Found `operator` without the tag. If it is semidefinite, "
            "say so: `lineax.TaggedLinearOperator(operator, "
            "lineax.positive_semidefinite_tag)`; if not, leave `preconditioner` out."
        )


def check_preconditioner(preconditioner: Any, size: int | None = None) -> None:
    """Raise unless it is one, of this size if that is known, or makes one."""
    example = "nystrom_preconditioner(operator, rank, key=key)"
    if isinstance(preconditioner, lx.AbstractLinearOperator):
        raise TypeError(
            "`preconditioner` must be an instance of `traceax.AbstractPreconditioner`. "
            "Found a `lineax` operator, of which the determinant is not known. Pass, for "
            f"example, `traceax.{example}`."
        )
    if not isinstance(preconditioner, AbstractPreconditioning):
        check_instance("preconditioner", preconditioner, AbstractPreconditioner, example)
    if isinstance(preconditioner, AbstractPreconditioner) and size is not None:
        check_size(preconditioner, size)


class Prepared(eqx.Module):
    """The preconditioner of a call, and the arguments of the call that takes it. A run
    that goes on has that of the earlier one, if it was made there: samples are of the
    preconditioned operator."""

    preconditioner: AbstractPreconditioner
    call: dict[str, Any]
    made: bool

    @classmethod
    def of(
        cls,
        preconditioning: AbstractPreconditioning,
        operator: FlatOperator,
        call: dict[str, Any],
    ) -> "Prepared":
        """`call` has the arguments of `prepare`."""
        k, made = call["k"], not isinstance(preconditioning, AbstractPreconditioner)
        if not isinstance(k, Budget) or k.state is None:
            return cls(preconditioning.prepare(operator, **call), call, made)
        earlier, loop = k.state
        rest: dict[str, Any] = call | {"k": dataclasses.replace(k, state=loop)}
        if not made:
            earlier = preconditioning.prepare(operator, **rest)
        return cls(earlier, rest, made)

    def state(self, inner: PyTree[Array] | None) -> PyTree[Array] | None:
        """That of an adaptive run."""
        return (
            None if inner is None else (self.preconditioner if self.made else None, inner)
        )


class Preconditioned(AbstractFunctionEstimator):
    """A log-determinant by way of a preconditioner P: $\\log\\det P$, which is known, and
    an estimate of $\\mathrm{tr} \\log(P^{-1/2} A P^{-1/2})$. `traceax.logdet(...,
    preconditioner=P)` makes one.

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

    Cost: that of the estimator, for an operator one product of which costs one with A and
    two with $P^{-1/2}$. The products that P was made from count in `"num_matvecs"`.
    Memory: that of the estimator, and what P holds.

    **Attributes:**

    - `estimator`: estimates the second part. Its `lower_bound` is a bound for A.
    - `preconditioner`: P, of the size of the operator; for a negative semidefinite
        operator, a preconditioner of its negative. Or [`traceax.AutoPreconditioner`][],
        which makes one.
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

        `TypeError` for arguments of another kind.
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
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        check_logarithm(operator, function)
        call: dict[str, Any] = {"k": k, "num_steps": num_steps}
        call |= {"key": key, "execution": execution}
        prepared = Prepared.of(self.preconditioner, operator, call)
        outer = prepared.preconditioner
        known = outer.logdet
        # From A >= bound I follows P^(-1/2) A P^(-1/2) >= (bound / max P) I.
        estimate = self.estimator.rescaled(1 / outer.largest, outer.least).run(
            outer.apply_to(operator),
            function,
            gradient,
            **prepared.call,
            quantity=Shifted(quantity, jax.lax.stop_gradient(known)),
        )
        value, samples, extra = estimate.value, estimate.samples, estimate.extra
        if estimate.probes is not None:
            value = outer.control(operator, value, estimate.probes(), execution)
        ends = "bracket", "sample_brackets"
        shifted = {name: extra[name] + known for name in ends if name in extra}
        estimate = estimate.map_bounds(lambda x: x.at[:, 0].add(known))
        return dataclasses.replace(
            estimate,
            value=value + known,
            samples=None if samples is None else samples + known,
            num_matvecs=estimate.num_matvecs + outer.num_matvecs,
            extra=extra | shifted,
            state=prepared.state(estimate.state),
        )
