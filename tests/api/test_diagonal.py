"""Diagonals: right in the mean, with their derivatives, exact where they can be, for any
scale, dtype and PyTree."""

import re
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import diagonals_of_matrices, hermitian, matrix_free, PSD, rms


N, K, NUM_KEYS = 24, 8, 400
INDEX = np.arange(1, N + 1)
KEYS = jr.split(jr.key(20261121), NUM_KEYS)


class Case(NamedTuple):
    estimator: tx.AbstractEstimator
    tags: object
    exact_rank: int  # that K products are exact for, with an error bar of 0

    def __str__(self):
        name = type(self.estimator).__name__.removesuffix("Estimator")
        return f"{name}-tagged" if self.tags else name


HUTCHINSON = Case(tx.HutchinsonEstimator(), (), 0)
XDIAG = Case(tx.XDiagEstimator(), (), 3)
DIAGPP = Case(tx.DiagPlusPlusEstimator(), (), 2)
XNYSDIAG = Case(tx.XNysDiagEstimator(), PSD, 6)
AUTO = Case(tx.AutoDiagonalEstimator(), (), 3)
AUTO_TAGGED = Case(tx.AutoDiagonalEstimator(), PSD, 6)
XTRACE = Case(tx.XTraceEstimator(), (), 0)
XNYSTRACE = Case(tx.XNysTraceEstimator(), PSD, 6)
CASES = [HUTCHINSON, XDIAG, DIAGPP, XNYSDIAG, AUTO, AUTO_TAGGED, XTRACE, XNYSTRACE]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
EXACT = [case for case in CASES if case.exact_rank]


def normal(seed, dtype=np.float64):
    generator = np.random.default_rng(seed)
    real, imaginary = generator.standard_normal((2, N, N))
    return (real + 1j * imaginary if np.dtype(dtype).kind == "c" else real).astype(dtype)


def weights(dtype=np.float64):
    return normal(3, dtype)[0]


def family(matrix, *, quadratic=True):
    """`A + t B + t^2 C`, at t = 0; for any A."""
    slope, curve = normal(4, matrix.dtype), normal(5, matrix.dtype) * quadratic
    hermitian = [x + x.conj().T for x in (slope, curve)]
    return np.stack([matrix, *hermitian])


class Derivatives(NamedTuple):
    value: np.ndarray
    std_err: np.ndarray
    num_matvecs: np.ndarray
    slope: np.ndarray  # of Re sum(w * diagonal) in the matrix
    along: np.ndarray  # and in t
    second: np.ndarray


@eqx.filter_jit
def _derivatives(families, which, estimator, keys, weights, tags):
    def one(pair):
        i, key = pair

        def loss(matrix, t):
            matrix = matrix + t * families[i, 1] + t**2 * families[i, 2]
            operator = matrix_free(matrix, tags)
            solution = tx.diagonal(operator, estimator, k=K, key=key, throw=False)
            return jnp.sum(weights * solution.value).real, solution

        def first(t):
            grads = eqx.filter_grad(lambda x: loss(*x), has_aux=True)
            (slope, along), solution = grads((families[i, 0], t))
            stats = solution.stats
            return along, (slope, solution.value, solution.std_err, stats["num_matvecs"])

        zero, one = jnp.zeros(()), jnp.ones(())
        (along, aux), (second, _) = jax.jvp(first, (zero,), (one,))
        slope, value, std_err, made = aux
        return Derivatives(value, std_err, made, slope, along, second)

    return jax.lax.map(one, (which, keys))


