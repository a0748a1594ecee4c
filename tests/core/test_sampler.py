import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx
from traceax._core import threefry as _threefry


REAL = [tx.RademacherSampler, tx.NormalSampler, tx.SphereSampler]
ALL = [*REAL, tx.SteinhausSampler]
CASES = [
    *((sampler, jnp.float32) for sampler in REAL),
    *((sampler, jnp.complex64) for sampler in ALL),
]
OTHER_DTYPES = [
    (tx.RademacherSampler, jnp.float64),
    (tx.NormalSampler, jnp.bfloat16),
    (tx.SphereSampler, jnp.bfloat16),
    (tx.SphereSampler, jnp.complex128),
    (tx.SteinhausSampler, jnp.complex128),
]


def over(cases):
    ids = [f"{sampler.__name__}-{jnp.dtype(dtype).name}" for sampler, dtype in cases]
    return pytest.mark.parametrize(("sampler", "dtype"), cases, ids=ids)


def wide(x):
    """As double precision, so that the checks add no rounding of their own."""
    return np.asarray(x).astype(complex if np.iscomplexobj(x) else float)


@eqx.filter_jit
def draw(sampler, key, n, k):
    return sampler(key, n, k)


@ft.cache
def many(sampler, dtype, n=5):
    """20,000 columns, each drawn from a key of its own."""
    return wide(draw(sampler(dtype), jr.key(2024), n, 20_000))


@over(CASES)
def test_second_moment_is_the_identity(sampler, dtype):
    """z-test of every entry of E[w w*] (real and imaginary part) and of E[w]: about 60
    numbers, at 5.5 standard errors: one false alarm in 400,000 seeds."""
    probes = many(sampler, dtype)
    n, count = probes.shape
    products = probes[:, None, :] * probes[None, :, :].conj()
    tests = np.concatenate(
        [(products - np.eye(n)[:, :, None]).reshape(n * n, -1), probes]
    )
    for part in (tests.real, tests.imag):
        error = np.abs(part.mean(axis=1))
        std_err = part.std(axis=1) / count**0.5
        assert np.all(error < 5.5 * std_err + 1e-6)


@pytest.mark.parametrize(
    ("sampler", "dtype", "fourth"),
    [
        (tx.RademacherSampler, jnp.float32, 1.0),
        (tx.NormalSampler, jnp.float32, 3.0),
        (tx.NormalSampler, jnp.complex64, 2.0),
        (tx.SphereSampler, jnp.float32, 3 * 5 / 7),
        (tx.SphereSampler, jnp.complex64, 2 * 5 / 6),
        (tx.SteinhausSampler, jnp.complex64, 1.0),
    ],
)
def test_fourth_moment_tells_the_distributions_apart(sampler, dtype, fourth):
    """E|w_i|^4 for n = 5, z-test of 5 numbers at 5.5 standard errors (complex ones must
    have independent real and imaginary parts): one false alarm in 5 million seeds."""
    values = np.abs(many(sampler, dtype)) ** 4
    std_err = values.std(axis=1) / values.shape[1] ** 0.5
    assert np.all(np.abs(values.mean(axis=1) - fourth) < 5.5 * std_err + 1e-5)


@pytest.mark.parametrize("sampler", [tx.NormalSampler, tx.SphereSampler])
def test_complex_probes_are_circular(sampler):
    """E[w w^T] = 0 for a unitarily invariant distribution. 50 numbers at 5.5 standard
    errors: one false alarm in 500,000 seeds."""
    probes = many(sampler, jnp.complex64)
    products = (probes[:, None, :] * probes[None, :, :]).reshape(25, -1)
    for part in (products.real, products.imag):
        std_err = part.std(axis=1) / part.shape[1] ** 0.5
        assert np.all(np.abs(part.mean(axis=1)) < 5.5 * std_err)


@over(CASES + OTHER_DTYPES)
def test_values(sampler, dtype):
    check_values(sampler, dtype, 70, 3)


@over(
    [
        (tx.RademacherSampler, jnp.float32),
        (tx.SphereSampler, jnp.float32),
        (tx.SphereSampler, jnp.complex64),
        (tx.SteinhausSampler, jnp.complex64),
    ]
)
def test_values_of_one_number(sampler, dtype):
    check_values(sampler, dtype, 1, 1)


