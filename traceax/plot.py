"""Plots of estimates with their error bars. They need matplotlib, which is imported when
a plot is made without `ax`, and not before."""

from ._api.plots import compare, convergence, spectral_density
from ._api.solution_plots import diagonal, solution


__all__ = ["compare", "convergence", "diagonal", "solution", "spectral_density"]
