import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real, Scalar

from .._core.checks import check_positive, check_scalar
from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity
from .._core.results import failure, RESULTS
from .._krylov.base import AbstractKrylovMethod
from .._quadrature.convergence import Convergence, SEEN_BY_ONE
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .budget import Budget
from .execution import AbstractExecution


class AdaptiveSteps(eqx.Module):
    r"""A number of Krylov steps that is chosen from the data: pass it as `num_steps`.

    A first run, from the first probe, goes on until half the width of its bracket is at
    most `share` of a target. The target is the tolerance of an adaptive budget, or else
    the standard error of a mean over `k` probes,
    $\sqrt{2 (\|f(A)\|_F^2 - (\mathrm{tr}\, f(A))^2 / n) / k}$, as that probe estimates
    it. All probes then make as many steps, `stats["num_steps"]`. The first run costs as
    many products again as one probe. For [`traceax.diagonal_of_function`][] an estimate
    of the error of a product takes the place of the bracket.

    One compiled program serves all numbers of steps up to `max_steps`. Its buffers and
    its small factorisations have that size: `max_steps**3` operations for each probe.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        steps = tx.AdaptiveSteps(max_steps=100)
        solution = tx.logdet(operator, k=20, num_steps=steps, key=jax.random.key(0))
        print(solution.value, "+-", solution.std_err, solution.stats["num_steps"])
        ```

    **Attributes:**

    - `max_steps`: the largest number of steps, a Python integer; more than n count as n.
        By default 128 (64 for [`traceax.KrylovAwareEstimator`][], which keeps many
        vectors for each step), or for more than two million rows as many as vectors of
        that length take $2^{28}$ numbers, but at least 64.
        If these leave a quadrature error above the error bar or the tolerance, or cannot
        tell the operator from a singular one where that matters, the exact answer takes
        the place of the estimate for n of at most 4096 (1024 for functions of operators
        without a tag). Larger ones end as `RESULTS.too_few_steps`.
    - `share`: the fraction of the target that the quadrature error may be, a real
        number. Derivatives need more steps than the value: choose it smaller for them.
    """

    max_steps: int | None = eqx.field(static=True, default=None)
    share: Scalar | float = 0.1

    def __init__(self, max_steps: int | None = None, share: Scalar | float = 0.1):
        """**Arguments:**

        - `max_steps`: default is `None`, as above.
        - `share`: default is 0.1.

        **Raises:**

        `TypeError` or `ValueError` for a `max_steps` that is not a Python integer of 1 or
        more, and a `share` that is not positive.
        """
        if max_steps is not None:
            max_steps = check_positive("max_steps", max_steps)
        self.max_steps = max_steps
        check_scalar("share", share)
        if isinstance(share, int | float) and not share > 0:
            raise ValueError(f"`share` must be positive. Found {share!r}.")
        self.share = share

    @property
    def most(self) -> int:
        """`max_steps`, which is known once the size of the operator is."""
        assert self.max_steps is not None
        return self.max_steps


