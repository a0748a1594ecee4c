"""Several quantities from the same products: each as it is alone, with the covariance of
the scalars among them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
import traceax.internal as txi
from traceax._run.programs import programs

from ..helpers import hermitian, PSD


N, K, NUM_KEYS = 30, 12, 400
TREE = {"a": jnp.zeros((2, 5)), "b": jnp.zeros(19), "c": jnp.zeros(())}
PARTS = [slice(0, 10), slice(10, 29), slice(29, 30)]
KEY = jr.key(20261129)
HUTCHINSON, XTRACE = tx.HutchinsonEstimator(), tx.XTraceEstimator()
COLOURS = {"a": np.zeros((2, 5), int), "b": np.arange(19) % 2, "c": np.ones((), int)}
ESTIMATORS = [
    HUTCHINSON,
    tx.HutchinsonEstimator(tx.ColouredSampler(COLOURS)),
    XTRACE,
    tx.XNysTraceEstimator(),
    tx.HutchPlusPlusEstimator(),
    tx.XDiagEstimator(),
]
every_estimator = pytest.mark.parametrize(
    "estimator", ESTIMATORS, ids=lambda x: f"{x.name}-{x.num_strata}"
)
MATRIX = hermitian(3, np.linspace(1, 3, N) * 0.9 ** np.arange(N))
OTHER = np.random.default_rng(4).standard_normal((N, N))


def as_tree(matrix, tags=PSD):
    def mv(tree):
        flat, unravel = jax.flatten_util.ravel_pytree(tree)
        return unravel(matrix @ flat)

    return lx.FunctionLinearOperator(mv, jax.eval_shape(lambda: TREE), tags)


def quantities(other):
    return {
        "diagonal": tx.Diagonal(),
        "leaves": tx.LeafTraces(),
        "product": tx.TraceOfProduct(as_tree(other, ())),
        "trace": tx.Trace(),
    }


@eqx.filter_jit
def solve(matrix, other, estimator, key, k=K, **settings):
    operator, settings = as_tree(matrix), {"k": k, "key": key, "throw": False} | settings
    return tx.estimate(operator, quantities(other), estimator, **settings)


def same(found, expected, rtol=1e-7):
    close = lambda x, y: np.allclose(x, y, rtol=rtol, atol=1e-10)  # noqa: E731
    return jax.tree.all(jax.tree.map(close, found, expected))


@pytest.mark.slow(but=("HutchinsonEstimator-2", "XTraceEstimator-1"))
@every_estimator
def test_each_is_what_it_is_alone(estimator):
    found = solve(MATRIX, OTHER, estimator, KEY)
    operator, settings = as_tree(MATRIX), {"k": K, "key": KEY, "throw": False}
    alone = {
        "diagonal": tx.diagonal(operator, estimator, **settings),
        "leaves": tx.leaf_traces(operator, estimator, **settings),
        "trace": tx.trace(operator, estimator, **settings),
    }
    for name, solution in alone.items():
        assert same(found.value[name], solution.value)
        assert same(found.std_err[name], solution.std_err)
    # The scalars, in the order of the leaves: the diagonal has one too.
    scalars = [x for x in jax.tree.leaves(found.value) if x.ndim == 0]
    assert found.stats["joint_samples"].shape[1] == len(scalars) == 6
    assert same(jnp.mean(found.stats["joint_samples"], axis=0), jnp.stack(scalars))
    bars = [x for x in jax.tree.leaves(found.std_err) if x.ndim == 0]
    assert same(jnp.sqrt(jnp.diagonal(found.covariance)), jnp.stack(bars))
    assert "['product']" in repr(found)


@eqx.filter_jit
def correlations(matrix, other, estimator, keys):
    """Scalars, and their correlation."""

    def one(key):
        three = {name: quantities(other)[name] for name in ("leaves", "product", "trace")}
        solution = tx.estimate(as_tree(matrix), three, estimator, k=K, key=key)
        bars = jnp.stack(jax.tree.leaves(solution.std_err))
        correlation = solution.covariance / bars / bars[:, None]
        return jnp.stack(jax.tree.leaves(solution.value)), correlation

    return jax.lax.map(one, keys)


@pytest.mark.slow(but=("HutchinsonEstimator-2", "XNysTraceEstimator-1"))
@every_estimator
def test_correlation_is_that_of_the_estimates(estimator):
    """That of 400 estimates is known to 0.05; 5 numbers have 10 of them, so that one of
    them is off by 0.2 in one run of 1,000. A single entry of a diagonal, `c`, has no
    error with signs."""
    keys = jr.split(KEY, NUM_KEYS)
    values, found = map(np.asarray, correlations(MATRIX, OTHER, estimator, keys))
    kept = np.std(values, axis=0) > 1e-6
    expected = np.corrcoef(values.T[kept])
    assert np.max(np.abs(np.mean(found, axis=0)[kept][:, kept] - expected)) < 0.2
    assert np.max(np.abs(expected - np.eye(len(expected)))) > 0.3


@pytest.mark.slow(but="HutchinsonEstimator")
@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=lambda x: x.name)
def test_adaptive_budgets_and_meshes(estimator):
    """Diagonals keep no samples, in no run: those of scalars are kept alone."""
    budget = tx.Adaptive(rtol=0.3, max_k=24, round_size=8)
    found = solve(MATRIX, OTHER, estimator, KEY, k=budget)
    sharded = tx.Sharded(tx.probe_mesh(jax.devices()[:2]))
    elsewhere = solve(MATRIX, OTHER, estimator, KEY, k=budget, execution=sharded)
    for x in (found, elsewhere):
        made = np.isfinite(x.stats["joint_samples"])
        assert made.shape[1] == 6
        assert np.all(np.sum(made, axis=0) == x.stats["num_samples"])
    pairs = [(x.value, x.std_err, x.covariance) for x in (found, elsewhere)]
    assert same(*pairs, rtol=1e-6)


def test_exact():
    found = solve(MATRIX, OTHER, None, None, k=N)
    assert found.stats["joint_samples"].shape == (1, 6)
    assert np.isclose(found.value["product"], np.trace(OTHER @ MATRIX))
    assert np.all(found.covariance == 0)
    assert repr(found).startswith("Diagonal, leaf traces, trace of product, trace, exact")
    ratio = found.transform(lambda x: x["product"] / x["trace"])
    assert ratio.std_err == 0


def test_products_compile_once_and_have_derivatives():
    """The estimate is linear in both operators, for the same probes."""

    def value(matrix, other, k=K):
        settings = {"k": k, "key": KEY, "throw": False}
        one = {"product": quantities(other)["product"]}
        return tx.estimate(as_tree(matrix), one, HUTCHINSON, **settings).value["product"]

    at = value(MATRIX, OTHER)
    before = programs.traced
    twice = value(MATRIX, 2 * OTHER)
    assert programs.traced == before
    assert np.isclose(twice, 2 * at)
    for k in (K, tx.Adaptive(rtol=1.0, max_k=8, round_size=8)):
        slopes = jax.grad(value, argnums=(0, 1))(jnp.asarray(MATRIX), OTHER, k)
        for x, slope in zip((MATRIX, OTHER), slopes, strict=True):
            assert np.isclose(np.sum(slope * x), value(MATRIX, OTHER, k))


def test_complex_and_deflated():
    """A real operator is applied to complex vectors, too."""
    matrix = hermitian(5, np.linspace(1, 3, N), np.complex64)
    vectors = np.linalg.eigh(matrix)[1][:, -20:]
    operator = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
    both = {"product": tx.TraceOfProduct(OTHER.astype(np.float32)), "all": tx.Diagonal()}
    solution = tx.estimate(
        operator, both, HUTCHINSON, k=25, key=KEY, deflation=vectors, throw=False
    )
    exact = np.trace(OTHER @ matrix)
    error = abs(solution.value["product"] - exact)
    assert error < 5 * solution.std_err["product"] < 100
    samples = solution.stats["joint_samples"]
    assert np.isclose(np.mean(samples), solution.value["product"], rtol=1e-5)
    assert solution.covariance.shape == (2, 2)


def test_default_estimators():
    structure = jax.ShapeDtypeStruct((N,), float)
    free = lx.FunctionLinearOperator(lambda v: MATRIX @ v, structure)
    settings = {"k": K, "key": KEY}
    # One quantity is the value itself.
    alone = tx.estimate(free, tx.Trace(), **settings)
    assert alone.method == "XTraceEstimator"
    assert same(alone.value, tx.trace(free, **settings).value)
    found, expected = (
        eqx.filter_eval_shape(lambda call: call().stats, call).keys()
        for call in (
            lambda: tx.estimate(free, {"entries": tx.Diagonal()}, **settings),
            lambda: tx.diagonal(free, **settings),
        )
    )
    assert found == expected


BAD = {
    "`quantities` must have at least one": {},
    "Found the class Trace": {"trace": tx.Trace},
    "must be linear in the operator. Found `FrobeniusNorm`": [txi.FrobeniusNorm()],
    "vectors of the structure of `operator`": tx.TraceOfProduct(np.eye(3)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_quantities(message):
    with pytest.raises((TypeError, ValueError), match=message):
        tx.estimate(as_tree(MATRIX), BAD[message], k=K, key=KEY)


def test_quantities_that_an_estimator_lacks():
    budget = tx.Adaptive(max_k=24, round_size=12)
    with pytest.raises(ValueError, match="cannot estimate this quantity, `Diagonal`"):
        solve(MATRIX, OTHER, tx.HutchPlusPlusEstimator(), KEY, k=budget)
