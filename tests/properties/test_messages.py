"""Messages name the mistake that was made, and advice that works; and what surrounds a
call: callbacks, pickling, the entries of `stats`."""

import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse.linalg
from jax.experimental.sparse import BCOO
from scipy.sparse import csr_array

import traceax as tx
import traceax._run.sharded

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 12, jr.key(0)
SPD = hermitian(0, np.linspace(1.0, 4.0, N))
GENERAL = np.random.default_rng(1).standard_normal((N, N)) + 4 * np.eye(N)
VECTOR = jax.ShapeDtypeStruct((N,), float)
SPD_OPERATOR = lx.MatrixLinearOperator(jnp.asarray(SPD), PSD)

pytestmark = pytest.mark.usefixtures("as_users_call")


def message_of(call, exception=TypeError):
    with pytest.raises(exception) as error:
        call()
    return str(error.value)


def trace(operator):
    return tx.trace(operator, k=N)


# --- what is no operator ---


@pytest.mark.parametrize("matrix", [BCOO.fromdense(GENERAL), csr_array(GENERAL)])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x + 2.0 * SPD_OPERATOR])
def test_a_matrix_that_is_no_array(matrix, wrap):
    operator = wrap(lx.MatrixLinearOperator(matrix))
    message = message_of(lambda: tx.trace(operator, k=4, key=KEY))
    kind = type(matrix)
    assert f"of an object of type {kind.__module__}.{kind.__qualname__}. " in message
    assert "`traceax.as_operator(matrix)`" in message


@pytest.mark.parametrize(
    "product", [lambda v: csr_array(GENERAL) @ v, lambda v: v if v[0] > 0 else -v]
)
def test_a_product_that_jax_cannot_trace(product):
    operator = lx.FunctionLinearOperator(product, VECTOR)
    message = message_of(lambda: tx.trace(operator, k=4, key=KEY))
    assert "The product of `operator` must be one that JAX can trace" in message
    # The message has code that works.
    code = re.search(r"pass `(scipy\..*)`\. See the guide", message)
    assert code is not None
    names = {"scipy": scipy, "n": N, "function": lambda v: GENERAL @ v}
    exact = np.trace(GENERAL)
    np.testing.assert_allclose(trace(eval(code[1], names)).value, exact)


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (tx.gaussian_log_prob, np.ones(N)),
        (tx.trace_of_function, tx.Log()),
        (tx.trace_of_function, jnp.log),
        (tx.diagonal_of_function, jnp.log),
        (tx.function_of, jnp.log),
        (tx.schatten_norm, 1),
        (tx.logdet, tx.SLQEstimator()),
        (tx.trace, tx.XTraceEstimator()),
    ],
)
def test_the_operator_comes_first(call, first):
    settings = {"num_steps": 2} if call is tx.function_of else {"k": 2, "key": KEY}
    message = message_of(lambda: call(first, SPD_OPERATOR, **settings))
    assert "The operator comes first" in message
    assert "Pass" not in message


# --- arguments and tags ---


@pytest.mark.parametrize("call", [tx.laplacian, tx.hessian])
def test_what_a_function_returns(call):
    x = jnp.ones(3)
    message = message_of(lambda: call(lambda x: jnp.sum(x > 0), x))
    assert "int64" in message
    assert "rounded, counted or compared" in message
    if call is tx.hessian:
        message = message_of(lambda: call(lambda x: jnp.sum(x) * 1j, x))
        assert "complex128" in message
        assert "its real and its imaginary part" in message
        message = message_of(lambda: call(lambda x: jnp.sum(x), jnp.ones(3, int)))
        assert "`x.astype(float)`" in message


def test_the_largest_singular_value():
    operator = lx.MatrixLinearOperator(jnp.asarray(GENERAL))
    call = lambda p: tx.schatten_norm(operator, p, k=N)  # noqa: E731
    message = message_of(lambda: call(np.inf), ValueError)
    assert "`stats['ritz_values'][1]` of a call with another `p`" in message
    largest = call(2).stats["ritz_values"][1]
    np.testing.assert_allclose(largest, np.linalg.norm(GENERAL, 2))


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, N])
def test_a_semidefinite_tag_of_what_is_not_symmetric(k):
    """Its antisymmetric part is no rounding error."""
    matrix = np.diag(np.linspace(1.0, 4.0, N)) + (GENERAL - GENERAL.T) / 2
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    settings = {"k": k, "num_steps": 6, "key": KEY, "throw": False}
    result = tx.trace_of_function(operator, tx.Exp(), **settings).result
    assert result == tx.RESULTS.precision_lost
    first, causes = tx.RESULTS[result].split("(b)")[0].split("(a)")
    assert "not Hermitian as its tag says" in first
    assert "leave out the tag" in causes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.usefixtures("without_exact_answers")
