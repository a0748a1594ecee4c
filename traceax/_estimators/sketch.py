import abc
import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.arithmetic import full_precision
from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import AbstractSampler, draw_for
from .._core.solution import Estimate
from .._numerics.expansion import AbstractExpansion, noise_gain, read, Reading
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach, attach_derivative, Frame, read_by
from .._run.loop import LoopResult, sum_over_rounds
from .base import AbstractEstimator, is_skewed, refusal


class Sketch(eqx.Module):
    """What a sketch estimator makes of its probes. Below, n is the size of the operator,
    and m the number of samples.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        probes = tx.SphereSampler()(jax.random.key(0), 100, 10)
        samples = jnp.sum(probes * (2 * probes), axis=0)  # the operator is 2 I
        std_err = jnp.std(samples, ddof=1) / 10**0.5
        sketch = tx.Sketch(samples, std_err, (probes / 10, probes), num_matvecs=10)
        ```

    **Attributes:**

    - `samples`: the per-sample estimates of the trace, real or complex, shape `(m,)`;
        their mean is the estimate. `None` where the trace is computed from the
        `expansion`, as other quantities are.
    - `std_err`: the standard error of that mean, real, shape `()`; `None` where
        `samples` is.
    - `frame`: arrays `L, R` of shape `(n, p)` with `E[sum(conj(L) * (dA R))] = d tr A`,
        from which derivatives are made.
    - `num_matvecs`: columns that the operator was applied to, an integer, which may be
        traced.
    - `scale`: a factor by which `samples`, `std_err`, `magnitude`, `noise`, `extra` and
        what `expansion` makes are still to be multiplied, real, shape `()`.
    - `magnitude`: about the Frobenius norm of the operator, for estimators that do not
        need a semidefinite one: rounding errors are relative to it where it is larger
        than the trace. Real, shape `()`.
    - `semidefinite`: False if the operator was seen not to be positive semidefinite, a
        boolean of shape `()`.
    - `valid`: which samples count, booleans of shape `(m,)`; `None` for all.
    - `extra`: entries for `Solution.stats`, a dictionary of arrays.
    - `expansion`: a function without arguments that makes estimates of the whole
        operator, a [`traceax.internal.AbstractExpansion`][] with as many as there are
        samples, from which linear quantities follow; `None` for the trace alone.
    - `raised`: how many times `std_err` is what the samples of the trace alone show, for
        parts of the trace, whose bars are raised likewise. Real, shape `()`.
    - `noise`: a standard error of the trace that the samples do not show, added to
        theirs in quadrature; an entry of a diagonal gets `noise / sqrt(n)`. Real, shape
        `()`.
    """

    samples: Inexact[Array, " m"] | None
    std_err: Real[Array, ""] | None
    frame: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]
    num_matvecs: Int[Array, ""] | int
    scale: Real[Array, ""] | float = 1.0
    magnitude: Real[Array, ""] | float = 0.0
    semidefinite: Bool[Array, ""] | bool = True
    valid: Bool[Array, " m"] | None = None
    extra: dict[str, Array] = eqx.field(default_factory=dict)
    expansion: Callable[[], AbstractExpansion] | None = None
    raised: Real[Array, ""] | float = 1.0
    noise: Real[Array, ""] | float = 0.0


