"""Random operators, settings and keys against what is promised for all of them.

`pytest --all` takes a few from fixed seeds; with `--hypothesis-profile=long` too it takes
hours, and many of each quantity, size, dtype, structure, block size and mesh. With the
samples that are asked for here, the truth is eight standard errors off about once in a
million draws.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, note, strategies as st

import traceax as tx

from ..conftest import forget_if_many
from .random_operators import (
    BATCH,
    BATCHES,
    Call,
    calls,
    enlarged,
    FIELDS,
    LINEAR,
    logdet,
    LONG,
    made,
    made_on_host,
    NAMES,
    on_host,
    QUANTITIES,
    RESUMABLE,
    SEEDS,
    SHORT,
    solve,
    solve_all,
    Spectral,
    trees,
    vectors,
)


compared = []  # an entry for each comparison of a test


@pytest.fixture(autouse=True)
def something_is_compared():
    """What is flagged, or depends on rounding errors, is left out: in no test all."""
    compared.clear()
    yield
    assert compared


def some(*names):
    """A parameter of tests: these in the short profile, in the long one all."""
    return pytest.mark.parametrize("name", NAMES if LONG else names)


def keys(seed):
    return jr.split(jr.key(seed), BATCH)


def wide(matrix):
    kind = complex if jnp.issubdtype(matrix.dtype, jnp.complexfloating) else float
    return np.asarray(matrix.astype(kind))


def row(found, i):
    return jax.tree.map(lambda x: x[i], found)


def solutions(call, matrices, seed, make=None):
    forget_if_many()
    one_each = keys(seed)[: len(matrices)]
    return jax.tree.map(np.asarray, solve_all(call, matrices, one_each, make))


def eps_of(dtype):
    return float(jnp.finfo(dtype).eps)


def underflow(call):
    """Numbers below the smallest count as zero, in each of the products; in a function of
    half precision those below its own."""
    smallest = float(jnp.finfo(working(call)).tiny)
    if call.quantity in FIELDS:
        smallest = max(smallest, float(jnp.finfo(call.dtype).smallest_subnormal))
    return call.n**2 * smallest


def working(call):
    return jnp.promote_types(call.dtype, jnp.float32)


def size_of(call, matrix, value):
    """Of the terms whose sum a value is: they may cancel, as those of an odd function."""
    size, exact = np.abs(value), QUANTITIES[call.quantity].exact
    if call.quantity == "log-difference":
        return size + np.abs(logdet(matrix)) + np.abs(logdet(enlarged(matrix)))
    if call.quantity in LINEAR:
        return np.maximum(size, np.linalg.norm(matrix))
    if isinstance(exact, Spectral):
        with np.errstate(all="ignore"):
            return np.maximum(size, np.sum(np.abs(exact.terms(matrix))))
    return size


def floor_of(call, size):
    """Eight times the rounding floor of bars, as documented."""
    return 8 * (2 * eps_of(call.dtype) + eps_of(working(call)) * call.n**0.5) * size


# --- values ---


@pytest.mark.slow(but="trace")
@some(*SHORT)
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_estimates(name, data, batch, seed):
    """Finite, and within eight standard errors of the value where the steps are chosen,
    of its bracket where they are given; or flagged. Within the budget."""
    call = data.draw(calls(name))
    matrices = made(batch, call)
    found = solutions(call, matrices, seed)
    for i, matrix in enumerate(matrices):
        check_estimate(call, wide(matrix), row(found, i))


def check_estimate(call, matrix, found):
    quantity, exactly = QUANTITIES[call.quantity], found.exact
    at_once = call.k >= call.n and call.most < np.inf
    assert found.products <= (min(call.n, call.most) if at_once else call.most)
    assert found.result or call.quantity not in LINEAR
    if not found.result:
        return
    exact, change = exact_and_change(call, matrix)
    if not np.all(np.isfinite(change)):
        return
    assert np.all(np.isfinite(found.value))
    assert not np.any(np.isnan(found.std_err))
    # An exact answer has a bar of zero, and is exact to rounding: that of the eigenvalues
    # too, on which it may depend steeply where it is small.
    more = underflow(call) + change
    if exactly:
        scaled = np.ravel(quantity.exact((1 + 1e-4) * matrix))
        steep = 1e4 * np.abs(scaled - exact)
        size = size_of(call, matrix, np.maximum(np.abs(exact), steep))
        more = more + floor_of(call, size)
    if found.samples >= quantity.samples or exactly:
        compared.append(call)
        between(found, exact, more)


def exact_and_change(call, matrix):
    """The truth in double precision, and how it changes with eigenvalues of the size of
    rounding errors, on which nothing that is promised depends."""
    exact = QUANTITIES[call.quantity].exact
    size = max(eps_of(call.dtype) / 8, 8 * eps_of(float)) * np.linalg.norm(matrix, 2)
    with np.errstate(all="ignore"):
        value = np.ravel(exact(matrix))
        if call.quantity in LINEAR:
            return value, np.zeros(value.shape)
        left, _, right = np.linalg.svd(matrix)
        general = QUANTITIES[call.quantity].kind == "general"
        unit = left @ right if general else np.eye(call.n)
        changes = [np.ravel(exact(matrix + x * unit)) - value for x in (size, -size)]
        return value, np.max(np.abs(changes), axis=0)


def between(found, exact, more):
    for part in (np.real, np.imag):
        low, high = part(found.low) - more, part(found.high) + more
        (outside,) = np.nonzero(~((low <= part(exact)) & (part(exact) <= high)))
        columns = exact, found.value, found.std_err, low, high
        for i in outside:
            note(f"{i}: " + " ".join(str(column[i]) for column in columns))
        assert len(outside) == 0


@pytest.mark.slow
@some("leaf-traces", "logdet-general")
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_products_are_counted(name, data, batch, seed):
    """As many as `stats` says, by a count on the host."""
    call = data.draw(calls(name))._replace(n=24, execution=tx.Local(block_size=1))
    call = call._replace(k=max(call.k // 4, 6), num_steps=min(call.num_steps or 5, 5))
    build = trees if call.structure == "tree" else vectors
    made_on_host.clear()
    make = ft.partial(build, product=on_host)
    found = solutions(call, made(batch, call), seed, make)
    products = np.sum(found.products)
    compared.append(call)
    assert len(made_on_host) == (0 if name in FIELDS else products)


# --- the same answers ---


def check_same(call, matrices, answers, others):
    """To a small part of a bar, and to what rounding errors change: they may decide about
    a whole direction of a basis. `answers` are a function of matrices, `others` those
    that are compared to them. What is flagged for its rounding errors need not be so if
    they are others, or have as many samples that are finite. They decide too when an
    iterative solve ends."""
    counted = call.most < np.inf and call.num_steps is not None
    found = answers(matrices)
    rounded = [answers(nudged(matrices, seed)) for seed in range(4)]
    for i, matrix in enumerate(matrices):
        one, other, matrix = row(found, i), row(others, i), wide(matrix)
        assert one.products == other.products or not counted
        if not (one.result and other.result):
            continue
        assert one.samples == other.samples
        change = exact_and_change(call, matrix)[1]
        if not np.all(np.isfinite(change)):
            continue
        compared.append(call)
        rounding = underflow(call) + change
        rounding = rounding + floor_of(call, size_of(call, matrix, one.value))
        again = [row(each, i) for each in rounded]
        values, bars = [each.value for each in again], [each.std_err for each in again]
        bar = finite(one.std_err)
        close(one.value, other.value, rounding + 1e-3 * bar, values)
        close(bar, finite(other.std_err), rounding + 0.1 * bar, bars)
        assert np.array_equal(np.isfinite(one.std_err), np.isfinite(other.std_err))


def nudged(matrices, seed):
    """With entries changed by as much as numbers of their dtype are apart."""
    signs = np.random.default_rng(seed).choice([-1, 1], matrices.shape)
    signs = np.triu(signs) + np.triu(signs, 1).swapaxes(1, 2)
    return (matrices * (1 + eps_of(matrices.dtype) * signs)).astype(matrices.dtype)


def finite(x):
    return np.where(np.isfinite(x), x, 0)


def close(one, other, allowed, rounded):
    """Some entries hang on rounding errors, all of which change them alike: what it is
    for an entry by chance small is taken from the largest, in parts of `allowed`."""
    rounded = np.where(np.isfinite(rounded), rounded, one)
    parts = np.abs(rounded - one) / allowed
    allowed = (1 + 8 * np.max(parts)) * allowed
    for i in np.nonzero(~(np.abs(one - other) <= allowed))[0]:
        note(f"{i}: {one[i]} {other[i]}, allowed {allowed[i]}")
    assert np.all(np.abs(one - other) <= allowed)


@eqx.filter_jit
def solve_at_once(call, matrices, keys):
    return jax.vmap(ft.partial(solve, call))(matrices, keys)


@pytest.mark.slow
@some("xnystrace", "logdet")
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_vmap_equals_a_loop(name, data, batch, seed):
    call = data.draw(calls(name))._replace(execution=tx.Local())
    matrices = made(batch, call)
    others = solve_at_once(call, matrices, keys(seed))
    answers = ft.partial(solutions, call, seed=seed)
    check_same(call, matrices, answers, jax.tree.map(np.asarray, others))


@pytest.mark.slow(but="trace")
@some("trace", "log-trace-exp")
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_jit_equals_eager(name, data, batch, seed):
    """Without `jit` of the caller's."""
    call = data.draw(calls(name))
    matrices = made(batch, call)[:1]
    eager = solve(call, matrices[0], keys(seed)[0])
    answers = ft.partial(solutions, call, seed=seed)
    check_same(
        call, matrices, answers, jax.tree.map(lambda x: np.asarray(x)[None], eager)
    )


