import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from .._core.arithmetic import full_precision
from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for, SphereSampler
from .._core.solution import Estimate
from .._krylov.block_lanczos import (
    block_lanczos_advance,
    block_lanczos_run,
    block_lanczos_start,
    BlockLanczosState,
)
from .._krylov.lanczos import Lanczos
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import spectral_range
from .._run.budget import Budget, largest_budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach
from .._run.loop import embed
from .._run.steps import AdaptiveSteps, choose_steps_of_form, excess_of_bracket, Steps
from .base import AbstractFunctionEstimator, describe_mismatch
from .deflated_forms import DeflatedForms
from .deflation import Deflation
from .gradients import AbstractFunctionGradient
from .samples import estimate_of_forms, stream_forms


class KrylovAwareEstimator(AbstractFunctionEstimator):
    r"""Krylov-aware deflation: the trace of $f(A)$ on a block Krylov space, and
    stochastic Lanczos quadrature on its complement.

    With $b = \max(1, \lfloor k/4 \rfloor)$ random vectors, `d = 2 * num_steps` steps of
    block Lanczos. All of the basis but its last block, $Q$ with `b * (d - 1)` columns, is
    deflated: $\mathrm{tr}(Q^* f(A) Q)$ comes from the whole block tridiagonal matrix at
    no further product. The other `k - 2 b` probes, less their part in $Q$, estimate the
    rest with `num_steps` steps each.

    `block=(b, d)` chooses both, and leaves all k probes for the rest: `b * d + k *
    num_steps` products. Where eigenvalues of $f(A)$ decay, most products are better spent
    on few vectors and many steps. Of 120, `block=(3, 36), k=4, num_steps=3` had a half to
    1/850 of the error of `k=6, num_steps=20`.

    With [`traceax.Adaptive`][], `b = max(1, round_size // 4)`. Then `num_steps` further
    columns for each of the b vectors are deflated, at the price of b probes, as long as
    that saves more probes than it costs, and for no more than half of `max_k`. After that
    probes are added in rounds. Rounds of 4 or 8 suit it best. A `block` does not grow.

    It pays off where a few well separated eigenvalues, which a Krylov space finds
    quickly, carry most of $\|f(A)\|_F$: the exponential or a power of an operator with a
    decaying spectrum. On a flat spectrum half of the probes are spent without gain.

    Cost: without `block` at most `k * num_steps` products; $O(n (b d)^2)$ operations.
    Memory: it keeps `b * d` vectors of length n, without `block` about `k * num_steps /
    2` (with `Adaptive` `max_k * num_steps / 2`, and a dense eigenvalue problem of that
    size each time that it grows); the peak is about twice that, and with a derivative
    about five times. Needs `k >= 3`, with a `block` `k >= 1`. The quadrature error is in
    `stats` as with [`traceax.SLQEstimator`][].

    With [`traceax.AdaptiveSteps`][], so if `num_steps` is left out, `num_steps` above is
    what the first probe takes before anything is deflated, and memory is that of
    `max_steps`. For a fixed k, whose error becomes smaller by the deflation, and with a
    `block`, the steps of the other probes are chosen after it. Each choice costs the
    products of one probe more.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(10.0 / jnp.arange(1, 101))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        estimator, key = tx.KrylovAwareEstimator(), jax.random.key(0)
        solution = tx.trace_of_function(
            operator, tx.Exp(), estimator, k=8, num_steps=5, key=key
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `sampler`: distribution of the probes, rotation invariant. What is left of a probe
        after deflation is scaled to the length that it has in the mean.
    - `block`: how many vectors are deflated from, and by how many steps of block Lanczos,
        a pair of Python integers, 1 and 2 or more; or `None`, as above.

    ??? cite

        ```bibtex
        @article{chen2023krylov,
            author  = {Chen, Tyler and Hallman, Eric},
            title   = {{Krylov}-Aware Stochastic Trace Estimation},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {44},
            number  = {3},
            pages   = {1218--1244},
            year    = {2023},
        }
        ```
    """

    sampler: AbstractSampler = SphereSampler()
    block: tuple[int, int] | None = eqx.field(static=True, default=None)
    most_steps: ClassVar[int] = 64

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "SphereSampler()")
        if not self.sampler.rotation_invariant:
            raise ValueError(
                "`sampler` must be rotation invariant: probes are projected and scaled. "
                f"Found `{type(self.sampler).__name__}`. Use `traceax.SphereSampler`."
            )
        if self.block is not None and not _is_pair(self.block):
            raise ValueError(
                "`block` must be a pair of Python integers: how many vectors, 1 or more, "
                f"and how many steps, 2 or more. Found {self.block!r}."
            )

    @property
    def min_probes(self) -> int:  # pyright: ignore
        return 3 if self.block is None else 1

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        self._check(operator, function)
        settings = operator, function, k, num_steps, key, execution, quantity
        deflated = self._deflate(*settings)
        b, deflation, rest = deflated.b, deflated.deflation, deflated.k
        forms = DeflatedForms.of(operator, function, deflation, self.sampler, key, b)

        def excess(value, bracket, deviation):
            return excess_of_bracket(value, bracket, deviation, operator, rest, quantity)

        def choose(adaptive):
            if isinstance(k, Budget) and k.state is not None:
                return k.state[0]
            return forms.choose_steps(adaptive, operator, excess, execution)

        steps, products = deflated.first, deflated.products
        if steps is None or isinstance(k, int):
            steps = Steps.of(num_steps, choose)
            products = products + steps.spent

        def form(flat, index):
            return forms.form(flat, index, steps, gradient.columns)

        if isinstance(rest, Budget):
            spent = -(-deflated.steps * b // steps.made)
            rest = dataclasses.replace(rest, spent=spent)
        settings = operator, function, gradient, rest, execution
        streamed = stream_forms(form, *settings, width=steps.most, quantity=quantity)
        moments, extremes = streamed.summary
        extremes = spectral_range(jnp.stack([extremes, forms.ends]))

        def mean():
            left = deflation.left(function, operator.eps)
            frame = gradient.frame(function, left, deflation.basis, deflation.basis)
            # The samples, which have it too, give its derivative in the function.
            constant = jax.lax.stop_gradient(deflation.value)
            fixed = attach(operator, constant, frame, execution=execution)
            return fixed + streamed.mean()

        def probes():
            index = jnp.arange(largest_budget(rest))
            weight = jnp.where(index < streamed.count, moments.count**-0.5, 0)
            used = weight * forms.probes(operator, index)
            used = jnp.concatenate([deflation.basis, used], axis=1)
            return used.shape[1] ** 0.5 * used

        estimate = estimate_of_forms(
            *(streamed, operator, function, k, steps, excess),
            live=mean,
            extremes=extremes,
            common=deflation.rounding,
            apart=forms.likely,
        )
        return dataclasses.replace(
            estimate,
            num_matvecs=estimate.num_matvecs + products,
            state=steps.state(deflated.state(streamed.loop.state)),
            probes=probes,
        )

    def _check(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
    ) -> None:
        if not Lanczos().fits(operator, function):
            raise ValueError(
                "`KrylovAwareEstimator` needs an operator that is tagged Hermitian and a "
                "function of its eigenvalues. "
                f"{describe_mismatch(operator, function)} Add the tag that holds, or use "
                "`traceax.SLQEstimator`."
            )

    def _deflate(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity,
    ) -> "_Deflated":
        """Block Lanczos for half of the budget, or as long as that pays, or as `block`
        says."""

        def excess(value, bracket, deviation):
            return excess_of_bracket(value, bracket, deviation, operator, k, quantity)

        def choose(adaptive):
            if isinstance(k, Budget) and k.state is not None:
                return k.state[0]
            probe = draw_for(operator, self.sampler, key, jnp.zeros(1, int))[:, 0]
            settings = Lanczos(), operator, function, None, probe, excess, execution
            return choose_steps_of_form(adaptive, *settings)

        n, eps = operator.size, operator.eps
        by = None if self.block else Steps.of(num_steps, choose)
        b, first, most, rest = self._split(k, by)
        b = min(b, n)
        total = min(most, -(-n // b))
        start = draw_for(operator, self.sampler, key, jnp.arange(b))

        def kept(steps):
            """All blocks but the last, unless they fill the whole space."""
            return steps - (steps * b < n)

        def look(run, steps):
            found, width = block_lanczos_run(run, steps), kept(total) * b
            return Deflation.of(function, found, steps, kept(steps), width, eps)

        with full_precision(lambda x: execution.matmat(operator.frozen, x)) as matmat:
            advance = ft.partial(block_lanczos_advance, matmat, eps=eps)
            run = block_lanczos_start(start, total, eps=eps)
            steps = jnp.minimum(jnp.asarray(first, jnp.int32), total)
            if isinstance(rest, Budget) and rest.state is not None:
                _, (earlier, steps, loop) = rest.state
                run, rest = embed(run, earlier), dataclasses.replace(rest, state=loop)
            else:
                run = advance(run, 0, steps)
                if isinstance(rest, Budget) and by is not None:
                    settings = rest, quantity, advance, look
                    run, steps = _grow(*settings, run, steps, by.made)
            deflation = look(run, steps)
        return _Deflated(b, deflation, run, steps, rest, by)

    def _split(
        self, k: int | Budget, by: Steps | None
    ) -> tuple[int, Int[Array, ""] | int, int, int | Budget]:
        """The size of a block, how many steps it makes at first and at most, and the
        budget for the other probes."""
        if by is None:
            assert self.block is not None
            size, steps = self.block
            return size, steps, steps, k
        if not isinstance(k, Budget):
            b = max(1, k // 4)
            return b, 2 * by.made, 2 * by.most, k - 2 * b
        b = max(1, k.round_size // 4)
        rounds = max(2, k.max_k // (2 * b))
        rest = k.limited_to(k.max_k - rounds * b)
        return b, 2 * by.made, rounds * by.most, rest


def _grow(
    k: Budget,
    quantity: AbstractQuantity,
    advance: Callable[..., BlockLanczosState],
    look: Callable[[BlockLanczosState, Int[Array, ""]], Deflation],
    run: BlockLanczosState,
    steps: Int[Array, ""],
    num_steps: Int[Array, ""] | int,
) -> tuple[BlockLanczosState, Int[Array, ""]]:
    """Deflate more, as long as that saves more products than it costs (Chen and Hallman,
    section 5, with the variance of the error bar in the place of a tail bound)."""
    most, b, _ = run.diagonal.shape
    first = look(run, steps)
    unit = jnp.max(jnp.abs(first.values))
    unit = jnp.where(unit > 0, unit, 1)

    def unfinished(carry):
        _, steps, seen, gain = carry
        value, _ = quantity.present(unit * seen.value, jnp.zeros_like(unit))
        return (steps < most) & (k.rule.samples_saved(gain, value / unit, unit) > b)

    def more(carry):
        run, steps, seen, _ = carry
        following = jnp.minimum(steps + num_steps, most)
        run = advance(run, steps, following)
        now = look(run, following).seen(unit)
        return run, following, now, now.norm - seen.norm

    seen = first.seen(unit)
    carry = run, steps, seen, seen.norm
    run, steps, *_ = jax.lax.while_loop(unfinished, more, carry)
    return run, steps


def _is_pair(block: Any) -> bool:
    numbers = isinstance(block, tuple) and len(block) == 2
    integers = numbers and all(type(x) is int for x in block)
    return integers and block[0] >= 1 and block[1] >= 2


class _Deflated(eqx.Module):
    """What `steps` steps with blocks of size `b` have found, and what is left of k; how
    many steps a probe took at `first`."""

    b: int
    deflation: Deflation
    run: BlockLanczosState
    steps: Int[Array, ""]
    k: int | Budget
    first: Steps | None

    @property
    def products(self) -> Int[Array, ""]:
        return self.steps * self.b + (0 if self.first is None else self.first.spent)

    def state(self, loop: PyTree[Array]) -> PyTree[Array]:
        return (self.run, self.steps, loop) if isinstance(self.k, Budget) else None


KrylovAwareEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.SphereSampler`][].
- `block`: default is `None`.

**Raises:**

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][], and `ValueError` for
one that is not rotation invariant, and a `block` that is not such a pair.
"""
