"""Nothing in our programs keeps JAX from keeping them for the next process."""

import os
import subprocess
import sys
from pathlib import Path


PROGRAM = Path(__file__).parents[1] / "programs" / "kept.py"


def num_compiled(folder):
    """How many programs a new process compiles."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    command = [sys.executable, str(PROGRAM)]
    return int(subprocess.check_output(command, env=os.environ | settings, text=True))


def test_the_next_process_compiles_nothing(tmp_path):
    assert num_compiled(tmp_path) > 0
    assert num_compiled(tmp_path) == 0
