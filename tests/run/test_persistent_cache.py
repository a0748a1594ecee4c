"""Nothing in our programs keeps JAX from keeping them for the next process."""

import ast
import os
import subprocess
import sys
from pathlib import Path


PROGRAM = Path(__file__).parents[1] / "programs" / "kept.py"


def num_compiled(folder, seed):
    """How many programs a new process compiles, whose sets have the order of this
    seed."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    command = [sys.executable, str(PROGRAM)]
    return int(subprocess.check_output(command, env=os.environ | settings, text=True))


def test_the_next_process_compiles_nothing(tmp_path):
    assert num_compiled(tmp_path, "1") > 0
    assert num_compiled(tmp_path, "2") == 0


def is_set(node):
    """Whether an expression is a set, or an operation with one."""
    if isinstance(node, ast.BinOp):
        return is_set(node.left) or is_set(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp)


def test_no_loop_takes_the_order_of_a_set():
    """It differs between processes, and with it the program."""
    loops = ast.For | ast.comprehension
    for path in sorted((PROGRAM.parents[2] / "traceax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, loops) and is_set(node.iter)), path
