"""The Nystrom approximation `B B*` of a positive semidefinite operator, from probes.

With an orthonormal basis Q of the probes, `A_nu = A + nu I` and the eigenvalue
decomposition `Q* A_nu Q = U diag(h) U*`,

    B B* = A_nu Q (Q* A_nu Q)^-1 (A_nu Q)*,    B = A_nu Q T*,    T = diag(h)^(-1/2) U*.

In the code: Q is `basis`, `A Q` is `products`, `Q* A Q` is `core`, nu is `shift`, T is
`whitener`, and B is `factor`.

Reference: Tropp, Yurtsever, Udell and Cevher, Fixed-rank approximation of a
positive-semidefinite matrix from streaming data, NeurIPS 2017, Algorithm 3.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, Real

from .dense import eigh, thin_svd, thin_svd_gram
from .growth import border, extend, put, put_rows, rescale


class Nystrom(eqx.Module):
    """The Nystrom approximation `B B*` of `A + shift I` (A positive semidefinite).

    - `factor`: B.
    - `whitener`: T, which maps coordinates in Q to those of B.
    - `shift`: nu, the error of the products, as Algorithm 3 needs for its stability: that
        of their dtype, or a larger one if the asymmetry of `Q* A Q` shows it (products in
        TF32, or from an inner solve).
    - `semidefinite`: False if A has a negative eigenvalue beyond rounding.
    """

    factor: Inexact[Array, "n m"]
    whitener: Inexact[Array, "m m"]
    shift: Real[Array, ""]
    semidefinite: Bool[Array, ""]


def orthonormalise(
    probes: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """The thin SVD of random probes, which are well conditioned unless m is near n."""
    n, m = probes.shape
    if 4 * m <= n:
        return thin_svd_gram(probes)
    return thin_svd(probes, m * float(jnp.finfo(probes.dtype).eps))


def nystrom(
    basis: Inexact[Array, "n m"],
    products: Inexact[Array, "n m"],
    eps: float,
    *,
    indefinite: bool = False,
) -> Nystrom:
    """The approximation, from a `basis` of orthonormal or zero columns. For an
    `indefinite` A, it is restricted to the directions in which `Q* A Q` is positive."""
    core, size = basis.conj().T @ products, jnp.linalg.norm(products)
    whitener, shift, semidefinite = whiten(core, size, eps, indefinite=indefinite)
    factor = (products + shift * basis) @ whitener.conj().T
    return Nystrom(factor, whitener, shift, semidefinite)


def whiten(
    core: Inexact[Array, "m m"],
    size: Real[Array, ""],
    eps: float,
    *,
    indefinite: bool = False,
) -> tuple[Inexact[Array, "m m"], Real[Array, ""], Bool[Array, ""]]:
    """`whitener`, `shift` and `semidefinite` of [`Nystrom`][], from `core = Q* A Q` and
    `size = ||A Q||_F`."""
    # Of a Hermitian A the exact core is Hermitian, so its asymmetry is an error of the
    # products that their dtype does not show.
    shift = jnp.hypot(eps * size, jnp.linalg.norm(core - core.conj().T))
    values, vectors = eigh((core + core.conj().T) / 2)
    semidefinite = ~(values[0] < -(eps**0.5 * size + shift))
    if not indefinite:
        # No eigenvalue may be dropped, even if rounding made it negative: leaving out a
        # probe is exact only where all of core + shift I is inverted.
        shift = jnp.maximum(shift, -2 * values[0])
    whitener = whitener_of(values, vectors, shift, indefinite=indefinite)
    return whitener, shift, semidefinite


def whitener_of(
    values: Real[Array, " m"],
    vectors: Inexact[Array, "m m"],
    shift: Real[Array, ""],
    *,
    indefinite: bool,
) -> Inexact[Array, "m m"]:
    """`whitener` of [`Nystrom`][] from the eigenvalues and eigenvectors of `Q* A Q`."""
    if indefinite:
        root = jnp.where(values < -shift, 0, jnp.sqrt(jnp.maximum(values, 0) + shift))
    else:
        root = jnp.sqrt(values + shift)
    return (vectors * jnp.where(root > 0, 1 / jnp.where(root > 0, root, 1), 0)).conj().T


class GrowingNystrom(eqx.Module):
    """The products that a Nystrom approximation is made from, in buffers that grow.

    In units of `scale`, `A Q = q r` with the orthonormal `basis` Q of the probes and
    another orthonormal basis `q` of the products; `core` is `Q* q`.
    """

    basis: Inexact[Array, "n m"]
    q: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    core: Inexact[Array, "m m"]
    scale: Real[Array, ""]

    @staticmethod
    def empty(n: int, m: int, dtype: DTypeLike) -> "GrowingNystrom":
        tall, square = jnp.zeros((n, m), dtype), jnp.zeros((m, m), dtype)
        scale = jnp.ones((), jnp.finfo(dtype).dtype)
        return GrowingNystrom(basis=tall, q=tall, r=square, core=square, scale=scale)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        i: Int[Array, ""],
        eps: float,
    ) -> tuple["GrowingNystrom", Inexact[Array, "m b"]]:
        """The buffers with block i, from b matvecs, and the coordinates of the probes in
        Q."""
        n, b = probes.shape
        roundoff = float(jnp.finfo(probes.dtype).eps)
        # Probes have about the length sqrt(n).
        new = extend(self.basis, probes, i, eps=b * roundoff, scale=n**0.5)
        basis = put(self.basis, new.block, i)
        products, scale = rescale(matmat(new.block), self.scale, i)
        image = extend(self.q, products, i)
        q = put(self.q, image.block, i)
        r = put(self.r, put_rows(image.coefficients, image.coupling, i), i)
        (core,) = border([self.core], [(basis, q)], i, b)
        coordinates = put_rows(new.coefficients, new.coupling, i)
        grown = GrowingNystrom(basis=basis, q=q, r=r, core=core, scale=scale)
        return grown, coordinates

    def whiten(
        self, eps: float, *, indefinite: bool = False
    ) -> tuple[
        Inexact[Array, "m m"], Real[Array, ""], Bool[Array, ""], Inexact[Array, "m m"]
    ]:
        """`whitener`, `shift`, `semidefinite` of the approximation, and `B* B`, without
        the tall B."""
        core = self.core @ self.r
        size = jnp.linalg.norm(self.r)
        whitener, shift, semidefinite = whiten(core, size, eps, indefinite=indefinite)
        present = jnp.sum(jnp.abs(self.basis) ** 2, axis=0)
        # B = (q r + shift Q) T*
        image = self.r @ whitener.conj().T
        inner = shift * (core + core.conj().T) + shift**2 * jnp.diag(present)
        gram = image.conj().T @ image + whitener @ inner @ whitener.conj().T
        return whitener, shift, semidefinite, gram
