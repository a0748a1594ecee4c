"""Gram matrices of data that are read a chunk at a time."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import PSD
from ..properties.test_ahead_of_time import count_compilations


N, M, SIZE = 24, 37, 8
KEY = jr.key(0)
ROWS, COLUMNS = 0, 1
COUNTS = np.random.default_rng(0).integers(0, 3, (N, M)).astype(np.int8)
COUNTS[:, 5] = 2
HUTCHINSON = tx.HutchinsonEstimator()

by_axis = pytest.mark.parametrize("axis", [ROWS, COLUMNS], ids=["rows", "columns"])


def dense(x, standardise=False):
    """The matrix, by NumPy in double precision."""
    x = np.asarray(x).astype(np.promote_types(np.asarray(x).dtype, float))
    if standardise:
        std = x.std(axis=0)
        x = (x - x.mean(axis=0)) / np.where(np.ptp(x, axis=0) > 0, std, np.inf)
    return x @ x.conj().T / x.shape[1]


def close(found, expected, tolerance):
    """Relative to the largest entry."""
    size = np.max(np.abs(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * size)


@eqx.filter_jit
def product(operator, matrix):
    return jax.vmap(operator.mv, 1, 1)(matrix)


def matrix_of(operator):
    (n,), dtype = operator.in_structure().shape, operator.in_structure().dtype
    return np.asarray(product(operator, np.eye(n, dtype=dtype)))


def file(folder, x, by_columns):
    """A memmap of a file that has columns one after the other, or rows."""
    path = folder / f"{by_columns}"
    (x.T if by_columns else x).tofile(path)
    order = "F" if by_columns else "C"
    return np.memmap(path, x.dtype, "r", shape=x.shape, order=order)


class Reader:
    """A function that returns chunks, and counts."""

    def __init__(self, x, axis=COLUMNS):
        self.x, self.axis, self.calls = x, axis, []

    def __call__(self, start, stop):
        self.calls.append((start, stop))
        return self.x[:, start:stop] if self.axis == COLUMNS else self.x[start:stop]

    def passes(self, run):
        """How often each chunk is read while `run` is called; all equally often."""
        self.calls.clear()
        jax.block_until_ready(run())
        read = {call: self.calls.count(call) for call in self.calls}
        covered = {i for start, stop in read for i in range(start, stop)}
        assert covered == set(range(self.x.shape[self.axis]))
        (passes,) = set(read.values())
        return passes

    def operator(self, **settings):
        settings = {"axis": self.axis, "chunk_size": SIZE} | settings
        return tx.data_gram(self, self.x.shape, **settings)


# --- what it is ---

TOLERANCES = {np.float32: 1e-5, np.float64: 1e-13}


@pytest.mark.slow(but=("int8", "complex"))
@pytest.mark.parametrize("dtype", [np.int8, np.float16, float, complex])
def test_in_memory(dtype):
    """In chunks of rows and of columns, standardised and not."""
    x = COUNTS + np.random.default_rng(1).random((N, 1)) if dtype is float else COUNTS
    x = (x * (1 - 2j) + x[::-1] if dtype is complex else x).astype(dtype)

    kinds = list(itertools.product((ROWS, COLUMNS), (False, True)))
    wide = np.promote_types(dtype, np.float32)

    @jax.jit
    def matrices(x):
        operators = [
            tx.data_gram(x, axis=axis, chunk_size=SIZE, standardise=standardise)
            for axis, standardise in kinds
        ]
        assert all(map(lx.is_positive_semidefinite, operators))
        return [product(operator, np.eye(N, dtype=wide)) for operator in operators]

    for (_, standardise), found in zip(kinds, matrices(x), strict=True):
        expected = dense(x.astype(complex if dtype is complex else float), standardise)
        assert found.dtype == wide
        tolerance = 10 * TOLERANCES[np.real(found).dtype.type]
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


INSIDE = np.s_[3:20, 4:24]


@pytest.mark.slow(but=("part0-*", "part3-*"))
@pytest.mark.parametrize(
    ("part", "by_columns"),
    [
        *((part, False) for part in (INSIDE, np.s_[::2], np.s_[:, 1:2])),
        *((part, True) for part in (np.s_[:], INSIDE, np.s_[::2], np.s_[:, 1:2])),
    ],
)
def test_file(tmp_path, part, by_columns):
    """Any part of it whose rows (or columns) lie one after the other."""
    turn = np.transpose if by_columns else np.asanyarray
    x = turn(turn(file(tmp_path, COUNTS, by_columns))[part])
    assert isinstance(x, np.memmap)

    @jax.jit
    def matrices(identity):
        settings = {"chunk_size": SIZE, "standardise": True}
        operators = [tx.data_gram(x, axis=axis, **settings) for axis in (ROWS, COLUMNS)]
        return [product(operator, identity) for operator in operators]

    expected = dense(turn(turn(COUNTS)[part]), standardise=True)
    for found in matrices(np.eye(len(x), dtype=np.float32)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@by_axis
@pytest.mark.parametrize("order", ["C", "F"])
def test_function(axis, order):
    x = np.asarray(COUNTS, ">f8", order=order)
    found = matrix_of(Reader(x, axis).operator(standardise=True))
    np.testing.assert_allclose(found, dense(x, True), rtol=0, atol=1e-13)


@by_axis
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scales_and_shifts(scale, axis):
    """Columns far from zero, or with squares beyond the range of float32; a constant one
    is zero, though its sum is rounded."""
    x = np.random.default_rng(2).standard_normal((N, M)) + 300
    x = (x * scale).astype(">f4")
    x[:, 5] = 0.1 * scale
    operator = tx.data_gram(x, axis=axis, chunk_size=SIZE, standardise=True)
    expected = dense(x, standardise=True)
    np.testing.assert_allclose(matrix_of(operator), expected, rtol=0, atol=1e-4)


@by_axis
def test_centring_far_from_zero(axis):
    """The mean, in more digits than float32 has of such numbers, is subtracted."""
    x = COUNTS.astype(np.int32) + 10**6
    operator = tx.data_gram(x, axis=axis, chunk_size=SIZE, standardise=True)
    found = matrix_of(operator)
    np.testing.assert_allclose(found, dense(x, standardise=True), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found @ np.ones(N), 0, atol=1e-5)


@by_axis
def test_memory(axis):
    """That of a few chunks in the dtype of products, not of the matrix; with a gradient
    too. The gradient in the matrix is as large as it is."""
    size, (n, m) = 16, (256, 1024) if axis == COLUMNS else (1024, 256)

    def form(vector, x):
        return vector @ tx.data_gram(x, axis=axis, chunk_size=size).mv(vector)

    def share(function, dtype):
        kinds = ((n,), jnp.float32), ((n, m), dtype)
        arguments = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * n * m)

    assert share(form, jnp.int8) < 0.1
    assert share(jax.grad(form), jnp.int8) < 0.1
    assert share(jax.grad(form, 1), jnp.float32) < 1.2


# --- how often the data are read ---


@pytest.mark.slow(but="rows")
@by_axis
def test_passes(axis):
    """One for all probes of a block, where chunks are columns."""
    reader = Reader(COUNTS, axis)
    operator, each = reader.operator(), 1 if axis == COLUMNS else 2
    assert len(reader.calls) == 1
    reader.calls.clear()
    assert reader.passes(lambda: reader.operator(standardise=True)) == 1

    def trace(operator=operator, estimator=HUTCHINSON, execution=tx.Local()):
        settings = {"k": 8, "key": KEY, "execution": execution}
        return tx.trace(operator, estimator, **settings).value

    assert reader.passes(lambda: trace()) == each
    if axis == ROWS:
        return
    assert reader.passes(lambda: trace(execution=tx.Local(4))) == 2
    assert reader.passes(lambda: trace(estimator=tx.XTraceEstimator())) == 2
    assert reader.passes(lambda: trace(operator @ operator)) == 2


def test_passes_on_a_mesh():
    """Each device reads for its own probes."""
    reader = Reader(COUNTS)
    operator = reader.operator(standardise=True)
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:2]))

    def trace(**settings):
        return tx.trace(operator, HUTCHINSON, k=8, key=KEY, **settings).value

    assert reader.passes(lambda: trace(execution=execution)) == 2
    close(trace(execution=execution), trace(), 1e-6)


def test_compiled_once(tmp_path):
    """For all parts of a file that are of one shape."""
    x = file(tmp_path, COUNTS, by_columns=True)
    v = np.arange(N, dtype=np.float32)

    def run(part):
        operator = tx.data_gram(part, chunk_size=4, standardise=True)
        settings = {"k": 4, "key": KEY}
        return operator.mv(v), tx.trace(operator, HUTCHINSON, **settings).value

    run(x[:, :10])
    with count_compilations() as compilations:
        found, _ = run(x[:, 20:30])
    assert not compilations
    close(found, dense(COUNTS[:, 20:30], True) @ v, 1e-5)


# --- what is made of it ---


@pytest.mark.slow
def test_as_a_stored_matrix():
    """In as few passes as there are products with a block."""
    reader, matrix = Reader(COUNTS), dense(COUNTS, standardise=True)
    operator = reader.operator(standardise=True)
    stored = lx.MatrixLinearOperator(jnp.asarray(matrix.astype(np.float32)), PSD)
    identity = lx.IdentityLinearOperator(operator.in_structure())
    settings = {"k": 8, "key": KEY}

    def nystrom(operator):
        return tx.trace(operator, tx.XNysTraceEstimator(), **settings).value

    def products(operator):
        return tx.frobenius_products([operator, identity], **settings).value

    def logdet(operator):
        shifted = lx.TaggedLinearOperator(operator + np.float32(0.5) * identity, PSD)
        return tx.logdet(shifted, num_steps=5, **settings).value

    for run, passes in ((nystrom, 1), (products, 1), (logdet, 5)):
        close(run(operator), run(stored), 1e-5)
        assert reader.passes(lambda run=run: run(operator)) == passes
    close(tx.trace(operator, k=N).value, np.trace(matrix), 1e-6)


@by_axis
def test_derivatives_in_vectors(axis):
    operator = Reader(COUNTS.astype(float), axis).operator(standardise=True)
    matrix, vector = dense(COUNTS, True), np.arange(float(N))

    def form(vector):
        return vector @ operator.mv(vector)

    slope, hessian = jax.jit(lambda v: (jax.grad(form)(v), jax.hessian(form)(v)))(vector)
    close(slope, 2 * matrix @ vector, 1e-12)
    close(hessian, 2 * matrix, 1e-12)


@pytest.mark.parametrize(
    ("axis", "standardise"), [(COLUMNS, False), (COLUMNS, True), (ROWS, True)]
)
def test_derivatives_in_the_matrix(axis, standardise):
    generator = np.random.default_rng(3)
    x, v = generator.random((N, M)), generator.random(N)

    def chunked(x):
        settings = {"axis": axis, "chunk_size": SIZE, "standardise": standardise}
        return v @ tx.data_gram(x, **settings).mv(v**2)

    def plain(x):
        if standardise:
            x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
        return (v @ x) @ (v**2 @ x) / M

    both = jax.jit(lambda x: (jax.grad(chunked)(x), jax.grad(plain)(x)))
    close(*both(x), 1e-10)
    # A constant column has the standard deviation zero: its derivative is zero where the
    # columns are divided by it, and it spoils no other one.
    x[:, 5] = 2.0
    found, expected = (np.asarray(each) for each in both(x))
    if standardise:
        assert np.all(found[:, 5] == 0)
    others = (np.arange(M) != 5) | (not standardise)
    close(found[:, others], expected[:, others], 1e-10)


def test_derivatives_in_scale_and_shift():
    operator = Reader(COUNTS.astype(float)).operator(standardise=True)
    identity = lx.IdentityLinearOperator(operator.in_structure())

    def logdet(scale, shift):
        shifted = lx.TaggedLinearOperator(scale * operator + shift * identity, PSD)
        return tx.logdet(shifted, k=N, key=KEY, throw=False).value

    found = jax.jit(jax.grad(logdet, (0, 1)))(1.5, 0.5)
    matrix = dense(COUNTS, True)
    inverse = np.linalg.inv(1.5 * matrix + 0.5 * np.eye(N))
    close(found[0], np.trace(inverse @ matrix), 1e-8)
    close(found[1], np.trace(inverse), 1e-8)


def test_inside_transformations():
    """Made inside `jit` and `vmap`, of arrays and of functions."""
    stack, reader = np.stack([COUNTS, COUNTS[::-1]]), Reader(COUNTS)
    settings = {"k": 4, "key": KEY, "throw": False}

    def trace(x, *shape):
        operator = tx.data_gram(x, *shape, chunk_size=SIZE, standardise=True)
        return tx.trace(operator, HUTCHINSON, **settings).value

    expected = [trace(x) for x in stack]
    both = jax.jit(lambda x: (jax.vmap(trace)(x), trace(reader, COUNTS.shape)))
    of_arrays, of_a_function = both(stack)
    close(of_arrays, expected, 1e-5)
    close(of_a_function, expected[0], 1e-5)


def test_strict_modes():
    expected = dense(COUNTS, standardise=True)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
        jax.transfer_guard("disallow"),
    ):
        operator = tx.data_gram(COUNTS, standardise=True)
        solution = tx.trace(operator, k=N)
        close(jax.device_get(solution.value), np.trace(expected), 1e-6)


# --- what may go wrong ---


def test_not_finite():
    x = COUNTS.astype(float)
    x[3, 4] = np.nan
    operator = tx.data_gram(x, chunk_size=SIZE)
    solution = tx.trace(operator, HUTCHINSON, k=4, key=KEY, throw=False)
    assert solution.result == tx.RESULTS.nonfinite_product


@by_axis
def test_wrong_chunks(axis):
    def transposed(start, stop):
        return Reader(COUNTS, axis)(start, stop).T

    what = "columns" if axis == COLUMNS else "rows"
    with pytest.raises(ValueError, match=rf"`x\(0, 2\)` must return {what} 0 to 1 of"):
        tx.data_gram(transposed, COUNTS.shape, axis=axis)
    with pytest.raises(ValueError, match=r"an array of shape \(2, 37\).*\(2, 24\)"):
        tx.data_gram(lambda start, stop: COUNTS.T[start:stop], (N, M), axis=ROWS)


class Unreliable(Reader):
    """Fails in the chunk that begins at 16, while it is told to."""

    failure = None

    def __call__(self, start, stop):
        chunk = super().__call__(start, stop)
        if self.failure is None or start != 16:
            return chunk
        return self.failure(chunk)


def lost(chunk):
    raise OSError("the network is gone")


FAILURES = [
    (
        lambda chunk: chunk[:, 1:],
        r"`x\(16, 24\)` must return columns 16 to 23.*\(24, 7\)",
    ),
    (lambda chunk: chunk.astype(float), r"dtype of the first chunk, int8. Found float64"),
    (lost, "the network is gone"),
]


@pytest.mark.slow
def test_chunks_that_go_wrong_later():
    """The error ends with the message, the operator can be used again, and a run goes on
    from its last state as if nothing had happened."""
    reader = Unreliable(COUNTS)
    operator = reader.operator()

    def run(rounds, state=None):
        k = tx.Adaptive(rtol=1e-9, max_k=8 * rounds, round_size=8)
        return tx.trace(operator, HUTCHINSON, k=k, key=KEY, state=state, throw=False)

    first = run(1)
    for reader.failure, message in FAILURES:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run(2, first.state).value)
    reader.failure = None
    close(run(2, first.state).value, run(2).value, 1e-6)


def test_short_file(tmp_path):
    x = file(tmp_path, COUNTS, by_columns=True)
    operator = tx.data_gram(x, chunk_size=SIZE)
    with open(x.filename, "r+b") as opened:
        opened.truncate(20 * N)
    message = r"must hold a matrix of shape \(24, 37\) and dtype int8"
    with pytest.raises(
        ValueError, match=message + ". Found 480 bytes of 888: it is short"
    ):
        tx.data_gram(x)
    message += ". Found its end within columns 16 to 23: it is shorter"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(operator.mv(np.ones(N, np.float32)))


def test_new_axis_of_a_file(tmp_path):
    """NumPy says that it has no stride."""
    column = np.arange(10, dtype=np.float32)
    column.tofile(tmp_path / "column")
    x = np.memmap(tmp_path / "column", np.float32, "r")
    for part in (x[:, None], x[4:, None]):
        found = tx.data_gram(part).mv(jnp.ones(len(part), np.float32))
        assert np.allclose(found, np.asarray(part)[:, 0] * np.sum(part))


def test_other_mistakes(tmp_path):
    x = file(tmp_path, COUNTS, by_columns=False)
    with pytest.raises(
        ValueError, match=r"`x` must show a file as it is.* Pass a function"
    ):
        tx.data_gram(x[:, ::2])
    with pytest.raises(ValueError, match=r"Found a `numpy\.memmap` of mode 'c'"):
        tx.data_gram(np.memmap(x.filename, np.int8, "c", shape=x.shape))
    with pytest.raises(ValueError, match=r"`shape` must be the shape of.*Found None"):
        tx.data_gram(Reader(COUNTS))
    with pytest.raises(ValueError, match=r"`shape` must be `x\.shape`. Found \(2, 3\)"):
        tx.data_gram(COUNTS, (2, 3))
    with pytest.raises(ValueError, match=r"`axis` must be 1, .* Found 2."):
        tx.data_gram(COUNTS, axis=2)
    with pytest.raises(ValueError, match=r"`chunk_size` must be at least 1\. Found 0"):
        tx.data_gram(COUNTS, chunk_size=0)
    with pytest.raises(TypeError, match=r"`x` must be an array.*Found \(24,\)"):
        tx.data_gram(COUNTS[:, 0])
    with pytest.raises(TypeError, match=r"`x` must hold numbers\. Found dtype <U1"):
        tx.data_gram(COUNTS.astype(str).astype("U1"))


def test_masked_arrays():
    masked = np.ma.masked_array(COUNTS, mask=COUNTS == 1)
    with pytest.raises(TypeError, match=r"`x` must not be a `numpy\.ma.*\.filled\(0\)"):
        tx.data_gram(masked)
    with pytest.raises(TypeError, match=r"`x\(0, 2\)` must not be.*\.filled\(0\)"):
        tx.data_gram(Reader(masked), (N, M))


@pytest.mark.parametrize("shape", [5, (24.0, 37.0), (7.9, 23.9), (N,), (N, 0), "ab"])
def test_wrong_shapes(shape, as_users_call):
    for x in (Reader(COUNTS), COUNTS):
        with pytest.raises(ValueError, match=r"`shape` must be.* two positive integers"):
            tx.data_gram(x, shape)


@pytest.mark.parametrize("axis", [1.0, True, None])
def test_wrong_axis(axis, as_users_call):
    with pytest.raises(ValueError, match=f"`axis` must be 1, .* Found {axis}"):
        tx.data_gram(COUNTS, axis=axis)
