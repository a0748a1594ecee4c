"""Log-determinants on a GPU.

    PYTHONPATH=benchmarks python benchmarks/accelerator/log_determinants.py

`benchmarks/logdet.py` with a matrix that is twice as large, and fewer cases.
"""

from logdet import dense, NOISE


if __name__ == "__main__":
    preconditioners = [("Nystrom", 15, NOISE, 10, 20), ("Nystrom", 100, NOISE, 10, 20)]
    dense(8000, [(30, 30)], preconditioners)
