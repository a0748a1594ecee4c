# %% [markdown]
# # Run one estimate on many devices
#
# Probes are independent, so devices can share them. This tutorial runs the same
# estimate on one to eight devices and on two processes, checks that value, error bar
# and derivative stay the same, and lists what the devices communicate.
#
# No accelerator is needed: a flag makes JAX treat the CPU as eight devices. It must be
# set before JAX starts. On a machine with eight accelerators leave out the first two
# settings below. Nothing else changes; the two processes at the end stay on the CPU.

# %%
import os


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_ENABLE_X64"] = "1"

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes

import traceax as tx


print(f"{len(tx.devices())} devices, the first is {tx.devices()[0]}")

# %% [markdown]
# ## The problem
#
# We estimate the log-determinant of a kernel matrix and its derivative in the length
# scale $\ell$, which every step of training a Gaussian process needs. The data are 442
# patients with ten measurements each. The matrix is small enough for the exact answer.

# %%
patients, _ = load_diabetes(return_X_y=True, scaled=False)
patients = jnp.asarray((patients - patients.mean(0)) / patients.std(0))
square = jnp.sum((patients[:, None] - patients) ** 2, axis=-1)
n, key = len(patients), jax.random.key(0)


def kernel(length_scale):
    return jnp.exp(-square / (2 * length_scale**2)) + 0.1 * jnp.eye(n)


def exact(length_scale):
    return jnp.linalg.slogdet(kernel(length_scale))[1]


print(f"log-determinant {exact(3.0):.2f}, its derivative {jax.grad(exact)(3.0):.2f}")

# %% [markdown]
# ## A mesh, and which device has which probe
#
# `tx.probe_mesh` makes a mesh with one axis, of all devices or of those that you pass.
# `tx.Sharded` shares the probes along that axis. Pass it as `execution` to any function
# of the library.

# %%
mesh = tx.probe_mesh()
operator = lx.MatrixLinearOperator(kernel(3.0), lx.positive_semidefinite_tag)
sharded = tx.Sharded(mesh)
solution = tx.logdet(operator, k=40, num_steps=20, key=key, execution=sharded)
samples = solution.stats["samples"]
print(mesh)
print(f"{solution.value:.2f} +- {solution.std_err:.2f}")
print(samples.sharding)

# %% [markdown]
# Each device drew its own five probes and ran Lanczos for them, and the samples have
# stayed there. The value is the mean over all devices.

# %%
figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
for shard in samples.addressable_shards:
    (probes,) = shard.index
    ax.plot(np.arange(n)[probes], shard.data, "o", label=f"device {shard.device.id}")
low, high = solution.value - solution.std_err, solution.value + solution.std_err
ax.axhspan(low, high, color="0.85", label="value ± standard error")
ax.axhline(exact(3.0), color="k", lw=1, ls="--", label="exact")
ax.set(xlabel="probe", ylabel="sample of the log-determinant")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## The same answer on any number of devices
#
# Probe $i$ is drawn from `jax.random.fold_in(key, i)`, whichever device draws it, so
# the probes do not depend on the mesh. Only the order of sums does. With 42 probes
# neither four nor eight devices have equal shares: each device then makes as many as
# the largest share, and the surplus does not count.


# %%
def log_det_on(num_devices):
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:num_devices]))

    def log_det(length_scale):
        matrix = kernel(length_scale)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        settings = {"k": 42, "num_steps": 20, "key": key, "execution": execution}
        solution = tx.logdet(operator, **settings)
        return solution.value, solution.std_err

    return jax.jit(jax.value_and_grad(log_det, has_aux=True))


COUNTS = (1, 2, 4, 8)
runs = {count: log_det_on(count) for count in COUNTS}
table = []
for count, run in runs.items():
    (value, std_err), slope = run(3.0)
    table.append((value, std_err, slope))
    print(f"{count} devices: {value:.10f} +- {std_err:.10f}, derivative {slope:.10f}")
table = np.array(table)
np.testing.assert_allclose(table, table[:1].repeat(4, axis=0), rtol=1e-10)

# %% [markdown]
# The difference from one device, compared with the error of the estimate:

# %%
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
difference = abs(table[1:] / table[0] - 1)
names = ("value", "standard error", "derivative")
for name, each, marker in zip(names, difference.T, "os^", strict=True):
    # A difference of zero is drawn at half the spacing of floating-point numbers.
    floor = np.finfo(float).eps / 2
    ax.semilogy(COUNTS[1:], np.maximum(each, floor), marker + "-", label=name)
statistical = abs(table[0, 1] / table[0, 0])
ax.axhline(statistical, color="k", lw=1, ls="--", label="standard error / value")
ax.set(xlabel="devices", ylabel="relative difference to one device")
ax.set(xticks=COUNTS[1:], ylim=(1e-17, 1))
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# ## What is communicated
#
# We compile estimates for operators of different sizes without running them, and list
# the collective operations in the compiled program with their shapes.


