"""The execution on a mesh of devices, each with its own share of the probes.

For d devices probe i belongs to device `i // ceil(k / d)`. Copies of the last probe fill
the last shares, and are masked. Each device computes its results and reduces them to a
summary `r_j`; device j writes `r_j` into row j of a table of zeros, and one `psum` of the
table gives all summaries to all devices:

    table = sum_j e_j r_j^T.

`shard_map` runs the shares wherever it can (`_manual`). Some matvecs do not trace inside
it, and become a batch of shares that the compiler splits (`_automatic`). See "shard_map"
in the developer documentation for what JAX supports.
"""

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
from .execution import AbstractExecution, default_block_size, Local


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes. On Explicit axes shardings are a part of the types of
    arrays, and a matvec that was traced without them would not fit."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`mesh` must be a `jax.sharding.Mesh`. Found {mesh!r}. Make one by "
            "`traceax.probe_mesh()` or `jax.make_mesh((8,), ('probes',))`."
        )
    return Mesh(mesh.devices, mesh.axis_names, (AxisType.Auto,) * mesh.devices.ndim)


def _check_no_explicit_axes(operator: FlatOperator) -> None:
    """Raise an error for arrays, or a context, on a mesh with Explicit axes."""
    arrays = jax.tree.leaves(eqx.filter(operator, eqx.is_array))
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    if any(mesh.explicit_axes for mesh in (*meshes, get_abstract_mesh())):
        raise ValueError(
            "`traceax.Sharded` needs meshes with Auto axes. Found Explicit ones, in "
            "`jax.set_mesh` or in an array of `operator`. Make the mesh as "
            "`jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * "
            "len(names))`."
        )


