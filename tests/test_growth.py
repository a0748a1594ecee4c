"""A basis that grows a block at a time, in buffers of a fixed size."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from traceax._kernel import growth


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128])
N, B, BLOCKS = 30, 4, 5
P = B * BLOCKS


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


@jax.jit
def step(basis, x, count, scale):
    return growth.extend(basis, x, count, float(jnp.finfo(x.dtype).eps), scale)


@jax.jit
def step_and_put(basis, x, count):
    size = jnp.linalg.norm(x)
    new = growth.extend(basis, x, count, float(jnp.finfo(x.dtype).eps), size)
    return growth.put(basis, new.block, count), new


def grown(blocks):
    """The basis of several blocks, one after another, and what each step gave."""
    basis, steps = jnp.zeros((N, P), blocks[0].dtype), []
    for i, x in enumerate(blocks):
        basis, new = step_and_put(basis, x, jnp.asarray(i))
        steps.append(new)
    return basis, steps


def check(basis, blocks, steps):
    """Columns orthonormal or zero, and every block a combination of them."""
    tolerance = 20 * eps(basis.dtype)
    present = jnp.linalg.norm(basis, axis=0) > 0.5
    gram = basis.conj().T @ basis
    assert jnp.max(jnp.abs(gram - jnp.diag(present))) <= tolerance
    for i, (x, new) in enumerate(zip(blocks, steps, strict=True)):
        assert jnp.all(new.coefficients[i * B :] == 0)
        again = basis @ new.coefficients + new.block @ new.coupling
        assert jnp.max(jnp.abs(again - x)) <= tolerance * jnp.linalg.norm(x)
    return present


@DTYPES
def test_random_blocks(dtype):
    blocks = list(jr.normal(jr.key(0), (BLOCKS, N, B), dtype))
    basis, steps = grown(blocks)
    assert jnp.all(check(basis, blocks, steps))


@DTYPES
def test_blocks_that_nearly_repeat(dtype):
    """One pass of Gram-Schmidt would lose orthogonality: what is new in a block is 1e-4
    of it in float32, and 1e-9 in double precision."""
    new = 1e-4 if dtype == jnp.float32 else 1e-9
    first, *others = jr.normal(jr.key(1), (BLOCKS, N, B), dtype)
    blocks = [first, *(first + new * other for other in others)]
    basis, steps = grown(blocks)
    assert jnp.all(check(basis, blocks, steps))


@DTYPES
def test_columns_of_very_different_size(dtype):
    sizes = jnp.asarray([1, 1e-1, 1e-3, 1e-5], jnp.finfo(dtype).dtype)
    blocks = [sizes * x for x in jr.normal(jr.key(2), (BLOCKS, N, B), dtype)]
    basis, steps = grown(blocks)
    check(basis, blocks, steps)


@DTYPES
def test_rank_deficient_blocks(dtype):
    """Rank 2 in the first block; nothing new in the second, but for rounding; one
    direction in the third; zeros; and then a full one."""
    low, mixing = jr.normal(jr.key(3), (N, 2), dtype), jr.normal(jr.key(4), (2, B), dtype)
    one, full = jr.normal(jr.key(5), (N, 1), dtype), jr.normal(jr.key(6), (N, B), dtype)
    row = jnp.arange(1.0, B + 1).astype(dtype)
    first = low @ mixing
    blocks = [
        first,
        2 * first[:, ::-1],
        first + one * row,
        jnp.zeros((N, B), dtype),
        full,
    ]
    basis, steps = grown(blocks)
    present = check(basis, blocks, steps)
    counts = present.reshape(BLOCKS, B).sum(axis=1).tolist()
    assert [counts[0], *counts[3:]] == [2, 0, B]
    assert counts[2] >= 1
    assert jnp.all(basis[:, ~present] == 0)


@DTYPES
def test_more_columns_than_rows(dtype):
    """A basis of the whole space takes no more."""
    x = jr.normal(jr.key(7), (3, 6, B), dtype)
    basis, counts = jnp.zeros((6, 3 * B), dtype), []
    for i in range(3):
        new = step(basis, x[i], jnp.asarray(i), jnp.linalg.norm(x))
        basis = growth.put(basis, new.block, jnp.asarray(i))
        counts.append(int(jnp.sum(jnp.linalg.norm(new.block, axis=0) > 0.5)))
        again = basis @ new.coefficients + new.block @ new.coupling
        assert jnp.allclose(again, x[i], rtol=0, atol=100 * eps(dtype))
    assert counts == [B, 2, 0]
    assert jnp.allclose(basis @ basis.conj().T, jnp.eye(6), rtol=0, atol=20 * eps(dtype))


@DTYPES
def test_cutoff_is_relative_to_the_scale(dtype):
    """What is below `eps * scale` is rounding of something larger."""
    x = jr.normal(jr.key(8), (N, B), dtype)
    basis = jnp.zeros((N, P), dtype)
    real = jnp.finfo(dtype).dtype
    zero = jnp.asarray(0)
    small = step(basis, x, zero, jnp.asarray(1e3 / eps(dtype), real))
    assert jnp.all(small.block == 0)
    for scale in (2.0**-90, 2.0**90):
        factor = jnp.asarray(scale, real)
        large = step(basis, x * factor, zero, factor)
        assert jnp.sum(jnp.linalg.norm(large.block, axis=0) > 0.5) == B


@DTYPES
def test_remove(dtype):
    """Only the blocks that are counted are removed; the others may be anything."""
    q, _ = jnp.linalg.qr(jr.normal(jr.key(9), (N, P), dtype))
    x = jr.normal(jr.key(10), (N, 3), dtype)
    remove = jax.jit(growth.remove, static_argnums=3)
    for count in (0, 1, 3, BLOCKS):
        used = count * B
        rest, rows = remove(q.at[:, used:].set(jnp.nan), x, jnp.asarray(count), B)
        tolerance = 20 * eps(dtype)
        inside = q[:, :used].conj().T @ x
        assert rows.shape == (P, 3)
        assert jnp.all(rows[used:] == 0)
        assert jnp.allclose(rows[:used], inside, rtol=0, atol=tolerance)
        assert jnp.allclose(rest, x - q[:, :used] @ inside, rtol=0, atol=tolerance)


@DTYPES
def test_border(dtype):
    """A product of two buffers, block by block, whatever is beyond those in use."""
    left, right = jr.normal(jr.key(11), (2, N, P), dtype)
    border = jax.jit(growth.border, static_argnums=4)
    product = jnp.zeros((P, P), dtype)
    for i in range(BLOCKS):
        used = jnp.arange(P) < (i + 1) * B
        known_left, known_right = (jnp.where(used, x, 0) for x in (left, right))
        product = border(product, known_left, known_right, jnp.asarray(i), B)
        expected = known_left.conj().T @ known_right
        assert jnp.allclose(product, expected, rtol=0, atol=100 * eps(dtype))


def test_take_and_put():
    buffer = jnp.zeros((N, P))
    block = jr.normal(jr.key(12), (N, B))
    for i in (0, 2, BLOCKS - 1):
        index = jnp.asarray(i)
        filled = growth.put(buffer, block, index)
        assert jnp.array_equal(growth.take(filled, index, B), block)
        assert jnp.sum(filled != 0) == N * B
        assert jnp.array_equal(growth.put_rows(buffer.T, block.T, index), filled.T)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_rescale_keeps_the_first_scale(dtype):
    x = jr.normal(jr.key(13), (N, B), dtype) * 2.0**100
    one = jnp.ones((), jnp.float32)
    first, scale = growth.rescale(x, one, jnp.asarray(0))
    assert jnp.max(jnp.abs(first)) == pytest.approx(1)
    second, again = growth.rescale(8 * x, scale, jnp.asarray(1))
    assert again == scale
    assert jnp.max(jnp.abs(second)) == pytest.approx(8)
    zeros, scale = growth.rescale(0 * x, one, jnp.asarray(0))
    assert scale == 1
    assert jnp.all(zeros == 0)


def test_batched():
    """Under `vmap`, with a different number of blocks each."""
    blocks = jr.normal(jr.key(14), (3, N, B))
    basis, _ = grown(list(jr.normal(jr.key(15), (3, N, B))))
    counts = jnp.arange(1, 4)
    bases = jnp.where(jnp.arange(P) < counts[:, None, None] * B, basis, 0)
    scale = jnp.ones(3)
    together = jax.vmap(step)(bases, blocks, counts, scale)
    for i in range(3):
        alone = step(bases[i], blocks[i], counts[i], scale[i])
        assert jnp.allclose(together.block[i], alone.block, rtol=0, atol=1e-13)
        assert jnp.allclose(together.coupling[i], alone.coupling, rtol=0, atol=1e-13)
