"""Trace estimators, one file each."""
