"""Every public function: compiled ahead of time, exported, its shapes without computing,
and no more traces than needed."""

import contextlib
import functools as ft
import itertools
import os
import subprocess
import sys
from typing import ClassVar

import equinox as eqx
import jax
import jax.export
import jax.monitoring
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tx

from ..helpers import CASES, matrix_free, PSD
from ..public_functions import dense, example, FUNCTIONS, KEY, logdet, N, SETTINGS, traced


PLATFORMS = ["cpu", "cuda", "tpu"]
everything = pytest.mark.parametrize("name", FUNCTIONS)
# One of each kind, of which the programs are small.
QUICK = "hutchinson", "xtrace", "diagonal-hutchinson", "leaf-traces", "jacobi", "logdet"
QUICK += "exp", "frobenius-products", "divergence", "laplacian", "rademacher", "sharded"
QUICK += ("slope-xtrace",)
# These make or take a function, which is a new one in each call.
NEW_PROGRAMS = {"auto", "exact", "action", "hessian", "ggn", "jacobian-gram"} | {
    name
    for name in FUNCTIONS
    if name.endswith(("divergence", "laplacian"))
    or "diagonal" in name
    or name in ("leaf-traces", "jacobi")
}


# Not called without `jit`, where what they run is what others do.
ONLY_COMPILED = {
    *("power-krylov", "exp-general", "power", "hutchpp", "nystrompp", "xnystrace"),
    *("diagonal-diagpp", "diagonal-xdiag", "diagonal-xnysdiag"),
    *("jacobian-gram", "empirical-fisher", "hessian"),
    *("slope-diagonal", "slope-divergence", "slope-laplacian"),
}


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        tolerance = 64 * np.finfo(y.dtype).eps * np.max(np.abs(y))
        assert np.max(np.abs(x - y)) <= tolerance


def shapes_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@contextlib.contextmanager
def count_compilations():
    """A list that grows by one for each program that XLA compiles."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@ft.cache
def jitted(name):
    """For all tests of a function, which trace it once. Errors are left to the result,
    because JAX exports no callback."""
    function = ft.partial(FUNCTIONS[name], throw=False)
    return jax.jit(eqx.debug.assert_max_traces(function, max_traces=1))


@ft.cache
def compiled_ahead_of_time(name):
    return jitted(name).lower(example(), KEY).compile()


@pytest.mark.slow(but=("hutchinson", "sharded", "logdet"))
@everything
def test_ahead_of_time(name):
    """The same, up to rounding, as without `jit`, which compiles once for all data."""
    function, compiled = FUNCTIONS[name], compiled_ahead_of_time(name)
    first, second = (example(), KEY), (example(1), jr.key(1))
    expected = compiled(*first)
    assert all(np.all(np.isfinite(x)) for x in expected)
    assert not np.array_equal(compiled(*second)[0], expected[0])

    if name not in ONLY_COMPILED:
        assert_close(function(*first), expected)
    if name not in NEW_PROGRAMS | ONLY_COMPILED:
        with count_compilations() as compilations:
            assert_close(function(*second), compiled(*second))
        assert not compilations
    assert shapes_of(jitted(name).eval_shape(*second)) == shapes_of(expected)


@pytest.mark.slow(but="slope-xtrace-jit")
@pytest.mark.parametrize(
    ("name", "jit"),
    [
        ("hutchinson", jax.jit),
        ("hutchinson", eqx.filter_jit),
        ("slope-xtrace", jax.jit),
        ("logdet", eqx.filter_jit),
    ],
)
def test_compiled_by_a_call(name, jit):
    """With errors raised, which are callbacks to the host."""
    call = jit(FUNCTIONS[name])
    expected = compiled_ahead_of_time(name)(example(), KEY)
    found = call(example(), KEY)
    assert_close(found, expected)
    if name == "hutchinson":
        ahead = call.lower(example(), KEY).compile()
        assert all(map(np.array_equal, ahead(example(), KEY), found))


@pytest.mark.slow(
    but=(
        "xnystrace",
        "diagonal-hutchinson",
        "diagonal-diagpp",
        "exact",
        "logdet-cholesky",
        "frobenius-products",
        "divergence",
        "slope-xtrace",
    )
)
@everything
def test_shapes_without_computing(name):
    """Of a matrix of 8 TB."""
    n = 10**6
    matrix = jax.ShapeDtypeStruct((n, n), jnp.float64)
    key = jax.eval_shape(jr.key, 0)
    # First, for the constants that equinox computes once in a process.
    small = jitted(name).eval_shape(example(), KEY)
    with count_compilations() as compilations:
        shapes = eqx.filter_eval_shape(FUNCTIONS[name], matrix, key)
    assert not compilations
    assert len(shapes) == len(small)
    for large, leaf in zip(shapes, small, strict=True):
        expected = tuple(n if size == N else size for size in leaf.shape)
        assert (large.shape, large.dtype) == (expected, leaf.dtype)


# --- Traces ---


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimators_are_arguments_of_programs(case):
    """Whatever may decide what is compiled stays with them, and is no array there."""

    def run(estimator, matrix):
        operator = matrix_free(matrix, PSD)
        return tx.trace(operator, estimator, k=8, key=KEY, throw=False).value

    assert jax.eval_shape(run, case.estimator, example()).shape == ()


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit], ids=["jit", "filter_jit"])
def test_one_trace_for_each_k(jit):
    def run(matrix, key, k):
        estimator = tx.HutchinsonEstimator()
        return tx.trace(dense(matrix), estimator, k=k, key=key).value

    counted = eqx.debug.assert_max_traces(run, max_traces=2)
    static = {"static_argnames": "k"} if jit is jax.jit else {}
    compiled = jit(counted, **static)
    for k, seed in itertools.product((4, 6), (0, 1)):
        compiled(example(seed), jr.key(seed), k=k)
    assert eqx.debug.get_num_traces(counted) == 2
    with pytest.raises(RuntimeError, match="can only be traced 2 times"):
        compiled(example(), KEY, k=5)


class CountingSampler(tx.AbstractSampler):
    """Counts how often Python draws a vector: in a trace, and not in a compiled run."""

    counts: ClassVar[list[int]] = []
    dtype: None = None
    rotation_invariant: ClassVar[bool] = True

    def sample(self, key, n, dtype):
        self.counts.append(n)
        return jr.normal(key, (n,), dtype)


COUNTING = {
    "hutchinson": traced(tx.HutchinsonEstimator(CountingSampler())),
    "xtrace": traced(tx.XTraceEstimator(CountingSampler())),
    "logdet": ft.partial(logdet, estimator=tx.SLQEstimator(CountingSampler())),
}


@pytest.mark.slow(but="hutchinson")
@pytest.mark.parametrize("name", COUNTING)
def test_no_second_trace_without_jit(name):
    function, counts = COUNTING[name], CountingSampler.counts
    matrices, keys = [example(i) for i in range(3)], [jr.key(i) for i in range(3)]
    before = len(counts)
    with count_compilations() as compilations:
        function(matrices[0], keys[0])
        assert len(counts) > before
        assert compilations
        first = len(counts), len(compilations)
        for matrix, key in zip(matrices, keys, strict=True):
            function(matrix, key)
        assert (len(counts), len(compilations)) == first


@pytest.mark.slow
def test_one_function_operator_is_compiled_once():
    """A new function would be a new program; new keys for the same one are not."""
    operator = matrix_free(example(), PSD)
    tx.trace(operator, k=8, key=KEY)
    tx.logdet(operator, key=KEY, **SETTINGS)
    keys = [jr.key(i) for i in range(1, 4)]
    with count_compilations() as compilations:
        for key in keys:
            tx.trace(operator, k=8, key=key)
            tx.logdet(operator, key=key, **SETTINGS)
    assert not compilations


# --- Export ---


@ft.cache
def exported(name):
    return jax.export.export(jitted(name), platforms=PLATFORMS)(example(), KEY)


@pytest.mark.slow(but=("hutchinson", "diagonal-hutchinson"))
@everything
def test_export_for_every_platform(name):
    loaded = jax.export.deserialize(exported(name).serialize())
    assert loaded.platforms == tuple(PLATFORMS)
    shapes = jitted(name).eval_shape(example(), KEY)
    assert shapes_of(list(loaded.out_avals)) == shapes_of(list(shapes))


LOAD = """
import pathlib, sys
import jax, numpy as np
from jax import export

