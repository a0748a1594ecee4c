"""Many parameters of a function from the products of one; `Inverse` with a shift."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from .helpers import hermitian


N = 24
KEY = jr.key(0)
PSD = lx.positive_semidefinite_tag
SCALES = np.array([0.3, 0.5, 2.0])
MATRIX = hermitian(0, np.geomspace(0.1, 3, N))


def counting(matrix, tags):
    """The operator, and a list to which each product with it adds an entry."""
    calls = []

    def on_host(v):
        calls.append(v.shape)
        return matrix @ v

    structure = jax.ShapeDtypeStruct((N,), float)
    product = lambda v: jax.pure_callback(  # noqa: E731
        on_host, structure, v, vmap_method="sequential"
    )
    return lx.FunctionLinearOperator(product, structure, tags), calls


def trace_of(operator, function, **settings):
    settings = {"k": 4, "num_steps": 6, "key": KEY} | settings
    return tx.trace_of_function(operator, function, **settings).value


CALLS = {
    "exp": (PSD, lambda operator, s: trace_of(operator, tx.Exp(-s))),
    "inverse": (PSD, lambda operator, s: trace_of(operator, tx.Inverse(s))),
    "arnoldi": ((), lambda operator, s: trace_of(operator, tx.Exp(-s))),
    "general inverse": ((), lambda operator, s: trace_of(operator, tx.Inverse(s))),
    "exact": (PSD, lambda operator, s: trace_of(operator, tx.Exp(-s), k=N)),
    "blocks": (
        PSD,
        lambda operator, s: trace_of(
            operator, tx.Inverse(s), execution=tx.Local(block_size=2)
        ),
    ),
    "log_trace_exp": (
        PSD,
        lambda operator, s: (
            tx.log_trace_exp(operator, s, k=4, num_steps=6, key=KEY).value
        ),
    ),
    "several functions": (
        PSD,
        lambda operator, s: trace_of(
            operator,
            lambda x: jax.lax.switch((2 * s).astype(int), [jnp.tanh, jnp.exp], x),
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_parameters_costs_no_product(name):
    tags, call = CALLS[name]
    operator, calls = counting(MATRIX, tags)
    one_by_one = []
    for scale in SCALES:
        calls.clear()
        one_by_one.append(call(operator, jnp.array(scale)))
        jax.effects_barrier()
        single = len(calls)
    assert single == (N if name == "exact" else 24)
    calls.clear()
    together = jax.jit(jax.vmap(lambda s: call(operator, s)))(jnp.asarray(SCALES))
    assert np.allclose(together, jnp.stack(one_by_one), rtol=1e-9)
    assert len(calls) == single


@pytest.mark.parametrize(
    ("tags", "dtype"), [(PSD, np.float32), (PSD, np.float64), ((), np.float64)]
)
def test_shifted_inverse(tags, dtype):
    """That of the operator with the shift on its diagonal: values, and derivatives in the
    operator and in the shift; and the exact answer."""
    matrix = MATRIX.astype(dtype)

    @jax.jit
    def shifted(shift, matrix):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return trace_of(operator, tx.Inverse(shift), num_steps=N, throw=False)

    @jax.jit
    def plain(shift, matrix):
        operator = lx.MatrixLinearOperator(matrix + shift * jnp.eye(N, dtype=dtype), tags)
        return trace_of(operator, tx.Inverse(), num_steps=N, throw=False)

    shift = dtype(0.2)
    tolerance = {"rtol": 2e3 * float(np.finfo(dtype).eps)}
    assert np.allclose(shifted(shift, matrix), plain(shift, matrix), **tolerance)
    ours, theirs = (jax.grad(f, argnums=(0, 1))(shift, matrix) for f in (shifted, plain))
    assert np.allclose(ours[1], theirs[1], atol=tolerance["rtol"] * 10)
    inverse = np.linalg.inv(MATRIX + 0.2 * np.eye(N))
    probes = np.asarray(tx.RademacherSampler()(KEY, N, 4))
    slope = -np.mean(np.sum((inverse @ probes) ** 2, axis=0))
    assert np.allclose(ours[0], slope, **tolerance)
    operator = lx.MatrixLinearOperator(matrix, tags)
    exact = trace_of(operator, tx.Inverse(0.2), k=N)
    assert np.allclose(exact, np.trace(inverse), **tolerance)


def test_bracket_of_a_shifted_inverse():
    """Of a singular operator, whose smallest eigenvalue is known to be 0."""
    matrix = hermitian(0, np.append(0.0, np.geomspace(1e-3, 3, N - 1)))
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"k": 4, "num_steps": 6, "key": KEY}
    solution = tx.trace_of_function(operator, tx.Inverse(0.01), **settings)
    probes = np.asarray(tx.RademacherSampler()(KEY, N, 4))
    inverse = np.linalg.inv(matrix + 0.01 * np.eye(N))
    exact = np.sum(probes * (inverse @ probes), axis=0)
    low, high = np.asarray(solution.stats["sample_brackets"]).T
    assert np.all((low <= exact + 1e-9) & (exact <= high + 1e-9))


def test_shift_misuse():
    with pytest.raises(ValueError, match=r"`shift` must not be negative. Found -1"):
        tx.Inverse(-1.0)
    operator = lx.MatrixLinearOperator(MATRIX, PSD)
    solution = tx.trace_of_function(
        operator, tx.Inverse(jnp.array(-1.0)), k=4, num_steps=3, key=KEY, throw=False
    )
    assert solution.result != tx.RESULTS.successful
    gradient = tx.SolveGradient(lx.CG(1e-6, 1e-6))
    with pytest.raises(ValueError, match=r"`traceax.Inverse` without a shift"):
        trace_of(operator, tx.Inverse(0.5), gradient=gradient)
