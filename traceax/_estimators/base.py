"""The base class of estimators, and the task that an estimator and a quantity make."""

import abc
import dataclasses
import re
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.solution import Estimate
from .._operators.convert import OperatorLike
from .._operators.door import enter, Facts
from .._operators.gram import gram
from .._run.budget import Budget, default_max_k
from .._run.exact import exact, exact_from_vector, squares_of_rows
from .._run.execution import AbstractExecution, Local
from .._run.solve import AbstractTask, solve


class AbstractEstimator(eqx.Module):
    """An estimator of the trace and other quantities, an argument of
    [`traceax.trace`][] and [`traceax.diagonal`][].

    To write one, subclass [`traceax.AbstractStreamingEstimator`][] (independent samples)
    or [`traceax.AbstractSketchEstimator`][] (a block of probes taken together).

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Frugal(tx.AbstractEstimator):
            # XTrace, or Hutchinson where its arrays would not fit.
            min_matvecs: ClassVar[int] = 2

            def measure(self, quantity, operator, k, key, execution):
                fits = operator.size < 10**6
                chosen = tx.XTraceEstimator() if fits else tx.HutchinsonEstimator()
                return chosen.measure(quantity, operator, k, key, execution)

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Frugal(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```

    **Attributes:**

    - `min_matvecs`: the smallest `k` that it works with.
    - `quadratic`: whether it estimates norms by itself. Other estimators estimate norms
        from the operator $A A^*$.
    - `takes_known_diagonal`: whether it returns the exact answer instead of an estimate
        if the diagonal of the operator is known from at most `k` matvecs.
    - `further_std_errs`: the names of entries of `stats` with further standard errors of
        a scalar. An exact answer has them too, and they are 0.
    """

    min_matvecs: eqx.AbstractClassVar[int]
    quadratic: ClassVar[bool] = False
    takes_known_diagonal: ClassVar[bool] = False
    further_std_errs: ClassVar[tuple[str, ...]] = ()
    fallback: ClassVar[str] = "HutchinsonEstimator"

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def num_strata(self) -> int:
        """The number of strata of the probes."""
        return 1

    @property
    def smallest_budget(self) -> int:
        """`min_matvecs`, or a whole sweep over strata."""
        return max(self.min_matvecs, self.num_strata)

    @abc.abstractmethod
    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """Estimate a quantity of an operator.

        **Arguments:**

        - `quantity`: what to estimate, such as the trace.
        - `operator`: a square operator of size n, as a map of flat vectors.
        - `k`: the budget of matrix-vector products, a number below n or adaptive.
        - `key`: a JAX PRNG key, or `None` if the caller gave none.
        - `execution`: where matvecs are made, and in blocks of which size.

        **Returns:**

        An `Estimate` of `traceax.internal`, made from at most `k` matvecs: the value, of
        the shape that `quantity.read` returns; its standard error, real and of the same
        shape; and the samples, of which the value is the mean.

        **Raises:**

        `ValueError` for a quantity that the estimator does not support.
        """

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        """The largest budget where `Adaptive.max_k` is left out, 10,000 unless a subclass
        overrides this. An estimator with buffers that grow with the budget does.

        **Arguments:**

        - `operator`: a square operator of size n, as a map of flat vectors.
        - `k`: the adaptive budget, of which `round_size` is known.

        **Returns:**

        A Python integer, 1 or more.
        """
        return default_max_k()

    def estimate(
        self, key: PRNGKeyArray, operator: OperatorLike, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """The call of traceax 1.0: `value, stats = estimator.estimate(key, operator, k)`.

        **Arguments:**

        - `key`, `operator`, `k`: as for [`traceax.trace`][].

        **Returns:**

        `value` and `stats` of the [`traceax.Solution`][] of [`traceax.trace`][].

        **Raises:**

        The same errors as [`traceax.trace`][].
        """
        task = Measurement(estimator=self, quantity=Trace())
        solution = solve(
            task, enter(operator), k=k, key=key, state=None, execution=Local(), throw=True
        )
        return solution.value, solution.stats

    def __call__(
        self, key: PRNGKeyArray, operator: OperatorLike, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """An alias of `estimate`."""
        return self.estimate(key, operator, k)


# The name in traceax 1.0.
AbstractTraceEstimator = AbstractEstimator


class Measurement(AbstractTask):
    """The task of estimating a quantity with an estimator.

    A quadratic quantity that the estimator cannot read, such as `|A|_F^2`, is estimated
    as a linear one of `A A*`, here its trace. Each matvec of `A A*` costs two of A, one
    of them with the adjoint.
    """

    estimator: AbstractEstimator
    quantity: AbstractQuantity

    @property
    def direct(self) -> bool:
        """Whether the estimator is applied to the operator itself, and not to `A A*`."""
        return self.quantity.linear or self.estimator.quadratic

    @property
    def min_matvecs(self) -> int:
        return self.estimator.smallest_budget * (1 if self.direct else 2)

    @property
    def fallback(self) -> str:
        return self.estimator.fallback

    @property
    def name(self) -> str:
        return self.estimator.name

    @property
    def title(self) -> str:
        names = [_in_words(part) for part in self.quantity.parts]
        return ", ".join(dict.fromkeys(names)).capitalize()

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        if self.quantity.rows_only and facts.rows is not None:
            return 0
        if self.estimator.takes_known_diagonal and self.quantity.diagonal_only:
            return facts.diagonal_cost
        if self.quantity.linear:
            return operator.size
        # Norms are read from the columns, or from the rows where there are fewer.
        return min(operator.size, operator.num_rows)

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        if self.direct:
            return self.estimator.default_max_k(operator, k)
        return 2 * self.estimator.default_max_k(operator, k.halved())

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        quantity = self.quantity.open()
        of_gram = quantity.of_gram()
        if quantity.rows_only and facts.rows is not None:
            answer = exact_from_vector(quantity, facts.rows, 0)
        elif of_gram is not None and operator.num_rows < operator.size:
            squares = squares_of_rows(operator, execution)
            answer = exact_from_vector(of_gram, squares, operator.num_rows)
        elif quantity.diagonal_only and facts.diagonal is not None:
            answer = exact_from_vector(quantity, facts.diagonal, facts.diagonal_cost)
        else:
            answer = exact(quantity, operator, execution)
        if answer.value.ndim > 0:
            return answer
        extra = dict.fromkeys(self.estimator.further_std_errs, answer.std_err)
        return dataclasses.replace(answer, extra=extra)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        if self.direct:
            quantity = self.quantity.open()
            return self.estimator.measure(quantity, operator, k, key, execution)
        quantity = self.quantity.of_gram()
        if quantity is None:
            raise refusal(self.estimator, self.quantity)
        # The budget of the user is in matvecs of A.
        k = k.halved() if isinstance(k, Budget) else k // 2
        estimate = self.estimator.measure(quantity, gram(operator), k, key, execution)
        # `A A*` is Hermitian, so imaginary parts are rounding errors.
        return dataclasses.replace(
            estimate,
            value=estimate.value.real,
            samples=None if estimate.samples is None else estimate.samples.real,
            num_matvecs=2 * estimate.num_matvecs,
        )


def _in_words(quantity: AbstractQuantity) -> str:
    """`"row norms"`, for `RowNorms`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(quantity).__name__).lower()


def refusal(
    estimator: AbstractEstimator,
    quantity: AbstractQuantity,
    *,
    adaptive: bool = False,
) -> ValueError:
    """The error for a quantity that the estimator does not support, or not with an
    `adaptive` budget."""
    name = ", ".join(type(part).__name__ for part in quantity.parts)
    limit = ", with an adaptive budget, only with a number `k`" if adaptive else ""
    return ValueError(
        f"`{estimator.name}` cannot estimate this quantity, `{name}`{limit}. Use "
        "`traceax.HutchinsonEstimator`, which supports every quantity, or another "
        "estimator that the page 'What can be estimated' lists for it."
    )