def derivatives(case, families, num_keys=NUM_KEYS):
    """Of each of several families with each key: `[i, j]` belongs to family i, key j."""
    total = len(families) * num_keys
    # One shape of arguments for all calls: four families and 80 pairs, the last repeated.
    pairs = np.minimum(np.arange(-(-total // 80) * 80), total - 1).reshape(-1, 80)
    padded = np.resize(np.stack(families), (4, 3, N, N))

    def some(pairs):
        which, index = pairs // num_keys, pairs % num_keys
        args = padded, which, case.estimator, KEYS[index], weights(padded.dtype)
        return jax.device_get(_derivatives(*args, case.tags))

    def join(*parts):
        found = np.concatenate(parts)[:total]
        return found.reshape(len(families), num_keys, *found.shape[1:])

    return jax.tree.map(join, *map(some, pairs))


def z_scores(samples, exact):
    """Of each entry, real and imaginary parts apart."""
    samples, exact = np.asarray(samples), np.asarray(exact)
    if np.iscomplexobj(samples):
        parts = (samples.real, exact.real), (samples.imag, exact.imag)
        return np.concatenate([np.ravel(z_scores(*part)) for part in parts])
    spread = np.std(samples, axis=0, ddof=1) / len(samples) ** 0.5
    rounding = 1e-12 * np.max(np.abs(samples))
    distance = np.maximum(np.abs(np.mean(samples, axis=0) - exact) - rounding, 0)
    return distance / np.where(spread > 0, spread, 1)


def matrices_for(case, dtype):
    """Auto, which decides by the data, is unbiased where the decision is clear."""
    flat, decaying = (hermitian(1, x, dtype) for x in (INDEX / N + 1, 0.5**INDEX))
    if case.tags:
        return [flat, decaying]
    general = decaying + np.triu(normal(2, dtype) * np.outer(0.5**INDEX, np.ones(N)), 1)
    return [flat, general]


@pytest.mark.slow(but=("Hutchinson-float64", "XDiag-complex128"))
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, np.float64) for case in CASES]
    + [(case, np.complex128) for case in (XDIAG, DIAGPP, XNYSDIAG)],
    ids=lambda x: str(x) if isinstance(x, Case) else x.__name__,
)
def test_right_in_the_mean_with_derivatives(case, dtype):
    """The value, its gradient in the matrix, and first and second derivatives along a
    quadratic family: 400 keys, 11 programs, two matrices and about 10^3 z-scores of each,
    the largest below 5.5. False alarms: 1e-3 in all."""
    matrices, w = matrices_for(case, dtype), weights(dtype)
    families = [family(matrix) for matrix in matrices]
    found = derivatives(case, families)
    for i, (matrix, slope, curve) in enumerate(families):
        assert np.all(found.num_matvecs[i] <= K)
        assert np.max(z_scores(found.value[i], np.diag(matrix))) < 5.5
        assert np.max(z_scores(found.slope[i], np.diag(w))) < 5.5
        assert z_scores(found.along[i], np.sum(w * np.diag(slope)).real) < 5.5
        assert z_scores(found.second[i], 2 * np.sum(w * np.diag(curve)).real) < 5.5
        # The same derivative, forwards and by way of the matrix.
        pulled = np.sum(found.slope[i] * slope, axis=(1, 2)).real
        assert np.allclose(pulled, found.along[i], rtol=1e-8, atol=1e-10)


@pytest.mark.slow(but=("XDiag", "AutoDiagonal-tagged"))
@every_case
def test_second_derivative_of_a_linear_family_is_zero(case):
    matrices = matrices_for(case, np.float64)
    found = derivatives(case, [family(x, quadratic=False) for x in matrices], 20)
    assert np.all(found.second == 0)
    assert np.all(np.isfinite(found.along))


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_low_rank_is_exact(case):
    """A rank below the number of probes, at any scale, and derivatives that are finite
    there."""
    matrix = hermitian(6, (case.exact_rank >= INDEX) / INDEX)
    scales = [1e-100, 1.0, 1e100]
    found = derivatives(case, [family(scale * matrix) for scale in scales], 20)
    atol = 1e-7 if case.tags else 1e-12
    for value, std_err, scale in zip(found.value, found.std_err, scales, strict=True):
        assert np.allclose(value / scale, np.diag(matrix), atol=atol, rtol=0)
        assert np.all(std_err <= 10 * atol * scale)
    for x in (found.slope, found.along, found.second):
        assert np.all(np.isfinite(x))


@pytest.mark.slow(but=("AutoDiagonal-tagged", "XNysTrace-tagged"))
@every_case
def test_zero(case):
    """No noise, no NaN, and derivatives that are right in the mean."""
    found = derivatives(case, [family(np.zeros((N, N)))])
    assert np.all(found.value == 0)
    assert np.all(found.std_err == 0)
    assert np.max(z_scores(found.slope[0], np.diag(weights()))) < 5.5
    assert np.all(np.isfinite(found.second))


