"""A total number of matvecs as the budget of a log-determinant or a trace."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N, SHIFT, KEY = 96, 1e-2, jr.key(0)
DECAYING = 10 * 0.8 ** np.arange(N) + SHIFT
FLAT = np.linspace(1, 3, N)


def exact(matrix):
    return np.linalg.slogdet(matrix.astype(np.promote_types(matrix.dtype, float)))[1]


@eqx.filter_jit
def run(matrix, key, total, preconditioner="auto"):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    k = tx.Matvecs(total)
    return tx.logdet(operator, k=k, preconditioner=preconditioner, key=key, throw=False)


@pytest.mark.slow(but=("float64-decaying", "float64-flat"))
@pytest.mark.parametrize(
    ("eigenvalues", "total", "rtol"),
    [(DECAYING, 8, 2), (DECAYING, 72, 1e-2), (FLAT, 72, 5e-2)],
    ids=["few", "decaying", "flat"],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128])
def test_value_and_total(eigenvalues, total, rtol, dtype):
    """Nothing is known of the spectrum here."""
    matrix = hermitian(0, eigenvalues, dtype)
    solution = run(matrix, KEY, total)
    assert solution.successful
    assert total / 2 < solution.matvecs <= total
    assert solution.stats["num_samples"] % 4 == 0
    error = abs(solution.value - exact(matrix))
    assert error <= 4 * solution.std_err
    assert error <= rtol * abs(exact(matrix))


def test_coverage():
    """Over keys, as a batch: intervals cover, and the total is kept."""
    matrix = hermitian(0, DECAYING)
    keys = jr.split(jr.key(1), 60)

    @jax.jit
    @jax.vmap
    def batch(key):
        found = run(matrix, key, 48, tx.AutoPreconditioner(SHIFT))
        low, high = found.interval()
        return found.value, low, high, found.stats["num_matvecs"]

    values, low, high, spent = batch(keys)
    truth = exact(matrix)
    assert jnp.mean((low <= truth) & (truth <= high)) >= 0.9
    assert jnp.all(spent <= 48)
    assert np.sqrt(np.mean((values - truth) ** 2)) < 0.06 * abs(truth)


@pytest.mark.slow
def test_total_counts_every_product():
    matrix, made = jnp.asarray(hermitian(0, DECAYING)), []

    def product(x):
        jax.debug.callback(lambda _: made.append(1), x[0])
        return matrix @ x

    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    operator = lx.FunctionLinearOperator(product, structure, PSD)
    solution = tx.logdet(operator, k=tx.Matvecs(60), key=KEY)
    jax.effects_barrier()
    assert len(made) == solution.matvecs <= 60


def test_exact_with_n_matvecs():
    matrix = hermitian(0, DECAYING)
    solution = run(matrix, KEY, N)
    assert solution.stats["exact"]
    assert solution.matvecs == N
    np.testing.assert_allclose(solution.value, exact(matrix), rtol=1e-12)


@pytest.mark.slow
def test_several_devices_give_the_answer_of_one():
    operator = lx.MatrixLinearOperator(hermitian(0, DECAYING), PSD)
    executions = tx.Local(block_size=3), tx.Sharded(tx.probe_mesh(jax.devices()[:3]))
    one, *others = (
        tx.logdet(operator, k=tx.Matvecs(60), key=KEY, execution=execution)
        for execution in (tx.Local(), *executions)
    )
    for other in others:
        np.testing.assert_allclose(other.value, one.value, rtol=1e-10)
        np.testing.assert_allclose(other.std_err, one.std_err, rtol=1e-8)
        assert other.matvecs == one.matvecs


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scale(scale):
    """The value is shifted by the logarithm, and the matvecs are used as before."""
    one, other = (run(x * hermitian(0, DECAYING), KEY, 48) for x in (1.0, scale))
    shift = N * np.log(scale)
    np.testing.assert_allclose(other.value - shift, one.value, rtol=1e-6)
    np.testing.assert_allclose(other.std_err, one.std_err, rtol=1e-6)


@pytest.mark.slow
def test_singular_and_ill_conditioned():
    """Flagged, or with an error bar that says how little is known."""
    matrix = hermitian(0, DECAYING)
    for singular in (np.zeros((N, N)), np.outer(matrix[0], matrix[0])):
        solution = run(singular, KEY, 40)
        assert solution.result == tx.RESULTS.not_positive_definite
    matrix = hermitian(0, np.logspace(0, -12, N))
    solution = run(matrix, KEY, 40)
    low, high = solution.interval()
    assert low <= exact(matrix) <= high


@pytest.mark.slow
def test_gradient():
    matrix = jnp.asarray(hermitian(0, DECAYING))
    gradient = jax.grad(lambda x: run(x, KEY, 72).value)(matrix)
    direction = np.outer(*2 * [np.sin(np.arange(N))])
    expected = np.trace(np.linalg.solve(matrix, direction))
    np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=0.2)


@pytest.mark.slow
def test_trace_of_function():
    matrix = hermitian(0, FLAT)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    functions = {"exp": tx.Exp(), "inverse": tx.Inverse()}
    solution = tx.trace_of_function(operator, functions, k=tx.Matvecs(80), key=KEY)
    assert solution.matvecs <= 80
    for name, expected in (("exp", np.exp(FLAT)), ("inverse", 1 / FLAT)):
        error = abs(solution.value[name] - np.sum(expected))
        assert error <= 4 * solution.std_err[name] <= 0.2 * np.sum(expected)


@pytest.mark.slow
def test_general_operator():
    """A step makes two matvecs."""
    matrix = hermitian(0, FLAT) + np.triu(np.full((N, N), 1e-2), 1)
    solution = tx.logdet(lx.MatrixLinearOperator(matrix), k=tx.Matvecs(80), key=KEY)
    assert solution.matvecs <= 80
    assert abs(solution.value - exact(matrix)) <= 4 * solution.std_err


def test_misuse():
    operator = lx.MatrixLinearOperator(hermitian(0, FLAT), PSD)
    k = tx.Matvecs(40)
    for settings in (
        {"num_steps": 5},
        {"estimator": tx.KrylovAwareEstimator()},
        {"deflation": jnp.ones((N, 1))},
        {"preconditioner": tx.nystrom_preconditioner(operator, 4, key=KEY)},
    ):
        with pytest.raises(ValueError, match="Found"):
            tx.logdet(operator, k=k, key=KEY, **settings)
    with pytest.raises(TypeError, match="`k` must be an integer"):
        tx.trace(operator, k=k, key=KEY)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 8"):
        tx.Matvecs(7)
