"""Factorisations as JAX primitives of a stack of matrices.

A batched LAPACK call inside one XLA:CPU program can deadlock (see "JAX versions" in the
developer documentation). So, on CPU, `vmap` of a factorisation is a loop over single
calls; on other platforms it is the batched call. A primitive is needed because the choice
must be made where a program is lowered, when the platform is known.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import batching, mlir, Primitive


def factorisation_primitive(
    factorise: Callable[..., tuple[Array, ...]],
    on_cuda: Callable[..., tuple[Array, ...]] | None = None,
) -> Callable[..., Any]:
    """Make a primitive of the factorisation of one matrix.

    `factorise(x, *others)` takes one matrix and further arrays that belong to it. The
    result takes one matrix, or a stack of matrices along a first axis, and stacks of the
    further arrays. `on_cuda` has the same signature for stacks, and takes the place of
    `vmap(factorise)` on NVIDIA's GPUs. There is no derivative rule.
    """
    primitive = Primitive(factorise.__name__.strip("_"))
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind)

    def with_full_precision(fn):
        # JAX traces a lowering later, outside of the contexts that the call was made in.
        # Without them a user's strict modes and matmul precision would apply here.
        def run(*stacks):
            with standard_promotion(), jax.default_matmul_precision("highest"):
                return fn(*stacks)

        return run

    @with_full_precision
    def loop(*stacks):
        # LAPACK asks for arrays that are stored by columns. XLA would pass that on to a
        # Fourier transform that made them, and refuses such transforms.
        stacks = jax.lax.optimization_barrier(stacks)
        if len(stacks[0]) == 1:
            return jax.tree.map(lambda y: y[None], factorise(*(x[0] for x in stacks)))
        shapes = jax.eval_shape(factorise, *(x[0] for x in stacks))
        if len({y.dtype for y in shapes}) > 1:
            return jax.lax.map(lambda arrays: factorise(*arrays), stacks)

        # All outputs leave the loop in one array: XLA compiles two kernels for each
        # output of a loop, at about 12 ms a kernel.
        def factorise_flat(arrays):
            return jnp.concatenate([y.ravel() for y in factorise(*arrays)])

        ends = np.cumsum([y.size for y in shapes])[:-1]
        columns = jnp.split(jax.lax.map(factorise_flat, stacks), ends, axis=1)
        return [
            column.reshape(-1, *y.shape)
            for column, y in zip(columns, shapes, strict=True)
        ]

    batched = with_full_precision(jax.vmap(factorise))

    @primitive.def_impl
    def _(*stacks):
        # An eager call is compiled even under `jax.disable_jit`: the primitive has no
        # evaluation beside its lowerings.
        with jax.disable_jit(False):
            return compiled(*stacks)

    @primitive.def_abstract_eval
    def _(*stacks):
        return jax.make_jaxpr(batched)(*stacks).out_avals

    def batch(stacks, axes):
        # The mapped axis is merged into that of the stack. So nested `vmap`s still give
        # one stack, and one loop over it.
        (size,) = {x.shape[d] for x, d in zip(stacks, axes, strict=True) if d is not None}
        stacks = map(batching.bdim_at_front, stacks, axes, [size] * len(axes))
        outs = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in stacks))
        outs = [y.reshape(size, -1, *y.shape[1:]) for y in outs]
        return outs, [0] * len(outs)

    batching.primitive_batchers[primitive] = batch
    platforms = {None: batched, "cpu": loop}
    if on_cuda is not None:
        platforms["cuda"] = with_full_precision(on_cuda)
    for platform, fn in platforms.items():
        mlir.register_lowering(primitive, mlir.lower_fun(fn), platform)

    @ft.wraps(factorise)
    def call(x, *others):
        if x.ndim == 3:
            return tuple(primitive.bind(x, *others))
        return tuple(y[0] for y in primitive.bind(*(y[None] for y in (x, *others))))

    return call