@every_case
def test_scales(case):
    """Tiny, huge and plain matrices give the same numbers."""
    matrix = matrices_for(case, np.float64)[1]
    scales = [1e-140, 1.0, 1e140]
    found = derivatives(case, [family(scale * matrix) for scale in scales], 20)
    for i, scale in enumerate(scales):
        value, std_err = found.value[i] / scale, found.std_err[i] / scale
        assert np.allclose(value, found.value[1], rtol=1e-6, atol=1e-9)
        assert np.allclose(std_err, found.std_err[1], rtol=1e-5, atol=1e-9)


# --- dtypes, PyTrees ---


@pytest.mark.slow(but=("Hutchinson-float32", "*-complex64"))
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (HUTCHINSON, jnp.float32),
        (DIAGPP, jnp.complex64),
        (AUTO, jnp.complex64),
        (AUTO_TAGGED, jnp.bfloat16),
        (XNYSDIAG, jnp.bfloat16),
        (XDIAG, jnp.float16),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else x.__name__,
)
def test_dtypes(case, dtype):
    """No entry is more than 8 of its error bars off, and these are no larger in the mean
    of squares than three errors and what is rounded: two units of the matrix's norm."""
    wide = np.complex128 if dtype == jnp.complex64 else np.float64
    stack = jnp.asarray(np.stack(matrices_for(case, wide)), dtype)
    which = jnp.asarray(np.repeat([0, 1], 20))
    keys = jnp.tile(KEYS[:20], 2)
    value, std_err, stats = diagonals_of_matrices(
        stack, which, case.estimator, keys, k=16, tags=case.tags
    )
    rounding = float(jnp.finfo(dtype).eps)
    dtype = jnp.promote_types(dtype, jnp.float32)
    assert value.dtype == dtype
    assert std_err.dtype == jnp.finfo(dtype).dtype
    exact = np.diagonal(np.asarray(stack).astype(wide), axis1=1, axis2=2)[which]
    error, std_err = np.abs(np.asarray(value) - exact), np.asarray(std_err)
    assert np.all(error <= 8 * std_err)
    for i in range(2):
        floor = 2 * rounding * np.linalg.norm(np.asarray(stack[i]).astype(wide), 2)
        assert rms(std_err[which == i]) <= 3 * rms(error[which == i]) + floor
    assert np.all(stats["num_samples"] >= 5)


TREE = {"a": jnp.ones((2, 3)), "b": (jnp.ones(7, jnp.float32), jnp.ones(()))}


def curved(tree):
    """Its Hessian has the diagonal of `curvature` and a part of rank one."""
    terms = [jnp.sum(jnp.cosh(x)) for x in jax.tree.leaves(tree)]
    return sum(terms) + jnp.sum(tree["a"]) * tree["b"][1] * 0.1


@pytest.mark.slow(but="AutoDiagonal")
@pytest.mark.parametrize("case", [HUTCHINSON, AUTO], ids=str)
def test_trees(case):
    """Value and error bar have the structure of the operator, in one dtype."""
    operator = tx.hessian(curved, TREE)
    solution = tx.diagonal(operator, case.estimator, k=12, key=KEYS[0])
    assert jax.tree.structure(solution.value) == jax.tree.structure(TREE)
    for tree in (solution.value, solution.std_err, solution.stats["std.err"]):
        shapes = jax.tree.map(jnp.shape, tree)
        assert shapes == jax.tree.map(jnp.shape, TREE)
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(float)}
    assert "samples" not in solution.stats
    assert solution.stats["num_samples"] in ([12] if case is HUTCHINSON else [6, 12])
    parts = map(jax.tree.leaves, (solution.value, solution.std_err, TREE))
    for value, std_err, x in zip(*parts, strict=True):
        assert np.all(np.abs(value - np.cosh(x)) <= 8 * std_err + 1e-6)


def test_exact_on_trees():
    exact = tx.diagonal(tx.hessian(curved, TREE), XDIAG.estimator, k=14)
    for value, x in zip(*map(jax.tree.leaves, (exact.value, TREE)), strict=True):
        assert np.allclose(value, np.cosh(x), rtol=1e-6)
        assert value.shape == x.shape


# --- exact answers, small budgets ---


@eqx.filter_jit
def exactly(matrices):
    """By every case, in one program."""
    return [
        tx.diagonal(matrix_free(matrix, case.tags), case.estimator, k=N)
        for case, matrix in zip(CASES, matrices, strict=True)
    ]


