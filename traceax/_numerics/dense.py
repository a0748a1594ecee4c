"""The one door to dense factorisations.

A batched LAPACK call inside one XLA:CPU program can deadlock (see "JAX versions" in the
developer documentation). So, on CPU, `vmap` of a factorisation is a loop over single
calls; on other platforms it is the batched call. A stack of matrices is factorised in one
such loop. On NVIDIA's GPUs eigenvalues and singular values are found by QR iterations:
the Jacobi method that JAX takes for small matrices has errors of up to 800 times the
machine epsilon. Factorisations are never differentiated.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.linalg
import numpy as np
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import batching, mlir, Primitive
from .._core.threefry import fast


_by_rows = ContextVar("_by_rows", default=False)


@contextlib.contextmanager
def factorising(*, by_rows: bool) -> Iterator[None]:
    """Whether what is traced inside factorises tall matrices without communicating their
    rows. The answers agree to rounding."""
    token = _by_rows.set(by_rows)
    try:
        yield
    finally:
        _by_rows.reset(token)


def _door(
    factorise: Callable[..., tuple[Array, ...]],
    on_cuda: Callable[..., tuple[Array, ...]] | None = None,
):
    """The factorisation of a matrix, or of each of a stack, as a primitive: what it
    consists of is chosen where a program is lowered, for each of its platforms; `on_cuda`
    is of a stack. Further arguments are arrays, one for each matrix."""
    primitive = Primitive(factorise.__name__.strip("_"))
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind)

    def in_context(fn):
        """For what is traced when a program is lowered, where those of the call are no
        more."""

        def run(*stacks):
            with standard_promotion(), jax.default_matmul_precision("highest"):
                return fn(*stacks)

        return run

    @in_context
    def one_at_a_time(*stacks):
        if len(stacks[0]) == 1:
            return jax.tree.map(lambda y: y[None], factorise(*(x[0] for x in stacks)))
        outs = jax.eval_shape(factorise, *(x[0] for x in stacks))
        if len({out.dtype for out in outs}) > 1:
            return jax.lax.map(lambda each: factorise(*each), stacks)

        def flat(each):
            """All in one array, since each output of a loop is a kernel to compile."""
            return jnp.concatenate([y.ravel() for y in factorise(*each)])

        ends = np.cumsum([out.size for out in outs])[:-1]
        parts = jnp.split(jax.lax.map(flat, stacks), ends, axis=1)
        return [y.reshape(-1, *out.shape) for y, out in zip(parts, outs, strict=True)]

    together = in_context(jax.vmap(factorise))

    @primitive.def_impl
    def _(*stacks):
        with jax.disable_jit(False):
            return compiled(*stacks)

    @primitive.def_abstract_eval
    def _(*stacks):
        return jax.make_jaxpr(together)(*stacks).out_avals

    def batch(stacks, axes):
        """One stack, however many axes are mapped."""
        (size,) = {x.shape[d] for x, d in zip(stacks, axes, strict=True) if d is not None}
        stacks = map(batching.bdim_at_front, stacks, axes, [size] * len(axes))
        outs = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in stacks))
        outs = [y.reshape(size, -1, *y.shape[1:]) for y in outs]
        return outs, [0] * len(outs)

    batching.primitive_batchers[primitive] = batch
    platforms = {None: together, "cpu": one_at_a_time}
    if on_cuda is not None:
        platforms["cuda"] = in_context(on_cuda)
    for platform, fn in platforms.items():
        mlir.register_lowering(primitive, mlir.lower_fun(fn), platform)

    @ft.wraps(factorise)
    def call(x, *others):
        if x.ndim == 3:
            return tuple(primitive.bind(x, *others))
        return tuple(y[0] for y in primitive.bind(*(y[None] for y in (x, *others))))

    return call


@_door
def _householder_qr(x: Array) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(x)
    return q, r


def qr(x: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n p"], Inexact[Array, "p m"]]:
    """Reduced QR factorisation `x = Q R`, with p the smaller of n and m. Whatever the
    rank of `x`, the columns of `Q` are orthonormal; where vectors are split by rows some
    may be zero, and `R` need not be triangular."""
    if not _by_rows.get():
        return _householder_qr(x)
    return _gram_qr(x)


@jax.vmap
def _eigh_on_cuda(x: Array) -> tuple[Array, Array]:
    x, scale = normalise(x)
    by = jax.lax.linalg.EighImplementation.QR
    vectors, values = jax.lax.linalg.eigh(x, implementation=by)
    return scale * values, vectors


@ft.partial(_door, on_cuda=_eigh_on_cuda)
def eigh(
    x: Inexact[Array, "*b m m"],
) -> tuple[Real[Array, "*b m"], Inexact[Array, "*b m m"]]:
    """Eigenvalues, ascending, and eigenvectors, as columns, of a Hermitian matrix, or of
    each of a stack."""
    values, vectors = jnp.linalg.eigh(x)
    return values, vectors


@jax.vmap
def _svd_on_cuda(x: Array) -> tuple[Array, Array, Array]:
    x, scale = normalise(x)
    by = jax.lax.linalg.SvdAlgorithm.QR
    u, s, vh = jax.lax.linalg.svd(x, full_matrices=False, algorithm=by)
    return u, scale * s, vh


@ft.partial(_door, on_cuda=_svd_on_cuda)
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
    """`largest diag(1/s) Vh`, and of `Vh` itself the rows where s is zero."""
    return jnp.where(s > 0, largest / jnp.where(s > 0, s, 1), 1)[:, None] * vh


def _reveal_by_svd(u: Array, s: Array, vh: Array, limits: Array) -> _Revealed:
    kept = s > jnp.maximum(limits[0] * s[0], limits[1])
    s = jnp.where(kept, s, 0)
    return u * kept, s[:, None] * vh, dual_rows(s, vh, s[0]), kept, s[0]


def _reveal_on_cuda(stack: Array, limits: Array) -> _Revealed:
    """By inverses, where they show that all is to be kept: an order of magnitude faster
    than singular values."""

    @jax.vmap
    def by_inverse(x, limits):
        scaled, scale = normalise(x)
        kept = jnp.any(x != 0, axis=0) | jnp.any(x != 0, axis=1)
        whole = scaled + jnp.diag(1 - kept.astype(x.dtype))
        inverse = jnp.linalg.inv(whole)
        largest, smallest = _bound(whole), 1 / _bound(inverse)
        rounding = 10 * len(x) * float(jnp.finfo(x.dtype).eps)
        limit = jnp.maximum(limits[0], rounding) * largest
        sure = smallest > jnp.maximum(limit, limits[1] / scale)
        u = jnp.diag(kept.astype(x.dtype))
        return (u, x, inverse.conj().T, kept, scale), sure

    def by_svd():
        return jax.vmap(_reveal_by_svd)(*_svd_on_cuda(stack), limits)

    found, sure = by_inverse(stack, limits)
    return jax.lax.cond(jnp.all(sure), lambda: found, by_svd)


def _bound(x: Array) -> Array:
    """Of the largest singular value, and close to it for a matrix near the identity."""
    sizes = jnp.abs(x)
    return jnp.sqrt(jnp.max(jnp.sum(sizes, axis=0)) * jnp.max(jnp.sum(sizes, axis=1)))


@ft.partial(_door, on_cuda=_reveal_on_cuda)
def _reveal(x: Array, limits: Array) -> _Revealed:
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return _reveal_by_svd(u, s, vh, limits)


def reveal(
    x: Inexact[Array, "m m"],
    cutoff: Real[Array, ""] | float,
    scale: Real[Array, ""] | float = 0.0,
) -> _Revealed:
    """`U, T, D, kept, c` with `x = U T` and `T D* = c I` in the rows that are `kept`, as
    many as the rank. Those columns of U are orthonormal. The others are zero, as are the
    other rows of T; those of D are an orthonormal basis of the null vectors of x.
    Singular values below `cutoff * max(s[0], scale)` count as zero."""
    real = jnp.finfo(x.dtype).dtype
    cutoff = jnp.asarray(cutoff, real)
    return _reveal(x, jnp.stack([cutoff, cutoff * jnp.asarray(scale, real)]))


def rank_revealing_qr(
    x: Inexact[Array, "n m"],
    cutoff: Real[Array, ""] | float,
    scale: Real[Array, ""] | float = 0.0,
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
    """`x = Q T` for a tall `x`, but for the part of x that belongs to singular values
    below `cutoff * max(s[0], scale)`. Columns of Q are orthonormal, or zero."""
    q, r = qr(x)
    u, t, *_ = reveal(r, cutoff, scale)
    return q @ u, t


@_door
def _eig(x: Array) -> tuple[Array, Array, Array]:
    def attempt(x):
        values, vectors = jnp.linalg.eig(x)
        inverse = jnp.linalg.inv(vectors)
        return values, vectors, inverse

    def apart():
        noise = jr.normal(fast(jr.key(0)), x.shape, x.dtype) / len(x)
        return attempt(x + eps**0.5 * jnp.linalg.norm(x) * noise)

    eps = float(jnp.finfo(x.dtype).eps)
    found = attempt(x)
    condition = jnp.linalg.norm(found[1]) * jnp.linalg.norm(found[2]) / len(x)
    return jax.lax.cond(condition <= eps ** (-2 / 3), lambda: found, apart)


def eig(
    x: Inexact[Array, "m m"],
) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    """Eigenvalues of any square matrix, eigenvectors and their inverse; always complex.

    For a matrix that is defective, or nearly so, they would have no correct digit. There
    a random perturbation of the size of the root of the machine epsilon is added first,
    which leaves half of the digits correct (Davies, SIAM J. Matrix Anal. Appl. 29, 2008).
    JAX has no such routine for TPUs.
    """
    x, scale = normalise(x)
    values, vectors, inverse = _eig(x)
    return scale * values, vectors, inverse


@_door
def _inverse(x: Array) -> tuple[Array]:
    return (jnp.linalg.inv(x),)


def inverse(x: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """Of any square matrix; not finite if it is singular."""
    return _inverse(x)[0]


@_door
def _determinant_sign(x: Array) -> tuple[Array]:
    return (jnp.linalg.slogdet(x)[0],)


def determinant_sign(x: Inexact[Array, "m m"]) -> Inexact[Array, ""]:
    """`det x / |det x|` of any square matrix, 0 if a pivot is."""
    return _determinant_sign(x)[0]


@_door
def _expm(x: Array) -> tuple[Array]:
    return (jax.scipy.linalg.expm(x, max_squarings=32),)


def expm(x: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The exponential of any square matrix, by scaling and squaring."""
    return _expm(x)[0]


