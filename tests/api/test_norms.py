"""Frobenius norm, norms of rows and Schatten norms: unbiased for their powers, within
their error bars, and flagged or exact where floating-point numbers end."""

import functools as ft
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD, z_score


KEY = jr.key(5)
N = 24
NUM_KEYS = 400
FULL = {"num_steps": N}  # without quadrature error


def frobenius(estimator):
    def norm(operator, **settings):
        return tx.frobenius_norm(operator, estimator, throw=False, **settings)

    return norm


def rows(estimator):
    def norm(operator, **settings):
        return tx.row_norms(operator, estimator, throw=False, **settings)

    return norm


def schatten(p):
    def norm(operator, **settings):
        return tx.schatten_norm(operator, p, throw=False, **FULL | settings)

    return norm


ROWS = ft.partial(np.linalg.norm, axis=1)
# Of each: the call, the power of it that is unbiased, and what NumPy says.
NORMS = {
    "frobenius": (frobenius(tx.HutchinsonEstimator()), 2, np.linalg.norm),
    "rows": (rows(tx.HutchinsonEstimator()), 2, ROWS),
    "frobenius, XNysTrace": (frobenius(tx.XNysTraceEstimator()), 2, np.linalg.norm),
    "rows, XNysDiag": (rows(tx.XNysDiagEstimator()), 2, ROWS),
    "nuclear": (schatten(1), 1, lambda a: np.linalg.norm(a, "nuc")),
    "p=0.5": (schatten(0.5), 0.5, lambda a: schatten_of(a, 0.5)),
    "p=2": (schatten(2), 2, np.linalg.norm),
    "p=3": (schatten(3), 3, lambda a: schatten_of(a, 3)),
}
SOME = ["frobenius", "rows", "nuclear"]
GRAM = ["frobenius, XNysTrace", "rows, XNysDiag"]
some = pytest.mark.parametrize("name", SOME)
some_and_gram = pytest.mark.parametrize("name", SOME + GRAM)


def schatten_of(matrix, p):
    return np.sum(np.linalg.svd(matrix, compute_uv=False) ** p) ** (1 / p)


def general(seed=0, shape=(N, N), dtype=np.float64):
    generator = np.random.default_rng(seed)
    matrix = generator.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * generator.standard_normal(shape)
    return matrix.astype(dtype)


@eqx.filter_jit
def solve(name, matrix, key=KEY, **settings):
    return NORMS[name][0](lx.MatrixLinearOperator(matrix), key=key, **settings)


signs = ft.partial(eqx.filter_jit(tx.RademacherSampler()), KEY)  # the probes


@eqx.filter_jit
def value_and_grad(name, matrix, **settings):
    """The solution, and the gradient of the sum over its entries."""

    def value(matrix):
        solution = solve(name, matrix, **settings)
        return jnp.sum(solution.value), solution

    (_, solution), gradient = jax.value_and_grad(value, has_aux=True)(matrix)
    return solution, gradient


@eqx.filter_jit
def along_keys(name, matrix, direction):
    """For many keys and 8 probes: value, standard error, and the derivative along a
    direction of the power that is unbiased."""
    norm, power, _ = NORMS[name]

    def one(key):
        def value(matrix):
            solution = norm(lx.MatrixLinearOperator(matrix), k=8, key=key)
            return solution.value, solution.std_err

        value, slope, std_err = jax.jvp(value, (matrix,), (direction,), has_aux=True)
        return value, std_err, power * value ** (power - 1) * slope

    return jax.lax.map(one, jr.split(jr.key(20261121), NUM_KEYS))


@ft.cache
def seen(name, dtype):
    shape = (N + 8, N) if name in ("nuclear", "p=3") else (N, N)
    matrix, direction = general(1, shape, dtype), general(2, shape, dtype)
    found = along_keys(name, matrix, direction)
    return matrix, direction, *map(np.asarray, found)


REAL_AND_COMPLEX = [
    *((name, np.float64) for name in NORMS if name != "p=2"),
    *((name, np.complex128) for name in [*SOME, "frobenius, XNysTrace"]),
]
on_many_keys = pytest.mark.parametrize(("name", "dtype"), REAL_AND_COMPLEX)


