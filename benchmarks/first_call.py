"""CPU seconds of the first call of a process.

    pip install matfree
    pip install --no-deps --target .peers traceax==1.0.2
    python benchmarks/first_call.py

Tracing, lowering and compiling, with and without the gradient, on a dense float32
operator (n = 300): estimators with 60 products, log-determinants of 20 probes and steps.
The least of three processes that alternate with the others, since other work on a machine
only adds to it. Theirs are traceax 1.0.2's, and matfree's for log-determinants; then the
ratio, the ratio to Hutchinson of 1.0.2, and ours with the older emitters of XLA:CPU.
"""

import os
import subprocess
import sys
import time
from pathlib import Path


RELEASED = Path(__file__).parents[1] / ".peers"
N, K, NUM_STEPS = 300, 60, 20
ESTIMATORS = {
    "Hutchinson": "HutchinsonEstimator",
    "Hutch++": "HutchPlusPlusEstimator",
    "XTrace": "XTraceEstimator",
    "XNysTrace": "XNysTraceEstimator",
}
LOGDETS = {"log-determinant": False, "log-determinant, `throw=True`": True}
ADAPTIVE = [f"{name}, adaptive" for name in ESTIMATORS]
OLDER = "--xla_cpu_use_fusion_emitters=false"


def call(name: str, package: str):
    """The call as a function of the matrix, by ours, traceax 1.0.2 or matfree."""
    import jax
    import jax.numpy as jnp
    import lineax as lx

    key = jax.random.key(1)
    if package == "matfree":
        from matfree import decomp, funm, stochtrace

        steps = decomp.tridiag_sym(NUM_STEPS, reortho="full")
        form = funm.monte_carlo_funm_sym_logdet(steps)
        sampler = stochtrace.sampler_signs(jnp.ones(N), num=NUM_STEPS)
        estimate = stochtrace.estimator_monte_carlo(form, sampler)
        return lambda matrix: estimate(lambda v, matrix: matrix @ v, key, matrix)

    import traceax as tx

    def value(matrix):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        if name in LOGDETS:
            settings = {"k": NUM_STEPS, "num_steps": NUM_STEPS, "throw": LOGDETS[name]}
            return tx.logdet(operator, key=key, **settings).value
        estimator = getattr(tx, ESTIMATORS[name.removesuffix(", adaptive")])()
        if package == "released":
            return estimator.estimate(key, operator, K)[0]
        k = tx.Adaptive(rtol=0.1, max_k=128) if name in ADAPTIVE else K
        return tx.trace(operator, estimator, k=k, key=key, throw=False).value

    return value


def first_call(name: str, package: str, kind: str) -> None:
    """Print the CPU seconds of the first call, in this process."""
    import jax

    value = call(name, package)
    x = jax.random.normal(jax.random.key(0), (N, N))
    matrix = x @ x.T / N
    compiled = jax.jit(jax.grad(value) if kind == "gradient" else value)
    start = time.process_time()
    jax.block_until_ready(compiled(matrix))
    print(time.process_time() - start)


def in_process(name: str, package: str, kind: str, flags: str) -> float:
    folder = RELEASED if package == "released" else RELEASED.parent
    command = [sys.executable, __file__, name, package, kind]
    environment = os.environ | {"PYTHONPATH": str(folder), "XLA_FLAGS": flags}
    output = subprocess.check_output(command, env=environment, text=True)
    return float(output)


def least(calls: list[tuple[str, str, str, str]]) -> list[float]:
    """Of each of the calls, which take turns."""
    rounds = [[in_process(*call) for call in calls] for _ in range(3)]
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def main() -> None:
    print("| first call, CPU seconds | ours | theirs | ratio | to Hutchinson | older |")
    print("|---|---|---|---|---|---|")
    for kind in ("value", "gradient"):
        hutchinsons = ("Hutchinson", "released", kind, "")
        for name in [*ESTIMATORS, *LOGDETS, *ADAPTIVE]:
            calls = [(name, "ours", kind, flags) for flags in ("", OLDER)]
            calls.append(hutchinsons)
            if name not in ADAPTIVE:
                peer = "matfree" if name in LOGDETS else "released"
                calls.append((name, peer, kind, ""))
            ours, older, hutchinson, *others = least(calls)
            theirs, ratio = "-", "-"
            for seconds in others:
                theirs, ratio = f"{seconds:.2f}", f"{ours / seconds:.2f}"
            label = name if kind == "value" else f"{name}, gradient"
            cells = [label, f"{ours:.2f}", theirs, ratio, f"{ours / hutchinson:.2f}"]
            print(f"| {' | '.join(cells)} | {older:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        first_call(*sys.argv[1:])
    else:
        main()