def test_exact_where_the_budget_allows():
    """With n products, without a key; none where lineax knows the diagonal."""
    matrices = [matrices_for(case, np.float64)[1] for case in CASES]
    for matrix, solution in zip(matrices, exactly(matrices), strict=True):
        assert np.allclose(solution.value, np.diag(matrix), atol=1e-15)
        assert np.all(solution.std_err == 0)
        assert solution.stats["num_matvecs"] == N


@pytest.mark.parametrize(
    "operator",
    [
        lx.MatrixLinearOperator(jnp.asarray(normal(0))),
        lx.TaggedLinearOperator(lx.DiagonalLinearOperator(jnp.arange(24.0)), PSD),
        2 * lx.IdentityLinearOperator(TREE),
    ],
    ids=["matrix", "diagonal", "identity"],
)
def test_known_diagonals_cost_no_product(operator):
    for settings in ({"k": 1}, {"k": tx.Adaptive(rtol=0.1, max_k=4)}):
        solution = tx.diagonal(operator, **settings)
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(solution.value)])
        assert np.array_equal(flat, lx.diagonal(operator))
        assert solution.stats["num_matvecs"] == 0
        assert all(np.all(x == 0) for x in jax.tree.leaves(solution.std_err))


@pytest.mark.parametrize(
    ("case", "k"),
    [(HUTCHINSON, 1), (AUTO_TAGGED, 1), (XDIAG, 2)],
    ids=str,
)
def test_one_sample_has_no_error_bar(case, k):
    matrix = jnp.asarray(matrices_for(case, np.float64)[0])
    operator = matrix_free(matrix, case.tags)
    solution = tx.diagonal(operator, case.estimator, k=k, key=KEYS[0])
    assert np.all(np.isfinite(solution.value))
    assert solution.stats["num_matvecs"] == k
    assert solution.stats["num_samples"] == 1
    assert np.all(np.isinf(solution.std_err))


def test_the_default_has_an_error_bar():
    """Of two products without a tag, where a basis has a single sample."""
    matrix = jnp.asarray(matrices_for(AUTO, np.float64)[0])
    operator = matrix_free(matrix, AUTO.tags)
    solution = tx.diagonal(operator, k=2, key=KEYS[0])
    assert solution.stats["num_matvecs"] == 2
    assert np.all(np.isfinite(solution.std_err))


@pytest.mark.slow(but=("XDiag", "DiagPlusPlus"))
@pytest.mark.parametrize("case", [XDIAG, DIAGPP, AUTO, XTRACE, XNYSTRACE], ids=str)
def test_few_products(case):
    """An odd number, of which some leave one out. Unbiased: 240 z-scores over 100 keys,
    one of them above 5.5 with a chance below 1e-3."""
    matrices = matrices_for(case, np.float64)
    which, keys = jnp.asarray(np.repeat([0, 1], 100)), jnp.tile(KEYS[:100], 2)
    value, _, stats = diagonals_of_matrices(
        jnp.asarray(np.stack(matrices)), which, case.estimator, keys, k=3, tags=case.tags
    )
    for samples, matrix in zip(np.split(np.asarray(value), 2), matrices, strict=True):
        assert np.max(z_scores(samples, np.diag(matrix))) < 5.5
    assert np.all(stats["num_matvecs"] <= 3)


# --- transforms ---


@eqx.filter_jit
def together(stack, estimator, keys, tags):
    def one(matrix, key):
        operator = matrix_free(matrix, tags)
        solution = tx.diagonal(operator, estimator, k=K, key=key, throw=False)
        failed = solution.result == tx.RESULTS.nonfinite_product
        return solution.value, solution.std_err, failed

    every_key = lambda matrix: jax.vmap(lambda key: one(matrix, key))(keys)  # noqa: E731
    return jax.vmap(every_key)(stack)


@pytest.mark.slow(but=("Hutchinson", "AutoDiagonal-tagged"))
@pytest.mark.parametrize("case", [HUTCHINSON, AUTO, AUTO_TAGGED], ids=str)
def test_vmap_over_operators_and_keys(case):
    matrices = matrices_for(case, np.float64)
    bad = matrices[0].copy()
    bad[3, 4] = np.nan
    found = together(np.stack([*matrices, bad]), case.estimator, KEYS[:2], case.tags)
    values, std_errs, failed = found
    assert failed.tolist() == [[False, False], [False, False], [True, True]]
    alone = derivatives(case, [family(x) for x in matrices], 2)
    assert np.allclose(values[:2], alone.value, rtol=1e-9, atol=1e-11)
    assert np.allclose(std_errs[:2], alone.std_err, rtol=1e-5, atol=1e-9)


