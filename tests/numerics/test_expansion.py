"""The estimates of the whole operator that sketches make, and what is read of them,
against their meaning: doing it again with fewer probes."""

import functools as ft
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from traceax._core.quantity import AbstractQuantity, Diagonal, LeafTraces, Trace
from traceax._estimators.auto_diagonal import _XNysDiagOrSigns
from traceax._numerics.expansion import OneSided
from traceax._numerics.reading import read
from traceax._run.budget import Budget

from ..helpers import hermitian


N, EPS = 14, float(jnp.finfo(jnp.float64).eps)
TREE = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(7), "c": jnp.zeros(())}
STRUCTURE = jax.eval_shape(lambda: TREE)
LEAVES = [slice(0, 6), slice(6, 13), slice(13, 14)]


class Whole(AbstractQuantity):
    """The operator itself."""

    def read(self, left, image):
        return jnp.outer(image, left.conj())


QUANTITIES = {
    "whole": Whole(),
    "trace": Trace(),
    "diagonal": Diagonal().for_structure(STRUCTURE),
    "leaves": LeafTraces().for_structure(STRUCTURE),
}
OF_WHOLE = {
    "whole": lambda x: x,
    "trace": lambda x: np.trace(x, axis1=-2, axis2=-1),
    "diagonal": lambda x: np.diagonal(x, axis1=-2, axis2=-1),
    "leaves": lambda x: np.stack(
        [np.trace(x[..., part, part], axis1=-2, axis2=-1) for part in LEAVES], axis=-1
    ),
}


def projector(x):
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    u = u[:, s > 1e-10 * np.max(s, initial=0)]
    return u @ u.conj().T


def rank(x):
    return np.linalg.matrix_rank(x) if x.size else 0


# --- estimate j from the columns of `others` and from `probe`, by the definition ---


def by_xdiag(matrix, others, probe):
    inside = projector(matrix @ others)
    outside = np.eye(N) - inside
    return inside @ matrix + outside @ matrix @ np.outer(probe, probe.conj())


def by_xtrace(matrix, others, probe, improved):
    inside = projector(matrix @ others)
    v = probe - inside @ probe
    c = (N - rank(matrix @ others)) / np.linalg.norm(v) ** 2 if improved else 1.0
    return matrix @ (inside + c * np.outer(v, v.conj()))


def by_xnystrace(matrix, others, probe, improved):
    y = matrix @ others
    approximation = y @ np.linalg.pinv(others.conj().T @ y, 1e-12) @ y.conj().T
    form = np.outer(probe, probe.conj())
    if improved:
        v = probe - projector(others) @ probe
        c = (N - others.shape[1]) / np.linalg.norm(v) ** 2
        form = c * np.outer(v, v.conj())
    return approximation + (matrix - approximation) @ form


class Case(NamedTuple):
    estimator: tx.AbstractEstimator
    naive: ft.partial
    products: int  # for each probe
    semidefinite: bool

    def __str__(self):
        name = type(self.estimator).__name__.removesuffix("Estimator")
        return name + "-improved" * getattr(self.estimator, "improved", False)


CASES = [Case(tx.XDiagEstimator(), ft.partial(by_xdiag), 2, False)]
for improved in (True, False):
    for cls, naive, products in (
        (tx.XTraceEstimator, by_xtrace, 2),
        (tx.XNysTraceEstimator, by_xnystrace, 1),
    ):
        part = ft.partial(naive, improved=improved)
        CASES.append(Case(cls(improved=improved), part, products, products == 1))
every_case = pytest.mark.parametrize("case", CASES, ids=str)
# Others differ from them by a factor.
one_of_each = pytest.mark.parametrize("case", CASES[:3], ids=str)


def normal(seed, shape, dtype):
    generator = np.random.default_rng(seed)
    real, imaginary = generator.standard_normal((2, *shape))
    return (real + 1j * imaginary) / 2**0.5 if dtype is np.complex128 else real


