"""Deflation of a block Krylov space, and the trace of a function over it.

Block Lanczos from b vectors gives `A V = V T + v B E*` with an orthonormal basis V and a
block tridiagonal `T = Y diag(t) Y*`. The first columns Q of V are deflated:

    tr f(A) = tr(Q* f(A) Q) + tr((I - Q Q*) f(A) (I - Q Q*)),
    tr(Q* f(A) Q) ~ sum_j f(t_j) sum_(i in Q) |y_ij|^2

(Chen and Hallman, SIAM J. Matrix Anal. Appl. 44, 2023). Block q of s is exact for
polynomials of degree up to 2 (s - q) + 1, so all blocks but the last can be deflated.

In the code `compression` has T, B, the t_j (`nodes`) and Y (`vectors`), `basis` is Q,
`whole` is V, and `lead` has the rows of Y that belong to Q. Why brackets hold is in
docs/devdocs/quadrature.md, "How much of a Krylov space is deflated".
"""

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


class DeflatedNorm(eqx.Module):
    """The deflated part of `||f(A) - c I||_F^2`, where a multiple of the identity adds no
    variance; and a rough value of `tr f(A)`."""

    square: Real[Array, ""]
    trace: Real[Array, ""]


class Deflation(eqx.Module):
    """f(A) on a block Krylov space. Some columns of its basis are deflated.

    - `compression`: A on the whole space.
    - `values`: f at the nodes.
    - `value`: the trace of f(A) over the deflated columns. `magnitude`, `rounding` and
        `unresolved` are as in `QuadraticForm`.
    - `basis`: Q. `present` tells its columns from columns of zeros.
    - `whole`: V, the basis of the whole space.
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
        num_blocks: Int[Array, ""],
        width: int,
        eps: float,
    ) -> "Deflation":
        """The deflation of the first `num_blocks` blocks of a run of `steps` steps.
        `width` is the number of columns for which room is made, and `eps` the machine
        epsilon of the matvecs."""
        b = len(run.coupling)
        nodes, vectors = eigh(run.matrix)
        basis = run.basis[:, :width]
        present = (jnp.arange(width) < num_blocks * b) & jnp.any(basis != 0, axis=0)
        weights = jnp.sum(jnp.abs(vectors[:width] * present[:, None]) ** 2, axis=0)
        used = used_nodes(function, nodes, weights)
        values, slopes = values_at(function, used, eps), slopes_at(function, used, eps)
        value, size = gauss_rule(weights, nodes, values, slopes)
        # T from the entries of V* A V on the other side of its diagonal: only rounding
        # tells the two apart.
        moved, directions = eigh(run.again)
        moved = values_at(function, moved + run.neglected, eps)
        diagonal = _diagonal(values, vectors, present)
        changes = _diagonal(moved, directions, present) - diagonal
        # The sum is one sample of the effect of rounding, and may be small by chance, as
        # may all changes. Without these floors values were up to 11 error bars off.
        floor = eps * jnp.max(jnp.abs(nodes)) * two_norm(weights * slopes)
        change = jnp.maximum(jnp.abs(jnp.sum(changes)), two_norm(changes))
        compression = Compression(
            matrix=run.matrix,
            coupling=run.coupling,
            first=(steps - 1) * b,
            nodes=nodes,
            vectors=vectors,
        )
        return cls(
            compression=compression,
            values=values,
            value=value,
            magnitude=size,
            rounding=jnp.maximum(change, floor),
            unresolved=unresolved_error(function, weights, used, values, eps=eps),
            basis=basis * present,
            present=present,
            whole=run.basis,
        )

    def remove(self, probes: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        """`(I - Q Q*) Z`."""
        # Twice, as rounding leaves a part in Q where most of a probe is in Q.
        for _ in range(2):
            probes = probes - self.basis @ (self.basis.conj().T @ probes)
        return probes

    @property
    def lead(self) -> Inexact[Array, "w p"]:
        """The rows of Y that belong to Q."""
        return self.compression.vectors[: len(self.present)] * self.present[:, None]

    def bracket(
        self, function: AbstractSpectralFunction, lower: Real[Array, ""]
    ) -> Real[Array, "2"]:
        """Bounds of `tr(Q* f(A) Q)`. `lower` is a lower bound of the spectrum."""
        nodes, vectors = eigh(comparison_rules(function, self.compression, lower))
        nodes = comparison_nodes(function, nodes, lower)
        others = integrals(map(function, nodes), vectors, self.present)
        # Exact to the degree 2 (s - q) + 1, with q = s - 1 for the last deflated block:
        # one step to the last block of T and one back.
        coupling = self.compression.coupling
        return bracket_of(function, self.value, others, coupling, degree=3)

    def left(
        self, function: AbstractSpectralFunction, eps: float
    ) -> Inexact[Array, "n w"]:
        """L for `R = Q` of the frame `d tr(Q* f(A) Q) ~ Re tr(L* dA R)`: the columns
        `V f'(T) E`, with E the first columns of the identity."""
        weights = jnp.sum(jnp.abs(self.lead) ** 2, axis=0)
        nodes = used_nodes(function, self.compression.nodes, weights)
        slopes = slopes_at(function, nodes, eps)
        return self.whole @ ((self.compression.vectors * slopes) @ self.lead.conj().T)

    def deflated_norm(self, unit: Real[Array, ""]) -> DeflatedNorm:
        """The norm of the rows and columns of `f(A) - c I` that are deflated, and the
        trace, both in units of `unit`.

        c is the mean of f over the first block. That block is random, so n c estimates
        the trace. If the deflated part of the trace is larger, it is taken instead."""
        b, n = len(self.compression.coupling), len(self.basis)
        first = jnp.sum(jnp.abs(self.compression.vectors[:b]) ** 2, axis=0)
        values, value = self.values / unit, self.value / unit
        mean = jnp.sum(first * values) / b
        # With F = f(A) - c I the deflated columns are F Q and the rows Q* F, which share
        # the corner Q* F Q: ||F||^2 - ||(I - Q Q*) F (I - Q Q*)||^2 is
        # 2 ||F Q||^2 - ||Q* F Q||^2.
        columns = (values - mean) * self.lead
        corner = columns @ self.lead.conj().T
        square = 2 * jnp.sum(jnp.abs(columns) ** 2) - jnp.sum(jnp.abs(corner) ** 2)
        larger = jnp.abs(value) > n * jnp.abs(mean)
        return DeflatedNorm(square, trace=jnp.where(larger, value, n * mean))


def _diagonal(
    values: Real[Array, " p"], vectors: Inexact[Array, "p p"], present: Bool[Array, " w"]
) -> Real[Array, " w"]:
    """The diagonal of a matrix with these eigenvalues and eigenvectors, in the rows that
    are `present`."""
    # A value without weight may be infinite, and would make the product NaN.
    squares = jnp.abs(vectors[: len(present)] * present[:, None]) ** 2
    return jnp.sum(jnp.where(squares > 0, squares * values, 0), axis=1)