def test_a_symmetric_operator_without_its_tag(dtype):
    """Where the call fails it is told, for operators that are as good as symmetric."""
    matrix = hermitian(0, np.geomspace(1e-4, 1, 60), dtype)
    skew = np.triu(np.ones_like(matrix), 1) / 100
    tag = "traceax.hermitian_tag" if dtype == np.complex128 else "lineax.symmetric_tag"

    def fails(matrix):
        operator = matrix_free(matrix, ())
        settings = {"k": 5, "num_steps": tx.AdaptiveSteps(6), "key": jr.key(0)}
        with pytest.raises(Exception, match="too few") as failure:
            tx.trace_of_function(operator, tx.Inverse(), **settings)
        return " ".join(str(failure.value).split())

    told = fails(matrix)
    assert "it looks Hermitian" in told
    assert tag in told
    assert "looks Hermitian" not in fails(matrix + skew)


@pytest.mark.slow
def test_second_derivatives_of_an_exact_answer():
    def log_det(scale):
        operator = lx.MatrixLinearOperator(scale * jnp.asarray(SPD), PSD)
        return tx.logdet(operator, k=N).value

    message = message_of(lambda: jax.hessian(log_det)(1.0), NotImplementedError)
    assert "or a factorisation with `k >= n`" in message
    assert "traceax.SolveGradient(" in message


def test_more_rows_than_integers_of_32_bits():
    def call():
        size = jax.ShapeDtypeStruct((2**31 + 8,), jnp.float32)
        operator = lx.FunctionLinearOperator(lambda v: 2 * v, size)
        estimator, key = tx.XTraceEstimator(), jr.PRNGKey(0)
        return tx.trace(operator, estimator, k=4, key=key, throw=False).value

    with jax.enable_x64(False):
        message = message_of(lambda: jax.eval_shape(call), ValueError)
    assert "more than 2^31 - 1 rows" in message
    assert "jax_enable_x64" in message
    assert jax.eval_shape(call).dtype == jnp.float32


def test_successful():
    def call(matrix):
        operator = lx.MatrixLinearOperator(matrix)
        return tx.trace(operator, tx.HutchinsonEstimator(), k=4, key=KEY, throw=False)

    matrices = jnp.stack([jnp.asarray(GENERAL), jnp.full((N, N), jnp.nan)])
    good, bad = jax.jit(call)(matrices[0]), call(matrices[1])
    assert good.successful
    assert not bad.successful
    assert not jax.jit(lambda matrix: call(matrix).successful)(matrices[1])
    assert jax.vmap(call)(matrices).successful.tolist() == [True, False]


# --- products without an adjoint ---


@jax.custom_batching.custom_vmap
def batched(v):
    return jnp.asarray(SPD) @ v


@batched.def_vmap
def batched_rule(size, is_batched, v):
    return v @ jnp.asarray(SPD), True


def on_host(v):
    times = lambda v: np.asarray(v) @ SPD  # noqa: E731
    return jax.pure_callback(times, v, v, vmap_method="expand_dims")


def in_a_loop(v):
    step = lambda carry: (carry[0] + 1, jnp.asarray(SPD) @ carry[1])  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0] < 1, step, (0, v))[1]


CALLS = {
    "diagonal": lambda operator: tx.diagonal(operator, k=6, key=KEY),
    "logdet": lambda operator: tx.logdet(operator, k=6, num_steps=3, key=KEY),
    "schatten_norm": lambda operator: tx.schatten_norm(
        operator, 1, k=6, num_steps=3, key=KEY
    ),
}


@pytest.mark.parametrize("product", [batched, on_host, in_a_loop])
@pytest.mark.parametrize("name", CALLS)
def test_a_product_without_an_adjoint(name, product):
    operator = lx.FunctionLinearOperator(product, VECTOR)
    message = message_of(lambda: CALLS[name](operator), NotImplementedError)
    for part in ("the adjoint of `operator`", "`lineax.symmetric_tag`", "The cause: "):
        assert part in message
    assert "`traceax.HutchinsonEstimator()`" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_symmetric_operator_needs_no_adjoint(name):
    tag = lx.symmetric_tag
    operator = lx.FunctionLinearOperator(on_host, VECTOR, tag)
    found = CALLS[name](operator)
    expected = CALLS[name](matrix_free(jnp.asarray(SPD), tag))
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-10)


def test_hutchinson_needs_no_adjoint():
    operator = lx.FunctionLinearOperator(on_host, VECTOR)
    found = tx.diagonal(operator, tx.HutchinsonEstimator(), k=6, key=KEY)
    assert np.all(np.abs(found.value - np.diag(SPD)) < 6 * found.std_err)


