"""`diagonal_of_function`: entries and their intervals, preconditioners, domains."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, z_score


N = 40
KEY = jr.key(0)
KEYS = jr.split(jr.key(1), 60)
SPECTRUM = np.geomspace(0.02, 5, N)
HUTCHINSON = tx.HutchinsonEstimator()


@eqx.filter_jit
def diagonal(matrix, function, key, *, k=12, num_steps=8, tags=PSD, **settings):
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False} | settings
    estimator = settings.pop("estimator", tx.AutoDiagonalEstimator())
    operator = matrix_free(matrix, tags)
    return tx.diagonal_of_function(operator, function, estimator, **settings)


def exact_diagonal(matrix, function):
    nodes, vectors = np.linalg.eigh(np.asarray(matrix, np.complex128))
    return np.abs(vectors) ** 2 @ function(nodes)


@eqx.filter_jit
def over_keys(matrix, function, keys, **settings):
    def one(key):
        found = diagonal(matrix, function, key, **settings)
        successful = found.result == tx.RESULTS.successful
        return found.value, found.interval(), found.std_err, successful

    return jax.lax.map(one, keys)


CASES: dict[str, Any] = {
    "inverse": (tx.Inverse(), lambda x: 1 / x, np.float64, {}),
    "few steps": (tx.Log(), np.log, np.float64, {"num_steps": 4}),
    "float32": (tx.Log(), np.log, np.float32, {"estimator": HUTCHINSON}),
    "complex": (tx.Exp(-1.0), lambda x: np.exp(-x), np.complex128, {"num_steps": 20}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_hold_the_entries(name):
    """Of an entry with the frequency asked for, over 60 keys and all entries, whose
    errors are alike: three points less are allowed. Real parts where it is complex."""
    function, on_nodes, dtype, settings = CASES[name]
    matrix = hermitian(0, SPECTRUM, dtype)
    exact = exact_diagonal(matrix, on_nodes)
    found = over_keys(matrix, function, KEYS, **settings)
    values, (low, high), bars, successful = jax.tree.map(np.asarray, found)
    assert np.all(successful)
    assert values.dtype == dtype
    inside = (low.real <= exact) & (exact <= high.real)
    assert np.mean(inside) > 0.92
    errors = np.sqrt(np.mean(np.abs(values - exact) ** 2))
    assert np.sqrt(np.mean(np.abs(bars) ** 2)) < 3 * errors


@eqx.filter_jit
def nystrom(matrix):
    settings = {"key": jr.key(5), "shift": 0.1}
    return tx.nystrom_preconditioner(matrix_free(matrix, PSD), 12, **settings)


def kernel(dtype=np.float64):
    """A few large eigenvalues, and others near 0.1."""
    spectrum = 0.1 * (1 + np.random.default_rng(0).uniform(0, 0.02, N))
    spectrum[:10] += np.geomspace(100, 0.1, 10)
    return hermitian(2, spectrum, dtype)


class Shift(tx.AbstractPreconditioner):
    """A multiple of the identity, which knows no diagonal."""

    scale: jax.Array
    num_matvecs: int = 0

    @property
    def size(self):
        return N

    @property
    def logdet(self):
        return N * jnp.log(self.scale)

    @property
    def largest(self):
        return self.scale

    def power(self, exponent, x):
        return self.scale**exponent * x

    def control(self, operator, value, probes, execution):
        return value


@pytest.mark.slow
def test_preconditioner():
    """Unbiased, and many times more accurate from fewer products."""
    matrix = kernel(np.complex128)
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    preconditioner = nystrom(matrix)
    settings = {"num_steps": 5, "estimator": HUTCHINSON}
    values, (low, high), _, successful = over_keys(
        matrix, tx.Inverse(), KEYS, preconditioner=preconditioner, **settings
    )
    assert np.all(successful)
    assert np.mean((low.real <= exact) & (exact <= high.real)) > 0.92
    size = np.linalg.norm(exact)
    assert z_score(np.sum(np.asarray(values), axis=1), np.sum(exact)) < 4
    settings["num_steps"] = 15
    plain, *_ = over_keys(matrix, tx.Inverse(), KEYS, **settings)
    errors = [np.linalg.norm(x - exact, axis=1) / size for x in (values, plain)]
    assert np.median(errors[0]) < np.median(errors[1]) / 10


@pytest.mark.slow
def test_known_diagonals():
    preconditioner = nystrom(kernel())
    vectors, values = np.asarray(preconditioner.vectors), preconditioner.values
    dense = (vectors * np.asarray(values)) @ vectors.T + 0.1 * np.eye(N)
    exact = np.diag(np.linalg.inv(dense))
    assert np.allclose(preconditioner.diagonal_of_power(-1.0), exact, rtol=1e-9)
    shift = Shift(jnp.array(0.5))
    assert np.allclose(shift.diagonal_of_power(-1.0), np.full(N, 2.0))
    matrix = hermitian(0, SPECTRUM)
    settings = {"num_steps": 20, "estimator": HUTCHINSON}
    found = diagonal(matrix, tx.Inverse(), KEY, preconditioner=shift, **settings)
    plain = diagonal(matrix, tx.Inverse(), KEY, **settings)
    assert np.allclose(found.value, plain.value, rtol=1e-8)


OUTSIDE = {
    "log": (tx.Log(), tx.RESULTS.not_positive_definite, tx.AutoDiagonalEstimator()),
    "callable": (jnp.sqrt, tx.RESULTS.outside_domain, HUTCHINSON),
}


@pytest.mark.slow(but="callable")
@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_the_domain(name):
    """Estimated and exactly; products are NaN."""
    function, result, estimator = OUTSIDE[name]
    matrix = hermitian(0, SPECTRUM) - np.eye(N)
    for k in (12, N):
        found = diagonal(matrix, function, KEY, k=k, estimator=estimator)
        assert found.result == result
    operator = matrix_free(jnp.asarray(matrix), lx.symmetric_tag)
    product = jax.jit(lambda v: tx.function_of(operator, function, num_steps=8).mv(v))
    assert np.all(np.isnan(product(np.ones(N))))


@pytest.mark.slow
def test_outside_of_the_domain_for_few_probes():
    """Signs see the mean of the eigenvalues in one step, which is positive; some normal
    vectors see the negative one. And what is not finite is told apart."""
    matrix = np.diag(np.append(-N / 2, np.ones(N - 1)))
    estimator = tx.HutchinsonEstimator(tx.NormalSampler())
    settings = {"num_steps": 1, "k": 30, "estimator": estimator}
    found = diagonal(matrix, tx.Log(), KEY, **settings)
    assert np.all(found.stats["ritz_values"] > 0.4)
    assert found.result == tx.RESULTS.not_positive_definite
    found = diagonal(np.nan * matrix, tx.Log(), KEY, **settings)
    assert found.result == tx.RESULTS.nonfinite_product


@pytest.mark.slow
def test_ill_conditioned_in_float32():
    """Errors of rounding are in the interval, or the call is flagged, as it is not for a
    condition number of 1e3."""
    for smallest in (1e-3, 1e-5, 1e-8):
        spectrum = np.geomspace(smallest, 1, N)
        matrix = hermitian(3, spectrum, np.float32)
        exact = exact_diagonal(matrix, lambda x: 1 / x)
        found = diagonal(matrix, tx.Inverse(), KEY, num_steps=N)
        low, high = found.interval()
        inside = np.mean((low <= exact) & (exact <= high))
        flagged = bool(found.result != tx.RESULTS.successful)
        assert inside > 0.9 or flagged
        assert not (flagged and smallest == 1e-3)


STEEP = {
    "inverse": (tx.Inverse(1e-11), lambda x: 1 / (x + 1e-11)),
    "root": (tx.Power(0.5), np.sqrt),
    "entropy": (tx.Entropy(), lambda x: -x * np.log(np.maximum(x, 1e-300))),
}


@pytest.mark.slow
@pytest.mark.parametrize("k", [12, N])
@pytest.mark.parametrize("name", STEEP)
def test_functions_that_are_steep_at_zero(name, k):
    """The interval of all entries, or that of an exact answer, counts eigenvalues that
    the run has not resolved, and those that float32 hides, or the call is flagged."""
    function, on_nodes = STEEP[name]
    turned = np.linalg.eigh(hermitian(0, SPECTRUM))[1]
    for eigenvalues in (0.9 ** np.arange(N), 0.5 ** np.arange(N), np.eye(N)[0] + 1e-9):
        for vectors in (np.eye(N), turned):
            matrix = ((vectors * eigenvalues) @ vectors.T).astype(np.float32)
            exact = vectors**2 @ on_nodes(eigenvalues)
            _, ends, _, successful = over_keys(matrix, function, KEYS[:10], k=k)
            low, high = np.asarray(ends)
            inside = np.mean((low <= exact) & (exact <= high), axis=1)
            assert np.mean(np.where(successful, inside, 1)) > 0.93


@pytest.mark.slow
def test_function_that_is_steep_beyond_the_ritz_values():
    """All of the diagonal comes from eigenvalues that too few steps do not see."""
    matrix = hermitian(0, np.linspace(100, 1e4, N))
    exact = exact_diagonal(matrix, lambda x: np.exp(-x))
    value, ends, _, _ = over_keys(matrix, tx.Exp(-1.0), KEYS[:10])
    low, high = np.asarray(ends)
    assert np.all(np.abs(value - exact) > 0.1 * exact)
    assert np.all((low <= exact) & (exact <= high))


def plane(noise):
    """A smooth kernel of 300 points in the plane."""
    x = np.random.default_rng(1).uniform(size=(300, 2))
    distances = np.sum((x[:, None] - x) ** 2, axis=2)
    return np.exp(-distances / (2 * 0.2**2)) + noise * np.eye(300)


def geometric(condition, n):
    return hermitian(0, np.geomspace(1 / condition, 1, n))


def graph(n, shift):
    """The Laplacian of a random graph of degree 8, whose constant vector alone is near
    zero."""
    generator, neighbours = np.random.default_rng(3), np.zeros((n, n))
    for _ in range(4):
        to = generator.permutation(n)
        neighbours[np.arange(n), to] += 1
        neighbours[to, np.arange(n)] += 1
    return np.diag(np.sum(neighbours, axis=1)) - neighbours + shift * np.eye(n)


def penalty(n):
    """Second differences: two eigenvalues are zero."""
    differences = np.diff(np.eye(n), 2, axis=0)
    return differences.T @ differences


# Most of the diagonal comes from eigenvalues that the steps do not see. The steps are
# chosen, or their number is given.
UNSEEN: dict[str, Any] = {
    "geometric": (geometric(1e6, 300), {}),
    "kernel": (plane(1e-5), {}),
    "penalty": (penalty(300), {}),
    "graph": (graph(300, 1e-4), {}),
    "geometric, 8 steps": (geometric(1e4, 100), {"num_steps": 8}),
    "graph, 8 steps": (graph(100, 1e-4), {"num_steps": 8}),
    "small, 8 steps": (geometric(1e6, 60), {"num_steps": 8}),
    "log, 8 steps": (geometric(1e6, 60), {"num_steps": 8, "function": tx.Log()}),
    "preconditioner, rank 5": (plane(1e-3), {"num_steps": 8, "rank": 5}),
    "preconditioner, rank 20": (plane(1e-3), {"num_steps": 8, "rank": 20}),
}
CHOSEN_AND_SEEN = ["graph"]


@eqx.filter_jit
def over_keys_with_errors(matrix, keys, rank=None, function=tx.Inverse(), **settings):
    """Values, error bars, intervals of 95% and of 99.9%, and results."""
    if rank is not None:
        made = {"key": jr.key(5), "shift": 1e-3}
        operator = matrix_free(matrix, PSD)
        settings["preconditioner"] = tx.nystrom_preconditioner(operator, rank, **made)
    settings = {"k": 10, "num_steps": tx.AdaptiveSteps(64)} | settings

    def one(key):
        found = diagonal(matrix, function, key, estimator=HUTCHINSON, **settings)
        intervals = found.interval(), found.interval(0.999)
        return found.value, found.std_err, intervals, found.result

    return jax.lax.map(one, keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.usefixtures("without_exact_answers")
def test_eigenvalues_that_the_steps_do_not_see(name):
    """Successful calls hold the entries in their intervals, over 20 keys. Steps that were
    chosen and are too few are told; those that are enough are not, and their errors are
    within eight error bars."""
    matrix, settings = UNSEEN[name]
    on_nodes = np.log if "function" in settings else lambda x: 1 / x
    nodes, vectors = np.linalg.eigh(matrix)
    exact = vectors**2 @ on_nodes(np.maximum(nodes, 1e-300))
    found = over_keys_with_errors(matrix, KEYS[:20], **settings)
    value, bar, intervals, result = jax.tree.map(np.asarray, found)
    successful = np.asarray(result == tx.RESULTS.successful)
    for (low, high), least in zip(intervals, (0.93, 0.995), strict=True):
        inside = (low <= exact) & (exact <= high)
        assert np.mean(inside[successful]) > least if np.any(successful) else True
    if "num_steps" in settings:
        assert np.all(successful)
    elif name in CHOSEN_AND_SEEN:
        assert np.all(successful)
        assert np.mean(np.abs(value - exact) < 8 * bar) > 0.999
    else:
        assert np.all(result == tx.RESULTS.too_few_steps)


GRAM = (lambda x: x @ x.T)(np.random.default_rng(0).standard_normal((200, 300)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shifts"), [(np.float64, [1e-10]), (np.float32, [1e-3, 1e-8])]
)
def test_small_shifts_of_the_inverse(dtype, shifts):
    """At a condition number of 93 they change nothing, and intervals are as wide as the
    bars say."""
    matrix = GRAM.astype(dtype)
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    for shift in shifts:
        function = tx.Inverse(jnp.asarray(shift, dtype))
        found = over_keys_with_errors(matrix, KEYS[:20], function=function)
        value, bar, intervals, result = jax.tree.map(np.asarray, found)
        assert np.all(result == tx.RESULTS.successful)
        low, high = intervals[0]
        assert np.mean((low <= exact) & (exact <= high)) > 0.93
        assert np.median(high - low) / 2 < 5 * np.median(np.abs(value - exact))
        assert np.all(np.abs(value - exact) < 8 * bar)


@pytest.mark.slow
def test_steps_that_were_given_make_useful_intervals():
    """Twelve are enough to find that the spectrum ends."""
    matrix = hermitian(0, np.linspace(0.1, 1, 100))
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    found = over_keys_with_errors(matrix, KEYS[:20], k=90, num_steps=12)
    value, _, ((low, high), _), _ = jax.tree.map(np.asarray, found)
    assert np.mean((low <= exact) & (exact <= high)) > 0.93
    assert np.median(high - low) / 2 < 5 * np.median(np.abs(value - exact))


@pytest.mark.slow
def test_bars_count_the_error_of_chosen_steps():
    """Nearly all of the diagonal is that of one eigenvector, so the error of sampling is
    far below that of the steps."""
    settings = {"num_steps": tx.AdaptiveSteps(), "k": 10}
    found = diagonal(graph(100, 1e-4), tx.Inverse(), KEY, **settings)
    assert found.result == tx.RESULTS.successful
    assert np.all(found.std_err >= found.stats["truncation_error"])


@jax.jit
def slopes_in_the_scale(matrix, keys):
    """Of the trace, by few and by all steps, with the residual of each."""

    def one(key, num_steps):
        def value(scale):
            settings = {"num_steps": num_steps, "k": 10, "estimator": HUTCHINSON}
            found = diagonal(scale * matrix, tx.Inverse(), key, **settings)
            return jnp.sum(found.value), found.stats["gradient_residual"]

        return jax.grad(value, has_aux=True)(1.0)

    return [jax.lax.map(lambda key: one(key, s), keys) for s in (8, 60)]  # noqa: B023


@pytest.mark.slow
def test_residual_of_the_derivative():
    """It shows where the Krylov space misses the derivative, and where not."""
    matrix = geometric(1e4, 60)
    exact = -np.sum(1 / np.geomspace(1e-4, 1, 60))
    few, all_steps = slopes_in_the_scale(matrix, KEYS[:20])
    assert np.all(few[0] > 0.5 * exact)
    assert np.all(few[1] > 1)
    assert z_score(all_steps[0], exact) < 4
    assert np.all(all_steps[1] < 1e-6)
    assert diagonal(matrix, tx.Inverse(), KEY, k=60).stats["gradient_residual"] == 0


@jax.jit
def slopes(matrix, along, weights, keys):
    def value(t, k, key):
        found = diagonal(matrix + t * along, tx.Log(), key, k=k, num_steps=N)
        return jnp.sum(weights * found.value)

    estimates = jax.lax.map(lambda key: jax.grad(value)(0.0, 12, key), keys)
    return (
        jax.grad(value)(0.0, N, None),
        jax.jvp(lambda t: value(t, N, None), (0.0,), (1.0,))[1],
        estimates,
    )


@pytest.mark.slow
def test_derivative_in_the_operator():
    """Exactly, and unbiased: z-test over 60 keys, false alarm 6e-5. Some eigenvalues are
    alike."""
    generator = np.random.default_rng(4)
    spectrum = np.append(np.ones(5), np.geomspace(0.1, 3, N - 5))
    matrix, along = hermitian(0, spectrum), hermitian(7, np.linspace(-1, 1, N))
    weights, h = generator.standard_normal(N), 1e-5
    ends = [exact_diagonal(matrix + t * along, np.log) @ weights for t in (h, -h)]
    exact = (ends[0] - ends[1]) / (2 * h)
    reverse, forward, estimates = slopes(matrix, along, weights, KEYS)
    assert np.isclose(reverse, exact, rtol=1e-6)
    assert np.isclose(forward, exact, rtol=1e-6)
    assert z_score(estimates, exact) < 4


@pytest.mark.slow
def test_derivative_in_the_function():
    matrix = hermitian(0, np.linspace(0.1, 2, N))

    @jax.jit
    def slope(scale):
        value = lambda s: jnp.sum(diagonal(matrix, tx.Exp(s), KEY, k=N).value)  # noqa: E731
        step = 1e-5
        difference = (value(scale + step) - value(scale - step)) / (2 * step)
        return jax.grad(value)(scale), difference

    assert np.isclose(*slope(-0.7), rtol=1e-5)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        jax.grad(
            jax.grad(lambda t: jnp.sum(diagonal(t * matrix, tx.Exp(), KEY, k=N).value))
        )(1.0)


STEPS = tx.AdaptiveSteps(max_steps=30)


@eqx.filter_jit
def with_slope(matrix, scale, key, num_steps):
    """The solution for a multiple of the matrix, and the derivative of the sum."""

    def total(scale):
        settings = {"num_steps": num_steps, "estimator": HUTCHINSON}
        found = diagonal(scale * matrix, tx.Exp(scale), key, **settings)
        return jnp.sum(found.value), found

    slope, found = jax.grad(total, has_aux=True)(scale)
    return slope, found


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1.5, 4.0, 20.0])
def test_chosen_steps_are_enough_and_few(largest):
    """Their error, beside dense arithmetic, is below a tenth of that of k signs, and that
    of a third of them is not."""
    matrix, k = hermitian(0, np.linspace(-1, largest, N)), 12
    _, found = with_slope(matrix, np.array(1.0), KEY, STEPS)
    steps = int(found.stats["num_steps"])
    assert found.stats["num_matvecs"] == (k + 2) * steps
    nodes, vectors = np.linalg.eigh(matrix)
    function = (vectors * np.exp(nodes)) @ vectors.T
    variation = np.sum(function**2) - np.trace(function) ** 2 / N
    target = np.sqrt(variation / (N * k))
    signs = np.sign(np.random.default_rng(0).standard_normal((20, N)))

    def error(steps):
        errors = []
        for z in signs:
            basis = krylov_vectors(matrix, z, steps)
            small, inside = np.linalg.eigh(basis.T @ matrix @ basis)
            first = (inside * np.exp(small)) @ (inside.T @ (basis.T @ z))
            errors.append(basis @ first - function @ z)
        return np.sqrt(np.mean(np.square(errors)))

    assert error(steps) < 0.1 * target
    assert error(steps // 3) > 0.1 * target
    assert found.stats["truncation_error"] < 0.15 * target
    exact = np.diag(function)
    assert np.linalg.norm(found.value - exact) < 2 * np.sqrt(N) * target


def krylov_vectors(matrix, vector, steps):
    """Orthonormal, since powers would not be independent in floating point."""
    vectors = [vector / np.linalg.norm(vector)]
    for _ in range(steps - 1):
        following = matrix @ vectors[-1]
        for _ in range(2):
            for v in vectors:
                following = following - (v @ following) * v
        vectors.append(following / np.linalg.norm(following))
    return np.stack(vectors, axis=1)


@pytest.mark.slow
def test_value_and_derivative_are_those_of_as_many_steps():
    matrix, scale = hermitian(0, np.linspace(-1, 4, N)), np.array(1.1)
    slope, found = with_slope(matrix, scale, KEY, STEPS)
    steps = int(found.stats["num_steps"])
    expected_slope, expected = with_slope(matrix, scale, KEY, steps)
    assert np.allclose(found.value, expected.value, rtol=1e-10)
    assert np.isclose(slope, expected_slope, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_chosen_steps_reach_a_tolerance_or_tell():
    """A tolerance for which signs are enough; two steps are not."""
    matrix = hermitian(0, np.geomspace(0.3, 2, N))
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    adaptive = tx.Adaptive(rtol=0.25, max_k=38, round_size=6)
    settings = {"k": adaptive, "estimator": HUTCHINSON}
    found = diagonal(matrix, tx.Inverse(), KEY, num_steps=STEPS, **settings)
    assert found.result == tx.RESULTS.successful
    assert 4 < found.stats["num_steps"] < 20
    size = np.linalg.norm(exact)
    assert np.linalg.norm(found.value - exact) < 0.25 * size
    assert found.stats["truncation_error"] < 0.04 * size / np.sqrt(N)
    few = tx.AdaptiveSteps(max_steps=2)
    found = diagonal(matrix, tx.Inverse(), KEY, num_steps=few, **settings)
    assert found.stats["num_steps"] == 2
    assert found.result == tx.RESULTS.too_few_steps


@pytest.mark.slow
def test_preconditioner_makes_the_chosen_steps_few():
    matrix = kernel()
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    settings = {"preconditioner": nystrom(matrix), "num_steps": STEPS}
    found = diagonal(matrix, tx.Inverse(), KEY, estimator=HUTCHINSON, **settings)
    assert found.stats["num_steps"] == 4
    assert np.linalg.norm(found.value - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "k"), [(HUTCHINSON, 16), (tx.XDiagEstimator(), 24)]
)
def test_tolerance_is_of_the_whole_diagonal(estimator, k):
    """Not of the part that is sampled, for which the budget would be too small: here ten
    samples are enough."""
    adaptive = tx.Adaptive(rtol=0.03, max_k=32, round_size=8)
    settings = {"k": adaptive, "num_steps": 5, "preconditioner": nystrom(kernel())}
    found = diagonal(kernel(), tx.Inverse(), KEY, estimator=estimator, **settings)
    assert found.result == tx.RESULTS.successful
    assert found.stats["num_matvecs"] == (k + 1) * 5 + 12
    exact = exact_diagonal(kernel(), lambda x: 1 / x)
    assert np.linalg.norm(found.value - exact) < 0.03 * np.linalg.norm(exact)


def with_some_alone(size, few):
    """A tridiagonal operator with eigenvalues from 0.2 to 3.8, and a `few` entries of a
    diagonal before it."""

    def mv(v):
        rest = v[len(few) :]
        beside = jnp.pad(rest[1:], (0, 1)) + jnp.pad(rest[:-1], (1, 0))
        return jnp.append(jnp.asarray(few) * v[: len(few)], 2 * rest + 0.9 * beside)

    structure = jax.ShapeDtypeStruct((size,), float)
    return lx.FunctionLinearOperator(mv, structure, PSD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "few", "num_steps"),
    [(300, [0.04, 0.06, 0.1], 10), (30000, [0.1], tx.AdaptiveSteps())],
)
def test_entries_far_less_accurate_than_others(size, few, num_steps):
    """They are in their intervals, although they are too few to show in a mean over all
    entries; at ten steps the smallest one has half of its value. More steps are made for
    them if the data choose."""
    operator = with_some_alone(size, few)
    settings = {"k": 20, "num_steps": num_steps, "throw": False}

    @jax.jit
    def intervals(keys):
        def one(key):
            found = tx.diagonal_of_function(
                operator, tx.Inverse(), HUTCHINSON, key=key, **settings
            )
            low, high = found.interval()
            return found.value[: len(few)], low[: len(few)], high[: len(few)]

        return jax.lax.map(one, keys)

    values, low, high = map(np.asarray, intervals(KEYS[:2]))
    exact = 1 / np.asarray(few)
    assert np.all((low <= exact) & (exact <= high))
    if isinstance(num_steps, tx.AdaptiveSteps):
        assert np.all(np.abs(values - exact) < 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_tolerance_of_the_largest_entry():
    """One that has not converged is told, by a norm that sees it."""
    largest = lambda tree: jax.tree.reduce(  # noqa: E731
        jnp.maximum, jax.tree.map(lambda x: jnp.max(jnp.abs(x)), tree)
    )
    adaptive = tx.Adaptive(atol=1.0, max_k=40, round_size=20, norm=largest)
    settings = {"key": KEY, "throw": False, "k": adaptive}

    @eqx.filter_jit
    def result(steps):
        return tx.diagonal_of_function(
            with_some_alone(3000, [0.1]),
            tx.Inverse(),
            HUTCHINSON,
            num_steps=tx.AdaptiveSteps(steps),
            **settings,
        ).result

    assert result(8) == tx.RESULTS.too_few_steps
    assert result(40) == tx.RESULTS.successful


@pytest.mark.slow
def test_products_are_counted():
    calls, matrix = [], kernel()

    def on_host(v):
        calls.append(v.shape)
        return matrix @ v

    structure = jax.ShapeDtypeStruct((N,), float)
    product = lambda v: jax.pure_callback(  # noqa: E731
        on_host, structure, v, vmap_method="sequential"
    )
    operator = lx.FunctionLinearOperator(product, structure, PSD)
    settings = {"k": 6, "num_steps": 4, "key": KEY, "preconditioner": nystrom(matrix)}
    found = tx.diagonal_of_function(operator, tx.Inverse(), **settings)
    found.value.block_until_ready()
    assert found.stats["num_matvecs"] == len(calls) + 12 == 7 * 4 + 12


@pytest.mark.slow
def test_trees_tolerances_and_meshes():
    matrix = hermitian(0, np.linspace(1, 2, N))
    structure = {"a": jax.ShapeDtypeStruct((2, 3), float)}
    structure["b"] = jax.ShapeDtypeStruct((N - 6,), float)

    def mv(tree):
        out = matrix @ jnp.append(tree["a"].reshape(-1), tree["b"])
        return {"a": out[:6].reshape(2, 3), "b": out[6:]}

    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    adaptive = tx.Adaptive(rtol=0.15, max_k=38, round_size=6)
    settings = {"k": adaptive, "num_steps": STEPS, "estimator": HUTCHINSON}
    flat = diagonal(matrix, tx.Inverse(), KEY, **settings)
    assert flat.result == tx.RESULTS.successful
    execution = tx.Sharded(tx.probe_mesh())
    found = tx.diagonal_of_function(
        operator, tx.Inverse(), key=KEY, execution=execution, **settings
    )
    exact = exact_diagonal(matrix, lambda x: 1 / x)
    assert np.linalg.norm(flat.value - exact) < 0.15 * np.linalg.norm(exact)
    for name in ("value", "std_err"):
        tree = getattr(found, name)
        joined = np.append(tree["a"].reshape(-1), tree["b"])
        assert np.allclose(joined, getattr(flat, name), rtol=1e-8)
    low, high = found.interval()
    assert low["a"].shape == high["a"].shape == (2, 3)


OPERATOR = matrix_free(jnp.asarray(kernel()), PSD)
SETTINGS = {"k": 6, "num_steps": 3, "key": KEY}


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        ({"operator": matrix_free(jnp.eye(N))}, ValueError, "must be Hermitian"),
        ({"function": 3}, TypeError, "`function`"),
        ({"num_steps": 0}, ValueError, "`num_steps` must be at least 1"),
        ({"num_steps": 2.5}, TypeError, "`num_steps` must be an integer"),
        ({"key": None}, ValueError, "`key` is missing"),
        ({"estimator": tx.SLQEstimator()}, TypeError, "`estimator` must be an instance"),
        ({"preconditioner": 3}, TypeError, "`preconditioner` must be an instance"),
        (
            {"function": tx.Log(), "preconditioner": Shift(jnp.ones(()))},
            ValueError,
            r"is for `traceax.Inverse\(\)` without a shift.*Found `Log`",
        ),
        (
            {"function": tx.Inverse(1.0), "preconditioner": Shift(jnp.ones(()))},
            ValueError,
            "without a shift",
        ),
        (
            {
                "operator": matrix_free(jnp.eye(3), PSD),
                "preconditioner": Shift(jnp.ones(())),
            },
            ValueError,
            "must be of the size of `operator`. Found 40 and 3",
        ),
    ],
)
def test_misuse(change, exception, message):
    arguments = {"operator": OPERATOR, "function": tx.Inverse()} | SETTINGS | change
    with pytest.raises(exception, match=message):
        tx.diagonal_of_function(**arguments)


class Jacobi(tx.AbstractPreconditioner):
    """P is a diagonal."""

    entries: jax.Array
    num_matvecs: int = 0

    @property
    def size(self):
        return len(self.entries)

    @property
    def logdet(self):
        return jnp.sum(jnp.log(self.entries))

    @property
    def largest(self):
        return jnp.max(self.entries)

    def power(self, exponent, vector):
        return self.entries**exponent * vector

    def diagonal_of_power(self, exponent):
        return self.entries**exponent

    def control(self, operator, value, probes, execution):
        return value


@pytest.mark.slow
def test_a_preconditioner_is_constant_wherever_it_is_made():
    """With derivatives in a part of it, the derivative of the inverse would be zero."""
    matrix = np.diag(np.linspace(1, 5, N)) + 0.01 * hermitian(0, np.linspace(-1, 1, N))

    @jax.jit
    def slopes(scale, matrix):
        def values(scale):
            settings = {"k": 12, "num_steps": 10, "key": KEY, "estimator": HUTCHINSON}
            settings["preconditioner"] = Jacobi(scale * jnp.diagonal(matrix))
            return diagonal(scale * matrix, tx.Inverse(), **settings).value

        return values(scale), jax.jvp(values, (scale,), (jnp.ones(()),))[1]

    value, slope = slopes(jnp.asarray(2.0), matrix)
    truth = np.diag(np.linalg.inv(2 * matrix))
    assert np.allclose(value, truth, rtol=1e-2)
    assert np.allclose(slope, -truth / 2, rtol=1e-1)