@pytest.mark.slow(but="frobenius-complex128")
@on_many_keys
def test_powers_are_unbiased(name, dtype):
    """False alarms: 5e-7 for each of 80 numbers."""
    matrix, _, values, *_ = seen(name, dtype)
    _, power, reference = NORMS[name]
    samples = values.reshape(NUM_KEYS, -1) ** power
    exact = np.atleast_1d(reference(matrix)) ** power
    worst = max(z_score(x, y) for x, y in zip(samples.T, exact, strict=True))
    assert worst < 5.1


@pytest.mark.slow
@on_many_keys
def test_derivatives_of_powers_are_unbiased(name, dtype):
    """Those of the sum over all entries. False alarms: 5e-7 for each."""
    matrix, direction, _, _, slopes = seen(name, dtype)
    _, power, _ = NORMS[name]
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    gradient = power * (u * s ** (power - 1)) @ vh
    exact = np.vdot(gradient, direction).real
    assert z_score(slopes.reshape(NUM_KEYS, -1).sum(axis=1), exact) < 5.1


@pytest.mark.slow
@on_many_keys
def test_intervals_cover(name, dtype):
    """At least 95%, by Student's t with 7 degrees of freedom. Below 90% is 4.6 standard
    deviations less: false alarms 2e-5 for each."""
    matrix, _, values, std_errs, _ = seen(name, dtype)
    covered = np.abs(values - NORMS[name][2](matrix)) < 2.365 * std_errs
    assert np.mean(covered) > 0.90
    assert np.all(std_errs > 0)


@eqx.filter_jit
def interval_of_projection(p, rank, confidence):
    """For many keys and 10 probes: the norm of a matrix with singular values of one,
    `rank` of them, and its interval."""
    vectors, _ = np.linalg.qr(general(23, (60, rank)))
    operator = lx.MatrixLinearOperator(jnp.asarray(vectors @ vectors.T))

    def one(key):
        solution = schatten(p)(operator, k=10, num_steps=2, key=key)
        return solution.value, *solution.interval(confidence)

    return jax.lax.map(one, jr.split(jr.key(20261121), NUM_KEYS), batch_size=100)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.68, 0.95])
@pytest.mark.parametrize(("p", "rank"), [(0.25, 1), (0.25, 2), (0.25, 4), (0.5, 1)])
def test_intervals_of_low_rank_cover(p, rank, confidence):
    """For p below 1 as well as for p=1, where the samples are the same. By the derivative
    of the root at their mean 0.82, 0.89, 0.93 and 0.89 were covered for 0.95, and lower
    ends were at -4 times the norm."""
    norm = rank ** (1 / p)
    value, low, high = interval_of_projection(p, rank, confidence)
    _, *ends = interval_of_projection(1, rank, confidence)
    covered = np.mean((low <= norm) & (norm <= high))
    assert covered > np.mean((ends[0] <= rank) & (rank <= ends[1])) - 0.005
    # With t of Student for 9 degrees of freedom, less one.
    assert np.all(low >= -{0.68: 0.06, 0.95: 1.27}[confidence] * value)


@eqx.filter_jit
def exactly(names, matrix):
    """Each of the norms by n products, in one program."""
    return [solve(name, matrix, key=None, k=N) for name in names]


@pytest.mark.slow(but="names0-complex128")
@pytest.mark.parametrize(
    ("names", "dtype"), [([*NORMS], np.complex128), (SOME, np.float32)]
)
def test_exact(names, dtype):
    matrix = general(3, dtype=dtype)
    rtol = 2e-6 if dtype == np.float32 else 1e-13
    wide = matrix.astype(np.promote_types(dtype, np.float64))
    for name, solution in zip(names, exactly(names, matrix), strict=True):
        assert np.allclose(solution.value, NORMS[name][2](wide), rtol=rtol), name
        assert solution.value.dtype == np.finfo(dtype).dtype
        assert np.all(solution.std_err == 0)
        assert solution.stats["num_matvecs"] == N
        assert solution.result == tx.RESULTS.successful


@pytest.mark.slow
def test_one_step_is_the_frobenius_norm():
    """With the same probes."""
    matrix = general(4)
    found = solve("p=2", matrix, k=6, num_steps=1)
    expected = solve("frobenius", matrix, k=6)
    assert np.allclose(found.value, expected.value, rtol=1e-14)
    assert np.allclose(found.std_err, expected.std_err, rtol=1e-13)


