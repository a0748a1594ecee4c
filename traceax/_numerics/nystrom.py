from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, Real

from .dense import eigh, thin_svd, thin_svd_gram
from .growth import border, extend, put, put_rows, rescale


class Nystrom(eqx.Module):
    """The Nystrom approximation `B B*` of `A + shift I` (A positive semidefinite).

    Made from the products `Y = A Q` with an orthonormal `Q`. With
    `Q* (A + shift I) Q = U diag(h) U*` it is `B = (Y + shift Q) U diag(h)^(-1/2)`.

    - `factor`: B.
    - `whitener`: `diag(h)^(-1/2) U*`, which maps coordinates in `Q` to those of B.
    - `shift`: the error of Y, for the stability of Algorithm 3 of Tropp, Yurtsever, Udell
        and Cevher, NeurIPS 2017, arXiv:1706.05736: that of its dtype, or the larger one
        that the asymmetry of `Q* Y` shows (products in TF32, or from an inner solve).
    - `semidefinite`: False where A was seen to have a negative eigenvalue.
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
    """`basis` is Q (orthonormal or zero columns), `products` is A Q. Of an `indefinite` A
    the part on directions in which Q* A Q is positive."""
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
    shift = jnp.hypot(eps * size, jnp.linalg.norm(core - core.conj().T))
    values, vectors = eigh((core + core.conj().T) / 2)
    semidefinite = ~(values[0] < -(eps**0.5 * size + shift))
    if indefinite:
        root = jnp.where(values < -shift, 0, jnp.sqrt(jnp.maximum(values, 0) + shift))
    else:
        # Leaving out a probe is exact where all of C + shift I is inverted.
        shift = jnp.maximum(shift, -2 * values[0])
        root = jnp.sqrt(values + shift)
    whitener = (
        (vectors * jnp.where(root > 0, 1 / jnp.where(root > 0, root, 1), 0)).conj().T
    )
    return whitener, shift, semidefinite


class GrowingNystrom(eqx.Module):
    """The products that a Nystrom approximation is made from, in buffers that grow.

    A Q = `q @ r` in units of `scale`, Q the orthonormal `basis` of the probes, q another;
    `core` is `basis* q`.
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
        return GrowingNystrom(tall, tall, square, square, scale)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        i: Int[Array, ""],
        eps: float,
    ) -> tuple["GrowingNystrom", Inexact[Array, "m b"]]:
        """With block i, from b products, and the coordinates of the probes in Q."""
        n, b = probes.shape
        roundoff = float(jnp.finfo(probes.dtype).eps)
        new = extend(self.basis, probes, i, b * roundoff, n**0.5)
        basis = put(self.basis, new.block, i)
        products, scale = rescale(matmat(new.block), self.scale, i)
        image = extend(self.q, products, i)
        q = put(self.q, image.block, i)
        r = put(self.r, put_rows(image.coefficients, image.coupling, i), i)
        (core,) = border([self.core], [(basis, q)], i, b)
        coordinates = put_rows(new.coefficients, new.coupling, i)
        return GrowingNystrom(basis, q, r, core, scale), coordinates

    def whiten(
        self, eps: float, *, indefinite: bool = False
    ) -> tuple[
        Inexact[Array, "m m"], Real[Array, ""], Bool[Array, ""], Inexact[Array, "m m"]
    ]:
        """`whitener`, `shift`, `semidefinite` of the approximation, and `B* B`."""
        core = self.core @ self.r
        size = jnp.linalg.norm(self.r)
        whitener, shift, semidefinite = whiten(core, size, eps, indefinite=indefinite)
        present = jnp.sum(jnp.abs(self.basis) ** 2, axis=0)
        # B = (q r + shift Q) W*
        image = self.r @ whitener.conj().T
        inner = shift * (core + core.conj().T) + shift**2 * jnp.diag(present)
        gram = image.conj().T @ image + whitener @ inner @ whitener.conj().T
        return whitener, shift, semidefinite, gram
