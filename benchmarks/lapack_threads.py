"""Time saved by stopping idle threads of LAPACK on CPU.

    python benchmarks/run.py lapack_threads

jaxlib makes QR and eigenvalue decompositions with the OpenBLAS of SciPy, whose threads
wait in a busy loop for the next call, about 20 ms, on the cores that the next product
needs. `OPENBLAS_NUM_THREADS=1` does without them from the start of a process, and
`traceax.single_threaded_lapack` in a `with` block. The last two columns are times over
the time as installed. Each is the median of three processes, which take turns with those
of the other settings, of the median of nine interleaved calls.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import lineax as lx
from tables import head, row
from timing import interleaved

import traceax as tx


SETTINGS = ("as installed", "OPENBLAS_NUM_THREADS=1", "single_threaded_lapack")
CALLS = {
    "Hutch++": lambda a, key: tx.trace(a, tx.HutchPlusPlusEstimator(), k=120, key=key),
    "XTrace": lambda a, key: tx.trace(a, tx.XTraceEstimator(), k=120, key=key),
    "XNysTrace": lambda a, key: tx.trace(a, tx.XNysTraceEstimator(), k=120, key=key),
    "XDiag": lambda a, key: tx.diagonal(a, tx.XDiagEstimator(), k=120, key=key),
    "adaptive XTrace": lambda a, key: tx.trace(
        a, tx.XTraceEstimator(), k=tx.Adaptive(rtol=1e-9, max_k=120), key=key, throw=False
    ),
    "`logdet`": lambda a, key: tx.logdet(a, k=40, key=key),
    "`logdet`, Krylov-aware": lambda a, key: tx.logdet(
        a, tx.KrylovAwareEstimator(), k=40, num_steps=10, key=key
    ),
}


def measure(n: int, setting: str) -> None:
    """The median of each call, printed."""
    if setting == "single_threaded_lapack":
        limited = tx.single_threaded_lapack()
    else:
        limited = contextlib.nullcontext()
    x = jax.random.normal(jax.random.key(0), (n, 100)) / jnp.arange(1, 101)
    matrix, key = x @ x.T + jnp.eye(n), jax.random.key(0)

    def call(function):
        def run(matrix, key):
            operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
            return function(operator, key).value

        compiled = jax.jit(run)
        return lambda: compiled(matrix, key)

    with limited:
        found = interleaved({name: call(each) for name, each in CALLS.items()}, rounds=9)
    print(json.dumps({name: median for name, (median, *_) in found.items()}))


def medians(n: int) -> list[dict[str, float]]:
    """Of the processes of each setting, for each call."""
    runs = [[] for _ in SETTINGS]
    for _ in range(3):
        for run, setting in zip(runs, SETTINGS, strict=True):
            name, _, value = setting.partition("=")
            fixed = {name: value} if value else {}
            usual = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
            command = [sys.executable, __file__, str(n), setting]
            text = subprocess.check_output(command, env=usual | fixed, text=True)
            run.append(json.loads(text))
    return [
        {name: statistics.median(each[name] for each in run) for name in CALLS}
        for run in runs
    ]


def main() -> None:
    head("n", "call", SETTINGS[0], *(f"`{each}`" for each in SETTINGS[1:]))
    for n in (1000, 4000):
        usual, *others = medians(n)
        for name in CALLS:
            ratios = [f"{each[name] / usual[name]:.2f}" for each in others]
            row(str(n), name, f"{1e3 * usual[name]:.0f} ms", *ratios)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), sys.argv[2])
    else:
        main()
