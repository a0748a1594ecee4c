"""Plots of estimates with their error bars: how one converged, several of them side by
side, and a density of eigenvalues."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Scalar

from .._core.solution import Solution
from .plot_parts import (
    Axes,
    axes_or_current,
    check_solution,
    draw_curve,
    label_axes,
    reference_style,
    TAKE_ONE,
)
from .spectral_measure import SpectralDensity


# The default width is at least this share of the range of the eigenvalues: finer
# structure is hard to see in a plot.
_MAX_RESOLUTION = 50
# Ten points or so for each width of the default, so that curves look smooth.
_NUM_POINTS = 500


def convergence(
    solution: Solution,
    *,
    exact: Scalar | complex | None = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Plot how an estimate reached its tolerance: the value after each round of an
    adaptive budget, with a band of two standard errors to either side. For a value with
    several entries, such as a diagonal, the norms are shown.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 100))
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        budget = tx.Adaptive(rtol=2e-2, max_k=400, history=True)
        estimator = tx.HutchinsonEstimator()
        solution = tx.trace(operator, estimator, k=budget, key=jax.random.key(1))
        ax = tx.plot.convergence(solution, exact=jnp.sum(x**2))
        ```

    **Arguments:**

    - `solution`: the solution of a call with `k=traceax.Adaptive(..., history=True)`.
    - `exact`: the true value, if it is known. It is drawn as a horizontal line.
    - `ax`: the `matplotlib` axes to draw on. `None` takes the current axes, or makes a
        figure, as `matplotlib.pyplot.gca()` does.
    - `kwargs`: for the line of the values, as in `Axes.plot`: `label`, `color`, ...

    **Returns:**

    The axes. The horizontal axis has the budget spent, in matvecs or probes as `k` counts
    them: see `max_k` of [`traceax.Adaptive`][]. The vertical axis has the value, or its
    real part if it is complex. A round with an infinite standard error has no band.

    **Raises:**

    - `TypeError`: `solution` is not a [`traceax.Solution`][].
    - `ValueError`: it has no history, or is a batch of several.
    - `ImportError`: matplotlib is not installed.
    """
    check_solution("solution", solution)
    if "history" not in solution.stats:
        raise ValueError(
            "`solution` has no history. Pass `k=traceax.Adaptive(..., history=True)` to "
            "the call that made it. An exact answer, which is what a round of n or more "
            "gives, has none: lower `round_size`."
        )
    history = np.asarray(solution.stats["history"])
    if history.ndim != 2:
        raise ValueError(
            "`solution` must be one solution. Found a batch, with a history of shape "
            f"{history.shape}. {TAKE_ONE}"
        )
    spent, value, std_err = history[np.isfinite(history[:, 0])].T
    axes = axes_or_current(ax)
    draw_curve(axes, spent, value, std_err, {"marker": "."} | kwargs)
    if exact is not None:
        axes.axhline(float(np.real(exact)), **reference_style(axes))
    return label_axes(axes, "budget spent, $k$", "value ± 2 standard errors")


