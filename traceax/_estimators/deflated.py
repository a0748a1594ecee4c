"""Linear quantities of a Hermitian operator, with a subspace that is read exactly.

By (1) of `_operators/subspace.py`, `A = P A P + W Q* + Q W* P` with W = A Q. So a linear
quantity is the quantity of P A P, which an estimator is given, plus what it reads from
the pairs (left, image) = (q_i, w_i) and (P w_i, q_i). This holds for any basis Q. If it
spans the eigenvectors of the largest eigenvalues, P A P has little left to sample.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.flat import FlatOperator
from .._core.shifted import Shifted
from .._core.solution import Estimate
from .._operators.basis import basis_columns
from .._operators.checks import check_hermitian
from .._operators.door import EnteredOperator, Facts
from .._operators.subspace import Subspace
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.wrapped import AbstractWrappedTask
from .base import Measurement


class DeflatedMeasurement(AbstractWrappedTask):
    """A linear quantity whose part on a subspace is exact. It takes r matvecs of the
    budget; the exact answer ignores the subspace.

    - `columns`: a basis of the subspace, of shape `(n, r)`, of any rank.
    """

    task: Measurement
    columns: Inexact[Array, "n r"]

    @property
    def min_matvecs(self) -> int:
        return self.task.min_matvecs + self.columns.shape[1]

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        return self.task.exact(operator, facts, execution)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        task, count = self.task, self.columns.shape[1]
        subspace, quantity = Subspace.of(self.columns), task.quantity.open()
        product = eqx.filter_checkpoint(lambda operator, x: operator.mv(x))
        rows = execution.map(product, operator, subspace.basis.T)
        outside = subspace.remove(rows.T).T
        left = jnp.concatenate([subspace.basis.T, outside])
        parts = jax.vmap(quantity.read)(left, jnp.concatenate([rows, subspace.basis.T]))
        known = jnp.sum(parts, axis=0)
        size = jax.lax.stop_gradient(jnp.sum(jnp.abs(parts), axis=0))
        if isinstance(k, Budget):
            k = dataclasses.replace(
                k.limited_to(k.max_k - count), spent=jnp.asarray(count, jnp.int32)
            )
            # Relative tolerances are for the whole quantity.
            offset = jax.lax.stop_gradient(known)
            task = dataclasses.replace(task, quantity=Shifted(quantity, offset))
        else:
            k = k - count
        estimate = task.run(subspace.compress(operator), k, key, execution)
        return dataclasses.replace(
            estimate.moved(known, of_sample=quantity.scalars(known)),
            num_matvecs=estimate.num_matvecs + count,
            magnitude=estimate.magnitude + size,
            method=f"{estimate.method or task.name}, {count} vectors deflated",
        )


def deflated(
    task: Measurement, operator: EnteredOperator, vectors: Any, k: Any
) -> Measurement | DeflatedMeasurement:
    """The task with these vectors deflated, if there are any; `k` is the budget."""
    if vectors is None:
        return task
    flat = operator.flat
    if not task.quantity.linear:
        raise ValueError(
            "`deflation` is for quantities that are linear in the operator. Found "
            f"`{type(task.quantity).__name__}`. Leave `deflation` out."
        )
    check_hermitian(flat)
    columns = basis_columns("deflation", vectors, operator.structure, flat.dtype)
    count = columns.shape[1]
    if count == 0:
        return task
    least = task.min_matvecs + count
    if isinstance(k, int) and 0 < k < min(least, operator.size):
        raise ValueError(
            f"`deflation` takes a matvec for each vector, and `{task.name}` at least "
            f"{task.min_matvecs}. Found k={k} for {count} vectors. Raise `k` to {least}, "
            "or pass fewer vectors."
        )
    return DeflatedMeasurement(task=task, columns=columns)  # pyright: ignore
