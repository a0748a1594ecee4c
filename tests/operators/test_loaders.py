"""Batches as data loaders have them: lists and iterables, the last batch smaller."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..programs.common import close
from ..properties.test_ahead_of_time import count_compilations


N, INPUTS = 22, 40
X, Y = np.split(np.random.default_rng(0).standard_normal((N, INPUTS + 1)), [INPUTS], 1)
POINT = {"w": np.zeros(INPUTS), "constant": np.zeros(1)}
JACOBIAN = np.hstack([np.ones((N, 1)), X])  # "constant" comes before "w".
EXACT = 2 * JACOBIAN.T @ JACOBIAN / N


class Tensor:
    """The tensor of another library."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x, dtype)

    def __iter__(self):
        raise AssertionError("a tensor is no list of its rows")


class Loader:
    """As those of PyTorch: a batch is a list of tensors, and the last one is smaller."""

    size = 4
    passes = 0

    def __iter__(self):
        self.passes += 1
        ends = range(0, N, self.size)
        return ([Tensor(x[i : i + self.size]) for x in (X, Y)] for i in ends)


def outputs(params, batch):
    return batch[0] @ params["w"][:, None] + params["constant"]


def loss(z, batch):
    return jnp.mean((z - batch[1]) ** 2)


def ggn(batches, **settings):
    return tx.ggn(outputs, loss, POINT, batches, **settings)


def test_loader():
    loader = Loader()
    operator = ggn(loader, chunk_size=2)
    assert lx.is_positive_semidefinite(operator)
    close("", operator.as_matrix(), EXACT, 1e-13)
    assert float(tx.trace(operator, k=1 + INPUTS).value) == pytest.approx(
        np.trace(EXACT), 1e-12
    )
    assert loader.passes == 1


@pytest.mark.parametrize("kind", [iter, list, Tensor])
def test_kinds_of_batches(kind):
    """One that can be read once, a list, and a stack of tensors."""
    if kind is Tensor:
        batches = tuple(Tensor(x.reshape(2, 11, -1)) for x in (X, Y))
    else:
        batches = kind([[np.asarray(x) for x in batch] for batch in Loader()])
    close("", ggn(batches).as_matrix(), EXACT, 1e-13)


def test_what_is_no_example():
    """Keys, numbers, and arrays of one length in all batches do not count as examples,
    even where the last batch has as many."""
    keys, classes = jr.split(jr.key(0), 6), np.ones(2)
    batches = [(*batch, key, classes, 1.0) for batch, key in zip(Loader(), keys)]  # noqa: B905

    def scaled(z, batch):
        one = jr.bernoulli(batch[2], 1.0) * jnp.mean(batch[3]) * batch[4]
        return one * loss(z, batch)

    operator = tx.ggn(outputs, scaled, POINT, batches)
    close("", operator.as_matrix(), EXACT, 1e-13)


def test_shuffled_data_compile_nothing():
    """New data in batches of the same sizes, in any order of these."""

    def traces(batches):
        operator, settings = ggn(batches), {"k": 2, "key": jr.key(0)}
        return tx.trace(operator, tx.HutchinsonEstimator(), **settings).value

    batches = [[np.asarray(x) for x in batch] for batch in Loader()]
    first = traces(batches)
    with count_compilations() as compilations:
        again = traces([batches[3], *batches[:3], *batches[4:]])
    assert not compilations
    close("", again, first, 1e-12)


def test_adaptive_on_devices():
    """A loop of rounds on a mesh around the two loops over batches."""
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:2]))
    k = tx.Adaptive(rtol=0.2, max_k=INPUTS)

    def solve(execution):
        settings = {"k": k, "key": jr.key(1), "execution": execution}
        return tx.trace(ggn(Loader()), tx.HutchinsonEstimator(), **settings)

    found, expected = solve(execution), solve(tx.Local())
    assert found.stats["num_matvecs"] == expected.stats["num_matvecs"]
    close("value", found.value, expected.value, 1e-12)
    assert abs(found.value - np.trace(EXACT)) < 4 * found.std_err
    assert found.std_err < 0.2 * found.value
