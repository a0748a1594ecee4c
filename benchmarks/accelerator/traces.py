"""Time of a trace over the time of its products on a GPU.

    PYTHONPATH=benchmarks python benchmarks/accelerator/traces.py

`benchmarks/dense.py` with all products in full precision.
"""

import jax
from dense import main


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main([16000])