@pytest.mark.slow(but="shape1")
@pytest.mark.parametrize("shape", [(N, 9), (9, N)])
def test_rectangular(shape):
    """Probes and products with unit vectors are on the smaller side."""
    matrix = general(5, shape)
    exact = solve("nuclear", matrix, key=None, k=9)
    assert np.allclose(exact.value, np.linalg.norm(matrix, "nuc"), rtol=1e-13)
    assert exact.stats["num_matvecs"] == 9
    found = solve("nuclear", matrix, k=4, num_steps=9)
    probes = np.asarray(signs(9, 4))
    tall = matrix if shape[0] > 9 else matrix.T
    _, s, vh = np.linalg.svd(tall, full_matrices=False)
    assert np.allclose(found.stats["samples"], s @ (vh @ probes) ** 2, rtol=1e-12)
    assert found.stats["num_matvecs"] == 2 * 4 * 9


@pytest.mark.slow(but=("frobenius-shape1", "rows-shape0"))
@pytest.mark.parametrize("shape", [(N, 9), (9, N)])
@pytest.mark.parametrize("name", ["frobenius", "rows", *GRAM])
def test_norms_of_rectangular_operators(name, shape):
    """Exact from products on the smaller side, with the derivative; estimates are
    unbiased for the squares, and intervals cover."""
    matrix, (_, power, numpy_norm) = general(5, shape), NORMS[name]
    true = numpy_norm(matrix)
    exact = solve(name, matrix, key=None, k=9)
    assert np.allclose(exact.value, true, rtol=1e-13)
    assert exact.stats["num_matvecs"] == 9
    assert np.all(exact.std_err == 0)
    assert solve(name, matrix, k=8).stats["num_matvecs"] == 8

    @jax.jit
    def over_keys(matrix, keys):
        def one(key):
            found = solve(name, matrix, key=key, k=8)
            return found.value, found.interval()

        return jax.lax.map(one, keys)

    values, (low, high) = over_keys(matrix, jr.split(KEY, NUM_KEYS))
    assert values.shape == (NUM_KEYS, *np.shape(true))
    scores = [
        z_score(samples, exact)
        for samples, exact in zip(
            np.atleast_2d((values**power).T), np.atleast_1d(true**power), strict=True
        )
    ]
    # Of 48 scores one is above 5 with a probability of 3e-5.
    assert max(scores) < 5
    assert np.mean((low <= true) & (true <= high)) > 0.93


def test_rectangular_derivatives_and_trees():
    """Of the exact norms of a wide operator, by its adjoint, and of images that are a
    PyTree."""
    matrix = general(5, (9, N))
    norm = lambda matrix: solve("frobenius", matrix, key=None, k=9).value  # noqa: E731
    slope = jax.grad(norm)(matrix)
    assert np.allclose(slope, matrix / np.linalg.norm(matrix), rtol=1e-12)

    def mv(v):
        image = matrix @ v
        return {"a": image[:6].reshape(2, 3), "b": image[6:]}

    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    operator = lx.FunctionLinearOperator(mv, structure)
    for k in (8, 9):
        found, flat = tx.row_norms(operator, k=k, key=KEY), solve("rows", matrix, k=k)
        assert found.value["a"].shape == (2, 3)
        both = jax.tree.leaves(found.value), [flat.value[:6], flat.value[6:]]
        for leaf, expected in zip(*both, strict=True):
            assert np.allclose(leaf.ravel(), expected, rtol=1e-12)


@pytest.mark.slow
def test_rows_of_one_entry_are_exact():
    """Of a stack of diagonal operators, whose samples are all equal."""
    diagonals = np.concatenate([np.diag(np.arange(1.0, N + 1)), np.diag(np.ones(N))])
    for name in ("rows", "frobenius"):
        found = solve(name, diagonals, k=4)
        assert np.allclose(found.value, NORMS[name][2](diagonals), rtol=1e-13)
        assert np.all(found.std_err < 1e-12 * found.value)
    mixed = diagonals + np.eye(2 * N, N, k=1)
    assert np.all(solve("frobenius", mixed, k=4).std_err > 0)


@pytest.mark.slow
def test_adaptive_rectangular():
    """Of a wide operator the m rows are kept back for the exact answer."""
    matrix = general(5, (9, N))
    rule = tx.Adaptive(rtol=1e-6, max_k=100, round_size=4)
    found = solve("frobenius", matrix, k=rule)
    assert np.isclose(found.value, np.linalg.norm(matrix), rtol=1e-12)
    assert found.stats["exact"]
    assert found.stats["num_matvecs"] <= 2 * 9


