"""Nystrom approximations of `A - sigma I` for any shift sigma, from the same matvecs.

With orthonormal columns U that span the probes and their images, and coordinates

    Q = U alpha,    A Q = U beta,    Q* Q = I,

the approximation of `A - sigma I` is `B B*` with `B = U (beta - sigma alpha) T*`, where T
whitens `Q* A Q - sigma I` (see `nystrom.py`). All Gram matrices are those of coordinates.
Where A is close to `sigma I` the columns of `beta - sigma alpha` are small, and they are
subtracted before they are squared, so the digits that are left are right.

In the code: U is `joint`, alpha is `basis`, beta is `products`, T is `whitener`, and the
Ritz values are the eigenvalues of `Q* A Q`.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, Real

from .dense import eigh
from .growth import extend, put, put_rows, rescale
from .nystrom import whitener_of


class ShiftedNystrom(eqx.Module):
    """The matvecs that approximations are made from, in buffers that grow by blocks. A
    and its Ritz values are in units of `scale`."""

    joint: Inexact[Array, "n p"]
    basis: Inexact[Array, "p m"]
    products: Inexact[Array, "p m"]
    scale: Real[Array, ""]

    @staticmethod
    def empty(n: int, m: int, dtype: DTypeLike) -> "ShiftedNystrom":
        small = jnp.zeros((2 * m, m), dtype)
        scale = jnp.ones((), jnp.finfo(dtype).dtype)
        return ShiftedNystrom(jnp.zeros((n, 2 * m), dtype), small, small, scale)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        i: Int[Array, ""],
    ) -> tuple["ShiftedNystrom", Inexact[Array, "m b"]]:
        """The buffers with block i, from b matvecs, and the coordinates of the probes in
        Q."""
        n, b = probes.shape
        # Probes have about the length sqrt(n).
        limits = {"eps": b * float(jnp.finfo(probes.dtype).eps), "scale": n**0.5}
        new = extend(self.joint, probes, 2 * i, **limits)
        joint = put(self.joint, new.block, 2 * i)
        inner = put_rows(new.coefficients, new.coupling, 2 * i)
        column = extend(self.basis, inner, i, **limits)
        basis = put(self.basis, column.block, i)
        images, scale = rescale(matmat(joint @ column.block), self.scale, i)
        image = extend(joint, images, 2 * i + 1)
        joint = put(joint, image.block, 2 * i + 1)
        block = put_rows(image.coefficients, image.coupling, 2 * i + 1)
        products = put(self.products, block, i)
        coordinates = put_rows(column.coefficients, column.coupling, i)
        return ShiftedNystrom(joint, basis, products, scale), coordinates

    def ritz(self, eps: float) -> "RitzPairs":
        """The Ritz pairs. Columns of Q that are zero come last: they count as Ritz values
        as large as the norm of all products."""
        core = self.basis.conj().T @ self.products
        size = jnp.linalg.norm(self.products)
        empty = jnp.sum(jnp.abs(self.basis) ** 2, axis=0) == 0
        # As in `whiten`: the asymmetry is an error that the dtype does not show.
        error = jnp.hypot(eps * size, jnp.linalg.norm(core - core.conj().T))
        core = (core + core.conj().T) / 2 + jnp.diag(jnp.where(empty, size, 0))
        values, vectors = eigh(core)
        return RitzPairs(values, vectors, error)

    def factor(self, pairs: "RitzPairs", shift: Real[Array, ""]) -> Inexact[Array, "p m"]:
        """The coordinates of B in U, for the Ritz values above the shift sigma. With the
        error nu of the matvecs they are `(beta - (sigma - nu) alpha) T*`."""
        values, vectors, ridge = pairs.values - shift, pairs.vectors, pairs.error
        whitener = whitener_of(values, vectors, ridge, indefinite=True)
        distance = (shift - ridge).astype(self.basis.dtype)
        return (self.products - distance * self.basis) @ whitener.conj().T


class RitzPairs(eqx.Module):
    """Ritz values, ascending, Ritz vectors in Q, and the error of the matvecs."""

    values: Real[Array, " m"]
    vectors: Inexact[Array, "m m"]
    error: Real[Array, ""]
