"""Plots of estimates with their error bars. They need matplotlib, which is imported when
a plot is made without `ax`, and not before."""

from ._api.plots import compare, convergence, spectral_density


__all__ = ["compare", "convergence", "spectral_density"]
