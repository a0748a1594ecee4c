"""Devices and meshes."""

import jax
import pytest
from jax.sharding import AxisType

import traceax as tx


def test_devices_of_a_mesh():
    device = jax.devices()[0]
    with pytest.raises(TypeError, match="`devices` must be a list of devices"):
        tx.probe_mesh(device)  # pyright: ignore
    with pytest.raises(ValueError, match="each device once"):
        tx.probe_mesh([device, device])
    assert tx.probe_mesh([device]).size == 1


def test_devices():
    assert tx.devices() == jax.devices()
    assert tx.devices("cpu") == jax.devices("cpu")
    with pytest.raises(ValueError, match=r"`backend` must.*'neuron'.*'cpu'"):
        tx.devices("neuron")


def test_default_device():
    device = jax.devices()[0]
    assert tx.default_device() is None
    for setting in (device, "cpu"):
        with jax.default_device(setting):
            assert tx.default_device() == device
    assert tx.default_device() is None


@pytest.mark.parametrize("devices", [None, "cpu", "list"])
def test_probe_mesh(devices):
    devices = jax.devices() if devices == "list" else devices
    mesh = tx.probe_mesh(devices, axis="p")
    assert mesh.axis_names == ("p",)
    assert mesh.axis_types == (AxisType.Auto,)
    assert list(mesh.devices) == jax.devices()
    assert tx.probe_mesh(devices).axis_names == ("probes",)


def test_probe_mesh_errors():
    with pytest.raises(ValueError, match="at least one device"):
        tx.probe_mesh([])
    with pytest.raises(ValueError, match=r"`devices` must.*'neuron'"):
        tx.probe_mesh("neuron")