def _gram_qr(x: Array) -> tuple[Array, Array]:
    """`x = Q R` from Gram matrices, of x and of what is left of it: directions below the
    roundoff of one are above that of the next. Fukaya, Kannan, Nakatsukasa, Yamamoto and
    Yanagisawa, SIAM J. Sci. Comput. 42, 2020, with eigenvalues for Cholesky factors, so
    that a singular x is nothing special."""
    q, scale = normalise(x)
    r = scale * jnp.eye(x.shape[1], dtype=x.dtype)
    lengths = jnp.zeros(x.shape[1], jnp.finfo(x.dtype).dtype)
    for _ in range(4):
        q, r, lengths = _whiten(q, r)
    # Columns have length 1 before the last round, except those that are rounding errors.
    return jnp.where(lengths > 0.5, q, 0), r


def _whiten(q: Array, r: Array) -> tuple[Array, Array, Array]:
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
    """`x = Q diag(s) Vh` for a tall `x`, by QR and the decomposition of `R`. Singular
    values below `cutoff * max(s[0], scale)` become 0, and so do their columns of `Q`."""
    q, r = qr(x)
    u, s, vh = svd(r)
    s = jnp.where(s > cutoff * jnp.maximum(s[0], scale), s, 0)
    return (q @ u) * (s > 0), s, vh


