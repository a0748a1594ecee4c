"""Traces and diagonals from probes: one algorithm to a file."""
