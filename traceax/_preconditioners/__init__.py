"""Preconditioners with known determinants."""
