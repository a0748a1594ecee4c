"""Traces and products of functions of Hermitian operators."""
