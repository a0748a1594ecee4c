"""What `print` shows of solutions and densities."""

import pickle
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, matrix_free, PSD


FAILED = tx.RESULTS.max_matvecs_reached
FIRST = "max_matvecs_reached: The budget ended before the error bar met the tolerance."


def of(value, std_err, result=tx.RESULTS.successful, method="XTraceEstimator", **stats):
    """A solution of these numbers."""
    value, std_err = (jax.tree.map(jnp.asarray, x) for x in (value, std_err))
    stats = {name: jnp.asarray(x) for name, x in stats.items()}
    return tx.Solution(value, std_err, result, stats, None, "Trace", method)


def lines(solution):
    """The title, and the texts by their labels, which are two spaces apart."""
    title, *rows = repr(solution).splitlines()
    pairs = (row[2:].split("  ", 1) for row in rows)
    return title, {label: text.strip() for label, text in pairs}


def test_a_number():
    counts = {"num_matvecs": 60, "num_samples": 30, "num_steps": 0}
    found = of(3336.1667, 2.5501, **counts)
    low, high = found.interval()
    assert type(low) is type(high) is float
    assert repr(found) == (
        "Trace by XTraceEstimator\n"
        "  value         3336.2 +- 2.6\n"
        f"  95% interval  {low:.1f} to {high:.1f}\n"
        "  cost          60 matvecs, 30 samples"
    )
    assert "3331.2 to 3341.2" in repr(found)
    assert (found.matvecs, type(found.matvecs)) == (60, int)


@pytest.mark.parametrize(
    ("value", "std_err", "text"),
    [
        (3336.2, 26.04, "3336 +- 26"),
        (3336.2, 260.4, "3340 +- 260"),
        (-0.0123, 0.00996, "-0.012 +- 0.010"),
        (-0.001, 0.26, "0.00 +- 0.26"),
        (2.0, 30.0, "2 +- 30"),
        (3.3362e9, 2.6e6, "(3.3362 +- 0.0026)e+09"),
        (3.3362e-9, 2.6e-12, "(3.3362 +- 0.0026)e-09"),
        (0.0, 2.6e-300, "(0.0 +- 2.6)e-300"),
        (1.0, 1e-18, "1.0 +- 1e-18"),
        (np.float32(0.1), np.float32(0), "0.1, exact"),
        (np.float32(0.1), np.float32(np.inf), "0.1, error bar unknown"),
        (np.nan, np.nan, "nan"),
        (-np.inf, 0.0, "-inf"),
        (3 + 0.04j, 0.26, "(3.00+0.04j) +- 0.26"),
        (3e9 - 2e8j, 2.6e7, "((3.000-0.200j) +- 0.026)e+09"),
    ],
)
def test_two_digits_of_the_error(value, std_err, text):
    assert lines(of(value, std_err))[1]["value"] == text


def test_an_interval_of_complex_numbers():
    found = of(3 + 0.04j, 0.26)
    assert lines(found)[1]["95% interval"] == "(2.49-0.47j) to (3.51+0.55j)"
    assert all(type(end) is complex for end in found.interval())


def test_a_large_quadrature_error_comes_first():
    bounds = [[990.0, 2.0], [1012.0, 2.6]]
    counts = {"num_matvecs": 40, "num_samples": 20, "num_steps": 2}
    settings = {"bounds": bounds, "proven_bounds": bounds} | counts
    found = of(1000.0, 2.5, method="SLQEstimator with Lanczos", **settings)
    title, rows = lines(found)
    assert title == "Trace by SLQEstimator with Lanczos"
    first = "12, larger than the sampling error 2.6: more steps reduce it"
    assert next(iter(rows.items())) == ("quadrature error", first)
    assert rows["95% interval"] == "986 to 1017"
    assert rows["cost"] == "40 matvecs, 20 samples of 2 steps"
    small = settings | {"bounds": [[999.0, 2.5], [1000.0, 2.5]]}
    assert "quadrature" not in repr(of(1000.0, 2.5, **small))
    # An end that is unknown is no reason to hide the other one.
    settings["bounds"][0][0] = -np.inf
    assert lines(of(1000.0, 2.5, **settings))[1]["95% interval"] == "-inf to 1017.1"


def test_exact_answers_and_failures():
    exact = of(6.0, 0.0, exact=True, num_matvecs=1, num_samples=1, num_steps=0)
    assert repr(exact) == "Trace, exact\n  value  6.0, exact\n  cost   1 matvec"
    assert next(iter(lines(of(1.0, 0.1, FAILED))[1].items())) == ("result", FIRST)