def matrix_for(case, dtype):
    if case.semidefinite:
        return hermitian(8, 0.7 ** np.arange(N), dtype)
    return normal(9, (N, N), dtype) * 0.7 ** np.arange(N)


def naive(case, matrix, probes):
    """All estimates, and those without a second probe: entry `[i, j]` is estimate j
    without probe i."""
    m = probes.shape[1]

    def one(j, *without):
        others = np.delete(probes, [j, *without], axis=1)
        return case.naive(matrix, others, probes[:, j])

    estimates = np.stack([one(j) for j in range(m)])
    pairs = [[one(j, i) if i != j else estimates[j] for j in range(m)] for i in range(m)]
    return estimates, np.array(pairs)


def sketch_of(estimator, matrix, probes, k, eps=EPS):
    def matmat(x, adjoint=False):
        return (matrix.conj().T if adjoint else matrix) @ x

    return estimator.sketch(matmat, probes, k, eps)


def scaled(sketch, *parts):
    return jax.tree.map(lambda x: x * sketch.scale, parts)


def readings(sketch):
    """Mean, error as if the samples were independent, and error, of each quantity."""

    def one(quantity):
        skewed = not quantity.entrywise
        seen = read(quantity, sketch.expansion(), sketch.valid, skewed=skewed)
        (moments,) = seen.moments.parts
        return scaled(sketch, moments.mean, moments.independent_std_err, seen.std_err)

    return {name: one(quantity) for name, quantity in QUANTITIES.items()}


def summed(pairs):
    return sum(jnp.einsum("ri,rj->rij", image, left.conj()) for left, image in pairs)


@eqx.filter_jit
def expanded(estimator, matrix, probes, k):
    """What a sketch makes: estimates, changes `[i, j]`, its own samples and error of the
    trace, `R L*` of its frame, and what is read."""
    sketch = sketch_of(estimator, matrix, probes, k)
    expansion, m = sketch.expansion(), probes.shape[1]
    shared = jnp.sum(summed([expansion.shared]), axis=0) + expansion.shift * jnp.eye(N)
    without = lambda i: summed(expansion.changes(jnp.full(m, i)))  # noqa: E731
    arrays = shared + summed(expansion.own()), jax.lax.map(without, jnp.arange(m))
    own = () if sketch.samples is None else (sketch.samples, sketch.std_err)
    left, right = sketch.frame
    return *scaled(sketch, *arrays, own), right @ left.conj().T, readings(sketch)


def by_hand(samples, pairs):
    """Mean, error as if independent, and error of arrays, with the covariance of all
    ordered pairs of probes, each once."""
    m = len(samples)
    variance = np.var(np.stack([samples.real, samples.imag]), axis=1, ddof=1).sum(0) / m
    change = pairs - samples  # [i, j]
    covariance = np.zeros(samples.shape[1:])
    for i in range(m):
        for j in range(m):
            if i != j:
                covariance += (change[i, j] * change[j, i].conj()).real / (m * (m - 1))
    total, variance_sum = np.sum(covariance), np.sum(m * variance)
    pooled = max(total, 0) / variance_sum * m * variance
    covariance = np.maximum(pooled, (covariance + pooled) / 2)
    return np.mean(samples, axis=0), variance**0.5, (variance + covariance) ** 0.5


def inflated(samples, std_err):
    """A skewed quantity has wider bars: see `Moments.std_err`."""
    m = len(samples)
    parts = np.stack([samples.real, samples.imag], axis=-1)
    parts = parts - np.mean(parts, axis=0)
    square, cube = np.sum(parts**2, axis=(0, -1)), np.sum(parts**3, axis=0)
    cube = np.linalg.norm(cube, axis=-1)
    skewness = m**0.5 * cube / np.where(square > 0, square, 1) ** 1.5
    return (1 + 2 * (1 + skewness**2 + (4 / m) ** 2) / m) * std_err


