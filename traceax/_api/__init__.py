"""The public calls, one to a file."""
