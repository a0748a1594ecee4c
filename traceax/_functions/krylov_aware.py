"""Krylov-aware deflation.

    tr f(A) ~ tr(Q* f(A) Q) + 1/m sum_i z_i* f(A) z_i,    z_i = c_i (I - Q Q*) omega_i

(Chen and Hallman, SIAM J. Matrix Anal. Appl. 44, 2023). Q has all blocks but the last of
d steps of block Lanczos from b vectors. The first term is the `value` of `deflation`, and
`forms` has the forms of the second: see `deflation.py` and `deflated_forms.py`. How many
matvecs are spent on each of them is in `deflation_budget.py`. In the code `steps` of a
deflation is d, `b` is b, and m is `streamed.count`.
"""

import dataclasses
import functools as ft
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from .._core.arithmetic import full_precision
from .._core.checks import check_instance
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for
from .._core.samplers import SphereSampler
from .._core.solution import Estimate
from .._krylov.block_lanczos import (
    block_lanczos_advance,
    block_lanczos_run,
    block_lanczos_start,
)
from .._krylov.lanczos import Lanczos
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import spectral_range
from .._run.budget import Budget, largest_budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach
from .._run.gradient_steps import GradientTarget
from .._run.loop import embed
from .._run.random_steps import RandomSteps, refuse_random_steps
from .._run.steps import AdaptiveSteps, choose_steps_of_form, excess_of_bracket, Steps
from .base import AbstractFunctionEstimator, check_real_on_reals, describe_mismatch
from .deflated_forms import DeflatedForms
from .deflation import Deflation
from .deflation_budget import BlockRun, grow_deflation, split_budget
from .gradients import AbstractFunctionGradient
from .samples import estimate_of_forms, stream_forms


