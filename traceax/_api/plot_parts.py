"""The parts of plots that all of them share.

They need matplotlib, which is imported only when a plot is made without `ax`, so that
traceax does not depend on it. Colours are those of the axes.
"""

from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from .._core.solution import Solution


Axes: TypeAlias = Any  # `matplotlib.axes.Axes`

TAKE_ONE = "Take one, for example `jax.tree.map(lambda x: x[0], solutions)`."


def check_solution(name: str, solution: Any) -> None:
    if not isinstance(solution, Solution):
        raise TypeError(
            f"`{name}` must be a `traceax.Solution`. Found an object of type "
            f"{type(solution).__name__}. Pass what `traceax.trace` or "
            "`traceax.logdet` returned."
        )


def axes_or_current(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib. Install it: `pip install 'traceax[plot]'`."
        ) from error
    return pyplot.gca()


def draw_curve(
    ax: Axes,
    x: np.ndarray,
    value: np.ndarray,
    std_err: np.ndarray,
    settings: dict[str, Any],
) -> None:
    (line,) = ax.plot(x, value, **settings)
    ax.fill_between(
        x,
        value - 2 * std_err,
        value + 2 * std_err,
        color=line.get_color(),
        alpha=0.25,
        linewidth=0,
    )


def reference_style(ax: Axes) -> dict[str, Any]:
    """The style of the line of the exact value. Its colour is the colour of the labels,
    which contrasts with the background in every style."""
    color = ax.xaxis.label.get_color()
    return {"color": color, "linestyle": "--", "linewidth": 1, "label": "exact"}


def label_axes(ax: Axes, across: str, up: str) -> Axes:
    ax.set_xlabel(across)
    ax.set_ylabel(up)
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    return ax