@pytest.mark.slow
@some("hutchpp", "entropy")
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_sharded_equals_local(name, data, batch, seed):
    call = data.draw(calls(name))
    devices = data.draw(st.integers(1, 8)) if LONG else 3
    matrices = made(batch, call)
    mesh = tx.probe_mesh(jax.devices()[:devices])
    local = call._replace(execution=tx.Local())
    sharded = call._replace(execution=tx.Sharded(mesh))
    answers = ft.partial(solutions, local, seed=seed)
    check_same(call, matrices, answers, solutions(sharded, matrices, seed))


# --- adaptive budgets ---


@eqx.filter_jit
def solve_adaptively(call, matrices, keys, rtol, parts):
    """In one or two parts."""

    def one(pair):
        budget = ft.partial(tx.Adaptive, rtol=rtol, round_size=8)
        first = call.solve(*pair, k=budget(max_k=16)).state if parts == 2 else None
        return solve(call, *pair, k=budget(max_k=32), state=first)

    return jax.lax.map(one, (matrices, keys))


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMABLE if LONG else ["diagonal-xdiag"])
@given(data=st.data(), batch=BATCHES, seed=SEEDS, digits=st.integers(0, 8))
def test_resumed_equals_uninterrupted(name, data, batch, seed, digits):
    call = data.draw(calls(name))._replace(n=64, k=32)
    matrices = made(batch, call)
    forget_if_many()

    def answers(matrices, parts=1):
        found = solve_adaptively(call, matrices, keys(seed), 10.0**-digits, parts)
        return jax.tree.map(np.asarray, found)

    check_same(call, matrices, answers, answers(matrices, parts=2))


