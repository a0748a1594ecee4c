"""Sketch estimators that add probes in rounds until a tolerance is met."""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, PRNGKeyArray, PyTree

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity
from .._core.sampler import draw_for
from .._numerics.reading import Reading
from .._run.budget import Budget, default_max_k, one_round
from .._run.loop import Assessment, embed, iterate, LoopResult
from .sketch import AbstractSketchEstimator, Sketch


# The largest budget where `max_k` is left out. Each test factorises matrices of
# that many rows or half as many.
_DEFAULT_MAX_K = 512
# The first rounds are assessed from matrices of the size of so many rounds. That takes a
# second to compile, and a 1% trace of 1000 rows then takes a seventeenth of the time.
_FIRST_ROUNDS = 8
# Later a test may take longer than a round. The budget grows by this factor from one test
# to the next: runs of 128 to 512 matvecs make 7% more on average.
_GROWTH = 1.2


class AbstractGrowingEstimator(AbstractSketchEstimator):
    """A sketch estimator that can add probes in rounds, in buffers for the largest
    budget, until the tolerance of [`traceax.Adaptive`][] is met. A fixed budget is one
    round.

    !!! Example

        ```python
        import traceax as tx

        # Whether an estimator that takes its probes together can stop at a tolerance.
        for estimator in (tx.XTraceEstimator(), tx.HutchPlusPlusEstimator()):
            print(isinstance(estimator, tx.AbstractGrowingEstimator))  # True
        ```
    """

    def num_probes(self, k: int) -> int:
        return self.probes_in_round(k)

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        """One round with the whole budget. An estimator that spends a fixed budget in a
        better way overrides this."""
        budget = one_round(k)
        state = self.start(len(probes), probes.dtype, budget)
        rounds = jnp.zeros((), jnp.int32)
        state = self.grow(matmat, probes, state, rounds, eps, budget)
        return self.assess(state, rounds + 1, eps, budget)

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        start = ft.partial(self.start, operator.size, operator.dtype, k.one_round)
        buffers = jax.tree.leaves(jax.eval_shape(start))
        numbers = sum(x.size for x in buffers) // k.round_size
        return min(default_max_k(numbers), _DEFAULT_MAX_K)

    @abc.abstractmethod
    def probes_in_round(self, k: int) -> int:
        """How many probes to draw in a round.

        **Arguments:**

        - `k`: the number of matvecs in a round.

        **Returns:**

        b, the number of columns of `probes` in `grow`.
        """

    @abc.abstractmethod
    def start(self, n: int, dtype: DTypeLike, k: Budget) -> PyTree[Array]:
        """Buffers for the largest budget.

        **Arguments:**

        - `n`, `dtype`: of the operator.
        - `k`: the budget, with `k.num_rounds` rounds of `k.round_size` matvecs.

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
        k: Budget,
    ) -> PyTree[Array]:
        """Make one more round.

        **Arguments:**

        - `matmat`: as in `sketch`; to at most `k.round_size` columns in all.
        - `probes`: the probes of this round, shape `(n, b)`.
        - `state`: the buffers that the previous rounds have filled.
        - `rounds`: the number of previous rounds, a traced integer.
        - `eps`: the machine epsilon of the products.
        - `k`: the budget.

        **Returns:**

        The buffers with this round.
        """

    @abc.abstractmethod
    def assess(
        self, state: PyTree[Array], rounds: Int[Array, ""] | int, eps: float, k: Budget
    ) -> Sketch:
        """The sketch of the probes so far. It takes no matvecs.

        **Arguments:**

        - `state`: the buffers that `rounds` rounds have filled.
        - `rounds`, `eps`, `k`: as in `grow`. `k` and the buffers may be those of the
            first rounds of a larger budget.

        **Returns:**

        A [`traceax.Sketch`][] with as many samples as the largest budget has, of which
        `valid` count. The columns of its frame are in the order of the rounds
        (`by_round`), and zero for rounds that were not made.
        """

    def _first_rounds(self, k: Budget) -> Budget:
        """The budget of the first rounds, or the whole one if it is not much larger."""
        if k.num_rounds < 2 * _FIRST_ROUNDS:
            return k
        return k.limited_to(_FIRST_ROUNDS * k.round_size)

    def _first_buffers(
        self, state: PyTree[Array], flat: FlatOperator, k: Budget
    ) -> PyTree[Array]:
        """What a smaller budget k has of the buffers."""
        smaller = jax.eval_shape(ft.partial(self.start, flat.size, flat.dtype, k))
        cut = lambda x, like: x[tuple(map(slice, like.shape))]  # noqa: E731
        return jax.tree.map(cut, state, smaller)

    def in_rounds(
        self,
        quantity: AbstractQuantity,
        matmat: Callable[..., Array],
        flat: FlatOperator,
        k: Budget,
        key: PRNGKeyArray | None,
        sign: int,
    ) -> tuple[Sketch, Reading, LoopResult]:
        """The method of [`traceax.AbstractSketchEstimator`][], by a loop over rounds."""
        size = self.probes_in_round(k.round_size)

        def without(sketch, field):
            where = lambda x: getattr(x, field)  # noqa: E731
            return eqx.tree_at(where, sketch, None, is_leaf=lambda x: x is None)

        # Jitted, so that it is traced once for the loop and the answer after it.
        @eqx.filter_jit
        def assess(state, rounds, k):
            sketch = self.assess(state, rounds, flat.eps, k)
            reading = self._read(quantity, sketch, flat.size)
            value = sign * sketch.scale * reading.moments.mean
            value, std_err = quantity.present(value, sketch.scale * reading.std_err)
            count = reading.moments.count
            assessment = Assessment.of(k.rule, value, std_err, count)
            return without(sketch, "expansion"), reading, assessment

        # The loop does not carry the frame, which only derivatives need and which is
        # about as large as the buffers, or the correlation, which is for the answer. They
        # are made after the loop.
        def assess_budget(k, state, rounds):
            sketch, reading, assessment = assess(state, rounds, k)
            small = without(sketch, "frame"), without(reading, "correlation")
            return eqx.filter(small, eqx.is_array), assessment

        first, tests = self._first_rounds(k), jnp.asarray(_tests(k.num_rounds))

        def assess_first(state, rounds):
            state = self._first_buffers(state, flat, first)
            result, assessment = assess_budget(first, state, rounds)
            return embed(jax.tree.map(jnp.zeros_like, empty[1]), result), assessment

        def assess_for_loop(state, rounds):
            of_all = ft.partial(assess_budget, k)
            if first is k:
                return of_all(state, rounds)
            is_first = rounds <= first.num_rounds
            return jax.lax.cond(is_first, assess_first, of_all, state, rounds)

        def step(buffers, rounds):
            state, result, assessment = buffers
            probes = draw_for(flat, self.sampler, key, rounds * size + jnp.arange(size))
            state = self.grow(matmat, probes, state, rounds, flat.eps, k)
            rounds = rounds + 1
            # Once the tolerance is met, a streak of good rounds ends the run.
            tested = tests[rounds] | assessment.meets(k.rule)
            result, assessment = jax.lax.cond(
                tested | k.is_watched,
                lambda: assess_for_loop(state, rounds),
                lambda: (result, assessment),
            )
            assessment = dataclasses.replace(assessment, tested=tested)
            return state, result, assessment

        # Before the first round nothing is good enough: error bars are infinite.
        def blank(x):
            inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            return jnp.full(x.shape, jnp.inf if inexact else 0, x.dtype)

        state = self.start(flat.size, flat.dtype, k)
        shapes = jax.eval_shape(
            ft.partial(assess_budget, k), state, jnp.zeros((), jnp.int32)
        )
        result, assessment = jax.tree.map(blank, shapes)
        empty = state, result, assessment
        loop = iterate(k, step, lambda buffers, _: buffers[2], empty)
        state, (small, reading), _ = loop.state.buffers
        # Only these two are taken from this: XLA removes the rest of the computation.
        sketch, last, _ = assess(state, loop.rounds, k)
        reading = dataclasses.replace(reading, correlation=last.correlation)
        return eqx.combine(small, sketch), reading, loop


def _tests(num_rounds: int) -> list[bool]:
    """Whether to test the tolerance after 0, 1, ... `num_rounds` rounds."""
    due, last = set(range(1, _FIRST_ROUNDS + 1)), _FIRST_ROUNDS
    while last < num_rounds:
        last = max(last + 1, round(_GROWTH * last))
        due.add(last)
    return [rounds in due or rounds == num_rounds for rounds in range(num_rounds + 1)]


def by_round(
    left: Sequence[Inexact[Array, "n _"]],
    right: Sequence[Inexact[Array, "n _"]],
    num_rounds: int,
) -> tuple[Array, Array]:
    """Join the parts of a frame so that columns of the same round are adjacent.

    **Arguments:**

    - `left`, `right`: parts of L and of R, arrays with n rows whose columns are in the
        order of the rounds.
    - `num_rounds`: the number of rounds, which divides the number of columns of each.

    **Returns:**

    L and R, each with the columns of all parts.
    """

    def join(parts):
        blocks = [part.reshape(len(part), num_rounds, -1) for part in parts]
        return jnp.concatenate(blocks, axis=2).reshape(len(parts[0]), -1)

    return join(left), join(right)