def test_trees():
    values = {"a": jnp.array([[1.0, -2.0, 4.0]]), "b": jnp.array([1 + 1j, 3 + 4j])}
    values |= {"c": jnp.ones(2), "d": jnp.array(2.0), "e": jnp.ones(3)}
    errors = {"a": jnp.array([[0.1, 0.1, 0.1]]), "b": jnp.array([0.0, 0.5])}
    errors |= {"c": jnp.zeros(2), "d": jnp.array(0.5), "e": jnp.full(3, jnp.inf)}
    _, rows = lines(of(values, errors))
    assert rows == {
        "['a']": "(1, 3), -2 to 4, median error bar 5%",
        "['b']": "(2,), magnitudes 1.414 to 5, median error bar 5%",
        "['c']": "(2,), 1 to 1, exact",
        "['d']": "2.00 +- 0.50",
        "['e']": "(3,), 1 to 1, median error bar unknown",
    }
    many = [jnp.ones(1)] * 15
    _, rows = lines(of(many, many))
    assert len(rows) == 13
    assert rows["..."] == "3 more leaves"


def test_quadrature_errors_of_entries_are_in_their_bars():
    value, std_err = jnp.array([1.0, 2.0]), jnp.array([0.1, 0.1])
    bounds = [[[0.5, 1.0], [0.1, 0.1]], [[1.0, 2.0], [0.1, 0.1]]]
    _, rows = lines(of(value, std_err, bounds=bounds))
    assert rows["value"] == "(2,), 1 to 2, median error bar 50%"
    assert "0.75, larger than the sampling error 0.1" in rows["quadrature error"]


def test_batches():
    counts = {"num_matvecs": 8, "num_samples": 4}
    bounds = [[0.5, 0.1], [1.0, 0.1]]
    solutions = [
        of(1.0, 0.1, num_steps=3, bounds=bounds, **counts),
        of(2.0, 0.1, FAILED, num_steps=5, bounds=bounds, **counts),
    ]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *solutions)
    title, rows = lines(batch)
    assert title == "Trace by XTraceEstimator, a batch of shape (2,)"
    assert rows["result"] == f"1 of 2: {FIRST}"
    assert rows["value"] == "(2,), 1 to 2, median error bar 62%"
    assert rows["cost of each"] == "8 matvecs, 4 samples of 3 to 5 steps"
    assert batch.matvecs.tolist() == [8, 8]


def test_without_numbers_shapes_are_shown(capsys):
    """As equinox shows them, and not as an error: a REPL may show any tree."""
    found = of(1.0, 0.1, num_matvecs=3)

    def show(x):
        traced = of(x, x, num_matvecs=3)
        assert isinstance(traced.interval()[0], jax.core.Tracer)
        assert isinstance(of(1.0, 0.1, num_matvecs=x).matvecs, jax.core.Tracer)
        print(traced)
        print(found)  # its numbers are known here, too
        return x

    jax.jit(show)(1.0)
    shown = capsys.readouterr().out
    assert shown.startswith("Solution(\n  value=weak_f64[]")
    assert shown.endswith(repr(found) + "\n")
    without = eqx.filter(found, eqx.is_inexact_array)
    shapes = jax.eval_shape(lambda: found)
    deleted = jax.tree.map(jnp.copy, found)
    deleted.value.delete()
    numbers = jax.tree.map(lambda _: 0, found)
    for other in (without, shapes, deleted, numbers):
        assert repr(other).startswith("Solution(")


def test_modes_that_find_errors():
    found = of(jnp.nan, jnp.inf)
    with jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow"):
        assert repr(found) == "Trace by XTraceEstimator\n  value  nan"


def test_the_names_are_kept():
    """By transformations, and by what stores solutions."""
    found = of(1.0, 0.1, num_matvecs=3)
    twice = jax.lax.cond(True, lambda: found, lambda: of(2.0, 0.1, num_matvecs=4))
    carried, _ = jax.lax.scan(lambda carry, _: (carry, None), twice, None, length=2)
    assert repr(jax.jit(lambda: carried)()) == repr(found)
    assert repr(pickle.loads(pickle.dumps(found))) == repr(found)


def test_densities():
    nodes = jnp.array([[0.0, 1.0, 7.0], [-0.5, 2.0, 7.0]])
    weights = jnp.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    density = tx.SpectralDensity(nodes, weights, 4, 2)
    assert repr(density) == (
        "Spectral density\n"
        "  Ritz values  -0.5 to 2\n"
        "  cost         4 matvecs, 2 probes of 2 steps"
    )
    failed = tx.SpectralDensity(nodes, weights, 4, 2, tx.RESULTS.nonfinite_product)
    assert "  result       nonfinite_product: A matrix-vector product" in repr(failed)
    pair = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), density)
    assert repr(pair).startswith("Spectral density, a batch of shape (2,)\n")
    assert repr(jax.eval_shape(lambda: density)).startswith("SpectralDensity(")