# --- gradients ---


@eqx.filter_jit
def gradients(call, matrices, keys, **settings):
    """In the matrices, and what the calls used up."""

    def value(matrix, key):
        solution = call.solve(matrix, key, **settings)
        return solution.value, solution.result == tx.RESULTS.successful

    slope = jax.grad(value, has_aux=True)
    return jax.lax.map(lambda pair: slope(*pair), (matrices, keys))


def projector(columns):
    """Onto their span, and how much rounding errors change it."""
    left, s, _ = np.linalg.svd(columns, full_matrices=False)
    kept = left[:, s > 4 * eps_of(float) * np.max(s)]
    return kept @ kept.T, s[0] / max(s[-1], 1e-200 * s[0], 1e-300)


def outside(projector, probes):
    """The parts of probes beside the basis, with the length of what a probe has there."""
    n, rank = len(probes), round(np.trace(projector))
    rest = probes - projector @ probes
    return rest * np.sqrt((n - rank) / np.sum(rest**2, axis=0))


@eqx.filter_jit
def sample(sampler, key, n, count):
    return sampler(key, n, count)


def sampled(*of):
    return np.asarray(sample(*of))


def hutchinson(call, matrix, key):
    probes = sampled(tx.RademacherSampler(), key, call.n, call.k)
    return probes @ probes.T / call.k, 1