def _nested_jaxprs(parameter: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """A jaxpr and all jaxprs inside it; nothing for other parameters of equations."""
    if isinstance(parameter, ClosedJaxpr | Jaxpr):
        yield parameter
        for equation in parameter.eqns:
            for leaf in jax.tree.leaves(equation.params):
                yield from _nested_jaxprs(leaf)


def _contains_solve(matvec: ClosedJaxpr) -> bool:
    """Whether a matvec contains a `lineax.linear_solve`. Under `vmap` that is a parameter
    of another primitive."""
    return any(
        isinstance(candidate, Primitive) and candidate.name == "linear_solve"
        for jaxpr in _nested_jaxprs(matvec)
        for equation in jaxpr.eqns
        for candidate in (equation.primitive, *jax.tree.leaves(equation.params))
    )


def _depends_on_mesh(matvec: ClosedJaxpr) -> bool:
    """Whether a matvec was traced for a mesh: under `jax.set_mesh`, or with arrays on a
    mesh inside a function of its own, such as the body of a loop."""
    outer, *nested = [jaxpr.eqns for jaxpr in _nested_jaxprs(matvec)]
    inner = [equation for equations in nested for equation in equations]
    # `shard_map` gives new types to the outer equations only.
    types = [variable.aval for equation in inner for variable in equation.outvars]
    shardings = [getattr(type_, "sharding", None) for type_ in types]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    # Each equation remembers the mesh of `jax.set_mesh`, and is evaluated for it again.
    meshes += [mesh_of(equation) for equation in (*outer, *inner)]
    return any(mesh.are_all_axes_auto for mesh in meshes if not mesh.empty)


class Sharded(AbstractExecution):
    """Run on a mesh of devices, each with its own share of the probes.

    Each device applies the operator to `ceil(k / d)` probes in blocks, as
    [`traceax.Local`][] does; d is the size of the axis. The operator's arrays are copied
    to every device, but arrays that are sharded over other axes of the mesh stay sharded.
    Answers on different meshes differ by rounding alone: probe `i` is always drawn from
    `jax.random.fold_in(key, i)`.

    - Estimators with independent samples (Hutchinson, SLQ) communicate once for a value,
        with a few numbers from each device, and once for each array of the operator for a
        derivative. Entries of `stats` with one number for each probe stay sharded over
        the probes, or are gathered if d does not divide k.
    - Sketch estimators (Hutch++, XTrace, ...) gather their m matrix-vector products,
        `n m` numbers, in each pass. Each device then repeats the remaining work.

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

    - `mesh`: a `jax.sharding.Mesh`, with devices of one or of many processes. Explicit
        axes are treated as Auto axes; arrays on a mesh with Explicit axes are refused.
        A pickled mesh is restored from the devices with the same platforms and numbers.
    - `axis`: the name of the mesh axis over which probes are split.
    - `block_size`: probe vectors per block and device, as for [`traceax.Local`][]. If
        vectors are split by `rows`, n is the number of rows on one device.
    - `rows`: the name of another axis, over which vectors of length n are split, for
        vectors that are too large for one device. Tall matrices are then factorised by
        their Gram matrices, so that devices communicate small matrices only.
    """

    mesh: Mesh = eqx.field(static=True, converter=_with_auto_axes)
    axis: str = eqx.field(static=True, default="probes")
    block_size: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    rows: str | None = eqx.field(static=True, default=None)
    can_raise: ClassVar[bool] = False

    def __check_init__(self):
        names = self.mesh.axis_names
        choices = {"axis": names, "rows": (*names, None)}
        for name, value in (("axis", self.axis), ("rows", self.rows)):
            if value not in choices[name]:
                raise ValueError(
                    f"`{name}` must name an axis of `mesh`. Found {value!r}, and a mesh "
                    f"with the axes {names}."
                )
        if self.rows == self.axis:
            raise ValueError(
                f"`rows` must be another axis than `axis`. Found {self.rows!r} for both."
            )
        # It checks its `block_size`.
        Local(self.block_size)

    def __reduce__(self) -> tuple[Callable, tuple]:
        """For `pickle`: devices cannot be pickled, so their platforms and numbers are."""
        devices, names = self.mesh.devices, self.mesh.axis_names
        numbers = [(device.platform, device.id) for device in devices.flat]
        settings = self.axis, self.block_size, self.rows
        return _restore, (numbers, devices.shape, names, *settings)

    def map_reduce(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        reduce: Callable[[PyTree, Bool[Array, " p"]], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> tuple[PyTree[Shaped[Array, "m ..."]], PyTree[Shaped[Array, "d ..."]]]:
        _check_no_explicit_axes(operator)
        count, devices = jax.tree.leaves(xs)[0].shape[0], self.num_shares
        local, xs = Local(self._block(operator, width)), self._gather(xs)
        unsplit = operator
        if self.rows is not None:
            split_matvec = _RowSplitMatvec(operator.fn, mesh=self.mesh, axis=self.rows)
            operator = dataclasses.replace(operator, fn=split_matvec)
        if devices == 1:
            # No `shard_map`: with an axis of one device beside other axes, XLA does not
            # compile the sum of a derivative over that axis.
            return local.map_reduce(fn, reduce, operator, xs, width)
        padded = -(-count // devices) * devices
        last = jnp.minimum(jnp.arange(padded), count - 1)
        if padded > count:
            xs = jax.tree.map(lambda x: x[last], xs)
        vector = jax.ShapeDtypeStruct((operator.size,), operator.dtype)
        matvec = jax.make_jaxpr(unsplit.mv)(vector)
        automatic = _contains_solve(matvec) or _depends_on_mesh(matvec)
        run = self._automatic if automatic else self._manual
        # Arrays are arguments of a share, so that each device has a copy of its own,
        # whose derivatives are summed over devices once.
        arrays, static = eqx.partition(operator, eqx.is_array)

        def compute_share(arrays, xs, valid):
            outs = local.map(fn, eqx.combine(arrays, static), xs, width)
            return outs, reduce(jax.lax.stop_gradient(outs), valid)

        valid = jnp.arange(padded) < count
        outs, summaries = run(compute_share, arrays=arrays, xs=xs, valid=valid)
        if padded > count:
            outs = jax.tree.map(lambda x: x[:count], outs)
        return outs, summaries

    def _manual(
        self, compute_share: Callable, *, arrays: PyTree, xs: PyTree, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """`compute_share` on each device, by `shard_map`. A table on all devices has the
        summaries of all of them."""
        devices, split = self.num_shares, PartitionSpec(self.axis)

        def compute_and_gather(arrays, xs, valid, row):
            # Needed by `check_vma`: cast here once, or a derivative is summed over
            # devices wherever the arrays are used.
            arrays = jax.lax.pcast(arrays, self.axis, to="varying")
            outs, summary = compute_share(arrays, xs, valid)
            summary, unravel = ravel_pytree(summary)
            # One `psum` of one flat array: each collective has a latency of its own.
            table = jnp.zeros_like(summary, shape=(devices, summary.size))
            table = table.at[row].set(summary)
            return outs, jax.vmap(unravel)(jax.lax.psum(table, self.axis))

        # Without `check_vma`: JAX refuses literals and loops in a matvec that was traced
        # outside, although they are right. The tests turn it on for operators without.
        # The index of a device comes in as a sharded argument, not from `axis_index`.
        return jax.shard_map(
            compute_and_gather,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), split, split, split),
            out_specs=(split, PartitionSpec()),
            axis_names={self.axis},
            check_vma=False,
        )(arrays, xs, valid, jnp.arange(devices))

    def _automatic(
        self, compute_share: Callable, *, arrays: PyTree, xs: PyTree, valid: Array
    ) -> tuple[PyTree, PyTree]:
        """The same by the compiler, from a batch of shares that is split over devices. It
        is for matvecs whose types do not fit those inside `shard_map`: a
        `lineax.linear_solve` compares the types of vectors with those of its operator,
        and functions inside a matvec keep the mesh of the arrays that they were traced
        with."""
        devices = self.num_shares

        def split_first_axis(x):
            other_axes = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
            split = NamedSharding(self.mesh, PartitionSpec(self.axis, *other_axes))
            return jax.lax.with_sharding_constraint(x, split)

        # One copy of the arrays for each device, or a derivative is summed over devices
        # wherever they are used.
        arrays = jax.tree.map(
            lambda x: split_first_axis(jnp.broadcast_to(x, (devices, *x.shape))), arrays
        )
        xs, valid = jax.tree.map(
            lambda x: split_first_axis(x.reshape(devices, -1, *x.shape[1:])), (xs, valid)
        )
        batched = jax.vmap(compute_share, spmd_axis_name=self.axis)
        outs, summaries = batched(arrays, xs, valid)
        outs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return outs, jax.lax.with_sharding_constraint(summaries, replicated)

    def map(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> PyTree[Shaped[Array, "m ..."]]:
        return self._gather(super().map(fn, operator, xs, width))

    def block(self, operator: FlatOperator, width: int = 1) -> int:
        return self.num_shares * self._block(operator, width)

    @property
    def num_shares(self) -> int:
        return self.mesh.shape[self.axis]

    def _block(self, operator: FlatOperator, width: int) -> int:
        """The block size of one device, which holds its own rows of each vector only."""
        rows = 1 if self.rows is None else self.mesh.shape[self.rows]
        return self.block_size or default_block_size(operator, width, rows)

    def factorising(self) -> contextlib.AbstractContextManager[None]:
        return factorising(by_rows=self.rows is not None)

    def _gather(self, xs: PyTree[Array]) -> PyTree[Array]:
        """The results of all probes on each device. Vectors, which lie along axis 1, are
        whole or split by rows. Without this constraint the compiler spreads small
        factorisations over the devices, with ten collectives of its own."""
        replicated, by_rows = PartitionSpec(), PartitionSpec(None, self.rows)

        def gather(x):
            spec = by_rows if x.ndim == 2 else replicated
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(gather, xs)


def _restore(
    numbers: list[tuple[str, int]],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    axis: str,
    block_size: int | None,
    rows: str | None,
) -> Sharded:
    """The inverse of `Sharded.__reduce__`."""
    available = {(device.platform, device.id): device for device in devices()}
    if missing := [number for number in numbers if number not in available]:
        raise ValueError(
            "A `traceax.Sharded` that was pickled needs the devices that it had. Found "
            f"none with the platform and number {missing[0]}. Make one by "
            "`traceax.Sharded(traceax.probe_mesh())`."
        )
    grid = np.asarray([available[number] for number in numbers]).reshape(shape)
    return Sharded(Mesh(grid, names), axis=axis, block_size=block_size, rows=rows)


Sharded.__init__.__doc__ = """**Arguments:**

- `mesh`: for example `traceax.probe_mesh()`.
- `axis`: default is `"probes"`.
- `block_size`: default is `None`, as for [`traceax.Local`][].
- `rows`: default is `None`: each device holds whole vectors.

**Raises:**

- `TypeError` if `mesh` is not a mesh.
- `ValueError` if `axis` or `rows` is not an axis of `mesh`, if both are the same axis, or
    if `block_size` is not a positive Python integer.
"""


class _RowSplitMatvec(eqx.Module):
    """A matvec whose vectors, in and out, are split over a mesh axis."""

    fn: Callable[[Array], Array]
    mesh: Mesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)

    def __call__(self, vector: Array) -> Array:
        # Inside `shard_map` constraints name the mesh of the context, in which the axis
        # of the probes is manual.
        context_mesh = get_abstract_mesh()
        mesh = self.mesh if context_mesh.empty else context_mesh
        split = NamedSharding(mesh, PartitionSpec(self.axis))
        vector = jax.lax.with_sharding_constraint(vector, split)
        return jax.lax.with_sharding_constraint(self.fn(vector), split)
