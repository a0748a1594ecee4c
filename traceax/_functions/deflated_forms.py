"""Quadratic forms of a function with what a deflation leaves of probes."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator, freeze
from .._core.sampler import AbstractSampler, draw_for
from .._krylov.lanczos import Lanczos
from .._krylov.lanczos_recurrence import LanczosState
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .._quadrature.rules import likely_end, lower_end
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps, choose_steps, excess_of_form, Steps
from .deflation import Deflation


_LANCZOS = Lanczos()


class DeflatedForms(eqx.Module):
    """Quadratic forms of the probes that follow the first `used` ones, without their part
    in the deflated space, together with what is known of that part: its `bracket`, and
    how far below and above its value the truth is `likely` to be."""

    deflation: Deflation
    function: AbstractSpectralFunction
    lower: Real[Array, ""]
    bracket: Real[Array, "2"]
    likely: Real[Array, "2"]
    ends: Real[Array, "2"]
    sampler: AbstractSampler
    key: PRNGKeyArray | None
    used: int

    @classmethod
    def of(
        cls,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        deflation: Deflation,
        sampler: AbstractSampler,
        key: PRNGKeyArray | None,
        used: int,
    ) -> "DeflatedForms":
        compression = deflation.compression
        lower = lower_end(function, compression, None, operator.eps)
        bracket = narrow = deflation.bracket(function, lower)
        if function.bracketed:
            narrow = deflation.bracket(function, likely_end(compression, lower))
        likely = jnp.array([-1, 1]) * (narrow - deflation.value)
        ends = compression.nodes[jnp.array([0, -1])]
        settings = lower, bracket, likely, ends, sampler, key, used
        return cls(deflation, function, *settings)

    def probes(
        self, flat: FlatOperator, indices: Int[Array, " m"]
    ) -> Inexact[Array, "n m"]:
        """What is left of probes, of the length that it has in the mean, as in XTrace: a
        constant part of f then adds no variance."""
        drawn = draw_for(flat, self.sampler, self.key, self.used + indices)
        probes = self.deflation.remove(drawn)
        norms = jnp.linalg.norm(probes, axis=0)
        left = flat.size - jnp.sum(self.deflation.present)
        length = jnp.sqrt(left.astype(norms.dtype))
        return probes * (length / jnp.where(norms > 0, norms, 1))

    def form(
        self, flat: FlatOperator, index: Int[Array, ""], steps: Steps, columns: int
    ) -> tuple[QuadraticForm, Inexact[Array, " n"]]:
        """That of one probe, and the probe."""
        probe = self.probes(flat, index[None])[:, 0]
        state = _LANCZOS.start(flat, probe, steps.most)
        state = _LANCZOS.advance(flat, state, 0, steps.made)
        return self._read(flat, state, steps.made, columns), probe

    def _read(
        self,
        flat: FlatOperator,
        state: LanczosState,
        steps: Int[Array, ""] | int,
        columns: int,
    ) -> QuadraticForm:
        deflation, largest = self.deflation, self.ends[1]
        # Then nothing is left: a zero probe, whose eigenvalue is to be in the domain.
        whole = jnp.sum(deflation.present) == flat.size
        entries = state.entries.at[:, 0].add(jnp.where(whole, largest, 0))
        state = dataclasses.replace(state, entries=entries)
        settings = steps, self.function, self.lower, columns, largest
        one = _LANCZOS.read(flat, state, *settings)
        # That of z* F z for isotropic z, over `||F - c||_F^2`.
        variance = 1 if jnp.issubdtype(flat.dtype, jnp.complexfloating) else 2
        return dataclasses.replace(
            one,
            value=deflation.value + one.value,
            bracket=self.bracket + one.bracket,
            magnitude=deflation.magnitude + one.magnitude,
            extremes=jnp.where(whole, self.ends, one.extremes),
            unresolved=deflation.unresolved + one.unresolved,
            hidden=self._hidden(one),
            spread=one.deviation * variance**0.5,
        )

    def _hidden(self, one: QuadraticForm) -> Real[Array, "3"] | None:
        """That of the form, whose lower end, from the deflated space, is no known one."""
        if one.hidden is None or not self.function.singular_at_zero:
            return one.hidden
        return one.hidden.at[2].set(1)

    def choose_steps(
        self,
        adaptive: AdaptiveSteps,
        operator: FlatOperator,
        excess: Callable[[Array, Array, Array], Real[Array, ""]],
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """How many steps what is left takes. The bracket of what is deflated is left out:
        more steps do not narrow it."""
        probe = self.probes(operator, jnp.zeros(1, int))[:, 0]
        narrow = jnp.stack([self.deflation.value, self.deflation.value])
        constant = freeze(dataclasses.replace(self, bracket=narrow))

        def look(flat, state, made):
            return excess_of_form(constant._read(flat, state, made, 1), excess)

        least = 1 if self.function.bracketed else 4
        return choose_steps(adaptive, _LANCZOS, operator, probe, least, look, execution)
