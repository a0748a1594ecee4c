"""Plots hold the numbers that they are of, in the colours of the axes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import matplotlib as mpl
import numpy as np
import pytest


mpl.use("Agg")
import matplotlib.pyplot as plt

import traceax as tx


KEY = jr.key(0)
NAN = [jnp.nan] * 3


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(params=["default", "dark_background"])
def style(request):
    with plt.style.context(request.param):
        yield


def solution(value=1.0, std_err=0.1, history=None, **stats):
    stats = {name: jnp.asarray(x) for name, x in stats.items()}
    stats |= {} if history is None else {"history": jnp.array(history)}
    successful = tx.RESULTS.successful
    return tx.Solution(jnp.asarray(value), jnp.asarray(std_err), successful, stats, None)


def density(nodes=((0.0, 1.0, 3.0), (0.5, 2.0, 4.0))):
    nodes = jnp.array(nodes)
    weights = jnp.full(nodes.shape, 1 / nodes.shape[-1])
    return tx.SpectralDensity(nodes, weights, nodes.size, nodes.shape[-1])


def check(exception, parts, call):
    with pytest.raises(exception) as error:
        call()
    for part in parts:
        assert part in str(error.value)


def band(collection):
    """Lower and upper end at each x of a `fill_between`."""
    x, y = np.concatenate([path.vertices for path in collection.get_paths()]).T
    return {each: (y[x == each].min(), y[x == each].max()) for each in x.tolist()}


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def drawn(ax):
    """Without an error, and with something that is not of the background's colour."""
    ax.figure.canvas.draw()
    background = mpl.colors.to_rgb(ax.get_facecolor())
    for line in ax.lines:
        assert mpl.colors.to_rgb(line.get_color()) != background


# --- convergence ---


HISTORY = [[16, 10.0, 4.0], [32, 12.0, 2.0], [48, 11.0, 1.0], NAN, NAN]


@pytest.mark.usefixtures("style")
def test_convergence():
    _, ax = plt.subplots()
    assert tx.plot.convergence(solution(history=HISTORY), exact=10.5, ax=ax) is ax
    line, exact = ax.lines
    seen = line.get_xydata()[:3]
    assert np.array_equal(seen, [[16, 10], [32, 12], [48, 11]])
    assert np.all(np.isnan(line.get_xydata()[3:]))
    (area,) = ax.collections
    assert band(area) == {16: (2, 18), 32: (8, 16), 48: (9, 13)}
    assert mpl.colors.same_color(area.get_facecolor()[0, :3], line.get_color())
    assert set(exact.get_ydata()) == {10.5}
    assert mpl.colors.same_color(exact.get_color(), plt.rcParams["axes.labelcolor"])
    assert ax.get_xlabel() == "budget spent, $k$"
    assert ax.get_ylabel() == "value ± 2 standard errors"
    assert labels(ax) == ["exact"]
    drawn(ax)


def test_convergences_together():
    """Each has the next colour, and the keywords go to the line."""
    _, ax = plt.subplots()
    for label in ("one", "two"):
        tx.plot.convergence(solution(history=HISTORY), ax=ax, label=label)
    tx.plot.convergence(
        solution(history=HISTORY), ax=ax, exact=3 + 1j, label="x", color="red", marker=""
    )
    assert labels(ax) == ["one", "two", "x", "exact"]
    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    colors = [line.get_color() for line in ax.lines[:3]]
    assert colors == [cycle[0], cycle[1], "red"]
    assert [line.get_marker() for line in ax.lines[:3]] == [".", ".", ""]
    for color, area in zip(colors, ax.collections, strict=True):
        assert mpl.colors.same_color(area.get_facecolor()[0, :3], color)
    assert set(ax.lines[3].get_ydata()) == {3}
    drawn(ax)


def test_convergence_with_an_unknown_error():
    history = [[2, 1.0, jnp.inf], [4, 2.0, 0.5], [6, 3.0, 0.5]]
    ax = tx.plot.convergence(solution(history=history))
    assert band(ax.collections[0]) == {4: (1, 3), 6: (2, 4)}
    assert ax.get_legend() is None
    assert np.all(np.isfinite([*ax.get_xlim(), *ax.get_ylim()]))
    drawn(ax)


