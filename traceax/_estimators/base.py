import abc
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.moments import FEW_SIGNS, SignMoments
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for
from .._core.solution import Estimate
from .._operators.door import enter, Facts
from .._operators.gram import gram
from .._run.budget import Budget
from .._run.exact import exact, exact_from_diagonal
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach_derivative
from .._run.solve import AbstractTask, solve
from .._run.stream import stream


class AbstractEstimator(eqx.Module):
    """An estimator of the trace and other quantities. Hand one to
    [`traceax.trace`][] or [`traceax.diagonal`][].

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
    - `takes_known_diagonal`: whether the exact answer, where the diagonal of the operator
        is known from fewer than `k` products, takes the place of an estimate.
    """

    min_matvecs: eqx.AbstractClassVar[int]
    quadratic: ClassVar[bool] = False
    takes_known_diagonal: ClassVar[bool] = False
    fallback: ClassVar[str] = "HutchinsonEstimator"

    @property
    def name(self) -> str:
        return type(self).__name__

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
        - `execution`: where products are to be made.

        **Returns:**

        An `Estimate` of `traceax.internal`: the value, of the shape of what the quantity
        reads, its standard error, and the samples that it is the mean of. From at most
        `k` products.

        **Raises:**

        `ValueError` for a quantity that it does not estimate.
        """

    def estimate(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """The call of traceax 1.0: `value, stats = estimator.estimate(key, operator, k)`.

        **Arguments:**

        - `key`, `operator`, `k`: as for [`traceax.trace`][].

        **Returns:**

        `value` and `stats` of the [`traceax.Solution`][] of [`traceax.trace`][].

        **Raises:**

        Errors as [`traceax.trace`][].
        """
        task = Measurement(estimator=self, quantity=Trace())
        settings = {"k": k, "key": key, "state": None}
        settings |= {"execution": Local(), "throw": True}
        solution = solve(task, enter(operator), **settings)
        return solution.value, solution.stats

    def __call__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """An alias of `estimate`."""
        return self.estimate(key, operator, k)


# The name in traceax 1.0.
AbstractTraceEstimator = AbstractEstimator


class Measurement(AbstractTask):
    """An estimator, and what it is to estimate."""

    estimator: AbstractEstimator
    quantity: AbstractQuantity

    @property
    def direct(self) -> bool:
        """Whether the estimator is applied to the operator itself, and not to `A A*`."""
        return self.quantity.linear or self.estimator.quadratic

    @property
    def min_matvecs(self) -> int:
        return self.estimator.min_matvecs * (1 if self.direct else 2)

    @property
    def fallback(self) -> str:
        return self.estimator.fallback

    @property
    def name(self) -> str:
        return self.estimator.name

    def exact_cost(self, operator: FlatOperator, facts: Facts) -> int:
        if self.estimator.takes_known_diagonal and self.quantity.diagonal_only:
            return facts.diagonal_cost
        return operator.size

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        if self.quantity.diagonal_only and facts.diagonal is not None:
            return exact_from_diagonal(self.quantity, facts.diagonal, facts.diagonal_cost)
        return exact(self.quantity, operator, execution)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        if self.direct:
            return self.estimator.measure(self.quantity, operator, k, key, execution)
        quantity = self.quantity.of_gram()
        if quantity is None:
            raise refusal(self.estimator, self.quantity)
        k = k.halved() if isinstance(k, Budget) else k // 2
        estimate = self.estimator.measure(quantity, gram(operator), k, key, execution)
        return dataclasses.replace(
            estimate,
            value=estimate.value.real,
            samples=None if estimate.samples is None else estimate.samples.real,
            num_matvecs=2 * estimate.num_matvecs,
        )


def refusal(
    estimator: AbstractEstimator,
    quantity: AbstractQuantity,
    *,
    adaptive: bool = False,
) -> ValueError:
    """The error for a quantity that the estimator does not have, or not with an
    `adaptive` budget."""
    name = type(quantity).__name__
    how = ", with an adaptive budget, only with a number `k`" if adaptive else ""
    return ValueError(
        f"`{estimator.name}` cannot estimate this quantity, `{name}`{how}. Use "
        "`traceax.HutchinsonEstimator`, which estimates them all, or another one of "
        "those that the page 'What can be estimated' has for it."
    )


def is_skewed(quantity: AbstractQuantity, sampler: AbstractSampler) -> bool:
    """Whether samples are skewed, as quadratic forms of the probes are, so that error
    bars have to be wider. Entries of a diagonal are not if all entries of the probes have
    modulus one."""
    return not (quantity.entrywise and sampler.unit_modulus)


class AbstractStreamingEstimator(AbstractEstimator):
    """An estimator whose samples are independent, one from each probe.

    It holds one block of probes of its `sampler` at a time, in the backward pass too,
    so memory does not depend on `k`.

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Plain(tx.AbstractStreamingEstimator):
            # Hutchinson's estimator.
            sampler: tx.AbstractSampler = tx.RademacherSampler()
            min_matvecs: ClassVar[int] = 1

            def sample(self, mv, probe):
                return probe, mv(probe)

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Plain(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    quadratic: ClassVar[bool] = True

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")

    @abc.abstractmethod
    def sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> tuple[Inexact[Array, " n"], Inexact[Array, " m"]] | Inexact[Array, ""]:
        """One unbiased estimate of the operator, or of its trace alone.

        **Arguments:**

        - `mv`: the operator as a function of flat vectors, shape `(n,)` to `(n,)`. To be
            called once.
        - `probe`: a random vector of the `sampler`, shape `(n,)`.

        **Returns:**

        Vectors `left, image` of shape `(n,)`, `image` linear in the product, for which
        the mean of `image left*` is the operator: every quantity is computed from them.
        Or a scalar of the dtype of `probe`, linear in the product, for the trace alone.
        For norms, `image` must be the product itself.
        """

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        skewed = is_skewed(quantity, self.sampler)
        first = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k
        few = first < FEW_SIGNS and self.sampler.unit_modulus
        near = 0.2 if quantity.comparable(operator.hermitian) else 0.0

        # The backward pass draws a block's probes again instead of storing them all. What
        # is traced is passed, and not closed over, which would look like a leak of it.
        @ft.partial(eqx.filter_checkpoint, prevent_cse=False)
        def of_probe(operator, index, key):
            probe = draw_for(operator, self.sampler, key, index[None])[:, 0]
            return self._read(quantity, operator, probe, few)

        def body(operator, index):
            return of_probe(operator, index, key)

        def reduce(outs, valid):
            samples, (size, marks) = outs
            settings = {"skewed": skewed, "rounding": operator.rounding, "near": near}
            return (SignMoments.of(samples, size, marks, valid, **settings),)

        def merge(parts):
            return (SignMoments.merge(parts[0]),)

        scalar = eqx.filter_eval_shape(body, operator, jnp.zeros((), int))[0].ndim == 0
        streamed = stream(
            body, reduce, merge, operator, k, execution, keep=scalar, quantity=quantity
        )
        (moments,) = streamed.summary
        return Estimate(
            value=attach_derivative(moments.mean, streamed.mean),
            std_err=moments.std_err(),
            samples=streamed.samples,
            num_matvecs=streamed.count,
            rounding=operator.rounding,
            magnitude=0.0 if moments.size is None else moments.size,
            result=streamed.loop.result,
            extra=streamed.loop.extra,
            state=streamed.loop.state,
            num_samples=streamed.count,
            skewness=None if scalar else moments.skewness,
        )

    def _read(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        probe: Inexact[Array, " n"],
        few: bool,
    ) -> tuple[Inexact[Array, "*q"], tuple[Array | None, Array | None]]:
        """A sample; the size of its terms where these may cancel; and where samples are
        few, its marks."""
        products = []

        def counted(vector):
            products.append(operator.mv(vector))
            return products[-1]

        sample: Any = self.sample(counted, probe)
        shapes = jax.tree.map(jnp.shape, sample)
        pair = shapes == (probe.shape, *map(jnp.shape, products))
        if len(products) != 1 or not (pair or shapes == ()):
            raise ValueError(
                f"`{self.name}.sample` must return a pair of vectors of length n, or a "
                f"scalar, made from one product. Found the shape {shapes}, n = "
                f"{operator.size}, and {len(products)} products. Sum over the entries; "
                "for several products write a `traceax.AbstractSketchEstimator`."
            )
        if pair:
            frozen = jax.lax.stop_gradient(sample)
            marks = quantity.marks(*frozen) if few else None
            return quantity.read(*sample), (quantity.size(*frozen), marks)
        if not isinstance(quantity, Trace):
            raise refusal(self, quantity)
        return sample, (None, None)
