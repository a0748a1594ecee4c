"""Memory and communication on 1 to 4096 devices.

    python benchmarks/scaling.py [devices ...]

Counted in compiled programs that are not run. A float32 operator of n = 2^20 with the
diagonal as its only array and two neighbours in each row, on simulated CPU devices, as
many as there are probes or rows to split. Bytes are those that a device sends in the
bandwidth-optimal (ring) form of each collective. Those of a loop count as many times as
it goes round, or once where this depends on the data: rounds of an adaptive budget,
second passes of Gram-Schmidt. Memory is what XLA:CPU sets aside for the program besides
its arguments.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import lineax as lx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import traceax as tx


N = 2**20
DEVICES = (1, 8, 64, 512, 4096)
LAYOUTS = ("probes", "rows")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s64": 8, "u64": 8, "f64": 8}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})")
MESH = re.compile(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}")
CALLED = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def trace(estimator, k):
    def call(operator, **settings):
        return tx.trace(operator, estimator, k=k, **settings)

    return call


def logdet(k):
    def call(operator, **settings):
        return tx.logdet(operator, k=k, num_steps=20, **settings)

    return call


def adaptive(operator, **settings):
    budget = tx.Adaptive(rtol=1e-3, max_k=512, round_size=64)
    return tx.trace(operator, tx.XTraceEstimator(), k=budget, **settings)


CALLS = {
    "Hutchinson, k = 4096": trace(tx.HutchinsonEstimator(), 4096),
    "Log-determinant by SLQ, k = 4096, 20 steps": logdet(4096),
    "Hutch++, k = 512": trace(tx.HutchPlusPlusEstimator(), 512),
    "XTrace, k = 512": trace(tx.XTraceEstimator(), 512),
    "XNysTrace, k = 512": trace(tx.XNysTraceEstimator(), 512),
    "XTrace, adaptive, k up to 512, one round of 64": adaptive,
}


def lowered(call, layout, *, gradient=False):
    """A call on all devices, which split its probes or the rows of its vectors."""
    shape = [jax.device_count() if name == layout else 1 for name in LAYOUTS]
    mesh = jax.make_mesh(tuple(shape), LAYOUTS, axis_types=(AxisType.Auto,) * 2)
    execution = tx.Sharded(mesh, rows="rows" if layout == "rows" else None)

    def run(diagonal, key):
        def mv(v):
            return diagonal * v - jnp.roll(v, 1) - jnp.roll(v, -1)

        structure = jax.ShapeDtypeStruct((N,), jnp.float32)
        operator = lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)
        solution = call(operator, key=key, execution=execution, throw=False)
        return solution.value, solution.std_err

    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    diagonal = jax.ShapeDtypeStruct((N,), jnp.float32, sharding=sharding)
    fn = jax.value_and_grad(run, has_aux=True) if gradient else run
    return jax.jit(fn).lower(diagonal, jax.random.key(0))


def group_size(line):
    """How many devices take part in a collective together."""
    if match := MESH.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return prod(int(part or sizes[name]) for name, part in axes)
    size, members = GROUPS.search(line).groups()
    return int(size) if size else len(members.split(","))


def sent(line, kind, shapes):
    """Bytes that one device sends for a collective."""
    size = sum(
        BYTES.get(dtype, 4) * prod(int(x) for x in dims.split(",") if x)
        for dtype, dims in ARRAY.findall(shapes)
    )
    if kind == "collective-permute":
        return size
    group = group_size(line)
    if kind == "reduce-scatter":
        size *= group
    return size * (group - 1) / group * (2 if kind == "all-reduce" else 1)


def communication(text):
    """Of a partitioned program: how many collectives of each kind a device takes part in,
    and under "bytes" how much it sends."""
    lines, entry = {}, None
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
            lines[name], entry = [], name if match[1] else entry
        elif line.startswith(" "):
            lines[name].append(line)
    totals = {}

    def total(name):
        if name not in totals:
            totals[name] = found = Counter()
            for line in lines[name]:
                if match := COLLECTIVE.search(line):
                    size = sent(line, match[2], match[1])
                    found += Counter({match[2]: int(size > 0), "bytes": size})
                times = int(match[1]) if (match := TRIPS.search(line)) else 1
                for one, several in CALLED.findall(line):
                    for called in re.findall(r"[\w.-]+", one or several):
                        for kind, number in total(called).items():
                            found[kind] += times * number
            totals[name] = found
        return totals[name]

    return total(entry)


def measure(call, layout, **options):
    compiled = lowered(call, layout, **options).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return communication(compiled.as_text()), memory


def measure_all():
    """For as many devices as this process has, a line of JSON for each case. More than
    2048 on one host need collectives that could go between processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    for name, call in CALLS.items():
        for layout in LAYOUTS:
            print(json.dumps([name, layout, *measure(call, layout)]), flush=True)


def readable(size):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return None


def main(devices):
    found = {}
    for count in devices:
        flags = f"--xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, __file__, "measure"],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in done.stdout.splitlines():
            name, layout, told, memory = json.loads(line)
            found[name, layout, count] = told, memory
    for name in CALLS:
        print(f"\n**{name}**\n")
        print("| devices |", end="")
        for layout in LAYOUTS:
            print(f" split by {layout}: collectives | bytes sent | memory |", end="")
        print("\n|---" + "|---" * 3 * len(LAYOUTS) + "|")
        for count in devices:
            print(f"| {count} |", end="")
            for layout in LAYOUTS:
                told, memory = found[name, layout, count]
                size = told.pop("bytes", 0)
                kinds = [f"{number} {kind}" for kind, number in sorted(told.items())]
                row = ", ".join(kinds) or "none", readable(size), readable(memory)
                print(f" {' | '.join(row)} |", end="")
            print()


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure_all()
    else:
        main([int(x) for x in sys.argv[1:]] or DEVICES)