@pytest.mark.slow
def test_convergence_of_a_complex_trace():
    matrix = jnp.diag(jnp.arange(1.0, 101)) + jnp.ones((100, 100))
    operator = lx.MatrixLinearOperator(matrix.astype(jnp.complex64))
    budget = tx.Adaptive(rtol=1e-9, max_k=40, round_size=10, history=True)
    estimator = tx.HutchinsonEstimator()
    found = tx.trace(operator, estimator, k=budget, key=KEY, throw=False)
    ax = tx.plot.convergence(found)
    assert np.array_equal(ax.lines[0].get_xdata(), [10, 20, 30, 40])
    value, std_err = float(found.value.real), float(found.std_err)
    assert np.allclose(ax.lines[0].get_ydata()[-1], value)
    ends = band(ax.collections[0])[40]
    assert np.allclose(ends, (value - 2 * std_err, value + 2 * std_err))


# --- spectral densities ---


@pytest.mark.usefixtures("style")
def test_spectral_density():
    _, ax = plt.subplots()
    assert tx.plot.spectral_density(density(), width=0.5, ax=ax, label="A") is ax
    (line,), (area,) = ax.lines, ax.collections
    t = line.get_xdata()
    assert t.shape == (500,)
    assert (t[0], t[-1]) == (-1.5, 5.5)
    mean, std_err = (np.asarray(each) for each in density()(t, 0.5))
    assert np.allclose(line.get_ydata(), mean)
    found = band(area)
    for i in (0, 100, 499):
        ends = (mean[i] - 2 * std_err[i], mean[i] + 2 * std_err[i])
        assert np.allclose(found[t[i]], ends)
    assert mpl.colors.same_color(area.get_facecolor()[0, :3], line.get_color())
    assert ax.get_xlabel() == "eigenvalue"
    assert ax.get_ylabel() == "density ± 2 standard errors"
    assert labels(ax) == ["A"]
    drawn(ax)


@pytest.mark.parametrize(("steps", "width"), [(4, 0.25), (80, 0.02)])
def test_default_width(steps, width):
    """The range over the number of steps, or a fiftieth of it, whichever is wider."""
    nodes = np.linspace(2, 3, steps)[None]
    ax = tx.plot.spectral_density(density(nodes))
    t = ax.lines[0].get_xdata()
    assert np.allclose([t[0], t[-1]], [2 - 3 * width, 3 + 3 * width])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("value", [0.0, -2.5, 1e-30, 1e30])
def test_spectrum_of_one_point(value, dtype):
    ax = tx.plot.spectral_density(density(np.full((2, 3), value, dtype)))
    t, y = ax.lines[0].get_data()
    assert t[0] < dtype(value) < t[-1]
    assert len(np.unique(t.astype(dtype))) > 300
    assert np.allclose(np.trapezoid(y, t), 1, atol=1e-2)
    drawn(ax)


# --- comparisons ---


@pytest.mark.usefixtures("style")
def test_compare():
    solutions = {
        "one": solution(2.0, 0.5),
        "two": solution(3 + 1j, 0.25),
        "three": solution(1.0, jnp.inf),
    }
    _, ax = plt.subplots()
    assert tx.plot.compare(solutions, exact=jnp.asarray(2.5), ax=ax) is ax
    ((points, caps, (bars,)),) = ax.containers
    assert np.array_equal(points.get_xydata(), [[2, 0], [3, 1], [1, 2]])
    segments = bars.get_segments()
    assert np.array_equal(segments[0], [[1, 0], [3, 0]])
    assert np.array_equal(segments[1], [[2.5, 1], [3.5, 1]])
    assert not np.any(np.isfinite(segments[2]))
    assert len(caps) == 2
    exact = ax.lines[-1]
    assert set(exact.get_xdata()) == {2.5}
    assert mpl.colors.same_color(exact.get_color(), plt.rcParams["axes.labelcolor"])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["one", "two", "three"]
    assert ax.get_ylim() == (2.5, -0.5)
    assert ax.get_xlabel() == "value ± 2 standard errors"
    assert labels(ax) == ["exact"]
    assert np.all(np.isfinite(ax.get_xlim()))
    drawn(ax)