@pytest.mark.slow
@every_case
@pytest.mark.parametrize(("m", "dtype"), [(5, np.float64), (6, np.complex128)])
def test_is_what_fewer_probes_give(case, m, dtype):
    """Each estimate, what it changes by without a second probe, and what is read of all,
    for an odd number of probes and even ones, of which opposite pairs meet twice."""
    matrix, probes = matrix_for(case, dtype), normal(7, (N, m), dtype)
    found = expanded(case.estimator, matrix, probes, case.products * m)
    estimates, changes, own, _, seen = jax.tree.map(np.asarray, found)
    expected, pairs = naive(case, matrix, probes)
    assert np.allclose(estimates, expected, rtol=1e-9, atol=1e-9)
    different = ~np.eye(m, dtype=bool)
    assert np.allclose(changes[different], (pairs - expected)[different], atol=1e-8)

    for name, quantity in QUANTITIES.items():
        samples, without = OF_WHOLE[name](expected), OF_WHOLE[name](pairs)
        mean, independent, std_err = by_hand(samples, without)
        if not quantity.entrywise:
            std_err = inflated(samples, std_err)
        for x, y in zip(seen[name], (mean, independent, std_err), strict=True):
            assert np.allclose(x, y, rtol=1e-6, atol=1e-9), name

    if own:
        samples, std_err = own
        assert np.allclose(samples, OF_WHOLE["trace"](estimates), rtol=1e-9)
        assert np.allclose(std_err, seen["trace"][2], rtol=1e-6)


@one_of_each
def test_covariance_of_some_pairs(case, monkeypatch):
    """Of more probes than each one is paired with: of the first ones, or of neighbours
    around a circle."""
    monkeypatch.setattr("traceax._numerics.expansion._MAX_PARTNERS", 4)
    m, names = 7, ("diagonal", "leaves")
    matrix, probes = matrix_for(case, np.float64), normal(7, (N, m), np.float64)

    @eqx.filter_jit
    def run(matrix, probes):
        sketch = sketch_of(case.estimator, matrix, probes, case.products * m)
        expansion, square = sketch.expansion(), sketch.scale**2
        found = [square * expansion.covariance(QUANTITIES[x], None) for x in names]
        return expansion, found

    expansion, covariances = run(matrix, probes)
    estimates, pairs = naive(case, matrix, probes)
    index = np.arange(m)
    ahead = (index[:, None] - index) % m
    first, near = np.maximum.outer(index, index) < 4, np.minimum(ahead, m - ahead) <= 2
    for name, found in zip(names, covariances, strict=True):
        change = OF_WHOLE[name](pairs) - OF_WHOLE[name](estimates)
        one_sided = name == "diagonal" and isinstance(expansion, OneSided)
        met = first if one_sided else near
        product = (change * np.swapaxes(change, 0, 1))[met & ~np.eye(m, dtype=bool)]
        assert np.allclose(found, np.mean(product, axis=0), rtol=1e-6, atol=1e-10)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize(("m", "dtype"), [(5, np.float64), (6, np.complex128)])