@pytest.mark.slow(but="XDiag")
@pytest.mark.parametrize("case", [XDIAG, AUTO_TAGGED], ids=str)
def test_without_jit(case):
    matrix = matrices_for(case, np.float64)[1]
    operator = matrix_free(jnp.asarray(matrix), case.tags)
    solution = tx.diagonal(operator, case.estimator, k=K, key=KEYS[0])
    alone = derivatives(case, [family(matrix)], 1)
    assert np.allclose(solution.value, alone.value[0, 0], rtol=1e-9, atol=1e-12)


def test_hermitian_tag():
    """XDiag then multiplies by the operator in the place of its adjoint."""
    matrix = jnp.asarray(hermitian(1, 0.5**INDEX, np.complex128))[None]
    which = jnp.zeros(2, int)
    values = [
        diagonals_of_matrices(matrix, which, XDIAG.estimator, KEYS[:2], k=K, tags=tags)[0]
        for tags in ((), tx.hermitian_tag)
    ]
    assert np.allclose(*values, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_negative_operators():
    """Negated before, and the estimate after."""
    matrix = jnp.asarray(hermitian(1, 0.5**INDEX))
    negative = lx.negative_semidefinite_tag
    settings = {"k": K, "key": KEYS[0]}
    for estimator in (tx.XNysDiagEstimator(), tx.AutoDiagonalEstimator()):
        plus = tx.diagonal(matrix_free(matrix, PSD), estimator, **settings)
        minus = tx.diagonal(matrix_free(-matrix, negative), estimator, **settings)
        assert np.allclose(minus.value, -plus.value, rtol=1e-12)
        assert np.allclose(minus.std_err, plus.std_err, rtol=1e-9)


# --- mistakes ---


class OnlyTrace(tx.AbstractStreamingEstimator):
    sampler: tx.AbstractSampler = tx.RademacherSampler()
    min_matvecs = 1

    def sample(self, mv, probe):
        return jnp.vdot(probe, mv(probe))


class Vector(OnlyTrace):
    def sample(self, mv, probe):
        return probe * mv(probe)


MISTAKES = {
    "no key": ({"key": None}, "`key`"),
    "rounds of Hutch++": (
        {"estimator": tx.HutchPlusPlusEstimator(), "k": tx.Adaptive(rtol=0.1, max_k=16)},
        "cannot estimate this",
    ),
    "only a trace": ({"estimator": OnlyTrace()}, "`OnlyTrace` cannot estimate this"),
    "a vector": ({"estimator": Vector()}, "`Vector.sample` must return a pair"),
    "k": ({"estimator": tx.XDiagEstimator(), "k": 1}, "needs at least k=2"),
    "k of Diag++": ({"estimator": tx.DiagPlusPlusEstimator(), "k": 2}, "at least k=3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    settings, message = MISTAKES[name]
    settings = {"k": K, "key": KEYS[0]} | settings
    operator = matrix_free(jnp.asarray(hermitian(1, INDEX)), PSD)
    with pytest.raises(ValueError, match=re.escape(message)):
        tx.diagonal(operator, **settings)


def test_missing_tag():
    operator = matrix_free(jnp.asarray(hermitian(1, INDEX)))
    with pytest.raises(ValueError, match="tagged as positive or negative semidefinite"):
        tx.diagonal(operator, tx.XNysDiagEstimator(), k=K, key=KEYS[0])


def test_class_for_instance():
    operator = matrix_free(jnp.asarray(hermitian(1, INDEX)))
    with pytest.raises(TypeError, match="instance"):
        tx.diagonal(operator, tx.XDiagEstimator, k=K, key=KEYS[0])


# --- preconditioning ---


@pytest.mark.slow
def test_jacobi_preconditioner():
    """At most half the iterations of CG on a badly scaled matrix, on arrays and trees."""
    n = 60
    roots = np.logspace(0, 2, n)
    matrix = jnp.asarray(roots[:, None] * hermitian(0, np.linspace(1, 2, n)) * roots)
    structure = {"a": jnp.zeros((2, 10)), "b": jnp.zeros(40)}
    flat, unravel = jax.flatten_util.ravel_pytree(structure)
    shapes = jax.eval_shape(lambda: structure)
    solver = lx.CG(rtol=1e-8, atol=1e-8, max_steps=2000)

    @eqx.filter_jit
    def solve(matrix):
        """Without and with a preconditioner, on an array and on a tree."""

        def product(tree):
            return unravel(matrix @ jax.flatten_util.ravel_pytree(tree)[0])

        found = []
        tree = lx.FunctionLinearOperator(product, shapes, PSD)
        for operator, ones in (
            (matrix_free(matrix, PSD), flat + 1),
            (tree, unravel(flat + 1)),
        ):
            plain = lx.linear_solve(operator, ones, solver)
            jacobi = tx.jacobi_preconditioner(operator, k=12, key=KEYS[0])
            inverse = jacobi.inverse()
            assert lx.is_positive_semidefinite(inverse)
            options = {"preconditioner": inverse}
            better = lx.linear_solve(operator, ones, solver, options=options)
            found.append([(x.value, x.stats["num_steps"]) for x in (plain, better)])
        return found

    for (plain, steps), (better, fewer) in solve(matrix):
        assert fewer <= steps / 2
        for x, y in zip(*map(jax.tree.leaves, (plain, better)), strict=True):
            assert np.allclose(x, y, rtol=1e-4, atol=1e-6)


def test_jacobi_preconditioner_where_nothing_is_known():
    """1 for a zero, the standard error for an entry below it; no derivatives."""
    zero = lx.DiagonalLinearOperator(jnp.asarray([0.0, -2.0, 4.0]))
    jacobi = tx.jacobi_preconditioner(zero, k=1)
    assert np.allclose(jacobi.entries, [1, 2, 4])
    assert np.allclose(lx.diagonal(jacobi.inverse()), [1, 0.5, 0.25])
    swap = jnp.asarray(np.eye(N)[::-1].copy())
    operator = matrix_free(swap)
    found = tx.diagonal(operator, HUTCHINSON.estimator, k=4, key=KEYS[0])
    jacobi = tx.jacobi_preconditioner(operator, HUTCHINSON.estimator, k=4, key=KEYS[0])
    size = np.maximum(np.abs(found.value), found.std_err)
    assert np.allclose(jacobi.entries, size)


def test_jacobi_preconditioner_of_one_sample():
    """It has no error bar."""
    operator = matrix_free(
        hermitian(0, np.linspace(1, 2, 6)), lx.positive_semidefinite_tag
    )
    found = tx.diagonal(operator, HUTCHINSON.estimator, k=1, key=KEYS[0])
    jacobi = tx.jacobi_preconditioner(operator, HUTCHINSON.estimator, k=1, key=KEYS[0])
    assert np.allclose(jacobi.entries, np.abs(found.value), rtol=1e-12)


@pytest.mark.slow
def test_jacobi_preconditioner_elsewhere():
    """Wherever a preconditioner is taken: log-determinants, Gaussian densities, diagonals
    of inverses."""
    scales = np.logspace(0, 4, 60)
    matrix = np.diag(scales) + 0.1
    operator = matrix_free(jnp.asarray(matrix), PSD)
    jacobi = tx.jacobi_preconditioner(lx.MatrixLinearOperator(jnp.asarray(matrix)), k=1)
    settings = {"key": KEYS[0], "preconditioner": jacobi}
    log_det = np.linalg.slogdet(matrix)[1]
    solution = tx.logdet(operator, k=10, num_steps=8, **settings)
    plain = tx.logdet(operator, k=10, num_steps=8, key=KEYS[0])
    assert abs(solution.value - log_det) < 4 * solution.std_err
    assert abs(solution.value - log_det) < abs(plain.value - log_det) / 100
    residual = jnp.asarray(np.sin(np.arange(60)))
    density = tx.gaussian_log_prob(operator, residual, k=10, num_steps=8, **settings)
    expected = -0.5 * (
        residual @ np.linalg.solve(matrix, residual) + log_det + 60 * np.log(2 * np.pi)
    )
    assert abs(density.value - expected) < 4 * density.std_err
    inverse = tx.diagonal_of_function(
        operator, tx.Inverse(), k=10, num_steps=8, **settings
    )
    exact = np.diag(np.linalg.inv(matrix))
    assert np.all(np.abs(inverse.value - exact) <= 5 * inverse.std_err + 1e-10)