def test_compare_without_exact():
    ax = tx.plot.compare({"one": solution()})
    assert ax.get_legend() is None
    drawn(ax)


# --- samples, and entries ---


SAMPLES = [1.0, 4.0, 1.0, np.inf]  # the last was not drawn


def of_samples(value=2.0, std_err=1.0, samples=SAMPLES):
    return solution(value, std_err, samples=samples, num_samples=3)


@pytest.mark.usefixtures("style")
def test_solution():
    found, (_, ax) = of_samples(), plt.subplots()
    assert tx.plot.solution(found, exact=2.5 + 1j, ax=ax, marker="x") is ax
    points, value, exact = ax.lines
    assert np.array_equal(points.get_xydata(), [[1, 1], [2, 4], [3, 1]])
    assert (points.get_marker(), points.get_linestyle()) == ("x", "None")
    assert set(value.get_ydata()) == {2}
    (area,) = ax.patches
    assert np.allclose((area.get_y(), area.get_y() + area.get_height()), found.interval())
    assert mpl.colors.same_color(area.get_facecolor()[:3], points.get_color())
    assert set(exact.get_ydata()) == {2.5}
    assert mpl.colors.same_color(exact.get_color(), plt.rcParams["axes.labelcolor"])
    assert labels(ax) == ["samples", "value", "95% interval", "exact"]
    assert ax.get_xlabel() == "sample"
    drawn(ax)


def test_solution_of_one_sample():
    ax = tx.plot.solution(of_samples(1.0, np.inf, [1.0]))
    assert not ax.patches
    assert np.all(np.isfinite(ax.get_ylim()))
    drawn(ax)


@pytest.mark.usefixtures("style")
def test_diagonal():
    value = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0 + 1j]])}
    std_err = {"a": jnp.array([0.5, jnp.inf]), "b": jnp.array([[0.25]])}
    found = tx.Solution(value, std_err, tx.RESULTS.successful, {}, None)
    _, ax = plt.subplots()
    assert tx.plot.diagonal(found, exact=value, ax=ax) is ax
    ((points, _, (bars,)),) = ax.containers
    assert np.array_equal(points.get_xydata(), [[0, 1], [1, 2], [2, 3]])
    low, high = found.interval()
    segments = bars.get_segments()
    assert np.allclose(segments[0], [[0, low["a"][0]], [0, high["a"][0]]])
    assert not np.any(np.isfinite(segments[1]))
    assert np.allclose(segments[2], [[2, low["b"][0, 0].real], [2, high["b"][0, 0].real]])
    exact = ax.lines[-1]
    assert np.array_equal(exact.get_ydata(), [1, 2, 3])
    assert mpl.colors.same_color(exact.get_color(), plt.rcParams["axes.labelcolor"])
    assert labels(ax) == ["exact", "value, 95% interval"]
    drawn(ax)


def test_many_entries():
    """Some of them, evenly."""
    entries = np.arange(1001.0)
    found = solution(entries, np.ones(1001))
    ((points, *_),) = tx.plot.diagonal(found).containers
    assert np.array_equal(points.get_xdata(), np.arange(0, 1001, 6))
    assert np.array_equal(points.get_ydata(), np.arange(0, 1001, 6))


# --- axes and matplotlib ---


PLOTS = [
    lambda **settings: tx.plot.convergence(solution(history=HISTORY), **settings),
    lambda **settings: tx.plot.spectral_density(density(), **settings),
    lambda **settings: tx.plot.compare({"one": solution()}, **settings),
    lambda **settings: tx.plot.solution(of_samples(), **settings),
    lambda **settings: tx.plot.diagonal(solution(np.ones(3), np.ones(3)), **settings),
]
every_plot = pytest.mark.parametrize("plot", PLOTS)


@every_plot
def test_current_axes(plot):
    assert plot() is plt.gca()
    _, (first, _) = plt.subplots(1, 2)
    plt.sca(first)
    assert plot() is first


