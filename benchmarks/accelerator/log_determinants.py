"""`benchmarks/logdet.py` on an accelerator.

    PYTHONPATH=benchmarks python benchmarks/accelerator/log_determinants.py

The matrix is twice as large, and there are fewer cases.
"""

from logdet import dense, NOISE


if __name__ == "__main__":
    preconditioners = [("Nystrom", 15, NOISE, 10, 20), ("Nystrom", 100, NOISE, 10, 20)]
    dense(8000, [(30, 30)], preconditioners)