@pytest.mark.slow
def test_brackets_hold_for_each_probe():
    """At a depth where the quadrature error is large, for p below 4."""
    matrix = general(6, (30, N))
    probes = np.asarray(signs(N, 8))
    _, s, vh = np.linalg.svd(matrix, full_matrices=False)
    for name in ("p=0.5", "p=3"):
        low, high = solve(name, matrix, k=8, num_steps=4).stats["sample_brackets"].T
        exact = (s ** NORMS[name][1]) @ (vh @ probes) ** 2
        assert np.all((low <= exact) & (exact <= high))
        assert np.all(high - low > 1e-4 * high)


@pytest.mark.slow(but="frobenius-8")
@pytest.mark.parametrize(
    ("name", "k"),
    [*((name, 8) for name in [*SOME, *GRAM, "p=0.5"]), ("rows", N), ("nuclear", N)],
)
def test_zero_operator(name, k):
    solution, gradient = value_and_grad(name, np.zeros((N, N)), k=k)
    assert np.all(solution.value == 0)
    assert np.all(gradient == 0)
    assert np.all(solution.std_err == 0)
    assert solution.result == tx.RESULTS.successful


@pytest.mark.slow
def test_derivatives_of_singular_operators():
    """That of the nuclear norm is the subgradient of least norm, up to rounding errors of
    zeros; those of quasi-norms do not exist."""
    generator = np.random.default_rng(7)
    left, _ = np.linalg.qr(generator.standard_normal((N, 3)))
    right, _ = np.linalg.qr(generator.standard_normal((N, 3)))
    matrix = np.where(np.arange(N) < 3, 1.0, 0.0) * np.diag(np.arange(1.0, N + 1))
    solution, gradient = value_and_grad("nuclear", matrix, k=N)
    assert np.allclose(solution.value, 6)
    assert np.allclose(gradient, np.diag(np.arange(N) < 3), atol=1e-13)
    low_rank = (left * [3.0, 2.0, 1.0]) @ right.T
    solution, gradient = value_and_grad("p=3", low_rank, k=N)
    expected = (left * [9.0, 4.0, 1.0]) @ right.T / solution.value**2
    assert np.allclose(gradient, expected, atol=1e-13)
    solution, gradient = value_and_grad("p=0.5", low_rank, k=N)
    assert np.allclose(solution.value, np.sum(np.sqrt([3, 2, 1])) ** 2, rtol=1e-6)
    assert np.all(np.isnan(gradient))


@pytest.mark.slow
def test_second_derivatives():
    """Those of the Frobenius norm and of rows see entries that are zero; those of
    Schatten norms are refused."""
    direction, low_rank = general(8), general(8, (N, 3)) @ general(7, (3, N))

    @eqx.filter_jit
    def curvature(name, matrix, k):
        square = lambda t: jnp.sum(solve(name, t * matrix, k=k).value ** 2)  # noqa: E731
        return jax.grad(jax.grad(square))(1.0)

    exact = [(name, direction, N) for name in ("frobenius", "rows")]
    for name, matrix, k in [*exact, (GRAM[0], low_rank, 16)]:
        assert np.allclose(curvature(name, matrix, k), 2 * np.sum(matrix**2))
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        curvature("nuclear", direction, N)


def tree_operator(matrix):
    """From `{"a": (3,), "b": (2, 2)}` to a pair of shapes (4, 2) and (1,)."""
    inside = {"a": jax.ShapeDtypeStruct((3,), float)}
    inside["b"] = jax.ShapeDtypeStruct((2, 2), float)

    def mv(tree):
        out = matrix @ jnp.append(tree["a"], tree["b"].reshape(-1))
        return out[:8].reshape(4, 2), out[8:]

    return lx.FunctionLinearOperator(mv, inside)


@pytest.mark.slow(but="7")
@pytest.mark.parametrize("k", [3, 7])
def test_trees(k):
    """Transposed too, where probes are on the same side."""
    matrix = jnp.asarray(general(9, (9, 7)))
    tree, settings = tree_operator(matrix), {"k": k, "num_steps": 5, "key": KEY}
    expected = tx.schatten_norm(lx.MatrixLinearOperator(matrix), 1, **settings)
    for operator in (tree, tree.T) if k < 7 else (tree,):
        found = tx.schatten_norm(operator, 1, **settings)
        assert np.allclose(found.value, expected.value, rtol=1e-13)
        assert np.allclose(found.std_err, expected.std_err, rtol=1e-12)


