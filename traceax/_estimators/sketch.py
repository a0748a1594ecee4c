"""Estimators that take their probes together, and what they make of them.

An estimator turns probes into a `Sketch`: samples of the trace, or estimates of the whole
operator (its expansion) from which any linear quantity is read, and a frame L, R with
`E[sum(conj(L) * (dA R))] = d tr A`, from which derivatives are made.
"""

import abc
import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.arithmetic import full_precision
from .._core.checks import check_instance
from .._core.flat import FlatOperator, freeze
from .._core.joint import JointMoments
from .._core.moments import align, Moments
from .._core.quantity import AbstractQuantity, Trace
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import AbstractSampler, check_full_support, draw_for
from .._core.shifted import is_trace
from .._core.solution import Estimate
from .._numerics.expansion import AbstractExpansion
from .._numerics.reading import join_readings, noise_gain, read, Reading
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach, attach_derivative, column_reader, Frame
from .._run.loop import LoopResult, sum_over_rounds
from .base import AbstractEstimator, refusal
from .streaming import is_skewed


class Sketch(eqx.Module):
    """The result of a sketch estimator. Below, n is the size of the operator and m the
    number of samples.

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
        their mean is the estimate. `None` if the trace is computed from the `expansion`,
        as other quantities are.
    - `std_err`: the standard error of that mean, real, shape `()`; `None` if `samples`
        is.
    - `frame`: arrays `L, R` of shape `(n, p)` with `E[sum(conj(L) * (dA R))] = d tr A`,
        from which derivatives are made.
    - `num_matvecs`: the number of columns that the operator was applied to, an integer,
        which may be traced.
    - `scale`: a factor that `samples`, `std_err`, `magnitude`, `noise`, `extra` and the
        result of `expansion` have not been multiplied by yet, real, shape `()`.
    - `magnitude`: about the Frobenius norm of the operator, for estimators that do not
        need a semidefinite one: rounding errors are relative to it where it is larger
        than the trace. Real, shape `()`.
    - `semidefinite`: False if the products show that the operator is not positive
        semidefinite, a boolean of shape `()`.
    - `valid`: which samples count, booleans of shape `(m,)`; `None` for all.
    - `extra`: entries for `Solution.stats`, a dictionary of arrays.
    - `expansion`: a function without arguments that returns a
        [`traceax.internal.AbstractExpansion`][]: as many estimates of the whole operator
        as there are samples, from which linear quantities follow. `None` if only the
        trace can be estimated.
    - `raised`: the ratio of `std_err` to the standard error that the samples alone show.
        Error bars of parts of the trace are raised by the same factor. Real, shape `()`.
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
        semidefinite. The estimate of a negative one is minus that of its negation.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    semidefinite: eqx.AbstractClassVar[bool]

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")
        check_full_support("sampler", self.sampler)

    @abc.abstractmethod
    def num_probes(self, k: int) -> int:
        """How many probes to draw.

        **Arguments:**

        - `k`: the budget of matvecs, `min_matvecs` or more.

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
        - `k`: the budget of matvecs.
        - `eps`: the machine epsilon of the products.

        **Returns:**

        A [`traceax.Sketch`][].
        """

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        return self.measure(Trace(), operator, k, key, execution)

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
        # Once, before any loop, whose body would freeze it anew in each round.
        frozen, constant = flat.frozen, freeze(quantity)

        def product(x, adjoint=False):
            # The adjoint of a product costs a transposition, which a Hermitian A spares.
            return execution.matmat(frozen, x, adjoint=adjoint and not flat.hermitian)

        with full_precision(product) as matmat:
            if isinstance(k, Budget):
                sketch, reading, loop = self.in_rounds(
                    constant, matmat, flat, k, key, sign
                )
            else:
                probes = draw_for(flat, self.sampler, key, jnp.arange(self.num_probes(k)))
                sketch, loop = self.sketch(matmat, probes, k, flat.eps), LoopResult()
                reading = self._read(constant, sketch, flat.size)
            value = (sketch.scale * reading.moments.mean).astype(flat.dtype)
        left, right = sketch.frame
        if isinstance(k, Budget):
            # Over the rounds, so that derivatives of those not made cost nothing.
            shape = (k.num_rounds, -1, flat.size)
            columns = left.T.reshape(shape), right.T.reshape(shape)
            estimate = value
            value = attach_derivative(
                estimate,
                lambda: sum_over_rounds(
                    column_reader(quantity),
                    flat,
                    columns,
                    rounds=loop.rounds,
                    like=estimate,
                    execution=execution,
                ),
            )
        elif jax.tree.leaves(eqx.filter(quantity, eqx.is_inexact_array)):
            # The rule of `attach` gives derivatives in the operator alone.
            columns, estimate = (left.T, right.T), value
            value = attach_derivative(
                estimate,
                lambda: jnp.sum(
                    execution.map(column_reader(quantity), flat, columns), axis=0
                ).astype(estimate.dtype),
            )
        else:
            frame = Frame(constant=left, right=right)
            value = attach(flat, value, frame, execution=execution, quantity=quantity)
        samples = None
        if reading.samples is not None:
            samples = sign * sketch.scale * reading.samples
            if sketch.valid is not None:
                # Not NaN, at which `jax_debug_nans` would stop.
                samples = jnp.where(align(sketch.valid, samples), samples, jnp.inf)
        not_semidefinite = ~jnp.asarray(sketch.semidefinite)
        return Estimate(
            value=sign * value,
            std_err=sketch.scale * reading.std_err,
            samples=samples,
            num_matvecs=sketch.num_matvecs,
            rounding=flat.rounding,
            magnitude=sketch.scale * reading.magnitude,
            result=first_failure(
                operator.sign_failure if self.semidefinite else None,
                failure(not_semidefinite, RESULTS.not_semidefinite),
                loop.result,
            ),
            extra=jax.tree.map(lambda x: sketch.scale * x, reading.extra) | loop.extra,
            state=loop.state,
            num_samples=reading.moments.count,
            skewness=reading.moments.skewness,
            correlation=reading.correlation,
        )

    def _read(self, quantity: AbstractQuantity, sketch: Sketch, n: int) -> Reading:
        """The quantity and its error bar, both still to be multiplied by the sketch's
        `scale`."""
        readings = [self._read_part(part, sketch, n) for part in quantity.parts]
        return join_readings(quantity, readings, sketch.expansion, sketch.valid)

    def _read_part(self, quantity: AbstractQuantity, sketch: Sketch, n: int) -> Reading:
        reading = self._read_samples(quantity, sketch)
        if isinstance(sketch.noise, float) and sketch.noise == 0:
            return reading
        # The factor from the noise of an entry of the operator to that of the quantity.
        if quantity.diagonal_only:
            ones = jnp.ones(n, reading.std_err.dtype)
            gain = jnp.sqrt(quantity.read(ones, ones))
        else:
            probes = None if sketch.expansion is None else sketch.expansion().probes
            if probes is None:
                raise refusal(self, quantity)
            gain = noise_gain(quantity, probes, sketch.valid)
        noise = sketch.noise * gain / n**0.5
        return dataclasses.replace(reading, std_err=jnp.hypot(reading.std_err, noise))

    def _read_samples(self, quantity: AbstractQuantity, sketch: Sketch) -> Reading:
        if is_trace(quantity) and sketch.samples is not None:
            assert sketch.std_err is not None
            moments = Moments.of(sketch.samples, sketch.valid, skewed=False)
            size = jnp.asarray(sketch.magnitude, moments.unit.dtype)
            return Reading(
                samples=sketch.samples,
                moments=JointMoments((moments,), joined=False),
                std_err=sketch.std_err,
                magnitude=size,
                extra=sketch.extra,
            )
        if sketch.expansion is None:
            raise refusal(self, quantity, adaptive=sketch.valid is not None)
        skewed = is_skewed(quantity, self.sampler)
        reading = read(quantity, sketch.expansion(), sketch.valid, skewed=skewed)
        if quantity.entrywise:
            return reading
        return dataclasses.replace(reading, std_err=sketch.raised * reading.std_err)

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
        and how the loop ended. The estimate is `sign` times that of the sketch. An
        estimator whose sketch cannot grow raises an error."""
        raise ValueError(
            f"`{self.name}` needs a fixed budget. Found `k=traceax.Adaptive(...)`, "
            "the default. Pass an integer, or use `traceax.XTraceEstimator`."
        )


def _no_tag(name: str) -> ValueError:
    return ValueError(
        f"`{name}` needs an operator tagged as positive or negative semidefinite. Found "
        "`operator` without the tag. If it is semidefinite, say so: "
        "`traceax.as_operator(operator, tags=lineax.positive_semidefinite_tag)`; if "
        "not, use `traceax.XTraceEstimator`."
    )
