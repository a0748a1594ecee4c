"""Numerics on flat arrays: knows no operator, key or mesh."""
