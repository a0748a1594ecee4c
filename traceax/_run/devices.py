"""The devices that JAX sees, and meshes of them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .._core.jax_interfaces import backends


def devices(
    backend: str | None = None,
) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Every device that JAX can see, of all processes.

    !!! Example

        ```python
        import traceax as tx

        for device in tx.devices():
            print(device.platform, device.id, device.process_index)
        ```

    **Arguments:**

    - `backend`: a platform, such as `"cpu"`, `"gpu"`, `"cuda"` or `"tpu"`. `None` takes
        the devices of all backends, each device once, and those of the default backend
        first. (`jax.devices()` lists the default backend's devices only.)

    **Returns:**

    A list of `jax.Device`. It leaves out a backend that is installed but does not start,
    and is empty if JAX refuses to start any.

    **Raises:**

    `ValueError` if there is no such backend, or if it does not start.
    """
    if backend is not None:
        return _devices_of("backend", backend)
    listed = []
    with contextlib.suppress(RuntimeError):
        # The first call starts all backends. It raises if `JAX_PLATFORMS` names one that
        # does not start; a second call then has those that did.
        backends()
    with contextlib.suppress(RuntimeError):
        for platform in (None, *backends()):
            listed += [each for each in jax.devices(platform) if each not in listed]
    return listed


def _devices_of(argument: str, platform: str | None) -> list[Any]:
    """The devices of one platform, which the user passed as `argument`."""
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        platforms = sorted({each.platform for each in devices()})
        raise ValueError(
            f"`{argument}` must be a platform that starts here. Found {platform!r}, and "
            f"the platforms {platforms}. JAX says: {error}"
        ) from error


def default_device() -> jax.Device | None:  # pyright: ignore[reportInvalidTypeForm]
    """The device that `jax.default_device` sets. JAX places new arrays there, and runs
    computations there whose arguments are on no other device.

    !!! Example

        ```python
        import jax
        import traceax as tx

        with jax.default_device(tx.devices("cpu")[0]):
            print(tx.default_device().platform)  # cpu
        ```

    **Returns:**

    A `jax.Device`, or `None` if no default is set. JAX then uses the first local device
    of the default backend.
    """
    device = jax.config.jax_default_device  # pyright: ignore
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def probe_mesh(devices: str | Sequence[Any] | None = None, axis: str = "probes") -> Mesh:
    """A mesh with one axis, for [`traceax.Sharded`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.MatrixLinearOperator(jnp.ones((500, 500)) + jnp.eye(500))
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(0)
        execution = tx.Sharded(tx.probe_mesh())
        solution = tx.trace(operator, estimator, k=64, key=key, execution=execution)
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `devices`: a list of devices, or the name of a platform for all of its devices.
        `None` takes the devices of the default backend, of all processes.
    - `axis`: the name of the axis.

    **Returns:**

    A `jax.sharding.Mesh` of shape `(len(devices),)`, whose axis has the type Auto.

    **Raises:**

    `ValueError` if there are no such devices, or if one is listed twice. `TypeError` if
    `devices` is something else, such as a single device or a number.
    """
    if not isinstance(devices, Sequence | np.ndarray | None):
        raise TypeError(
            "`devices` must be a list of devices, a platform or None. Found "
            f"{devices!r}. Pass, for example, `jax.devices()[:2]`."
        )
    if devices is None or isinstance(devices, str):
        devices = _devices_of("devices", devices)
    if len(devices) == 0:
        raise ValueError("`devices` must have at least one device. Found none.")
    grid = np.asarray(devices)
    if len(set(grid.flat)) < grid.size:
        raise ValueError(f"`devices` must have each device once. Found {devices}.")
    return Mesh(grid, (axis,), (AxisType.Auto,))
