"""Estimators of functions of operators."""
