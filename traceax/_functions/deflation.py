"""The trace of a function on a block Krylov space, which is deflated."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._krylov.block_lanczos import BlockLanczosDecomposition
from .._numerics.dense import eigh, two_norm
from .._quadrature.domain import slopes_at, used_nodes, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.quadratic_form import gauss_rule
from .._quadrature.rounding import unresolved_error
from .._quadrature.rules import bracket_of, comparison_nodes, comparison_rules, integrals
from .._quadrature.tridiagonal import Compression


class Seen(eqx.Module):
    """The deflated part of the squared Frobenius norm of f(A), less a multiple of the
    identity, which adds no variance; and about the trace."""

    norm: Real[Array, ""]
    value: Real[Array, ""]


class Deflation(eqx.Module):
    """f(A) on a block Krylov space, of which the columns that are `present` in `basis`
    are deflated; all others are zero.

    - `value`: the trace over them, its `magnitude`, how far `rounding` moves it, and what
        is `unresolved`, as in `QuadraticForm`.
    - `values`: of f, at the nodes.
    - `whole`: the basis of the whole space.
    """

    compression: Compression
    values: Real[Array, " p"]
    value: Real[Array, ""]
    magnitude: Real[Array, ""]
    rounding: Real[Array, ""]
    unresolved: Real[Array, ""] | float
    basis: Inexact[Array, "n w"]
    present: Bool[Array, " w"]
    whole: Inexact[Array, "n p"]

    @classmethod
    def of(
        cls,
        function: AbstractSpectralFunction,
        run: BlockLanczosDecomposition,
        steps: Int[Array, ""],
        kept: Int[Array, ""],
        width: int,
        eps: float,
    ) -> "Deflation":
        """Of `steps` steps, with the first `kept` blocks deflated."""
        b = len(run.coupling)
        nodes, vectors = eigh(run.matrix)
        basis = run.basis[:, :width]
        present = (jnp.arange(width) < kept * b) & jnp.any(basis != 0, axis=0)
        weights = jnp.sum(jnp.abs(vectors[:width] * present[:, None]) ** 2, axis=0)
        used = used_nodes(function, nodes, weights)
        values, slopes = values_at(function, used, eps), slopes_at(function, used, eps)
        value, size = gauss_rule(weights, nodes, values, slopes)
        again, others = eigh(run.again)
        again = values_at(function, again + run.neglected, eps)
        changes = _diagonal(again, others, present) - _diagonal(values, vectors, present)
        # They, or their sum, may be small by chance.
        known = eps * jnp.max(jnp.abs(nodes)) * two_norm(weights * slopes)
        seen = jnp.maximum(jnp.abs(jnp.sum(changes)), two_norm(changes))
        rounding = jnp.maximum(seen, known)
        unresolved = unresolved_error(function, weights, used, values, eps)
        parts = run.matrix, run.coupling, (steps - 1) * b, nodes, vectors
        compression = Compression(*parts)
        numbers = value, size, rounding, unresolved
        deflated = basis * present
        return cls(compression, values, *numbers, deflated, present, run.basis)

    def remove(self, probes: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        for _ in range(2):
            probes = probes - self.basis @ (self.basis.conj().T @ probes)
        return probes

    @property
    def lead(self) -> Inexact[Array, "w p"]:
        return self.compression.vectors[: len(self.present)] * self.present[:, None]

    def bracket(
        self, function: AbstractSpectralFunction, lower: Real[Array, ""]
    ) -> Real[Array, "2"]:
        nodes, vectors = eigh(comparison_rules(function, self.compression, lower))
        nodes = comparison_nodes(function, nodes, lower)
        others = integrals(map(function, nodes), vectors, self.present)
        # The last block is not deflated, and two more steps go there and back.
        settings = others, self.compression.coupling, 3
        return bracket_of(function, self.value, *settings)

    def left(
        self, function: AbstractSpectralFunction, eps: float
    ) -> Inexact[Array, "n w"]:
        weights = jnp.sum(jnp.abs(self.lead) ** 2, axis=0)
        nodes = used_nodes(function, self.compression.nodes, weights)
        slopes = slopes_at(function, nodes, eps)
        return self.whole @ ((self.compression.vectors * slopes) @ self.lead.conj().T)

    def seen(self, unit: Real[Array, ""]) -> Seen:
        """The norm is that of the deflated rows and columns, less the mean of f over the
        first block, which is random. This mean times n, or the deflated part if that is
        larger, stands for the trace. All is in units of `unit`."""
        b, n = len(self.compression.coupling), len(self.basis)
        first = jnp.sum(jnp.abs(self.compression.vectors[:b]) ** 2, axis=0)
        values, value = self.values / unit, self.value / unit
        mean = jnp.sum(first * values) / b
        weighted = (values - mean) * self.lead
        inside = weighted @ self.lead.conj().T
        norm = 2 * jnp.sum(jnp.abs(weighted) ** 2) - jnp.sum(jnp.abs(inside) ** 2)
        larger = jnp.abs(value) > n * jnp.abs(mean)
        return Seen(norm, jnp.where(larger, value, n * mean))


def _diagonal(
    values: Real[Array, " p"], vectors: Inexact[Array, "p p"], present: Bool[Array, " w"]
) -> Real[Array, " w"]:
    """The diagonal of a matrix with these eigenvalues and eigenvectors, in the rows that
    are `present`. Values without weight may be infinite."""
    squares = jnp.abs(vectors[: len(present)] * present[:, None]) ** 2
    return jnp.sum(jnp.where(squares > 0, squares * values, 0), axis=1)
