"""What several operators are told from the same probes: differences of traces of
functions, and Frobenius products of pairs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, z_score


N = 24
KEY = jr.key(0)
KEYS = jr.split(jr.key(1), 400)
SPECTRUM = np.geomspace(0.05, 5, N)
LOG = {"function": tx.Log(), "tags": PSD}
EXP = {"function": tx.Exp(-1.0), "tags": PSD}


def pair(dtype=np.float64, seed=0):
    """Two that are alike."""
    first = hermitian(seed, SPECTRUM, dtype)
    return first, (first + 0.02 * hermitian(seed + 1, SPECTRUM, dtype)).astype(dtype)


@eqx.filter_jit
def difference(first, second, key, *, function, tags, k=8, num_steps=12, **settings):
    a, b = matrix_free(first, tags), matrix_free(second, tags)
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False} | settings
    return tx.trace_difference(a, b, function, **settings)


@eqx.filter_jit
def alone(matrix, key, *, function, tags, k=8, num_steps=12, **settings):
    operator = matrix_free(matrix, tags)
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False} | settings
    return tx.trace_of_function(operator, function, **settings)


@jax.jit
def over_keys(first, second, keys):
    matrices = jnp.stack([first, second])

    def one(key):
        found = difference(first, second, key, num_steps=8, **LOG)
        bar = lambda matrix: alone(matrix, key, num_steps=8, **LOG).std_err  # noqa: E731
        return found.value, found.std_err, found.interval(), jax.lax.map(bar, matrices)

    return jax.lax.map(one, keys)


def log_determinant(matrix):
    return np.linalg.slogdet(np.asarray(matrix, np.float64))[1]


@pytest.mark.slow
def test_interval_covers_and_is_narrow():
    """The 95% interval over 400 keys at 8 probes: at least 0.93, which one that covers
    0.95 misses once in 26; bars a tenth of those of independent probes."""
    first, second = pair()
    exact = log_determinant(first) - log_determinant(second)
    values, bars, (low, high), single = over_keys(first, second, KEYS)
    assert np.mean((low <= exact) & (exact <= high)) >= 0.93
    assert z_score(values, exact) < 4
    assert np.sqrt(np.mean(bars**2)) > np.std(values)
    independent = np.hypot(*np.median(single, axis=0))
    assert np.median(bars) < 0.1 * independent


CASES = {
    "float32": (LOG, np.float32),
    "complex, no bracket": (EXP, np.complex128),
    "complex, general": ({"function": tx.Exp(-1j), "tags": ()}, np.complex128),
}


@eqx.filter_jit
def three_calls(first, second, key, **settings):
    """The difference, and those of each alone, stacked."""

    def parts(solution):
        return solution.value, solution.result == tx.RESULTS.successful, solution.stats

    def single(matrix):
        return parts(alone(matrix, key, **settings))

    found = parts(difference(first, second, key, **settings))
    return found, jax.lax.map(single, jnp.stack([first, second]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_is_the_difference_of_two_calls(name):
    """Samples, ends of brackets and of intervals without sampling."""
    settings, dtype = CASES[name]
    calls = jax.device_get(three_calls(*pair(dtype), KEY, **settings))
    (value, successful, stats), (values, all_successful, stacked) = calls
    assert np.all([successful, *all_successful])
    assert value.dtype == values.dtype
    tolerance = 1e-4 if dtype == np.float32 else 1e-9
    close = {"rtol": tolerance, "atol": tolerance}
    assert np.allclose(value, values[0] - values[1], **close)
    a, b = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in (0, 1))
    assert np.allclose(stats["samples"], a["samples"] - b["samples"], **close)
    assert stats["num_matvecs"] == a["num_matvecs"] == 8 * 12
    ends = [x["proven_bounds"][:, 0] for x in (stats, a, b)]
    width, *widths = (high - low for low, high in ends)
    assert 0 <= width <= sum(widths) + tolerance
    if "sample_brackets" in a:
        ends = a["sample_brackets"] - b["sample_brackets"][:, ::-1]
        assert np.allclose(stats["sample_brackets"], ends, **close)


@pytest.mark.parametrize("settings", [LOG, EXP | {"tags": ()}], ids=["log", "general"])
def test_exact(settings):
    found = difference(*pair(), None, k=N, **settings)
    function = np.log if settings is LOG else lambda x: np.exp(-x)
    a, b = (np.sum(function(np.linalg.eigvalsh(matrix))) for matrix in pair())
    assert np.allclose(found.value, a - b, rtol=1e-11)
    assert found.stats["num_matvecs"] == N
    low, high = found.interval()
    assert 0 < found.std_err < 1e-10
    assert 0 < high - low < 1e-9


def test_rounding_that_two_evaluations_do_not_show():
    """Zero entries are not perturbed, so both evaluations of exp(-0) are equal."""
    zeros = np.zeros((N, N))
    found = difference(zeros, zeros, None, k=N, **(EXP | {"tags": ()}))
    assert found.result == tx.RESULTS.successful
    assert abs(found.value) <= found.std_err < 1e-13
    assert found.std_err > 0


@jax.jit
def preconditioned_over_keys(first, second, keys):
    """One that is made from the first, with each key anew."""

    def value(weight, key):
        a = matrix_free(first, PSD)
        settings = {"rank": 12, "key": jr.fold_in(key, 1), "shift": 0.05}
        preconditioner = tx.nystrom_preconditioner(a, **settings)
        settings = {"preconditioner": preconditioner, **LOG}
        found = difference(first, second + weight * first, key, **settings)
        stats = found.stats["num_matvecs"], jnp.ptp(found.stats["bracket"])
        return found.value, (found.value, found.std_err, *stats)

    return jax.lax.map(lambda key: jax.grad(value, has_aux=True)(0.0, key), keys)


@pytest.mark.slow
def test_preconditioner():
    """Value and derivative in the second operator without bias over 400 keys, a bar that
    holds, and brackets of a hundredth: the determinant of P cancels."""
    first, second = pair()
    exact = log_determinant(first) - log_determinant(second)
    slopes, found = preconditioned_over_keys(first, second, KEYS)
    values, bars, counts, widths = found
    assert z_score(values, exact) < 4
    assert z_score(slopes, -np.trace(np.linalg.solve(second, first))) < 4
    assert np.mean(np.abs(values - exact) < 2.4 * bars) >= 0.93
    assert np.all(counts == 8 * 12 + 12)
    plain = difference(first, second, KEY, **LOG)
    assert np.median(widths) < 0.01 * np.ptp(plain.stats["bracket"])


def test_derivatives_in_both():
    """Those of two calls with half of the columns."""
    matrices = pair()
    gradient = tx.LanczosGradient(columns=2)

    @jax.jit
    def slopes(matrices):
        one = lambda x: alone(x, KEY, gradient=gradient, **LOG).value  # noqa: E731
        both = lambda pair: difference(*pair, KEY, **LOG).value  # noqa: E731
        return jax.grad(both)(matrices), jax.lax.map(jax.grad(one), jnp.stack(matrices))

    together, apart = slopes(matrices)
    for found, sign, expected in zip(together, (1, -1), apart, strict=True):
        assert np.allclose(found, sign * expected, rtol=1e-9, atol=1e-11)


def test_equal_operators():
    first, _ = pair()
    found = difference(first, first, KEY, **LOG)
    assert found.result == tx.RESULTS.successful
    assert found.value == 0
    assert 0 < found.std_err < 1e-10


@pytest.mark.slow
def test_tolerance_of_the_difference():
    """On a mesh the same."""
    matrices = [np.kron(np.eye(8), x) for x in pair()]
    exact = log_determinant(matrices[0]) - log_determinant(matrices[1])
    settings = {"k": tx.Adaptive(atol=1.0, max_k=96, round_size=8), **LOG}
    found = difference(*matrices, KEY, **settings)
    assert found.result == tx.RESULTS.successful
    assert abs(found.value - exact) < 1.0
    assert found.stats["num_matvecs"] <= 64 * 12
    mesh = tx.Sharded(tx.probe_mesh())
    split = difference(*matrices, KEY, execution=mesh, **settings)
    assert np.allclose(split.value, found.value, rtol=1e-10)
    assert np.allclose(split.std_err, found.std_err, rtol=1e-8)


@jax.jit
def against_several(first, others):
    one = lambda other: difference(first, other, KEY, **LOG).value  # noqa: E731
    return jax.vmap(one)(others), jax.lax.map(one, others)


@pytest.mark.slow
def test_vmap():
    first, second = pair()
    together, one_by_one = against_several(first, np.stack([second, first + np.eye(N)]))
    assert np.allclose(together, one_by_one, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("k", [4, N])
def test_domain(order, k):
    """Of each, whatever the scale of the other."""
    first, second = pair()
    wrong = first - np.eye(N)
    found = difference(*(second * 1e12, wrong)[::order], KEY, k=k, **LOG)
    assert found.result == tx.RESULTS.not_positive_definite
    found = difference(*(second * 1e12, first * 1e-12)[::order], KEY, k=k, **LOG)
    assert found.result == tx.RESULTS.successful


@pytest.mark.slow
def test_tree():
    """An operator on a PyTree is the one on joined vectors."""
    first, second = (jnp.asarray(x) for x in pair())
    structure = {"a": jax.ShapeDtypeStruct((2, 3), float)}
    structure["b"] = jax.ShapeDtypeStruct((N - 6,), float)

    def on_tree(matrix):
        def mv(tree):
            out = matrix @ jnp.append(tree["a"].reshape(-1), tree["b"])
            return {"a": out[:6].reshape(2, 3), "b": out[6:]}

        return lx.FunctionLinearOperator(mv, structure, PSD)

    settings = {"k": 8, "num_steps": 12, "key": KEY}
    trees = on_tree(first), on_tree(second)
    found = tx.trace_difference(*trees, tx.Log(), **settings)
    expected = difference(first, second, KEY, **LOG)
    assert np.allclose(found.value, expected.value, rtol=1e-9)
    found = tx.frobenius_products(trees, k=8, key=KEY)
    assert np.allclose(found.value, products((first, second), KEY, k=8).value, rtol=1e-12)


def counting(matrix, calls):
    def on_host(v):
        calls.append(v.shape)
        return matrix @ v

    structure = jax.ShapeDtypeStruct((N,), float)
    product = lambda v: jax.pure_callback(  # noqa: E731
        on_host, structure, v, vmap_method="sequential"
    )
    return lx.FunctionLinearOperator(product, structure, PSD)


@pytest.mark.slow
def test_products_are_counted():
    """Those with each operator; steps are as many as the difference asks for."""
    calls = [], []
    pairs = [counting(*each) for each in zip(pair(), calls, strict=True)]
    difference = tx.trace_difference(*pairs, tx.Log(), k=4, key=KEY)
    spent = difference.stats["num_matvecs"]
    assert [len(each) for each in calls] == [spent, spent]
    assert spent == 5 * difference.stats["num_steps"]
    low, high = difference.stats["bracket"]
    assert high - low < 0.2 * difference.std_err
    tx.frobenius_products(pairs, k=4, key=KEY).value.block_until_ready()
    assert [len(each) for each in calls] == [spent + 4, spent + 4]


@eqx.filter_jit
def products(matrices, key, **settings):
    operators = [matrix_free(matrix) for matrix in matrices]
    return tx.frobenius_products(operators, key=key, throw=False, **settings)


def three(dtype=np.float64):
    generator = np.random.default_rng(5)
    shape = (3, N, N)
    found = generator.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        found = found + 1j * generator.standard_normal(shape)
    found[1] = found[0] + 0.2 * found[1]
    return found.astype(dtype)


def gram(matrices):
    flat = np.asarray(matrices).reshape(len(matrices), -1)
    return flat.conj() @ flat.T


@pytest.mark.parametrize("dtype", [np.complex128, np.float32])
def test_products_of_pairs(dtype):
    """Unbiased in each entry and with bars that hold, over 400 keys: false alarm 1e-3.
    Hermitian and semidefinite for each key."""
    matrices = three(dtype)
    exact = gram(matrices)

    @jax.jit
    def run(matrices, keys):
        def one(key):
            found = products(matrices, key, k=8)
            return found.value, found.std_err

        return *jax.lax.map(one, keys), products(matrices, None, k=N).value

    values, bars, exactly = (np.asarray(x) for x in run(matrices, KEYS))
    assert values.dtype == dtype
    for i, j in np.ndindex(3, 3):
        assert z_score(values[:, i, j], exact[i, j]) < 4
    errors = np.sqrt(np.mean(np.abs(values - exact) ** 2, axis=0))
    assert np.all(errors < np.sqrt(np.mean(bars**2, axis=0)))
    assert np.all(np.sqrt(np.mean(bars**2, axis=0)) < 2 * errors)
    assert np.array_equal(values, np.swapaxes(values, 1, 2).conj())
    smallest = np.linalg.eigvalsh(values.astype(np.complex128))[:, 0]
    assert np.all(smallest > -1e-6 * np.abs(exact).max())
    assert np.allclose(exactly, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())


def test_products_that_underflow_have_bars():
    """Of three operators of which two are so small that their product is zero in
    float32."""
    matrices = three(np.float32) * np.float32([1, 1e-22, 1e-24])[:, None, None]
    exact = gram(np.asarray(matrices, np.float64))
    found = products(matrices, KEY, k=8)
    value, std_err = (np.asarray(x, float) for x in (found.value, found.std_err))
    assert np.all(value[1:, 1:] == 0)
    assert np.all(np.abs(value - exact) < 5 * std_err)
    assert np.all(std_err[1:, 1:] < 1e-35)


@pytest.mark.slow
def test_products_derivative_and_tolerance():
    """The derivative is that of the products at the same probes."""
    matrices = three()

    @jax.jit
    def run(matrices):
        def entry(matrices):
            value = products(matrices, KEY, k=8).value
            return value[0, 2], value

        slopes, value = jax.grad(entry, has_aux=True)(matrices)
        return value, slopes, tx.RademacherSampler()(KEY, N, 8)

    value, slopes, probes = map(np.asarray, run(matrices))
    images = np.einsum("pij,jk->pik", matrices, probes)
    assert np.allclose(value, gram(images) / 8, rtol=1e-12)
    assert np.allclose(slopes[0], images[2] @ probes.T / 8, rtol=1e-10)
    assert np.allclose(slopes[1], 0)
    adaptive = tx.Adaptive(rtol=0.2, max_k=400, round_size=8)
    found = products(matrices, KEY, k=adaptive)
    assert found.result == tx.RESULTS.successful
    error = np.linalg.norm(found.value - gram(matrices))
    assert error < 0.2 * np.linalg.norm(found.value)


FIRST, SECOND = (matrix_free(jnp.asarray(x), PSD) for x in pair())
SMALLER = matrix_free(jnp.asarray(np.eye(N - 1)), PSD)
SINGLE = matrix_free(jnp.asarray(np.eye(N, dtype=np.float32)), PSD)


def preconditioner():
    return tx.nystrom_preconditioner(FIRST, rank=4, key=KEY)


def of_first(other, function=tx.Log(), *estimator, **settings):
    settings = {"k": 4, "num_steps": 3, "key": KEY} | settings
    return tx.trace_difference(FIRST, other, function, *estimator, **settings)


@pytest.mark.parametrize(
    ("call", "exception", "message"),
    [
        (
            lambda: of_first(SMALLER),
            ValueError,
            r"`operator` and `other` must have the same structure.*\(24,\).*\(23,\)",
        ),
        (lambda: of_first(SINGLE), ValueError, "same structure.*float64.*float32"),
        (lambda: of_first(np.ones(N)), TypeError, "`other` must be a matrix"),
        (
            lambda: of_first(SECOND, tx.Log(), tx.KrylovAwareEstimator()),
            TypeError,
            "`estimator` must be an instance of `traceax.SLQEstimator`",
        ),
        (
            lambda: of_first(SECOND, preconditioner=FIRST),
            TypeError,
            "`preconditioner` must be an instance",
        ),
        (
            lambda: of_first(SECOND, tx.Exp(), preconditioner=preconditioner()),
            ValueError,
            "`preconditioner` is for",
        ),
        (lambda: of_first(SECOND, key=None), ValueError, "`key` is missing"),
        (lambda: of_first(SECOND, 3), TypeError, "`function`"),
        (
            lambda: tx.frobenius_products([FIRST, SECOND, SMALLER], k=4, key=KEY),
            ValueError,
            r"`operators\[0\]` and `operators\[2\]` must have the same structure",
        ),
        (
            lambda: tx.frobenius_products(FIRST, k=4, key=KEY),
            TypeError,
            "`operators` must be a list.*Found an object of type FunctionLinear",
        ),
        (lambda: tx.frobenius_products([], k=4), TypeError, "type list, empty"),
        (
            lambda: tx.frobenius_products([FIRST], tx.XTraceEstimator(), k=4, key=KEY),
            ValueError,
            "`XTraceEstimator` cannot estimate",
        ),
    ],
)
def test_misuse(call, exception, message):
    with pytest.raises(exception, match=message):
        call()


EYE = lx.MatrixLinearOperator(np.eye(3))


@pytest.mark.parametrize("wrong", [np.ones(3), lx.MatrixLinearOperator(np.eye(3, 5))])
def test_names_of_operators(wrong):
    settings = {"k": 2, "key": KEY}
    with pytest.raises((TypeError, ValueError), match=r"^`other` must be"):
        tx.trace_difference(EYE, wrong, tx.Exp(), num_steps=2, **settings)
    with pytest.raises((TypeError, ValueError), match=r"^`operators\[1\]` must be"):
        tx.frobenius_products([EYE, wrong], **settings)
