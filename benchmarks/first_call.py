"""What the first call of a process costs: tracing, lowering and compiling.

    pip install --no-deps --target .peers traceax==1.0.2
    python benchmarks/first_call.py

CPU seconds of the first call of each estimator, with and without its gradient, on a dense
float32 operator (n = 300, 60 products), the median of three processes; and those of
traceax 1.0.2, with the ratio.
"""

import os
import subprocess
import sys
import time
from pathlib import Path


RELEASED = Path(__file__).parents[1] / ".peers"
N, K = 300, 60
ESTIMATORS = {
    "Hutchinson": "HutchinsonEstimator",
    "Hutch++": "HutchPlusPlusEstimator",
    "XTrace": "XTraceEstimator",
    "XNysTrace": "XNysTraceEstimator",
}
OURS = ["log-determinant", *(f"{name}, adaptive" for name in ESTIMATORS)]


def first_call(name: str, differentiated: bool) -> None:
    """Print the CPU seconds of the first call, in this process, of either release."""
    import jax
    import lineax as lx

    import traceax as tx

    x = jax.random.normal(jax.random.key(0), (N, N))
    matrix, key = x @ x.T / N, jax.random.key(1)
    released = not hasattr(tx, "trace")

    def value(matrix):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        if name == "log-determinant":
            return tx.logdet(operator, k=20, num_steps=20, key=key, throw=False).value
        kind, *adaptive = name.split(", ")
        estimator = getattr(tx, ESTIMATORS[kind])()
        if released:
            return estimator.estimate(key, operator, K)[0]
        k = tx.Adaptive(rtol=0.1, max_k=128) if adaptive else K
        return tx.trace(operator, estimator, k=k, key=key, throw=False).value

    compiled = jax.jit(jax.grad(value) if differentiated else value)
    start = time.process_time()
    jax.block_until_ready(compiled(matrix))
    print(time.process_time() - start)


def in_process(folder: Path, name: str, differentiated: bool) -> float:
    """The median of three processes that import traceax from `folder`."""
    kind = "gradient" if differentiated else "value"
    command = [sys.executable, __file__, name, kind]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        seconds.append(float(done.stdout))
    return sorted(seconds)[1]


def main() -> None:
    print("| first call, CPU seconds | ours | traceax 1.0.2 | ratio |")
    print("|---|---|---|---|")
    for differentiated in (False, True):
        hutchinson = None
        for name in [*ESTIMATORS, *OURS]:
            label = f"{name}, gradient" if differentiated else name
            ours = in_process(RELEASED.parent, name, differentiated)
            if name in OURS:
                theirs, ratio = "-", f"{ours / hutchinson:.2f} of its Hutchinson"
            else:
                seconds = in_process(RELEASED, name, differentiated)
                hutchinson = hutchinson or seconds
                theirs, ratio = f"{seconds:.2f}", f"{ours / seconds:.2f}"
            print(f"| {label} | {ours:.2f} | {theirs} | {ratio} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        first_call(sys.argv[1], sys.argv[2] == "gradient")
    else:
        main()