folder = pathlib.Path(sys.argv[1])
inputs, outputs = np.load(folder / "inputs.npz"), {}
for path in sorted(folder.glob("*.exported")):
    program = export.deserialize(bytearray(path.read_bytes()))
    key = inputs["key"]
    if program.in_avals[1].dtype != key.dtype:
        key = jax.random.wrap_key_data(key)
    for i, array in enumerate(program.call(inputs["matrix"], key)):
        outputs[f"{path.stem} {i}"] = array
np.savez(folder / "outputs.npz", **outputs)
print([name for name in ("traceax", "lineax", "equinox") if name in sys.modules])
"""
TO_LOAD = [
    "xtrace",
    "xnystrace",
    "diagonal-auto",
    "logdet",
    "logdet-general",
    "logdet-nystrom",
    "logdet-cholesky",
    "power",
    "slope-logdet",
]


@pytest.mark.slow
def test_exported_programs_in_a_fresh_process(tmp_path):
    """Keys travel typed, or raw ("hutchinson")."""
    raw = jr.key_data(KEY)
    programs = {name: exported(name) for name in TO_LOAD}
    with_raw_key = jax.jit(ft.partial(FUNCTIONS["hutchinson"], throw=False))
    export = jax.export.export(with_raw_key, platforms=PLATFORMS)
    programs["hutchinson"] = export(example(), raw)
    for name, program in programs.items():
        (tmp_path / f"{name}.exported").write_bytes(program.serialize())
    np.savez(tmp_path / "inputs.npz", matrix=example(), key=raw)
    finished = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["[]"]
    with np.load(tmp_path / "outputs.npz") as outputs:
        for name in programs:
            expected = compiled_ahead_of_time(name)(example(), KEY)
            found = [outputs[f"{name} {i}"] for i in range(len(expected))]
            assert_close(found, expected)


@pytest.mark.slow(but="xtrace-*")
@pytest.mark.parametrize(
    ("name", "platforms"), [("xtrace", ["cpu"]), ("logdet", PLATFORMS)]
)
def test_export_needs_throw_false(name, platforms):
    """An error check is a callback to the host, of which JAX exports none."""
    raising = jax.export.export(jax.jit(FUNCTIONS[name]), platforms=platforms)
    with pytest.raises(NotImplementedError, match="callback"):
        raising(example(), KEY)
