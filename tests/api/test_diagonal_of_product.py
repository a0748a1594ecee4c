"""diag X f(B) X*: exact, and from probes of the length of B, for entries of all sizes;
with derivatives, and never with a confident wrong number."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD, z_score


M, N, NUM_KEYS = 30, 12, 400
VALUES = np.geomspace(0.1, 3, N)
KEYS = jr.split(jr.key(20261128), NUM_KEYS)
FUNCTIONS = {
    "inverse": (tx.Inverse(), lambda x: 1 / x),
    "log": (tx.Log(), np.log),
    "callable": (jnp.tanh, np.tanh),
}


def case(dtype=np.float64):
    """Rows of sizes from 1e-2 to 1e2, and B."""
    generator = np.random.default_rng(1)
    factor = generator.standard_normal((M, N)) * np.geomspace(1e-2, 1e2, M)[:, None]
    if np.issubdtype(dtype, np.complexfloating):
        factor = factor * np.exp(1j * generator.standard_normal((M, N)))
    return factor.astype(dtype), hermitian(2, VALUES, dtype)


def reference(factor, matrix, function):
    double = np.complex128 if np.iscomplexobj(matrix) else np.float64
    values, vectors = np.linalg.eigh(matrix.astype(double))
    return np.abs(factor @ vectors) ** 2 @ function(values)


@eqx.filter_jit
def solve(factor, matrix, name, key=None, **settings):
    factor = lx.MatrixLinearOperator(factor)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"key": key, "throw": False} | settings
    return tx.diagonal_of_product(factor, operator, FUNCTIONS[name][0], **settings)


@pytest.mark.slow(but="inverse-complex128")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact(name, dtype):
    factor, matrix = case(dtype)
    found, exact = (
        solve(factor, matrix, name, k=N),
        reference(factor, matrix, FUNCTIONS[name][1]),
    )
    scale = np.linalg.norm(factor, axis=1) ** 2 * np.max(np.abs(exact / 1e4))
    assert found.value.dtype == np.finfo(dtype).dtype
    tolerance = 100 * np.finfo(dtype).eps
    assert np.allclose(found.value / exact, 1, rtol=0, atol=tolerance * np.max(scale))
    assert np.all(found.std_err == 0)
    assert found.stats["num_matvecs"] == N
    low, high = found.interval()
    assert np.all((low <= exact) & (exact <= high))


@pytest.mark.slow(but="inverse-float64")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_estimates(name, dtype):
    """Unbiased for each entry; the error of a nonnegative function is relative to it."""
    factor, matrix = case(dtype)
    exact = reference(factor, matrix, FUNCTIONS[name][1])

    @jax.jit
    def over_keys(factor, matrix):
        def one(key):
            found = solve(factor, matrix, name, key, k=8, num_steps=N)
            return found.value, found.std_err, found.interval()

        return jax.lax.map(one, KEYS)

    values, std_errs, (low, high) = map(jax.device_get, over_keys(factor, matrix))
    # Of 30 scores one is above 5 with a probability of 2e-5.
    assert max(z_score(x, e) for x, e in zip(values.T, exact, strict=True)) < 5
    assert np.mean((low <= exact) & (exact <= high)) > 0.93
    spread = np.std(values, axis=0)
    assert np.all(np.sqrt(np.mean(std_errs**2, axis=0)) > 0.9 * spread)
    if name == "inverse":
        # (2 / k)^(1/2) is 0.5; signs are below it for rows near a unit vector.
        assert np.all(spread < 0.6 * exact)


def test_derivatives():
    """Of the exact answer, and of estimates the mean, in all three arguments."""
    factor, matrix = case()
    weights, step = np.linspace(1, 2, M) / np.geomspace(1e-4, 1e4, M), 1e-6
    directions = np.ones((M, N)), hermitian(3, np.linspace(-1, 1, N))

    def loss(t, s, key, **settings):
        moved = factor + t * directions[0], matrix + s * directions[1]
        operators = (
            lx.MatrixLinearOperator(moved[0]),
            lx.MatrixLinearOperator(moved[1], PSD),
        )
        function = tx.Inverse(jnp.asarray(0.5))
        found = tx.diagonal_of_product(*operators, function, key=key, **settings)
        return weights @ found.value

    def numpy_loss(t, s):
        moved = factor + t * directions[0], matrix + s * directions[1]
        return weights @ reference(*moved, lambda x: 1 / (x + 0.5))

    expected = [
        (numpy_loss(*(step * e)) - numpy_loss(*(-step * e))) / (2 * step)
        for e in np.eye(2)
    ]
    exact = jax.jit(jax.grad(lambda t, s: loss(t, s, None, k=N), (0, 1)))(0.0, 0.0)
    assert np.allclose(exact, expected, rtol=1e-7)

    @jax.jit
    def over_keys(keys):
        slopes = jax.grad(
            lambda t, s, key: loss(t, s, key, k=4, num_steps=N - 1, throw=False), (0, 1)
        )
        return jax.lax.map(lambda key: slopes(0.0, 0.0, key), keys)

    for samples, slope in zip(over_keys(KEYS), expected, strict=True):
        assert z_score(samples, slope) < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inverse", "log"])
def test_few_steps_are_counted(name):
    """Intervals cover the exact diagonal, however few the steps; where steps are chosen,
    error bars do or the call fails."""
    factor, _ = case()
    generator = np.random.default_rng(5)
    factor = generator.standard_normal((M, 60)) * np.geomspace(1e-2, 1e2, M)[:, None]
    matrix = hermitian(2, np.geomspace(1e-3, 1, 60))
    exact = reference(factor, matrix, FUNCTIONS[name][1])
    for num_steps in (4, 10, 30, tx.AdaptiveSteps(20), tx.AdaptiveSteps()):
        covered, wrong = [], []
        for key in KEYS[:8]:
            found = solve(factor, matrix, name, key, k=16, num_steps=num_steps)
            low, high = found.interval()
            covered.append((low <= exact) & (exact <= high))
            error = np.abs(found.value - exact)
            chosen = isinstance(num_steps, tx.AdaptiveSteps)
            failed = found.result != tx.RESULTS.successful
            # The exact answer has rounding errors alone.
            missed = error > 4 * found.std_err + 1e-9 * np.abs(exact)
            wrong.append(0 if failed or not chosen else np.mean(missed))
        assert np.mean(covered) > 0.9, num_steps
        assert np.mean(wrong) < 0.05, num_steps


@pytest.mark.slow
def test_adaptive_resumed_and_trees():
    factor, matrix = case()
    exact = reference(factor, matrix, FUNCTIONS["inverse"][1])
    rule = tx.Adaptive(atol=1e9, max_k=10, round_size=2)
    found = solve(factor, matrix, "inverse", KEYS[0], k=rule)
    assert found.result == tx.RESULTS.successful
    assert found.stats["num_matvecs"] > 0
    rule = tx.Adaptive(rtol=1e-6, max_k=100, round_size=4)
    found = solve(factor, matrix, "inverse", KEYS[0], k=rule)
    assert found.stats["exact"]
    assert np.allclose(found.value, exact, rtol=1e-10)

    def mv(v):
        image = factor @ jnp.concatenate([v["a"], v["b"]])
        return [image[:10].reshape(2, 5), image[10:]]

    def gram(v):
        image = matrix @ jnp.concatenate([v["a"], v["b"]])
        return {"a": image[:5], "b": image[5:]}

    structure = {"a": jax.ShapeDtypeStruct((5,), float)}
    structure |= {"b": jax.ShapeDtypeStruct((N - 5,), float)}
    operator = lx.FunctionLinearOperator(gram, structure, PSD)
    tree = lx.FunctionLinearOperator(mv, structure)
    value = tx.diagonal_of_product(tree, operator, tx.Inverse(), k=N).value
    assert np.allclose(value[0].ravel(), exact[:10])
    assert np.allclose(value[1], exact[10:])


def test_leverages():
    """Which a diagonal of the whole product estimates with errors of their own size."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 15))
    factor = lx.MatrixLinearOperator(jnp.asarray(x))
    gram = lx.MatrixLinearOperator(jnp.asarray(x.T @ x), PSD)
    found = tx.diagonal_of_product(factor, gram, tx.Inverse(), k=60)
    basis, _ = np.linalg.qr(x)
    assert np.allclose(found.value, np.sum(basis**2, axis=1), rtol=1e-12)
    assert found.stats["num_matvecs"] == 15


@pytest.mark.usefixtures("as_users_call")
def test_misuse():
    factor, matrix = case()
    factor, operator = lx.MatrixLinearOperator(factor), lx.MatrixLinearOperator(matrix)
    tagged, settings = lx.TaggedLinearOperator(operator, PSD), {"k": 3, "key": KEYS[0]}
    for kind, part, arguments in (
        (ValueError, "must be Hermitian", (factor, operator, tx.Inverse())),
        (ValueError, "`factor` must take the vectors", (factor.T, tagged, tx.Inverse())),
        (TypeError, "`factor` must be a matrix", (matrix[0], tagged, tx.Inverse())),
        (TypeError, "`function` must be a", (factor, tagged, 1.0)),
    ):
        with pytest.raises(kind, match=part):
            tx.diagonal_of_product(*arguments, **settings)
    with pytest.raises(ValueError, match="`key`"):
        tx.diagonal_of_product(factor, tagged, tx.Inverse(), k=3)