def test_rows_have_the_structure_of_the_operator():
    entries = {"a": np.array([[1.0, -2.0]]), "b": np.array([3.0])}
    operator = lx.DiagonalLinearOperator(jax.tree.map(jnp.asarray, entries))
    solution = tx.row_norms(operator, k=2, key=KEY)
    for name, leaf in entries.items():
        assert np.allclose(solution.value[name], np.abs(leaf))
        assert solution.std_err[name].shape == leaf.shape


@pytest.mark.slow
@some
def test_bfloat16(name):
    """Products are made in it, and the rest in float32. False alarms: 6e-4."""
    matrix = jnp.asarray(general(10), jnp.bfloat16)
    solution = solve(name, matrix, k=16)
    exact = NORMS[name][2](np.asarray(matrix, np.float64))
    assert solution.value.dtype == solution.std_err.dtype == jnp.float32
    assert np.all(np.abs(solution.value - exact) < 6 * solution.std_err)


DECAYING = {
    "to 1e-9": np.geomspace(1, 1e-9, 60),
    "0.7^i": 0.7 ** np.arange(60),
    "i^-1.5": np.arange(1.0, 61) ** -1.5,
    "noise 1e-4": np.append(0.5 ** np.arange(8), np.linspace(1e-4, 2e-4, 52)),
    "noise 1e-7": np.append(0.5 ** np.arange(8), np.linspace(1e-7, 2e-7, 52)),
    "low rank": np.append(np.ones(30), np.zeros(30)),
    "small": np.append(np.ones(4), np.full(56, 1e-6)),
}
ROTATIONS = [np.linalg.qr(general(i, (60, 60)))[0] for i in (11, 12)]
NAMES = [name for name in DECAYING for _ in range(6)]


@eqx.filter_jit
def bounds_of(p, matrices, keys):
    """For each matrix and key: the value, ends of the interval without the sampling
    error, whether it is reported to be right, and the probes."""

    def one(pair):
        matrix, key = pair
        settings = {"k": 8, "num_steps": 14, "key": key, "throw": False}
        solution = tx.schatten_norm(lx.MatrixLinearOperator(matrix), p, **settings)
        right = solution.result == tx.RESULTS.successful
        probes = tx.RademacherSampler()(key, len(matrix), 8)
        return solution.value, solution.stats["bounds"][:, 0], right, probes

    return jax.lax.map(one, (matrices, keys))


@ft.cache
def in_both_precisions(p):
    """The matrices, diagonal or rotated, and `bounds_of` in float32 and in float64."""
    pairs = [(np.diag(s), (ROTATIONS[0] * s) @ ROTATIONS[1].T) for s in DECAYING.values()]
    matrices = np.repeat(np.concatenate(pairs), 3, axis=0).astype(np.float32)
    keys = jr.split(jr.key(1), len(matrices))
    wide = matrices.astype(np.float64)
    found = [[*map(np.asarray, bounds_of(p, x, keys))] for x in (matrices, wide)]
    return wide, *found


@pytest.mark.slow
def test_ill_conditioned_in_float32():
    """Singular values down to 1e-6, as accurate as the products: of the Gram matrix those
    below 3e-4 are noise, and the sum of roots is off by percents."""
    _, (found, *_), (expected, *_) = in_both_precisions(0.5)
    assert np.allclose(found[-6:], expected[-6:], rtol=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.5, 1])
def test_bounds_of_small_singular_values_in_float32(p):
    """For the same probes, to the rounding floor: they hold. Where no singular value is
    near the machine epsilon they are no wider than in float64, but for rounding, which at
    either end is at most twice the floor where nothing is flagged and no error larger."""
    wide, (_, bounds, right, probes), (_, expected, *_) = in_both_precisions(p)
    for i, name in enumerate(NAMES[:-6]):  # "small" may be flagged
        assert right[i]
        _, s, vh = np.linalg.svd(wide[i])
        exact = np.mean(s**p @ (vh @ probes[i]) ** 2) ** (1 / p)
        floor = (2 + 60**0.5) * np.finfo(np.float32).eps / p * exact
        assert bounds[i, 0] - floor <= exact <= bounds[i, 1] + floor
        if name not in ("noise 1e-7", "low rank"):
            assert np.ptp(bounds[i]) <= 1.01 * np.ptp(expected[i]) + 4 * floor


