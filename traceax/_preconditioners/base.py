"""Preconditioners P with a known determinant, which split a log-determinant:

    log det A = log det P + tr log(P^(-1/2) A P^(-1/2)).

The first term is exact, and the second is estimated: the closer P is to A, the smaller
its variance, and the fewer Lanczos steps it needs. Any root W of `P = W W*` can take the
place of P^(1/2): `W^-1 A W^-*` has the same eigenvalues.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.chirp import generic_vector
from .._core.flat import FlatOperator, freeze
from .._numerics.dense import two_norm
from .._operators.door import unflatten
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps


# A few iterations find the norm to within a factor of 2, unless it belongs to a vector
# that is nearly orthogonal to the first one.
_POWER_ITERATIONS = 8


class AbstractPreconditioning(eqx.Module):
    """An argument `preconditioner` of [`traceax.logdet`][]: a preconditioner, or a rule
    that makes one for the call.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Fixed(tx.AbstractPreconditioning):
            # An automatic preconditioner that pretends to have little to spend.
            rule: tx.AutoPreconditioner = tx.AutoPreconditioner(0.1)

            def prepare(self, operator, *, k, num_steps, key, execution):
                settings = {"key": key, "execution": execution}
                return self.rule.prepare(operator, k=4, num_steps=4, **settings)

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key = jax.random.key(0)
        solution = tx.logdet(operator, k=10, key=key, preconditioner=Fixed())
        print(solution.value, "+-", solution.std_err)
        ```
    """

    @abc.abstractmethod
    def prepare(
        self,
        operator: FlatOperator,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> "AbstractPreconditioner":
        """The preconditioner for a call.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.
        - `k`, `num_steps`: the budget of the call, and its number of Lanczos steps.
        - `key`, `execution`: the arguments of the call.

        **Returns:**

        A preconditioner of the size of the operator, constant to derivatives.
        """


class AbstractPreconditioner(AbstractPreconditioning):
    """A positive definite $P \\approx A$ with a known determinant, for
    [`traceax.logdet`][]: $\\log\\det A = \\log\\det P + \\mathrm{tr}
    \\log(P^{-1/2} A P^{-1/2})$.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Jacobi(tx.AbstractPreconditioner):
            # The diagonal of A.
            diagonal: jax.Array
            num_matvecs: int = 0

            @property
            def size(self):
                return self.diagonal.size

            @property
            def logdet(self):
                return jnp.sum(jnp.log(self.diagonal))

            @property
            def largest(self):
                return jnp.max(self.diagonal)

            def power(self, exponent, x):
                return (self.diagonal**exponent * x.T).T

        scales = jnp.linspace(1.0, 1e4, 300)
        matrix = jnp.diag(scales) + 0.1 * jnp.ones((300, 300))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        settings = {"k": 10, "num_steps": 5, "key": jax.random.key(0)}
        plain = tx.logdet(operator, **settings)
        jacobi = tx.logdet(operator, preconditioner=Jacobi(scales), **settings)
        exact = jnp.linalg.slogdet(matrix)[1]
        print(abs(jacobi.value - exact) < abs(plain.value - exact) / 100)  # True
        ```

    **Attributes:**

    - `size`: n.
    - `logdet`: $\\log\\det P$, a real scalar.
    - `largest`: the largest eigenvalue of P, a real scalar.
    - `num_matvecs`: the number of matvecs with A that it was made from.
    - `least`: a lower bound of the eigenvalues of $P^{-1/2} A P^{-1/2}$, or `None`.
    """

    num_matvecs: eqx.AbstractVar[int | Int[Array, ""]]

    def prepare(self, operator: FlatOperator, **_: Any) -> "AbstractPreconditioner":
        """Return this preconditioner, or raise if the operator has another size."""
        check_size(self, operator.size)
        return self

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """n, a Python integer: the number of rows of P and of A."""

    @property
    @abc.abstractmethod
    def logdet(self) -> Real[Array, ""]:
        """The exact $\\log\\det P$, a real scalar."""

    @property
    @abc.abstractmethod
    def largest(self) -> Real[Array, ""]:
        """The largest eigenvalue of P, a real scalar: it divides lower bounds of A."""

    @property
    def least(self) -> Real[Array, ""] | None:
        return None

    @abc.abstractmethod
    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p x$.

        **Arguments:**

        - `exponent`: p: -1 in a solve, and -1/2 in a log-determinant.
        - `x`: a flat vector, shape `(n,)`, or several as columns, shape `(n, k)`.

        **Returns:**

        An array of the shape and dtype of `x`.
        """

    def whiten(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " n *k"]:
        """$W^{-1} x$ for a root W of P, $P = W W^*$; by default $P^{-1/2} x$.

        **Arguments:**

        - `x`: as for `power`.

        **Returns:**

        An array of the shape and dtype of `x`.
        """
        return self.power(-0.5, x)

    def whiten_adjoint(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " n *k"]:
        """$W^{-*} x$ for the root of `whiten`; by default $P^{-1/2} x$."""
        return self.power(-0.5, x)

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$, by default from `power` of n unit vectors in turn.

        **Arguments:**

        - `exponent`: p, -1 for [`traceax.diagonal_of_function`][].

        **Returns:**

        A real array of shape `(n,)`.
        """

        def entry(index):
            unit = jnp.zeros_like(self.largest, shape=self.size).at[index].set(1)
            return self.power(exponent, unit)[index].real

        return jax.lax.map(entry, jnp.arange(self.size))

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The structure of vectors for `inverse`, by default arrays of shape `(n,)`."""
        return jax.ShapeDtypeStruct((self.size,), self.largest.dtype)

    def inverse(self) -> lx.FunctionLinearOperator:
        """$P^{-1}$ as a positive semidefinite `lineax` operator: pass it to
        `lineax.linear_solve` as `options={"preconditioner": preconditioner.inverse()}`.

        **Returns:**

        An operator on vectors of the structure of A, constant to derivatives.
        """
        structure, tags = self.structure, lx.positive_semidefinite_tag
        dtype = jnp.result_type(*jax.tree.leaves(structure))
        constant = freeze(self)
        return unflatten(lambda x: constant.power(-1.0, x), structure, dtype, tags)

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        """Add a control variate: a term that is zero, and whose derivative has the mean
        zero and cancels sampling error in the derivative of the estimate.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.
        - `value`: the estimate of $\\mathrm{tr} \\log(P^{-1/2} A P^{-1/2})$.
        - `probes`: the probes of that estimate, shape `(n, k)`.
        - `execution`: where matvecs are made.

        **Returns:**

        A number equal to `value`; by default `value` itself, without a control variate.
        """
        return value

    def ends(self, ritz_values: Real[Array, "2"] | None) -> Real[Array, "2"] | None:
        """Bounds of the spectrum of A from those of $P^{-1/2} A P^{-1/2}$, for a positive
        semidefinite A. The lower one is an estimate, from power iterations with
        $P^{-1}$."""
        if ritz_values is None:
            return None
        vector = generic_vector(self.size, self.largest.dtype)
        norm = jnp.ones_like(self.largest)
        for _ in range(_POWER_ITERATIONS):
            vector = self.power(-1.0, vector / norm.astype(vector.dtype))
            norm = two_norm(vector)
            norm = jnp.where(norm > 0, norm, 1)
        low, high = ritz_values
        return jnp.stack([low / (2 * norm), high * self.largest])

    def apply_to(self, operator: FlatOperator) -> FlatOperator:
        """$W^{-1} A W^{-*}$ for the root of `whiten`; by default $P^{-1/2} A P^{-1/2}$.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.

        **Returns:**

        Another such map, of the same size, dtype and tags.
        """
        return dataclasses.replace(operator, fn=Congruence(operator.fn, self))


def check_size(preconditioner: AbstractPreconditioner, n: int) -> None:
    """Raise unless the preconditioner has n rows."""
    if preconditioner.size != n:
        raise ValueError(
            "`preconditioner` must be of the size of `operator`. Found "
            f"{preconditioner.size} and {n}. Make it from this operator, for example "
            "`traceax.nystrom_preconditioner(operator, rank, key=key)`."
        )


class Congruence(eqx.Module):
    """`W^-1 A W^-*` for `P = W W*`, for each of `stacked` operators whose images `fn`
    joins."""

    fn: Callable[[Array], Array]
    preconditioner: AbstractPreconditioner
    stacked: int = eqx.field(static=True, default=1)

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        outer = self.preconditioner
        with standard_promotion():
            images = jnp.split(self.fn(outer.whiten_adjoint(vector)), self.stacked)
            return jnp.concatenate([outer.whiten(image) for image in images])
