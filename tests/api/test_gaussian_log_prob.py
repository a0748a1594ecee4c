"""The log-density of a Gaussian and its gradient, against a dense solve and determinant
in double precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD, z_score


N, KEYS = 40, 200
KEY = jr.key(0)
POINTS = np.sort(np.random.default_rng(0).uniform(size=N))
PARAMETERS = np.array([1.3, 0.2, 0.1])  # scale, length, noise
RESIDUAL = np.sin(7 * POINTS) + 0.3 * np.cos(40 * POINTS)


def kernel(parameters, np=np):
    scale, length, noise = parameters
    distances = (POINTS[:, None] - POINTS).astype(parameters.dtype) / length
    eye = np.eye(N, dtype=parameters.dtype)
    return scale * np.exp(-(distances**2) / 2) + noise * eye


def exact_of(matrix, residual):
    """The log-density, and its derivatives in the matrix and in the residual."""
    solution = np.linalg.solve(matrix, residual)
    sign, log_det = np.linalg.slogdet(matrix)
    assert sign == 1
    value = -(residual @ solution + log_det + len(matrix) * np.log(2 * np.pi)) / 2
    return value, (np.outer(solution, solution) - np.linalg.inv(matrix)) / 2, -solution


def slopes_of_kernel():
    """Central differences: of order 1e-9 in double precision."""
    steps = 1e-5 * np.eye(3)
    return [
        (kernel(PARAMETERS + step) - kernel(PARAMETERS - step)) / 2e-5 for step in steps
    ]


@eqx.filter_jit
def log_prob(matrix, residual, key=KEY, *, tags=PSD, k=6, num_steps=12, **settings):
    settings = {"k": k, "num_steps": num_steps, "key": key, "throw": False} | settings
    return tx.gaussian_log_prob(matrix_free(matrix, tags), residual, **settings)


@pytest.mark.slow(but="float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradient(dtype):
    """The preconditioner is made from the parameters that derivatives are taken in.
    Eight z-scores in all, one of them above 4.5 with a chance below 1e-4. A 95% interval
    of Student's t covers less than 0.88 of 200 with a chance below 1e-4. The variance
    that the samples tell is off by 0.6, 4.5 standard errors, with one below 1e-5."""
    rounding = float(np.finfo(dtype).eps)

    def value(parameters, residual, key):
        matrix = kernel(parameters, jnp)
        operator = lx.MatrixLinearOperator(matrix, PSD)
        preconditioner = tx.nystrom_preconditioner(
            operator, 4, key=jr.key(1), shift=parameters[2]
        )
        settings = {"preconditioner": preconditioner, "throw": False}
        found = tx.gaussian_log_prob(
            operator, residual, k=20, num_steps=12, key=key, **settings
        )
        stats = found.stats
        return found.value, (found.std_err, stats["samples"], stats["solve_residual"])

    @eqx.filter_jit
    def run(parameters, residual, keys):
        both = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
        return jax.lax.map(lambda key: both(parameters, residual, key), keys)

    parameters, residual = PARAMETERS.astype(dtype), RESIDUAL.astype(dtype)
    keys = jr.split(jr.key(20261122), KEYS)
    found = jax.tree.map(np.asarray, run(parameters, residual, keys))
    (values, (bars, parts, left_over)), (slopes, along) = found
    exact, in_matrix, in_residual = exact_of(kernel(PARAMETERS), RESIDUAL)
    assert values.dtype == bars.dtype == dtype
    # Rounding of the parameters, beside eigenvalues above 0.1, and of sums of n terms.
    tolerance = 2e3 * rounding
    values, bars = values.astype(float), bars.astype(float)
    assert z_score(values, exact) < 4.5 or np.abs(np.mean(values) - exact) < tolerance
    assert np.mean(np.abs(values - exact) <= 2.093 * bars) >= 0.88
    spread = np.mean(np.var(parts, axis=1, ddof=1)) / 20
    assert 0.6 < spread / np.var(values) < 1.6
    for i, slope in enumerate(slopes_of_kernel()):
        samples, exact = slopes[:, i].astype(float), np.sum(in_matrix * slope)
        close = np.abs(np.mean(samples) - exact) < tolerance * np.abs(exact)
        assert z_score(samples, exact) < 4.5 or close
    assert np.max(left_over) < 10 * rounding**0.5
    scale = np.max(np.abs(in_residual))
    assert np.allclose(along, in_residual, atol=30 * rounding**0.5 * scale)


def test_exact_budget_on_pytrees():
    """With dense determinant and solve it is the dense answer, to rounding."""
    matrix = kernel(PARAMETERS)
    value, in_matrix, in_residual = exact_of(matrix, RESIDUAL)
    split = lambda v: {"a": v[:10].reshape(2, 5), "b": v[10:]}  # noqa: E731
    joined = lambda tree, np=np: np.concatenate([tree["a"].reshape(-1), tree["b"]])  # noqa: E731

    def run(matrix, residual):
        structure = jax.eval_shape(lambda: residual)
        mv = lambda tree: split(matrix @ joined(tree, jnp))  # noqa: E731
        operator = lx.FunctionLinearOperator(mv, structure, PSD)
        found = tx.gaussian_log_prob(operator, residual, k=N, solver=lx.Cholesky())
        return found.value, found

    slope = eqx.filter_jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
    (found, solution), slopes = slope(matrix, split(RESIDUAL))
    assert np.allclose(found, value, rtol=1e-12)
    assert np.allclose(slopes[0], in_matrix, rtol=1e-9, atol=1e-9)
    for tree, exact in (
        (slopes[1], in_residual),
        (solution.stats["solve"], -in_residual),
    ):
        assert np.allclose(joined(tree), exact, rtol=1e-9, atol=1e-9)
    low, high = solution.interval()
    assert low <= found <= high
    assert high - low < 1e-10
    form = solution.stats["quadratic_form"] + solution.stats["logdet"].value
    assert np.allclose(-(form + N * np.log(2 * np.pi)) / 2, value, rtol=1e-12)


@pytest.mark.slow
def test_bracket_becomes_the_interval():
    """Of the log-determinant, with the signs exchanged."""
    matrix = kernel(PARAMETERS)
    found = jax.tree.map(np.asarray, log_prob(matrix, RESIDUAL, num_steps=3))
    determinant = found.stats["logdet"]
    rest = found.stats["quadratic_form"] + N * np.log(2 * np.pi)
    low, high = -(np.array(determinant.interval()) + rest) / 2
    assert np.allclose(found.interval(), (high, low), rtol=1e-10)
    assert np.allclose(np.mean(found.stats["samples"]), found.value, rtol=1e-12)
    assert np.allclose(found.std_err, determinant.std_err / 2, rtol=1e-10)


@pytest.mark.slow
def test_scales_of_any_size():
    """In powers of two, which round nothing; `lineax.CG` alone breaks down."""
    matrix, residual = kernel(PARAMETERS.astype(np.float32)), np.float32(RESIDUAL)
    found = log_prob(matrix, residual)
    for exponent in (-40, 40):
        scaled = log_prob(matrix * 2.0**exponent, residual * 2.0 ** (exponent / 2))
        shift = N * exponent * np.log(2) / 2
        assert scaled.result == tx.RESULTS.successful
        assert np.allclose(scaled.value + shift, found.value, atol=1e-3)
        assert np.allclose(scaled.std_err, found.std_err, rtol=1e-3)
        form = scaled.stats["quadratic_form"]
        assert np.allclose(form, found.stats["quadratic_form"], rtol=1e-4)


def test_bars_count_rounding():
    """Of the quadratic form, in single precision at a condition of 2e4: root mean squares
    over 40 residuals of unit variance. Rounding errors are a third as large with jax 0.12
    as with 0.10."""
    matrix = kernel(np.array([1.0, 0.2, 1e-3], np.float32))
    residuals = np.random.default_rng(1).standard_normal((40, N)).astype(np.float32)

    @eqx.filter_jit
    def run(matrix, residuals):
        found = jax.vmap(lambda r: log_prob(matrix, r, k=N, num_steps=3))(residuals)
        return found.stats["quadratic_form"], found.std_err

    forms, bars = (np.asarray(x, float) for x in run(matrix, residuals))
    matrix, residuals = matrix.astype(float), residuals.astype(float)
    exact = np.sum(residuals * np.linalg.solve(matrix, residuals.T).T, axis=1)
    error = np.mean((forms - exact) ** 2) ** 0.5 / 2
    bar = np.mean(bars**2) ** 0.5
    assert bar / 10 < error < 1.5 * bar


@pytest.mark.slow
def test_several_residuals_share_the_determinant():
    """Every product is seen by the host."""
    matrix, seen = kernel(PARAMETERS), []

    def multiply(v):
        seen.append(v.size // N)
        return v @ matrix

    def mv(v):
        like = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(multiply, like, v, vmap_method="expand_dims")

    structure = jax.ShapeDtypeStruct((N,), np.float64)
    operator = lx.FunctionLinearOperator(mv, structure, PSD)

    @eqx.filter_jit
    def run(residuals):
        one = lambda r: tx.gaussian_log_prob(  # noqa: E731
            operator, r, k=6, num_steps=5, key=KEY, throw=False
        )
        found = jax.vmap(one)(residuals)
        return found.value, found.stats["num_matvecs"], found.stats["solve_steps"]

    for count in (1, 3):
        factors = 2.0 ** np.arange(count)  # which change no rounding
        seen.clear()
        values, products, steps = map(np.asarray, run(factors[:, None] * RESIDUAL))
        jax.effects_barrier()
        exact = [exact_of(matrix, factor * RESIDUAL)[0] for factor in factors]
        assert np.allclose(values - values[0], exact - exact[0], rtol=1e-10)
        assert (steps == steps[0]).all()
        assert (products == 30 + steps + 2).all()
        assert sum(seen) == 30 + count * (steps[0] + 2)


@pytest.mark.slow
def test_warm_starts_and_preconditioners_save_steps():
    matrix, near = kernel(PARAMETERS), kernel(PARAMETERS * 1.001)
    tags = {"tags": PSD, "initial": np.zeros(N)}
    cold = log_prob(matrix, RESIDUAL, **tags)
    following = log_prob(near, RESIDUAL, **tags)
    warm = log_prob(near, RESIDUAL, **tags | {"initial": cold.stats["solve"]})
    again = log_prob(near, RESIDUAL, **tags | {"initial": warm.stats["solve"]})
    steps = [int(each.stats["solve_steps"]) for each in (following, warm, again)]
    assert steps[0] > steps[1] > steps[2]
    assert np.allclose([warm.value, again.value], following.value, rtol=1e-12)
    operator = matrix_free(near, PSD)
    preconditioner = tx.nystrom_preconditioner(operator, 10, key=KEY, shift=0.1)
    helped = log_prob(near, RESIDUAL, preconditioner=preconditioner)
    assert 2 * helped.stats["solve_steps"] < steps[0]
    assert helped.std_err < warm.std_err / 10
    form = np.array([each.stats["quadratic_form"] for each in (helped, warm)])
    assert np.allclose(form, RESIDUAL @ np.linalg.solve(near, RESIDUAL), rtol=1e-12)


@pytest.mark.slow
def test_rounding_of_the_quadratic_form():
    """In float32, of a condition of 1e5, where the log-determinant is ten times more
    accurate, and over 100 keys. By chance the error that is left of the solve may be
    orthogonal to the solution."""
    eigenvalues = np.append(np.logspace(3, 0, 20), np.linspace(0.01, 0.02, 80))
    matrix = hermitian(0, eigenvalues).astype(np.float32)
    residual = np.random.default_rng(5).standard_normal(100).astype(np.float32)
    residual *= np.float32(np.mean(eigenvalues) ** 0.5)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)

    @jax.jit
    def intervals(keys):
        def one(key):
            preconditioner = tx.nystrom_preconditioner(operator, 25, key=key, shift=0.01)
            settings = {"preconditioner": preconditioner, "throw": False}
            return tx.gaussian_log_prob(
                operator, residual, k=10, num_steps=10, key=key, **settings
            ).interval()

        return jax.lax.map(one, keys, batch_size=20)

    low, high = intervals(jr.split(KEY, 100))
    exact, *_ = exact_of(matrix.astype(float), residual.astype(float))
    assert np.mean((low <= exact) & (exact <= high)) >= 0.95


@pytest.mark.slow
def test_preconditioner_chosen_by_the_data():
    """It is made once, for the determinant and the solve, and its products count."""
    made = []

    def run(noise, count=False):
        matrix = kernel(jnp.append(PARAMETERS[:2], noise), jnp)

        def mv(v):
            if count:
                jax.debug.callback(lambda _: made.append(1), v[0])
            return matrix @ v

        structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
        return tx.gaussian_log_prob(
            lx.FunctionLinearOperator(mv, structure, PSD),
            RESIDUAL,
            k=6,
            num_steps=8,
            key=KEY,
            preconditioner=tx.AutoPreconditioner(noise, max_rank=16),
        )

    solution = run(PARAMETERS[2], count=True)
    jax.effects_barrier()
    assert solution.stats["num_matvecs"] == len(made)
    exact, slope, _ = exact_of(kernel(PARAMETERS), RESIDUAL)
    assert abs(solution.value - exact) <= 4 * solution.std_err
    assert solution.stats["solve_steps"] < N // 2
    found = jax.grad(lambda noise: run(noise).value)(PARAMETERS[2])
    assert np.allclose(found, np.trace(slope), rtol=0.05)


@pytest.mark.slow
def test_preconditioner_of_a_run_that_goes_on():
    """It is that of the first run, of which the samples are, whatever the tolerance."""

    def run(rtol, state=None):
        k = tx.Adaptive(round_size=4, min_samples=4, max_k=32, rtol=rtol)
        settings = {"k": k, "num_steps": 8, "state": state, "throw": False}
        settings["preconditioner"] = tx.AutoPreconditioner(PARAMETERS[2], max_rank=16)
        return log_prob(kernel(PARAMETERS), RESIDUAL, **settings)

    first = run(rtol=10.0)
    again = run(rtol=1e-3, state=first.state)
    (preconditioner, of_logdet), (kept, _) = first.state, again.state
    assert kept.num_matvecs == preconditioner.num_matvecs
    assert again.stats["num_matvecs"] > first.stats["num_matvecs"]
    exact, *_ = exact_of(kernel(PARAMETERS), RESIDUAL)
    assert abs(again.value - exact) <= 4 * again.std_err + 1e-3 * abs(exact)
    with pytest.raises(ValueError, match="the same kind of preconditioner"):
        run(rtol=1e-3, state=of_logdet)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "dtype"),
    [
        (lx.GMRES(1e-5, 1e-5), np.float64),
        (lx.Normal(lx.CG(1e-4, 1e-4, max_steps=400)), np.float32),
    ],
    ids=["after", "before"],
)
def test_another_solver(solver, dtype):
    """One that measures residuals after the preconditioner, or solves the normal
    equations by conjugate gradients."""
    matrix, residual = kernel(PARAMETERS).astype(dtype), RESIDUAL.astype(dtype)
    exact = RESIDUAL @ np.linalg.solve(kernel(PARAMETERS), RESIDUAL)
    for preconditioner in (None, tx.AutoPreconditioner(PARAMETERS[2], max_rank=16)):
        settings = {"solver": solver, "preconditioner": preconditioner}
        found = log_prob(matrix, residual, **settings)
        assert found.result == tx.RESULTS.successful
        assert np.allclose(found.stats["quadratic_form"], exact, rtol=1e-4)


def test_no_residual():
    """With a guess that is not the solution."""
    settings = {"initial": RESIDUAL, "k": N}
    found = log_prob(kernel(PARAMETERS), 0 * RESIDUAL, **settings)
    assert found.result == tx.RESULTS.successful
    assert np.allclose(found.stats["quadratic_form"], 0, atol=1e-6)


@pytest.mark.slow
def test_float16():
    """Solutions that are no numbers of float16, and eigenvalues that are none."""
    structure = jax.ShapeDtypeStruct((4,), np.float16)
    small = lx.FunctionLinearOperator(lambda v: np.float16(1e-3) * v, structure, PSD)
    residual = np.full(4, 100, np.float16)
    found = tx.gaussian_log_prob(small, residual, k=4)
    assert np.allclose(found.stats["quadratic_form"], 4e7, rtol=1e-3)

    n = 1000
    matrix = (100 * np.ones((n, n)) + 1000 * np.eye(n)).astype(np.float16)
    residual = np.full(n, 3e4, np.float16)
    operator = matrix_free(jnp.asarray(matrix), PSD)
    settings = {"k": 4, "num_steps": 4, "key": KEY, "throw": False}
    found = tx.gaussian_log_prob(operator, residual, **settings)
    matrix, residual = matrix.astype(float), residual.astype(float)
    exact = residual @ np.linalg.solve(matrix, residual)
    assert found.result == tx.RESULTS.successful
    assert np.allclose(found.stats["quadratic_form"], exact, rtol=1e-2)


@pytest.mark.slow
def test_failures_are_told():
    matrix = kernel(PARAMETERS)
    hasty = lx.CG(1e-8, 1e-8, max_steps=2)
    indefinite = hermitian(1, np.append(np.linspace(1, 3, N - 1), -2))
    broken = np.where(np.eye(N) > 0, np.nan, matrix)
    for result, found in {
        "max_steps_reached": log_prob(matrix, RESIDUAL, solver=hasty),
        "not_positive_definite": log_prob(indefinite, RESIDUAL),
        "nonfinite_product": log_prob(broken, RESIDUAL),
    }.items():
        assert found.result == getattr(tx.RESULTS, result), result
    with pytest.raises(RuntimeError, match="maximum number of solver steps"):
        log_prob(matrix, RESIDUAL, solver=hasty, throw=True)


@pytest.mark.parametrize("argnum", [0, 1])
def test_second_derivatives_are_refused(argnum):
    def slope(matrix, residual):
        value = lambda r: log_prob(matrix, r, num_steps=3).value  # noqa: E731
        return jax.grad(value)(residual)[0]

    with pytest.raises(NotImplementedError, match="gaussian_log_prob"):
        jax.grad(slope, argnums=argnum)(kernel(PARAMETERS), RESIDUAL)


class Ones(tx.AbstractPreconditioner):
    """The identity."""

    rows: int
    num_matvecs: int = 0
    logdet, largest = np.zeros(()), np.ones(())

    @property
    def size(self):
        return self.rows

    def power(self, exponent, x):
        return x

    def control(self, operator, value, probes, execution):
        return value


@pytest.mark.parametrize(
    ("kind", "parts", "change"),
    [
        (ValueError, ["`residual`", "(39,)", "vmap"], {"residual": RESIDUAL[1:]}),
        (ValueError, ["`residual`", "(2, 40)"], {"residual": np.ones((2, N))}),
        (ValueError, ["`residual`", "real"], {"residual": 1j * RESIDUAL}),
        (ValueError, ["`residual`"], {"residual": {"a": RESIDUAL}}),
        (ValueError, ["`initial`"], {"initial": 0.0}),
        (ValueError, ["`operator`", "tag"], {"tags": lx.symmetric_tag}),
        (TypeError, ["`operator`", "complex"], {"matrix": np.eye(N) + 0j}),
        (TypeError, ["`solver`", "lineax.CG"], {"solver": "cg"}),
        (ValueError, ["`key`"], {"key": None}),
        (TypeError, ["`preconditioner`"], {"preconditioner": np.eye(N)}),
        (
            ValueError,
            ["`preconditioner`", "7 and 40"],
            {"preconditioner": Ones(7), "k": N},
        ),
    ],
)
def test_misuse(kind, parts, change):
    arguments = {"matrix": kernel(PARAMETERS), "residual": RESIDUAL} | change
    with pytest.raises(kind) as error:
        log_prob(**arguments)
    for part in parts:
        assert part in str(error.value)


@eqx.filter_jit
def nystrom(matrix, shift):
    operator = matrix_free(matrix, PSD)
    return tx.nystrom_preconditioner(operator, 10, key=jr.key(1), shift=shift)


@pytest.mark.slow
def test_history_is_that_of_the_density():
    budget = tx.Adaptive(atol=0.05, max_k=36, round_size=4, min_samples=4, history=True)
    settings = {"k": budget, "num_steps": 12, "key": KEY, "throw": False}
    operator = matrix_free(kernel(PARAMETERS), PSD)
    solution = tx.gaussian_log_prob(operator, RESIDUAL, **settings)
    of_determinant = solution.stats["logdet"].stats["history"]
    rows = solution.stats["history"]
    assert rows.shape == of_determinant.shape
    assert len(rows) > 1
    assert np.allclose(np.diff(rows[:, 1]), -np.diff(of_determinant[:, 1]) / 2)
    assert np.allclose(rows[-1, 1:], [solution.value, solution.std_err], rtol=1e-6)


def test_python_numbers_in_the_residual():
    structure = {
        "a": jax.ShapeDtypeStruct((), float),
        "b": jax.ShapeDtypeStruct((), float),
    }
    operator = lx.FunctionLinearOperator(lambda v: v, structure, PSD)
    solution = tx.gaussian_log_prob(operator, {"a": 1.0, "b": 2}, k=2)
    assert np.allclose(solution.value, -2.5 - np.log(2 * np.pi))


def check_parts(solution, matrix, residual):
    """The exact determinant and form in float32 each by itself, because the larger would
    hide the other. The logarithms of 40 eigenvalues are off by up to the unit of rounding
    times the condition, 2e2."""
    assert solution.result == tx.RESULTS.successful
    matrix, residual = matrix.astype(float), np.asarray(residual, float)
    form = residual @ np.linalg.solve(matrix, residual)
    assert np.allclose(solution.stats["quadratic_form"], form, rtol=1e-4, atol=0)
    found, (_, exact) = solution.stats["logdet"].value, np.linalg.slogdet(matrix)
    assert np.allclose(found, exact, rtol=0, atol=1e-3)
    value, *_ = exact_of(matrix, residual)
    assert np.allclose(solution.value, value, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("k", [N, tx.Adaptive(rtol=1e-9, max_k=2 * N)], ids=["n", "2 n"])
@pytest.mark.parametrize("scale", [1e-20, 1e6, 1e20])
def test_exact_determinant_with_a_preconditioner(k, scale):
    """The solve is scaled by an eigenvalue of the preconditioned operator, not of A."""
    matrix = (scale * kernel(PARAMETERS)).astype(np.float32)
    outer = nystrom(matrix, np.float32(0.1 * scale))
    residual = jnp.asarray(scale**0.5 * RESIDUAL, jnp.float32)
    solution = log_prob(matrix, residual, k=k, preconditioner=outer)
    check_parts(solution, matrix, residual)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "size"), [(1e30, 1e20), (1e-30, 1e-20)])
def test_large_and_small_residuals_in_float32(scale, size):
    matrix = (scale * kernel(PARAMETERS)).astype(np.float32)
    residual = (size * RESIDUAL).astype(np.float32)
    solution = log_prob(matrix, residual, k=N)
    check_parts(solution, matrix, residual)
    assert solution.stats["solve_residual"] < 1e-3
