"""Each kind of wrong input gives an exception that names argument, value and fix."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import CASES, matrix_free, PSD


N = 12
KEY = jr.key(0)
ESTIMATORS = [case.estimator for case in CASES]
MATRIX = jnp.asarray(np.diag(np.arange(1.0, N + 1)) + 0.1)
TAGGED = matrix_free(MATRIX, PSD)
SKETCHES = [tx.HutchPlusPlusEstimator, tx.NystromPlusPlusEstimator, tx.XTraceEstimator]
SAMPLED = {type(each) for each in ESTIMATORS if hasattr(each, "sampler")}
SAMPLED |= {tx.DiagPlusPlusEstimator, tx.XDiagEstimator, tx.XNysDiagEstimator}
PSD_ONLY = [tx.NystromPlusPlusEstimator, tx.XNysTraceEstimator]


pytestmark = pytest.mark.usefixtures("as_users_call")


def struct(*shape, dtype=jnp.float64):
    return jax.ShapeDtypeStruct(shape, dtype)


def check(exception, parts, call):
    with pytest.raises(exception) as error:
        call()
    message = str(error.value)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("fn", "structure", "exception", "parts"),
    [
        pytest.param(
            lambda v: v[:5],
            struct(N),
            ValueError,
            ["must be square", "out_size=5, in_size=12", "`J.T @ J`"],
            id="rectangular",
        ),
        pytest.param(
            lambda v: v.reshape(3, 4),
            struct(N),
            ValueError,
            ["same structure in and out", "(12,)", "(3, 4)"],
            id="other-shape-of-the-same-size",
        ),
        pytest.param(
            lambda v: {"b": v["a"]},
            {"a": struct(N)},
            ValueError,
            ["same structure in and out", "'a'", "'b'"],
            id="other-tree",
        ),
        pytest.param(
            lambda v: v + 0j,
            struct(N),
            TypeError,
            ["complex128", "float64", "Cast"],
            id="real-to-complex",
        ),
        pytest.param(
            lambda v: v,
            (struct(N), struct(N, dtype=jnp.complex64)),
            TypeError,
            ["complex64", "float64", "Cast"],
            id="real-and-complex",
        ),
        pytest.param(
            lambda v: v.astype(jnp.int32),
            struct(N),
            TypeError,
            ["int32", "one floating or complex dtype"],
            id="integer-products",
        ),
        pytest.param(
            lambda v: v,
            struct(0),
            ValueError,
            ["at least one row", "Found size 0"],
            id="size-0",
        ),
        pytest.param(
            lambda v: v,
            {"a": struct(0), "b": struct(0, 3)},
            ValueError,
            ["at least one row", "Found size 0"],
            id="tree-of-size-0",
        ),
    ],
)
def test_operator_structure(fn, structure, exception, parts):
    operator = lx.FunctionLinearOperator(fn, structure)
    check(exception, ["`operator`", *parts], lambda: tx.trace(operator, k=4, key=KEY))


@pytest.mark.parametrize(
    ("operator", "parts"),
    [
        pytest.param(
            lambda v: v,
            ["`traceax.as_operator(function, like)`"],
            id="function",
        ),
        pytest.param(MATRIX[0], ["shape (12,)", "a vector is no operator"], id="array"),
        pytest.param("matrix", ["str", "Pass an array"], id="other"),
    ],
)
def test_not_an_operator(operator, parts):
    parts = ["`operator` must be a matrix or a linear operator", *parts]
    check(TypeError, parts, lambda: tx.trace(operator, k=4, key=KEY))
    check(TypeError, parts, lambda: tx.select_trace_estimator(operator, 4))


@pytest.mark.parametrize(
    ("k", "exception", "parts"),
    [
        (0, ValueError, ["at least 1", "Found 0"]),
        (-3, ValueError, ["at least 1", "Found -3"]),
        (4.0, TypeError, ["integer", "Found 4.0 of type float", "int(4.0)"]),
        (3.5, TypeError, ["integer", "Found 3.5 of type float", "int(3.5)"]),
        (True, TypeError, ["integer", "Found True of type bool"]),
        ("4", TypeError, ["integer", "Found '4' of type str"]),
        (None, TypeError, ["integer", "Found None"]),
        (np.array(4.5), TypeError, ["integer", "Found array(4.5)"]),
        (np.array([4, 5]), TypeError, ["integer", "Found array([4, 5])"]),
    ],
)
def test_budget(k, exception, parts):
    check(exception, ["`k`", *parts], lambda: tx.trace(TAGGED, k=k, key=KEY))
    check(exception, ["`k`", *parts], lambda: tx.select_trace_estimator(TAGGED, k))


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        (
            "estimator",
            tx.XTraceEstimator,
            ["AbstractEstimator", "the class XTraceEstimator"],
        ),
        ("estimator", "xtrace", ["AbstractEstimator", "Found 'xtrace'"]),
        ("estimator", None, ["AbstractEstimator", "Found None"]),
        ("execution", 3, ["AbstractExecution", "Found 3"]),
        ("execution", tx.Local, ["AbstractExecution", "the class Local"]),
    ],
)
def test_not_an_instance(name, value, parts):
    example = {"estimator": "XTraceEstimator()", "execution": "Sharded(mesh)"}[name]
    parts = [f"`{name}` must be an instance", *parts, f"`traceax.{example}`"]
    check(TypeError, parts, lambda: tx.trace(TAGGED, k=4, key=KEY, **{name: value}))


@pytest.mark.parametrize("kind", [jnp.asarray, np.int32])
def test_integer_arrays_are_budgets(kind):
    solution = tx.trace(TAGGED, tx.HutchinsonEstimator(), k=kind(4), key=KEY)
    assert solution.stats["num_matvecs"] == 4


@pytest.mark.parametrize(
    "operator",
    [
        lx.MatrixLinearOperator(MATRIX.astype(int)),
        lx.FunctionLinearOperator(lambda v: 2 * v, struct(N, dtype=jnp.int32)),
    ],
)
def test_integer_operators_are_real_ones(operator):
    value = tx.trace(operator, k=N).value
    assert jnp.issubdtype(value.dtype, jnp.floating)
    assert jnp.allclose(value, jnp.trace(operator.as_matrix()))


def test_traced_budget():
    traced = jax.jit(lambda k: tx.trace(TAGGED, k=k, key=KEY).value)
    check(TypeError, ["`k`", "traced", "static_argnames='k'"], lambda: traced(4))
    static = eqx.filter_jit(lambda k: tx.trace(TAGGED, k=k, key=KEY).value)
    assert jnp.isfinite(static(4))


@pytest.mark.parametrize("estimator", SKETCHES)
def test_budget_below_the_least(estimator):
    least = estimator.min_matvecs
    assert least > 1
    parts = [estimator.__name__, f"at least k={least}", f"Found k={least - 1}", "Raise"]
    check(ValueError, parts, lambda: tx.trace(TAGGED, estimator(), k=least - 1, key=KEY))


def test_exact_with_too_small_a_budget():
    estimator = tx.ExactTraceEstimator()
    parts = ["`ExactTraceEstimator` needs k=12", "Found k=11", "Raise `k`", "Auto"]
    check(ValueError, parts, lambda: tx.trace(TAGGED, estimator, k=N - 1))
    assert jnp.allclose(tx.trace(TAGGED, estimator, k=N).value, jnp.trace(MATRIX))


@pytest.mark.parametrize("estimator", PSD_ONLY)
def test_missing_tag(estimator):
    parts = [
        f"`{estimator.__name__}` needs",
        "semidefinite",
        "Found `operator` without the tag",
        "traceax.as_operator(operator, tags=lineax.positive_semidefinite_tag)",
        "`traceax.XTraceEstimator`",
    ]
    untagged = matrix_free(MATRIX)
    check(ValueError, parts, lambda: tx.trace(untagged, estimator(), k=4, key=KEY))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_missing_key(estimator):
    parts = ["`key` is missing", "`key=jax.random.key(0)`"]
    check(ValueError, parts, lambda: tx.trace(TAGGED, estimator, k=6))


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (0, "int"),
        (jnp.zeros(2), "shape (2,)"),
        (jr.split(KEY, 3), "shape (3,)"),
        (jr.split(jr.PRNGKey(0), 3), "shape (3, 2)"),
    ],
    ids=["int", "floats", "batch", "raw-batch"],
)
def test_not_a_key(key, found):
    parts = ["`key` must be one JAX PRNG key", found, "`jax.random.key(0)`", "jax.vmap"]
    check(TypeError, parts, lambda: tx.trace(TAGGED, k=4, key=key))


@pytest.mark.parametrize(
    ("sampler", "matrix", "parts"),
    [
        (
            tx.NormalSampler(jnp.complex128),
            MATRIX,
            ["NormalSampler(dtype=complex128)", "float64", "complex operator"],
        ),
        (
            tx.NormalSampler(jnp.float64),
            MATRIX.astype(complex),
            ["NormalSampler(dtype=float64)", "complex128", "unitary"],
        ),
        (
            tx.SphereSampler(jnp.float64),
            MATRIX.astype(complex),
            ["SphereSampler(dtype=float64)", "complex128", "unitary"],
        ),
        (tx.SteinhausSampler(), MATRIX, ["SteinhausSampler", "float64", "Rademacher"]),
    ],
)
def test_sampler_does_not_fit_the_operator(sampler, matrix, parts):
    estimator = tx.HutchinsonEstimator(sampler)
    call = lambda: tx.trace(matrix_free(matrix), estimator, k=4, key=KEY)  # noqa: E731
    check(ValueError, [*parts, "dtype"], call)


@pytest.mark.parametrize("estimator", [tx.XTraceEstimator, tx.XNysTraceEstimator])
def test_resphering_needs_rotation_invariance(estimator):
    sampler = tx.RademacherSampler()
    parts = ["`improved=True`", "`RademacherSampler`", "`traceax.SphereSampler`"]
    check(ValueError, parts, lambda: estimator(sampler))
    assert not estimator(sampler, improved=False).improved


@pytest.mark.parametrize("sampler", ["x", tx.SphereSampler])
@pytest.mark.parametrize("estimator", sorted(SAMPLED, key=lambda x: x.__name__))
def test_samplers_are_instances(estimator, sampler):
    parts = [
        "`sampler` must be an instance of `traceax.AbstractSampler`",
        "SphereSampler",
    ]
    check(TypeError, parts[: 1 + (sampler != "x")], lambda: estimator(sampler))


@pytest.mark.parametrize("block_size", [0, -1, True, 2.0])
def test_block_size(block_size):
    parts = ["`block_size`", "positive", f"Found {block_size}"]
    check(ValueError, parts, lambda: tx.Local(block_size))


@pytest.mark.slow(but=("nan-estimator1", "nan-estimator4"))
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_products_that_are_not_finite(estimator, bad):
    operator = lx.MatrixLinearOperator(MATRIX.at[3, 4].set(bad), PSD)

    def call(throw):
        return tx.trace(operator, estimator, k=6, key=KEY, throw=throw)

    parts = ["not finite", "operator's arrays hold NaN", "`operator.mv`"]
    check(RuntimeError, parts, lambda: call(throw=True))
    assert call(throw=False).result == tx.RESULTS.nonfinite_product


@pytest.mark.parametrize("estimator", PSD_ONLY)
@pytest.mark.parametrize("sign", [1, -1])
def test_wrong_tag(estimator, sign):
    tag = PSD if sign == 1 else lx.negative_semidefinite_tag
    operator = lx.MatrixLinearOperator(sign * (MATRIX - 9 * jnp.eye(N)), tag)

    def call(throw):
        return tx.trace(operator, estimator(), k=6, key=KEY, throw=throw)

    parts = ["semidefinite tag", "the tag is wrong", "`traceax.XTraceEstimator`"]
    check(RuntimeError, parts, lambda: call(throw=True))
    assert call(throw=False).result == tx.RESULTS.not_semidefinite


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_right_input_succeeds(estimator):
    operator = lx.MatrixLinearOperator(MATRIX, PSD)
    solution = tx.trace(operator, estimator, k=6, key=KEY, throw=False)
    assert solution.result == tx.RESULTS.successful
    assert tx.RESULTS[solution.result] == ""


# --- the order of another release, flags, and parts that users write ---


def test_another_order_of_arguments():
    parts = ["`traceax.trace` takes the operator first", "k=k, key=key"]
    estimator = tx.XTraceEstimator()
    check(TypeError, parts, lambda: tx.trace(KEY, TAGGED, 4, estimator))
    check(TypeError, parts, lambda: tx.trace(KEY, TAGGED, k=4))


def test_throw_is_a_flag():
    parts = ["`throw` must be True or False", "'local'"]
    check(TypeError, parts, lambda: tx.trace(TAGGED, k=4, key=KEY, throw="local"))


def test_numpy_integers_are_integers():
    settings = {"k": np.int64(N), "execution": tx.Local(np.int64(4))}
    solution = tx.trace(TAGGED, **settings)
    np.testing.assert_allclose(solution.value, np.trace(MATRIX), rtol=1e-13)
    assert type(tx.Local(np.int64(4)).block_size) is int
    assert type(tx.Adaptive(rtol=0.1, max_k=np.int32(8)).max_k) is int


class Columns(tx.AbstractSampler):
    """Two vectors where one is asked for."""

    dtype: None = None
    density: float = 0.5
    rotation_invariant: ClassVar[bool] = False

    def sample(self, key, n, dtype):
        return jr.normal(key, (n, 2), dtype)


def test_a_sampler_returns_one_vector():
    estimator = tx.HutchinsonEstimator(Columns(density=0.1))
    parts = ["`Columns.sample` must return an array of shape (12,)", "(12, 2)"]
    check(ValueError, parts, lambda: tx.trace(TAGGED, estimator, k=4, key=KEY))


def test_the_first_field_of_a_sampler_is_its_dtype():
    parts = ["`dtype` of `Columns` must be a dtype", "0.5", "`Columns(name=value)`"]
    check(TypeError, parts, lambda: Columns(0.5))


class Custom(tx.AbstractStreamingEstimator):
    form: Callable
    sampler: tx.AbstractSampler = tx.RademacherSampler()
    min_matvecs: ClassVar[int] = 1

    def sample(self, mv, probe):
        return self.form(mv, probe)


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (lambda mv, probe: probe * mv(probe), "the shape (12,) and 1 matvecs"),
        (lambda mv, probe: jnp.vdot(probe, mv(mv(probe))), "the shape () and 2 matvecs"),
        (lambda mv, probe: jnp.vdot(probe, probe), "the shape () and 0 matvecs"),
    ],
)
def test_a_sample_is_made_from_one_product(form, found):
    must = "`Custom.sample` must return a pair of vectors of length n, or a scalar, made"
    parts = [f"{must} from one matvec", *found.split(" and ")]
    check(ValueError, parts, lambda: tx.trace(TAGGED, Custom(form), k=4, key=KEY))


def test_dynamic_trace_checks_what_it_gets():
    dynamic = tx.DynamicTrace(lambda x: lx.MatrixLinearOperator(x))
    state = dynamic.init(MATRIX, key=KEY, k=N).state
    parts = ["`state` must be the `state` of a solution", "float"]
    check(TypeError, parts, lambda: dynamic.update(1.0, MATRIX))
    parts = ["must be of an operator with the structure of the last one", "(5,)"]
    check(ValueError, parts, lambda: dynamic.update(state, MATRIX[:5, :5]))


def test_a_preconditioner_needs_finite_products():
    bad = np.array(MATRIX)
    bad[0, 0] = np.nan
    operator = lx.MatrixLinearOperator(jnp.asarray(bad), PSD)
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        tx.nystrom_preconditioner(operator, 3, key=KEY)
    made = tx.nystrom_preconditioner(operator, 3, key=KEY, throw=False)
    assert made.result == tx.RESULTS.nonfinite_product
    made = tx.pivoted_cholesky_preconditioner(TAGGED, 3, diagonal=jnp.diag(MATRIX))
    assert made.result == tx.RESULTS.successful


def test_complex_multiple_of_a_real_operator():
    """Whose structures are real."""
    operator = lx.MatrixLinearOperator(jnp.eye(3))
    for each in (operator * 1j, -(operator * 1j), operator + operator / 1j):
        with pytest.raises(TypeError, match="real vectors to real ones"):
            tx.trace(each, k=3)
    found = tx.trace(lx.MatrixLinearOperator(jnp.eye(3) + 0j) * 1j, k=3)
    assert found.value == 3j


def test_complex_inside_of_a_real_operator():
    """A derivative by Fourier transforms has a complex multiple within."""
    real, wide = (jax.ShapeDtypeStruct((3,), x) for x in (jnp.float64, jnp.complex128))
    into = lx.FunctionLinearOperator(lambda v: v.astype(complex), real)
    out = lx.FunctionLinearOperator(lambda v: v.imag, wide)
    diagonal = lx.DiagonalLinearOperator(jnp.arange(3.0) + 0j)
    assert tx.trace(out @ (diagonal * 1j) @ into, k=3).value == 3


def test_confidence_is_a_known_number():
    adaptive = lambda x: tx.Adaptive(rtol=0.1, max_k=8, confidence=x)  # noqa: E731
    assert adaptive(np.array(0.9)).confidence == 0.9
    for wrong in (np.array([0.9]), "0.9"):
        check(TypeError, ["`confidence`"], lambda: adaptive(wrong))  # noqa: B023
    for wrong in (1.0, -0.1):
        check(ValueError, ["`confidence`", "0 and 1"], lambda: adaptive(wrong))  # noqa: B023
    traced = lambda x: adaptive(x).rtol  # noqa: E731
    check(ValueError, ["`confidence`", "known"], lambda: jax.jit(traced)(0.9))


def test_functions_of_singular_values_are_refused():
    """Where they would be taken for functions of eigenvalues."""

    class Cube(tx.AbstractSpectralFunction):
        semidefinite_domain: ClassVar[bool] = False
        singular_at_zero: ClassVar[bool] = False
        bracketed: ClassVar[bool] = False
        nonnegative: ClassVar[bool] = True
        of_singular_values: ClassVar[bool] = True

        def __call__(self, x):
            return x**3

        def derivative(self, x):
            return 3 * x**2

    parts = ["`function`", "`Cube`", "of singular values"]
    check(ValueError, parts, lambda: tx.function_of(TAGGED, Cube(), 4))
    call = lambda: tx.diagonal_of_function(TAGGED, Cube(), k=4, key=KEY)  # noqa: E731
    check(ValueError, parts, call)


def test_curvature_of_models_without_real_parameters():
    """Activations are leaves of models, too."""
    model = eqx.nn.MLP(2, 2, 4, 1, dtype=jnp.complex64, key=KEY)
    loss = lambda model: jnp.sum(jnp.abs(model.layers[0].weight))  # noqa: E731
    check(TypeError, ["`x`", "complex64"], lambda: tx.hessian(loss, model))


def test_a_run_goes_on_with_no_smaller_budget():
    """With the default norm, buffers do not depend on `max_k`, so nothing but this check
    sees it."""
    settings = {"key": KEY, "throw": False}
    adaptive = lambda **more: tx.Adaptive(rtol=1e-9, round_size=2, **more)  # noqa: E731
    first = tx.row_norms(TAGGED, k=adaptive(max_k=8), **settings)
    call = lambda: tx.row_norms(  # noqa: E731
        TAGGED, k=adaptive(max_k=4), state=first.state, **settings
    )
    check(ValueError, ["`max_k`", "Found 4 for 8"], call)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: tx.DynamicTrace(TAGGED), ["`operator` must be a function", "hessian"]),
        (lambda: tx.probe_mesh(2), ["`devices` must be a list", "Found 2", "[:2]"]),
        (
            lambda: tx.hessian(jnp.ones(3), jnp.sum),
            ["`fn` must be a function", "The point comes after it"],
        ),
        (
            lambda: tx.hessian(lambda w: w**2, 2.0),
            ["`fn` must return a real", "Pass an array"],
        ),
        (
            lambda: tx.trace([[1.0, 2.0], [3.0, 4.0]], k=2, key=KEY),
            ["object of type list", "`jnp.asarray(matrix)`"],
        ),
        (
            lambda: tx.select_trace_estimator(TAGGED, tx.Adaptive(rtol=0.1, max_k=8)),
            ["`k` must be an integer", "`traceax.Adaptive`", "`round_size`"],
        ),
        (
            lambda: jax.jit(lambda m: tx.Adaptive(rtol=0.1, max_k=m).rtol)(8),
            ["`max_k` must be a Python integer", "traced", "static_argnames='max_k'"],
        ),
        (
            lambda: tx.trace(TAGGED, k=tx.Adaptive, key=KEY),
            ["`k` must be an integer. Found the class Adaptive."],
        ),
    ],
)
def test_what_else_is_mistaken(call, parts):
    check(TypeError, parts, call)


def test_a_product_of_another_structure_is_not_called_rectangular():
    column = lx.FunctionLinearOperator(lambda v: v[:, None], struct(N))
    call = lambda: tx.trace(column, k=4, key=KEY)  # noqa: E731
    check(ValueError, ["must have the structure of the vector"], call)
