"""All dense factorisations of the package, and a few norms and products.

No other module calls a factorisation: `factorisation.py` says why `vmap` of one must not
be JAX's own. Factorisations are never differentiated.

On NVIDIA's GPUs eigenvalues and singular values are found by QR iterations. The Jacobi
method, which JAX takes for small matrices, has errors of 40 to 800 times the machine
epsilon there, QR iterations 10 to 25 times ("JAX versions" in the developer
documentation).
"""

import contextlib
import functools as ft
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.linalg
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .._core.threefry import fast_key
from .factorisation import factorisation_primitive


_by_rows = ContextVar("_by_rows", default=False)


@contextlib.contextmanager
def factorising(*, by_rows: bool) -> Iterator[None]:
    """Choose the factorisation of tall matrices for the code that is traced in the
    `with` block: from Gram matrices, which never communicate rows, if `by_rows`, else by
    Householder reflections. The results agree to rounding."""
    token = _by_rows.set(by_rows)
    try:
        yield
    finally:
        _by_rows.reset(token)


@factorisation_primitive
def _householder_qr(x: Array) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(x)
    return q, r


def qr(x: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n p"], Inexact[Array, "p m"]]:
    """Reduced QR factorisation `x = Q R`, with p the smaller of n and m.

    The columns of `Q` are orthonormal for any rank of `x`. If `factorising` by rows, some
    of them may be zero, and `R` need not be triangular."""
    if not _by_rows.get():
        return _householder_qr(x)
    return _gram_qr(x)


@jax.vmap
def _eigh_on_cuda(x: Array) -> tuple[Array, Array]:
    # In these units squares of entries neither overflow nor underflow in the routine.
    x, scale = normalise(x)
    vectors, values = jax.lax.linalg.eigh(
        x, implementation=jax.lax.linalg.EighImplementation.QR
    )
    return scale * values, vectors


@ft.partial(factorisation_primitive, on_cuda=_eigh_on_cuda)
def eigh(
    x: Inexact[Array, "*b m m"],
) -> tuple[Real[Array, "*b m"], Inexact[Array, "*b m m"]]:
    """The eigenvalues of a Hermitian matrix, ascending, and its eigenvectors, as columns.
    A stack of matrices gives stacks."""
    values, vectors = jnp.linalg.eigh(x)
    return values, vectors


@jax.vmap
def _svd_on_cuda(x: Array) -> tuple[Array, Array, Array]:
    x, scale = normalise(x)
    u, s, vh = jax.lax.linalg.svd(
        x, full_matrices=False, algorithm=jax.lax.linalg.SvdAlgorithm.QR
    )
    return u, scale * s, vh


@ft.partial(factorisation_primitive, on_cuda=_svd_on_cuda)
def svd(
    x: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n p"], Real[Array, " p"], Inexact[Array, "p m"]]:
    """Reduced singular value decomposition `x = U diag(s) Vh`, with p the smaller of n
    and m; singular values descend."""
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return u, s, vh


_Revealed = tuple[
    Inexact[Array, "*b m m"],
    Inexact[Array, "*b m m"],
    Inexact[Array, "*b m m"],
    Bool[Array, "*b m"],
    Real[Array, "*b"],
]


def dual_rows(
    s: Real[Array, " m"], vh: Inexact[Array, "m m"], largest: Real[Array, ""]
) -> Inexact[Array, "m m"]:
    """`largest diag(1/s) Vh`, with the rows of `Vh` itself where s is zero."""
    return jnp.where(s > 0, largest / jnp.where(s > 0, s, 1), 1)[:, None] * vh


def _reveal_from_svd(u: Array, s: Array, vh: Array, limits: Array) -> _Revealed:
    """`limits` are the cutoffs relative to the largest singular value, and absolute."""
    in_range = s > jnp.maximum(limits[0] * s[0], limits[1])
    s = jnp.where(in_range, s, 0)
    return u * in_range, s[:, None] * vh, dual_rows(s, vh, s[0]), in_range, s[0]


# The inverse of an m x m matrix, and the norms made from it, are trusted to a relative
# error of this many times `m eps`. The factor is a margin over the usual bound `m eps`,
# and was not measured: a larger one sends more matrices to the slower method, a smaller
# one could keep a direction below the cutoff.
_INVERSE_MARGIN = 10


def _reveal_on_cuda(stack: Array, limits: Array) -> _Revealed:
    """By the inverse where it shows that no singular value is below the cutoff. On an
    H100 an inverse of size 50 takes 0.4 ms, and singular values take 3 ms."""

    @jax.vmap
    def from_inverse(x, limits):
        # With full rank `U = I`, `T = x` and `D = x^-*` solve `x = U T`, `T D* = I`. A
        # row and column of zeros, as of a buffer not yet filled, is dropped: a 1 on the
        # diagonal makes the matrix invertible without coupling to the others.
        scaled, scale = normalise(x)
        in_range = jnp.any(x != 0, axis=0) | jnp.any(x != 0, axis=1)
        whole = scaled + jnp.diag(1 - in_range.astype(x.dtype))
        inverse = jnp.linalg.inv(whole)
        largest, smallest = _norm_bound(whole), 1 / _norm_bound(inverse)
        rounding = _INVERSE_MARGIN * len(x) * float(jnp.finfo(x.dtype).eps)
        limit = jnp.maximum(limits[0], rounding) * largest
        is_certain = smallest > jnp.maximum(limit, limits[1] / scale)
        u = jnp.diag(in_range.astype(x.dtype))
        return (u, x, inverse.conj().T, in_range, scale), is_certain

    def from_svd():
        return jax.vmap(_reveal_from_svd)(*_svd_on_cuda(stack), limits)

    # One condition for the whole stack: `vmap` of a `cond` would run both branches.
    revealed, is_certain = from_inverse(stack, limits)
    return jax.lax.cond(jnp.all(is_certain), lambda: revealed, from_svd)


def _norm_bound(x: Array) -> Array:
    """An upper bound of the largest singular value, `|x|_2^2 <= |x|_1 |x|_inf`. It is
    close for a matrix near the identity."""
    sizes = jnp.abs(x)
    return jnp.sqrt(jnp.max(jnp.sum(sizes, axis=0)) * jnp.max(jnp.sum(sizes, axis=1)))


@ft.partial(factorisation_primitive, on_cuda=_reveal_on_cuda)
def _reveal(x: Array, limits: Array) -> _Revealed:
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return _reveal_from_svd(u, s, vh, limits)


def reveal(
    x: Inexact[Array, "m m"],
    cutoff: Real[Array, ""] | float,
    scale: Real[Array, ""] | float = 0.0,
) -> _Revealed:
    """A rank-revealing factorisation, `U, T, D, in_range, c`.

    `in_range` marks as many rows as x has rank. There `x = U T` and `T D* = c I`, and the
    columns of U are orthonormal. The other columns of U and rows of T are zero, and the
    other rows of D are an orthonormal basis of the null vectors of x. Singular values
    below `cutoff * max(s[0], scale)` count as zero."""
    real = jnp.finfo(x.dtype).dtype
    cutoff = jnp.asarray(cutoff, real)
    return _reveal(x, jnp.stack([cutoff, cutoff * jnp.asarray(scale, real)]))


def rank_revealing_qr(
    x: Inexact[Array, "n m"],
    cutoff: Real[Array, ""] | float,
    scale: Real[Array, ""] | float = 0.0,
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
    """`x = Q T` for a tall `x`, without the part of x that belongs to singular values
    below `cutoff * max(s[0], scale)`. Columns of Q are orthonormal, or zero."""
    q, r = qr(x)
    u, t, *_ = reveal(r, cutoff, scale)
    return q @ u, t


@factorisation_primitive
def _eig(x: Array) -> tuple[Array, Array, Array]:
    def decompose(x):
        values, vectors = jnp.linalg.eig(x)
        inverse = jnp.linalg.inv(vectors)
        return values, vectors, inverse

    def decompose_perturbed():
        noise = jr.normal(fast_key(jr.key(0)), x.shape, x.dtype) / len(x)
        return decompose(x + eps**0.5 * jnp.linalg.norm(x) * noise)

    # A function of x from eigenvectors X has the error `eps cond(X)`. Beyond `eps^(1/3)`
    # the perturbation is better: it has the error `eps^(1/2)`, and `cond(X)` is then
    # about `eps^(-1/2)`. It is not always made, since it would spoil small eigenvalues.
    eps = float(jnp.finfo(x.dtype).eps)
    values, vectors, inverse = decompose(x)
    condition = jnp.linalg.norm(vectors) * jnp.linalg.norm(inverse) / len(x)
    return jax.lax.cond(
        condition <= eps ** (-2 / 3),
        lambda: (values, vectors, inverse),
        decompose_perturbed,
    )


def eig(
    x: Inexact[Array, "m m"],
) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    """The eigenvalues of any square matrix, its eigenvectors, as columns, and the inverse
    of the matrix of eigenvectors. All are complex.

    The eigenvectors of a defective or nearly defective matrix would have no correct
    digit. There a random perturbation of relative size `sqrt(eps)` is added first, which
    leaves half of the digits correct (Davies, Approximate diagonalization, SIAM J. Matrix
    Anal. Appl. 29, 2008). JAX has no such routine for TPUs.
    """
    x, scale = normalise(x)
    values, vectors, inverse = _eig(x)
    return scale * values, vectors, inverse


@factorisation_primitive
def _inverse(x: Array) -> tuple[Array]:
    return (jnp.linalg.inv(x),)


def inverse(x: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse of any square matrix; not finite if the matrix is singular."""
    return _inverse(x)[0]


@factorisation_primitive
def _determinant_sign(x: Array) -> tuple[Array]:
    return (jnp.linalg.slogdet(x)[0],)


def determinant_sign(x: Inexact[Array, "m m"]) -> Inexact[Array, ""]:
    """`det x / |det x|` of any square matrix, or 0 if a pivot is 0."""
    return _determinant_sign(x)[0]


# JAX's exponential is NaN where it needs more squarings. In float32 its default of 16
# allows norms of about 5e5, and this 3e10. Squarings that are not needed are skipped.
_MAX_SQUARINGS = 32


@factorisation_primitive
def _expm(x: Array) -> tuple[Array]:
    return (jax.scipy.linalg.expm(x, max_squarings=_MAX_SQUARINGS),)


def expm(x: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The exponential of any square matrix, by scaling and squaring."""
    return _expm(x)[0]


# Each round resolves singular values that are smaller by another root of the roundoff.
# Two rounds reach the roundoff, the third one lifts directions that are rounding errors,
# and the last one makes the columns orthonormal. With 3 rounds a quarter of the tests of
# this function fail, all of them for dependent or nearly dependent columns; with 2, half.
_GRAM_ROUNDS = 4


def _gram_qr(x: Array) -> tuple[Array, Array]:
    """`x = Q R` from the Gram matrix of x, and then of the remaining factor, in rounds.

    One Gram matrix loses directions below the root of the roundoff, which the next one
    resolves. This is shifted Cholesky QR (Fukaya, Kannan, Nakatsukasa, Yamamoto and
    Yanagisawa, SIAM J. Sci. Comput. 42, 2020), with eigenvalues in place of Cholesky
    factors, so that a singular x needs no special case."""
    q, scale = normalise(x)
    r = scale * jnp.eye(x.shape[1], dtype=x.dtype)
    squares = jnp.zeros(x.shape[1], jnp.finfo(x.dtype).dtype)
    for _ in range(_GRAM_ROUNDS):
        q, r, squares = _whiten(q, r)
    # Columns have length 1 before the last round, except those that are rounding errors.
    return jnp.where(squares > 0.5, q, 0), r


def _whiten(q: Array, r: Array) -> tuple[Array, Array, Array]:
    """One round: `Q V L^-1` and `L V* R`, where `Q* Q = V diag(values) V*`, and L is the
    root of the values, which are raised to the roundoff of the largest one."""
    # Full precision in all three: errors of TF32 would be those of the basis.
    values, vectors = eigh(jnp.matmul(q.conj().T, q, precision="highest"))
    floor = jnp.finfo(q.dtype).eps * values[-1]
    root = jnp.sqrt(jnp.where(values > floor, values, floor))
    inverse = jnp.where(root > 0, 1 / jnp.where(root > 0, root, 1), 0)
    q = jnp.matmul(q, vectors * inverse, precision="highest")
    r = root[:, None] * jnp.matmul(vectors.conj().T, r, precision="highest")
    return q, r, values


def thin_svd(
    x: Inexact[Array, "n m"],
    cutoff: Real[Array, ""] | float,
    scale: Real[Array, ""] | float = 0.0,
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """`x = Q diag(s) Vh` for a tall `x`, by QR and the singular values of `R`. Singular
    values below `cutoff * max(s[0], scale)` become 0, and so do their columns of `Q`."""
    q, r = qr(x)
    u, s, vh = svd(r)
    s = jnp.where(s > cutoff * jnp.maximum(s[0], scale), s, 0)
    return (q @ u) * (s > 0), s, vh


def thin_svd_gram(
    x: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """`thin_svd` from the eigenvalues of `x* x`. It is several times faster, and accurate
    only for columns that are well conditioned or exactly dependent."""
    # Eigenvalues of `x* x` have errors of about `m eps` times the largest one.
    values, vectors = eigh(x.conj().T @ x)
    cutoff = x.shape[1] * jnp.finfo(x.dtype).eps * values[-1]
    s = jnp.sqrt(jnp.where(values > cutoff, values, 0))
    q = x @ (vectors * jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0))
    return q, s, vectors.conj().T


def diagonal(x: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """`jnp.diagonal` as a slice, which compiles to a tenth of the instructions."""
    return x.reshape(-1)[:: len(x) + 1]


def inner_product(
    x: Inexact[Array, "n b"], y: Inexact[Array, "n b"]
) -> Inexact[Array, ""]:
    """`tr(x* y)`. The product of two blocks is one kernel to compile on CPU, and the sum
    over a tall array would be three."""
    return jnp.sum(diagonal(x.conj().T @ y))


def two_norm(tree: PyTree[Inexact[Array, "..."]]) -> Real[Array, ""]:
    """The root of the sum of the squares of all entries. It does not overflow unless the
    result does."""
    sizes = [jnp.abs(leaf) for leaf in jax.tree.leaves(tree)]
    largest = ft.reduce(jnp.maximum, [jnp.max(size, initial=0) for size in sizes])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return unit * jnp.sqrt(sum(jnp.sum((size / unit) ** 2) for size in sizes))


def normalise(x: Inexact[Array, "*n"]) -> tuple[Inexact[Array, "*n"], Real[Array, ""]]:
    """`x / c` and `c`, with `c` the largest modulus in `x`, or 1 for a zero `x`."""
    largest = jnp.max(jnp.abs(x))
    scale = jnp.where(largest > 0, largest, 1)
    return x / scale, scale
