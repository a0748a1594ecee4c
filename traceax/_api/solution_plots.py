"""Plots of one solution: its samples with their interval, or its entries with theirs."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree, Scalar

from .._core.solution import Solution
from .plot_parts import (
    Axes,
    axes_or_current,
    check_solution,
    label_axes,
    reference_style,
    TAKE_ONE,
)


# More error bars than this hide each other.
_MAX_ENTRIES = 200


def solution(
    solution: Solution,
    *,
    exact: Scalar | complex | None = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Plot the samples of a scalar, their mean, and its 95% interval.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 500))
        operator = tx.hessian(lambda v: jnp.sum((x @ v) ** 2) / 2, jnp.zeros(500))
        solution = tx.trace(operator, k=60, key=jax.random.key(1))
        ax = tx.plot.solution(solution, exact=jnp.sum(x**2))
        ```

    **Arguments:**

    - `solution`: a solution whose value is the mean of its samples, such as a trace or a
        log-determinant.
    - `exact`, `ax`: as in [`traceax.plot.convergence`][].
    - `kwargs`: for the points of the samples, as in `Axes.plot`: `label`, `color`, ...

    **Returns:**

    The axes, with a point for each sample, from left to right. The interval is
    `solution.interval()`, which counts the quadrature error as well. For complex numbers
    the real part is drawn. An infinite end of the interval is not drawn.

    **Raises:**

    - `TypeError`: `solution` is not a [`traceax.Solution`][].
    - `ValueError`: its value has several entries; it is a batch of several; or its
        samples estimate another number, as for norms, where they estimate a power. Use
        [`traceax.plot.compare`][] for these.
    - `ImportError`: matplotlib is not installed.
    """
    check_solution("solution", solution)
    shape = jax.tree.map(np.shape, solution.value)
    if shape != () or "samples" not in solution.stats:
        raise ValueError(
            "`solution` must be one solution with one number and samples of it. Found a "
            f"value of the shape {shape}. {TAKE_ONE} For entries use "
            "`traceax.plot.diagonal`."
        )
    value, low, high = (float(np.real(x)) for x in (solution.value, *solution.interval()))
    samples = np.real(np.asarray(solution.stats["samples"]))
    # Where no sample was drawn they are infinite.
    samples = samples[np.isfinite(samples)]
    mean = np.mean(samples) if samples.size else value
    # The largest rounding error of a mean whose terms cancel.
    rounding = np.finfo(samples.dtype).eps ** 0.5 * np.max(np.abs(samples), initial=0)
    if abs(mean - value) > rounding:
        raise ValueError(
            "`solution` must be the mean of its samples. Found the mean "
            f"{mean:.6g} for the value {value:.6g}. Use `traceax.plot.compare`, "
            "which draws the error bar alone."
        )
    axes = axes_or_current(ax)
    style = {"marker": ".", "linestyle": "none", "label": "samples"} | kwargs
    (points,) = axes.plot(np.arange(1, samples.size + 1), samples, **style)
    color = points.get_color()
    axes.axhline(value, color=color, label="value")
    if np.isfinite([low, high]).all():
        axes.axhspan(low, high, color=color, alpha=0.25, lw=0, label="95% interval")
    if exact is not None:
        axes.axhline(float(np.real(exact)), **reference_style(axes))
    return label_axes(axes, "sample", solution.quantity.lower())


def diagonal(
    solution: Solution,
    *,
    exact: PyTree[Array] | None = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Plot the entries of a diagonal, of row norms or of other quantities with several
    entries, each with its 95% interval.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (50, 50))
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        estimator = tx.HutchinsonEstimator()
        solution = tx.diagonal(operator, estimator, k=20, key=jax.random.key(1))
        ax = tx.plot.diagonal(solution, exact=jnp.sum(x**2, axis=1))
        ```

    **Arguments:**

    - `solution`: a solution whose value is an array or a PyTree.
    - `exact`: the true entries, a PyTree like the value, if they are known.
    - `ax`: as in [`traceax.plot.convergence`][].
    - `kwargs`: for the points and their bars, as in `Axes.errorbar`: `label`, `color`,
        ...

    **Returns:**

    The axes. Entries come in the order of `jax.tree.leaves`, each leaf flattened. If
    there are more than 200, every second, third, ... is drawn, so that at most 200 are
    left. The intervals are `solution.interval()`, for each entry by itself, so about one
    in twenty misses. An infinite one has no bar. For complex numbers the real part is
    drawn.

    **Raises:**

    - `TypeError`: `solution` is not a [`traceax.Solution`][].
    - `ValueError`: it is a batch of several; or `exact` has another number of entries.
    - `ImportError`: matplotlib is not installed.
    """
    check_solution("solution", solution)
    value, low, high = (_entries(x) for x in (solution.value, *solution.interval()))
    index = np.arange(0, value.size, max(1, -(-value.size // _MAX_ENTRIES)))
    bars = np.stack([value - low, high - value])[:, index]
    bars = np.where(np.isfinite(bars), np.maximum(bars, 0), np.nan)
    truth = value if exact is None else _entries(exact)
    if truth.size != value.size:
        raise ValueError(
            f"`exact` must have {value.size} entries, as the value of `solution`. Found "
            f"{truth.size}. Pass a PyTree of the structure of the value."
        )
    axes = axes_or_current(ax)
    style = {"fmt": ".", "elinewidth": 1, "label": "value, 95% interval"} | kwargs
    axes.errorbar(index, value[index], yerr=bars, **style)
    if exact is not None:
        marks = reference_style(axes) | {"linestyle": "none", "marker": "_", "zorder": 3}
        axes.plot(index, truth[index], **marks)
    return label_axes(axes, "entry", solution.quantity.lower())


def _entries(tree: PyTree[Array]) -> np.ndarray:
    return np.concatenate([np.ravel(np.real(x)) for x in jax.tree.leaves(tree)])
