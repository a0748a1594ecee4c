"""Numerics on flat arrays, which know no operator, key or device."""