# %%
def communicated(run, size):
    """Each collective operation with its shapes, of a function of a matrix."""
    matrix = jax.ShapeDtypeStruct((size, size), float)
    text = jax.jit(run).lower(matrix).compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf"= (.*) ({kinds})\(", text)
    shapes = [(kind, ", ".join(re.findall(r"\[[\d,]*\]", left))) for left, kind in found]
    return "; ".join(f"{kind} {shape}" for kind, shape in shapes)


def estimate(method, k, num_devices):
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:num_devices]))
    settings = {"k": k, "key": key, "execution": execution, "throw": False}

    def run(matrix):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        if method == "SLQ":
            return tx.logdet(operator, num_steps=20, **settings).value
        return tx.trace(operator, getattr(tx, f"{method}Estimator")(), **settings).value

    return run


# %%
print("             n     k  devices")
for method, size, k, num_devices in (
    ("Hutchinson", 256, 64, 8),
    ("Hutchinson", 512, 64, 8),
    ("Hutchinson", 256, 128, 8),
    ("Hutchinson", 256, 64, 2),
    ("SLQ", 256, 64, 8),
    ("SLQ", 512, 128, 8),
    ("XTrace", 256, 64, 8),
):
    found = communicated(estimate(method, k, num_devices), size)
    print(f"{method:10s} {size:4d} {k:5d} {num_devices:8d}  {found}")
found = communicated(jax.grad(estimate("Hutchinson", 64, 8)), 256)
print("derivative of Hutchinson, n = 256:", found)

# %% [markdown]
# Estimators with independent samples, Hutchinson and SLQ, need one all-reduce of a
# table with a row for each device: the number of its samples, their mean, spread and
# skewness, and for SLQ a few more numbers. Its size depends neither on $n$ nor on $k$.
# The derivative needs one more, of the size of the operator's array, because each
# device has the derivative from its own probes.
#
# XTrace works on all products together, so it gathers them in two passes of
# $n \times k/2$ numbers each. That pays where a product costs more than moving a
# vector.
#
# ## How much faster?
#
# Not at all here: the eight devices are one CPU, whose cores a single device uses too.

# %%
print("devices  seconds, least of 5")
for count, run in runs.items():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(3.0))
        seconds.append(time.perf_counter() - start)
    print(f"{count:7d} {min(seconds):8.3f}")

# %% [markdown]
# On real devices, each with its own memory and arithmetic, each of $d$ devices makes
# $1/d$ of the products and waits for one message of a few hundred bytes. Some work is
# repeated on every device and does not shrink: making the operator, here the kernel
# matrix, and for sketches the factorisations. [Scaling out](../docs/scaling.md) has
# measurements.
#
# ## Two processes
#
# On a cluster there is one process per host or accelerator. All run the same program,
# and `tx.probe_mesh()` has the devices of all of them. The program is
# `examples/multihost.py`, with a larger kernel matrix; apart from
# `jax.distributed.initialize` it does not depend on the number of processes. We start
# it as one process with four devices, then as two processes with two devices each,
# which talk over a port of this machine.

# %%
here = Path(globals().get("__file__", ".")).resolve()
places = [each / "examples" / "multihost.py" for each in (here, *here.parents)]
program = next(place for place in places if place.exists())


def run_program(num_processes):
    """A match of what the processes print, with four devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={4 // num_processes}"
    command = [sys.executable, str(program), address, str(num_processes)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    settings["env"] = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    group = [
        subprocess.Popen([*command, str(index)], **settings)
        for index in range(num_processes)
    ]
    try:
        outputs = [each.communicate(timeout=200) for each in group]
    finally:
        for each in group:
            each.kill()
    errors = [
        err for each, (_, err) in zip(group, outputs, strict=True) if each.returncode
    ]
    assert not errors, "\n".join(errors)
    # The first process prints two lines, after messages about the connection.
    return re.search(r"\d+ processes, .*\n(.*)", outputs[0][0])


# %%
numbers = []
for num_processes in (1, 2):
    printed = run_program(num_processes)
    print(printed[0])
    numbers.append([float(each) for each in re.findall(r"-?\d+\.?\d*", printed[1])])
one, two = numbers
# The last number is a time.
np.testing.assert_allclose(one[:-1], two[:-1], rtol=1e-6)

# %% [markdown]
# Both print the same estimate, as the assertion checks. The times again are those of
# one shared CPU.
#
# ## What to remember
#
# - `execution=tx.Sharded(tx.probe_mesh())` changes where work is done, not the answer:
#   the difference from one device is rounding, at least ten orders of magnitude below
#   the error bar.
# - Independent samples cost one small all-reduce, whatever $n$ and $k$. Sketches gather
#   their products.
# - Choose `k` as a multiple of the number of devices, or some of their work is wasted.
# - Every device has the whole operator. If the operator or a vector is too large for
#   one, [split it over a second axis of the mesh](../docs/scaling.md).