@every_plot
def test_without_matplotlib(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    check(ImportError, ["matplotlib", "`pip install 'traceax[plot]'`"], plot)


@pytest.mark.slow
def test_matplotlib_is_not_imported():
    """Neither with traceax, nor by a plot on axes that are given."""
    program = (
        "import sys, jax.numpy as jnp, traceax as tx\n"
        "from unittest.mock import MagicMock\n"
        "density = tx.SpectralDensity(jnp.ones((2, 2)), jnp.ones((2, 2)) / 2, 4, 2)\n"
        "ax = MagicMock()\n"
        "ax.plot.return_value = [MagicMock()]\n"
        "assert tx.plot.spectral_density(density, ax=ax) is ax\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# --- wrong input ---


def stacked(*solutions):
    return jax.tree.map(lambda *x: jnp.stack(x), *solutions)


SEVERAL = stacked(solution(history=HISTORY), solution(history=HISTORY))


LEAVES = lx.FunctionLinearOperator(
    lambda v: v, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
)


def test_convergence_of_a_diagonal_is_that_of_its_norm():
    k = tx.Adaptive(rtol=0.5, max_k=2, round_size=2, history=True)
    estimator = tx.HutchinsonEstimator()
    found = tx.diagonal(LEAVES, estimator, k=k, key=KEY, throw=False)
    (line,) = tx.plot.convergence(found).get_lines()
    assert np.allclose(line.get_ydata(), 3**0.5)


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize(
    ("call", "exception", "parts"),
    [
        (
            lambda: tx.plot.convergence(solution()),
            ValueError,
            ["`solution` has no history", "`k=traceax.Adaptive(..., history=True)`"],
        ),
        (lambda: tx.plot.convergence(3.0), TypeError, ["`solution`", "float"]),
        (
            lambda: tx.plot.convergence(solution(history=np.ones((2, 4, 3)))),
            ValueError,
            ["one solution", "(2, 4, 3)"],
        ),
        (lambda: tx.plot.spectral_density(solution()), TypeError, ["`density`"]),
        (
            lambda: tx.plot.spectral_density(density(), width=-1),
            ValueError,
            ["`width` must be one positive number"],
        ),
        (
            lambda: tx.plot.spectral_density(density([[0.0, jnp.nan]])),
            ValueError,
            ["`density`", "not finite"],
        ),
        (
            lambda: tx.plot.spectral_density(density(np.ones((2, 3, 4)))),
            ValueError,
            ["batch of measures", "(2, 3, 4)"],
        ),
        (lambda: tx.plot.compare([solution()]), TypeError, ["mapping", "list"]),
        (lambda: tx.plot.compare({}), ValueError, ["`solutions`", "at least one"]),
        (lambda: tx.plot.compare({"a": 1}), TypeError, ["`solutions['a']`", "int"]),
        (lambda: tx.plot.compare({"a": SEVERAL}), ValueError, ["`solutions['a']`"]),
        (
            lambda: tx.plot.compare({"a": tx.diagonal(LEAVES, k=3)}),
            ValueError,
            ["`solutions['a']`", "one number", "'x': (3,)"],
        ),
        (lambda: tx.plot.solution(2.0), TypeError, ["`solution`", "float"]),
        (
            lambda: tx.plot.solution(tx.diagonal(LEAVES, k=3)),
            ValueError,
            ["one number", "'x': (3,)", "`traceax.plot.diagonal`"],
        ),
        (
            lambda: tx.plot.solution(of_samples(2**0.5)),
            ValueError,
            ["the mean 2 for the value 1.41421", "`traceax.plot.compare`"],
        ),
        (lambda: tx.plot.diagonal(None), TypeError, ["`solution`", "NoneType"]),
        (
            lambda: tx.plot.diagonal(tx.diagonal(LEAVES, k=3), exact=np.ones(2)),
            ValueError,
            ["`exact` must have 3 entries", "Found 2"],
        ),
        (lambda: tx.plot.diagonal(SEVERAL), ValueError, ["batch of solutions"]),
    ],
)
def test_wrong_input(call, exception, parts):
    check(exception, parts, call)
    assert not plt.get_fignums()
