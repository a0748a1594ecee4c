"""Many parameters of a function from the products of one; `Inverse` with a shift."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian


N = 24
KEY = jr.key(0)
PSD = lx.positive_semidefinite_tag
SCALES = np.array([0.3, 0.5, 2.0])
MATRIX = hermitian(0, np.geomspace(0.1, 3, N))


@ft.cache
def probes():
    """Those of KEY."""
    return np.asarray(jax.jit(lambda: tx.RademacherSampler()(KEY, N, 4))())


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
    settings = {"k": 4, "num_steps": N, "key": KEY} | settings
    return tx.trace_of_function(operator, function, **settings).value


def exp(operator, s, **settings):
    return trace_of(operator, tx.Exp(-s), **settings)


def inverse(operator, s, **settings):
    return trace_of(operator, tx.Inverse(s), **settings)


def log_trace_exp(operator, s):
    return tx.log_trace_exp(operator, s, k=4, num_steps=N, key=KEY).value


def several(operator, s):
    functions, i = [jnp.tanh, jnp.exp], (2 * s).astype(int)
    return trace_of(operator, lambda x: jax.lax.switch(i, functions, x))


# Tags, a call, its settings, and the function of eigenvalues for each scale.
CALLS = {
    "exp": (PSD, exp, {}, lambda x, s: np.exp(-s * x)),
    "inverse": (PSD, inverse, {}, lambda x, s: 1 / (x + s)),
    "arnoldi": ((), exp, {}, lambda x, s: np.exp(-s * x)),
    "general inverse": ((), inverse, {}, lambda x, s: 1 / (x + s)),
    "exact": (PSD, exp, {"k": N}, lambda x, s: np.exp(-s * x)),
    "blocks": (PSD, inverse, {"execution": tx.Local(2)}, lambda x, s: 1 / (x + s)),
    "log_trace_exp": (PSD, log_trace_exp, {}, lambda x, s: np.exp(s * x)),
    "several": (PSD, several, {}, lambda x, s: np.tanh(x) if s < 0.5 else np.exp(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_parameters_costs_no_product(name):
    """As many as one call makes; and each value is that of dense matrix functions, which
    as many steps as there are dimensions give to rounding."""
    tags, call, settings, function = CALLS[name]
    operator, calls = counting(MATRIX, tags)
    together = jax.jit(jax.vmap(lambda s: call(operator, s, **settings)))(SCALES)
    jax.effects_barrier()
    assert len(calls) == (N if name == "exact" else 4 * N)
    nodes, basis = np.linalg.eigh(MATRIX)
    weights = 1 if name == "exact" else np.mean((basis.T @ probes()) ** 2, axis=1)
    expected = [np.sum(weights * function(nodes, s)) for s in SCALES]
    expected = np.log(expected) if name == "log_trace_exp" else expected
    assert np.allclose(together, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tags", "dtype"), [(PSD, np.float32), (PSD, np.float64), ((), np.float64)]
)
def test_shifted_inverse(tags, dtype):
    """That of the operator with the shift on its diagonal: values, and derivatives in the
    operator and in the shift; and the exact answer."""
    matrix = MATRIX.astype(dtype)

    def shifted(shift, matrix, **settings):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return trace_of(operator, tx.Inverse(shift), throw=False, **settings)

    def plain(shift, matrix):
        operator = lx.MatrixLinearOperator(matrix + shift * jnp.eye(N, dtype=dtype), tags)
        return trace_of(operator, tx.Inverse(), throw=False)

    @jax.jit
    def run(*of):
        both = [jax.value_and_grad(f, argnums=(0, 1))(*of) for f in (shifted, plain)]
        return *both, shifted(*of, k=N)

    tolerance = {"rtol": 2e3 * float(np.finfo(dtype).eps)}
    (value, ours), (other, theirs), exact = run(dtype(0.2), matrix)
    assert np.allclose(value, other, **tolerance)
    assert np.allclose(ours[1], theirs[1], atol=tolerance["rtol"] * 10)
    inverse = np.linalg.inv(MATRIX + 0.2 * np.eye(N))
    slope = -np.mean(np.sum((inverse @ probes()) ** 2, axis=0))
    assert np.allclose(ours[0], slope, **tolerance)
    assert np.allclose(exact, np.trace(inverse), **tolerance)


@pytest.mark.slow
def test_bracket_of_a_shifted_inverse():
    """Of a singular operator, whose smallest eigenvalue is known to be 0."""
    matrix = hermitian(0, np.append(0.0, np.geomspace(1e-3, 3, N - 1)))
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"k": 4, "num_steps": 6, "key": KEY}
    solution = tx.trace_of_function(operator, tx.Inverse(0.01), **settings)
    inverse = np.linalg.inv(matrix + 0.01 * np.eye(N))
    exact = np.sum(probes() * (inverse @ probes()), axis=0)
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