class AbstractSketchEstimator(AbstractEstimator):
    """An estimator that takes its probes together. It holds arrays of shape `(n, m)`, for
    m probes.

    !!! Example

        ```python
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Plain(tx.AbstractSketchEstimator):
            # Hutchinson's estimator, its probes taken together.
            sampler: tx.AbstractSampler = tx.RademacherSampler()
            min_matvecs: ClassVar[int] = 2
            semidefinite: ClassVar[bool] = False

            def num_probes(self, k):
                return k

            def sketch(self, matmat, probes, k, eps):
                samples = jnp.sum(probes.conj() * matmat(probes), axis=0)
                std_err = jnp.std(samples, ddof=1) / k**0.5
                return tx.Sketch(samples, std_err, (probes / k, probes), num_matvecs=k)

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        solution = tx.trace(operator, Plain(), k=10, key=jax.random.key(0))
        print(f"{solution.value:.2f}")  # 200.00
        ```

    **Attributes:**

    - `sampler`: distribution of the probes.
    - `semidefinite`: whether the operator must be tagged positive or negative
        semidefinite. A negative one is negated before, and the estimate after.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    semidefinite: eqx.AbstractClassVar[bool]

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")

    @abc.abstractmethod
    def num_probes(self, k: int) -> int:
        """How many probes to draw.

        **Arguments:**

        - `k`: the budget of products, `min_matvecs` or more.

        **Returns:**

        m, the number of columns of `probes` in `sketch`.
        """

    @abc.abstractmethod
    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        """Estimate the trace from probes that are taken together.

        **Arguments:**

        - `matmat`: applies the operator to the columns of an array of shape `(n, p)`;
            with `adjoint=True` its adjoint; to at most `k` columns in all.
        - `probes`: shape `(n, m)`, random columns of the `sampler`.
        - `k`: the budget of products.
        - `eps`: the machine epsilon of the products.

        **Returns:**

        A [`traceax.Sketch`][].
        """

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        if self.semidefinite and operator.sign == 0:
            raise _no_tag(type(self).__name__)
        sign = -1 if self.semidefinite and operator.sign < 0 else 1
        flat = operator if sign == 1 else operator.negated
        frozen = flat.frozen  # once, before any loop

        def product(x, adjoint=False):
            return execution.matmat(frozen, x, adjoint=adjoint and not flat.hermitian)

        with full_precision(product) as matmat:
            if isinstance(k, Budget):
                sketch, seen, loop = self.in_rounds(quantity, matmat, flat, k, key, sign)
            else:
                probes = draw_for(flat, self.sampler, key, jnp.arange(self.num_probes(k)))
                sketch, loop = self.sketch(matmat, probes, k, flat.eps), LoopResult()
                seen = self._read(quantity, sketch, flat.size)
            value = (sketch.scale * seen.moments.mean).astype(flat.dtype)
        if isinstance(k, Budget):
            shape = (k.num_rounds, -1, flat.size)
            columns = tuple(x.T.reshape(shape) for x in sketch.frame)
            one = read_by(quantity)
            settings = columns, loop.rounds, value, execution
            value = attach_derivative(
                value, lambda: sum_over_rounds(one, flat, *settings)
            )
        else:
            frame = Frame(*sketch.frame)
            value = attach(flat, value, frame, execution=execution, quantity=quantity)
        samples = None
        if seen.samples is not None:
            samples = sign * sketch.scale * seen.samples
            if sketch.valid is not None:
                samples = jnp.where(sketch.valid, samples, jnp.inf)
        not_semidefinite = ~jnp.asarray(sketch.semidefinite)
        return Estimate(
            value=sign * value,
            std_err=sketch.scale * seen.std_err,
            samples=samples,
            num_matvecs=sketch.num_matvecs,
            rounding=flat.rounding,
            magnitude=sketch.scale * seen.magnitude,
            result=first_failure(
                failure(not_semidefinite, RESULTS.not_semidefinite), loop.result
            ),
            extra=jax.tree.map(lambda x: sketch.scale * x, seen.extra) | loop.extra,
            state=loop.state,
            num_samples=seen.moments.count,
            skewness=None if seen.moments.cubes is None else seen.moments.skewness,
        )

    def _read(self, quantity: AbstractQuantity, sketch: Sketch, n: int) -> Reading:
        """The quantity, in units of the sketch."""
        seen = self._read_samples(quantity, sketch)
        if isinstance(sketch.noise, float) and sketch.noise == 0:
            return seen
        if quantity.diagonal_only:
            ones = jnp.ones(n, seen.moments.unit.dtype)
            gain = jnp.sqrt(quantity.read(ones, ones))
        else:
            probes = None if sketch.expansion is None else sketch.expansion().probes
            if probes is None:
                raise refusal(self, quantity)
            gain = noise_gain(quantity, probes, sketch.valid)
        noise = sketch.noise * gain / n**0.5
        return dataclasses.replace(seen, std_err=jnp.hypot(seen.std_err, noise))

    def _read_samples(self, quantity: AbstractQuantity, sketch: Sketch) -> Reading:
        if isinstance(quantity, Trace) and sketch.samples is not None:
            assert sketch.std_err is not None
            moments = Moments.of(sketch.samples, sketch.valid, skewed=False)
            size = jnp.asarray(sketch.magnitude, moments.unit.dtype)
            return Reading(sketch.samples, moments, sketch.std_err, size, sketch.extra)
        if sketch.expansion is None:
            raise refusal(self, quantity, adaptive=sketch.valid is not None)
        skewed = is_skewed(quantity, self.sampler)
        seen = read(quantity, sketch.expansion(), sketch.valid, skewed=skewed)
        if quantity.entrywise:
            return seen
        return dataclasses.replace(seen, std_err=sketch.raised * seen.std_err)

    def in_rounds(
        self,
        quantity: AbstractQuantity,
        matmat: Callable[..., Array],
        flat: FlatOperator,
        k: Budget,
        key: PRNGKeyArray | None,
        sign: int,
    ) -> tuple[Sketch, Reading, LoopResult]:
        """The sketch that an adaptive budget ends with, the quantity computed from it,
        and how the loop ended.
        The estimate is `sign` times that of the sketch. Not every sketch can
        grow."""
        raise ValueError(
            f"`{self.name}` needs a fixed budget. Found `k=traceax.Adaptive(...)`. "
            "Pass an integer, or use `traceax.XTraceEstimator`."
        )


def _no_tag(name: str) -> ValueError:
    return ValueError(
        f"`{name}` needs an operator tagged as positive or negative semidefinite. Found "
        "`operator` without the tag. If it is semidefinite, say so: "
        "`lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)`; if "
        "not, use `traceax.XTraceEstimator`."
    )
