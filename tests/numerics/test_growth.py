"""A basis that grows a block at a time, in buffers of a fixed size."""

import functools as ft

import jax
import numpy as np
import pytest

from traceax._numerics import growth


DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.complex128])
N, B, BLOCKS = 30, 4, 5
P = B * BLOCKS


def eps(dtype):
    return float(np.finfo(dtype).eps)


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


def normal(seed, shape, dtype):
    generator = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.complexfloating):
        real, imaginary = generator.standard_normal((2, *shape))
        return ((real + 1j * imaginary) / 2**0.5).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


@jax.jit
def step(basis, x, count, scale):
    """The basis with a new block, of all that is more than a few roundoffs, and what it
    was made of."""
    new = growth.extend(basis, x, count, 4 * eps(x.dtype), scale)
    return growth.put(basis, new.block, count), new


def norms(x):
    return np.linalg.norm(x, axis=0)


def size(x):
    return np.asarray(np.linalg.norm(x), np.finfo(x.dtype).dtype)


def grown(blocks):
    """The basis of several blocks, one after another, and what each step gave."""
    basis, steps = np.zeros((N, P), blocks[0].dtype), []
    for i, x in enumerate(blocks):
        basis, new = numpy(step(basis, x, np.int32(i), size(x)))
        steps.append(new)
    return basis, steps


def check(basis, blocks, steps):
    """Columns orthonormal or zero, and every block a combination of them."""
    tolerance = 20 * eps(basis.dtype)
    present = norms(basis) > 0.5
    gram = basis.conj().T @ basis
    assert np.max(np.abs(gram - np.diag(present))) <= tolerance
    for i, (x, new) in enumerate(zip(blocks, steps, strict=True)):
        assert np.all(new.coefficients[i * B :] == 0)
        again = basis @ new.coefficients + new.block @ new.coupling
        assert np.max(np.abs(again - x)) <= tolerance * np.linalg.norm(x)
    return present


@DTYPES
def test_random_blocks(dtype):
    blocks = list(normal(0, (BLOCKS, N, B), dtype))
    basis, steps = grown(blocks)
    assert np.all(check(basis, blocks, steps))


@DTYPES
def test_blocks_that_nearly_repeat(dtype):
    """One pass of Gram-Schmidt would lose orthogonality: what is new in a block is 1e-4
    of it in float32, and 1e-9 in double precision."""
    new = dtype(1e-4 if dtype is np.float32 else 1e-9)
    first, *others = normal(1, (BLOCKS, N, B), dtype)
    blocks = [first, *(first + new * other for other in others)]
    basis, steps = grown(blocks)
    assert np.all(check(basis, blocks, steps))


@DTYPES
def test_columns_of_very_different_size(dtype):
    sizes = np.asarray([1, 1e-1, 1e-3, 1e-5], dtype)
    blocks = [sizes * x for x in normal(2, (BLOCKS, N, B), dtype)]
    basis, steps = grown(blocks)
    check(basis, blocks, steps)


@DTYPES
def test_rank_deficient_blocks(dtype):
    """Rank 2 in the first block; nothing new in the second; one direction in the third;
    zeros; and then a full one."""
    low, mixing = normal(3, (N, 2), dtype), normal(4, (2, B), dtype)
    one, full = normal(5, (N, 1), dtype), normal(6, (N, B), dtype)
    row = np.arange(1, B + 1).astype(dtype)
    first = low @ mixing
    blocks = [first, 2 * first[:, ::-1], first + one * row, 0 * first, full]
    basis, steps = grown(blocks)
    present = check(basis, blocks, steps)
    counts = present.reshape(BLOCKS, B).sum(axis=1).tolist()
    assert counts == [2, 0, 1, 0, B]
    assert np.all(basis[:, ~present] == 0)


@DTYPES
def test_more_columns_than_rows(dtype):
    """A basis of the whole space takes no more."""
    x = normal(7, (3, 6, B), dtype)
    basis, counts = np.zeros((6, 3 * B), dtype), []
    for i in range(3):
        before = basis
        basis, new = numpy(step(basis, x[i], np.int32(i), size(x)))
        counts.append(np.sum(norms(new.block) > 0.5))
        again = before @ new.coefficients + new.block @ new.coupling
        assert np.allclose(again, x[i], rtol=0, atol=100 * eps(dtype))
    assert counts == [B, 2, 0]
    assert np.allclose(basis @ basis.conj().T, np.eye(6), rtol=0, atol=20 * eps(dtype))