def test_frame_is_that_of_fewer_probes(case, m, dtype):
    """It reads B of `B (P_i + c_i v_i l_i*)`, in the mean over i, with `l_i` probe i
    itself where the estimate is one-sided, and `v_i` otherwise."""
    matrix, probes = matrix_for(case, dtype), normal(7, (N, m), dtype)
    _, _, _, found, _ = expanded(case.estimator, matrix, probes, case.products * m)
    expected = np.zeros((N, N), dtype)
    for i in range(m):
        inside = projector(matrix @ np.delete(probes, i, axis=1))
        probe = probes[:, i]
        v = probe - inside @ probe
        left = probe if case.naive.func is by_xdiag else v
        if getattr(case.estimator, "improved", False):
            left = left * (N - m + 1) / np.linalg.norm(v) ** 2
        expected += (inside + np.outer(v, left.conj())) / m
    assert np.allclose(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow(but="XTrace")
@every_case
def test_low_rank_is_exact(case):
    """Probes that the basis does without have no direction of their own. XTrace knows
    all of a matrix alone whose rows lie in the space of its columns."""
    matrix = matrix_for(case, np.float64)
    if case.naive.func is by_xtrace:
        matrix = matrix[:, :3] @ matrix[:, :3].T
    else:
        u, s, vh = np.linalg.svd(matrix)
        matrix = (u[:, :3] * s[:3]) @ vh[:3]
    probes = normal(7, (N, 5), np.float64)
    found = expanded(case.estimator, matrix, probes, case.products * 5)
    estimates, changes, _, _, seen = jax.tree.map(np.asarray, found)
    assert np.allclose(estimates, matrix, atol=1e-7)
    different = ~np.eye(5, dtype=bool)
    assert np.allclose(changes[different], 0, atol=1e-7)
    for name, (mean, _, std_err) in seen.items():
        assert np.allclose(mean, OF_WHOLE[name](matrix), atol=1e-7)
        assert np.all(std_err < 1e-6)


@eqx.filter_jit
def grown(estimator, matrix, probes, k):
    """After one round of two."""
    budget = Budget.of(tx.Adaptive(atol=1.0, max_k=2 * k, round_size=k))
    rounds = jnp.zeros((), jnp.int32)

    def matmat(x, adjoint=False):
        return (matrix.conj().T if adjoint else matrix) @ x

    state = estimator.start(N, probes.dtype, budget)
    state = estimator.grow(matmat, probes, state, rounds, EPS, budget)
    sketch = estimator.assess(state, rounds + 1, EPS, budget)
    return readings(sketch), jnp.sum(sketch.valid)


@pytest.mark.slow
@one_of_each
def test_half_full_buffers(case):
    """What is read of the valid samples is that of a sketch of as many."""
    m, dtype = 6, np.complex128
    matrix, probes = matrix_for(case, dtype), normal(7, (N, m), dtype)
    args = case.estimator, matrix, probes, case.products * m
    found, count = grown(*args)
    *_, expected = expanded(*args)
    assert count == m
    for name in QUANTITIES:
        for x, y in zip(found[name], expected[name], strict=True):
            assert np.allclose(x, y, rtol=1e-6, atol=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.semidefinite], ids=str)
def test_shift_of_coarse_products(case):
    """What is added to the operator, in proportion to the roundoff of its products, is
    taken off again: of the trace by `read` as by the sketch, and of the diagonal; and of
    other quantities in the mean over the probes."""
    matrix, probes = matrix_for(case, np.float64), normal(7, (N, 5), np.float64)

    @jax.jit
    def both(matrix, probes):
        sketch = sketch_of(case.estimator, matrix, probes, 5, eps=1e-3)
        shift = -sketch.expansion().shift * sketch.scale
        return readings(sketch), *scaled(sketch, sketch.samples), shift

    seen, samples, shift = jax.tree.map(np.asarray, both(matrix, probes))
    assert shift > 1e-4
    assert np.allclose(seen["trace"][0], np.mean(samples), rtol=1e-10)
    assert np.allclose(np.sum(seen["diagonal"][0]), seen["trace"][0], rtol=1e-10)
    whole = seen["whole"][0] + shift * (probes @ probes.T / 5 - np.eye(N))
    assert np.allclose(np.diagonal(whole), seen["diagonal"][0], rtol=1e-10)
    assert np.allclose(np.trace(whole), seen["trace"][0], rtol=1e-10)


def test_shift_where_auto_takes_signs():
    """The products with the probes, made again from the approximation, are those."""
    matrix = hermitian(8, np.linspace(1, 2, N))
    signs = np.sign(normal(7, (N, 5), np.float64))

    @jax.jit
    def run(matrix, probes):
        return readings(sketch_of(_XNysDiagOrSigns(), matrix, probes, 5, eps=1e-3))

    mean, *_ = run(matrix, signs)["diagonal"]
    assert np.allclose(mean, np.mean(signs * (matrix @ signs), axis=1), rtol=1e-9)
