"""Cost, gain and communication of `Sharded`.

    python benchmarks/sharded.py

1. One device: its time over that of `Local`, in one process, interleaved.
2. The speed-up of two processes on two cores, one each, over one process on one core
   (needs `taskset`).
3. Bytes that each device sends to an all-reduce, from the compiled program, which is not
   run, for 2 to 512 simulated devices.
"""

import os
import re
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


NAMES = ("Hutchinson", "SLQ", "XTrace", "XNysTrace")
DTYPES = {"f32": 4, "f64": 8, "pred": 1, "s32": 4}


def estimate(name, n, k, execution):
    """A function of a matrix and a key."""

    def run(matrix, key):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        settings = {"k": k, "key": key, "execution": execution, "throw": False}
        if name == "SLQ":
            return tx.logdet(operator, num_steps=20, **settings).value
        estimator = getattr(tx, f"{name}Estimator")()
        return tx.trace(operator, estimator, **settings).value

    def matrix_of(key):
        factor = jax.random.normal(key, (n, n))
        return factor @ factor.T / n + jnp.eye(n)

    return jax.jit(run), jax.jit(matrix_of)


def overhead():
    cells = []
    for name in NAMES:
        executions = (tx.Local(), tx.Sharded(tx.probe_mesh(jax.devices()[:1])))
        runs = [estimate(name, 2000, 128, execution) for execution in executions]
        matrix = runs[0][1](jax.random.key(0))
        seconds = []
        for i in range(16):
            pair = []
            for run, _ in runs:
                start = time.perf_counter()
                jax.block_until_ready(run(matrix, jax.random.key(i)))
                pair.append(time.perf_counter() - start)
            seconds.append(pair)
        seconds = np.asarray(seconds[1:])
        ratio = seconds[:, 1] / seconds[:, 0]
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    label = "`Sharded` on one device over `Local`, n = 2000, k = 128"
    print(f"| {label} | {' | '.join(cells)} |", flush=True)


def worker(name, address, count, index):
    """One of `count` processes; the first prints the median seconds of a call."""
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    run, matrix_of = estimate(name, 3000, 256, tx.Sharded(tx.probe_mesh()))
    matrix, seconds = matrix_of(jax.random.key(0)), []
    for i in range(8):
        start = time.perf_counter()
        jax.block_until_ready(run(matrix, jax.random.key(i)))
        seconds.append(time.perf_counter() - start)
    if index == "0":
        print(np.median(seconds[1:]))


def processes():
    cells = []

    def start(name, count, index, port):
        command = ["taskset", "-c", str(index), sys.executable, __file__, "worker", name]
        command += [f"127.0.0.1:{port}", str(count), str(index)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    for name in ("Hutchinson", "SLQ"):
        seconds = []
        for count in (1, 2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            group = [start(name, count, index, port) for index in range(count)]
            outputs = [each.communicate()[0] for each in group]
            seconds.append(float(outputs[0].split()[-1]))
        one, two = seconds
        cells.append(f"{one / two:.2f}")
    label = "one process on one core over two on two, n = 3000, k = 256"
    print(f"| {label} | {' | '.join(cells)} | | |", flush=True)


def bytes_sent():
    """For as many devices as this process has."""
    mesh = tx.probe_mesh()
    for name in ("Hutchinson", "SLQ"):
        row = []
        for n, k in ((4096, 512), (4096, 2048), (8192, 512)):
            run, _ = estimate(name, n, k, tx.Sharded(mesh))
            matrix = jax.ShapeDtypeStruct((n, n), jnp.float32)
            text = run.lower(matrix, jax.random.key(0)).compile().as_text()
            pattern = r"= (\S+)\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-\w+)\("
            total = [
                DTYPES[kind] * int(np.prod([int(x) for x in shape.split(",") if x]))
                for kind, shape, _ in re.findall(pattern, text)
            ]
            row.append(f"{len(total)} x {sum(total)}")
        print(f"| {name}, {jax.device_count()} | {' | '.join(row)} |", flush=True)


def communication():
    sizes = ("4096, 512", "4096, 2048", "8192, 512")
    print("\n| all-reduces x bytes on devices; n, k |", " | ".join(sizes), "|")
    print("|---" * 4 + "|", flush=True)
    for count in (2, 8, 64, 512):
        flags = f"--xla_force_host_platform_device_count={count}"
        subprocess.run(
            [sys.executable, __file__, "bytes"],
            env=os.environ | {"XLA_FLAGS": flags},
            check=True,
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", *arguments]:
            worker(*arguments)
        case ["bytes"]:
            bytes_sent()
        case _:
            print("| | " + " | ".join(NAMES) + " |")
            print("|---" * 5 + "|")
            overhead()
            processes()
            communication()
