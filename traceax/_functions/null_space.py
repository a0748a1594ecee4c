"""Functions of a Hermitian operator on the complement of its null space.

With A Q = 0, and A' of (2) in `_operators/subspace.py`, the eigenvalues of A' are those
of A on the complement, and r times the level s. So, by (3), a quantity of f(A) on the
complement is the quantity of f(A') minus f(s) times that of Q Q*. A' is not singular, and
every estimator, preconditioner and exact answer can take it as any other operator.
"""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._core.solution import Estimate
from .._numerics.dense import two_norm
from .._operators.door import Facts
from .._operators.spectrum import Spectrum
from .._operators.subspace import level_of, Subspace
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .on_subspace import (
    AbstractFunctionSubspaceTask,
    FunctionOfEigenvalues,
    read_on_subspace,
)
from .task import AbstractTaskOfFunction


# A product with a vector of the null space may be so many times the rounding error of a
# product with another vector. A larger factor lets pass what is an eigenvalue; a smaller
# one refuses null spaces that are as precise as the operator.
_TOLERANCE = 8


class WithoutNullSpace(AbstractFunctionSubspaceTask):
    """A quantity of a function on the complement of a null space."""

    task: AbstractTaskOfFunction | AbstractFunctionSubspaceTask
    columns: Inexact[Array, "n r"]

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        facts = Facts(None, None, facts.spectrum, None, operator.size)
        return self.task.exact_cost(operator, facts)

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        complement = _Complement.of(self, operator, execution)
        facts = complement.facts(facts)
        return complement.finish(
            complement.task.exact(complement.operator, facts, execution)
        )

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        complement = _Complement.of(self, operator, execution)
        return complement.finish(
            complement.task.run(complement.operator, k, key, execution)
        )


class _Complement(eqx.Module):
    """The complement of a null space.

    - `task`: the task for A', with the part that is known.
    - `operator`: A'.
    - `level`, `rank`: s and r.
    - `residual`: the norm of a product with a vector of the null space, over that with
        another vector.
    - `num_matvecs`: the number of matvecs that all this took.
    """

    task: AbstractTaskOfFunction | AbstractFunctionSubspaceTask
    operator: FlatOperator
    level: Real[Array, ""]
    rank: Int[Array, ""]
    residual: Real[Array, ""]
    num_matvecs: int = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        outer: WithoutNullSpace,
        operator: FlatOperator,
        execution: AbstractExecution,
    ) -> "_Complement":
        def product(x):
            return execution.matmat(operator.frozen, x)

        subspace = Subspace.of(outer.columns)
        inside, outside = subspace.generic_vectors()
        images = product(jnp.stack([inside, outside], axis=1))
        error, size = two_norm(images[:, 0]), two_norm(images[:, 1])
        residual = error / jnp.where(size > 0, size, 1)
        residual = jnp.where((size > 0) | (error == 0), residual, jnp.inf)
        level, further = level_of(
            outside,
            subspace.remove(images[:, 1]),
            operator.sign,
            lambda x: product(x[:, None])[:, 0],
        )
        compressed = subspace.compress(operator, level)
        innermost = outer.innermost
        value = FunctionOfEigenvalues.of(innermost, compressed).values(level[None])
        known = read_on_subspace(
            innermost.quantity,
            -jnp.broadcast_to(value, subspace.present.shape),
            subspace.basis,
        )
        return cls(
            task=outer.task.beside(known),
            operator=compressed,
            level=level,
            rank=subspace.rank,
            residual=residual,
            num_matvecs=2 + further,
        )

    def facts(self, facts: Facts) -> Facts:
        """What is known about A', from facts about A."""
        spectrum = facts.spectrum
        if spectrum is not None:
            eigenvalues = spectrum.eigenvalues
            order = jnp.argsort(jnp.argsort(jnp.abs(eigenvalues)))
            zero = order < self.rank
            spectrum = Spectrum(jnp.where(zero, self.level, eigenvalues))
        return Facts(None, None, spectrum, None, self.operator.size)

    def finish(self, estimate: Estimate) -> Estimate:
        extra = estimate.extra | {"null_space_residual": self.residual}
        if "sign" in extra:
            # A' has the eigenvalue s with the multiplicity r.
            extra["sign"] = extra["sign"] * jnp.sign(self.level) ** self.rank
        wrong = self.residual > _TOLERANCE * self.operator.rounding
        result = failure(wrong, RESULTS.not_null_space)
        return dataclasses.replace(
            estimate,
            num_matvecs=estimate.num_matvecs + self.num_matvecs,
            result=first_failure(result, estimate.result),
            extra=extra,
        )
