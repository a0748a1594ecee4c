import abc
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._adaptive import Adaptive
from .._execution import AbstractExecution, full_precision
from .._flat import FlatOperator, flatten
from .._gradient import attach, attach_derivative, form, Frame
from .._iterate import Assessment, iterate, LoopResult, sum_over_rounds
from .._moments import Moments
from .._sampler import AbstractSampler, draw_for
from .._solution import Estimate, failure, first_failure, RESULTS
from .base import AbstractTraceEstimator


class Sketch(eqx.Module):
    """What a sketch estimator makes of its probes.

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

    - `samples`: the per-sample estimates; their mean is the estimate.
    - `std_err`: the standard error of that mean.
    - `frame`: arrays `L, R` of shape `(n, p)` with `E[sum(conj(L) * (dA R))] = d tr A`,
        from which derivatives are made.
    - `num_matvecs`: columns that the operator was applied to.
    - `scale`: what `samples`, `std_err`, `magnitude` and `extra` are still to be
        multiplied by.
    - `magnitude`: about the Frobenius norm of the operator, for estimators that do not
        need a semidefinite one: rounding errors are relative to it where it is larger
        than the trace.
    - `semidefinite`: False if the operator was seen not to be positive semidefinite.
    - `valid`: which samples count; `None` for all.
    - `extra`: entries for `Solution.stats`.
    """

    samples: Inexact[Array, " m"]
    std_err: Real[Array, ""]
    frame: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]
    num_matvecs: Int[Array, ""] | int
    scale: Real[Array, ""] | float = 1.0
    magnitude: Real[Array, ""] | float = 0.0
    semidefinite: Bool[Array, ""] | bool = True
    valid: Bool[Array, " m"] | None = None
    extra: dict[str, Array] = eqx.field(default_factory=dict)


