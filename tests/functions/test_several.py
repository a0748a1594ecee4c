"""Several functions of one operator, from the same runs."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N = 60
EIGENVALUES = np.linspace(0.3, 2, N) ** 2
MATRIX = hermitian(0, EIGENVALUES)
FUNCTIONS = {"Z": tx.Exp(-1.0), "energy": (lambda x: x * jnp.exp(-x), tx.Log())}
EXACT = {
    "Z": np.exp(-EIGENVALUES).sum(),
    "energy": (
        (EIGENVALUES * np.exp(-EIGENVALUES)).sum(),
        np.log(EIGENVALUES).sum(),
    ),
}
KEY = jr.key(3)
FIXED = {"k": 6, "num_steps": 8, "key": KEY}


def operator(matrix=MATRIX, tags=PSD):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), tags)


def mean_energy(traces):
    return traces["energy"][0] / traces["Z"]


def matches(solution, rtol):
    jax.tree.map(ft.partial(np.testing.assert_allclose, rtol=rtol), solution.value, EXACT)


def test_each_is_what_it_is_alone():
    """Values, error bars, bounds and derivatives."""

    def solve(functions):
        def value(scale):
            solution = tx.trace_of_function(operator(scale * MATRIX), functions, **FIXED)
            return solution.value, solution

        return jax.jacfwd(value, has_aux=True)(1.0)

    slopes, together = solve(FUNCTIONS)
    alone = map(solve, jax.tree.leaves(FUNCTIONS, is_leaf=callable))
    expected, each_alone = zip(*alone, strict=True)
    np.testing.assert_allclose(jax.tree.leaves(slopes), expected, rtol=1e-9)
    for name in ("std_err", "value"):
        found = jax.tree.leaves(getattr(together, name))
        np.testing.assert_allclose(found, [getattr(x, name) for x in each_alone])
    for name in ("bounds", "proven_bounds", "sample_brackets"):
        found = jax.tree.leaves(together.stats[name])
        expected = [x.stats[name] for x in each_alone]
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9)
    assert together.matvecs == each_alone[0].matvecs == 48
    assert together.covariance.shape == (3, 3)
    errors = np.asarray(jax.tree.leaves(together.std_err))
    np.testing.assert_allclose(np.diag(together.covariance), errors**2)


def test_a_tree_of_one():
    """It keeps its structure, and `print` shows its interval."""
    alone = tx.trace_of_function(operator(), tx.Exp(-1.0), **FIXED)
    tree = tx.trace_of_function(operator(), {"Z": tx.Exp(-1.0)}, **FIXED)
    np.testing.assert_allclose(tree.value["Z"], alone.value, rtol=1e-12)
    np.testing.assert_allclose(tree.std_err["Z"], alone.std_err, rtol=1e-12)
    ends = [f"{end:.1f}" for end in alone.interval()]
    assert "Trace of Exp" in repr(tree)
    assert all(end in repr(tree) for end in ends), tree


def test_exact():
    """By budget, and where steps are too few; a function of exact answers is exact."""
    for k in (N, tx.Adaptive(rtol=1e-9)):
        solution = tx.trace_of_function(operator(), FUNCTIONS, k=k, key=KEY)
        matches(solution, 1e-10)
        energy = solution.transform(mean_energy)
        np.testing.assert_allclose(energy.value, mean_energy(EXACT), rtol=1e-10)
        assert energy.std_err < 1e-10
    known = tx.kronecker(np.eye(1), operator())
    solution = tx.trace_of_function(known, FUNCTIONS)
    assert solution.matvecs == 0
    matches(solution, 1e-10)


@pytest.mark.slow
def test_adaptive():
    """The tolerance is for all values together, and a run goes on where it ended."""
    rule = tx.Adaptive(rtol=0.05, max_k=100)
    solution = tx.trace_of_function(operator(), FUNCTIONS, k=rule, num_steps=20, key=KEY)
    assert solution.successful
    for x, error, exact in zip(
        *map(jax.tree.leaves, (solution.value, solution.std_err, EXACT)), strict=True
    ):
        assert abs(x - exact) < 5 * error + 1e-10
    again = tx.trace_of_function(
        operator(), FUNCTIONS, k=rule, num_steps=20, key=KEY, state=solution.state
    )
    np.testing.assert_allclose(
        *map(jax.tree.leaves, (again.value, solution.value)), rtol=1e-12
    )


@pytest.mark.slow
def test_difference_on_a_mesh():
    """With colours of two strata, on two devices as on one."""
    other = operator(1.1 * MATRIX)
    sampler = tx.ColouredSampler(np.arange(N) % 2)
    mesh = tx.Sharded(tx.probe_mesh(jax.devices()[:2]))
    one, two = (
        tx.trace_difference(
            operator(),
            other,
            FUNCTIONS,
            tx.SLQEstimator(sampler),
            **FIXED,
            execution=execution,
        )
        for execution in (tx.Local(), mesh)
    )
    for name in ("value", "std_err"):
        found, expected = (jax.tree.leaves(getattr(x, name)) for x in (two, one))
        # The logarithm of a multiple has no sampling error, only rounding.
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(two.covariance, one.covariance, rtol=1e-6, atol=1e-11)
    exact = tx.trace_difference(operator(), other, FUNCTIONS, k=N)
    ends = one.interval(0.999, proven=False)
    for low, high, value in zip(*map(jax.tree.leaves, (*ends, exact.value)), strict=True):
        assert low < value < high


@pytest.mark.slow
@pytest.mark.parametrize("tags", [(), lx.symmetric_tag])
def test_complex_and_general(tags):
    """Functions with complex values, by Lanczos, and operators without a tag."""
    functions = [tx.Exp(-1j), tx.Exp(-0.5j)] if tags else [tx.Exp(-1.0), jnp.cos]
    solution = tx.trace_of_function(operator(tags=tags), functions, **FIXED)
    exact = [complex(np.sum(f(jnp.asarray(EIGENVALUES)))) for f in functions]
    for value, error, expected in zip(
        solution.value, solution.std_err, exact, strict=True
    ):
        assert abs(value - expected) < 5 * error
    parts = 4 if tags else 2
    assert solution.covariance.shape == (parts, parts)
    size = solution.transform(lambda x: jnp.abs(x[0]) if tags else x[0] - x[1])
    assert 0 < size.std_err < 2 * sum(solution.std_err)


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, 10, 40])
def test_coverage(k):
    """A 95% interval of the mean energy, and of the free entropy, covers 93% or more of
    400 keys: fewer by chance once in 10^3 if it covers 96%."""
    functions = {"Z": FUNCTIONS["Z"], "energy": FUNCTIONS["energy"][:1]}

    def entropy(traces):
        return mean_energy(traces) + jnp.log(traces["Z"])

    @jax.jit
    def covered(key):
        solution = tx.trace_of_function(
            operator(), functions, k=k, num_steps=20, key=key, throw=False
        )
        held = []
        for fn in (mean_energy, entropy):
            transformed = solution.transform(fn)
            low, high = transformed.interval()
            held.append((low <= fn(EXACT)) & (fn(EXACT) <= high))
        return jnp.stack(held)

    held = jax.lax.map(covered, jr.split(jr.key(0), 400), batch_size=50)
    assert np.all(np.mean(held, axis=0) > 0.93), np.mean(held, axis=0)


def test_messages():
    functions = {"a": tx.Exp(-1.0), "b": tx.Log()}
    call = ft.partial(tx.trace_of_function, operator(), **FIXED)
    with pytest.raises(TypeError, match="SLQEstimator"):
        call(functions, tx.KrylovAwareEstimator())
    with pytest.raises(ValueError, match="`deflation` is for a single function"):
        call(functions, deflation=jnp.eye(N, 2))
    with pytest.raises(ValueError, match="`null_space` is for a single function"):
        call(functions, null_space=jnp.eye(N, 1))
    with pytest.raises(TypeError, match="PyTree of them"):
        call(lambda x: jnp.stack([x, x**2]))
    with pytest.raises(TypeError, match="Found 3"):
        call({"a": tx.Log(), "b": 3})
    with pytest.raises(TypeError, match=r"Found \{\}"):
        call({})