class KrylovAwareEstimator(AbstractFunctionEstimator):
    r"""Krylov-aware deflation: the trace of $f(A)$ on a block Krylov space, and
    stochastic Lanczos quadrature on its complement.

    Block Lanczos makes `d = 2 * num_steps` steps from $b = \max(1, \lfloor k/4 \rfloor)$
    random vectors. All blocks of its basis but the last one, $Q$ with `b * (d - 1)`
    columns, are deflated: $\mathrm{tr}(Q^* f(A) Q)$ comes from the whole block
    tridiagonal matrix without further matvecs. The other `k - 2 b` probes, projected
    onto the complement of $Q$, estimate the remainder with `num_steps` steps each.

    `block=(b, d)` sets both numbers, and leaves all k probes for the remainder, with
    `b * d + k * num_steps` matvecs in total. Where eigenvalues of $f(A)$ decay, most
    matvecs are better spent on few vectors and many steps. With 120 matvecs,
    `block=(3, 36), k=4, num_steps=3` had between 1/2 and 1/850 of the error of
    `k=6, num_steps=20`.

    With [`traceax.Adaptive`][], `b = max(1, round_size // 4)`. Deflation then grows by
    `num_steps` columns for each of the b vectors, at the price of b probes, as long as
    that saves more probes than it costs, up to half of `max_k`. After that probes are
    added in rounds. Rounds of 4 or 8 suit it best. A `block` does not grow.

    It pays off where a few well separated eigenvalues, which a Krylov space finds
    quickly, carry most of $\|f(A)\|_F$: the exponential or a power of an operator with a
    decaying spectrum. On a flat spectrum half of the probes are spent without gain.

    Cost: without `block` at most `k * num_steps` matvecs; $O(n (b d)^2)$ operations.
    Memory: it keeps `b * d` vectors of length n, without `block` about
    `k * num_steps / 2`. With `Adaptive` it keeps `max_k * num_steps / 2`, and solves a
    dense eigenvalue problem of that size each time that it grows. The peak is about twice
    that, and with a derivative about five times. It needs `k >= 3`, with a `block`
    `k >= 1`. The quadrature error is in `stats` as with [`traceax.SLQEstimator`][].

    With [`traceax.AdaptiveSteps`][], the default of calls, `num_steps` above is the
    number that the first probe takes before anything is deflated, and the buffers have
    room for `max_steps`. With a `block`, and for a fixed k, whose sampling error the
    deflation reduces, the steps of the other probes are chosen after the deflation. Each
    choice costs the matvecs of one more probe.

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

    - `sampler`: the distribution of the probes, rotation invariant. After deflation a
        probe is scaled to its mean length.
    - `block`: b and d, the number of vectors and the number of steps of block Lanczos, a
        pair of Python integers, at least 1 and 2; or `None`, as above.

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
    # Half of the number for other estimators: the basis is as large as the vectors of all
    # its steps.
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
                "`block` must be a pair of Python integers: the number of vectors, 1 or "
                f"more, and the number of steps, 2 or more. Found {self.block!r}."
            )

    @property
    def min_probes(self) -> int:  # pyright: ignore
        # Without `block` two probes pay for one vector of the block.
        return 3 if self.block is None else 1

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        self._check(operator, function)
        without_draws: int | AdaptiveSteps = refuse_random_steps(num_steps)
        target = GradientTarget.of(operator, k, gradient.from_runs)
        deflated = self._deflate(
            operator,
            function,
            k=k,
            num_steps=without_draws,
            key=key,
            target=target,
            execution=execution,
            quantity=quantity,
        )
        b, deflation = deflated.b, deflated.deflation
        forms = DeflatedForms.of(
            operator, function, deflation, sampler=self.sampler, key=key, offset=b
        )

        def excess(value, bracket, deviation):
            k = deflated.budget
            return excess_of_bracket(value, bracket, deviation, operator, k, quantity)

        def choose(adaptive):
            # All samples of a resumed run have as many steps as its first ones.
            if isinstance(k, Budget) and k.state is not None:
                return k.state[0]
            return forms.choose_steps(adaptive, operator, excess, target, execution)

        # With a tolerance the target is the same before and after the deflation. With a
        # fixed k it is the sampling error, which the deflation has reduced.
        steps, num_matvecs = deflated.probe_steps, deflated.num_matvecs
        if steps is None or isinstance(k, int):
            steps = Steps.of(without_draws, choose)
            num_matvecs = num_matvecs + steps.spent

        budget = deflated.budget_after(steps)
        streamed = stream_forms(
            lambda flat, i: forms.form(flat, i, steps, gradient.columns),
            operator=operator,
            function=function,
            gradient=gradient,
            k=budget,
            execution=execution,
            sampler=self.sampler,
            width=steps.most,
            quantity=quantity,
        )
        moments, extremes = streamed.summary
        extremes = spectral_range(jnp.stack([extremes, forms.ends]))

        def mean():
            left = deflation.left(function, operator.eps)
            frame = gradient.frame(function, left, deflation.basis, deflation.basis)
            # Its derivative in the parameters of f is in the samples already.
            constant = jax.lax.stop_gradient(deflation.value)
            deflated_part = attach(operator, constant, frame, execution=execution)
            return deflated_part + streamed.mean()

        def probes():
            size, weight = largest_budget(budget), moments.count**-0.5
            return forms.isotropic_columns(operator, size, streamed.count, weight=weight)

        estimate = estimate_of_forms(
            streamed,
            operator=operator,
            function=function,
            k=k,
            steps=steps,
            excess=excess,
            target=target,
            live=mean,
            extremes=extremes,
            common=deflation.rounding,
            apart=forms.likely,
        )
        num_matvecs = num_matvecs + estimate.num_matvecs
        state = steps.state(deflated.state(streamed.loop.state))
        return dataclasses.replace(
            estimate, num_matvecs=num_matvecs, state=state, probes=probes
        )

    def _check(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
    ) -> None:
        if Lanczos().fits(operator, function):
            check_real_on_reals(function, operator.dtype)
        else:
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
        target: GradientTarget,
        execution: AbstractExecution,
        quantity: AbstractQuantity,
    ) -> BlockRun:
        """Block Lanczos for half of a fixed budget, for as long as it pays off with an
        adaptive one, or by the numbers of `block`."""

        excess = ft.partial(excess_of_bracket, operator=operator, k=k, quantity=quantity)

        def choose(adaptive):
            if isinstance(k, Budget) and k.state is not None:
                return k.state[0]
            probe = draw_for(operator, self.sampler, key, jnp.zeros(1, int))[:, 0]
            return choose_steps_of_form(
                adaptive,
                krylov=Lanczos(),
                operator=operator,
                function=function,
                bound=None,
                probe=probe,
                excess=excess,
                target=target,
                execution=execution,
            )

        n, eps = operator.size, operator.eps
        probe_steps = None if self.block else Steps.of(num_steps, choose)
        b, steps, most, budget = split_budget(k, self.block, probe_steps)
        b = min(b, n)
        most = min(most, -(-n // b))
        start = draw_for(operator, self.sampler, key, jnp.arange(b))

        def num_deflated(steps):
            """All blocks but the last, unless they fill the whole space."""
            return steps - (steps * b < n)

        def deflate(state, steps):
            return Deflation.of(
                function,
                run=block_lanczos_run(state, steps),
                steps=steps,
                num_blocks=num_deflated(steps),
                width=num_deflated(most) * b,
                eps=eps,
            )

        # Accelerators multiply matrices in less than float32 by default, which would
        # spoil the orthogonality of the basis. Matvecs keep the precision of the user.
        with full_precision(lambda x: execution.matmat(operator.frozen, x)) as matmat:
            advance = ft.partial(block_lanczos_advance, matmat, eps=eps)
            state = block_lanczos_start(start, most, eps=eps)
            steps = jnp.minimum(jnp.asarray(steps, jnp.int32), most)
            if isinstance(budget, Budget) and budget.state is not None:
                # A resumed run may have room for more steps than the earlier one.
                _, (earlier, steps, loop) = budget.state
                state = embed(state, earlier)
                budget = dataclasses.replace(budget, state=loop)
            else:
                state = advance(state, 0, steps)
                if isinstance(budget, Budget) and probe_steps is not None:
                    state, steps = grow_deflation(
                        state,
                        steps,
                        budget=budget,
                        quantity=quantity,
                        advance=advance,
                        deflate=deflate,
                        num_steps=probe_steps.made,
                    )
            deflation = deflate(state, steps)
        return BlockRun(
            b=b,
            deflation=deflation,
            run=state,
            steps=steps,
            budget=budget,
            probe_steps=probe_steps,
        )


def _is_pair(block: Any) -> bool:
    numbers = isinstance(block, tuple) and len(block) == 2
    integers = numbers and all(type(x) is int for x in block)
    return integers and block[0] >= 1 and block[1] >= 2


KrylovAwareEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.SphereSampler`][].
- `block`: default is `None`.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for a sampler that is not rotation invariant, or a `block` that is not such a pair.
"""
