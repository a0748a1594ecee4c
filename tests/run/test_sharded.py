"""The arguments of `Sharded`, and what needs processes of its own: what
could wait forever, and more than one process. See also `test_meshes.py`,
`test_operators_on_meshes.py`, `test_collectives.py`, `test_rows.py` and
`test_stopping_on_meshes.py`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import traceax as tx


PROGRAMS = Path(__file__).parent.parent / "programs"


def environment(devices, **variables):
    count = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ['XLA_FLAGS']} {count}"  # of two counts the last one
    fixed = {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return os.environ | fixed | variables


def start(devices, *command, **variables):
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(devices, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes, seconds=300):
    """What they print. All are stopped if one takes too long."""
    outputs = []
    try:
        outputs.extend(each.communicate(timeout=seconds)[0] for each in processes)
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        printed = [process.communicate()[0] for process in processes]
        pytest.fail("\n".join(["it takes too long", *outputs, *printed]))
    assert all(each.returncode == 0 for each in processes), "\n".join(outputs)
    return outputs


# --- programs in processes of their own ---


def test_nothing_waits_forever():
    finish(start(8, PROGRAMS / "hang.py"))


def numbers(output, kind):
    lines = [x.split("|") for x in output.splitlines() if x.startswith(f"{kind}|")]
    return {name: [float.fromhex(x) for x in values] for _, name, *values in lines}


@pytest.mark.slow
def test_two_processes():
    """On one machine, each with two devices: the same as one process with four."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = PROGRAMS / "two_processes.py"
    (single,) = finish(start(4, program, "single"))
    both = [start(2, program, each, port) for each in ("0", "1")]
    first, second = finish(*both, seconds=240)
    assert len(numbers(single, "BITS")) == 5 + 4, single
    for kind in ("BITS", "ABOUT"):
        assert numbers(first, kind) == numbers(second, kind)
    assert numbers(first, "BITS") == numbers(single, "BITS")
    for name, values in numbers(single, "ABOUT").items():
        found = numbers(first, "ABOUT")[name]
        assert found == pytest.approx(values, rel=1e-13, abs=1e-14), name
    # Once for a round, not once for a process.
    told = [numbers(each, "TOLD")["callbacks"][0] for each in (single, first, second)]
    assert told[0] == told[1] + told[2] > 0, told


@pytest.mark.slow
def test_a_platform_that_does_not_start_is_left_out():
    program = "import traceax as tx; print([each.platform for each in tx.devices()])"
    command = start(3, "-c", program, JAX_PLATFORMS="cpu,tpu")
    (output,) = finish(command)
    assert output.splitlines()[-1] == str(["cpu"] * 3)


# --- arguments ---


def mesh(*names):
    devices = np.asarray(jax.devices()[:1]).reshape((1,) * len(names))
    return Mesh(devices, names)


def test_explicit_axes_are_taken_as_auto():
    explicit = jax.make_mesh((1,), ("probes",), axis_types=(AxisType.Explicit,))
    assert tx.Sharded(explicit).mesh.axis_types == (AxisType.Auto,)
    assert tx.Sharded(explicit) == tx.Sharded(tx.probe_mesh(jax.devices()[:1]))


def test_mesh_must_be_a_mesh(monkeypatch):
    """Without the run-time checks of annotations, which would come before ours."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    message = r"`mesh` must be a `jax\.sharding\.Mesh`\. Found .*traceax\.probe_mesh\(\)"
    for value in (None, "cpu", jax.devices()):
        with pytest.raises(TypeError, match=f"(?s){message}"):
            tx.Sharded(value)


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (("probes",), {"axis": "p"}, "`axis` must name an axis.*'p'"),
        (("x",), {}, "`axis` must name an axis.*'probes'"),
        (("probes",), {"rows": "rows"}, "`rows` must name an axis.*'rows'"),
        (("probes", "rows"), {"rows": "probes"}, "another axis than `axis`"),
        (("probes",), {"block_size": 0}, "`block_size` must be a positive"),
        (("probes",), {"block_size": True}, "`block_size` must be a positive"),
    ],
)
def test_arguments_are_checked(names, arguments, message):
    with pytest.raises(ValueError, match=message):
        tx.Sharded(mesh(*names), **arguments)


def test_failures_inside_jit_are_nan():
    """A program on several devices must not raise: see "Scaling out"."""
    execution = tx.Sharded(tx.probe_mesh(jax.devices()[:1]))

    def trace(matrix):
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        estimator, key = tx.XNysTraceEstimator(), jax.random.key(0)
        return tx.trace(operator, estimator, k=8, key=key, execution=execution)

    eye = jnp.eye(20)
    assert jnp.allclose(jax.jit(trace)(eye).value, 20)
    failed = jax.jit(trace)(-eye)
    assert jnp.isnan(failed.value)
    assert failed.result == tx.RESULTS.not_semidefinite
    with pytest.raises(eqx.EquinoxRuntimeError, match="wrong sign"):
        trace(-eye)
