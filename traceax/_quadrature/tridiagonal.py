"""Gauss and Gauss-Radau rules from the recurrence coefficients of a Krylov run.

Lanczos from z gives `A V = V T + beta_s v_(s+1) e_s*`. The entries of the tridiagonal T
(`alpha` and `beta`) are the recurrence coefficients of the polynomials that are
orthonormal for the measure mu with `int f dmu = z* f(A) z / ||z||^2`. The eigenpairs
`(theta_j, y_j)` of T (`nodes`, `vectors`) therefore give the Gauss rule of mu,

    int f dmu ~ e_1* f(T) e_1 = sum_j |y_1j|^2 f(theta_j),

which is exact for polynomials of degree up to 2s - 1. A Gauss-Radau rule has one more
node, prescribed at a (`end`). It belongs to T bordered by beta_s and the entry

    alpha~ = a + beta_s^2 sum_j |y_sj|^2 / (theta_j - a)        (`corner`).

Block Lanczos has a b by b matrix B (`coupling`) in place of beta_s.

References: Golub and Meurant, Matrices, Moments and Quadrature with Applications, 2010,
chapters 6 and 7; Golub, SIAM Review 15, 1973, 318-334, for the prescribed node.
Derivations: docs/devdocs/quadrature.md.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._numerics.dense import eigh


def tridiagonal(alpha: Real[Array, " s"], beta: Real[Array, " s"]) -> Real[Array, "s s"]:
    """T. The last entry of `beta` couples T to the next step and is not part of T."""
    # XLA fuses comparisons of indices into the kernel that uses them. Concatenations are
    # kernels of their own.
    row = jnp.arange(len(alpha))
    below = jnp.where(row[:, None] - row == 1, beta, 0)
    return jnp.where(row[:, None] == row, alpha, below + below.T)


def ritz(
    alpha: Real[Array, " s"], beta: Real[Array, " s"]
) -> tuple[Real[Array, " s"], Real[Array, "s s"]]:
    """The Ritz values, ascending, and the eigenvectors of T, as columns."""
    return eigh(tridiagonal(alpha, beta))


class Compression(eqx.Module):
    """A on a Krylov space: `A V = V T + v B E*`.

    - `matrix`: T, tridiagonal or block tridiagonal with blocks of size b.
    - `coupling`: B, of shape (b, b).
    - `first`: the row of T where the last step begins, a multiple of b. E is the identity
        in the b rows from there on, and zero elsewhere.
    - `nodes`, `vectors`: the eigenpairs of T, with nodes in ascending or descending
        order.
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
        return Compression(
            matrix=-self.matrix,
            coupling=-self.coupling,
            first=self.first,
            nodes=-self.nodes,
            vectors=self.vectors,
        )


def largest_weight(compression: Compression, at: Real[Array, ""]) -> Real[Array, ""]:
    """The Christoffel function of the run at a point below the nodes: the largest weight
    at that point of any measure with the recurrence coefficients of T.

    With orthonormal polynomials p_j it is `1 / sum_(j < s) p_j(a)^2`. The three-term
    recurrence says `(T - a) p = -beta_s p_s(a) e_s`, and p_0 = 1. So p is `u / u_1` with
    `u = (T - a)^(-1) e_s`, and the function is `u_1^2 / ||u||^2`."""
    largest = compression.largest
    distances = (compression.nodes - at) / jnp.where(largest > 0, largest, 1)
    # The reciprocals below are squared, and the fourth root of the smallest number keeps
    # these squares, and sums of them, far from overflow.
    distances = jnp.maximum(distances, jnp.finfo(distances.dtype).tiny ** 0.25)
    last = compression.vectors[compression.first] / distances
    return jnp.vdot(compression.vectors[0], last) ** 2 / jnp.vdot(last, last)


def radau(compression: Compression, end: Real[Array, ""]) -> Inexact[Array, "q q"]:
    """The matrix of the Gauss-Radau rule: T with one more step, chosen so that `end`, at
    or below the spectrum, is an eigenvalue of it."""
    matrix, coupling = compression.matrix, compression.coupling
    size = compression.largest + jnp.max(jnp.abs(coupling))
    floor = jnp.finfo(matrix.dtype).eps * size
    # Rounding, or an `end` that is no lower bound, makes a distance zero or negative.
    # Without the floor the corner would be infinite or have the wrong sign.
    distances = jnp.maximum(compression.nodes - end, jnp.where(floor > 0, floor, 1))
    last = jax.lax.dynamic_slice_in_dim(
        compression.vectors, start_index=compression.first, slice_size=len(coupling)
    )
    last = jnp.matmul(coupling, last, precision="highest")
    corner = jnp.matmul(last, (last / distances).conj().T, precision="highest")
    corner = corner + end * jnp.eye(len(coupling), dtype=matrix.dtype)
    return append_border(matrix, compression.border, corner)


