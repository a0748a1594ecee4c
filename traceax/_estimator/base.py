import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._adaptive import Adaptive
from .._exact_trace import exact_trace
from .._execution import AbstractExecution, Local
from .._flat import flatten
from .._gradient import attach_derivative
from .._iterate import stream
from .._moments import Moments
from .._sampler import AbstractSampler, draw_for
from .._solution import Estimate
from .._solve import solve


class AbstractTraceEstimator(eqx.Module):
    """An estimator of the trace. Hand one to [`traceax.trace`][].

    To write one, subclass [`traceax.AbstractStreamingEstimator`][] (independent samples)
    or [`traceax.AbstractSketchEstimator`][] (a block of probes taken together).

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Frugal(tx.AbstractTraceEstimator):
            # XTrace, or Hutchinson where its arrays would not fit.
            min_matvecs: ClassVar[int] = 2

            def run(self, operator, k, key, execution):
                fits = operator.in_size() < 10**6
                chosen = tx.XTraceEstimator() if fits else tx.HutchinsonEstimator()
                return chosen.run(operator, k, key, execution)

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Frugal(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```

    **Attributes:**

    - `min_matvecs`: the smallest `k` that it works with.
    """

    min_matvecs: eqx.AbstractClassVar[int]
    fallback: ClassVar[str] = "HutchinsonEstimator"

    @property
    def name(self) -> str:
        return type(self).__name__

    def exact(
        self, operator: lx.AbstractLinearOperator, execution: AbstractExecution
    ) -> Estimate:
        """The trace itself, from at most n products."""
        return exact_trace(operator, execution)

    @abc.abstractmethod
    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """Estimate the trace.

        **Arguments:**

        - `operator`: a square operator of size n, checked.
        - `k`: the budget of matrix-vector products, a number below n or adaptive.
        - `key`: a JAX PRNG key, or `None` if the caller gave none.
        - `execution`: where products are to be made.

        **Returns:**

        An `Estimate`: the value, its standard error and the samples that it is the mean
        of. From at most `k` products.
        """

    def estimate(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """The call of traceax 1.0: `value, stats = estimator.estimate(key, operator, k)`.

        Arguments, errors and numbers are those of [`traceax.trace`][], whose `value` and
        `stats` it returns.
        """
        solution = solve(self, operator, k=k, key=key, execution=Local(), throw=True)
        return solution.value, solution.stats

    def __call__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """An alias of `estimate`."""
        return self.estimate(key, operator, k)


class AbstractStreamingEstimator(AbstractTraceEstimator):
    """An estimator whose samples are independent, one from each probe.

    Holds one block of probes of its `sampler` at a time, in the backward pass too, so k
    may be anything.

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
                return jnp.vdot(probe, mv(probe))

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Plain(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```
    """

    sampler: eqx.AbstractVar[AbstractSampler]

    @abc.abstractmethod
    def sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        """One unbiased estimate of the trace.

        **Arguments:**

        - `mv`: the operator as a function of flat vectors, shape `(n,)` to `(n,)`. To be
            called once.
        - `probe`: a random vector of the `sampler`, shape `(n,)`.

        **Returns:**

        A scalar of the dtype of `probe`, linear in the product.
        """

    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat = flatten(operator)

        def body(flat, index):
            probe = draw_for(flat, self.sampler, key, index[None])[:, 0]
            return self._checked_sample(flat.mv, probe), ()

        def reduce(outs, valid):
            return (Moments.of(outs[0], valid),)

        def merge(parts):
            return (Moments.merge(parts[0]),)

        # The backward pass draws a block's probes again instead of storing them all.
        body = eqx.filter_checkpoint(body, prevent_cse=False)
        streamed = stream(body, reduce, merge, flat, k, execution)
        (moments,) = streamed.summary
        return Estimate(
            value=attach_derivative(moments.mean, streamed.mean),
            std_err=moments.std_err(),
            samples=streamed.samples,
            num_matvecs=streamed.count,
            rounding=flat.rounding,
            result=streamed.loop.result,
            extra=streamed.loop.extra,
            state=streamed.loop.state,
        )

    def _checked_sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        products = []

        def counted(vector):
            products.append(mv(vector))
            return products[-1]

        sample = self.sample(counted, probe)
        if jnp.shape(sample) != () or len(products) != 1:
            raise ValueError(
                f"`{self.name}.sample` must return a scalar made from one product. Found "
                f"the shape {jnp.shape(sample)} and {len(products)} products. Sum over "
                "the entries; for several products write a "
                "`traceax.AbstractSketchEstimator`."
            )
        return sample
