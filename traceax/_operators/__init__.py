"""Operators that users make, and what lineax knows of theirs."""