def check_values(sampler, dtype, n, k):
    probes = draw(sampler(dtype), jr.key(0), n, k)
    assert probes.shape == (n, k)
    assert probes.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    values = wide(probes)
    assert np.all(np.isfinite(values))
    if sampler is tx.RademacherSampler:
        assert np.all(np.abs(values.real) == 1)
        assert np.all(values.imag == 0)
    if sampler is tx.SteinhausSampler:
        assert np.all(np.abs(np.abs(values) - 1) <= 2 * eps)
    if sampler is tx.SphereSampler:
        norms = np.linalg.norm(values, axis=0)
        assert np.all(np.abs(norms / n**0.5 - 1) <= 4 * eps)


def test_integer_signs_are_those_of_floats():
    probes = draw(tx.RademacherSampler(jnp.int32), jr.key(0), 70, 3)
    floats = draw(tx.RademacherSampler(jnp.float32), jr.key(0), 70, 3)
    assert probes.dtype == jnp.int32
    assert np.array_equal(probes, floats)


def test_signs_are_fair_and_uncorrelated():
    """100 positions (three words and a bit of a fourth), 20,000 columns: the mean of
    each position and the correlation of each pair, 5050 numbers, at 6 standard errors:
    one false alarm in 100,000 seeds."""
    signs = many(tx.RademacherSampler, jnp.float32, n=100)
    count = signs.shape[1]
    limit = 6 / count**0.5
    assert np.all(np.abs(signs.mean(axis=1)) < limit)
    correlation = signs @ signs.T / count
    assert np.all(np.abs(correlation - np.eye(100)) < limit)


def test_signs_of_different_columns_are_uncorrelated():
    """The columns of one key, 50 of length 20,000: 1225 pairs at 6 standard errors: one
    false alarm in 400,000 seeds."""
    signs = wide(draw(tx.RademacherSampler(jnp.float32), jr.key(7), 20_000, 50))
    correlation = signs.T @ signs / 20_000
    assert np.all(np.abs(correlation - np.eye(50)) < 6 / 20_000**0.5)


