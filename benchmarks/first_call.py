"""What the first call of a process costs: tracing, lowering and compiling.

    python benchmarks/first_call.py [PYTHON OF AN ENVIRONMENT WITH traceax 1.0.2]

CPU seconds of the first call of each estimator, with and without its gradient, on a dense
float32 operator (n = 300, 60 products), each in a process of its own; and those of
traceax 1.0.2, with the ratio, if there is an interpreter that has it.
"""

import subprocess
import sys
import time


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

    start = time.process_time()
    import traceax as tx

    imported = time.process_time() - start
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
    print(time.process_time() - start, imported)


def in_process(python: str, name: str, differentiated: bool) -> float:
    """The median of three processes."""
    command = [python, __file__, "--one", name, "gradient" if differentiated else "value"]
    seconds = []
    for _ in range(3):
        printed = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds.append(float(printed.stdout.split()[0]))
    return sorted(seconds)[1]


def main(released: str | None) -> None:
    print("| first call, CPU seconds | ours | traceax 1.0.2 | ratio |")
    print("|---|---|---|---|")
    for differentiated in (False, True):
        base = None
        for name in [*ESTIMATORS, *OURS]:
            ours = in_process(sys.executable, name, differentiated)
            label = f"{name}, gradient" if differentiated else name
            theirs = "-"
            if released and name not in OURS:
                seconds = in_process(released, name, differentiated)
                base, theirs = base or seconds, f"{seconds:.2f}"
            else:
                seconds = base
            beside = "" if name not in OURS else " of its Hutchinson"
            ratio = f"{ours / seconds:.2f}{beside}" if seconds else "-"
            print(f"| {label} | {ours:.2f} | {theirs} | {ratio} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        first_call(sys.argv[2], sys.argv[3] == "gradient")
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