@pytest.mark.slow
@some_and_gram
@pytest.mark.parametrize("scale", [1e-12, 1e15])
def test_scales(name, scale):
    """In float32."""
    matrix = general(13, dtype=np.float32)
    found = solve(name, np.float32(scale) * matrix, k=16)
    expected = solve(name, matrix, k=16)
    assert np.allclose(found.value, scale * expected.value, rtol=1e-5)
    assert np.allclose(found.std_err, scale * expected.std_err, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frobenius", "rows", *GRAM, "p=2"])
@pytest.mark.parametrize("k", [16, N])
@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e20])
def test_squares_beyond_the_range_are_flagged(name, k, scale):
    """Those of float32; the nuclear norm has none."""
    matrix = np.float32(scale) * general(13, dtype=np.float32)
    solution = solve(name, matrix, k=k)
    assert solution.result == tx.RESULTS.nonfinite_product
    assert not np.any(np.isfinite(solution.value))
    nuclear = solve("nuclear", matrix, k=k)
    assert nuclear.result == tx.RESULTS.successful
    exact = np.linalg.norm(matrix.astype(np.float64), "nuc")
    assert np.allclose(nuclear.value, exact, rtol=2e-6 if k == N else 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAM)
def test_one_of_a_batch_whose_squares_overflow_is_flagged(name):
    """The maximum of a batch of NaNs may be `-inf` on CPU."""
    matrix = general(13, (64, 64), np.complex64)
    scales = np.array([1, 1, 1, 1e22], np.float32)
    matrices = scales[:, None, None] * matrix
    solution = jax.vmap(lambda matrix: solve(name, matrix, k=40))(matrices)
    flagged = np.asarray(solution.result != tx.RESULTS.successful)
    assert flagged.tolist() == [False, False, False, True]
    assert not np.any(np.isfinite(solution.value[3]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "large"), [("rows", 21), (GRAM[0], 3)])
def test_small_rows_beside_large_ones_are_none(name, large):
    """By a sketch with more probes than there are large ones."""
    small = np.arange(N) < N - large
    matrix = np.diag(np.where(small, 1e-25, 2.0).astype(np.float32))
    solution = solve(name, matrix, k=16)
    exact = NORMS[name][2](matrix.astype(float))
    assert np.allclose(solution.value, exact, rtol=1e-5, atol=1e-18)
    assert solution.result == tx.RESULTS.successful


@pytest.mark.slow(but="rows")
@some_and_gram
def test_transformations(name):
    """`vmap` is the loop, and forward mode agrees with reverse mode."""
    matrices = np.stack([general(14), general(15)])

    def value(matrix):
        return jnp.sum(solve(name, matrix, k=8).value)

    @jax.jit
    def run(matrices):
        _, slope = jax.jvp(value, (matrices[0],), (matrices[1],))
        return jax.vmap(jax.value_and_grad(value))(matrices), slope

    apart = [value_and_grad(name, matrix, k=8) for matrix in matrices]
    (values, gradients), slope = run(matrices)
    assert np.allclose(values, [np.sum(x.value) for x, _ in apart], rtol=1e-12)
    assert np.allclose(gradients, [x for _, x in apart], rtol=1e-9, atol=1e-12)
    assert np.allclose(slope, np.sum(gradients[0] * matrices[1]), rtol=1e-10)


@pytest.mark.slow(but="frobenius-8")
@pytest.mark.parametrize(
    ("name", "size"),
    [("frobenius", 8), ("frobenius, XNysTrace", 8), ("rows", 2), ("nuclear", 8)],
)
def test_meshes(name, size):
    matrix = general(14)
    expected, slope = value_and_grad(name, matrix, k=8)
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:size]))
    found, sharded = value_and_grad(name, matrix, k=8, execution=execution)
    assert np.allclose(found.value, expected.value, rtol=1e-13)
    assert np.allclose(found.std_err, expected.std_err, rtol=1e-12)
    assert np.allclose(sharded, slope, rtol=1e-10, atol=1e-12)