def drawn_at_once(sampler, key, n, dtype):
    """What `sample` draws by halves, from the numbers that it begins with."""
    if sampler is tx.RademacherSampler:
        words = np.asarray(jr.bits(key, (-(-n // 512) * 16,), jnp.uint32))
        return 1 - 2.0 * ((words >> np.arange(32)[:, None]) & 1).reshape(-1)[:n]
    if sampler is tx.NormalSampler:
        return wide(jr.normal(key, (n,), dtype))
    return np.exp(2j * np.pi * wide(jr.uniform(key, (n,), jnp.finfo(dtype).dtype)))


@pytest.mark.slow(but="70-*")
@over(
    [
        (tx.RademacherSampler, jnp.float32),
        (tx.NormalSampler, jnp.complex64),
        (tx.SteinhausSampler, jnp.complex64),
    ]
)
@pytest.mark.parametrize("n", [70, 2**19 + 33])
def test_long_vectors_are_drawn_by_halves(sampler, dtype, n):
    drawn = wide(draw_one(sampler(dtype), jr.key(5), n, dtype))
    assert drawn.shape == (n,)
    assert np.max(np.abs(drawn - drawn_at_once(sampler, jr.key(5), n, dtype))) < 2e-6


@eqx.filter_jit
def draw_one(sampler, key, n, dtype):
    return sampler.sample(key, n, dtype)


@pytest.mark.slow(but="typed")
@pytest.mark.parametrize(
    ("key", "partitionable"),
    [
        (jr.key(11), True),
        (jr.key(11), False),
        (jr.PRNGKey(11), True),
        (jr.key(11, impl="rbg"), True),
    ],
    ids=["typed", "not partitionable", "raw", "other generator"],
)
def test_random_numbers_are_those_of_jax(key, partitionable):
    def drawn(key, keys):
        for width in (8, 16, 32, 64):
            yield jr.bits(key, (3, 5), f"uint{width}")
        for dtype in (jnp.bfloat16, jnp.float32, jnp.complex128):
            yield jr.normal(key, (33,), dtype)
        yield jr.uniform(key, ())
        yield jr.key_data(jr.split(key, (2, 3)))
        yield jr.key_data(keys)

    indices = jnp.asarray([0, 1, 2**32 - 1], jnp.uint32)

    @jax.jit
    def ours(key):
        keys = jax.vmap(lambda i: _threefry.fold_in(key, i))(indices)
        assert keys.dtype == key.dtype
        return list(drawn(_threefry.fast_key(key), keys))

    @jax.jit
    def theirs(key):
        return list(drawn(key, jax.vmap(lambda i: jr.fold_in(key, i))(indices)))

    with jax.threefry_partitionable(partitionable):
        assert all(map(np.array_equal, ours(key), theirs(key)))


@pytest.mark.parametrize("sampler", [tx.RademacherSampler, tx.NormalSampler])
def test_random_words_are_computed_in_one_place(sampler):
    """Not once for each sign, nor for each place that reads a probe."""

    def read_thrice(key):
        probes = sampler(jnp.float32)(key, 1600, 8)
        return probes @ probes.T, jnp.sum(probes, axis=0), jnp.roll(probes, 1) - probes

    text = jax.jit(read_thrice).lower(jr.key(0)).compile().as_text()
    computations = text.split("\n\n")
    rounds = [part.count(" shift-left(") for part in computations]
    assert sorted(rounds)[-2:] == [0, 40]
    assert " while(" not in text


@over(CASES)
def test_column_depends_on_key_and_index_alone(sampler, dtype):
    sampler = sampler(dtype)
    draws = wide(draw(sampler, jr.key(3), 70, 3))
    alone = wide(draw_one(sampler, jr.fold_in(jr.key(3), 2), 70, dtype))
    assert np.allclose(alone, draws[:, 2], rtol=0, atol=1e-5)
    for other in (draws[:, 1], wide(draw(sampler, jr.key(4), 70, 3))[:, 2]):
        assert not np.allclose(alone, other, atol=1e-3)


@over([CASES[0], CASES[-1]])
def test_raw_keys_jit_and_vmap(sampler, dtype):
    sampler = sampler(dtype)
    eager = wide(sampler(jr.PRNGKey(5), 37, 4))
    keys = jnp.stack([jr.key(5), jr.key(6)])
    batch = wide(jax.jit(jax.vmap(lambda key: sampler(key, 37, 4)))(keys))
    assert np.allclose(batch[0], eager, rtol=0, atol=1e-5)
    assert np.allclose(batch[1], wide(sampler(keys[1], 37, 4)), rtol=0, atol=1e-5)
    assert not np.allclose(batch[1], eager)


@pytest.mark.parametrize("sampler", REAL)
def test_unset_dtype_is_the_default_float_at_the_time_of_the_call(sampler):
    sampler = sampler()  # made under x64
    assert draw(sampler, jr.key(0), 5, 2).dtype == jnp.float64
    with jax.enable_x64(False):
        assert draw(sampler, jr.key(0), 5, 2).dtype == jnp.float32
    assert draw(sampler, jr.key(0), 5, 2).dtype == jnp.float64


def test_wide_dtype_is_narrowed_without_x64():
    with jax.enable_x64(False):
        assert draw(tx.NormalSampler(jnp.float64), jr.key(0), 5, 2).dtype == jnp.float32
        assert draw(tx.SphereSampler(complex), jr.key(0), 5, 2).dtype == jnp.complex64


@pytest.mark.parametrize(
    ("sampler", "dtype", "wanted"),
    [
        (tx.NormalSampler, jnp.int32, "floating or complex"),
        (tx.SphereSampler, jnp.int32, "floating or complex"),
        (tx.RademacherSampler, jnp.bool_, "signed numeric"),
        (tx.RademacherSampler, jnp.uint8, "signed numeric"),
        (tx.RademacherSampler, jnp.uint32, "signed numeric"),
        (tx.SteinhausSampler, jnp.float32, "complex"),
    ],
)
def test_bad_dtype(sampler, dtype, wanted):
    with pytest.raises(ValueError, match="Leave it unset") as error:
        sampler(dtype)
    message = str(error.value)
    for part in (sampler.__name__, wanted, "`dtype`", jnp.dtype(dtype).name):
        assert part in message


def test_phases_need_a_complex_dtype():
    with pytest.raises(ValueError, match="Use `RademacherSampler`"):
        tx.SteinhausSampler()(jr.key(0), 5, 2)


def test_sphere_in_float16():
    """Where the squares of all entries add up to more than float16 holds."""
    probe = draw(tx.SphereSampler(jnp.float16), jr.key(0), 70_000, 1)[:, 0]
    assert np.allclose(np.mean(wide(probe) ** 2), 1, rtol=1e-2)
