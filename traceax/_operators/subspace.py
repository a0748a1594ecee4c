"""A Hermitian operator split along a subspace, by an orthonormal basis Q of r vectors.

With P = I - Q Q* and W = A Q,

    A = P A P + W Q* + Q W* P                                                  (1)

for any basis. P A P has the eigenvalue zero on the subspace, which functions that are
infinite at zero cannot have, so there

    A' = P A P + s Q Q*                                                        (2)

takes its place. If the subspace is invariant, with A Q = Q diag(t), then

    f(A) = f(A') + Q diag(f(t) - f(s)) Q*.                                     (3)

The level s is an eigenvalue that A might have outside of the subspace. So it extends
neither end of the spectrum, and A' has the sign of A. In the code `level` is s.
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.arithmetic import standard_promotion
from .._core.chirp import generic_vector
from .._core.flat import FlatOperator
from .._numerics.dense import thin_svd, two_norm


# Directions that are smaller than so many machine epsilons, in columns of norm one, are
# rounding errors of dependent columns. A smaller number keeps such a direction, which is
# then found not to be in a null space; a larger one drops directions that were meant.
_ROUNDOFFS_OF_BASIS = 32


class Subspace(eqx.Module):
    """A subspace, constant to all derivatives.

    - `basis`: Q, whose columns are orthonormal, or zero for dependent columns.
    """

    basis: Inexact[Array, "n r"]

    @classmethod
    def of(cls, columns: Inexact[Array, "n r"]) -> "Subspace":
        """The span of columns that need not be orthonormal, or of full rank."""
        columns = jax.lax.stop_gradient(columns)
        norms = jax.vmap(two_norm, in_axes=1)(columns)
        columns = columns / jnp.where(norms > 0, norms, 1).astype(columns.dtype)
        eps = float(jnp.finfo(columns.dtype).eps)
        return cls(thin_svd(columns, cutoff=_ROUNDOFFS_OF_BASIS * eps)[0])

    @property
    def present(self) -> Array:
        """Which columns are not zero, a boolean array of shape `(r,)`."""
        return jnp.any(self.basis != 0, axis=0)

    @property
    def rank(self) -> Int[Array, ""]:
        return jnp.sum(self.present)

    def coordinates(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " r *k"]:
        """Q* x."""
        return jnp.matmul(self.basis.conj().T, x, precision="highest")

    def combine(self, weights: Inexact[Array, " r *k"]) -> Inexact[Array, " n *k"]:
        """Q times the weights."""
        return jnp.matmul(self.basis, weights, precision="highest")

    def remove(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " n *k"]:
        """P x."""
        return x - self.combine(self.coordinates(x))

    def compress(
        self, operator: FlatOperator, level: Real[Array, ""] | float = 0.0
    ) -> FlatOperator:
        """P A P, or A' of (2), with the tags of A."""
        level = jnp.asarray(level, operator.dtype)
        return dataclasses.replace(operator, fn=_Compressed(operator, self, level))

    def generic_vectors(self) -> tuple[Inexact[Array, " n"], Inexact[Array, " n"]]:
        """A unit vector in the subspace, and one in its complement, or zero where there
        is none. They are the same in each call."""
        n, r = self.basis.shape
        weights = generic_vector(r, self.basis.dtype) * self.present
        # A vector of a subspace of all directions is rounding once that is removed.
        outside = self.remove(self.remove(generic_vector(n, self.basis.dtype)))
        outside = jnp.where(self.rank < n, outside, 0)
        return self.combine(_unit(weights)), _unit(outside)


class _Compressed(eqx.Module):
    """`P A P + level Q Q*`."""

    operator: FlatOperator
    subspace: Subspace
    level: Inexact[Array, ""]

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        with standard_promotion():
            inside = self.subspace.coordinates(vector)
            outside = vector - self.subspace.combine(inside)
            image = self.subspace.remove(self.operator.fn(outside))
            return image + self.subspace.combine(self.level * inside)


def level_of(
    vector: Inexact[Array, " n"],
    image: Inexact[Array, " n"],
    sign: int,
    product: Callable[[Inexact[Array, " n"]], Inexact[Array, " n"]],
) -> tuple[Real[Array, ""], int]:
    """The level s from a unit vector u of the complement and its image `P A u`,
    and the number of matvecs that it took. `sign` is that of the operator, 0 if unknown,
    and `product` applies it."""
    mean = jnp.vdot(vector, image, precision="highest").real
    # Without a vector there is no eigenvalue, and any level does.
    empty = two_norm(vector) == 0
    if sign != 0:
        return jnp.where(empty, sign, mean), 0
    # Eigenvalues of both signs may cancel in the mean, and near zero many functions are
    # steep. Of the two Ritz values after two steps of Lanczos, this takes the one with
    # the larger part of the mean modulus.
    rest = image - mean * vector
    coupling = two_norm(rest)
    second = _unit(rest)
    end = jnp.vdot(second, product(second), precision="highest").real
    middle, half = (mean + end) / 2, (mean - end) / 2
    radius = jnp.hypot(half, coupling)
    values = middle + jnp.stack([-radius, radius])
    # The squared first entries of the eigenvectors of [[mean, coupling], [., end]].
    cosine = half / jnp.where(radius > 0, radius, 1)
    weights = (1 + jnp.stack([-cosine, cosine])) / 2
    value = values[jnp.argmax(weights * jnp.abs(values))]
    return jnp.where(empty, 1, jnp.where(radius > 0, value, mean)), 1


def _unit(vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
    norm = two_norm(vector)
    return vector / jnp.where(norm > 0, norm, 1).astype(vector.dtype)
