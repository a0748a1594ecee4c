"""Probing by colours: values, variances, error bars, gradients, and where probes are
made. The exact answers are those of NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx


SIDE = 12
N = SIDE * SIDE
COLOURS = tx.grid_colours((SIDE, SIDE), 9, periodic=True)
SAMPLER = tx.ColouredSampler(COLOURS)
HUTCHINSON = tx.HutchinsonEstimator(SAMPLER)
SLQ = tx.SLQEstimator(SAMPLER)
KEY = jr.key(0)


def torus(shift=0.5):
    """-Laplace + shift on a torus."""
    ring = 2 * np.eye(SIDE) - np.roll(np.eye(SIDE), 1, 0) - np.roll(np.eye(SIDE), -1, 0)
    eye = np.eye(SIDE)
    return np.kron(ring, eye) + np.kron(eye, ring) + shift * np.eye(N)


def function_of(fn, matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * fn(values) @ vectors.conj().T


MATRIX = torus()
LOG = function_of(np.log, MATRIX)
HERMITIAN = LOG * np.exp(0.3j * np.subtract.outer(np.arange(N), np.arange(N)))


def psd(matrix):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), lx.positive_semidefinite_tag)


def symmetric(matrix):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)


def between(matrix, colours=COLOURS):
    """The entries between different indices of one colour."""
    colours = np.ravel(colours)
    same = (colours[:, None] == colours) & ~np.eye(len(matrix), dtype=bool)
    return np.where(same, matrix, 0)


# --- the distribution ---


@pytest.mark.parametrize("base", [tx.RademacherSampler(), tx.NormalSampler()])
def test_probes_take_the_colours_by_turns(base):
    sampler = tx.ColouredSampler(COLOURS, base)
    probes = np.asarray(sampler(KEY, N, 18))
    for i, probe in enumerate(probes.T):
        assert np.array_equal(probe != 0, COLOURS.ravel() == i % 9)
    # The probes of a sweep are parts of one probe of the base.
    sweeps = probes.reshape(N, 2, 9).sum(2) / 3
    np.testing.assert_allclose(sweeps, base(KEY, N, 2), rtol=1e-12)


def test_a_single_draw_has_the_identity_as_second_moment():
    draw = jax.jit(jax.vmap(lambda key: SAMPLER.sample(key, N, jnp.float64)))
    probes = np.asarray(draw(jr.split(KEY, 9000)))
    # 9000 draws of entries of mean square 1 and fourth moment 9: sd 0.03.
    np.testing.assert_allclose((probes**2).mean(0), 1, atol=5 * 0.03)


# --- values, variances, error bars ---


@eqx.filter_jit
def traces(matrix, keys, sweeps=2, estimator=HUTCHINSON):
    def trace(key):
        solution = tx.trace(symmetric(matrix), estimator, k=9 * sweeps, key=key)
        diagonal = tx.diagonal(symmetric(matrix), estimator, k=9 * sweeps, key=key)
        ends = solution.interval(), diagonal.interval()
        kept = {name: solution.stats[name] for name in ("gain", "freedom")}
        return solution.value, ends, diagonal.value, kept

    return jax.lax.map(trace, keys, batch_size=40)


CASES = {
    "signs": (LOG, tx.RademacherSampler(), 2),
    "normal": (LOG, tx.NormalSampler(), 1),
    "sphere": (LOG, tx.SphereSampler(), 1),
    "phases": (HERMITIAN, tx.SteinhausSampler(), 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sweeps", [2, 3])
def test_intervals_cover_and_variances_are_those_of_the_formula(name, sweeps):
    matrix, base, factor = CASES[name]
    estimator = tx.HutchinsonEstimator(tx.ColouredSampler(COLOURS, base))
    keys = jr.split(jr.key(3), 400)
    values, (ends, diagonal_ends), diagonals, stats = traces(
        matrix, keys, sweeps, estimator
    )
    exact, exact_diagonal = np.trace(matrix), np.diag(matrix)
    values = np.asarray(values)
    # 93% of 400 is 2 standard deviations below 95%.
    low, high = ends
    covered = (low.real <= exact.real) & (exact.real <= high.real)
    assert covered.mean() >= 0.93
    low, high = diagonal_ends
    slack = 1e-12
    covered = (low.real <= exact_diagonal.real + slack) & (
        exact_diagonal.real <= high.real + slack
    )
    assert covered.mean() >= 0.93
    spread = np.std(diagonals, 0) / 400**0.5
    assert (np.abs(np.mean(diagonals, 0) - exact_diagonal) < 5 * spread + 1e-12).all()
    if name in ("normal", "sphere"):  # the diagonal adds to their variance
        return
    # 400 samples of a variance: sd 7% if they were normal, more as they are skewed.
    formula = factor * np.sum(np.abs(between(matrix)) ** 2) / sweeps
    deviation = np.mean(np.abs(values - exact) ** 2)
    assert 0.65 < deviation / formula < 1.5
    assert np.abs(np.mean(values) - exact) < 4 * np.sqrt(formula / 400)
    off = np.sum(np.abs(matrix - np.diag(exact_diagonal)) ** 2) / 9
    gain = off / np.sum(np.abs(between(matrix)) ** 2)
    assert gain > 10
    assert gain / 3 < np.median(stats["gain"]) < 3 * gain


def test_few_equal_samples_of_an_entry_have_a_bar():
    # Each entry interacts with one other of its colour: its two samples are equal by
    # chance in every second draw.
    weights = np.random.default_rng(0).exponential(size=60)
    matrix = np.kron(np.diag(weights), np.ones((3, 3)))
    sampler = tx.ColouredSampler(np.arange(180) % 2)
    estimator = tx.HutchinsonEstimator(sampler)

    @jax.jit
    def interval(key):
        return tx.diagonal(symmetric(matrix), estimator, k=4, key=key).interval()

    low, high = jax.lax.map(interval, jr.split(KEY, 100))
    exact = np.diag(matrix)
    assert ((low <= exact) & (exact <= high)).mean() >= 0.93


def test_one_sweep_has_an_infinite_bar():
    solution = tx.trace(symmetric(LOG), HUTCHINSON, k=17, key=KEY)
    assert solution.matvecs == 9  # whole sweeps
    assert np.isinf(solution.std_err)
    assert solution.stats["gain"] == 0
    low, high = solution.interval()
    assert low == -np.inf
    assert high == np.inf
    assert np.isinf(tx.diagonal(symmetric(LOG), HUTCHINSON, k=9, key=KEY).std_err).all()


def test_entries_between_colours_do_not_matter():
    matrix = MATRIX - between(MATRIX)
    solution = tx.trace(symmetric(matrix), HUTCHINSON, k=18, key=KEY)
    exact = np.trace(matrix)
    assert abs(solution.value - exact) < 1e-12 * exact
    assert solution.std_err < 1e-11 * exact


# --- functions ---


@eqx.filter_jit
def functions(matrix, key, k=18):
    operator = psd(matrix)
    settings = {"k": k, "num_steps": 30, "key": key}
    return {
        "logdet": tx.logdet(operator, SLQ, **settings),
        "inverse": tx.trace_of_function(operator, tx.Inverse(), SLQ, **settings),
        "log_trace_exp": tx.log_trace_exp(operator, -1.0, SLQ, **settings),
        "difference": tx.trace_difference(
            operator, psd(1.3 * matrix), tx.Log(), SLQ, **settings
        ),
        "diagonal": tx.diagonal_of_function(
            operator, tx.Inverse(), HUTCHINSON, **settings
        ),
    }


@pytest.fixture(scope="module")
def solutions():
    return jax.lax.map(lambda key: functions(MATRIX, key), jr.split(KEY, 60))


EXACT = {
    "logdet": np.trace(LOG),
    "inverse": np.trace(np.linalg.inv(MATRIX)),
    "log_trace_exp": np.log(np.trace(function_of(lambda x: np.exp(-x), MATRIX))),
    "difference": -N * np.log(1.3),
    "diagonal": np.diag(np.linalg.inv(MATRIX)),
}


@pytest.mark.parametrize("name", EXACT)
def test_functions(solutions, name):
    solution, exact = solutions[name], EXACT[name]
    assert np.asarray(solution.successful).all()
    error = np.abs(np.asarray(solution.value) - exact)
    # Bars of two sweeps, whose quantile of Student's t is large.
    bars = np.asarray(solution.std_err) + 1e-9 * np.abs(exact)
    assert (error <= (4 if name != "diagonal" else 13) * bars).mean() >= 0.93
    plain = {
        "logdet": np.sqrt(2 / 18 * np.sum((LOG - np.diag(np.diag(LOG))) ** 2)),
        "log_trace_exp": 0.05,
    }
    if name in plain:
        assert np.sqrt(np.mean(error**2)) < plain[name] / 3


def test_adaptive_budgets_make_whole_sweeps():
    k = tx.Adaptive(rtol=2e-3, max_k=200)
    solution = tx.trace(symmetric(LOG + 4 * np.eye(N)), HUTCHINSON, k=k, key=KEY)
    assert not solution.stats["exact"]
    assert solution.matvecs % 9 == 0
    exact = np.trace(LOG) + 4 * N
    assert abs(solution.value - exact) < 4e-3 * exact
    few = tx.Adaptive(rtol=1e-9, max_k=20, min_samples=4)
    first = tx.trace(symmetric(LOG), HUTCHINSON, k=few, key=KEY, throw=False)
    assert first.matvecs == 18
    more = tx.Adaptive(rtol=1e-9, max_k=40, min_samples=4)
    resumed = tx.trace(
        symmetric(LOG), HUTCHINSON, k=more, key=KEY, state=first.state, throw=False
    )
    fixed = tx.trace(symmetric(LOG), HUTCHINSON, k=36, key=KEY)
    np.testing.assert_allclose(resumed.value, fixed.value, rtol=1e-12)
    np.testing.assert_allclose(resumed.std_err, fixed.std_err, rtol=1e-9)


def test_no_preconditioner_is_tried():
    k = tx.Adaptive(rtol=1e-2, max_k=90)
    solution = tx.logdet(psd(MATRIX + 3 * np.eye(N)), SLQ, k=k, key=KEY)
    assert "preconditioned" not in solution.method


# --- gradients, transformations, dtypes ---


def test_gradients_are_those_of_the_estimate_and_unbiased():
    def value(shift, key, call):
        matrix = jnp.asarray(MATRIX) + shift * jnp.eye(N)
        if call == "trace":
            operator = symmetric(matrix @ matrix)
            return tx.trace(operator, HUTCHINSON, k=18, key=key).value
        return tx.logdet(psd(matrix), SLQ, k=18, num_steps=25, key=key).value

    gradient = jax.jit(jax.vmap(jax.grad(value), (None, 0, None)), static_argnums=2)
    keys = jr.split(KEY, 40)
    exact = 2 * np.trace(MATRIX)
    np.testing.assert_allclose(gradient(0.0, keys, "trace").mean(), exact, rtol=1e-3)
    slopes = gradient(0.0, keys, "logdet")
    exact = np.trace(np.linalg.inv(MATRIX))
    assert abs(slopes.mean() - exact) < 4 * slopes.std() / 40**0.5 + 1e-6 * exact


def test_trees_and_leaf_traces():
    halves = {"a": COLOURS[:5], "b": COLOURS[5:]}
    sampler = tx.ColouredSampler(halves)
    estimator = tx.HutchinsonEstimator(sampler)
    structure = {
        "a": jax.ShapeDtypeStruct((5, SIDE), jnp.float64),
        "b": jax.ShapeDtypeStruct((SIDE - 5, SIDE), jnp.float64),
    }

    def mv(tree):
        flat = jnp.concatenate([tree["a"].ravel(), tree["b"].ravel()])
        image = jnp.asarray(LOG) @ flat
        return {
            "a": image[: 5 * SIDE].reshape(5, SIDE),
            "b": image[5 * SIDE :].reshape(-1, SIDE),
        }

    operator = lx.FunctionLinearOperator(mv, structure, lx.symmetric_tag)
    solution = tx.leaf_traces(operator, estimator, k=45, key=KEY)
    low, high = solution.interval()
    diagonal = np.diag(LOG)
    parts = {"a": diagonal[: 5 * SIDE].sum(), "b": diagonal[5 * SIDE :].sum()}
    for name, exact in parts.items():
        assert low[name] < exact < high[name]
        assert abs(solution.value[name] - exact) < 0.02 * abs(np.trace(LOG))
    flat = tx.trace(symmetric(LOG), HUTCHINSON, k=45, key=KEY)
    total = solution.value["a"] + solution.value["b"]
    np.testing.assert_allclose(total, flat.value, rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_single_precision_and_scales(scale):
    matrix = (scale * LOG).astype(np.float32)
    solution = tx.trace(symmetric(matrix), HUTCHINSON, k=27, key=KEY)
    assert solution.value.dtype == solution.std_err.dtype == jnp.float32
    exact = scale * np.trace(LOG)
    assert abs(solution.value - exact) < 5 * solution.std_err
    assert solution.std_err < 0.05 * exact
    assert np.isfinite(solution.stats["gain"])


@pytest.mark.parametrize("matrix", [np.zeros((N, N)), np.eye(N), np.ones((N, N))])
def test_degenerate_operators(matrix):
    solution = tx.trace(symmetric(matrix), HUTCHINSON, k=27, key=KEY)
    exact = np.trace(matrix)
    low, high = solution.interval()
    assert low <= exact <= high
    for entry in ("gain", "freedom", "skewness"):
        assert np.isfinite(solution.stats[entry])
    if matrix[0, 1] == 0:
        assert solution.std_err <= 1e-13 * max(exact, 1)


def test_as_many_probes_as_rows_give_the_exact_answer():
    solution = tx.trace(symmetric(LOG), HUTCHINSON, k=N)
    assert solution.stats["exact"]
    np.testing.assert_allclose(solution.value, np.trace(LOG), rtol=1e-12)


def test_blocks_do_not_matter():
    whole, blocks = (
        tx.logdet(psd(MATRIX), SLQ, k=36, num_steps=20, key=KEY, execution=tx.Local(size))
        for size in (128, 5)
    )
    np.testing.assert_allclose(whole.value, blocks.value, rtol=1e-12)
    np.testing.assert_allclose(whole.std_err, blocks.std_err, rtol=1e-9)


@pytest.mark.parametrize("devices", [2, 3])
def test_meshes_do_not_matter(devices):
    mesh = tx.probe_mesh(jax.devices()[:devices])
    for call in (tx.trace, tx.diagonal):
        local, sharded = (
            call(symmetric(LOG), HUTCHINSON, k=36, key=KEY, execution=execution)
            for execution in (tx.Local(), tx.Sharded(mesh))
        )
        np.testing.assert_allclose(local.value, sharded.value, rtol=1e-12)
        np.testing.assert_allclose(local.std_err, sharded.std_err, rtol=1e-9)
    settings = {"k": tx.Adaptive(rtol=1e-2, max_k=90), "key": KEY, "num_steps": 20}
    local, sharded = (
        tx.logdet(psd(MATRIX), SLQ, execution=execution, **settings)
        for execution in (tx.Local(), tx.Sharded(mesh))
    )
    np.testing.assert_allclose(local.value, sharded.value, rtol=1e-12)
    assert local.matvecs == sharded.matvecs


# --- bad input ---


def test_bad_colours():
    with pytest.raises(TypeError, match=r"`colours` must be an integer array.*float64"):
        tx.ColouredSampler(np.zeros(4))
    with pytest.raises(TypeError, match=r"integer array.*bool"):
        tx.ColouredSampler(np.zeros(4, bool))
    with pytest.raises(
        ValueError, match=r"each of them used. Found 2 colours from 0 to 2"
    ):
        tx.ColouredSampler(np.array([0, 2, 2]))
    with pytest.raises(ValueError, match=r"from -1 to 0"):
        tx.ColouredSampler(np.array([0, -1]))
    with pytest.raises(ValueError, match=r"Found none"):
        tx.ColouredSampler(np.zeros(0, int))
    with pytest.raises(TypeError, match=r"traced"):
        jax.jit(lambda c: tx.ColouredSampler(c).num_colours)(jnp.arange(3))
    with pytest.raises(TypeError, match=r"`base`"):
        tx.ColouredSampler(COLOURS, tx.RademacherSampler)  # pyright: ignore
    with pytest.raises(ValueError, match=r"`base` must draw probes of full support"):
        tx.ColouredSampler(COLOURS, SAMPLER)


def test_another_number_of_colours_than_rows():
    operator = symmetric(np.eye(40) + np.ones((40, 40)))
    with pytest.raises(ValueError, match=r"operator's 40 rows. Found 144"):
        tx.trace(operator, HUTCHINSON, k=18, key=KEY)


def test_budgets_below_a_sweep():
    with pytest.raises(ValueError, match=r"at least k=9. Found k=8.*RademacherSampler"):
        tx.trace(symmetric(LOG), HUTCHINSON, k=8, key=KEY)
    with pytest.raises(ValueError, match=r"at least k=9. Found k=8"):
        tx.logdet(psd(MATRIX), SLQ, k=8, key=KEY)
    with pytest.raises(ValueError, match=r"at least k=9"):
        tx.trace(symmetric(LOG), HUTCHINSON, k=tx.Adaptive(max_k=8), key=KEY)


@pytest.mark.parametrize(
    "make",
    [
        tx.XTraceEstimator,
        tx.XDiagEstimator,
        tx.HutchPlusPlusEstimator,
        tx.KrylovAwareEstimator,
    ],
)
def test_estimators_that_take_probes_together_refuse(make):
    with pytest.raises(ValueError, match=r"`sampler` must"):
        make(SAMPLER)


def test_densities_refuse():
    with pytest.raises(ValueError, match=r"full support"):
        tx.spectral_density(psd(MATRIX), SLQ, k=9, num_steps=5, key=KEY)
