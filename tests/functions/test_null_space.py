"""Functions on the complement of a null space, against eigenvalues from NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy import stats

import traceax as tx


N, K, STEPS, NUM_KEYS = 40, 6, 30, 300
KEY = jr.key(20261201)
KEYS = jr.split(KEY, NUM_KEYS)
# Two zeros, and a spread of positive numbers.
VALUES = np.concatenate([[0, 0], np.geomspace(0.2, 4, N - 2)])
POSITIVE = VALUES[2:]


def eigenvectors(seed, dtype=float):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, N))
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=(N, N))
    return np.linalg.qr(x)[0]


VECTORS = eigenvectors(1)
NULL = VECTORS[:, :2]


def matrix(values=VALUES, vectors=VECTORS):
    x = (vectors * values) @ vectors.conj().T
    return jnp.asarray((x + x.conj().T) / 2)


def operator(values=VALUES, vectors=VECTORS, tag=lx.positive_semidefinite_tag):
    return lx.MatrixLinearOperator(matrix(values, vectors), tag)


def components(num):
    """The Laplacian of a random weighted graph of so many components, and indicators of
    these."""
    rng = np.random.default_rng(2)
    labels = np.arange(N) % num
    weights = np.triu(rng.uniform(size=(N, N)), 1) * (labels[:, None] == labels)
    weights = weights + weights.T
    return np.diag(weights.sum(axis=1)) - weights, labels[:, None] == np.arange(num)


@pytest.mark.parametrize("num", [1, 3])
def test_spanning_trees_and_the_kirchhoff_index_of_a_graph(num):
    laplacian, indicators = components(num)
    eigenvalues = np.linalg.eigvalsh(laplacian)[num:]
    op = lx.MatrixLinearOperator(jnp.asarray(laplacian), lx.positive_semidefinite_tag)
    settings = {"k": N, "null_space": indicators}
    log = tx.logdet(op, **settings)
    inverse = tx.trace_of_function(op, tx.Inverse(), **settings)
    np.testing.assert_allclose(log.value, np.sum(np.log(eigenvalues)), rtol=1e-12)
    np.testing.assert_allclose(inverse.value, np.sum(1 / eigenvalues), rtol=1e-12)
    assert log.stats["sign"] == 1
    assert log.stats["null_space_residual"] < 1e-14
    # Kirchhoff: any cofactor is the number of spanning trees, |L|_+ / n.
    if num == 1:
        minor = np.linalg.slogdet(laplacian[1:, 1:])[1]
        np.testing.assert_allclose(log.value - np.log(N), minor, rtol=1e-12)


PRECONDITIONER = tx.nystrom_preconditioner(operator(), 8, key=KEY, shift=0.5)
CALLS = {
    "logdet": lambda key: tx.logdet(
        operator(), k=K, num_steps=STEPS, key=key, null_space=NULL
    ),
    "logdet, preconditioned": lambda key: tx.logdet(
        operator(),
        k=K,
        num_steps=STEPS,
        key=key,
        null_space=NULL,
        preconditioner=PRECONDITIONER,
    ),
    "logdet, Krylov-aware": lambda key: tx.logdet(
        operator(),
        tx.KrylovAwareEstimator(),
        k=K,
        num_steps=12,
        key=key,
        null_space=NULL,
    ),
    "Kirchhoff": lambda key: tx.trace_of_function(
        operator(), tx.Inverse(), k=K, num_steps=STEPS, key=key, null_space=NULL
    ),
    "variances": lambda key: tx.diagonal_of_function(
        operator(),
        tx.Inverse(),
        tx.HutchinsonEstimator(),
        k=K,
        num_steps=STEPS,
        key=key,
        null_space=NULL,
    ),
    "variances, preconditioned": lambda key: tx.diagonal_of_function(
        operator(),
        tx.Inverse(),
        tx.HutchinsonEstimator(),
        k=K,
        num_steps=STEPS,
        key=key,
        null_space=NULL,
        preconditioner=PRECONDITIONER,
    ),
}


def exact_answer(name):
    if name.startswith("logdet"):
        return np.sum(np.log(POSITIVE))
    inverse = np.linalg.pinv(matrix(), rcond=1e-10)
    return np.trace(inverse) if name == "Kirchhoff" else np.diag(inverse)


@pytest.mark.slow(but=("logdet", "variances"))
@pytest.mark.parametrize("name", CALLS)
def test_estimates_cover_the_exact_answer(name):
    def one(key):
        solution = CALLS[name](key)
        return solution.value, solution.interval(), solution.result._value

    values, (low, high), results = jax.jit(jax.vmap(one))(KEYS)
    exact = exact_answer(name)
    assert not np.any(results)
    z = (values.mean(axis=0) - exact) / (values.std(axis=0) / NUM_KEYS**0.5)
    # A false alarm in one of 1000 runs for each entry.
    assert np.max(np.abs(z)) < stats.norm.isf(0.0005 / z.size)
    coverage = np.mean((low <= exact) & (exact <= high))
    assert coverage > 0.92


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sign", [-1, 0])
def test_signs(sign, exact):
    signs = np.where(np.arange(N) % 3 == 0, -1, 1) if sign == 0 else -np.ones(N)
    tag = lx.symmetric_tag if sign == 0 else lx.negative_semidefinite_tag
    op = operator(VALUES * signs, tag=tag)
    solution = tx.logdet(op, k=N if exact else 20, key=KEY, null_space=NULL)
    error = abs(solution.value - np.sum(np.log(POSITIVE)))
    assert error < 4 * solution.std_err + 1e-10
    if exact or sign != 0:
        assert solution.stats["sign"] == np.prod(signs[2:])
    else:
        assert np.isnan(solution.stats["sign"])


def test_functions_with_a_pole_at_zero_of_an_indefinite_operator():
    values = VALUES * np.where(np.arange(N) % 3 == 0, -1, 1)
    op = operator(values, tag=lx.symmetric_tag)
    settings = {"key": KEY, "null_space": NULL}
    solution = tx.trace_of_function(op, lambda x: 1 / x, k=N, **settings)
    np.testing.assert_allclose(solution.value, np.sum(1 / values[2:]), rtol=1e-10)
    solution = tx.trace_of_function(op, tx.Exp(1j), k=20, num_steps=STEPS, **settings)
    error = solution.value - np.sum(np.exp(1j * values[2:]))
    assert abs(error) < 6 * solution.std_err


def solve(null_space, op=None, **settings):
    op = operator() if op is None else op
    settings = {"k": 20, "num_steps": STEPS, "key": KEY} | settings
    return tx.logdet(op, null_space=null_space, **settings)


def test_bases_of_one_space_agree():
    expected = solve(NULL).value
    mixed = NULL @ np.array([[1.0, 2], [3, -1]])
    dependent = np.c_[NULL, NULL @ [1.0, 2], 1e-30 * NULL[:, 0], np.zeros(N)]
    for basis in (mixed, dependent, NULL.T, jnp.asarray(NULL, jnp.float64)):
        np.testing.assert_allclose(solve(basis).value, expected, rtol=1e-12)
    # No vector at all is no null space, and one that misses a vector is not enough.
    assert not solve(np.zeros((N, 0)), throw=False).successful
    missing = solve(NULL[:, 1:], throw=False)
    assert missing.result == tx.RESULTS.not_positive_definite


def test_pytrees_have_a_leading_axis():
    dense = matrix()

    def mv(tree):
        x = jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        y = dense @ x
        return {"a": y[:20].reshape(4, 5), "b": y[20:]}

    shapes = {"a": (4, 5), "b": (20,)}
    structure = {
        name: jax.ShapeDtypeStruct(shape, dense.dtype) for name, shape in shapes.items()
    }
    op = lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)
    basis = {"a": NULL.T[:, :20].reshape(2, 4, 5), "b": NULL.T[:, 20:]}
    np.testing.assert_allclose(solve(basis, op).value, solve(NULL).value, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_dtypes(dtype):
    vectors = eigenvectors(3, dtype).astype(dtype)
    op = operator(VALUES.astype(np.float32), vectors)
    factor = 2 + 1j if dtype == np.complex128 else 2
    solution = solve(vectors[:, :2] * dtype(factor), op)
    assert solution.value.dtype == jnp.finfo(dtype).dtype
    error = abs(solution.value - np.sum(np.log(POSITIVE)))
    assert error < 4 * solution.std_err
    variances = tx.diagonal_of_function(op, tx.Inverse(), k=N, null_space=vectors[:, :2])
    expected = np.diag(np.linalg.pinv(np.asarray(op.matrix), rcond=1e-5))
    rtol = 100 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(variances.value, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales(scale):
    solution = solve(NULL * scale, operator(VALUES * scale))
    expected = solve(NULL).value + (N - 2) * np.log(scale)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-10)


def test_ill_conditioned_complements_are_honest():
    values = np.concatenate([[0, 0], np.geomspace(1e-12, 1, N - 2)])
    op, exact = operator(values), np.sum(np.log(values[2:]))
    solution = solve(NULL, op, num_steps=tx.AdaptiveSteps())
    assert abs(solution.value - exact) < 4 * solution.std_err + 1e-3


def test_null_spaces_of_all_directions():
    zero = operator(0 * VALUES)
    assert abs(solve(VECTORS, zero).value) < 1e-10
    solution = solve(NULL, zero, throw=False)
    assert solution.result == tx.RESULTS.not_positive_definite


def test_a_known_spectrum_is_used():
    path = 2 * np.eye(8) - np.eye(8, k=1) - np.eye(8, k=-1)
    path[0, 0] = path[-1, -1] = 1
    part = lx.MatrixLinearOperator(jnp.asarray(path), lx.positive_semidefinite_tag)
    grid = tx.kronecker_sum(part, part)
    ones = jax.tree.map(lambda x: jnp.ones((1, *x.shape)), grid.in_structure())
    solution = tx.logdet(grid, null_space=ones)
    line = np.linalg.eigvalsh(path)
    eigenvalues = np.sort((line[:, None] + line).reshape(-1))[1:]
    np.testing.assert_allclose(solution.value, np.sum(np.log(eigenvalues)), rtol=1e-12)
    assert solution.stats["exact"]
    assert solution.matvecs <= 3


DIRECTION = np.random.default_rng(4).normal(size=(N, N))
OUTSIDE = np.eye(N) - NULL @ NULL.T
DIRECTION = OUTSIDE @ (DIRECTION + DIRECTION.T) @ OUTSIDE
INVERSE = np.linalg.pinv(np.asarray(matrix()), rcond=1e-10)


def moved(t):
    moving = matrix() + t * jnp.asarray(DIRECTION)
    return lx.MatrixLinearOperator(moving, lx.positive_semidefinite_tag)


@pytest.mark.parametrize("kind", ["Lanczos", "solves", "variances"])
def test_derivatives_are_unbiased(kind):
    def value(t, key):
        settings = {"k": K, "num_steps": STEPS, "key": key, "null_space": NULL}
        if kind == "variances":
            plain = tx.HutchinsonEstimator()
            return tx.diagonal_of_function(
                moved(t), tx.Inverse(), plain, **settings
            ).value
        if kind == "solves":
            settings["gradient"] = tx.SolveGradient(lx.CG(rtol=1e-10, atol=1e-10))
        return tx.logdet(moved(t), **settings).value

    keys = KEYS[:100]
    slopes = jax.jit(jax.vmap(lambda key: jax.jacfwd(value)(0.0, key)))(keys)
    exact = np.trace(INVERSE @ DIRECTION)
    if kind == "variances":
        exact = -np.diag(INVERSE @ DIRECTION @ INVERSE)
    z = (slopes.mean(axis=0) - exact) / (slopes.std(axis=0) / len(keys) ** 0.5)
    assert np.max(np.abs(z)) < stats.norm.isf(0.0005 / z.size)


def test_the_derivative_of_the_exact_answer():
    slope = jax.grad(lambda t: tx.logdet(moved(t), k=N, null_space=NULL).value)(0.0)
    np.testing.assert_allclose(slope, np.trace(INVERSE @ DIRECTION), rtol=1e-9)


def test_transformations_and_devices():
    def value(scale, basis):
        op = lx.MatrixLinearOperator(scale * matrix(), lx.positive_semidefinite_tag)
        return solve(basis, op).value

    expected = solve(NULL).value
    many = jax.jit(jax.vmap(value, in_axes=(0, None)))(jnp.array([1.0, 2.0]), NULL)
    shifts = (N - 2) * np.log([1.0, 2.0])
    np.testing.assert_allclose(many, expected + shifts, rtol=1e-10)
    sharded = solve(NULL, execution=tx.Sharded(tx.probe_mesh(), "probes"))
    np.testing.assert_allclose(sharded.value, expected, rtol=1e-12)


def test_adaptive_budgets_continue():
    rule = tx.Adaptive(rtol=0.1, max_k=16)
    first = solve(NULL, k=rule, throw=False)
    rule = tx.Adaptive(rtol=1e-3, max_k=24)
    second = solve(NULL, k=rule, state=first.state, throw=False)
    whole = solve(NULL, k=rule, throw=False)
    np.testing.assert_allclose(second.value, whole.value, rtol=1e-12)


@pytest.mark.parametrize(
    "basis", [VECTORS[:, 1:3], np.ones(N), VECTORS], ids=["eigenvector", "ones", "all"]
)
def test_a_basis_outside_of_the_null_space_is_an_error(basis):
    with pytest.raises(ValueError, match=r"(?s)`null_space` must.*relative size"):
        solve(basis)
    assert solve(basis, throw=False).result == tx.RESULTS.not_null_space

    def checked(basis):
        return solve(basis, throw=False).result == tx.RESULTS.not_null_space

    assert jax.jit(checked)(jnp.asarray(basis))
    with pytest.raises(eqx.EquinoxRuntimeError, match="`null_space` must"):
        eqx.filter_jit(solve)(jnp.asarray(basis))


@pytest.mark.parametrize(
    ("basis", "error", "match"),
    [
        (NULL[:30], ValueError, "shapes"),
        (np.ones((N, N + 1)), ValueError, "at most as many"),
        (NULL + 1j, TypeError, "must be real"),
        ("ones", TypeError, "must be an array"),
        ({"a": NULL}, TypeError, "must be an array"),
        ([NULL], TypeError, "must be an array"),
    ],
)
def test_bad_bases(basis, error, match):
    with pytest.raises(error, match=f"`null_space` .*{match}"):
        solve(basis)


def test_untagged_operators_are_refused():
    with pytest.raises(ValueError, match="must be Hermitian"):
        solve(NULL, lx.MatrixLinearOperator(jnp.triu(matrix())))
