"""Each kind of wrong input to log-determinants and other functions of operators gives an
exception that names argument, value and fix."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free


N = 12
KEY = jr.key(0)
PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag
MATRIX = np.diag(np.arange(1.0, N + 1)) + 0.1
TAGGED = matrix_free(MATRIX, PSD)
UNTAGGED = matrix_free(MATRIX)
ONES = np.ones(N)
INDEFINITE = MATRIX - 6 * np.eye(N)
SLQ, KRYLOV = tx.SLQEstimator(), tx.KrylovAwareEstimator()
every_estimator = pytest.mark.parametrize(
    "estimator", [SLQ, KRYLOV], ids=lambda e: type(e).__name__
)
# Estimated and, for k >= n, exact.
every_budget = pytest.mark.parametrize("k", [4, N])


pytestmark = pytest.mark.usefixtures("as_users_call")


def logdet(operator, estimator=SLQ, *, k=4, num_steps=8, key=KEY, **settings):
    return tx.logdet(operator, estimator, k=k, num_steps=num_steps, key=key, **settings)


def trace_of(function, operator, estimator=SLQ, *, k=4, num_steps=8, key=KEY, **settings):
    settings = {"k": k, "num_steps": num_steps, "key": key} | settings
    return tx.trace_of_function(operator, function, estimator, **settings)


def trace_of_exp(operator, estimator=SLQ, **settings):
    return trace_of(tx.Exp(), operator, estimator, **settings)


def matrix_operator(matrix, tags=PSD):
    return lx.MatrixLinearOperator(matrix, tags)


def check(exception, parts, call):
    with pytest.raises(exception) as error:
        call()
    message = str(error.value)
    for part in parts:
        assert part in message


def check_failure(result, call):
    """`call(throw)` gives `result`, or raises its message."""
    solution = call(throw=False)
    assert solution.result == result
    check(RuntimeError, [tx.RESULTS[result]], lambda: call(throw=True))
    return solution


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tx.Exp(jnp.ones(3)), TypeError, "`scale` must be a number"),
        (lambda: tx.Exp("1"), TypeError, "`scale` must be a number"),
        (lambda: tx.Inverse(jnp.ones(3)), TypeError, "`shift` must be a number"),
        (lambda: tx.Inverse(-1.0), ValueError, "`shift` must not be negative"),
        (lambda: tx.Power(float("nan")), ValueError, "`exponent` must be finite"),
        (lambda: tx.Power(float("inf")), ValueError, "`exponent` must be finite"),
        (lambda: tx.Power(jnp.ones(())), TypeError, "`exponent` must be a Python"),
        (lambda: tx.AdaptiveSteps(share="a"), TypeError, "`share` must be a real"),
        (lambda: tx.AdaptiveSteps(share=jnp.ones(2)), TypeError, "`share` must be"),
        (lambda: tx.SLQEstimator(tx.NormalSampler), TypeError, "`sampler` must be an"),
        (lambda: tx.KrylovAwareEstimator("x"), TypeError, "`sampler` must be an"),
        (lambda: tx.SLQEstimator(lower_bound=jnp.ones(2)), TypeError, "`lower_bound`"),
    ],
)
def test_parameters(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_integers_of_numpy_are_exponents():
    assert tx.Power(np.int64(2)) == tx.Power(2)


both = pytest.mark.parametrize("call", [logdet, trace_of_exp])
OPERATOR_CALLS = {
    "logdet": logdet,
    "trace_of_function": trace_of_exp,
    "log_trace_exp": lambda operator: tx.log_trace_exp(
        operator, k=4, num_steps=3, key=KEY
    ),
    "function_of": lambda operator: tx.function_of(operator, tx.Exp(), 3),
    "nystrom": lambda operator: tx.nystrom_preconditioner(operator, 3, key=KEY),
    "pivoted_cholesky": lambda operator: tx.pivoted_cholesky_preconditioner(operator, 3),
}
every_call = pytest.mark.parametrize("name", OPERATOR_CALLS)
# Calls with an integer on which shapes depend, by the name of that integer.
INTEGER_CALLS = [
    ("k", lambda x: logdet(TAGGED, k=x)),
    ("num_steps", lambda x: logdet(TAGGED, num_steps=x)),
    ("k", lambda x: trace_of_exp(TAGGED, k=x)),
    ("num_steps", lambda x: trace_of_exp(TAGGED, num_steps=x)),
    ("num_steps", lambda x: tx.function_of(TAGGED, tx.Exp(), x)),
    ("rank", lambda x: tx.nystrom_preconditioner(TAGGED, x, key=KEY)),
    (
        "rank",
        lambda x: tx.pivoted_cholesky_preconditioner(
            TAGGED, x, diagonal=jnp.asarray(ONES)
        ),
    ),
]
every_integer = pytest.mark.parametrize(
    ("name", "call"),
    INTEGER_CALLS,
    ids=[
        "logdet-k",
        "logdet-num_steps",
        "trace_of_function-k",
        "trace_of_function-num_steps",
        "function_of",
        "nystrom",
        "pivoted_cholesky",
    ],
)


@every_call
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
def test_not_an_operator(name, operator, parts):
    parts = ["`operator` must be a matrix or a linear operator", *parts]
    check(TypeError, parts, lambda: OPERATOR_CALLS[name](operator))


@every_call
@pytest.mark.parametrize(
    ("fn", "exception", "parts"),
    [
        (lambda v: v[:5], ValueError, ["square", "out_size=5, in_size=12"]),
        (lambda v: v.reshape(3, 4), ValueError, ["square", "(12,)", "(3, 4)"]),
        (lambda v: v + 0j, TypeError, ["complex128", "float64", "Cast"]),
    ],
    ids=["rectangular", "other-shape", "complex"],
)
def test_operator_structure(name, fn, exception, parts):
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    operator = lx.FunctionLinearOperator(fn, structure)
    parts = ["`operator`", *parts]
    check(exception, parts, lambda: OPERATOR_CALLS[name](operator))


@every_integer
@pytest.mark.parametrize(
    ("value", "exception", "parts"),
    [
        (0, ValueError, ["at least 1", "Found 0"]),
        (-3, ValueError, ["at least 1", "Found -3"]),
        (4.0, TypeError, ["integer", "Found 4.0 of type float", "int(4.0)"]),
        (True, TypeError, ["integer", "Found True of type bool"]),
        ("4", TypeError, ["integer", "Found '4' of type str"]),
        (None, TypeError, ["integer", "Found None"]),
    ],
    ids=str,
)
def test_integers(name, call, value, exception, parts):
    check(exception, [f"`{name}`", *parts], lambda: call(value))


@every_integer
def test_traced_integers(name, call):
    parts = [f"`{name}` must be a Python integer", "traced", f"static_argnames='{name}'"]
    check(TypeError, parts, lambda: jax.jit(call)(4))


@pytest.mark.parametrize("kind", [jnp.asarray, np.int32])
def test_integer_arrays_are_integers(kind):
    solution = logdet(matrix_operator(MATRIX), k=kind(4), num_steps=kind(8))
    assert solution.stats["num_matvecs"] == 32


@both
def test_missing_key(call):
    parts = ["`key` is missing", "`key=jax.random.key(0)`"]
    check(ValueError, parts, lambda: call(TAGGED, key=None))


KEY_CALLS = {
    "logdet": lambda key: logdet(TAGGED, key=key),
    "trace_of_function": lambda key: trace_of_exp(TAGGED, key=key),
    "nystrom": lambda key: tx.nystrom_preconditioner(TAGGED, 3, key=key),
}


@pytest.mark.parametrize("name", KEY_CALLS)
@pytest.mark.parametrize(
    ("key", "found"),
    [(0, ""), (jnp.asarray(np.zeros(2)), "shape (2,)"), (jr.split(KEY, 3), "shape (3,)")],
    ids=["int", "floats", "batch"],
)
def test_not_a_key(name, key, found):
    parts = ["`key` must be one JAX PRNG key", found, "`jax.random.key(0)`", "jax.vmap"]
    check(TypeError, parts, lambda: KEY_CALLS[name](key))


@both
@pytest.mark.parametrize(
    ("name", "value", "parts", "example"),
    [
        ("estimator", tx.XTraceEstimator(), ["XTraceEstimator"], "SLQEstimator()"),
        ("estimator", tx.SLQEstimator, ["the class SLQEstimator"], "SLQEstimator()"),
        ("estimator", "slq", ["Found 'slq'"], "SLQEstimator()"),
        ("gradient", lx.CG(1e-6, 1e-6), ["Found CG"], "LanczosGradient()"),
        ("gradient", None, ["Found None"], "LanczosGradient()"),
        ("execution", 3, ["Found 3"], "Sharded(mesh)"),
    ],
)
def test_not_an_instance(call, name, value, parts, example):
    kind = {
        "estimator": "AbstractFunctionEstimator",
        "gradient": "AbstractFunctionGradient",
        "execution": "AbstractExecution",
    }[name]
    parts = [f"`{name}` must be an instance of `traceax.{kind}`", *parts]
    parts.append(f"`traceax.{example}`")
    check(TypeError, parts, lambda: call(TAGGED, **{name: value}))


def test_preconditioner_is_not_one():
    parts = [
        "`preconditioner` must be an instance of `traceax.AbstractPreconditioner`",
        "Found",
    ]
    inverse = tx.nystrom_preconditioner(TAGGED, 3, key=KEY).inverse()
    for wrong in (inverse, MATRIX):
        call = lambda wrong=wrong: logdet(TAGGED, preconditioner=wrong)  # noqa: E731
        check(TypeError, [*parts, "traceax.nystrom_preconditioner("], call)


@both
def test_krylov_aware_with_too_few_probes(call):
    parts = ["`KrylovAwareEstimator` needs at least k=3", "Found k=2", "Raise `k`"]
    parts.append("`traceax.SLQEstimator`")
    check(ValueError, parts, lambda: call(TAGGED, KRYLOV, k=2))


def test_krylov_aware_with_a_sampler_that_does_not_fit():
    parts = ["`sampler`", "rotation invariant", "Found `RademacherSampler`"]
    parts.append("`traceax.SphereSampler`")
    check(ValueError, parts, lambda: tx.KrylovAwareEstimator(tx.RademacherSampler()))


@pytest.mark.parametrize("block", [3, (3,), (0, 4), (3, 1), (3, 2.0), (True, 4)])
def test_krylov_aware_with_a_block_that_is_no_pair(block):
    parts = ["`block` must be a pair of Python integers", f"Found {block!r}"]
    check(ValueError, parts, lambda: tx.KrylovAwareEstimator(block=block))


@pytest.mark.parametrize("estimator", [tx.SLQEstimator, tx.KrylovAwareEstimator])
def test_sampler_does_not_fit_the_operator(estimator):
    sampler = tx.NormalSampler(jnp.complex128)
    parts = ["NormalSampler(dtype=complex128)", "float64", "complex operator", "dtype"]
    check(ValueError, parts, lambda: logdet(TAGGED, estimator(sampler)))


def test_krylov_aware_logdet_needs_a_tag():
    parts = ["`KrylovAwareEstimator` needs", "tagged Hermitian", "not known to be"]
    parts.append("use `traceax.SLQEstimator`")
    check(ValueError, parts, lambda: logdet(UNTAGGED, KRYLOV))


@pytest.mark.parametrize(
    ("operator", "krylov", "parts"),
    [
        (UNTAGGED, tx.Lanczos(), ["`Lanczos`", "singular values", "not known to be"]),
        (TAGGED, tx.GolubKahan(), ["`GolubKahan`", "`Log`", "is known to be"]),
    ],
)
def test_krylov_method_does_not_fit(operator, krylov, parts):
    estimator = tx.SLQEstimator(krylov=krylov)
    check(ValueError, ["`krylov`", *parts], lambda: logdet(operator, estimator))


def test_krylov_is_no_method():
    parts = ["`krylov` must be an instance of `traceax.AbstractKrylovMethod`"]
    check(TypeError, parts, lambda: tx.SLQEstimator(krylov=tx.Lanczos))  # type: ignore


@pytest.mark.parametrize(
    ("matrix", "tags", "fix"),
    [
        (MATRIX, (), "lineax.symmetric_tag"),
        (MATRIX.astype(complex), (), "traceax.hermitian_tag"),
        # Symmetric is not Hermitian.
        (MATRIX.astype(complex), lx.symmetric_tag, "traceax.hermitian_tag"),
    ],
    ids=["real", "complex", "complex-symmetric"],
)
def test_missing_tag(matrix, tags, fix):
    parts = [
        "`operator` must be Hermitian",
        "Found `operator` without",
        f"`traceax.as_operator(operator, tags={fix})`",
        "`lineax.positive_semidefinite_tag`",
    ]
    operator = matrix_free(matrix, tags)
    # `log_trace_exp` takes real operators without a tag.
    names = ["function_of"] + ["log_trace_exp"] * np.iscomplexobj(matrix)
    for name in names:
        check(ValueError, parts, lambda name=name: OPERATOR_CALLS[name](operator))


@pytest.mark.parametrize("tags", [(), lx.symmetric_tag, NSD])
@pytest.mark.parametrize("name", ["nystrom", "pivoted_cholesky"])
def test_preconditioner_of_an_operator_without_the_tag(name, tags):
    parts = ["`operator`", "Found one without the tag"]
    parts.append("as_operator(operator, tags=lineax.positive_semidefinite_tag)")
    operator = lx.MatrixLinearOperator(MATRIX, tags)
    check(ValueError, parts, lambda: OPERATOR_CALLS[name](operator))


@pytest.mark.parametrize(
    ("operator", "parts"),
    [
        (matrix_free(np.eye(N + 1), PSD), ["of the size of `operator`", "12 and 13"]),
        (UNTAGGED, ["must be tagged positive semidefinite", "leave `preconditioner`"]),
    ],
    ids=["other-size", "untagged"],
)
def test_preconditioner_does_not_fit_the_operator(operator, parts):
    preconditioner = tx.nystrom_preconditioner(TAGGED, 3, key=KEY)
    check(ValueError, parts, lambda: logdet(operator, preconditioner=preconditioner))


def test_pivoted_cholesky_needs_a_diagonal():
    parts = ["`diagonal` is missing", "lineax does not know it", "Pass it"]
    parts.append("`traceax.nystrom_preconditioner`")
    check(ValueError, parts, lambda: tx.pivoted_cholesky_preconditioner(TAGGED, 3))


@pytest.mark.parametrize("shape", [(N - 1,), (), (N, 1)])
def test_diagonal_of_another_shape(shape):
    parts = [f"`diagonal` must have the shape ({N},)", f"Found {shape}"]
    wrong = jnp.asarray(np.ones(shape))
    call = lambda: tx.pivoted_cholesky_preconditioner(TAGGED, 3, diagonal=wrong)  # noqa: E731
    check(ValueError, parts, call)


@pytest.mark.parametrize("window", [-1, 2.0, True, "all"])
def test_window(window):
    parts = ["`window` must be a Python integer, 0 or more", f"Found {window!r}"]
    check(ValueError, [*parts, "None"], lambda: tx.Lanczos(window))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("exponent", ["2", None, True, jnp.asarray(0.5)])
def test_exponent(exponent):
    parts = ["`exponent` must be a Python int or float", type(exponent).__name__]
    check(TypeError, [*parts, "lambda x: x**p"], lambda: tx.Power(exponent))


@pytest.mark.parametrize("function", ["log", 2.0, None, tx.Log, np.ones(3)])
@pytest.mark.parametrize("name", ["trace_of_function", "function_of"])
def test_function_is_not_one(name, function):
    calls = {
        "trace_of_function": lambda: trace_of(function, TAGGED),
        "function_of": lambda: tx.function_of(TAGGED, function, 3),
    }
    parts = ["`function` must be a `traceax.AbstractSpectralFunction` or a callable"]
    found = "the class Log" if function is tx.Log else repr(function)
    parts += [f"Found {found}", "`traceax.Log()`"]
    check(TypeError, parts, calls[name])


@every_estimator
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda x: x + 1j, ["shape ()", "dtype complex128"]),
        (lambda x: jnp.stack([x, x]), ["shape (2,)", "dtype float64"]),
        (lambda x: x > 0, ["shape ()", "dtype bool"]),
    ],
    ids=["complex", "vector", "bool"],
)
def test_function_does_not_map_reals_to_reals(estimator, function, parts):
    parts = ["`function` must map a real number to a real number", "float64", *parts]
    check(TypeError, parts, lambda: trace_of(function, TAGGED, estimator))


def test_function_of_a_function_that_does_not_map_reals_to_reals():
    parts = ["`function` must map a real number to a real number", "complex128"]
    call = lambda: tx.function_of(TAGGED, lambda x: x + 1j, 3).mv(ONES)  # noqa: E731
    check(TypeError, parts, call)


@pytest.mark.parametrize("solver", ["cg", lx.CG, None, 1e-6])
def test_solve_gradient_needs_a_solver(solver):
    parts = ["`solver` must be a `lineax.AbstractLinearSolver`", type(solver).__name__]
    check(TypeError, [*parts, "`lineax.CG("], lambda: tx.SolveGradient(solver))


@pytest.mark.parametrize("columns", [0, -1, 2.0, True])
def test_columns_of_a_gradient(columns):
    parts = ["`columns` must be a positive Python integer", f"Found {columns!r}"]
    check(ValueError, parts, lambda: tx.LanczosGradient(columns=columns))


@pytest.mark.parametrize(
    ("function", "estimator", "k"),
    [
        (tx.Exp(), SLQ, 4),
        (tx.Entropy(), SLQ, 4),
        (tx.Power(0.5), SLQ, 4),
        (jnp.tanh, SLQ, 4),
        (tx.Exp(), SLQ, N),
        (tx.Entropy(), KRYLOV, 4),
        (tx.Power(0.5), KRYLOV, N),
    ],
    ids=[
        "Exp",
        "Entropy",
        "Power",
        "tanh",
        "Exp-exact",
        "Entropy-Krylov",
        "Power-Krylov-exact",
    ],
)
def test_solve_gradient_needs_a_power(function, estimator, k):
    gradient = tx.SolveGradient(lx.CG(1e-6, 1e-6))
    name = "_Callable" if function is jnp.tanh else type(function).__name__
    parts = ["`gradient=traceax.SolveGradient(...)`", "`traceax.Log`", f"Found `{name}`"]
    # Not a circle: the message of that gradient's second derivative names this one.
    parts += ["`traceax.LanczosGradient()` for a first", "with the same key"]
    call = lambda: trace_of(function, TAGGED, estimator, k=k, gradient=gradient)  # noqa: E731
    check(ValueError, parts, call)


SECOND = {
    "logdet": lambda a, k, **s: logdet(matrix_operator(a), k=k, **s),
    "general": lambda a, k, **s: logdet(matrix_operator(a, ()), k=k, **s),
    "inverse": lambda a, k, **s: trace_of(tx.Inverse(), matrix_operator(a), k=k, **s),
    "krylov": lambda a, k, **s: trace_of(
        tx.Inverse(), matrix_operator(a), KRYLOV, k=k, **s
    ),
}


@pytest.mark.slow(but=("logdet-12", "inverse-12"))
@every_budget
@pytest.mark.parametrize("name", SECOND)
def test_second_derivative_of_the_default_gradient(name, k):
    parts = ["second derivatives", "`gradient=traceax.SolveGradient(lineax.CG("]
    parts += ["For other functions", "differences of first derivatives"]

    def slope(x):
        return jax.grad(lambda x: SECOND[name](x * MATRIX, k).value)(x)

    assert jax.eval_shape(slope, 1.0).shape == ()  # its values: test_function_gradients
    check(NotImplementedError, parts, lambda: jax.grad(slope)(1.0))
    check(NotImplementedError, parts, lambda: jax.jvp(slope, (1.0,), (1.0,)))


@every_budget
def test_mixed_derivatives_of_the_default_gradient(k):
    """That in a parameter of the derivative in the operator is right; the other order,
    of which reverse mode once made 0, is refused."""

    def value(scale, x):
        return trace_of(
            tx.Exp(scale), matrix_operator(x * MATRIX), k=k, num_steps=N
        ).value

    if k == N:  # estimated: test_function_gradients
        mixed = jax.jit(jax.grad(lambda scale: jax.grad(value, 1)(scale, 0.1)))(-0.5)
        e = np.linalg.eigvalsh(MATRIX)
        assert np.isclose(mixed, np.sum((e - 0.05 * e**2) * np.exp(-0.05 * e)), atol=0)
    other = jax.grad(lambda x: jax.grad(value)(-0.5, x))
    check(NotImplementedError, ["second derivatives"], lambda: other(0.1))


def test_second_derivative_of_function_of():
    def product(x, function=tx.Exp()):
        operator = matrix_operator(x * MATRIX)
        return jnp.sum(tx.function_of(operator, function, 3).mv(ONES))

    parts = ["`traceax.function_of` has no second derivatives", "differences of first"]
    check(NotImplementedError, parts, lambda: jax.grad(jax.grad(product))(1.0))
    slope = jax.grad(lambda s: product(1.0, tx.Exp(s)))
    check(NotImplementedError, parts, lambda: jax.grad(slope)(1.0))


@pytest.mark.slow(but=("Log", "Log-exact", "Inverse"))
@pytest.mark.parametrize(
    ("function", "estimator", "k"),
    [
        (tx.Log(), SLQ, 4),
        (tx.Log(), SLQ, N),
        (tx.Inverse(), SLQ, 4),
        (tx.Inverse(), KRYLOV, 4),
    ],
    ids=["Log", "Log-exact", "Inverse", "Inverse-Krylov"],
)
def test_operator_is_not_positive_definite(function, estimator, k):
    operator = lx.MatrixLinearOperator(INDEFINITE, PSD)

    def call(throw):
        settings = {"k": k, "throw": throw}
        if isinstance(function, tx.Log):
            return logdet(operator, estimator, **settings)
        return trace_of(function, operator, estimator, **settings)

    solution = check_failure(tx.RESULTS.not_positive_definite, call)
    smallest, largest = solution.stats["ritz_values"]
    assert smallest < 0 < largest
    parts = ["positive definite", "jitter", "(c)", str(smallest), str(largest)]
    check(RuntimeError, parts, lambda: call(throw=True))


@pytest.mark.slow
def test_not_positive_definite_under_jit_and_with_other_tags():
    @jax.jit
    def compiled(matrix):
        return logdet(matrix_operator(matrix), throw=True).value

    check(RuntimeError, ["positive definite"], lambda: compiled(INDEFINITE).item())
    for wrong in (
        lambda throw: logdet(matrix_operator(INDEFINITE, NSD), throw=throw),
        lambda throw: logdet(
            matrix_operator(INDEFINITE),
            preconditioner=tx.nystrom_preconditioner(TAGGED, 3, key=KEY),
            throw=throw,
        ),
    ):
        check_failure(tx.RESULTS.not_positive_definite, wrong)
    # Without the tag it is log |det A|, which exists.
    assert np.isfinite(logdet(matrix_operator(INDEFINITE, ())).value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "estimator", "k"),
    [
        (tx.Entropy(), SLQ, 4),
        (tx.Entropy(), KRYLOV, 4),
        (jnp.log, SLQ, 4),
        (jnp.log, SLQ, N),
    ],
    ids=["Entropy", "Entropy-Krylov", "jnp.log", "jnp.log-exact"],
)
def test_spectrum_outside_the_domain(function, estimator, k):
    operator = matrix_operator(INDEFINITE)

    def call(throw):
        return trace_of(function, operator, estimator, k=k, throw=throw)

    solution = check_failure(tx.RESULTS.outside_domain, call)
    smallest, largest = solution.stats["ritz_values"]
    parts = ["outside", "domain of the function", str(smallest), str(largest)]
    check(RuntimeError, parts, lambda: call(throw=True))


def exp(scale):
    """With the scale as an argument of the program."""
    return tx.Exp(np.asarray(scale))


@pytest.mark.slow
def test_function_that_overflows():
    operator = matrix_operator(MATRIX)
    call = lambda throw: trace_of(exp(1e4), operator, throw=throw)  # noqa: E731
    check_failure(tx.RESULTS.outside_domain, call)


@pytest.mark.slow(but=("logdet-12-nan", "general-12-nan", "inverse-12-nan"))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("name", "k"),
    [
        *((name, 4) for name in SECOND),
        *((name, N) for name in SECOND if name != "krylov"),
    ],
)
def test_products_that_are_not_finite(name, bad, k):
    matrix = MATRIX.copy()
    matrix[[3, 4], [4, 3]] = bad
    call = lambda throw: SECOND[name](matrix, k, throw=throw)  # noqa: E731
    check_failure(tx.RESULTS.nonfinite_product, call)
    parts = ["not finite", "operator's arrays hold NaN", "`operator.mv`"]
    check(RuntimeError, parts, lambda: call(throw=True))


def test_adjoint_products_that_are_not_finite():
    """The transpose of this function divides zero by zero."""
    divisor = np.where(np.arange(N) == 3, 0.0, 1.0)
    operator = lx.FunctionLinearOperator(
        lambda v: MATRIX @ jnp.where(divisor > 0, v / divisor, 2 * v),
        jax.ShapeDtypeStruct((N,), jnp.float64),
    )
    products = jax.jit(lambda v: (operator.mv(v), operator.transpose().mv(v)))(ONES)
    assert [np.all(np.isfinite(x)) for x in products] == [True, False]
    call = lambda throw: logdet(operator, throw=throw)  # noqa: E731
    check_failure(tx.RESULTS.nonfinite_product, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [exp(1.0), tx.Entropy(), jnp.log], ids=["Exp", "Entropy", "jnp.log"]
)
def test_nonfinite_products_are_not_blamed_on_the_function(function):
    matrix = np.where(np.arange(N * N).reshape(N, N) == 3 * N + 4, np.nan, MATRIX)
    call = lambda throw: trace_of(function, matrix_operator(matrix), throw=throw)  # noqa: E731
    check_failure(tx.RESULTS.nonfinite_product, call)


@every_budget
@pytest.mark.parametrize("tags", [PSD, NSD, ()], ids=["positive", "negative", "none"])
def test_zero_operator_has_no_log_determinant(tags, k):
    call = lambda throw: logdet(  # noqa: E731
        matrix_operator(np.zeros((N, N)), tags), k=k, throw=throw
    )
    result = tx.RESULTS.not_positive_definite if tags else tx.RESULTS.zero_determinant
    check_failure(result, call)


@pytest.mark.parametrize("tags", [PSD, ()], ids=["positive", "none"])
def test_singular_matrix_has_no_log_determinant(tags):
    matrix = MATRIX * np.outer(np.arange(N) != 3, np.arange(N) != 3)
    solution = logdet(matrix_operator(matrix, tags), k=N, throw=False)
    assert solution.result != tx.RESULTS.successful
    if not tags:
        assert solution.result == tx.RESULTS.zero_determinant


def singular(tags):
    """Matrices of small integers and of rank N - 1 in any arithmetic."""
    rng = np.random.default_rng(0)
    if tags:
        factors = rng.integers(-8, 9, (40, N, N - 1))
        factors[:, 1] = factors[:, 0]
        return (factors @ factors.mT).astype(np.float32)
    matrices = rng.integers(-8, 9, (40, N, N)).astype(np.float32)
    matrices[:, :, -1] = matrices[:, :, 0]
    return matrices


def one_over(x):
    return 1 / x


BY_NORMAL = {"sampler": tx.NormalSampler()}
AWARE = tx.KrylovAwareEstimator(**BY_NORMAL)


@pytest.mark.slow(but=("function0-*", "log-tags1-*"))
@pytest.mark.parametrize(
    ("function", "tags", "estimator", "k"),
    [
        (tx.Log(), PSD, None, N),
        (jnp.log, PSD, None, N),
        (tx.Log(), PSD, tx.SLQEstimator(**BY_NORMAL), 4),
        (one_over, PSD, tx.SLQEstimator(**BY_NORMAL), 4),
        (tx.Log(), PSD, AWARE, 8),
        (jnp.log, PSD, AWARE, 8),
        (None, (), None, N),
        (tx.Log(), (), None, N),
        (jnp.log, (), None, N),
        (one_over, (), tx.SLQEstimator(**BY_NORMAL, krylov=tx.Arnoldi()), 4),
    ],
)
def test_singular_matrices_that_rounding_makes_regular(function, tags, estimator, k):
    """Their smallest eigenvalue comes out positive as often as not."""

    def successful(matrix, key):
        operator = matrix_operator(matrix, tags)
        settings = {} if estimator is None else {"estimator": estimator}
        settings |= {"k": k, "num_steps": N, "key": key, "throw": False}
        call = partial(tx.trace_of_function, function=function)
        solution = (call if function else tx.logdet)(operator, **settings)
        return solution.result == tx.RESULTS.successful

    matrices = singular(tags)
    found = jax.jit(jax.vmap(successful))(matrices, jr.split(KEY, len(matrices)))
    assert not np.any(found)


def test_poles_at_zero_of_regular_matrices():
    """Of functions of which nothing is known, for eigenvalues of both signs."""
    matrix = hermitian(0, np.linspace(-1, 2, N))
    operator = matrix_operator(matrix, lx.symmetric_tag)
    for function in (one_over, lambda x: jnp.log(jnp.abs(x))):
        solution = trace_of(function, operator, k=N)
        expected = np.sum(function(np.linspace(-1, 2, N)))
        assert np.allclose(solution.value, expected, rtol=1e-10)


def test_singular_in_its_precision_has_no_log_determinant():
    """Singular values 0.7^i, the last of which are far below the machine epsilon: what a
    run finds for these is rounding, and was reported as a success."""
    matrix = hermitian(5, 0.7 ** np.arange(100), np.float32)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    solution = logdet(operator, num_steps=80, throw=False)
    assert solution.result == tx.RESULTS.zero_determinant


@pytest.mark.parametrize("name", SECOND)
def test_right_input_succeeds(name):
    solution = SECOND[name](MATRIX, 4)
    assert solution.result == tx.RESULTS.successful
    assert tx.RESULTS[solution.result] == ""


def test_static_integers_are_not_traced():
    call = eqx.filter_jit(lambda k, s: logdet(TAGGED, k=k, num_steps=s).value)
    assert call.lower(4, 3)


SYMMETRIC = matrix_free(MATRIX, lx.symmetric_tag)


@pytest.mark.parametrize(
    ("call", "exception", "parts"),
    [
        (
            lambda: trace_of(tx.Exp(1j), UNTAGGED),
            TypeError,
            ["`scale` is complex", "operator of complex dtype", "tagged as Hermitian"],
        ),
        (
            lambda: trace_of(tx.Inverse(1 + 1j), UNTAGGED),
            TypeError,
            ["`shift` is complex", "Found (1+1j)", "Convert the operator"],
        ),
        (
            lambda: trace_of(np.exp, TAGGED),
            TypeError,
            ["`function` must be one that JAX can trace", "ufunc", "`jnp`"],
        ),
        (
            lambda: trace_of(lambda x: x if x > 0 else -x, TAGGED),
            TypeError,
            ["`function` must be one that JAX can trace", "`jnp.where`"],
        ),
        (
            lambda: logdet(SYMMETRIC, KRYLOV),
            ValueError,
            ["`KrylovAwareEstimator`", "singular values", "semidefinite tag", "SLQ"],
        ),
        (
            lambda: tx.trace_difference(
                TAGGED,
                TAGGED,
                tx.Exp(),
                k=4,
                key=KEY,
                preconditioner=tx.AutoPreconditioner(0.1),
            ),
            ValueError,
            ["`preconditioner` is for `traceax.Log()`", "`Exp`", "Leave"],
        ),
        (
            lambda: logdet(SYMMETRIC, preconditioner=tx.AutoPreconditioner(0.1)),
            ValueError,
            ["`operator` must be tagged positive semidefinite", "`preconditioner`"],
        ),
        (
            lambda: logdet(TAGGED, preconditioner=TAGGED),
            TypeError,
            ["`preconditioner`", "a `lineax` operator", "nystrom_preconditioner"],
        ),
        (
            lambda: tx.nystrom_preconditioner(TAGGED, None, key=KEY),
            TypeError,
            ["`rank` must be an integer. Found None of type NoneType."],
        ),
    ],
)
def test_what_does_not_fit_together(call, exception, parts):
    check(exception, parts, call)
