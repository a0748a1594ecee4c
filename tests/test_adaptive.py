"""`k=tx.Adaptive(...)`: rounds until the error bar is small enough."""

import math
import os
import re
import subprocess
import sys

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._adaptive import student_quantile

from .helpers import matrix_free, spectrum_matrix, trace_many, z_score


PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag
KEY = jr.key(20261121)
N, SIZE, MAX = 40, 8, 32
HUTCHINSON, HUTCHPP = tx.HutchinsonEstimator(), tx.HutchPlusPlusEstimator()
XTRACE, XNYS, SLQ = tx.XTraceEstimator(), tx.XNysTraceEstimator(), tx.SLQEstimator()
NYSTROMPP = tx.NystromPlusPlusEstimator()
TRACES = [HUTCHINSON, HUTCHPP, NYSTROMPP, XTRACE, XNYS]
SEMIDEFINITE = (tx.XNysTraceEstimator, tx.NystromPlusPlusEstimator)
PLANNING = (tx.HutchPlusPlusEstimator, tx.NystromPlusPlusEstimator)
PREDICTABLE = [HUTCHINSON, XTRACE, XNYS, SLQ]
EVERY = pytest.mark.parametrize("estimator", TRACES, ids=lambda e: e.name)
ALL = pytest.mark.parametrize("estimator", [*TRACES, SLQ], ids=lambda e: name(e))
AS_FIXED = pytest.mark.parametrize("estimator", PREDICTABLE, ids=lambda e: name(e))
DECAY = spectrum_matrix(jr.key(0), jnp.arange(1, N + 1) ** -1.0, jnp.float64)
FLAT = spectrum_matrix(jr.key(1), jnp.linspace(1.0, 2.0, N), jnp.float64)
LOW = spectrum_matrix(jr.key(2), jnp.where(jnp.arange(N) < 3, 2.0, 0.0), jnp.float64)
STEPS = 6


def name(estimator):
    return type(estimator).__name__


def budget(**settings):
    return tx.Adaptive(**({"max_k": MAX, "round_size": SIZE} | settings))


def run(matrix, estimator, k, *, key=KEY, tags=PSD, **settings):
    """The trace, or for `SLQ` that of exp(-A)."""
    settings = {"k": k, "key": key, "throw": False} | settings
    operator = matrix
    if not isinstance(matrix, lx.AbstractLinearOperator):
        operator = lx.MatrixLinearOperator(matrix, tags)
    if isinstance(estimator, tx.SLQEstimator):
        function = tx.Exp(-1.0)
        return tx.trace_of_function(
            operator, function, estimator, num_steps=STEPS, **settings
        )
    return tx.trace(operator, estimator, **settings)


def as_fixed(solution, estimator):
    """The fixed budget of as many probes."""
    made = int(solution.stats["num_matvecs"])
    return made // STEPS if isinstance(estimator, tx.SLQEstimator) else made


def eps(x):
    return float(jnp.finfo(x.dtype).eps)


def succeeded(solution):
    return bool(solution.result == tx.RESULTS.successful)


def ended_by_budget(solution):
    return bool(solution.result == tx.RESULTS.max_matvecs_reached)


def quantile(count, confidence=0.95):
    count = jnp.asarray(count, float)
    return float(student_quantile(confidence, count - 1))


# --- the same as a fixed budget ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rank", [N, 3])
def test_nystrompp_by_its_definition(dtype, rank):
    """tr(A_hat) + w* (A - A_hat) w, A_hat from the probes of the deflating rounds."""
    phases = jnp.exp(1j * jnp.arange(N)) if dtype == jnp.complex128 else jnp.ones(N)
    matrix = phases[:, None] * (DECAY if rank == N else LOW) * phases.conj()
    sampler = tx.NormalSampler()
    solution = run(
        matrix.astype(dtype),
        tx.NystromPlusPlusEstimator(sampler),
        budget(rtol=1e-2, max_k=N - SIZE),
    )
    samples = solution.stats["samples"]
    deflated = int(jnp.argmax(jnp.isfinite(samples)))
    assert 0 < deflated < N // 2
    made = int(solution.stats["num_matvecs"])
    probes = jax.vmap(lambda i: sampler.sample(jr.fold_in(KEY, i), N, dtype))
    probes = probes(jnp.arange(made)).T.astype(jnp.complex128)
    basis, rest = probes[:, :deflated], probes[:, deflated:]
    core = jnp.linalg.pinv(basis.conj().T @ matrix @ basis, rtol=1e-10, hermitian=True)
    approximation = matrix @ basis @ core @ basis.conj().T @ matrix
    forms = jnp.sum(rest.conj() * ((matrix - approximation) @ rest), axis=0)
    expected = jnp.trace(approximation) + forms
    tolerance = 300 * eps(solution.value) * jnp.trace(matrix).real
    assert jnp.max(jnp.abs(samples[deflated:made] - expected)) <= tolerance
    assert jnp.abs(solution.value - jnp.mean(expected)) <= tolerance


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128], ids=lambda d: d.__name__)
@AS_FIXED
def test_same_as_fixed_budget(estimator, dtype):
    """Value, standard error and samples, for spectra of every kind and rank."""
    everything = budget(atol=1e-38, min_samples=1000)
    for matrix in (DECAY, FLAT, LOW, -FLAT + 3 * DECAY):
        tags = PSD if isinstance(estimator, tx.XNysTraceEstimator) else lx.symmetric_tag
        tags = tx.hermitian_tag if dtype == jnp.complex128 and tags != PSD else tags
        if tags == PSD and matrix is not DECAY and matrix is not FLAT:
            matrix = LOW
        phases = jnp.exp(1j * jnp.arange(N)) if dtype == jnp.complex128 else jnp.ones(N)
        matrix = (phases[:, None] * matrix * phases.conj()).astype(dtype)
        grown = run(matrix, estimator, everything, tags=tags)
        fixed = run(matrix, estimator, as_fixed(grown, estimator), tags=tags)
        assert grown.value.dtype == fixed.value.dtype
        assert grown.std_err.dtype == fixed.std_err.dtype
        assert grown.stats["num_matvecs"] == fixed.stats["num_matvecs"]
        assert grown.stats["num_matvecs"] == MAX * (STEPS if estimator is SLQ else 1)
        tolerance = 300 * eps(matrix) * jnp.linalg.norm(matrix, "nuc")
        assert jnp.abs(grown.value - fixed.value) <= tolerance
        assert jnp.abs(grown.std_err - fixed.std_err) <= tolerance
        samples = grown.stats["samples"]
        assert samples.dtype == fixed.stats["samples"].dtype
        assert jnp.max(jnp.abs(samples - fixed.stats["samples"])) <= 10 * tolerance
        for entry in ("jackknife_std_err", "independent_std_err", "ritz_values"):
            if entry in fixed.stats:
                difference = jnp.abs(grown.stats[entry] - fixed.stats[entry])
                assert jnp.max(difference) <= 10 * tolerance


