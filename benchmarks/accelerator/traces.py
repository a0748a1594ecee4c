"""`benchmarks/dense.py` on an accelerator, all in full precision.

PYTHONPATH=benchmarks python benchmarks/accelerator/traces.py
"""

import jax
from dense import main


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main([16000])
