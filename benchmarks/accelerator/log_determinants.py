"""`benchmarks/logdet.py` on an accelerator, for a larger matrix.

PYTHONPATH=benchmarks python benchmarks/accelerator/log_determinants.py
"""

from logdet import dense, NOISE


if __name__ == "__main__":
    preconditioners = [("Nystrom", 15, NOISE, 10, 20), ("Nystrom", 100, NOISE, 10, 20)]
    dense(8000, [(30, 30)], preconditioners)
