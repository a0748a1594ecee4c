"""Operators that users construct, and the facts that lineax knows of them without a
matrix-vector product."""
