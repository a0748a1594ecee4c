"""A function of a Hermitian operator on a subspace, and the task that treats it apart
from the rest."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._quadrature.domain import slopes_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._run.wrapped import AbstractWrappedTask
from .task import AbstractTaskOfFunction


class FunctionOfEigenvalues(eqx.Module):
    """The function of a task, in terms of the eigenvalues x of the user's operator:
    `g(x) = f(x)`, `f(-x)` where the task takes the negative, or `f(|x|)`.

    - `flipped`: whether the task takes the negative of the operator.
    - `eps`: machine epsilon of the matvecs.
    """

    function: AbstractSpectralFunction
    flipped: bool = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @classmethod
    def of(
        cls, task: AbstractTaskOfFunction, operator: FlatOperator
    ) -> "FunctionOfEigenvalues":
        # `with_subspaces` has refused trees of functions.
        function: Any = task.function
        return cls(function, task.operand(operator) is not operator, float(operator.eps))

    def _operand(self, x: Real[Array, " r"]) -> Real[Array, " r"]:
        if self.function.of_singular_values:
            return jnp.abs(x)
        return -x if self.flipped else x

    def values(self, x: Real[Array, " r"]) -> Inexact[Array, " r"]:
        return values_at(self.function, self._operand(x), self.eps)

    def slopes(self, x: Real[Array, " r"]) -> Inexact[Array, " r"]:
        """g'(x)."""
        slopes = slopes_at(self.function, self._operand(x), self.eps)
        if self.function.of_singular_values:
            return jnp.sign(x) * slopes
        return -slopes if self.flipped else slopes

    def eigenvalues(self, ends: Real[Array, "2"]) -> Real[Array, "2"]:
        """The smallest and the largest x, or |x| for a function of singular values, from
        the ends of the spectrum of the task's operand."""
        return -ends[::-1] if self.flipped else ends


def read_on_subspace(
    quantity: AbstractQuantity,
    values: Inexact[Array, " r"],
    vectors: Inexact[Array, "n r"],
) -> Inexact[Array, "*q"]:
    """A linear quantity of `V diag(values) V*`; real for real values."""
    # Columns of zeros may have infinite values.
    values = jnp.where(jnp.any(vectors != 0, axis=0), values, 0)
    images = vectors * values.astype(jnp.result_type(values, vectors))
    parts = jax.vmap(quantity.read, in_axes=1)(vectors.astype(images.dtype), images)
    total = jnp.sum(parts, axis=0)
    return total if jnp.iscomplexobj(values) else total.real


class AbstractFunctionSubspaceTask(AbstractWrappedTask):
    """A quantity of a function of an operator, with a subspace treated apart from the
    rest.

    - `columns`: a basis of the subspace, of shape `(n, r)`, of any rank.
    """

    columns: eqx.AbstractVar[Inexact[Array, "n r"]]

    def beside(self, known: Array) -> "AbstractFunctionSubspaceTask":
        """The same task, with a further part that is known."""
        return eqx.tree_at(lambda x: x.task, self, self.task.beside(known))  # pyright: ignore

    @property
    def innermost(self) -> AbstractTaskOfFunction:
        """The task of the function itself."""
        inner = self.task
        while isinstance(inner, AbstractFunctionSubspaceTask):
            inner = inner.task
        assert isinstance(inner, AbstractTaskOfFunction)
        return inner