def thin_svd_gram(
    x: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n m"], Real[Array, " m"], Inexact[Array, "m m"]]:
    """`thin_svd` from the eigenvalues of `x* x`: several times faster, and accurate only
    for columns that are well conditioned or exactly dependent."""
    values, vectors = eigh(x.conj().T @ x)
    cutoff = x.shape[1] * jnp.finfo(x.dtype).eps * values[-1]
    s = jnp.sqrt(jnp.where(values > cutoff, values, 0))
    q = x @ (vectors * jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0))
    return q, s, vectors.conj().T


def diagonal(x: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """`jnp.diagonal`, as a slice: that is a tenth of the instructions."""
    return x.reshape(-1)[:: len(x) + 1]


def inner_product(
    x: Inexact[Array, "n b"], y: Inexact[Array, "n b"]
) -> Inexact[Array, ""]:
    """`tr(x* y)`. As the product of two blocks this is one kernel to compile on CPU, as
    the sum over a tall array three."""
    return jnp.sum(diagonal(x.conj().T @ y))


def two_norm(tree: PyTree[Inexact[Array, "..."]]) -> Real[Array, ""]:
    """The root of the sum of the squares of all entries; nothing overflows before they
    do."""
    sizes = [jnp.abs(leaf) for leaf in jax.tree.leaves(tree)]
    largest = ft.reduce(jnp.maximum, [jnp.max(size, initial=0) for size in sizes])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return unit * jnp.sqrt(sum(jnp.sum((size / unit) ** 2) for size in sizes))


def normalise(x: Inexact[Array, "*n"]) -> tuple[Inexact[Array, "*n"], Real[Array, ""]]:
    """`x / c` and `c`, with `c` the largest modulus in `x`, or 1 for a zero `x`."""
    largest = jnp.max(jnp.abs(x))
    scale = jnp.where(largest > 0, largest, 1)
    return x / scale, scale
