"""How many Krylov steps each probe makes, if that is chosen automatically.

A quadratic form of s steps has a bracket [low, high] of its quadrature error. The first
probe makes steps until

    ((high - low) / 2 - rounding) / target <= share,

where the left-hand side is the `excess` in the code. The target is the tolerance of an
adaptive budget, or else the standard error of the mean of k forms `z* F z`, F = f(A),
with real probes,

    sqrt(2 / k) ||F - c I||_F,        c = tr(F) / n,

whose `deviation` `||F - c I||_F` the first probe estimates.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real, Scalar

from .._core.checks import check_positive, check_scalar
from .._core.flat import FlatOperator, freeze
from .._core.quantity import AbstractQuantity
from .._core.results import failure, RESULTS
from .._krylov.base import AbstractKrylovMethod
from .._quadrature.convergence import Convergence, SEEN_BY_ONE
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .budget import Budget
from .execution import AbstractExecution
from .gradient_steps import GradientTarget
from .random_steps import RandomSteps, refuse_random_steps


# The default largest number of steps: the small factorisations take `max_steps**3`
# operations for each probe, and 128 ** 3 are about as many as a matvec with a dense
# matrix of 1400 rows. On one H200, 20 probes of 128 steps of an ill-conditioned matrix of
# 4096 rows, and the factorisation after them, took 0.4 s in float64.
_MAX_STEPS = 128
# Where vectors are long, fewer steps bound the memory of a Krylov basis: 2^28 numbers are
# 1 GiB in float32. But the steps are not fewer than 64, with which more operators would
# fail. Both are compromises and not measured optima.
_MAX_BASIS_ENTRIES, _MIN_MAX_STEPS = 2**28, 64

# The size up to which an operator is factorised if the chosen steps were too few. So many
# more matvecs and a factorisation cost about as much as the probes that missed: 20 probes
# of 128 steps make 2560 matvecs. Without orthogonal eigenvectors or singular vectors a
# factorisation takes ten times as long or more.
_MAX_EXACT_SIZE, _MAX_EXACT_SIZE_NOT_ORTHOGONAL = 4096, 1024

# `first` of `choose_steps` for functions without a bracket, whose quadrature error is
# estimated from several iterates: one step does not have them.
_FIRST_WITHOUT_BRACKET = 4


class AdaptiveSteps(eqx.Module):
    r"""A number of Krylov steps that is chosen automatically: pass it as `num_steps`.

    A first run, from the first probe, continues until half the width of its bracket is at
    most `share` of a target. The target is the tolerance of an adaptive budget, or else
    the standard error of a mean over `k` probes,
    $\sqrt{2 (\|f(A)\|_F^2 - (\mathrm{tr}\, f(A))^2 / n) / k}$, which that probe
    estimates. Where a log-determinant is differentiated, the bias of its gradient must be
    below the sampling error, too. Then every probe makes the same number of steps,
    `stats["num_steps"]`. The first run costs as many additional matvecs as one probe. For
    [`traceax.diagonal_of_function`][] the bracket is replaced by an estimate of the error
    of a product with f(A).

    One compiled program serves all numbers of steps up to `max_steps`. Its buffers and
    its small factorisations have that size: `max_steps` vectors of length n for each
    probe of a block, and `max_steps**3` operations for each probe.

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

    - `max_steps`: the largest number of steps, a Python integer; a larger number than n
        counts as n. The default is 128 (64 for [`traceax.KrylovAwareEstimator`][], which
        keeps many vectors for each step). For more than two million rows it is smaller,
        but at least 64, so that so many vectors of length n have at most $2^{28}$
        entries.
        The steps may leave a quadrature error above the error bar or the tolerance, or
        fail to distinguish the operator from a singular one where that matters. Then the
        exact answer replaces the estimate if n is at most 4096 (1024 for functions of
        operators without a tag). For a larger n the result is `RESULTS.too_few_steps`.
    - `share`: the largest quadrature error over the target, a positive real number.
    """

    max_steps: int | None = eqx.field(static=True, default=None)
    share: Scalar | float = 0.1

    def __init__(self, max_steps: int | None = None, share: Scalar | float = 0.1):
        """**Arguments:**

        - `max_steps`: default is `None`, as above.
        - `share`: default is 0.1.

        **Raises:**

        `TypeError` or `ValueError` if `max_steps` is not a Python integer of 1 or more,
        or if `share` is not a positive scalar.
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
        """`max_steps`, after `check_steps` has set it for the size of the operator."""
        assert self.max_steps is not None
        return self.max_steps


