"""The Fisher matrix of sampled labels: its mean over keys is the Gauss-Newton matrix."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx


def model(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def point():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 2)), rng.standard_normal((2, 3))
    return {"a": jnp.asarray(a), "b": jnp.asarray(b), "name": "tanh"}


INPUTS = jnp.asarray(np.random.default_rng(1).standard_normal((4, 3, 3)))


def cross_entropy(z, _=None):
    """Of any labels: they are not in the second derivative."""
    return jnp.mean(jax.nn.logsumexp(z, axis=-1) - z[..., 0])


def squares(z, _=None):
    return jnp.mean(jnp.sum(z**2, axis=-1)) / 2


class Poisson(tx.AbstractLikelihood):
    def sample(self, key, outputs):
        return jr.poisson(key, jnp.exp(outputs))

    def log_prob(self, outputs, labels):
        return labels * outputs - jnp.exp(outputs)


CASES = {
    "categorical": (tx.CategoricalLikelihood(), cross_entropy),
    "gaussian": (tx.GaussianLikelihood(), squares),
    "poisson": (Poisson(), lambda z, _=None: jnp.mean(jnp.exp(z))),
}


def ragged():
    whole = INPUTS.reshape(-1, 3)
    return [whole[:5], whole[5:10], whole[10:]]


@pytest.mark.parametrize(
    ("likelihood", "batches"),
    [("categorical", "ragged"), ("gaussian", "stacked"), ("poisson", "none")],
)
def test_mean_over_keys(likelihood, batches):
    """Of the matrix, by a z-score of each entry that one seed of 1e5 would exceed."""
    likelihood, loss = CASES[likelihood]
    data = {"ragged": ragged(), "stacked": INPUTS, "none": None}[batches]
    at = model if data is not None else lambda w: model(w, INPUTS[0])

    @jax.jit
    def run(keys):
        def matrix(key):
            settings = {"likelihood": likelihood, "num_samples": 2, "key": key}
            return tx.fisher(at, point(), data, **settings).as_matrix()

        return jax.lax.map(matrix, keys), tx.ggn(at, loss, point(), data).as_matrix()

    found, expected = run(jr.split(jr.key(2), 2000))
    spread = np.std(found, axis=0, ddof=1) / len(found) ** 0.5
    error = np.mean(found, axis=0) - expected
    assert np.all(np.abs(error[spread == 0]) < 1e-12)  # outputs without common labels
    z = error[spread > 0] / spread[spread > 0]
    assert np.max(np.abs(z)) < 6
    assert 0.3 < np.sqrt(np.mean(z**2)) < 2
    assert np.max(spread) < 0.1 * np.max(np.abs(expected))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", CASES)
def test_mean_of_derivatives_over_keys(likelihood):
    """The labels change with the parameters."""
    likelihood, loss = CASES[likelihood]
    at = lambda w: model(w, INPUTS[0])  # noqa: E731

    def slope(make):
        trace = lambda w: tx.trace(make(w), k=12).value  # noqa: E731
        w = {name: x for name, x in point().items() if name != "name"}
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(trace)(w))])

    @jax.jit
    def run(keys):
        def one(key):
            return slope(lambda w: tx.fisher(at, w, likelihood=likelihood, key=key))

        return jax.lax.map(one, keys), slope(lambda w: tx.ggn(at, loss, w))

    found, expected = run(jr.split(jr.key(3), 3000))
    spread = np.std(found, axis=0, ddof=1) / len(found) ** 0.5
    assert np.max(np.abs(np.mean(found, axis=0) - expected) / spread) < 6
    assert np.median(spread) < 0.2 * np.max(np.abs(expected))


def test_labels_belong_to_the_key():
    """The same in each product, others for each batch and key; more spread less."""
    same = jnp.stack([INPUTS[0]] * 2)
    settings = {"likelihood": tx.GaussianLikelihood()}

    @jax.jit
    def run(key):
        make = lambda data, num: tx.fisher(  # noqa: E731
            model, point(), data, key=key, num_samples=num, **settings
        )
        few, many = make(same, 1), make(same, 64)
        settings_of_trace = {"k": 12, "throw": False}
        again = make(same, 1)
        first = tx.minibatch_trace(few, **settings_of_trace)
        return first, tx.trace(again, k=12).value, tx.trace(many, k=12).value

    first, again, _ = run(jr.key(0))
    assert first.value == pytest.approx(again)
    assert first.stats["batch_std_err"] > 0.01 * first.value
    _, few, many = jax.lax.map(run, jr.split(jr.key(1), 100))
    assert np.std(many) < np.std(few) / 4


def test_tags_and_structure():
    settings = {"likelihood": tx.CategoricalLikelihood(), "key": jr.key(0)}
    for batches in (None, INPUTS):
        at = model if batches is not None else lambda w: model(w, INPUTS[0])
        operator = tx.fisher(at, point(), batches, **settings)
        assert lx.is_positive_semidefinite(operator)
        assert operator.in_size() == 12


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"likelihood": "gaussian"}, TypeError, "`likelihood` must be an instance"),
        ({"key": 0}, TypeError, "`key` must be one JAX PRNG key"),
        ({"num_samples": 0}, ValueError, "`num_samples` must be at least 1"),
        ({"chunk_size": 2}, ValueError, "=2 without `batches`"),
    ],
)
def test_bad_settings(changes, error, message):
    settings = {"likelihood": tx.GaussianLikelihood(), "key": jr.key(0)} | changes
    with pytest.raises(error, match=message):
        tx.fisher(lambda w: model(w, INPUTS[0]), point(), **settings)


def test_bad_batches_and_functions():
    settings = {"likelihood": tx.GaussianLikelihood(), "key": jr.key(0)}
    with pytest.raises(ValueError, match="`batches` must be"):
        tx.fisher(model, point(), [INPUTS[0], INPUTS[0, :, :2]], **settings)
    with pytest.raises(TypeError, match="`model` must return"):
        tx.fisher(lambda w: jnp.arange(3), point(), **settings)

    class Counts(Poisson):
        def log_prob(self, outputs, labels):
            return labels

    with pytest.raises(TypeError, match=r"`likelihood\.log_prob` must return"):
        tx.fisher(
            lambda w: model(w, INPUTS[0]), point(), **settings | {"likelihood": Counts()}
        )