@AS_FIXED
def test_same_as_fixed_budget_stopped_early(estimator):
    """At every number of rounds, one compiled program: samples beyond are NaN."""
    seen = set()
    for rtol in (0.3, 0.1, 0.06, 0.02, 0.003):
        if len(seen) == 2:
            break
        grown = run(DECAY, estimator, budget(rtol=rtol))
        k = as_fixed(grown, estimator)
        if k in seen:
            continue
        seen.add(k)
        fixed = run(DECAY, estimator, k)
        samples, others = grown.stats["samples"], fixed.stats["samples"]
        assert jnp.allclose(grown.value, fixed.value, rtol=1e-11)
        assert jnp.allclose(grown.std_err, fixed.std_err, rtol=1e-9)
        assert jnp.allclose(samples[: len(others)], others, rtol=1e-10)
        assert jnp.all(jnp.isnan(samples[len(others) :]))
        assert len(samples) == MAX // (2 if estimator is XTRACE else 1)
        if estimator is SLQ:
            assert jnp.allclose(grown.stats["ritz_values"], fixed.stats["ritz_values"])
            residuals = grown.stats["gradient_residual"]
            assert jnp.allclose(residuals[:k], fixed.stats["gradient_residual"])
    assert len(seen) == 2


def test_pytree_operator():
    def mv(tree):
        flat = DECAY @ jnp.concatenate([tree["a"].reshape(-1), tree["b"]])
        return {"a": flat[:30].reshape(5, 6), "b": flat[30:]}

    struct = {
        "a": jax.ShapeDtypeStruct((5, 6), jnp.float64),
        "b": jax.ShapeDtypeStruct((10,), jnp.float64),
    }
    operator = lx.FunctionLinearOperator(mv, struct, PSD)
    for estimator in (HUTCHINSON, XTRACE):
        tree = run(operator, estimator, budget(rtol=0.05))
        flat = run(DECAY, estimator, budget(rtol=0.05))
        assert jnp.allclose(tree.value, flat.value, rtol=1e-11)
        assert tree.stats["num_matvecs"] == flat.stats["num_matvecs"]


def test_logdet_by_golub_kahan():
    """For an operator that is not known to be definite."""
    operator = lx.MatrixLinearOperator(FLAT + 0.1 * jr.normal(jr.key(4), (N, N)))
    settings = {"num_steps": STEPS, "key": KEY, "throw": False}
    grown = tx.logdet(operator, k=budget(rtol=0.02), **settings)
    probes = int(grown.stats["num_matvecs"]) // (2 * STEPS)
    fixed = tx.logdet(operator, k=probes, **settings)
    assert jnp.allclose(grown.value, fixed.value, rtol=1e-12)
    assert jnp.allclose(grown.std_err, fixed.std_err, rtol=1e-9)
    assert jnp.allclose(grown.stats["bracket"], fixed.stats["bracket"])


# --- when it stops ---


def test_student_quantile():
    """Two-sided 95% points from tables."""
    table = {3: 3.182446, 4: 2.776445, 9: 2.262157, 15: 2.131450, 30: 2.042272}
    for freedom, expected in table.items():
        assert quantile(freedom + 1) == pytest.approx(expected, rel=2e-3)
    assert quantile(1e9) == pytest.approx(1.959964, rel=1e-5)
    for confidence, expected in ((0.9, 1.833113), (0.99, 3.249836), (0.5, 0.702722)):
        assert quantile(10, confidence) == pytest.approx(expected, rel=1e-2)