def spectral_density(
    density: SpectralDensity,
    *,
    width: Scalar | float | None = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Plot the smoothed density of the eigenvalues, with a band of two standard errors
    to either side.

    !!! Example

        ```python
        import jax
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 500)) / 500**0.5
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        key = jax.random.key(1)
        density = tx.spectral_density(operator, k=20, num_steps=50, key=key)
        ax = tx.plot.spectral_density(density)
        ```

    **Arguments:**

    - `density`: what [`traceax.spectral_density`][] returns.
    - `width`: the standard deviation of the Gaussian that smooths the density, in the
        units of the eigenvalues. `None` takes a fiftieth of the range of the nodes, or
        that range over `num_steps` if this is wider, since the nodes resolve no finer
        structure.
    - `ax`, `kwargs`: as in [`traceax.plot.convergence`][].

    **Returns:**

    The axes. The density is drawn at 500 points, from three widths below the smallest
    node to three above the largest.

    **Raises:**

    - `TypeError`: `density` is not a [`traceax.SpectralDensity`][]; `width` is not real.
    - `ValueError`: `density` has a node that is not finite, or is a batch of several;
        `width` is not positive.
    - `ImportError`: matplotlib is not installed.
    """
    if not isinstance(density, SpectralDensity):
        raise TypeError(
            "`density` must be a `traceax.SpectralDensity`. Found an object of type "
            f"{type(density).__name__}. Make one by `traceax.spectral_density`."
        )
    nodes = np.asarray(density.nodes)
    low, high = float(nodes.min()), float(nodes.max())
    if not np.isfinite(low + high):
        raise ValueError(
            "`density` has nodes that are not finite: a product with the operator was "
            "NaN or infinite. Check the operator's arrays."
        )
    if width is None:
        # If the spectrum is one point, up to rounding, its range is replaced by one that
        # the dtype resolves.
        size = max(abs(low), abs(high)) or 1.0
        spread = max(high - low, float(np.finfo(nodes.dtype).eps) ** 0.5 * size)
        width = spread / min(_MAX_RESOLUTION, int(np.max(density.num_steps)))
    margin = 3 * float(width)
    t = np.linspace(low - margin, high + margin, _NUM_POINTS)
    value, std_err = density(t, width)
    axes = axes_or_current(ax)
    draw_curve(axes, t, np.asarray(value), np.asarray(std_err), kwargs)
    return label_axes(axes, "eigenvalue", "density ± 2 standard errors")


def compare(
    solutions: Mapping[str, Solution],
    *,
    exact: Scalar | complex | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot estimates of one number side by side, each with an error bar of two standard
    errors to either side.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 100)) / jnp.arange(1, 101)
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        estimators = {
            "Hutchinson": tx.HutchinsonEstimator(),
            "Hutch++": tx.HutchPlusPlusEstimator(),
        }
        key = jax.random.key(1)
        solutions = {
            name: tx.trace(operator, estimator, k=30, key=key)
            for name, estimator in estimators.items()
        }
        ax = tx.plot.compare(solutions, exact=jnp.sum(x**2))
        ```

    **Arguments:**

    - `solutions`: a mapping from names to solutions.
    - `exact`: the true value, if it is known. It is drawn as a vertical line.
    - `ax`: as in [`traceax.plot.convergence`][].

    **Returns:**

    The axes. Each solution has one row, from top to bottom, with its name on the axis.
    For a complex value the real part is drawn. An infinite standard error has no bar.

    **Raises:**

    - `TypeError`: `solutions` is not a mapping of names to [`traceax.Solution`][]s.
    - `ValueError`: it is empty, or one of them is a batch of several, or of a quantity
        with several entries.
    - `ImportError`: matplotlib is not installed.
    """
    if not isinstance(solutions, Mapping):
        raise TypeError(
            "`solutions` must be a mapping from names to solutions. Found an object of "
            f"type {type(solutions).__name__}. Pass, for example, "
            "`{'XTrace': solution}`."
        )
    if not solutions:
        raise ValueError("`solutions` must have at least one entry. Found none.")
    for name, solution in solutions.items():
        check_solution(f"solutions[{name!r}]", solution)
        shapes = jax.tree.map(np.shape, solution.value)
        if shapes != ():
            raise ValueError(
                f"`solutions[{name!r}]` must be one solution with one number. Found a "
                f"value of the shape {shapes}. {TAKE_ONE}"
            )
    values = [float(solution.value.real) for solution in solutions.values()]
    bars = np.array([2 * float(solution.std_err) for solution in solutions.values()])
    rows = np.arange(len(solutions))
    bars = np.where(np.isfinite(bars), bars, np.nan)
    axes = axes_or_current(ax)
    axes.errorbar(values, rows, xerr=bars, fmt="o", capsize=4)
    if exact is not None:
        axes.axvline(float(np.real(exact)), **reference_style(axes))
    axes.set_yticks(rows, solutions.keys())
    axes.set_ylim(len(solutions) - 0.5, -0.5)
    return label_axes(axes, "value ± 2 standard errors", "")
