"""Functions of several estimates: their error bars cover, and say so where the expansion
means nothing."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N, NUM_KEYS = 40, 400
KEY = jr.key(20261130)
HUTCHINSON, XTRACE = tx.HutchinsonEstimator(), tx.XTraceEstimator()
MATRIX = hermitian(1, np.linspace(1, 3, N) ** 2)
TRACES = {"a": np.trace(MATRIX[:15, :15]), "b": np.trace(MATRIX[15:, 15:])}
NEARLY = 0.98 * TRACES["a"] / TRACES["b"]
FUNCTIONS = {
    "ratio": lambda t: t["a"] / t["b"],
    "share": lambda t: t["a"] / (t["a"] + t["b"]),
    "log": lambda t: jnp.log(t["a"]),
    "product": lambda t: t["a"] * t["b"],
    "difference": lambda t: t["a"] - t["b"],
    "nearly cancelling": lambda t: t["a"] - NEARLY * t["b"],
}


def leaves(matrix, estimator=HUTCHINSON, k=12, key=KEY, **settings):
    structure = {
        "a": jax.ShapeDtypeStruct((15,), matrix.dtype),
        "b": jax.ShapeDtypeStruct((N - 15,), matrix.dtype),
    }

    def mv(tree):
        y = matrix @ jnp.concatenate([tree["a"], tree["b"]])
        return {"a": y[:15], "b": y[15:]}

    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    return tx.leaf_traces(operator, estimator, k=k, key=key, throw=False, **settings)


def ratio(t):
    return t["a"] / t["b"]


@eqx.filter_jit
def intervals(matrix, estimator, k, keys):
    def one(key):
        solution = leaves(matrix, estimator, k, key)
        found = {name: solution.transform(fn) for name, fn in FUNCTIONS.items()}
        return {name: x.interval() for name, x in found.items()}

    return jax.lax.map(one, keys)


@pytest.mark.slow(but=("Hutchinson-5",))
@pytest.mark.parametrize(
    ("estimator", "k"),
    [(HUTCHINSON, 5), (HUTCHINSON, 10), (HUTCHINSON, 40 - 1), (XTRACE, 20)],
    ids=["Hutchinson-5", "Hutchinson-10", "Hutchinson-39", "XTrace-20"],
)
def test_coverage(estimator, k):
    """93% of 400 intervals: at a coverage of 95% fewer in one run of 25, and bars are
    wider than that."""
    found = intervals(MATRIX, estimator, k, jr.split(KEY, NUM_KEYS))
    for name, (low, high) in found.items():
        exact = FUNCTIONS[name](TRACES)
        covers = (np.asarray(low) <= exact) & (exact <= np.asarray(high))
        assert np.mean(covers) >= 0.93, name
        assert np.median(high - low) < 3 * np.percentile(high - low, 10), name


def test_correlation_counts():
    """The errors of a ratio of nearly equal traces cancel."""
    other = MATRIX + 0.02 * hermitian(2, np.linspace(-1, 1, N))
    two = {"n": tx.TraceOfProduct(np.eye(N)), "z": tx.Trace()}
    stacked = {"n": tx.TraceOfProduct(other @ np.linalg.inv(MATRIX)), "z": tx.Trace()}
    settings = {"k": 20, "key": KEY}
    operator = lx.FunctionLinearOperator(
        lambda v: MATRIX @ v, jax.ShapeDtypeStruct((N,), float)
    )
    fn = lambda t: t["n"] / t["z"]  # noqa: E731
    same = tx.estimate(operator, two, HUTCHINSON, **settings).transform(fn)
    assert same.value == 1.0
    # The errors of rounding do not cancel.
    assert 0 < same.std_err < 1e-12
    near = tx.estimate(operator, stacked, HUTCHINSON, **settings)
    bar = near.transform(fn).std_err
    relative = [near.std_err[x] / near.value[x] for x in ("n", "z")]
    assert bar < 0.1 * min(relative)
    low, high = near.transform(fn).interval(0.999)
    assert low < np.trace(other) / np.trace(MATRIX) < high


@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=lambda x: x.name)
def test_scale_does_not_matter(estimator):
    """Squares of traces overflow or underflow, and so do rules of derivatives."""
    one = leaves(np.asarray(MATRIX, np.float32), estimator).transform(ratio)
    for scale in (1e30, 1e-30):
        matrix = np.asarray(scale * MATRIX, np.float32)
        other = leaves(matrix, estimator).transform(ratio)
        assert np.isclose(other.value, one.value, rtol=1e-5)
        assert np.isclose(other.std_err, one.std_err, rtol=0.1)


def test_denominators_near_zero():
    matrix = hermitian(3, np.linspace(-1, 1, N))
    found = leaves(matrix).transform(ratio)
    assert found.result == tx.RESULTS.interval_with_zero
    assert found.interval() == (-np.inf, np.inf)
    # A pole at an exact zero is one too, and a zero elsewhere none.
    exact = leaves(0 * matrix, k=N)
    assert exact.transform(ratio).result == tx.RESULTS.interval_with_zero
    assert exact.transform(lambda t: t["a"] * 2).std_err == 0


def test_few_samples_and_exact_answers():
    one = leaves(MATRIX, k=1)
    assert one.transform(ratio).interval() == (-np.inf, np.inf)
    assert np.all(np.isinf(np.diagonal(one.covariance)))
    exact = leaves(MATRIX, k=N)
    both = exact.transform(lambda t: {"r": ratio(t), "log": jnp.log(t["a"])})
    assert both.std_err == {"log": 0, "r": 0}
    assert np.isclose(both.value["r"], ratio(TRACES))
    assert np.all(both.covariance == 0)


def test_chains_and_derivatives():
    """A function of functions is that of the first solution, to first order."""
    first = leaves(MATRIX, k=30)
    two = first.transform(lambda t: {"s": t["a"] + t["b"], "d": t["a"] - t["b"]})
    again, direct = (
        two.transform(lambda t: t["s"] * t["d"]),
        first.transform(lambda t: t["a"] ** 2 - t["b"] ** 2),
    )
    assert np.isclose(again.value, direct.value)
    assert np.isclose(again.std_err, direct.std_err, rtol=0.1)
    assert repr(again).startswith("Function of: Leaf traces")

    @jax.jit
    def share(scale):
        scales = jnp.where(jnp.arange(N) < 15, scale, 1.0)
        return leaves(MATRIX * scales * scales[:, None]).transform(ratio).value

    # The numerator grows with the square.
    assert np.isclose(jax.grad(share)(1.0), 2 * share(1.0))


def test_complex_and_strata():
    matrix = MATRIX + 1j * hermitian(4, np.linspace(-3, 3, N))
    found = leaves(matrix, k=30)
    assert found.covariance.shape == (4, 4)
    real = found.transform(lambda t: ratio(t).real)
    whole = found.transform(ratio)
    assert real.std_err < whole.std_err
    # With a colour for each entry all errors are those within colours: none.
    colours = {"a": np.arange(15), "b": np.arange(15, N)}
    sampler = tx.ColouredSampler(colours)
    exact = leaves(MATRIX, tx.HutchinsonEstimator(sampler), k=2 * N)
    assert np.isclose(exact.transform(ratio).value, ratio(TRACES))
    # Colours differ in what they add to a trace, which says nothing about errors.
    colours = {"a": np.arange(15) % 2, "b": np.zeros(N - 15, int)}
    coloured = leaves(MATRIX, tx.HutchinsonEstimator(tx.ColouredSampler(colours)), k=36)
    samples = np.asarray(coloured.stats["joint_samples"])
    means = np.mean(samples.reshape(-1, 2, 2), axis=0)
    assert np.allclose(means, [coloured.value["a"], coloured.value["b"]])


def test_bad_input():
    solution = leaves(MATRIX)
    with pytest.raises(ValueError, match="must return a floating-point scalar"):
        solution.transform(lambda t: jnp.stack([t["a"], t["b"]]))
    keys = jr.split(KEY, 3)
    batch = jax.vmap(lambda key: leaves(MATRIX, key=key))(keys)
    with pytest.raises(ValueError, match=r"solution.transform\(fn\)\)\(solutions\)"):
        batch.transform(ratio)
    with pytest.raises(ValueError, match="batch of solutions"):
        print(batch.covariance)
    alone = [leaves(MATRIX, key=key).transform(ratio).std_err for key in keys]
    together = jax.vmap(lambda solution: solution.transform(ratio).std_err)(batch)
    assert np.allclose(alone, together)
    diagonal = tx.diagonal(MATRIX, HUTCHINSON, k=5, key=KEY)
    with pytest.raises(ValueError, match="uses arrays of shape"):
        diagonal.transform(jnp.sum)
    with pytest.raises(ValueError, match="must have a scalar"):
        print(diagonal.covariance)
    stats = {k: x for k, x in solution.stats.items() if k != "joint_samples"}
    with pytest.raises(ValueError, match="follows from their samples"):
        dataclasses.replace(solution, stats=stats).transform(ratio)