@ALL
def test_stops_at_the_first_round_that_is_good_enough(estimator):
    """The history, against the rule: quantile times standard error within tolerance."""
    per_round = SIZE // 2 if estimator is XTRACE else SIZE
    for rtol in (0.3, 0.06, 0.005):
        solution = run(DECAY, estimator, budget(rtol=rtol, history=True))
        history = solution.stats["history"]
        assert history.shape == (MAX // SIZE, 3)
        made = int(jnp.sum(~jnp.isnan(history[:, 0])))
        assert jnp.all(jnp.isnan(history[made:]))
        assert history[:made, 0].tolist() == [SIZE * (i + 1) for i in range(made)]
        assert as_fixed(solution, estimator) == SIZE * made
        assert jnp.allclose(history[made - 1, 1], solution.value, rtol=1e-12)
        assert jnp.allclose(history[made - 1, 2], solution.std_err, rtol=1e-9)
        if isinstance(estimator, PLANNING):
            continue  # the number of its samples is its own affair
        good = []
        for i in range(made):
            count = per_round * (i + 1)
            _, value, std_err = history[i].tolist()
            enough = quantile(count) * std_err <= rtol * abs(value)
            good.append(count >= 10 and enough)
        assert not any(good[:-1])
        assert good[-1] == succeeded(solution)
        assert succeeded(solution) or made == MAX // SIZE


def test_absolute_tolerance_and_confidence():
    solution = run(FLAT, HUTCHINSON, budget(atol=2.0))
    assert succeeded(solution)
    count = int(solution.stats["num_matvecs"])
    assert quantile(count) * solution.std_err <= 2
    either = run(FLAT, HUTCHINSON, budget(atol=2.0, rtol=1e-9))
    assert either.value == solution.value
    sure = run(FLAT, HUTCHINSON, budget(atol=2.0, confidence=0.9999))
    assert sure.stats["num_matvecs"] > count


def test_least_number_of_samples():
    """Tested before, the identity would end after one round."""
    solution = run(jnp.eye(N), HUTCHINSON, budget(rtol=0.1, min_samples=17))
    assert solution.stats["num_matvecs"] == 24
    assert succeeded(solution)
    never = run(jnp.eye(N), HUTCHINSON, budget(rtol=0.1, min_samples=33))
    assert never.stats["num_matvecs"] == MAX
    assert ended_by_budget(never)


@ALL
def test_budget_ends_first(estimator):
    solution = run(DECAY, estimator, budget(rtol=1e-6))
    assert ended_by_budget(solution)
    assert as_fixed(solution, estimator) == MAX
    assert jnp.isfinite(solution.std_err)
    with pytest.raises(RuntimeError, match="The budget ended") as caught:
        run(DECAY, estimator, budget(rtol=1e-6), throw=True)
    message = str(caught.value)
    found = re.search(
        r"Reached (\S+) with a standard error of (\S+) after (\d+) products", message
    )
    assert float(found[1]) == pytest.approx(float(solution.value))
    assert float(found[2]) == pytest.approx(float(solution.std_err))
    assert int(found[3]) == solution.stats["num_matvecs"]
    assert "max_k" in message
    assert "state" in message


def test_budget_ends_first_under_jit():
    @jax.jit
    def value(matrix):
        return run(matrix, HUTCHINSON, budget(rtol=1e-6), throw=True).value

    with pytest.raises(RuntimeError, match="The budget ended"):
        jax.block_until_ready(value(DECAY))


# --- one program ---


def test_compiled_once_for_all_data():
    """Tolerances, keys and operators are data; a loop, and no copy of its body for each
    round."""
    traced = []

    @jax.jit
    def both(matrix, rtol, key):
        traced.append(1)
        found = [run(matrix, e, budget(rtol=rtol), key=key) for e in (XTRACE, HUTCHINSON)]
        return [(x.value, x.std_err, x.stats["num_matvecs"]) for x in found]

    counts = set()
    for i, matrix in enumerate((DECAY, FLAT, LOW, 0 * FLAT)):
        for rtol in (0.3, 0.05, 0.001):
            for _, _, made in both(matrix, rtol, jr.key(i)):
                counts.add(int(made))
    assert len(traced) == 1
    assert counts == {SIZE * (i + 1) for i in range(1, MAX // SIZE)} | counts
    assert len(counts) >= 3

    def length(max_k):
        k = budget(rtol=0.1, max_k=max_k)
        jaxpr = jax.make_jaxpr(lambda m: run(m, XTRACE, k).value)(DECAY)
        assert "while[" in str(jaxpr)
        return str(jaxpr).count("dot_general")

    assert length(16) == length(32)


def test_tolerances_under_vmap():
    """Each of a batch stops by itself, and its answer is the one that it has alone."""
    for estimator in (HUTCHPP, XTRACE):

        def one(rtol, estimator=estimator):
            solution = run(DECAY, estimator, budget(rtol=rtol))
            return solution.value, solution.std_err, solution.stats

        rtols = jnp.asarray([0.3, 0.1, 0.05, 0.001])
        values, errors, stats = jax.vmap(one)(rtols)
        for i, rtol in enumerate(rtols):
            value, std_err, others = one(rtol)
            assert jnp.allclose(values[i], value, rtol=1e-11)
            assert jnp.allclose(errors[i], std_err, rtol=1e-8)
            assert stats["num_matvecs"][i] == others["num_matvecs"]
            samples = stats["samples"][i]
            assert jnp.allclose(samples, others["samples"], rtol=1e-9, equal_nan=True)
        assert len(set(stats["num_matvecs"].tolist())) > 1


def test_budget_is_a_pytree():
    """`Adaptive` may be an argument of a compiled function."""

    @jax.jit
    def made(k):
        return run(DECAY, HUTCHINSON, k).stats["num_matvecs"]

    assert made(budget(rtol=0.5)) < made(budget(rtol=0.01)) == MAX


# --- resuming ---


@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=name)
def test_resume_with_more_budget(estimator):
    """Stopped by its budget, or by a tolerance, and gone on with a larger `max_k`."""
    whole = run(DECAY, estimator, budget(rtol=1e-6))
    first = run(DECAY, estimator, budget(rtol=1e-6, max_k=16))
    assert as_fixed(first, estimator) == 16
    loose = run(DECAY, estimator, budget(rtol=0.5))
    assert as_fixed(loose, estimator) < MAX
    for earlier in (first, loose) if estimator is XTRACE else (first,):
        solution = run(DECAY, estimator, budget(rtol=1e-6, state=earlier.state))
        assert solution.value == whole.value
        assert solution.std_err == whole.std_err
        assert jnp.array_equal(solution.stats["samples"], whole.stats["samples"])
        assert solution.stats["num_matvecs"] == whole.stats["num_matvecs"]


@pytest.mark.parametrize("estimator", [HUTCHPP, NYSTROMPP], ids=name)
def test_resume_of_what_plans(estimator):
    """It plans for the tolerance: what was deflated for a looser one is kept."""
    settings = {"max_k": N - SIZE, "min_samples": 4}
    first = run(DECAY, estimator, budget(rtol=0.2, **settings))
    assert succeeded(first)
    solution = run(DECAY, estimator, budget(rtol=1e-9, state=first.state, **settings))
    assert solution.stats["num_matvecs"] == N - SIZE
    exact = run(DECAY, estimator, N).value
    assert jnp.abs(solution.value - exact) < 5 * solution.std_err


def test_resume_where_nothing_is_left_to_do():
    """A state that is good enough costs no product."""
    first = run(DECAY, XTRACE, budget(rtol=0.1))
    assert succeeded(first)
    again = run(DECAY, XTRACE, budget(rtol=0.1, state=first.state))
    assert again.value == first.value
    assert again.stats["num_matvecs"] == first.stats["num_matvecs"]
    assert succeeded(again)


def test_state_of_a_longer_run():
    whole = run(DECAY, XTRACE, budget(rtol=0.1))
    with pytest.raises(ValueError, match="at least the `max_k` of the earlier"):
        run(DECAY, XTRACE, budget(rtol=0.1, max_k=16, state=whole.state))


def test_state_of_another_call():
    """Another size of rounds, another estimator, and no state at all."""
    state = run(DECAY, XTRACE, budget(rtol=0.1)).state
    with pytest.raises(ValueError, match="Found `round_size` 8 and 4"):
        run(DECAY, XTRACE, budget(rtol=0.1, round_size=4, state=state))
    with pytest.raises(ValueError, match="another estimator"):
        run(DECAY, XNYS, budget(rtol=0.1, state=state))
    with pytest.raises(TypeError, match="`state` must be"):
        run(DECAY, XTRACE, budget(rtol=0.1, state=jnp.zeros(3)))


def test_fixed_budget_has_no_state():
    assert run(DECAY, XTRACE, 16).state is None


# Another process, which knows of the first run only the file.
PROGRAM = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, jax.random as jr, lineax as lx, numpy as np
import traceax as tx

jax.config.update("jax_enable_x64", True)
folder = sys.argv[1]
matrix = jnp.asarray(np.load(f"{folder}/matrix.npy"))
operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)

def run(name, k):
    settings = {"k": k, "key": jr.key(20261121), "throw": False}
    estimator = getattr(tx, name)()
    if name == "SLQEstimator":
        exp = tx.Exp(-1.0)
        return tx.trace_of_function(operator, exp, estimator, num_steps=6, **settings)
    return tx.trace(operator, estimator, **settings)

for name in sys.argv[2:]:
    short = tx.Adaptive(rtol=1e-6, max_k=16, round_size=8)
    like = eqx.filter_eval_shape(lambda: run(name, short).state)
    state = eqx.tree_deserialise_leaves(f"{folder}/{name}.eqx", like)
    long = tx.Adaptive(rtol=1e-6, max_k=32, round_size=8, state=state)
    solution = run(name, long)
    made = int(solution.stats["num_matvecs"])
    print(name, float(solution.value).hex(), float(solution.std_err).hex(), made)
"""


def test_resume_in_another_process(tmp_path):
    np.save(tmp_path / "matrix.npy", DECAY)
    expected = {}
    for estimator in PREDICTABLE:
        first = run(DECAY, estimator, budget(rtol=1e-6, max_k=16))
        eqx.tree_serialise_leaves(tmp_path / f"{name(estimator)}.eqx", first.state)
        expected[name(estimator)] = run(DECAY, estimator, budget(rtol=1e-6))
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *expected],
        env=os.environ,
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert [line[0] for line in lines] == list(expected)
    for estimator, value, std_err, made in lines:
        whole = expected[estimator]
        assert float.fromhex(value) == pytest.approx(float(whole.value), rel=1e-12)
        assert float.fromhex(std_err) == pytest.approx(float(whole.std_err), rel=1e-9)
        assert int(made) == whole.stats["num_matvecs"]


# --- progress and history ---


def shown(capsys):
    jax.effects_barrier()
    lines = capsys.readouterr().out.split()
    assert all(line.endswith("%") for line in lines)
    return [float(line[:-1]) for line in lines]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=lambda d: d.__name__)
def test_progress_meter(capsys, dtype):
    meter = eqxi.TextProgressMeter()

    @jax.jit
    def run_with_meter(matrix, rtol):
        k = budget(rtol=rtol, progress=meter)
        return run(matrix, HUTCHINSON, k).stats["num_matvecs"]

    made = run_with_meter(DECAY.astype(dtype), jnp.asarray(1e-6))
    assert made == MAX
    assert shown(capsys) == [0, 25, 50, 75, 100]
    # A run that is over before its budget is counts what it is the way to.
    made = run_with_meter(FLAT.astype(dtype), jnp.asarray(0.05))
    assert made < MAX
    seen = shown(capsys)
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 100


def test_progress_is_not_complete_before_the_end(capsys):
    """Not even where the error bar is small before there are enough samples."""
    k = budget(rtol=0.5, min_samples=32, progress=eqxi.TextProgressMeter())
    assert run(jnp.eye(N), HUTCHINSON, k).stats["num_matvecs"] == MAX
    assert shown(capsys).count(100) == 1


def test_progress_meter_of_a_batch(capsys):
    def one(key):
        k = budget(rtol=1e-6, progress=eqxi.TextProgressMeter())
        return run(DECAY, XTRACE, k, key=key).value

    assert jnp.all(jnp.isfinite(jax.jit(jax.vmap(one))(jr.split(KEY, 2))))
    assert shown(capsys) == [0, 25, 50, 75, 100]


@ALL
def test_callback(estimator):
    """Once a round, with what history has; of a negative semidefinite operator too."""
    seen = []
    k = budget(rtol=1e-6, history=True, callback=lambda *x: seen.append(x))
    matrix, tags = (-DECAY, NSD) if isinstance(estimator, SEMIDEFINITE) else (DECAY, PSD)
    solution = jax.jit(lambda x: run(x, estimator, k, tags=tags))(matrix)
    jax.effects_barrier()
    history = solution.stats["history"]
    assert len(history) == len(seen) == MAX // SIZE
    assert np.allclose(np.array(seen, float), history, rtol=1e-12, equal_nan=True)


def test_callback_and_gradient():
    seen = []
    k = budget(rtol=1e-6, callback=lambda *x: seen.append(x))
    plain = slope(of_trace(XTRACE, budget(rtol=1e-6)))[0]
    assert slope(of_trace(XTRACE, k))[0] == plain
    jax.effects_barrier()
    assert len(seen) == MAX // SIZE


def test_no_history_unless_asked():
    assert "history" not in run(DECAY, HUTCHINSON, budget(rtol=0.1)).stats


def test_history_has_the_value_that_is_returned():
    """Of a negative semidefinite operator; with a preconditioner."""
    k = budget(rtol=0.05, history=True)
    negative = run(-DECAY, XNYS, k, tags=NSD)
    last = int(jnp.sum(~jnp.isnan(negative.stats["history"][:, 0]))) - 1
    assert jnp.allclose(negative.stats["history"][last, 1], negative.value)

    operator, preconditioner = preconditioned()
    k = budget(rtol=1e-6, history=True)
    settings = {"num_steps": STEPS, "key": KEY, "throw": False}
    found = tx.logdet(operator, k=k, preconditioner=preconditioner, **settings)
    assert jnp.allclose(found.stats["history"][-1, 1], found.value)


# --- derivatives ---


SLOPE = spectrum_matrix(jr.key(5), jnp.linspace(0.5, 2.0, N), jnp.float64)


def family(t):
    return DECAY + jnp.sin(t) * SLOPE + t**2 * FLAT


def of_trace(estimator, k, phase=None):
    """The estimate as a function of a parameter, real also for a complex operator."""

    def value(t):
        matrix = family(t)
        if phase is not None:
            turn = jnp.exp(1j * phase * jnp.arange(N))
            matrix = turn[:, None] * matrix * turn.conj()
        solution = run(matrix_free(matrix, PSD), estimator, k)
        return solution.value.real, solution.stats["num_matvecs"]

    return value


def slope(value, t=0.3):
    return jax.jit(jax.grad(value, has_aux=True))(t)


@EVERY
def test_gradient(estimator):
    """As with a fixed budget. The estimate is linear in the operator but for coefficients
    that are constant to derivatives, so a slope is that of an unbiased estimate."""
    found, made = slope(of_trace(estimator, budget(rtol=0.08)))
    exact = jnp.cos(0.3) * jnp.trace(SLOPE) + 0.6 * jnp.trace(FLAT)
    assert jnp.allclose(found, exact, rtol=0.3)
    if not isinstance(estimator, PLANNING):
        assert SIZE < made < MAX
        expected, _ = slope(of_trace(estimator, int(made)))
        assert jnp.allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("estimator", [HUTCHINSON, XTRACE], ids=name)
def test_second_derivative_and_batches(estimator):
    """In a batch, by reverse over reverse mode, and by forward mode."""
    ts = jnp.asarray([0.3, 0.31])

    def derivatives(value):
        def only(t):
            return value(t)[0]

        def all_of(t):
            forward = jax.jvp(only, (t,), (1.0,))[1]
            first, made = jax.grad(value, has_aux=True)(t)
            return (first, jax.grad(jax.grad(only))(t), forward), made

        return jax.jit(jax.vmap(all_of))(ts)

    adaptive = of_trace(estimator, budget(rtol=0.08))
    found, made = derivatives(adaptive)
    assert made[0] == made[1] < MAX
    expected, _ = derivatives(of_trace(estimator, int(made[0])))
    for one, other in zip(found, expected, strict=True):
        assert jnp.allclose(one, other, rtol=1e-10)
    assert jnp.allclose(found[0], found[2], rtol=1e-10)


def test_gradient_of_a_complex_operator():
    found, made = slope(of_trace(XTRACE, budget(rtol=0.08), phase=1.0))
    expected, _ = slope(of_trace(XTRACE, int(made), phase=1.0))
    assert jnp.allclose(found, expected, rtol=1e-10)


def test_gradient_in_the_matrix():
    """All entries at once, of a matrix that is an argument."""

    def value(matrix, k):
        return run(matrix_free(matrix, PSD), XTRACE, k).value

    grad = jax.grad(value)
    made = int(run(DECAY, XTRACE, budget(rtol=0.05)).stats["num_matvecs"])
    found, expected = grad(DECAY, budget(rtol=0.05)), grad(DECAY, made)
    assert jnp.allclose(found, expected, rtol=0, atol=1e-10)


def test_gradient_of_logdet_and_of_the_function():
    def logdet(t, k):
        operator = lx.MatrixLinearOperator(family(t), PSD)
        solution = tx.logdet(operator, k=k, num_steps=STEPS, key=KEY, throw=False)
        return solution.value, solution.std_err, solution.stats["num_matvecs"]

    def function(t, k):
        settings = {"k": k, "num_steps": STEPS, "key": KEY, "throw": False}
        operator = lx.MatrixLinearOperator(FLAT, PSD)
        solution = tx.trace_of_function(operator, tx.Exp(-t), **settings)
        return solution.value, solution.std_err, solution.stats["num_matvecs"]

    for call in (logdet, function):

        def at_16(t, call=call):
            found, std_err, _ = call(t, 16)
            return found, std_err

        expected, std_err = slope(at_16, 0.5)
        k = budget(atol=1.001 * quantile(16) * std_err)

        def value(t, call=call, k=k):
            found, _, made = call(t, k)
            return found, made

        found, made = slope(value, 0.5)
        assert made == 16 * STEPS
        assert jnp.allclose(found, expected, rtol=1e-10)


def counting(calls):
    """A family of operators that count their products, without an effect that would keep
    unused ones alive."""

    def note(x):
        calls.append(1)
        return np.zeros_like(x)

    def operator(t):
        def mv(v):
            first = jax.lax.stop_gradient(v[:1])
            seen = jax.pure_callback(note, first, first, vmap_method="sequential")
            return (jnp.arange(1.0, N + 1) ** -1.0 + t) * v + seen

        return lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), float), PSD)

    def count(estimator, k, gradient):
        def value(t):
            solution = run(operator(t), estimator, k)
            return solution.value, solution.stats["num_matvecs"]

        calls.clear()
        call = jax.grad(value, has_aux=True) if gradient else value
        _, made = jax.block_until_ready(call(0.1))
        return len(calls), int(made)

    return count


@ALL
def test_products_are_counted(estimator):
    """Those that are reported, and no more."""
    count = counting([])
    k = budget(rtol=0.25, min_samples=4)
    seen, made = count(estimator, k, False)
    assert made < (MAX * STEPS if estimator is SLQ else MAX)
    assert seen == made


@AS_FIXED
def test_products_of_a_gradient(estimator):
    """Each product once more, or for a frame twice, and no rounds that were not made."""
    seen, made = counting([])(estimator, budget(rtol=0.25, min_samples=4), True)
    assert made < (MAX * STEPS if estimator is SLQ else MAX)
    assert seen <= 3 * made


# --- budgets and operators at the edge ---


@ALL
def test_budget_below_a_round(estimator):
    """One round, as small as the budget."""
    k = tx.Adaptive(rtol=0.5, max_k=6, min_samples=4)
    assert k.round_size == 6
    solution = run(DECAY, estimator, k)
    assert as_fixed(solution, estimator) == 6
    assert not succeeded(solution) or solution.std_err * 2 < 0.5 * solution.value
    assert jnp.abs(solution.value - run(DECAY, estimator, N).value) < 4
    assert solution.value > 0.5


def test_budget_is_rounded_down_to_whole_rounds():
    solution = run(DECAY, HUTCHINSON, budget(rtol=1e-9, max_k=30))
    assert solution.stats["num_matvecs"] == 24
    odd = run(DECAY, XTRACE, budget(rtol=1e-9, max_k=30, round_size=7))
    assert odd.stats["num_matvecs"] == 24  # two by two, three pairs in a round
    fixed = run(DECAY, XTRACE, 24)
    assert jnp.allclose(odd.value, fixed.value, rtol=1e-11)


@EVERY
def test_budget_beyond_the_size(estimator):
    """At most n products, and fewer where that is enough."""
    solution = run(DECAY, estimator, budget(rtol=1e-9, max_k=10 * N))
    assert solution.stats["num_matvecs"] == N
    early = run(DECAY, estimator, budget(rtol=0.3, max_k=10 * N))
    assert early.stats["num_matvecs"] < N
    assert succeeded(early)


@pytest.mark.parametrize("size", [1, 7])
def test_no_larger_than_a_round_is_exact(size):
    matrix = DECAY[:size, :size]
    for estimator in (HUTCHINSON, XNYS, tx.AutoTraceEstimator()):
        k = tx.Adaptive(rtol=1e-9, max_k=32)
        solution = tx.trace(matrix_free(matrix, PSD), estimator, k=k, throw=True)
        assert jnp.allclose(solution.value, jnp.trace(matrix), rtol=1e-12)
        assert solution.std_err == 0
        assert solution.stats["num_matvecs"] == size
        assert succeeded(solution)
    solution = run(matrix, SLQ, tx.Adaptive(rtol=1e-9, max_k=32))
    exact = jnp.sum(jnp.exp(-jnp.linalg.eigvalsh(matrix)))
    assert jnp.allclose(solution.value, exact, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex128], ids=lambda d: d.__name__)
@EVERY
def test_zero_low_rank_and_scaled_operators(estimator, dtype):
    """The zero operator; one of low rank, whose trace is then known to rounding; and
    scales near the ends of float32: powers of two, so that nothing is rounded."""
    decay, low = DECAY.astype(dtype), LOW.astype(dtype)
    zero = run(0 * decay, estimator, budget(rtol=0.05))
    assert zero.value == 0
    assert zero.std_err == 0
    assert succeeded(zero)
    assert jnp.all(jnp.isfinite(zero.value))

    tolerance = {HUTCHINSON: 0.2, HUTCHPP: 1e-3}.get(estimator, 1e-4)
    solution = run(low, estimator, budget(rtol=tolerance))
    if estimator is not HUTCHINSON:
        assert succeeded(solution)
        assert jnp.abs(solution.value - 6) <= 1000 * eps(low)

    one = run(decay, estimator, budget(rtol=0.06))
    for exponent in (-100, 100):
        scale = jnp.asarray(2.0**exponent, dtype)
        other = run(scale * decay, estimator, budget(rtol=0.06))
        assert other.stats["num_matvecs"] == one.stats["num_matvecs"]
        assert jnp.allclose(other.value / scale, one.value, rtol=1e-5)
        assert jnp.allclose(other.std_err / scale.real, one.std_err, rtol=1e-4)
        assert succeeded(other) == succeeded(one)


@ALL
def test_nonfinite_operator(estimator):
    """Seen after a round, or after two where the first makes no sample."""
    bad = DECAY.at[0, 0].set(jnp.nan)
    solution = run(bad, estimator, budget(rtol=0.05))
    assert solution.result == tx.RESULTS.nonfinite_product
    assert (
        as_fixed(solution, estimator)
        <= (2 if isinstance(estimator, PLANNING) else 1) * SIZE
    )
    with pytest.raises(RuntimeError, match="not finite"):
        run(bad, estimator, budget(rtol=0.05), throw=True)


def test_wrong_tag():
    indefinite = spectrum_matrix(jr.key(6), jnp.linspace(-1.0, 1.0, N), jnp.float64)
    solution = run(indefinite, XNYS, budget(rtol=0.05))
    assert solution.result == tx.RESULTS.not_semidefinite
    with pytest.raises(ValueError, match="tagged as positive or negative"):
        run(DECAY, XNYS, budget(rtol=0.05), tags=())
    singular = lx.MatrixLinearOperator(indefinite, PSD)
    settings = {"num_steps": STEPS, "key": KEY, "throw": False}
    solution = tx.logdet(singular, k=budget(rtol=0.05), **settings)
    assert solution.result == tx.RESULTS.not_positive_definite


@EVERY
def test_negative_semidefinite(estimator):
    positive = run(DECAY, estimator, budget(rtol=0.06))
    negative = run(-DECAY, estimator, budget(rtol=0.06), tags=NSD)
    assert jnp.allclose(negative.value, -positive.value, rtol=1e-11)
    assert jnp.allclose(negative.std_err, positive.std_err, rtol=1e-8)
    samples = negative.stats["samples"], -positive.stats["samples"]
    assert jnp.allclose(*samples, rtol=1e-9, equal_nan=True)
    assert negative.stats["num_matvecs"] == positive.stats["num_matvecs"]


# --- log-determinants with a preconditioner ---


def preconditioned(shift=0.05):
    matrix = DECAY**1 @ DECAY + shift * jnp.eye(N)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    make = tx.nystrom_preconditioner
    return operator, make(operator, rank=8, key=jr.key(7), shift=shift)


def test_tolerance_of_a_preconditioned_logdet():
    """Relative to the whole, of which the preconditioner knows most: the part that is
    estimated need not be known as well."""
    operator, preconditioner = preconditioned()
    settings = {"num_steps": STEPS, "key": KEY, "throw": False}
    settings["preconditioner"] = preconditioner
    solution = tx.logdet(operator, k=budget(rtol=0.02), **settings)
    probes = (int(solution.stats["num_matvecs"]) - 8) // STEPS
    assert succeeded(solution)
    assert probes < MAX
    half_width = quantile(probes) * solution.std_err
    assert half_width <= 0.02 * jnp.abs(solution.value)
    estimated = jnp.abs(solution.value - preconditioner.logdet)
    assert half_width > 0.02 * estimated
    fixed = tx.logdet(operator, k=probes, **settings)
    assert jnp.allclose(solution.value, fixed.value, rtol=1e-12)
    assert jnp.allclose(solution.std_err, fixed.std_err, rtol=1e-9)
    assert jnp.allclose(solution.stats["bracket"], fixed.stats["bracket"])
    made = solution.stats["samples"][:probes]
    assert jnp.allclose(made, fixed.stats["samples"])
    assert solution.stats["num_matvecs"] == fixed.stats["num_matvecs"]


def test_gradient_of_a_preconditioned_logdet():
    """That of the fixed budget, control variate and all."""

    def value(shift, k):
        operator, preconditioner = preconditioned(shift)
        settings = {"num_steps": STEPS, "key": KEY, "throw": False}
        found = tx.logdet(operator, k=k, preconditioner=preconditioner, **settings)
        return found.value, found.stats["num_matvecs"]

    found, made = jax.grad(value, has_aux=True)(0.05, budget(rtol=0.02))
    probes = (int(made) - 8) // STEPS
    expected, _ = jax.grad(value, has_aux=True)(0.05, probes)
    exact = jnp.trace(jnp.linalg.inv(preconditioned()[0].matrix))
    assert jnp.allclose(found, exact, rtol=0.1)
    assert jnp.allclose(found, expected, rtol=1e-9)


# --- estimators ---


def test_auto_estimator():
    """By the tag and the largest budget; exactly where the diagonal is stored."""
    auto = tx.AutoTraceEstimator()
    for tags, estimator in ((PSD, XNYS), (lx.symmetric_tag, XTRACE)):
        operator = matrix_free(DECAY, tags)
        found = run(operator, auto, budget(rtol=0.05))
        expected = run(DECAY, estimator, budget(rtol=0.05))
        assert jnp.allclose(found.value, expected.value, rtol=1e-11)
        assert found.stats["num_matvecs"] == expected.stats["num_matvecs"]
    stored = run(DECAY, auto, budget(rtol=0.05))
    assert stored.stats["num_matvecs"] == 0
    assert jnp.allclose(stored.value, jnp.trace(DECAY))
    assert succeeded(stored)


def test_auto_estimator_stops_early_with_a_large_budget():
    """A budget of n or more is not spent where less is enough."""
    operator = matrix_free(DECAY, PSD)
    solution = run(operator, tx.AutoTraceEstimator(), budget(rtol=0.2, max_k=10 * N))
    assert solution.stats["num_matvecs"] < N


class OneBlock(tx.AbstractSketchEstimator):
    """Hutch++ as somebody else might write it, without rounds."""

    sampler: tx.AbstractSampler = tx.RademacherSampler()
    min_matvecs = 3
    semidefinite = False

    def num_probes(self, k):
        return HUTCHPP.num_probes(k)

    def sketch(self, matmat, probes, k, eps):
        return HUTCHPP.sketch(matmat, probes, k, eps)


@pytest.mark.parametrize(
    "call",
    [
        lambda k: run(DECAY, OneBlock(), k),
        lambda k: tx.logdet(
            lx.MatrixLinearOperator(FLAT, PSD),
            tx.KrylovAwareEstimator(),
            k=k,
            num_steps=STEPS,
            key=KEY,
        ),
    ],
    ids=["OneBlock", "KrylovAware"],
)
def test_estimators_without_rounds(call):
    with pytest.raises(ValueError, match="needs a fixed budget") as caught:
        call(budget(rtol=0.1))
    message = str(caught.value)
    assert "Adaptive" in message
    assert "Pass an integer, or use `traceax." in message


# --- arguments ---


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rtol": -0.1}, "`rtol` must not be negative"),
        ({"rtol": math.nan}, "`rtol` must not be negative"),
        ({"atol": -1}, "`atol` must not be negative"),
        ({}, "needs a tolerance"),
        ({"rtol": 0.1, "max_k": 0}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "max_k": 3.0}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "max_k": True}, "`max_k` must be a Python integer"),
        ({"rtol": 0.1, "round_size": 1}, "`round_size` must be a Python integer, 2"),
        ({"rtol": 0.1, "round_size": 2.5}, "`round_size` must be a Python integer"),
        ({"rtol": 0.1, "min_samples": 3}, "`min_samples` must be a Python integer, 4"),
        ({"rtol": 0.1, "min_samples": None}, "`min_samples` must be a Python integer"),
        ({"rtol": 0.1, "confidence": 0.0}, "`confidence` must be between 0 and 1"),
        ({"rtol": 0.1, "confidence": 1.0}, "`confidence` must be between 0 and 1"),
        ({"rtol": 0.1, "confidence": 95}, "`confidence` must be between 0 and 1"),
    ],
    ids=lambda x: (
        None if isinstance(x, dict) else x.split("`")[1] if "`" in x else "none"
    ),
)
def test_bad_arguments(settings, match):
    with pytest.raises(ValueError, match=match) as caught:
        budget(**settings)
    assert "Found" in str(caught.value)


def test_max_k_and_keywords_are_required():
    with pytest.raises(TypeError, match="max_k"):
        tx.Adaptive(rtol=0.1)  # pyright: ignore
    with pytest.raises(TypeError, match="positional"):
        tx.Adaptive(0.1, max_k=8)  # pyright: ignore


def test_too_small_for_the_estimator():
    with pytest.raises(ValueError, match="needs at least k=3"):
        run(DECAY, HUTCHPP, tx.Adaptive(rtol=0.1, max_k=2))


def test_key_is_needed():
    with pytest.raises(ValueError, match="`key`"):
        run(DECAY, HUTCHINSON, budget(rtol=0.1), key=None)


def test_traced_budget_names_adaptive():
    with pytest.raises(TypeError, match=r"traceax\.Adaptive"):
        jax.jit(lambda k: run(DECAY, HUTCHINSON, k).value)(8)


# --- statistics ---


@pytest.mark.parametrize(
    ("estimator", "eigenvalues"),
    [(HUTCHINSON, jnp.arange(1.0, 101.0)), (XTRACE, jnp.arange(1, 101) ** -1.0)],
    ids=["Hutchinson", "XTrace"],
)
def test_error_is_within_the_tolerance(estimator, eigenvalues):
    """200 keys at 95%: at least 90% of them, and no bias."""
    matrix = spectrum_matrix(jr.key(8), eigenvalues, jnp.float64)
    k = tx.Adaptive(rtol=0.05, max_k=96, round_size=8)
    value, _, stats = trace_many(matrix, estimator, k, 200)
    exact = jnp.trace(matrix)
    assert jnp.mean(jnp.abs(value - exact) <= 0.05 * exact) >= 0.9
    assert z_score(value, exact) < 5
    made = stats["num_matvecs"]
    assert jnp.mean(made) < 90
    assert len(set(made.tolist())) > 1