@DTYPES
def test_cutoff_is_relative_to_the_scale(dtype):
    """What is below `eps * scale` is rounding of something larger."""
    x, basis, zero = normal(8, (N, B), dtype), np.zeros((N, P), dtype), np.int32(0)
    real = np.finfo(dtype).dtype.type
    _, small = step(basis, x, zero, real(1e3 / eps(dtype)))
    assert np.all(small.block == 0)
    for factor in (real(2.0**-90), real(2.0**90)):
        _, large = step(basis, x * factor, zero, factor)
        assert np.sum(norms(large.block) > 0.5) == B


@DTYPES
def test_remove(dtype):
    """Only the blocks that are counted are removed; the others may be anything."""
    q, _ = np.linalg.qr(normal(9, (N, P), dtype))
    x = normal(10, (N, 3), dtype)
    remove = jax.jit(ft.partial(growth.remove, b=B))
    for count in (0, 1, 3, BLOCKS):
        used = count * B
        inside = q[:, :used].conj().T @ x
        basis = np.where(np.arange(P) < used, q, dtype(np.nan))
        rest, rows = numpy(remove(basis, x, np.int32(count)))
        tolerance = 20 * eps(dtype)
        assert rows.shape == (P, 3)
        assert np.all(rows[used:] == 0)
        assert np.allclose(rows[:used], inside, rtol=0, atol=tolerance)
        assert np.allclose(rest, x - q[:, :used] @ inside, rtol=0, atol=tolerance)


@DTYPES
def test_border(dtype):
    """A product of two buffers, block by block, whatever is beyond those in use."""
    left, right = normal(11, (2, N, P), dtype)
    border = jax.jit(ft.partial(growth.border, b=B))
    product = np.zeros((P, P), dtype)
    for i in range(BLOCKS):
        used = np.arange(P) < (i + 1) * B
        known_left, known_right = (np.where(used, x, dtype(0)) for x in (left, right))
        (product,) = border([product], [(known_left, known_right)], np.int32(i))
        expected = known_left.conj().T @ known_right
        assert np.allclose(product, expected, rtol=0, atol=100 * eps(dtype))


@jax.jit
def put_and_take(buffer, block, index):
    filled = growth.put(buffer, block, index)
    rows = growth.put_rows(buffer.T, block.T, index)
    return filled, growth.take(filled, index, B), rows


def test_take_and_put():
    buffer, block = np.zeros((N, P)), normal(12, (N, B), np.float64)
    for i in (0, 2, BLOCKS - 1):
        filled, taken, rows = numpy(put_and_take(buffer, block, np.int32(i)))
        assert np.array_equal(taken, block)
        assert np.array_equal(filled[:, i * B : (i + 1) * B], block)
        assert np.sum(filled != 0) == N * B
        assert np.array_equal(rows, filled.T)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_rescale_keeps_the_first_scale(dtype):
    rescale = jax.jit(growth.rescale)
    x, one = normal(13, (N, B), dtype) * dtype(2.0**100), np.float32(1)
    first, scale = numpy(rescale(x, one, np.int32(0)))
    assert np.max(np.abs(first)) == pytest.approx(1)
    second, again = numpy(rescale(8 * x, scale, np.int32(1)))
    assert again == scale
    assert np.max(np.abs(second)) == pytest.approx(8)
    zeros, scale = numpy(rescale(0 * x, one, np.int32(0)))
    assert scale == 1
    assert np.all(zeros == 0)


def test_batched():
    """Under `vmap`, with a different number of blocks each."""
    blocks = normal(14, (3, N, B), np.complex128)
    basis, _ = grown(list(normal(15, (3, N, B), np.complex128)))
    counts = np.arange(1, 4, dtype=np.int32)
    bases = np.where(np.arange(P) < counts[:, None, None] * B, basis, 0)
    args = bases, blocks, counts, np.ones(3)
    together = numpy(jax.jit(jax.vmap(step))(*args))
    for i in range(3):
        alone = numpy(step(*(x[i] for x in args)))
        pairs = zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True)
        for one, other in pairs:
            assert np.allclose(one[i], other, rtol=0, atol=1e-13)