def test_a_wide_product_without_an_adjoint():
    short = lambda v: on_host(v)[:4]  # noqa: E731
    operator = lx.FunctionLinearOperator(short, VECTOR)
    message = message_of(lambda: CALLS["schatten_norm"](operator), NotImplementedError)
    assert "the adjoint of `operator`" in message


# --- Laplacians ---


@jax.custom_vjp
def cubes(x):
    return jnp.sum(x**3)


cubes.defvjp(lambda x: (cubes(x), x), lambda x, g: (3 * g * x**2,))


def looped(x):
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))  # noqa: E731
    return jnp.sum(jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1])


def test_functions_without_derivatives():
    x = jnp.arange(1.0, 5.0)
    for settings in ({}, {"k": 2, "key": KEY}):
        call = lambda: tx.laplacian(cubes, x, **settings)  # noqa: E731, B023
        message = message_of(call, NotImplementedError)
        assert "`fn` must be differentiable twice in forward mode" in message
        assert "`traceax.trace` of `traceax.hessian(fn, x)`" in message
    assert tx.trace(tx.hessian(cubes, x), k=4).value == 60
    message = message_of(lambda: tx.laplacian(looped, x), NotImplementedError)
    assert "`fn` must be differentiable once in reverse mode" in message
    assert "`jax.lax.scan`" in message


# --- callbacks ---


class Told:
    """A callback that raises when it is called for the third time."""

    def __init__(self):
        self.error, self.calls = ZeroDivisionError("of the callback"), 0

    def __call__(self, *news):
        self.calls += 1
        if self.calls == 3:
            raise self.error

    def budget(self, **settings):
        known = {"rtol": 1e-9, "max_k": 10, "round_size": 2, "min_samples": 4}
        return tx.Adaptive(callback=self, **known, **settings)

    def run(self, throw=False, **settings):
        estimator, operator = tx.HutchinsonEstimator(), matrix_free(jnp.asarray(GENERAL))
        known = {"k": self.budget(), "key": KEY, "throw": throw}
        return tx.trace(operator, estimator, **known, **settings)


@pytest.mark.slow(but="4-True")
@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("devices", [0, 4])
def test_a_callback_that_raises(devices, throw):
    """Its exception is what the call raises, after the round, and nothing is left of it
    for the next call."""
    told, execution = Told(), tx.Local()
    if devices:
        execution = tx.Sharded(tx.probe_mesh(jax.devices()[:devices]))
    with pytest.raises(ZeroDivisionError) as error:
        told.run(throw, execution=execution)
    assert error.value is told.error
    assert told.calls == 3
    solution = told.run(execution=execution)
    assert told.calls == 8
    assert solution.result == tx.RESULTS.max_matvecs_reached
    assert solution.stats["num_matvecs"] == 10


def test_a_callback_that_raises_in_a_compiled_function(capfd):
    told = Told()
    run = eqx.filter_jit(told.run)
    solution = run()
    assert solution.result == tx.RESULTS.interrupted
    assert not solution.successful
    assert solution.stats["num_matvecs"] == 6
    assert "ZeroDivisionError: of the callback" in capfd.readouterr().err
    assert "which is printed above" in tx.RESULTS[solution.result]
    assert run().result == tx.RESULTS.max_matvecs_reached


@pytest.mark.slow
def test_a_callback_that_raises_before_the_exact_answer():
    """Which is not computed then."""
    told, products = Told(), []

    def product(v):
        jax.debug.callback(lambda v: products.append(1), v)
        return jnp.asarray(GENERAL) @ v

    operator = lx.FunctionLinearOperator(product, VECTOR)
    budget = tx.Adaptive(rtol=1e-9, max_k=40, round_size=2, callback=told)
    settings = {"k": budget, "key": KEY, "execution": tx.Local(1)}
    with pytest.raises(ZeroDivisionError):
        tx.trace(operator, tx.HutchinsonEstimator(), **settings)
    jax.effects_barrier()
    assert len(products) == 6


def test_an_interrupt_that_meets_the_host():
    """Ctrl-C, which Python handles while a product is made on the host."""

    def interrupted(v):
        raise KeyboardInterrupt

    product = lambda v: jax.pure_callback(interrupted, v, v)  # noqa: E731
    operator = lx.FunctionLinearOperator(product, VECTOR)
    settings = {"k": 2, "key": KEY, "execution": tx.Local(1)}
    with pytest.raises(KeyboardInterrupt):
        tx.trace(operator, tx.HutchinsonEstimator(), **settings)
    assert trace(SPD_OPERATOR).successful


# --- pickling ---


def test_a_mesh_is_pickled_by_the_numbers_of_its_devices(monkeypatch):
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("probes", "rows"))
    execution = tx.Sharded(mesh, block_size=3, rows="rows")
    stored = pickle.dumps(execution)
    found = pickle.loads(stored)
    assert found == execution
    assert hash(found) == hash(execution)
    monkeypatch.setattr(traceax._run.sharded, "devices", lambda: jax.devices()[:3])
    message = message_of(lambda: pickle.loads(stored), ValueError)
    assert "('cpu', 3)" in message
    assert "traceax.probe_mesh()" in message