class AbstractSketchEstimator(AbstractTraceEstimator):
    """An estimator that takes its probes together. Holds arrays of shape `(n, m)`.

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
            to at most `k` columns in all.
        - `probes`: shape `(n, m)`, random columns of the `sampler`.
        - `k`: the budget of products.
        - `eps`: the unit roundoff of the products.

        **Returns:**

        A [`traceax.Sketch`][].
        """

    def run(
        self,
        operator: lx.AbstractLinearOperator,
        k: int | Adaptive,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        negative = self.semidefinite and _is_negative(operator, type(self).__name__)
        sign = -1 if negative else 1
        flat = flatten(-operator if negative else operator)

        frozen = flat.frozen  # once, before any loop
        with full_precision(lambda x: execution.matmat(frozen, x)) as matmat:
            if isinstance(k, Adaptive):
                sketch, loop = self.in_rounds(matmat, flat, k, key, sign)
            else:
                probes = draw_for(flat, self.sampler, key, jnp.arange(self.num_probes(k)))
                sketch, loop = self.sketch(matmat, probes, k, flat.eps), LoopResult()
            moments = Moments.of(sketch.samples, sketch.valid)
            value = (sketch.scale * moments.mean).astype(flat.dtype)
        if isinstance(k, Adaptive):
            shape = (k.num_rounds, -1, flat.size)
            columns = tuple(x.T.reshape(shape) for x in sketch.frame)
            value = attach_derivative(
                value,
                lambda: sum_over_rounds(form, flat, columns, loop.rounds, execution),
            )
        else:
            value = attach(flat, value, Frame(*sketch.frame), execution=execution)
        samples = sign * sketch.scale * sketch.samples
        if sketch.valid is not None:
            samples = jnp.where(sketch.valid, samples, jnp.inf)
        not_semidefinite = ~jnp.asarray(sketch.semidefinite)
        return Estimate(
            value=sign * value,
            std_err=sketch.scale * sketch.std_err,
            samples=samples,
            num_matvecs=sketch.num_matvecs,
            rounding=flat.rounding,
            magnitude=sketch.scale * sketch.magnitude,
            result=first_failure(
                failure(not_semidefinite, RESULTS.not_semidefinite), loop.result
            ),
            extra=jax.tree.map(lambda x: sketch.scale * x, sketch.extra) | loop.extra,
            state=loop.state,
        )

    def in_rounds(
        self,
        matmat: Callable[[Array], Array],
        flat: FlatOperator,
        k: Adaptive,
        key: PRNGKeyArray | None,
        sign: int,
    ) -> tuple[Sketch, LoopResult]:
        """The sketch that an adaptive budget ends with, and how it ended. The estimate is
        `sign` times that of the sketch. Not every sketch can grow."""
        raise ValueError(
            f"`{self.name}` needs a fixed budget. Found `k=traceax.Adaptive(...)`. "
            "Pass an integer, or use `traceax.XTraceEstimator`."
        )


class AbstractGrowingEstimator(AbstractSketchEstimator):
    """A sketch estimator that can also add probes in rounds, in buffers for the largest
    budget, until [`traceax.Adaptive`][] has enough.

    !!! Example

        ```python
        import traceax as tx

        # Whether an estimator that takes its probes together can stop at a tolerance.
        for estimator in (tx.XTraceEstimator(), tx.HutchPlusPlusEstimator()):
            print(isinstance(estimator, tx.AbstractGrowingEstimator))  # True
        ```
    """

    @abc.abstractmethod
    def probes_in_round(self, k: int) -> int:
        """How many probes to draw in a round.

        **Arguments:**

        - `k`: the products of a round.

        **Returns:**

        b, the number of columns of `probes` in `grow`.
        """

    @abc.abstractmethod
    def start(self, n: int, dtype: DTypeLike, k: Adaptive) -> PyTree[Array]:
        """Buffers for the largest budget.

        **Arguments:**

        - `n`, `dtype`: of the operator.
        - `k`: the budget, with `k.num_rounds` rounds of `k.round_size` products.

        **Returns:**

        A PyTree of arrays, which `grow` changes and `assess` reads.
        """

    @abc.abstractmethod
    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: PyTree[Array],
        rounds: Int[Array, ""],
        eps: float,
        k: Adaptive,
    ) -> PyTree[Array]:
        """Make one more round.

        **Arguments:**

        - `matmat`: as in `sketch`; to at most `k.round_size` columns in all.
        - `probes`: shape `(n, b)`, those of this round.
        - `state`: what the rounds before it left.
        - `rounds`: the number of those, a traced integer.
        - `eps`: the unit roundoff of the products.
        - `k`: the budget.

        **Returns:**

        The state with this round.
        """

    @abc.abstractmethod
    def assess(
        self, state: PyTree[Array], rounds: Int[Array, ""] | int, eps: float, k: Adaptive
    ) -> Sketch:
        """What `sketch` would make of the probes so far. Makes no products.

        **Arguments:**

        - `state`: what `rounds` rounds have left.
        - `rounds`, `eps`, `k`: as in `grow`.

        **Returns:**

        A [`traceax.Sketch`][] with as many samples as the largest budget has, of which
        `valid` count. The columns of its frame are in the order of the rounds
        (`by_round`), zero for those that were not made.
        """

    def in_rounds(
        self,
        matmat: Callable[[Array], Array],
        flat: FlatOperator,
        k: Adaptive,
        key: PRNGKeyArray | None,
        sign: int,
    ) -> tuple[Sketch, LoopResult]:
        size = self.probes_in_round(k.round_size)

        def assess(state, rounds):
            sketch = self.assess(state, rounds, flat.eps, k)
            moments = Moments.of(sketch.samples, sketch.valid)
            value = sign * sketch.scale * moments.mean
            seen = Assessment(value, sketch.scale * sketch.std_err, moments.count)
            # All but the frame is kept, and not compiled again after the loop.
            small = eqx.tree_at(lambda x: x.frame, sketch, None)
            return eqx.filter(small, eqx.is_array), seen

        def step(buffers, rounds):
            state, _, _ = buffers
            probes = draw_for(flat, self.sampler, key, rounds * size + jnp.arange(size))
            state = self.grow(matmat, probes, state, rounds, flat.eps, k)
            return state, *assess(state, rounds + 1)

        def blank(x):
            inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            return jnp.full(x.shape, jnp.inf if inexact else 0, x.dtype)

        state = self.start(flat.size, flat.dtype, k)
        shapes = jax.eval_shape(assess, state, jnp.zeros((), jnp.int32))
        empty = state, *jax.tree.map(blank, shapes)
        loop = iterate(k, step, lambda buffers, _: buffers[2], empty)
        state, small, _ = loop.state.buffers
        return eqx.combine(small, self.assess(state, loop.rounds, flat.eps, k)), loop


def by_round(
    left: Sequence[Inexact[Array, "n _"]],
    right: Sequence[Inexact[Array, "n _"]],
    num_rounds: int,
) -> tuple[Array, Array]:
    """A frame in the order of the rounds, from arrays that each have that order."""

    def join(parts):
        blocks = [part.reshape(len(part), num_rounds, -1) for part in parts]
        return jnp.concatenate(blocks, axis=2).reshape(len(parts[0]), -1)

    return join(left), join(right)


def _is_negative(operator: lx.AbstractLinearOperator, name: str) -> bool:
    if lx.is_positive_semidefinite(operator):
        return False
    if lx.is_negative_semidefinite(operator):
        return True
    raise ValueError(
        f"`{name}` needs an operator tagged as positive or negative semidefinite. Found "
        f"`operator` of type {type(operator).__name__} without the tag. If it is "
        "semidefinite, say so: `lineax.TaggedLinearOperator(operator, "
        "lineax.positive_semidefinite_tag)`; if not, use `traceax.XTraceEstimator`."
    )