def check_steps(num_steps: Any, n: int, most: int = 128) -> int | AdaptiveSteps:
    """A number of steps, a number or adaptive, that is at most n; if nothing is said, at
    most as many as `most`, and as vectors of length n take 2^28 numbers, or 64 if that is
    more."""
    if isinstance(num_steps, AdaptiveSteps):
        if (limit := num_steps.max_steps) is None:
            limit = min(most, max(64, 2**28 // n))
        return AdaptiveSteps(min(limit, n), num_steps.share)
    return min(check_positive("num_steps", num_steps), n)


def exact_limit(num_steps: int | AdaptiveSteps, *, orthogonal: bool = True) -> int:
    """Up to which size an operator is factorised where the steps that were chosen are too
    few: so many products, and a factorisation, cost about as much as the probes that
    missed. One that is not of orthogonal vectors takes ten times as long or more."""
    most = 4096 if orthogonal else 1024
    return most if isinstance(num_steps, AdaptiveSteps) else 0


def excess_of_bracket(
    value: Inexact[Array, ""],
    bracket: Real[Array, "2"],
    deviation: Real[Array, ""] | float,
    operator: FlatOperator,
    k: int | Budget,
    quantity: AbstractQuantity,
) -> Real[Array, ""]:
    """Half the width of a bracket, beyond rounding, over the target: the tolerance, or
    the standard error of k forms, of which one has this `deviation`."""
    rounding = operator.rounding * jnp.abs(value)
    if isinstance(k, Budget):
        presented = [quantity.present(x, rounding) for x in (value, *bracket)]
        value, low, high = (k.rule.size(each) for each, _ in presented)
        rounding = k.rule.size(presented[0][1])
        aimed = k.rule.tolerance(value)
    else:
        low, high = bracket
        aimed = standard_error(deviation, k)
    return excess(jnp.abs(high - low) / 2 - rounding, aimed)


def standard_error(deviation: Real[Array, ""] | float, k: int) -> Real[Array, ""]:
    """That of a mean of `z* F z` over k real probes, with `||F - c||_F`, c its mean."""
    return jnp.sqrt(2 / k) * deviation


def excess(error: Real[Array, ""], aimed: Real[Array, ""]) -> Real[Array, ""]:
    """An error divided by the target, which may be 0."""
    error = jnp.maximum(error, 0)
    ratio = error / jnp.where(aimed > 0, aimed, 1)
    return jnp.where((aimed > 0) | (error == 0), ratio, jnp.inf)


class Steps(eqx.Module):
    """How many steps each probe makes, of `most` for which there is room, and how many
    it took to find out."""

    most: int = eqx.field(static=True)
    made: Int[Array, ""] | int
    spent: Int[Array, ""] | int
    chosen: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        num_steps: int | AdaptiveSteps,
        choose: Callable[[AdaptiveSteps], Int[Array, ""]],
    ) -> "Steps":
        """As many as `num_steps` says, or as `choose` finds out."""
        if not isinstance(num_steps, AdaptiveSteps):
            return cls(num_steps, num_steps, 0, False)
        made = choose(num_steps)
        return cls(num_steps.most, made, made, True)

    @classmethod
    def resumed(
        cls,
        num_steps: int | AdaptiveSteps,
        choose: Callable[[AdaptiveSteps], Int[Array, ""]],
        k: int | Budget,
    ) -> "tuple[Steps, int | Budget]":
        """The same, but those of an earlier run if k goes on from one; and k for the loop
        that takes them."""
        if not isinstance(k, Budget) or k.state is None:
            return cls.of(num_steps, choose), k
        made, loop = k.state
        return cls.of(num_steps, lambda _: made), dataclasses.replace(k, state=loop)

    def report(self, missed: Bool[Array, ""]) -> tuple[dict[str, Array], Any]:
        """Their number, for `stats`, and the result, which says whether those that were
        chosen were too few."""
        taken = {"num_steps": jnp.asarray(self.made, jnp.int32)}
        if not self.chosen:
            return taken, None
        return taken, failure(missed, RESULTS.too_few_steps)

    def state(self, loop: PyTree[Array] | None) -> PyTree[Array] | None:
        """That of an adaptive run, with the number of steps: of a run that goes on, all
        samples have as many."""
        return None if loop is None else (jnp.asarray(self.made, jnp.int32), loop)


def choose_steps_of_form(
    adaptive: AdaptiveSteps,
    krylov: AbstractKrylovMethod,
    operator: FlatOperator,
    function: AbstractSpectralFunction,
    bound: Scalar | float | None,
    probe: Inexact[Array, " n"],
    excess: Callable[[Array, Array, Array], Real[Array, ""]],
    execution: AbstractExecution,
) -> Int[Array, ""]:
    """How many steps a quadratic form with this probe takes. `excess` is of its value,
    its bracket and its deviation; `bound` is a lower one of the eigenvalues."""
    least = 1 if function.bracketed else 4
    function, bound = freeze((function, bound))

    def look(flat, state, made):
        form = krylov.read(flat, state, made, function, bound, 1)
        return excess_of_form(form, excess)

    return choose_steps(adaptive, krylov, operator, probe, least, look, execution)


def excess_of_form(
    form: QuadraticForm, excess: Callable[[Array, Array, Array], Real[Array, ""]]
) -> Real[Array, ""]:
    """The `excess` of the bracket of a form, infinite while the function is infinite at
    zero and the operator may be singular. What is estimated besides would differ too much
    from one probe to the next."""
    found = excess(form.value, form.bracket, form.deviation)
    may_be_singular = Convergence.of(form).may_be_singular(SEEN_BY_ONE)
    return jnp.where(may_be_singular, jnp.inf, found)


def choose_steps(
    adaptive: AdaptiveSteps,
    krylov: AbstractKrylovMethod,
    operator: FlatOperator,
    probe: Inexact[Array, " n"],
    least: int,
    look: Callable[[FlatOperator, PyTree[Array], Int[Array, ""]], Real[Array, ""]],
    execution: AbstractExecution,
) -> Int[Array, ""]:
    """How many steps this probe takes until the excess that `look(operator, state,
    steps)` finds is small enough. It looks after 4, 6, 8, 10 and 12 steps, and then each
    time their number has grown by a third; if `least` is 1, after 1 and 2 too."""
    most = adaptive.most

    def run(flat, probe):
        def unfinished(carry) -> Bool[Array, ""]:
            _, made, enough = carry
            return ~enough & (made < most)

        def advance(carry):
            state, made, _ = carry
            more = jnp.maximum(jnp.clip(made, least, 2), made // 3)
            following = jnp.minimum(made + more, most)
            state = krylov.advance(flat, state, made, following)
            return state, following, look(flat, state, following) <= adaptive.share

        state = krylov.start(flat, probe, most)
        carry = state, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        return jax.lax.while_loop(unfinished, advance, carry)[1]

    frozen = operator.frozen
    return execution.map(run, frozen, jax.lax.stop_gradient(probe)[None], most)[0]
