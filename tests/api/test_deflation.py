"""Deflated eigenvectors in traces, diagonals and functions, against NumPy."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, R, NUM_KEYS = 40, 4, 200
KEY = jr.key(20261202)
KEYS = jr.split(KEY, NUM_KEYS)
VALUES = np.concatenate([np.geomspace(0.2, 3, N - 3), [10, 20, 40]])
MATRIX = hermitian(1, VALUES)
VECTORS = np.linalg.eigh(MATRIX)[1]
# The smallest and the three largest eigenvalues.
DEFLATED = VECTORS[:, [0, -3, -2, -1]]
GARBAGE = np.random.default_rng(2).normal(size=(N, R))
DIRECTION = hermitian(3, np.linspace(-1, 1, N))
INVERSE = np.linalg.inv(MATRIX)
HUTCHINSON = tx.HutchinsonEstimator()


def moved(t, matrix=MATRIX, tags=PSD):
    return matrix_free(jnp.asarray(matrix) + t * DIRECTION, tags)


def is_mean(samples, exact):
    """Whether the mean is the exact answer: a false alarm in one of 1000 runs."""
    error = samples.std(axis=0) / len(samples) ** 0.5
    z = (samples.mean(axis=0) - exact) / error
    return np.max(np.abs(z)) < stats.norm.isf(0.0005 / z.size)


LINEAR = [
    (tx.trace, HUTCHINSON),
    (tx.trace, tx.XTraceEstimator()),
    (tx.trace, tx.XNysTraceEstimator()),
    (tx.diagonal, HUTCHINSON),
    (tx.diagonal, tx.XDiagEstimator()),
]


@pytest.mark.parametrize("basis", [DEFLATED, GARBAGE], ids=["eigenvectors", "garbage"])
@pytest.mark.parametrize(
    ("call", "estimator"), LINEAR, ids=lambda x: getattr(x, "__name__", type(x).__name__)
)
def test_linear_quantities_are_unbiased_for_any_basis(call, estimator, basis):
    def value(t, key):
        return call(moved(t), estimator, k=20, key=key, deflation=basis).value

    def both(key):
        return jax.jvp(lambda t: value(t, key), (0.0,), (1.0,))

    values, slopes = jax.jit(jax.vmap(both))(KEYS)
    read = np.trace if call is tx.trace else np.diag
    assert is_mean(values, read(MATRIX))
    assert is_mean(slopes, read(DIRECTION))


def errors(call, exact, **settings):
    """Root-mean-square error over many keys, over that which the error bars claim."""

    def one(key):
        solution = call(key=key, **settings)
        return solution.value, solution.std_err, solution.interval()

    values, bars, (low, high) = jax.jit(jax.vmap(one))(KEYS)
    coverage = np.mean((low <= exact) & (exact <= high))
    error = np.sqrt(np.mean((values - exact) ** 2))
    return error, error / np.sqrt(np.mean(np.asarray(bars) ** 2)), coverage


def test_deflation_reduces_the_error_and_intervals_cover():
    def trace(key, basis):
        return tx.trace(moved(0), HUTCHINSON, k=20, key=key, deflation=basis)

    plain, _, _ = errors(trace, np.trace(MATRIX), basis=None)
    error, ratio, coverage = errors(trace, np.trace(MATRIX), basis=DEFLATED)
    # 16 samples in the place of 20, of a matrix whose largest eigenvalue is 3, not 40.
    assert error < plain / 5
    # Bars of 16 samples are widened by about an eighth.
    assert 0.7 < ratio < 1.1
    assert coverage > 0.92


def test_a_grid_whose_smallest_eigenvectors_are_deflated():
    side = 16
    shift = np.roll(np.eye(side), 1, axis=0)
    line = 2 * np.eye(side) - shift - shift.T
    grid = np.kron(line, np.eye(side)) + np.kron(np.eye(side), line)
    grid = grid + 0.01 * np.eye(side**2)
    values, vectors = np.linalg.eigh(grid)
    settings = {"k": 16, "num_steps": tx.AdaptiveSteps(80)}
    op = matrix_free(jnp.asarray(grid), PSD)

    def one(key, basis):
        solution = tx.trace_of_function(
            op, tx.Inverse(), key=key, deflation=basis, **settings
        )
        return solution.value, solution.std_err, solution.stats["num_steps"]

    run = jax.jit(jax.vmap(one, in_axes=(0, None)))
    exact = np.sum(1 / values)
    plain, _, plain_steps = run(KEYS[:20], np.zeros((side**2, 0)))
    deflated, bars, steps = run(KEYS[:20], vectors[:, :9])
    assert np.std(deflated) < np.std(plain) / 5
    assert np.max(steps) < np.min(plain_steps) / 2
    assert np.sqrt(np.mean(((deflated - exact) / bars) ** 2)) < 1.6


SETTINGS = {"k": 6, "num_steps": 30}
PRECONDITIONER = tx.nystrom_preconditioner(moved(0), 8, key=KEY, shift=0.5)
FUNCTIONS = {
    "logdet": lambda op, **s: tx.logdet(op, **s),
    "logdet, preconditioned": lambda op, **s: tx.logdet(
        op, preconditioner=PRECONDITIONER, **s
    ),
    "inverse": lambda op, **s: tx.trace_of_function(op, tx.Inverse(), **s),
    "variances": lambda op, **s: tx.diagonal_of_function(
        op, tx.Inverse(), HUTCHINSON, **s
    ),
}


def exact_answers(name):
    if name.startswith("logdet"):
        return np.linalg.slogdet(MATRIX)[1], np.trace(INVERSE @ DIRECTION)
    slopes = -INVERSE @ DIRECTION @ INVERSE
    read = np.trace if name == "inverse" else np.diag
    return read(INVERSE), read(slopes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_derivatives_are_unbiased(name):
    def both(key):
        def value(t):
            solution = FUNCTIONS[name](moved(t), key=key, deflation=DEFLATED, **SETTINGS)
            return solution.value, (solution.interval(), solution.result._value)

        return jax.jvp(value, (0.0,), (1.0,), has_aux=True)

    values, slopes, ((low, high), results) = jax.jit(jax.vmap(both))(KEYS[:100])
    value, slope = exact_answers(name)
    assert not np.any(results)
    assert is_mean(values, value)
    assert is_mean(slopes, slope)
    assert np.mean((low <= value) & (value <= high)) > 0.9


@pytest.mark.parametrize("name", ["logdet", "variances"])
def test_reverse_mode_is_the_transpose(name):
    weights = np.random.default_rng(4).normal(size=N if name == "variances" else ())

    def value(t):
        solution = FUNCTIONS[name](moved(t), key=KEY, deflation=DEFLATED, **SETTINGS)
        return jnp.vdot(weights, solution.value)

    forward = jax.jvp(value, (0.0,), (1.0,))[1]
    np.testing.assert_allclose(jax.grad(value)(0.0), forward, rtol=1e-9)


def test_second_derivatives_are_refused():
    gradient = tx.SolveGradient(lx.CG(rtol=1e-10, atol=1e-10))

    def value(t):
        settings = {"key": KEY, "deflation": DEFLATED, "gradient": gradient}
        return tx.logdet(moved(t), **settings, **SETTINGS).value

    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        jax.grad(jax.grad(value))(0.0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1e-1, np.inf])
def test_inexact_vectors_are_counted_or_flagged(name, noise):
    basis = GARBAGE if np.isinf(noise) else DEFLATED + noise * GARBAGE / N**0.5

    @jax.jit
    def run(basis):
        settings = {"k": 32, "num_steps": 35, "key": KEY, "throw": False}
        solution = FUNCTIONS[name](moved(0), deflation=basis, **settings)
        flagged = solution.result == tx.RESULTS.inexact_deflation
        error = solution.stats["deflation_error"]
        return solution.value, solution.std_err, flagged, error

    value, bar, flagged, error = run(basis)
    exact, _ = exact_answers(name)
    if noise <= 1e-6:
        assert not flagged
        assert error < 1e-4
    if np.isinf(noise):
        assert flagged
    if not flagged:
        assert np.mean(np.abs(value - exact) <= 4 * bar) > 0.97


def test_indefinite_and_negative_operators():
    signs = np.where(np.arange(N) % 3 == 0, -1, 1)
    matrix = hermitian(1, VALUES * signs)
    basis = np.linalg.eigh(matrix)[1][:, [0, 1, -1]]
    exact = np.sum(np.log(VALUES))
    settings = {"k": 32, "num_steps": 40, "key": KEY}
    op = moved(0, matrix, lx.symmetric_tag)
    solution = tx.logdet(op, deflation=basis, **settings)
    assert abs(solution.value - exact) < 4 * solution.std_err + 1e-6
    op = moved(0, -MATRIX, lx.negative_semidefinite_tag)
    solution = tx.logdet(op, deflation=DEFLATED, **settings)
    assert abs(solution.value - exact) < 4 * solution.std_err
    assert solution.stats["sign"] == (-1) ** N
    # An eigenvector with an eigenvalue outside of the domain.
    op = moved(0, hermitian(1, np.append(VALUES[:-1], 0)))
    null = np.linalg.eigh(hermitian(1, np.append(VALUES[:-1], 0)))[1][:, :1]
    solution = tx.logdet(op, deflation=null, throw=False, **settings)
    assert solution.result == tx.RESULTS.not_positive_definite


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.complex128])
def test_dtypes(dtype):
    matrix = hermitian(5, VALUES, dtype)
    basis = np.linalg.eigh(matrix)[1][:, -3:].astype(dtype)
    settings = {"k": 24, "key": KEY, "deflation": basis}
    op = matrix_free(jnp.asarray(matrix), PSD)
    solution = tx.trace(op, HUTCHINSON, **settings)
    assert solution.value.dtype == dtype
    assert abs(solution.value - np.sum(VALUES)) < 4 * solution.std_err
    solution = tx.logdet(op, num_steps=30, **settings)
    assert solution.value.dtype == jnp.finfo(dtype).dtype
    assert abs(solution.value - np.sum(np.log(VALUES))) < 4 * solution.std_err


def test_leaf_traces_of_a_pytree():
    shapes = {"a": (2, 5), "b": (30,)}
    structure = {
        name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in shapes.items()
    }
    dense = jnp.asarray(MATRIX)

    def mv(tree):
        image = dense @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": image[:10].reshape(2, 5), "b": image[10:]}

    op = lx.FunctionLinearOperator(mv, structure, PSD)
    basis = {"a": DEFLATED.T[:, :10].reshape(R, 2, 5), "b": DEFLATED.T[:, 10:]}

    def traces(key):
        return tx.leaf_traces(op, HUTCHINSON, k=20, key=key, deflation=basis).value

    values = jax.jit(jax.vmap(traces))(KEYS)
    diagonal = np.diag(MATRIX)
    assert is_mean(values["a"], np.sum(diagonal[:10]))
    assert is_mean(values["b"], np.sum(diagonal[10:]))


def test_budgets_and_states():
    def run(max_k, state=None, **settings):
        rule = tx.Adaptive(rtol=1e-3, max_k=max_k)
        settings = {"k": rule, "key": KEY, "throw": False, "state": state} | settings
        return tx.trace(moved(0), HUTCHINSON, deflation=DEFLATED, **settings)

    assert run(20, k=20).matvecs == 20
    first = run(20)
    assert first.matvecs <= 20
    np.testing.assert_allclose(run(36, first.state).value, run(36).value, rtol=1e-12)
    # A budget of n and more is the exact answer, without the vectors.
    exact = run(N, k=N)
    np.testing.assert_allclose(exact.value, np.trace(MATRIX), rtol=1e-12)
    assert exact.stats["exact"]
    # A tolerance is relative to the whole trace, of which the estimate is a part.
    loose = run(36, k=tx.Adaptive(rtol=0.1, max_k=36))
    assert loose.successful
    assert loose.std_err < 0.1 * loose.value


@pytest.mark.parametrize("basis", [DEFLATED, np.zeros((N, 0)), None])
def test_devices_agree(basis):
    for call in (tx.trace, tx.diagonal):
        values = [
            call(moved(0), HUTCHINSON, k=20, key=KEY, deflation=basis, execution=where)
            for where in (tx.Local(), tx.Sharded(tx.probe_mesh(), "probes"))
        ]
        np.testing.assert_allclose(values[0].value, values[1].value, rtol=1e-12)


def test_null_space_and_deflation_together():
    matrix = hermitian(1, np.append(VALUES[:-1], 0))
    vectors = np.linalg.eigh(matrix)[1]
    op, settings = moved(0, matrix), {"num_steps": 39, "k": 24, "key": KEY}
    arguments = {"null_space": vectors[:, 0], "deflation": vectors[:, -2:]}
    solution = tx.logdet(op, **arguments, **settings)
    assert abs(solution.value - np.sum(np.log(VALUES[:-1]))) < 4 * solution.std_err


def test_bad_input():
    with pytest.raises(ValueError, match="must be Hermitian"):
        tx.trace(moved(0, tags=()), k=20, key=KEY, deflation=DEFLATED)
    with pytest.raises(ValueError, match="must be Hermitian"):
        tx.trace_of_function(
            moved(0, tags=()), tx.Exp(), k=20, key=KEY, deflation=DEFLATED
        )
    with pytest.raises(ValueError, match="Raise `k` to 6"):
        tx.trace(moved(0), tx.XTraceEstimator(), k=5, key=KEY, deflation=DEFLATED)
    with pytest.raises(ValueError, match="`deflation` must have the shapes"):
        tx.diagonal(moved(0), k=20, key=KEY, deflation=DEFLATED[1:])
    with pytest.raises(TypeError, match="`deflation` must be an array"):
        tx.diagonal(moved(0), k=20, key=KEY, deflation=[DEFLATED])
