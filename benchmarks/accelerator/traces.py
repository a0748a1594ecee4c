"""`benchmarks/dense.py` on an accelerator.

    PYTHONPATH=benchmarks python benchmarks/accelerator/traces.py

All products are in full precision.
"""

import jax
from dense import main


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main([16000])
