import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, get_abstract_mesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PyTree, Shaped

from .._core.checks import plain_integer
from .._core.flat import FlatOperator
from .._core.jax_interfaces import ClosedJaxpr, Jaxpr, mesh_of, Primitive
from .._numerics.dense import factorising
from .devices import devices
from .execution import AbstractExecution, Local


def _auto(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes: we trace products without shardings in their types."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`mesh` must be a `jax.sharding.Mesh`. Found {mesh!r}. Make one by "
            "`traceax.probe_mesh()` or `jax.make_mesh((8,), ('probes',))`."
        )
    return Mesh(mesh.devices, mesh.axis_names, (AxisType.Auto,) * mesh.devices.ndim)


def _check_auto(operator: FlatOperator) -> None:
    arrays = jax.tree.leaves(eqx.filter(operator, eqx.is_array))
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    if any(mesh.explicit_axes for mesh in (*meshes, get_abstract_mesh())):
        raise ValueError(
            "`traceax.Sharded` needs meshes with Auto axes. Found Explicit ones, in "
            "`jax.set_mesh` or in an array of `operator`. Make the mesh as "
            "`jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * "
            "len(names))`."
        )


def _jaxprs(x: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """A jaxpr and those inside it."""
    if isinstance(x, ClosedJaxpr | Jaxpr):
        yield x
        for equation in x.eqns:
            for each in jax.tree.leaves(equation.params):
                yield from _jaxprs(each)


def _solves(product: ClosedJaxpr) -> bool:
    """Whether there is a `lineax.linear_solve` in a product. Under `vmap` it is a
    parameter of another primitive."""
    return any(
        isinstance(each, Primitive) and each.name == "linear_solve"
        for jaxpr in _jaxprs(product)
        for equation in jaxpr.eqns
        for each in (equation.primitive, *jax.tree.leaves(equation.params))
    )


def _names_a_mesh(product: ClosedJaxpr) -> bool:
    """Whether a product was traced for a mesh: that of `jax.set_mesh`, or in a function
    inside it, such as the body of a loop, that of arrays that are placed on one."""
    equations, *inner = [jaxpr.eqns for jaxpr in _jaxprs(product)]
    inner = [equation for each in inner for equation in each]
    types = [variable.aval for equation in inner for variable in equation.outvars]
    shardings = [getattr(type_, "sharding", None) for type_ in types]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    meshes += [mesh_of(equation) for equation in (*equations, *inner)]
    return any(mesh.are_all_axes_auto for mesh in meshes if not mesh.empty)


class Sharded(AbstractExecution):
    """Run on a mesh of devices, each with its own share of the probes.

    Each device applies the operator to `ceil(k / d)` probes, d the size of the axis, in
    blocks as [`traceax.Local`][] does. The operator's arrays are copied to every
    device, except that arrays which are sharded over other axes of the mesh stay so.
    Answers on different meshes differ by rounding alone: probe `i` is always drawn from
    `jax.random.fold_in(key, i)`.

    - Estimators with independent samples (Hutchinson, SLQ) communicate once for a value,
        a few numbers from each device, and once for each array of the operator for a
        derivative. `stats` with an entry for each probe stay sharded over the probes; if
        d does not divide k they are gathered.
    - Sketch estimators (Hutch++, XTrace, ...) gather their products, `n m` numbers a
        pass, and each device does the rest of the work.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 50))
        operator = lx.MatrixLinearOperator(x @ x.T)
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(1)
        mesh = jax.make_mesh((jax.device_count(),), ("probes",))
        execution = tx.Sharded(mesh)
        solution = tx.trace(operator, estimator, k=64, key=key, execution=execution)
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `mesh`: a `jax.sharding.Mesh`, of devices of one or of many processes. Explicit axes
        are taken as Auto ones; arrays placed on a mesh with Explicit axes are refused.
        Pickled, it is restored from the devices with the same platforms and numbers.
    - `axis`: the name of the mesh axis over which probes are split.
    - `block_size`: probe vectors per block and device, as for [`traceax.Local`][]. Where
        vectors are split by `rows`, n counts the rows of one device.
    - `rows`: the name of another axis, over which vectors of length n are split, where
        they are too large for one device. Tall matrices are then factorised from their
        Gram matrices, so that only small ones are communicated.
    """

    mesh: Mesh = eqx.field(static=True, converter=_auto)
    axis: str = eqx.field(static=True, default="probes")
    block_size: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    rows: str | None = eqx.field(static=True, default=None)
    can_raise: ClassVar[bool] = False

    def __check_init__(self):
        names = self.mesh.axis_names
        for name, value in (("axis", self.axis), ("rows", self.rows)):
            if value not in (names if name == "axis" else (*names, None)):
                raise ValueError(
                    f"`{name}` must name an axis of `mesh`. Found {value!r}, and a mesh "
                    f"with the axes {names}."
                )
        if self.rows == self.axis:
            raise ValueError(
                f"`rows` must be another axis than `axis`. Found {self.rows!r} for both."
            )
        Local(self.block_size)

    def __reduce__(self) -> tuple[Callable, tuple]:
        """For `pickle`, which devices refuse: by their platforms and numbers."""
        mesh, settings = self.mesh, (self.axis, self.block_size, self.rows)
        numbers = [(each.platform, each.id) for each in mesh.devices.flat]
        return _restored, (numbers, mesh.devices.shape, mesh.axis_names, *settings)

    def map_reduce(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        reduce: Callable[[PyTree, Bool[Array, " p"]], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> tuple[PyTree[Shaped[Array, "m ..."]], PyTree[Shaped[Array, "d ..."]]]:
        _check_auto(operator)
        count, devices = jax.tree.leaves(xs)[0].shape[0], self.mesh.shape[self.axis]
        local, xs = Local(self._block(operator.size, width)), self._gather(xs)
        whole = operator
        if self.rows is not None:
            by_rows = _ByRows(operator.fn, self.mesh, self.rows)
            operator = dataclasses.replace(operator, fn=by_rows)
        if devices == 1:
            # Beside other axes, XLA does not compile the sum of a derivative over one.
            return local.map_reduce(fn, reduce, operator, xs, width)
        padded = -(-count // devices) * devices
        last = jnp.minimum(jnp.arange(padded), count - 1)
        if padded > count:
            xs = jax.tree.map(lambda x: x[last], xs)
        vector = jax.ShapeDtypeStruct((operator.size,), operator.dtype)
        product = jax.make_jaxpr(whole.mv)(vector)
        automatic = _solves(product) or _names_a_mesh(product)
        run = self._automatic if automatic else self._manual
        arrays, static = eqx.partition(operator, eqx.is_array)

        def share(arrays, xs, valid):
            outs = local.map(fn, eqx.combine(arrays, static), xs, width)
            return outs, reduce(jax.lax.stop_gradient(outs), valid)

        outs, parts = run(share, arrays, xs, jnp.arange(padded) < count)
        if padded > count:
            outs = jax.tree.map(lambda x: x[:count], outs)
        return outs, parts

    def _manual(
        self, share: Callable, arrays: PyTree, xs: PyTree, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """`share` on each device; its second results are gathered in a table on all
        devices."""
        devices, split = self.mesh.shape[self.axis], PartitionSpec(self.axis)

        def one(arrays, xs, valid, row):
            # For `check_vma`: cast here once, or a derivative is summed over devices
            # wherever they are used.
            arrays = jax.lax.pcast(arrays, self.axis, to="varying")
            outs, part = share(arrays, xs, valid)
            part, unravel = ravel_pytree(part)
            table = jnp.zeros_like(part, shape=(devices, part.size)).at[row].set(part)
            return outs, jax.vmap(unravel)(jax.lax.psum(table, self.axis))

        # Without `check_vma`: JAX refuses literals and loops in a product that was traced
        # outside, which are right. The tests turn it on for operators that have neither.
        return jax.shard_map(
            one,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), split, split, split),
            out_specs=(split, PartitionSpec()),
            axis_names={self.axis},
            check_vma=False,
        )(arrays, xs, valid, jnp.arange(devices))

    def _automatic(
        self, share: Callable, arrays: PyTree, xs: PyTree, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """The same by the compiler, from a batch of shares that is split over devices:
        for products whose types do not fit those of `shard_map`. A `lineax.linear_solve`
        compares the types of vectors with those of its operator, and functions inside a
        product keep theirs, with the mesh of arrays that are placed on one."""
        devices = self.mesh.shape[self.axis]

        def spread(x):
            rest = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
            split = NamedSharding(self.mesh, PartitionSpec(self.axis, *rest))
            return jax.lax.with_sharding_constraint(x, split)

        # One copy of the arrays for each device, or a derivative is summed over devices
        # wherever they are used.
        arrays = jax.tree.map(
            lambda x: spread(jnp.broadcast_to(x, (devices, *x.shape))), arrays
        )
        xs, valid = jax.tree.map(
            lambda x: spread(x.reshape(devices, -1, *x.shape[1:])), (xs, valid)
        )
        batched = jax.vmap(share, spmd_axis_name=self.axis)
        outs, parts = batched(arrays, xs, valid)
        outs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return outs, jax.lax.with_sharding_constraint(parts, whole)

    def map(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> PyTree[Shaped[Array, "m ..."]]:
        return self._gather(super().map(fn, operator, xs, width))

    def chunk(self, n: int, width: int = 1) -> int:
        return self.mesh.shape[self.axis] * self._block(n, width)

    def _block(self, n: int, width: int) -> int:
        """Of vectors that are split, a device holds its rows of more at a time."""
        rows = 1 if self.rows is None else self.mesh.shape[self.rows]
        return Local(self.block_size).chunk(-(-n // rows), width)

    def factorising(self) -> contextlib.AbstractContextManager[None]:
        return factorising(by_rows=self.rows is not None)

    def _gather(self, xs: PyTree[Array]) -> PyTree[Array]:
        """Results of all probes on each device, where vectors are whole or, axis 1, split
        by rows. Without it the compiler spreads later work in ways of its own."""
        whole, by_rows = PartitionSpec(), PartitionSpec(None, self.rows)
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, by_rows if x.ndim == 2 else whole)
            ),
            xs,
        )


def _restored(
    numbers: list[tuple[str, int]],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    *settings: Any,
) -> Sharded:
    known = {(each.platform, each.id): each for each in devices()}
    if missing := [number for number in numbers if number not in known]:
        raise ValueError(
            "A `traceax.Sharded` that was pickled needs the devices that it had. Found "
            f"none with the platform and number {missing[0]}. Make one by "
            "`traceax.Sharded(traceax.probe_mesh())`."
        )
    grid = np.asarray([known[number] for number in numbers]).reshape(shape)
    return Sharded(Mesh(grid, names), *settings)


Sharded.__init__.__doc__ = """**Arguments:**

- `mesh`: for example `traceax.probe_mesh()`.
- `axis`: default is `"probes"`.
- `block_size`: default is `None`.
- `rows`: default is `None`: vectors are whole on each device.

**Raises:**

- `TypeError`: `mesh` is not a mesh.
- `ValueError`: `axis` or `rows` is not an axis of it, or both are the same;
    `block_size` is not positive.
"""


class _ByRows(eqx.Module):
    """A product whose vectors are split over a mesh axis."""

    fn: Callable[[Array], Array]
    mesh: Mesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)

    def __call__(self, vector: Array) -> Array:
        # Inside `shard_map` the mesh is another one, without the axis of the probes.
        inside = get_abstract_mesh()
        mesh = self.mesh if inside.empty else inside
        split = NamedSharding(mesh, PartitionSpec(self.axis))
        vector = jax.lax.with_sharding_constraint(vector, split)
        return jax.lax.with_sharding_constraint(self.fn(vector), split)