def radau_factor(
    factor: Real[Array, "s s"],
    border: Real[Array, " s"],
    left: Real[Array, "s s"],
    nodes: Real[Array, " s"],
    end: Real[Array, ""],
) -> Real[Array, "q q"]:
    """A factor of the Gauss-Radau matrix for `T = B* B`: B with one more step, chosen so
    that `end`, at or below the singular values, is one of them.

    T itself is not formed, since its roundoff hides singular values below the root of the
    machine epsilon. B* B bordered by its residual has the corner `beta_s^2 + delta^2`
    (`border` has the norm beta_s, the new diagonal entry of B is delta). This equals
    alpha~ above, with nodes sigma_j^2 and end a^2, if

        delta^2 = a^2 (1 + beta_s^2 sum_j |u_sj|^2 / (sigma_j^2 - a^2)).

    - `factor`: B.
    - `border`: the column beside B, beta_s in the row of the last step.
    - `left`, `nodes`: the left singular vectors u_j of B, as columns, and its singular
        values sigma_j, descending.
    """
    size = nodes[0] + jnp.max(jnp.abs(border))
    floor = jnp.finfo(factor.dtype).eps * jnp.where(size > 0, size, 1)
    # sigma^2 - a^2 as a product: the difference of the squares would cancel.
    distances = jnp.maximum(nodes - end, floor) * jnp.maximum(nodes + end, floor)
    along = jnp.matmul(border, left, precision="highest")
    corner = end * jnp.sqrt(1 + jnp.sum(along**2 / distances))
    below = jnp.append(jnp.zeros_like(border), corner)
    return jnp.vstack([jnp.column_stack([factor, border]), below])


def drop_last_step(compression: Compression) -> Inexact[Array, "q q"]:
    """T with one step fewer, padded to the size of the matrix that `radau` returns."""
    matrix, border = compression.matrix, compression.border
    dropped = jnp.any(border != 0, axis=0)
    leading = jnp.where(dropped[:, None] | dropped, 0, matrix)
    # T_11 is inside the spectrum, so functions are finite at these nodes of no weight.
    filling = jnp.where(dropped, matrix[0, 0], 0)
    return pad(leading + jnp.diag(filling), len(border))


def first_steps(
    matrix: Real[Array, "p p"], steps: Int[Array, ""] | int
) -> Real[Array, "q q"]:
    """A tridiagonal T of the first `steps` steps, 1 or more, padded to the size of the
    matrix that `radau` returns. Later steps are decoupled, and so have no weight."""
    is_leading = jnp.arange(len(matrix)) < steps
    coupled = is_leading[:, None] == is_leading
    return pad(jnp.where(coupled, matrix, 0), 1)


def pad(matrix: Inexact[Array, "p p"], b: int) -> Inexact[Array, "q q"]:
    """T with b more nodes, which have no weight and are inside the spectrum."""
    border = jnp.zeros_like(matrix, shape=(b, len(matrix)))
    corner = matrix[0, 0] * jnp.eye(b, dtype=matrix.dtype)
    return append_border(matrix, border, corner)


def append_border(
    matrix: Inexact[Array, "p p"],
    border: Inexact[Array, "b p"],
    corner: Inexact[Array, "b b"],
) -> Inexact[Array, "q q"]:
    """A Hermitian matrix with b more rows and columns."""
    below = jnp.concatenate([border, corner], axis=1)
    beside = jnp.concatenate([matrix, border.conj().T], axis=1)
    return jnp.concatenate([beside, below])


def apply_to_first(
    nodes: Real[Array, " s"], vectors: Real[Array, "s s"], values: Inexact[Array, " s"]
) -> Inexact[Array, " s"]:
    """`g(T) e_1` from the values of g at the nodes."""
    return jnp.matmul(vectors, values * vectors[0], precision="highest")