@pytest.mark.slow(but="rows")
@pytest.mark.parametrize("name", ["frobenius", "rows", "p=0.5"])
def test_adaptive(name):
    """Tolerances are those of norms, not of the powers that are estimated."""
    matrix = hermitian(17, np.linspace(1, 2, 64))
    norm = {"frobenius": 12.2, "rows": 12.2, "p=0.5": 6000}[name]
    tolerance = {"frobenius": 0.02, "rows": 0.1, "p=0.5": 0.02}[name] * norm
    settings = {"atol": tolerance, "max_k": 60, "round_size": 8}
    solution = solve(name, matrix, k=tx.Adaptive(**settings))
    assert solution.result == tx.RESULTS.successful
    used = solution.stats["num_matvecs"] // (2 * N if name == "p=0.5" else 1)
    assert 16 <= used < 60
    std_err = np.linalg.norm(solution.std_err)
    assert 1.96 * std_err < tolerance < 2.5 * std_err * 2
    fixed = solve(name, matrix, k=int(used))
    assert np.allclose(solution.value, fixed.value, rtol=1e-12)
    assert np.allclose(solution.std_err, fixed.std_err, rtol=1e-10)


SKETCHES = {
    "frobenius": [
        *(tx.AutoTraceEstimator(), tx.XTraceEstimator(), tx.XNysTraceEstimator()),
        *(tx.HutchPlusPlusEstimator(), tx.NystromPlusPlusEstimator()),
    ],
    "rows": [
        *(tx.AutoDiagonalEstimator(), tx.XDiagEstimator(), tx.XNysDiagEstimator()),
        *(tx.XTraceEstimator(), tx.DiagPlusPlusEstimator()),
    ],
}


class Plain(tx.AbstractEstimator):
    """An estimator of users that hands its work to another one."""

    min_matvecs: ClassVar[int] = 2

    def measure(self, quantity, operator, k, key, execution):
        return tx.XTraceEstimator().measure(quantity, operator, k, key, execution)


def test_estimator_of_users():
    """It is given `A A*`."""
    operator = lx.MatrixLinearOperator(jnp.asarray(general(19, (N, N))))
    settings = {"k": 16, "key": KEY}
    found = tx.frobenius_norm(operator, Plain(), **settings)
    expected = tx.frobenius_norm(operator, tx.XTraceEstimator(), **settings)
    assert np.allclose(found.value, expected.value)
    assert np.allclose(found.std_err, expected.std_err)


@pytest.mark.slow(but="XTraceEstimator")
@pytest.mark.parametrize("estimator", SKETCHES["frobenius"], ids=lambda x: x.name)
def test_low_rank_is_exact_by_sketches(estimator):
    """From 2 (k // 2) products, counted as the operator makes them."""
    made = []
    factor = general(19, (N, 3), np.complex128)

    def mv(vector):
        jax.debug.callback(lambda _: made.append(1), vector[0])
        return factor @ (factor.conj().T @ vector)

    structure = jax.ShapeDtypeStruct((N,), complex)
    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    solution = tx.frobenius_norm(operator, estimator, k=21, key=KEY)
    jax.effects_barrier()
    exact = np.linalg.norm(factor @ factor.conj().T)
    assert np.isclose(solution.value, exact, rtol=1e-10)
    assert solution.stats["num_matvecs"] == len(made) == 20
    assert solution.value.dtype == solution.stats["samples"].dtype == np.float64


