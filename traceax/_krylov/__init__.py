"""Krylov methods."""
