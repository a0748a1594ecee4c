"""Random operators for the [soak](soak.py), each with its matrix in double precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spl

import traceax as tx


PSD = lx.positive_semidefinite_tag
SIZES = 1, 2, 3, 5, 12, 40, 64, 100, 160
DTYPES = np.float32, np.float64, np.complex64, np.complex128, jnp.bfloat16


class Draw:
    """The random choices of one job."""

    def __init__(self, seed: int):
        self.generator = np.random.default_rng(seed)

    def one_of(self, *options: Any) -> Any:
        return options[self.generator.integers(len(options))]

    def normal(self, *shape: int, dtype: Any = float) -> np.ndarray:
        x = self.generator.standard_normal(shape)
        if is_complex(dtype):
            x = x + 1j * self.generator.standard_normal(shape)
        return x.astype(wide(dtype))


class Subject(NamedTuple):
    """An operator. `make(parts)` builds it, where `parts` are the arrays that a compiled
    program takes; `matrix` is what it should be, made by NumPy in double precision from
    the rounded parts. `kind` is `psd`, `hermitian`, `general` or `rectangular`; `sizes`
    are those of the leaves of its vectors."""

    name: str
    kind: str
    dtype: Any
    matrix: np.ndarray
    parts: Any
    make: Callable[[Any], lx.AbstractLinearOperator]
    sizes: tuple[int, ...]

    @property
    def on_vectors(self) -> bool:
        """Whether it is applied to arrays with one axis."""
        structure = self.make(self.parts).in_structure()
        return isinstance(structure, jax.ShapeDtypeStruct) and len(structure.shape) == 1

    def __str__(self):
        rows, columns = self.matrix.shape
        return f"{self.kind} {self.name} {rows}x{columns} {np.dtype(self.dtype).name}"


def is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def wide(dtype: Any) -> Any:
    return np.complex128 if is_complex(dtype) else np.float64


def tags_of(kind: str, dtype: Any) -> Any:
    hermitian = tx.hermitian_tag if is_complex(dtype) else lx.symmetric_tag
    return {"psd": PSD, "hermitian": hermitian}.get(kind, ())


def random_matrix(draw: Draw, kind: str, rows: int, dtype: Any) -> np.ndarray:
    """A matrix in the given dtype: well or ill conditioned, of low rank, or with some
    large eigenvalues, and of any scale."""
    columns = draw.one_of(*SIZES) if kind == "rectangular" else rows
    n = min(rows, columns)
    part, decay = np.linspace(0, 1, n), draw.one_of(1, 3, 6, 12)
    values = draw.one_of(
        1 + part,
        10.0 ** (-decay * part),
        np.where(part < 0.3, 1, 10.0**-decay),
        np.where(np.arange(n) < max(1, n // 3), 1 + part, 0),
    )
    if kind == "hermitian":
        values = values * draw.generator.choice([-1, 1], n)
    left = np.linalg.qr(draw.normal(rows, n, dtype=dtype))[0]
    same = kind in ("psd", "hermitian")
    right = left if same else np.linalg.qr(draw.normal(columns, n, dtype=dtype))[0]
    matrix = 10.0 ** draw.one_of(0, 0, 0, 0, 4, -8, 15, -25) * (left * values)
    matrix = matrix @ right.conj().T
    if same:
        matrix = (matrix + matrix.conj().T) / 2
    return matrix.astype(dtype)


def dense(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    matrix = random_matrix(draw, kind, n, dtype)
    tags = tags_of(kind, dtype)
    make = draw.one_of(
        lambda parts: lx.MatrixLinearOperator(parts, tags),
        lambda parts: tx.as_operator(parts, tags=tags),
    )
    return _subject("dense", kind, matrix, jnp.asarray(matrix), make)


def function(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    matrix = random_matrix(draw, kind, n, dtype)
    like = jax.ShapeDtypeStruct(matrix.shape[1:], dtype)

    def make(parts):
        return tx.as_operator(lambda v: parts @ v, like=like, tags=tags_of(kind, dtype))

    return _subject("function", kind, matrix, jnp.asarray(matrix), make)


def tree(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """On two leaves, the second one with two axes."""
    if kind == "rectangular" or n < 3:
        return function(draw, kind, n, dtype)
    matrix = random_matrix(draw, kind, n, dtype)
    rows = (n - 1) // 3
    first = n - 2 * rows
    like = {
        "a": jax.ShapeDtypeStruct((first,), dtype),
        "b": jax.ShapeDtypeStruct((rows, 2), dtype),
    }

    def make(parts):
        def mv(v):
            x = parts @ jnp.concatenate([v["a"], v["b"].ravel()])
            return {"a": x[:first], "b": x[first:].reshape(rows, 2)}

        return tx.as_operator(mv, like=like, tags=tags_of(kind, dtype))

    subject = _subject("tree", kind, matrix, jnp.asarray(matrix), make)
    return subject._replace(sizes=(first, 2 * rows))


def host(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """Products by SciPy."""
    if dtype == jnp.bfloat16:
        return dense(draw, kind, n, dtype)
    matrix = random_matrix(draw, kind, n, dtype)
    operator = spl.aslinearoperator(matrix)
    tags = tags_of(kind, dtype)
    return _subject(
        "host", kind, matrix, (), lambda _: tx.as_operator(operator, tags=tags)
    )


def sparse(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """Of SciPy; semidefinite ones are dominated by their diagonals."""
    if dtype == jnp.bfloat16:
        return dense(draw, kind, n, dtype)
    columns = draw.one_of(*SIZES) if kind == "rectangular" else n
    found = draw.normal(n, columns, dtype=dtype)
    found = np.where(draw.generator.random((n, columns)) < 3 / columns, found, 0)
    if kind in ("psd", "hermitian"):
        found = (found + found.conj().T) / 2
        found[np.diag_indices(n)] = found.diagonal().real
    if kind == "psd":
        found[np.diag_indices(n)] = 1e-3 + 1.01 * np.sum(np.abs(found), axis=1)
    matrix = found.astype(dtype)
    stored = draw.one_of(sp.csr_array, sp.coo_array)(matrix)
    tags = tags_of(kind, dtype)
    return _subject("sparse", kind, matrix, (), lambda _: tx.sparse(stored, tags))


def factored(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """Kronecker products and sums, and block-diagonal matrices."""
    if kind == "rectangular":
        return dense(draw, kind, n, dtype)
    m = max(1, round(n**0.5))
    pair = [random_matrix(draw, kind, m, dtype) for _ in range(2)]
    a, b = (x.astype(wide(dtype)) for x in pair)
    one, tags = np.eye(m), tags_of(kind, dtype)
    join, matrix = draw.one_of(
        (tx.kronecker, np.kron(a, b)),
        (tx.kronecker_sum, np.kron(a, one) + np.kron(one, b)),
        (tx.block_diagonal, scipy.linalg.block_diag(a, b)),
    )
    parts = tuple(map(jnp.asarray, pair))
    make = lambda parts: join(*[lx.MatrixLinearOperator(x, tags) for x in parts])  # noqa: E731
    subject = _subject(join.__name__, kind, matrix, parts, make)
    sizes = (m, m) if join is tx.block_diagonal else (len(matrix),)
    return subject._replace(dtype=dtype, sizes=sizes)


def structured(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """Diagonal and Toeplitz matrices, and a diagonal plus a matrix of low rank."""
    if kind == "rectangular" or dtype == jnp.bfloat16:
        return dense(draw, kind, n, dtype)
    tags = tags_of(kind, dtype)
    signs = (-1.0) ** np.arange(n) if kind == "hermitian" else np.ones(n)
    column = (signs * 0.6 ** np.arange(n)).astype(dtype)
    row = (0.3 ** np.arange(n)).astype(dtype) if kind == "general" else column
    entries = (signs * np.abs(draw.normal(n))).astype(dtype)
    low = draw.normal(n, 2, dtype=dtype).astype(dtype)

    def diagonal(parts):
        return tx.as_operator(lx.DiagonalLinearOperator(parts), tags=tags)

    def toeplitz(parts):
        return tx.toeplitz(*(parts if kind == "general" else parts[:1]), tags=tags)

    def low_rank(parts):
        like = jax.ShapeDtypeStruct((n,), dtype)
        low, entries = parts
        gram = tx.as_operator(lambda v: low @ (low.conj().T @ v), like=like, tags=PSD)
        return tx.as_operator(gram + lx.DiagonalLinearOperator(entries), tags=tags)

    w = low.astype(wide(dtype))
    matrix, parts, make = draw.one_of(
        (np.diag(entries), entries, diagonal),
        (scipy.linalg.toeplitz(column, row), (column, row), toeplitz),
        (np.diag(entries) + w @ w.conj().T, (low, entries), low_rank),
    )
    parts = jax.tree.map(jnp.asarray, parts)
    subject = _subject(make.__name__, kind, matrix, parts, make)
    return subject._replace(dtype=dtype)


def network(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """The curvature of a small network, at once or in two batches."""
    if kind not in ("psd", "hermitian"):
        return sparse(draw, kind, n, dtype)
    dtype = draw.one_of(np.float32, np.float64)
    hidden, examples = max(1, n // 4), 16
    w, v = (draw.normal(*shape).astype(dtype) for shape in ((3, hidden), (hidden,)))
    data = draw.normal(examples, 3).astype(dtype), draw.normal(examples).astype(dtype)
    batches = [tuple(x[:8] for x in data), tuple(x[8:] for x in data)]
    batches = draw.one_of([data], batches)
    model = lambda p, batch: jnp.tanh(batch[0] @ p["in"]) @ p["out"]  # noqa: E731
    losses = lambda f, batch: (f - batch[1]) ** 2  # noqa: E731
    loss = lambda f, batch: jnp.mean(losses(f, batch))  # noqa: E731
    of = lambda loss: lambda p, batch: loss(model(p, batch), batch)  # noqa: E731
    jacobian, residual, second = _derivatives(w, v, *(x.astype(float) for x in data))
    slopes = 2 * residual[:, None] * jacobian
    name, matrix, make = draw.one_of(
        *[
            (
                "hessian",
                2 * (jacobian.T @ jacobian + second) / examples,
                lambda parts: tx.hessian(of(loss), parts, batches),
            )
        ]
        if kind == "hermitian"
        else [
            (
                "ggn",
                2 * jacobian.T @ jacobian / examples,
                lambda parts: tx.ggn(model, loss, parts, batches),
            ),
            (
                "empirical_fisher",
                slopes.T @ slopes / examples,
                lambda parts: tx.empirical_fisher(of(losses), parts, batches),
            ),
            (
                "jacobian_gram",
                jacobian.T @ jacobian,
                lambda parts: tx.jacobian_gram(lambda p: model(p, data), parts),
            ),
        ]
    )
    parts = {"in": jnp.asarray(w), "out": jnp.asarray(v)}
    subject = _subject(name, kind, matrix, parts, make)
    return subject._replace(dtype=dtype, sizes=(3 * hidden, hidden))


def _derivatives(w, v, x, y):
    """The Jacobian of the outputs of a network, the residuals, and the sum of the
    Hessians of the outputs times the residuals."""
    w, v = w.astype(float), v.astype(float)
    h = np.tanh(x @ w)
    slope, m = 1 - h**2, len(v)
    inner = (x[:, :, None] * (slope * v)[:, None]).reshape(len(x), -1)
    residual = h @ v - y
    second = np.zeros((4 * m, 4 * m))
    for i in range(m):
        at = np.arange(3) * m + i
        curvature = residual * -2 * h[:, i] * slope[:, i] * v[i]
        second[np.ix_(at, at)] = (x * curvature[:, None]).T @ x
        second[at, 3 * m + i] = second[3 * m + i, at] = x.T @ (residual * slope[:, i])
    return np.hstack([inner, h]), residual, second


def gram(draw: Draw, kind: str, n: int, dtype: Any) -> Subject:
    """The Gram matrix of data read in chunks."""
    if kind != "psd" or dtype == jnp.bfloat16:
        return network(draw, kind, n, dtype)
    data = draw.normal(n, max(1, n // 2), dtype=dtype).astype(dtype)
    settings = {"axis": draw.one_of(0, 1), "chunk_size": draw.one_of(None, 7)}
    matrix = data.astype(wide(dtype))
    matrix = matrix @ matrix.conj().T / data.shape[1]
    make = lambda parts: tx.data_gram(parts, **settings)  # noqa: E731
    subject = _subject("data_gram", kind, matrix, jnp.asarray(data), make)
    return subject._replace(dtype=dtype)


def _subject(name, kind, matrix, parts, make) -> Subject:
    exact = matrix.astype(wide(matrix.dtype))
    return Subject(name, kind, matrix.dtype, exact, parts, make, (exact.shape[1],))


STRUCTURES = dense, function, tree, host, sparse, factored, structured, network, gram


def random_subject(draw: Draw, kinds: tuple[str, ...], dtypes: Any = DTYPES) -> Subject:
    make = draw.one_of(*STRUCTURES)
    kind, n = draw.one_of(*kinds), draw.one_of(*SIZES)
    return make(draw, kind, n, draw.one_of(*dtypes))