def check_steps(num_steps: Any, n: int, default: int = _MAX_STEPS) -> int | AdaptiveSteps:
    """The number of steps, fixed or adaptive, limited to n. An adaptive one without
    `max_steps` has at most `default`, and for long vectors fewer."""
    num_steps = refuse_random_steps(num_steps)
    if isinstance(num_steps, AdaptiveSteps):
        limit = num_steps.max_steps
        if limit is None:
            limit = min(default, max(_MIN_MAX_STEPS, _MAX_BASIS_ENTRIES // n))
        return AdaptiveSteps(min(limit, n), num_steps.share)
    return min(check_positive("num_steps", num_steps), n)


def check_any_steps(
    num_steps: Any, n: int, default: int = _MAX_STEPS
) -> int | AdaptiveSteps | RandomSteps:
    """As `check_steps`, for calls that take a random number, too."""
    if isinstance(num_steps, RandomSteps):
        return num_steps.for_size(n)
    return check_steps(num_steps, n, default)


def exact_limit(*, orthogonal: bool = True) -> int:
    """The size up to which an operator is factorised if an estimate fails. `orthogonal`
    says whether the factorisation has orthogonal vectors."""
    return _MAX_EXACT_SIZE if orthogonal else _MAX_EXACT_SIZE_NOT_ORTHOGONAL


def excess_of_bracket(
    value: Inexact[Array, ""],
    bracket: Real[Array, "2"],
    deviation: Real[Array, ""] | float,
    operator: FlatOperator,
    k: int | Budget,
    quantity: AbstractQuantity,
    num_strata: int = 1,
    *,
    values: Inexact[Array, " f"] | None = None,
) -> Real[Array, ""]:
    """Half the width of a bracket, without the part that is due to rounding, divided by
    the target. That is the tolerance, or the standard error of k forms one of which has
    this `deviation`. If the value is one of several `values`, the tolerance is for all of
    them together."""
    # More steps do not make a bracket narrower than its rounding errors.
    rounding = operator.rounding * jnp.abs(value)
    low, high = bracket
    if isinstance(k, Budget) and values is not None:
        target = k.rule.tolerance(k.rule.size(quantity.arrange(values)))
    elif isinstance(k, Budget):
        # The tolerance is about the value in the form that users see, such as a root.
        low, _ = quantity.present(low, rounding)
        high, _ = quantity.present(high, rounding)
        value, rounding = quantity.present(value, rounding)
        low, high, rounding = k.rule.size(low), k.rule.size(high), k.rule.size(rounding)
        target = k.rule.tolerance(k.rule.size(value))
    else:
        target = standard_error(deviation, k, num_strata)
    return excess(jnp.abs(high - low) / 2 - rounding, target)


# How much smaller the deviation of probes from one stratum may be than the deviation of
# plain ones: where colours are used they gain 75 to 3000 in variance, and up to 1e7. The
# steps that reduce the quadrature error by such a factor are few: it falls exponentially.
DEVIATION_IN_STRATUM = 1e-2


def standard_error(
    deviation: Real[Array, ""] | float, k: int, num_strata: int = 1
) -> Real[Array, ""]:
    """The standard error of the mean of `z* F z` over k real probes, for the deviation
    `||F - c I||_F` with c the mean eigenvalue of F. For probes of several strata, how
    small it may well be."""
    if num_strata > 1:
        deviation = DEVIATION_IN_STRATUM * deviation
    # The variance of z* F z is 2 ||F||_F^2 for Hermitian F and Gaussian z. The part c I
    # adds nothing where z* z = n, as for signs and probes on the sphere.
    return jnp.sqrt(2 / k) * deviation


def excess(error: Real[Array, "*s"], target: Real[Array, "*s"]) -> Real[Array, "*s"]:
    """An error divided by the target. If the target is 0, it is infinite for any error
    but 0."""
    error = jnp.maximum(error, 0)
    ratio = error / jnp.where(target > 0, target, 1)
    return jnp.where((target > 0) | (error == 0), ratio, jnp.inf)


class Steps(eqx.Module):
    """The number of Krylov steps of each probe.

    - `most`: the number of steps for which there is room.
    - `made`: the number of steps that each probe makes.
    - `spent`: the number of steps of the run that chose it; 0 if none did.
    - `chosen`: whether the number was chosen automatically.
    - `limited`: whether a total of matvecs did. Then a quadrature error is no failure.
    """

    most: int = eqx.field(static=True)
    made: Int[Array, ""] | int
    spent: Int[Array, ""] | int
    chosen: bool = eqx.field(static=True)
    limited: bool = eqx.field(static=True, default=False)

    @classmethod
    def of(
        cls,
        num_steps: int | AdaptiveSteps,
        choose: Callable[[AdaptiveSteps], Int[Array, ""]],
    ) -> "Steps":
        """The number `num_steps`, or the number that `choose` returns if it is
        adaptive."""
        if not isinstance(num_steps, AdaptiveSteps):
            return cls(most=num_steps, made=num_steps, spent=0, chosen=False)
        steps = choose(num_steps)
        return cls(most=num_steps.most, made=steps, spent=steps, chosen=True)

    @classmethod
    def resumed(
        cls,
        num_steps: int | AdaptiveSteps,
        choose: Callable[[AdaptiveSteps], Int[Array, ""]],
        k: int | Budget,
    ) -> "tuple[Steps, int | Budget]":
        """As `of`, but with the number of an earlier run if k resumes one. Also returns k
        with the state that the loop resumes."""
        if not isinstance(k, Budget) or k.state is None:
            return cls.of(num_steps, choose), k
        earlier, loop = k.state
        return cls.of(num_steps, lambda _: earlier), dataclasses.replace(k, state=loop)

    def report(self, missed: Bool[Array, ""]) -> tuple[dict[str, Array], Any]:
        """The entry of `stats` with the number of steps, and the result: where the number
        was chosen and the target was `missed`, `RESULTS.too_few_steps`."""
        stats = {"num_steps": jnp.asarray(self.made, jnp.int32)}
        # A number that the user gave is taken as it is.
        if not self.chosen:
            return stats, None
        return stats, failure(missed, RESULTS.too_few_steps)

    def state(self, loop: PyTree[Array] | None) -> PyTree[Array] | None:
        """The state of an adaptive run: the state of its loop, and the number of steps.
        A run that resumes takes the same number, so that all its samples have the same
        quadrature error."""
        return None if loop is None else (jnp.asarray(self.made, jnp.int32), loop)


def choose_steps_of_form(
    adaptive: AdaptiveSteps,
    krylov: AbstractKrylovMethod,
    operator: FlatOperator,
    function: AbstractSpectralFunction | FunctionTree,
    bound: Scalar | float | None,
    probe: Inexact[Array, " n"],
    excess: Callable[..., Real[Array, ""]],
    target: GradientTarget,
    execution: AbstractExecution,
) -> Int[Array, ""]:
    """The number of steps that the forms of this probe need, one for each function.
    `excess` is a function of the value of a form, its bracket and its deviation, and for
    a tree of functions of their `values`; `bound` is a lower bound of the eigenvalues."""
    bracketed = all(each.bracketed for each in members_of(function))
    first = 1 if bracketed else _FIRST_WITHOUT_BRACKET
    function, bound = freeze((function, bound))

    def excess_after(flat, state, steps):
        # The derivative is not read here, so one column of it is enough.
        read = ft.partial(krylov.read, flat, state, steps)
        forms = [read(each, bound, 1) for each in members_of(function)]
        if not isinstance(function, FunctionTree):
            return excess_of_form(forms[0], function, excess, target)
        values = jnp.stack([form.value for form in forms])
        of_values = ft.partial(excess, values=values)
        pairs = zip(forms, function.members, strict=True)
        return jnp.max(jnp.stack([excess_of_form(*x, of_values, target) for x in pairs]))

    return choose_steps(adaptive, krylov, operator, probe, first, excess_after, execution)


def excess_of_form(
    form: QuadraticForm,
    function: AbstractSpectralFunction,
    excess: Callable[[Array, Array, Array], Real[Array, ""]],
    target: GradientTarget,
) -> Real[Array, ""]:
    """The `excess` of the bracket of a form or, if larger, of its derivative; infinite
    while the operator may be singular and the function is infinite at zero. Other
    estimates of the error are left out: they differ too much between probes."""
    ratio = excess(form.value, form.bracket, form.deviation)
    ratio = jnp.maximum(ratio, target.excess(function, form.residual, form.extremes))
    may_be_singular = Convergence.of(form).may_be_singular(SEEN_BY_ONE)
    return jnp.where(may_be_singular, jnp.inf, ratio)


def choose_steps(
    adaptive: AdaptiveSteps,
    krylov: AbstractKrylovMethod,
    operator: FlatOperator,
    probe: Inexact[Array, " n"],
    first: int,
    excess_after: Callable[
        [FlatOperator, PyTree[Array], Int[Array, ""]], Real[Array, ""]
    ],
    execution: AbstractExecution,
) -> Int[Array, ""]:
    """The number of steps after which `excess_after(operator, state, steps)` is at most
    `adaptive.share` for this probe. `first` is as in `advance_until`.

    Under `vmap` all members take the largest of their numbers. So nothing in the run
    depends on a member unless the operator or the probe does, and members that differ in
    the function alone share the matvecs."""

    def run(flat, probe):
        _, steps, _ = advance_until(
            ft.partial(krylov.advance, flat),
            krylov.start(flat, probe, adaptive.most),
            adaptive=adaptive,
            first=first,
            excess_after=ft.partial(excess_after, flat),
            all_of=eqxi.unvmap_all,
        )
        return steps

    # One input of an execution and not a plain call, so that on a mesh the operator is
    # applied as it is for other probes. The width counts vectors of a Krylov basis.
    probes = jax.lax.stop_gradient(probe)[None]
    return execution.map(run, operator.frozen, probes, width=adaptive.most)[0]


def advance_until(
    advance: Callable[[PyTree[Array], Array, Array], PyTree[Array]],
    start: PyTree[Array],
    adaptive: AdaptiveSteps,
    first: int,
    excess_after: Callable[[PyTree[Array], Int[Array, ""]], Real[Array, ""]],
    all_of: Callable[[Bool[Array, ""]], Bool[Array, ""]] = lambda converged: converged,
    most: Int[Array, ""] | int | None = None,
) -> tuple[PyTree[Array], Int[Array, ""], Bool[Array, ""]]:
    """Run a Krylov method until `excess_after(state, steps)` is at most `adaptive.share`,
    or for `most` steps. Returns the state, the number of steps, and whether the share was
    reached. `advance(state, first, last)` makes the steps from `first` to `last`.
    `all_of` reduces the last result over members that are to end together.

    The excess is computed after 2, 4, 6, 8 and 10 steps, then whenever their number has
    grown by a third; if `first` is 1, after 1 step too. So at most a third of the steps
    is wasted, and the number of factorisations grows with the logarithm of theirs."""
    most = adaptive.most if most is None else most

    def unfinished(carry) -> Bool[Array, ""]:
        _, steps, converged = carry
        return ~all_of(converged) & (steps < most)

    def advance_and_look(carry):
        state, steps, converged = carry
        # `clip` returns its upper limit, 2, for any `first` above that.
        increment = jnp.maximum(jnp.clip(steps, first, 2), steps // 3)
        next_steps = jnp.minimum(steps + increment, most)
        state = advance(state, steps, next_steps)
        converged |= excess_after(state, next_steps) <= adaptive.share
        return state, next_steps, converged

    carry = start, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return jax.lax.while_loop(unfinished, advance_and_look, carry)
