"""What `check_operator` says of good and bad operators."""

import re

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


N, KEY = 30, jr.key(0)
NORMAL = np.random.default_rng(0).standard_normal((N, N))
VALUES = np.linspace(0.5, 3, N)
DEFINITE = jnp.asarray(hermitian(1, VALUES))
INDEFINITE = jnp.asarray(hermitian(2, VALUES - 1))
GENERAL = jnp.asarray(NORMAL)
COMPLEX = jnp.asarray(hermitian(3, VALUES - 1, np.complex128))
VECTOR = jax.ShapeDtypeStruct((N,), np.float64)
FIELDS = ["as_declared", "finite", "deterministic", "vectorised", "linear"]
FIELDS += ["hermitian", "semidefinite"]


def function(fn, tags=()):
    return lx.FunctionLinearOperator(fn, VECTOR, tags)


def on_host(fn, vmap_method="sequential"):
    def product(v):
        return jax.pure_callback(fn, VECTOR, v, vmap_method=vmap_method)

    return function(product)


def random(v):
    random.generator = getattr(random, "generator", np.random.default_rng(0))
    return random.generator.standard_normal() * np.asarray(v)


def raising(v):
    raise RuntimeError("the host says no")


class Lying(lx.MatrixLinearOperator):
    def out_structure(self):
        return jax.ShapeDtypeStruct((N,), np.float32)


def inexact_solve(v):
    solver = lx.CG(rtol=1e-5, atol=1e-5)
    return lx.linear_solve(lx.MatrixLinearOperator(DEFINITE, PSD), v, solver).value


# Operators, the fields of the report that are not true, and parts of what it says.
GOOD = {
    "definite": (matrix_free(DEFINITE, PSD), {}, "symmetric, up to .* as its tag says"),
    "untagged": (matrix_free(DEFINITE), {}, "`lineax.positive_semidefinite_tag` fits"),
    "negative": (matrix_free(-DEFINITE), {}, "`lineax.negative_semidefinite_tag` fits"),
    "indefinite": (
        matrix_free(INDEFINITE),
        {"semidefinite": False},
        "no tag: `lineax.symmetric_tag` fits",
    ),
    "complex": (
        matrix_free(COMPLEX),
        {"semidefinite": False},
        "Hermitian.* no tag: `traceax.hermitian_tag` fits",
    ),
    "general": (
        matrix_free(GENERAL),
        {"hermitian": False, "semidefinite": None},
        "not symmetric",
    ),
    "singular": (function(lambda v: v - jnp.mean(v), PSD), {}, "from a singular one"),
    "zero": (function(jnp.zeros_like), {}, "from a singular one"),
    "inner solve": (function(inexact_solve, PSD), {}, "up to .* more than rounding"),
    "callback": (on_host(lambda v: 2 * np.asarray(v)), {}, "cannot make products with"),
    "rectangular": (
        matrix_free(GENERAL[:7]),
        {"hermitian": None, "semidefinite": None},
        "Only `traceax.schatten_norm` takes it",
    ),
    "tree": (
        lx.FunctionLinearOperator(
            lambda t: {"a": 2 * t["a"], "b": t["b"]}, {"a": VECTOR, "b": VECTOR}
        ),
        {},
        "Ritz values from 1 to 2",
    ),
    "small": (lx.MatrixLinearOperator(jnp.ones((1, 1))), {}, "by the known diagonal"),
    "bfloat16": (
        lx.MatrixLinearOperator(DEFINITE.astype(jnp.bfloat16), PSD),
        {},
        "linear, up to",
    ),
}
NO_MORE = {"hermitian": None, "semidefinite": None}
NOT_LINEAR = {"linear": False} | NO_MORE
NOTHING = dict.fromkeys(FIELDS)
BAD = {
    "affine": (
        function(lambda v: DEFINITE @ v + 1),
        NOT_LINEAR,
        "product with zero is not zero.*`add`.*traceax.hessian",
    ),
    "nonlinear": (
        function(lambda v: DEFINITE @ jnp.tanh(v)),
        NOT_LINEAR,
        "not linear.*`tanh`.*lineax.JacobianLinearOperator",
    ),
    "unit vectors": (
        function(lambda v: v / jnp.linalg.norm(v)),
        NOT_LINEAR,
        "product with zero is not zero",
    ),
    "beyond tracing": (
        function(jax.nn.relu),
        NOT_LINEAR,
        "not linear.*is off by.*traceax.hessian",
    ),
    "zero term": (
        function((lambda zeros: lambda v: DEFINITE @ v + zeros)(jnp.zeros(N))),
        NO_MORE,
        "is refused.*by `jnp.zeros`",
    ),
    "random": (
        on_host(random),
        {"deterministic": False, "vectorised": None, "linear": None} | NO_MORE,
        "gives another product the next time",
    ),
    "not batched": (
        on_host(lambda v: 2 * np.asarray(v), None),
        {"vectorised": False},
        "not the same under `jax.vmap`.*vmap_method='sequential'",
    ),
    "wrongly batched": (
        on_host(lambda v: np.asarray(v) * v.ndim, "expand_dims"),
        {"vectorised": False},
        "they differ by 1e\\+00",
    ),
    "raising": (on_host(raising), NOTHING, "raises an error: .*the host says no"),
    "not finite": (
        function(lambda v: v / 0),
        NOTHING | {"as_declared": True, "finite": False},
        "not finite",
    ),
    "of another size": (
        function(lambda v: GENERAL[:, 1:] @ v),
        NOTHING,
        "cannot be traced: dot_general",
    ),
    "of another dtype": (
        Lying(GENERAL),
        NOTHING | {"as_declared": False},
        "dtype=float64.*says.*dtype=float32",
    ),
    "not real": (function(lambda v: 1j * v), NOTHING, "map real vectors to real ones"),
    "empty": (lx.MatrixLinearOperator(jnp.ones((0, 0))), NOTHING, "at least one row"),
    "not symmetric": (
        matrix_free(GENERAL, lx.symmetric_tag),
        {"hermitian": False, "semidefinite": None},
        "tagged symmetric or semidefinite, and is not symmetric",
    ),
    "not semidefinite": (
        matrix_free(INDEFINITE, PSD),
        {"semidefinite": False},
        "tagged positive semidefinite, and is not: Ritz values from -0.5",
    ),
    "not diagonal": (
        matrix_free(DEFINITE, (PSD, lx.diagonal_tag)),
        {},
        "tagged diagonal, and is not",
    ),
}