# --- entries of `stats` ---


STATS = {
    "logdet": lambda **settings: tx.logdet(SPD_OPERATOR, **settings),
    "inverse": lambda **settings: tx.trace_of_function(
        SPD_OPERATOR, tx.Inverse(), **settings
    ),
    "krylov_aware": lambda **settings: tx.trace_of_function(
        SPD_OPERATOR, tx.Exp(), tx.KrylovAwareEstimator(), **settings
    ),
    "general": lambda **settings: tx.trace_of_function(
        lx.MatrixLinearOperator(jnp.asarray(GENERAL)), tx.Exp(), **settings
    ),
    "schatten_norm": lambda **settings: tx.schatten_norm(SPD_OPERATOR, 1, **settings),
    "difference": lambda **settings: tx.trace_difference(
        SPD_OPERATOR, lx.MatrixLinearOperator(jnp.eye(N), PSD), tx.Log(), **settings
    ),
    "diagonal": lambda **settings: tx.diagonal_of_function(
        SPD_OPERATOR, tx.Log(), **settings
    ),
    "log_trace_exp": lambda **settings: tx.log_trace_exp(SPD_OPERATOR, **settings),
}


@pytest.mark.slow(but="logdet")
@pytest.mark.parametrize("name", STATS)
def test_entries_are_the_same_beyond_n(name):
    below = STATS[name](k=5, num_steps=3, key=KEY).stats
    beyond = STATS[name](k=N, num_steps=3, key=KEY).stats
    assert set(below) == set(beyond)
    assert below["num_steps"] == 3
    assert beyond["num_steps"] == 0
    if "samples" in beyond:
        assert beyond["samples"].shape == (1,)
        assert beyond["gradient_residual"].tolist() == [0]
    if "sample_brackets" in beyond:
        assert beyond["sample_brackets"].tolist() == [beyond["bracket"].tolist()]


@pytest.mark.slow
def test_entries_of_an_exact_answer_that_ends_an_adaptive_run():
    budget = tx.Adaptive(rtol=1e-9, max_k=3 * N, round_size=4, min_samples=4)
    solution = STATS["logdet"](k=budget, num_steps=3, key=KEY)
    samples, stats = len(solution.stats["samples"]), solution.stats
    assert stats["gradient_residual"].tolist() == samples * [0]
    assert stats["sample_brackets"].shape == (samples, 2)
    assert np.ptp(stats["sample_brackets"]) == np.ptp(stats["samples"]) == 0
    assert stats["num_steps"] == 3


@pytest.mark.slow(but="complex")
@pytest.mark.parametrize("dtype", [float, complex])
def test_the_sign_of_a_general_determinant(dtype):
    generator = np.random.default_rng(2)
    matrices = generator.standard_normal((20, N, N, 2)).view(complex)[..., 0]
    matrices = matrices if dtype is complex else matrices.real

    def call(matrix):
        solution = tx.logdet(lx.MatrixLinearOperator(matrix), k=N)
        return solution.value, solution.stats["sign"]

    values, signs = jax.jit(jax.vmap(call))(jnp.asarray(matrices))
    expected, logs = np.linalg.slogdet(matrices)
    np.testing.assert_allclose(signs, expected, atol=1e-10)
    np.testing.assert_allclose(values, logs, rtol=1e-10)
    if dtype is float:
        assert set(signs.tolist()) == {-1, 1}


@pytest.mark.slow(but="tags0-12")
@pytest.mark.parametrize("k", [5, N])
@pytest.mark.parametrize("tags", [PSD, lx.negative_semidefinite_tag, ()])
def test_the_determinant_of_a_zero_operator(k, tags):
    sign = -1 if tags is lx.negative_semidefinite_tag else 1

    def log_det(scale):
        operator = matrix_free(scale * jnp.asarray(SPD), tags)
        solution = tx.logdet(operator, k=k, num_steps=4, key=KEY, throw=False)
        return solution.value, solution

    scales = sign * jnp.array([0.0, 2.0])
    slopes, solutions = jax.vmap(jax.grad(log_det, has_aux=True))(scales)
    # The other operator of the batch is not touched.
    np.testing.assert_allclose(slopes[1], sign * N / 2, rtol=1e-10)
    zero, other = (jax.tree.map(lambda x, i=i: x[i], solutions) for i in range(2))
    assert other.successful
    assert np.isfinite(other.value)
    assert not zero.successful
    assert zero.value == -np.inf
    assert zero.interval() == (-np.inf, -np.inf)
    assert zero.stats["sign"] == 0