@pytest.mark.slow(but="XDiagEstimator")
@pytest.mark.parametrize("estimator", SKETCHES["rows"], ids=lambda x: x.name)
def test_rows_of_trees_by_sketches(estimator):
    """Of a general operator on pairs, in products with it and its adjoint."""
    matrix = general(20, (N, 3)) @ general(21, (3, N))
    structure = tuple(jax.ShapeDtypeStruct((N // 2,), float) for _ in range(2))

    def mv(pair):
        return tuple(jnp.split(matrix @ jnp.concatenate(pair), 2))

    operator = lx.FunctionLinearOperator(mv, structure)
    solution = tx.row_norms(operator, estimator, k=20, key=KEY)
    assert np.allclose(np.concatenate(solution.value), ROWS(matrix), rtol=1e-9)
    assert solution.stats["num_matvecs"] == 20


@pytest.mark.slow
def test_adaptive_by_sketches():
    """Rounds and their history are of products with the operator."""
    seen = []
    matrix = hermitian(22, 0.7 ** np.arange(64))
    budget = {"max_k": 60, "history": True, "callback": lambda k, *_: seen.append(k)}
    settings = {"rtol": 1e-3, "round_size": 8, **budget}
    name = "frobenius, XNysTrace"
    solution = solve(name, matrix, k=tx.Adaptive(**settings))
    used = int(solution.stats["num_matvecs"])
    history = np.asarray(solution.stats["history"])
    spent = history[np.isfinite(history[:, 0]), 0]
    assert spent.tolist() == [int(k) for k in seen] == list(range(8, used + 1, 8))
    assert used in (24, 32, 40)
    assert np.isclose(solution.value, solve(name, matrix, k=used).value, rtol=1e-9)
    assert np.isclose(solution.value, np.linalg.norm(matrix), rtol=1e-3)
    resumed = solve(
        name, matrix, k=tx.Adaptive(**settings | {"rtol": 1e-5}), state=solution.state
    )
    assert resumed.stats["num_matvecs"] > used
    assert np.isclose(resumed.value, np.linalg.norm(matrix), rtol=1e-5)


OPERATOR = lx.MatrixLinearOperator(jnp.asarray(general(18)))
WIDE = lx.MatrixLinearOperator(jnp.asarray(general(18, (3, 5))))
NUCLEAR = ft.partial(tx.schatten_norm, key=KEY, k=2, num_steps=2)


@pytest.mark.parametrize("norm", [tx.frobenius_norm, tx.row_norms])
def test_misuse(norm):
    norm = ft.partial(norm, k=8, key=KEY)
    with pytest.raises(ValueError, match=r"`XTraceEstimator` needs at least k=4"):
        norm(OPERATOR, tx.XTraceEstimator(), k=3)
    with pytest.raises(TypeError, match="must be a matrix"):
        norm(general()[0])
    with pytest.raises(ValueError, match="`key` is missing"):
        norm(OPERATOR, key=None)


@pytest.mark.parametrize(
    ("call", "exception", "message"),
    [
        (lambda: NUCLEAR(OPERATOR, 0), ValueError, "`p` must be positive.*Found 0"),
        (lambda: NUCLEAR(OPERATOR, -1.0), ValueError, "`p` must be positive"),
        (lambda: NUCLEAR(OPERATOR, np.nan), ValueError, "Found nan"),
        (lambda: NUCLEAR(OPERATOR, np.inf), ValueError, "finite. Found inf"),
        (lambda: NUCLEAR(OPERATOR, "nuc"), TypeError, "Found 'nuc' of type str"),
        (lambda: NUCLEAR(OPERATOR, True), TypeError, "`p` must be a Python int"),
        (
            lambda: jax.jit(lambda p: NUCLEAR(OPERATOR, p).value)(1.0),
            TypeError,
            "must be static",
        ),
        (lambda: NUCLEAR(general()[0], 1), TypeError, "must be a matrix"),
        (lambda: NUCLEAR(OPERATOR, 1, k=0), ValueError, "`k` must be at least 1"),
        (lambda: NUCLEAR(OPERATOR, 1, num_steps=0), ValueError, "`num_steps` must"),
        (lambda: NUCLEAR(OPERATOR, 1, key=None), ValueError, "`key` is missing"),
        (
            lambda: NUCLEAR(OPERATOR, 1, estimator=tx.XTraceEstimator()),
            TypeError,
            "`estimator` must be an instance",
        ),
        (
            lambda: NUCLEAR(OPERATOR, 1, estimator=tx.KrylovAwareEstimator(), k=3),
            ValueError,
            "`KrylovAwareEstimator` needs an operator that is tagged Hermitian",
        ),
        (
            lambda: NUCLEAR(
                lx.FunctionLinearOperator(
                    lambda v: 1j * v[:2], jax.ShapeDtypeStruct((4,), float)
                ),
                1,
            ),
            TypeError,
            "real vectors to real ones",
        ),
    ],
)
def test_misuse_of_schatten_norms(call, exception, message):
    with pytest.raises(exception, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_of_a_power_that_is_much_larger_than_the_norm(dtype):
    """Rounding is in the units of the norm, as the tolerance is."""
    values = np.linspace(1e4, 5e4, 200).astype(dtype)
    operator = lx.DiagonalLinearOperator(jnp.asarray(values))
    k = tx.Adaptive(rtol=1e-2, max_k=64)
    solution = tx.schatten_norm(operator, 3, k=k, key=KEY)
    assert solution.stats["num_steps"] > 1
    assert np.allclose(solution.value, np.sum(values.astype(float) ** 3) ** (1 / 3), 1e-2)