def report_of(operator, expected):
    report = tx.check_operator(operator, key=KEY)
    fields = {name: getattr(report, name) for name in FIELDS}
    assert fields == dict.fromkeys(FIELDS, True) | expected
    assert report.num_matvecs <= 26
    return report


@pytest.mark.slow(but=("definite", "complex", "tree"))
@pytest.mark.parametrize("name", GOOD)
def test_good(name):
    operator, expected, said = GOOD[name]
    report = report_of(operator, expected)
    assert report.successful
    assert repr(report).startswith(f"{type(operator).__name__} on vectors of ")
    assert "no problem in" in str(report)
    assert re.search(said, "\n".join(report.findings))


@pytest.mark.parametrize("name", BAD)
def test_bad(name):
    operator, expected, said = BAD[name]
    report = report_of(operator, expected)
    assert not report.successful
    (problem,) = report.problems
    assert re.search(said, problem), problem
    assert f"1 problem in {report.num_matvecs} matvecs.\n- Problem: " in str(report)


def test_what_fits():
    """The Ritz values, the tag, and the estimator that the tag leads to."""
    for operator, tag, name, exact in (
        (matrix_free(DEFINITE), PSD, "XNysTraceEstimator", (0.5, 3)),
        (matrix_free(DEFINITE, PSD), PSD, "XNysTraceEstimator", (0.5, 3)),
        (
            matrix_free(-DEFINITE),
            lx.negative_semidefinite_tag,
            "XNysTraceEstimator",
            (-3, -0.5),
        ),
        (matrix_free(INDEFINITE), lx.symmetric_tag, "XTraceEstimator", (-0.5, 2)),
        (matrix_free(COMPLEX), tx.hermitian_tag, "XTraceEstimator", (-0.5, 2)),
        (matrix_free(GENERAL), None, "XTraceEstimator", None),
        (lx.MatrixLinearOperator(GENERAL), None, "ExactTraceEstimator", None),
    ):
        report = tx.check_operator(operator, key=KEY)
        assert report.tag is tag
        assert report.estimator.name == name
        assert report.adjoint
        assert (report.ritz_values is None) == (exact is None)
        if exact is not None:
            assert np.allclose(report.ritz_values, exact, atol=0.05)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_of_any_size(scale):
    report = tx.check_operator(matrix_free(scale * DEFINITE, PSD), key=KEY)
    assert report.successful
    affine = function(lambda v: scale * (DEFINITE @ v + 1))
    assert not tx.check_operator(affine, key=KEY).linear


def test_almost_symmetric():
    """Asymmetry above the errors of products is seen from random vectors, by any key."""
    wrong = INDEFINITE.at[3, 4].add(0.5)
    for seed in range(20):
        operator = lx.MatrixLinearOperator(wrong, lx.symmetric_tag)
        assert not tx.check_operator(operator, key=jr.key(seed)).hermitian


def test_arguments():
    operator = matrix_free(DEFINITE)
    with pytest.raises(TypeError, match="must be a matrix"):
        tx.check_operator(DEFINITE[0], key=KEY)
    with pytest.raises(TypeError, match="`key` must be one JAX PRNG key"):
        tx.check_operator(operator, key=0)
    with pytest.raises(ValueError, match="`key` is missing"):
        tx.check_operator(operator, key=None)
    with pytest.raises(TypeError, match="arrays with values"):
        jax.jit(lambda x: tx.check_operator(matrix_free(x), key=KEY).linear)(DEFINITE)
