"""Gauss and Gauss-Radau quadrature from the recurrence that a Lanczos run finds.

Golub and Meurant, Matrices, Moments and Quadrature with Applications, 2010, chapters 6
and 7. A tridiagonal T stands for the measure whose orthonormal polynomials have its
entries as coefficients; its eigenvalues are nodes, and the squared first entries of its
eigenvectors weights.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import eigh


def tridiagonal(alpha: Real[Array, " s"], beta: Real[Array, " s"]) -> Real[Array, "s s"]:
    """T; the last of `beta` is outside."""
    row = jnp.arange(len(alpha))
    below = jnp.where(row[:, None] - row == 1, beta, 0)
    return jnp.where(row[:, None] == row, alpha, below + below.T)


def ritz(
    alpha: Real[Array, " s"], beta: Real[Array, " s"]
) -> tuple[Real[Array, " s"], Real[Array, "s s"]]:
    """Ritz values, ascending, and eigenvectors of T; the last of `beta` is outside."""
    return eigh(tridiagonal(alpha, beta))


class Compression(eqx.Module):
    """A on a Krylov space: `A V = V T + v B E*`.

    - `matrix`: T, tridiagonal or with blocks of size b.
    - `coupling`: B, of shape (b, b). E is zero but for the rows of the last step, which
        begin at `first`, a multiple of b.
    - `nodes`, `vectors`: the eigenpairs of T, the nodes ascending or descending.
    """

    matrix: Inexact[Array, "p p"]
    coupling: Inexact[Array, "b b"]
    first: Int[Array, ""] | int
    nodes: Real[Array, " p"]
    vectors: Inexact[Array, "p p"]

    @property
    def border(self) -> Inexact[Array, "b p"]:
        """`B E*`."""
        b, p = len(self.coupling), len(self.matrix)
        last = jnp.arange(p) - self.first
        tiled = jnp.tile(self.coupling, p // b)
        return jnp.where((last >= 0) & (last < b), tiled, 0)

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest modulus of a node."""
        return jnp.maximum(jnp.abs(self.nodes[0]), jnp.abs(self.nodes[-1]))

    def __neg__(self) -> "Compression":
        coupling, nodes = -self.coupling, -self.nodes
        return Compression(-self.matrix, coupling, self.first, nodes, self.vectors)


def largest_weight(compression: Compression, at: Real[Array, ""]) -> Real[Array, ""]:
    """The largest weight that the measure of a vector can have `at` a point below the
    nodes, if its coefficients are those of T: its Christoffel function there, one over
    the sum of the squares of the orthonormal polynomials, which are proportional to
    `(T - a)^(-1) e_s`."""
    largest = compression.largest
    distances = (compression.nodes - at) / jnp.where(largest > 0, largest, 1)
    distances = jnp.maximum(distances, jnp.finfo(distances.dtype).tiny ** 0.25)
    last = compression.vectors[compression.first] / distances
    return jnp.vdot(compression.vectors[0], last) ** 2 / jnp.vdot(last, last)


def radau(compression: Compression, end: Real[Array, ""]) -> Inexact[Array, "q q"]:
    """T of one step more, chosen such that `end`, at or below the spectrum, is a node
    (Golub, SIAM Review 15, 1973, 318-334). Its linear system is solved by the eigenpairs
    of T."""
    matrix, coupling = compression.matrix, compression.coupling
    size = compression.largest + jnp.max(jnp.abs(coupling))
    floor = jnp.finfo(matrix.dtype).eps * size
    distances = jnp.maximum(compression.nodes - end, jnp.where(floor > 0, floor, 1))
    rows = compression.first, len(coupling)
    last = jax.lax.dynamic_slice_in_dim(compression.vectors, *rows)
    last = jnp.matmul(coupling, last, precision="highest")
    corner = jnp.matmul(last, (last / distances).conj().T, precision="highest")
    corner = corner + end * jnp.eye(len(coupling), dtype=matrix.dtype)
    return bordered(matrix, compression.border, corner)


def radau_factor(
    factor: Real[Array, "s s"],
    border: Real[Array, " s"],
    left: Real[Array, "s s"],
    nodes: Real[Array, " s"],
    end: Real[Array, ""],
) -> Real[Array, "q q"]:
    """The same for `T = B* B`, as a factor: B of one step more, chosen such that `end`,
    at or below the singular values, is one of them. T itself is not made, of which the
    roundoff hides singular values below the root of the machine epsilon.

    `factor` is B, whose singular values are the `nodes`, descending, with the columns of
    `left`; `border` is the column beside it."""
    size = nodes[0] + jnp.max(jnp.abs(border))
    floor = jnp.finfo(factor.dtype).eps * jnp.where(size > 0, size, 1)
    distances = jnp.maximum(nodes - end, floor) * jnp.maximum(nodes + end, floor)
    along = jnp.matmul(border, left, precision="highest")
    corner = end * jnp.sqrt(1 + jnp.sum(along**2 / distances))
    below = jnp.append(jnp.zeros_like(border), corner)
    return jnp.vstack([jnp.column_stack([factor, border]), below])


def shorter(compression: Compression) -> Inexact[Array, "q q"]:
    """T of one step fewer, padded to the size that `radau` gives by nodes without weight
    inside the spectrum."""
    matrix, border = compression.matrix, compression.border
    left_out = jnp.any(border != 0, axis=0)
    kept = jnp.where(left_out[:, None] | left_out, 0, matrix)
    filling = jnp.where(left_out, matrix[0, 0], 0)
    return longer(kept + jnp.diag(filling), len(border))


def first_steps(
    matrix: Real[Array, "p p"], steps: Int[Array, ""] | int
) -> Real[Array, "q q"]:
    """A tridiagonal T of the first `steps` steps, 1 or more, for the size that `radau`
    gives: the others are decoupled, and have no weight."""
    row = jnp.arange(len(matrix))
    inside = (row < steps)[:, None] == (row < steps)
    return longer(jnp.where(inside, matrix, 0), 1)


def longer(matrix: Inexact[Array, "p p"], b: int) -> Inexact[Array, "q q"]:
    """T with b nodes more, without weight and inside the spectrum."""
    border = jnp.zeros_like(matrix, shape=(b, len(matrix)))
    return bordered(matrix, border, matrix[0, 0] * jnp.eye(b, dtype=matrix.dtype))


def bordered(
    matrix: Inexact[Array, "p p"],
    border: Inexact[Array, "b p"],
    corner: Inexact[Array, "b b"],
) -> Inexact[Array, "q q"]:
    """A Hermitian matrix with further rows and columns."""
    below = jnp.concatenate([border, corner], axis=1)
    beside = jnp.concatenate([matrix, border.conj().T], axis=1)
    return jnp.concatenate([beside, below])


def apply_to_first(
    nodes: Real[Array, " s"], vectors: Real[Array, "s s"], values: Real[Array, " s"]
) -> Real[Array, " s"]:
    """`g(T) e_1` from the values of g at the nodes."""
    return jnp.matmul(vectors, values * vectors[0], precision="highest")
