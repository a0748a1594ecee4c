"""The base classes of estimators, and the task that one of them and a quantity make."""

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
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for
from .._core.sign_moments import FEW_SIGNS, SignMoments
from .._core.solution import Estimate
from .._operators.door import enter, Facts
from .._operators.gram import gram
from .._run.budget import Budget
from .._run.exact import exact, exact_from_diagonal
from .._run.execution import AbstractExecution, Local
from .._run.gradient import attach_derivative
from .._run.solve import AbstractTask, solve
from .._run.stream import stream


# Samples of signs are nearly equal if they spread less than this share of their marks;
# then their error bar is raised. With this, 95% intervals of row norms and of traces of
# blocks with equal entries cover 0.96 or more from 4 samples on; without, 0.68 with 4. A
# larger share would also widen the bars of samples that do spread little.
_NEARLY_EQUAL = 0.2


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
        - `execution`: where matvecs are made, and in blocks of which size.

        **Returns:**

        An `Estimate` of `traceax.internal`, made from at most `k` matvecs: the value, of
        the shape that `quantity.read` returns; its standard error, real and of the same
        shape; and the samples, of which the value is the mean.

        **Raises:**

        `ValueError` for a quantity that the estimator does not support.
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

        The same errors as [`traceax.trace`][].
        """
        task = Measurement(estimator=self, quantity=Trace())
        solution = solve(
            task, enter(operator), k=k, key=key, state=None, execution=Local(), throw=True
        )
        return solution.value, solution.stats

    def __call__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
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


def refusal(
    estimator: AbstractEstimator,
    quantity: AbstractQuantity,
    *,
    adaptive: bool = False,
) -> ValueError:
    """The error for a quantity that the estimator does not support, or not with an
    `adaptive` budget."""
    name = type(quantity).__name__
    limit = ", with an adaptive budget, only with a number `k`" if adaptive else ""
    return ValueError(
        f"`{estimator.name}` cannot estimate this quantity, `{name}`{limit}. Use "
        "`traceax.HutchinsonEstimator`, which supports every quantity, or another "
        "estimator that the page 'What can be estimated' lists for it."
    )


def is_skewed(quantity: AbstractQuantity, sampler: AbstractSampler) -> bool:
    """Whether samples are skewed, so that error bars must be wider. Quadratic forms of
    the probes are skewed. Entries of a diagonal are not if all entries of the probes have
    modulus one."""
    return not (quantity.entrywise and sampler.unit_modulus)


class AbstractStreamingEstimator(AbstractEstimator):
    """An estimator whose samples are independent, one from each probe.

    Cost: `k` matvecs. It holds one block of probes of its `sampler` at a time, also in
    the backward pass, so memory does not depend on `k`.

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

        - `mv`: the operator as a function of flat vectors, shape `(n,)` to `(n,)`, to be
            called once.
        - `probe`: a random vector of the `sampler`, shape `(n,)`.

        **Returns:**

        A pair of vectors `left, image` of shape `(n,)`, such that the mean of
        `image left*` is the operator, and `image` is linear in the result of `mv`. Every
        quantity is computed from them. For norms, `image` must be the result of `mv`
        itself. Or a scalar of the dtype of `probe`, linear in the result of `mv`, for the
        trace alone.
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
        # An adaptive run may stop at its first test, which sees this many samples.
        count = max(k.round_size, k.rule.min_samples) if isinstance(k, Budget) else k
        # Few samples of signs may be equal by chance. Their marks show whether they are.
        with_marks = count < FEW_SIGNS and self.sampler.unit_modulus
        near = _NEARLY_EQUAL if quantity.comparable(operator.hermitian) else 0.0

        # The backward pass draws a block's probes again instead of storing them all. What
        # is traced is passed, and not closed over, which would look like a leak of it.
        @ft.partial(eqx.filter_checkpoint, prevent_cse=False)
        def sample_of(operator, index, key):
            probe = draw_for(operator, self.sampler, key, index[None])[:, 0]
            return self._read(quantity, operator, probe, with_marks=with_marks)

        def body(operator, index):
            return sample_of(operator, index, key)

        def reduce(outs, valid):
            samples, (size, marks) = outs
            moments = SignMoments.of(
                samples=samples,
                size=size,
                marks=marks,
                valid=valid,
                skewed=skewed,
                rounding=operator.rounding,
                near=near,
            )
            return (moments,)

        def merge(summaries):
            (moments,) = summaries
            return (SignMoments.merge(moments),)

        # Samples are kept for `Solution.stats` if they are numbers. Arrays, such as
        # diagonals, would take memory that grows with k.
        scalar = eqx.filter_eval_shape(body, operator, jnp.zeros((), int))[0].ndim == 0
        streamed = stream(
            fn=body,
            reduce=reduce,
            merge=merge,
            operator=operator,
            k=k,
            execution=execution,
            keep=scalar,
            quantity=quantity,
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
        *,
        with_marks: bool,
    ) -> tuple[Inexact[Array, "*q"], tuple[Array | None, Array | None]]:
        """One sample; the size of its terms, if they may cancel; and, `with_marks`, its
        marks."""
        images = []

        def counting_mv(vector):
            images.append(operator.mv(vector))
            return images[-1]

        sample: Any = self.sample(counting_mv, probe)
        shapes = jax.tree.map(jnp.shape, sample)
        is_pair = shapes == (probe.shape, *map(jnp.shape, images))
        if len(images) != 1 or not (is_pair or shapes == ()):
            raise ValueError(
                f"`{self.name}.sample` must return a pair of vectors of length n, or a "
                f"scalar, made from one matvec. Found the shape {shapes}, n = "
                f"{operator.size}, and {len(images)} matvecs. Sum over the entries; "
                "for several matvecs write a `traceax.AbstractSketchEstimator`."
            )
        if is_pair:
            left, image = sample
            # Error bars have no derivative.
            frozen_left, frozen_image = jax.lax.stop_gradient(sample)
            marks = quantity.marks(frozen_left, frozen_image) if with_marks else None
            value = quantity.read(left, image)
            return value, (quantity.size(frozen_left, frozen_image), marks)
        if not isinstance(quantity, Trace):
            raise refusal(self, quantity)
        return sample, (None, None)
