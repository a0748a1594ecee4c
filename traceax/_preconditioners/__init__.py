"""Preconditioners with known determinants, for log-determinants and solves."""