N = 30
MATRIX = jnp.asarray(hermitian(0, np.linspace(1.0, 2.0, N)))
OPERATOR, GENERAL = matrix_free(MATRIX, PSD), matrix_free(MATRIX)
HUTCHINSON = tx.HutchinsonEstimator()
CALLS = {
    "Trace by XNysTraceEstimator": lambda k: tx.trace(OPERATOR, **k),
    "Trace by XTraceEstimator": lambda k: tx.trace(GENERAL, **k),
    "Diagonal by HutchinsonEstimator": lambda k: tx.diagonal(GENERAL, HUTCHINSON, **k),
    "Leaf traces by XTraceEstimator": lambda k: tx.leaf_traces(GENERAL, **k),
    "Frobenius norm by HutchinsonEstimator": lambda k: tx.frobenius_norm(GENERAL, **k),
    "Row norms by HutchinsonEstimator": lambda k: tx.row_norms(GENERAL, **k),
    "Log-determinant by SLQEstimator with Lanczos": lambda k: tx.logdet(OPERATOR, **k),
    "Log-determinant by SLQEstimator with GolubKahan": lambda k: tx.logdet(GENERAL, **k),
    "Log-determinant by SLQEstimator with Lanczos, preconditioned": lambda k: tx.logdet(
        OPERATOR, preconditioner=tx.AutoPreconditioner(shift=0.1), **k
    ),
    "Schatten 3-norm by SLQEstimator with GolubKahan": lambda k: tx.schatten_norm(
        GENERAL, 3, **k
    ),
    "Trace of Inverse by KrylovAwareEstimator": lambda k: tx.trace_of_function(
        OPERATOR, tx.Inverse(), tx.KrylovAwareEstimator(), **k
    ),
    "Trace of a function by SLQEstimator with Arnoldi": lambda k: tx.trace_of_function(
        GENERAL, jnp.exp, **k
    ),
    "Difference of traces of Log by SLQEstimator with Lanczos": lambda k: (
        tx.trace_difference(OPERATOR, OPERATOR, tx.Log(), **k)
    ),
    "Trace, leaf traces by HutchinsonEstimator": lambda k: tx.estimate(
        OPERATOR, [tx.Trace(), tx.LeafTraces(), tx.Trace()], HUTCHINSON, **k
    ),
    "Diagonal of Inverse by HutchinsonEstimator": lambda k: tx.diagonal_of_function(
        OPERATOR, tx.Inverse(), HUTCHINSON, **k
    ),
    "Logarithm of the trace of an exponential by Gauss rules of Lanczos": lambda k: (
        tx.log_trace_exp(OPERATOR, **k)
    ),
    "Log-density of a Gaussian by SLQEstimator with Lanczos": lambda k: (
        tx.gaussian_log_prob(OPERATOR, jnp.ones(N), **k)
    ),
    "Divergence by HutchinsonEstimator": lambda k: tx.divergence(
        jnp.sin, jnp.ones(N), **k
    )[1],
    "Laplacian by Taylor modes along random signs": lambda k: tx.laplacian(
        lambda x: jnp.sum(jnp.sin(x)), jnp.ones(N), **k
    )[2],
}


# The entries of `stats` that the documentation lists.
PAGE = Path(__file__).parent.parent.parent / "docs" / "api" / "vocabulary.md"
ENTRIES = set(re.findall(r'`"([a-z_.]+)"`', PAGE.read_text()))


@pytest.mark.parametrize("title", CALLS)
def test_every_call_names_itself_and_counts(title):
    found = eqx.filter_eval_shape(CALLS[title], {"k": 6, "key": jax.random.key(0)})
    assert f"{found.quantity} by {found.method}" == title
    assert {"num_matvecs", "num_samples", "num_steps"} <= set(found.stats) <= ENTRIES


def test_updates_name_themselves_and_count():
    dynamic = tx.DynamicTrace(lambda scale: scale * OPERATOR, num_probes=4)
    state = dynamic.init(jnp.ones(()), key=jax.random.key(0), k=8).state
    found = dynamic.update(state, jnp.asarray(1.1))
    title, rows = lines(found)
    assert title == "Trace by DynamicTrace"
    assert rows["cost"] == "8 matvecs, 4 samples"
    assert found.stats["num_steps"] == 0


@pytest.mark.slow(but="logdet")
@pytest.mark.parametrize("call", [tx.logdet, tx.schatten_norm], ids=["logdet", "norm"])
def test_counts_of_an_adaptive_run_and_of_one_replaced(call):
    settings = {"key": jax.random.key(0), "num_steps": 4, "throw": False}
    settings |= {"p": 3} if call is tx.schatten_norm else {}
    budget = tx.Adaptive(rtol=0.3, max_k=24, round_size=4, min_samples=8)
    found = call(OPERATOR, k=budget, **settings)
    samples = int(np.sum(np.isfinite(found.stats["samples"])))
    assert found.stats["num_samples"] == samples >= 8
    assert found.stats["num_steps"] == 4
    budget = tx.Adaptive(rtol=1e-9, max_k=3 * N, round_size=4, min_samples=4)
    exact = call(OPERATOR, k=budget, **settings)
    assert exact.stats["exact"]
    assert lines(exact)[0].endswith(", exact")
    assert exact.method == found.method