def hutchpp(call, matrix, key):
    m, count = call.k // 3, call.k - call.k // 3
    probes = sampled(tx.SphereSampler(), key, call.n, count)
    basis, condition = projector(matrix @ probes[:, :m])
    rest = outside(basis, probes[:, m:])
    return basis + rest @ rest.T / (count - m), condition


def leave_one_out(m, call, matrix, key):
    """The mean of what each probe tells of the basis from the others."""
    probes, total = sampled(tx.SphereSampler(), key, call.n, m), 0
    for i in range(m):
        basis, condition = projector(matrix @ np.delete(probes, i, axis=1))
        rest = outside(basis, probes[:, [i]])
        total = total + basis + rest @ rest.T
    return total / m, condition


def form(function, slope, call, matrix, key):
    """The derivative of the mean of `z* f(A) z`."""
    probes = sampled(tx.RademacherSampler(), key, call.n, call.k)
    nodes, basis = np.linalg.eigh(matrix)
    a, b = nodes[:, None], nodes
    near = np.abs(a - b) < 1e-5 * np.maximum(a, b)
    gaps = np.where(near, 1, a - b)
    inside = basis.T @ probes
    with np.errstate(all="ignore"):
        apart = (function(a) - function(b)) / gaps
        divided = np.where(near, slope((a + b) / 2), apart) * (inside @ inside.T)
        return basis @ divided @ basis.T / call.k, nodes[-1] / nodes[0]


FROZEN = {
    "hutchinson": hutchinson,
    "hutchpp": hutchpp,
    "xtrace": lambda call, *of: leave_one_out(call.k // 2, call, *of),
    "xnystrace": lambda call, *of: leave_one_out(call.k, call, *of),
    "logdet": ft.partial(form, np.log, lambda x: 1 / x),
    "inverse": ft.partial(form, lambda x: 1 / x, lambda x: -1 / x**2),
    "root": ft.partial(form, np.sqrt, lambda x: 0.5 / np.sqrt(x)),
}


@pytest.mark.slow(but="hutchpp")
@pytest.mark.parametrize("name", FROZEN if LONG else ["hutchpp", "xnystrace", "logdet"])
@given(batch=BATCHES, seed=SEEDS)
def test_gradient_is_that_of_the_frozen_form(name, batch, seed):
    """Of the estimate with its bases held fixed, or for functions of quadratic forms from
    as many steps as there are dimensions."""
    call = Call(name, np.float64, n=33, k=12, num_steps=33, structure="vector")
    krylov = QUANTITIES[name].krylov
    settings = {"gradient": tx.LanczosGradient(33)} if krylov else {}
    matrices = made(batch, call)
    forget_if_many()
    slopes = gradients(call, matrices, keys(seed), **settings)
    found, successful = map(np.asarray, slopes)
    for i, matrix in enumerate(matrices):
        if not krylov:
            assert np.all(np.isfinite(found[i]))
        if successful[i] and np.any(matrix):
            expected, condition = FROZEN[name](call, wide(matrix), keys(seed)[i])
            allowed = 1e-8 + 1e3 * eps_of(float) * condition
            if 0 < allowed < 1e-2:
                compared.append(call)
                error = np.linalg.norm(found[i] - expected) / np.linalg.norm(expected)
                note(f"{i}: {error}, allowed {allowed}")
                assert error <= allowed
