"""Means of operators over batches of data: the mean of M(x, b) over b, for a curvature
matrix M at the point x and a batch b. A matvec is one pass over the data.

Batches of different sizes cannot share a loop, since shapes in it are static. Those of
one size are stacked, and each stack has a loop of its own. With n_b examples in batch b,
and N in all, the mean is

    sum over stacks of  sum over b in the stack of  (n_b / N) M(x, b).
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.arithmetic import standard_promotion
from .._core.checks import check_positive
from .point import convert_bfloat16


class _Stack(eqx.Module):
    """Batches of one size along a leading axis, of which `lanes` are processed at the
    same time. Each of them has the part `share` in the mean over all batches."""

    batches: PyTree[Array]
    share: float = eqx.field(static=True)
    lanes: int = eqx.field(static=True)

    def sum(self, fn: Callable[[PyTree[Array]], PyTree[Array]], start: PyTree) -> PyTree:
        """`start`, plus the sum of `share * fn(batch)` over all batches."""

        def add(total, batch):
            image = fn(batch)
            return jax.tree.map(lambda t, y: t + y.astype(t.dtype), total, image), None

        def sum_over(batches):
            zeros = jax.tree.map(jnp.zeros_like, start)
            return jax.lax.scan(add, zeros, batches)[0]

        if self.lanes == 1:
            sums = sum_over(self.batches)
        else:
            sums = jax.vmap(sum_over)(self._in_lanes)
            sums = jax.tree.map(lambda t: jnp.sum(t, axis=0), sums)
        return jax.tree.map(lambda t, y: t + self.share * y, start, sums)

    def each(self, fn: Callable[[PyTree[Array]], Array]) -> Array:
        """`fn(batch)` of all batches, scalars, in an array."""
        if self.lanes == 1:
            return jax.lax.map(fn, self.batches)
        return jax.vmap(lambda lane: jax.lax.map(fn, lane))(self._in_lanes).reshape(-1)

    @property
    def _in_lanes(self) -> PyTree[Array]:
        # Contiguous batches share a lane. If the leading axis is split over devices, each
        # device then works on its own batches.
        size = (self.lanes, _length(self.batches) // self.lanes)
        return jax.tree.map(lambda b: b.reshape(*size, *b.shape[1:]), self.batches)


class MeanProduct(eqx.Module):
    """`v -> mean over b of M(b) v`, where `make` makes the operator M(b) from the
    functions `p -> fn(p, b)` and the point `x`. The user's functions remain the same
    objects, and arrays are leaves, so that compiled programs are used again."""

    make: Callable[..., lx.AbstractLinearOperator]
    fns: tuple[Callable[..., Any], ...]
    x: PyTree
    stacks: tuple[_Stack, ...]

    @property
    def shares(self) -> list[float]:
        """The part of each batch in the mean."""
        return [s.share for s in self.stacks for _ in range(_length(s.batches))]

    @eqx.filter_jit
    def __call__(self, vector: PyTree[Array]) -> PyTree[Array]:
        # Sums over batches would lose digits in bfloat16 or float16.
        with standard_promotion():
            total = jax.tree.map(
                lambda v: jnp.zeros_like(v, jnp.promote_types(v.dtype, jnp.float32)),
                vector,
            )
        for stack in self.stacks:
            total = stack.sum(lambda batch: self.of_batch(batch, vector), total)
        return jax.tree.map(lambda t, v: t.astype(v.dtype), total, vector)

    # With the checkpoint, neither the forward nor the backward pass keeps residuals of
    # more than one batch. `prevent_cse` is not needed inside `scan`.
    @ft.partial(eqx.filter_checkpoint, prevent_cse=False)
    def of_batch(self, batch: PyTree[Array], vector: PyTree[Array]) -> PyTree[Array]:
        """`M(b) v` for one batch."""
        fns = [lambda point, fn=fn: fn(point, batch) for fn in self.fns]
        return self.make(*fns, self.x).mv(vector)


def _length(stacked: PyTree[Array]) -> int:
    return len(jax.tree.leaves(stacked)[0])


def _as_array(leaf: Any) -> Any:
    """Convert a tensor of another library to a NumPy array, or raise if the leaf is no
    array."""
    if eqx.is_array_like(leaf):
        return leaf
    if not hasattr(leaf, "__array__"):
        raise ValueError(
            "`batches` must be batches of data: PyTrees of arrays. Found a leaf of type "
            f"{type(leaf).__name__}. Leave it out of the batches."
        )
    return np.asarray(leaf)


def _check_stacked(batches: PyTree) -> tuple[PyTree[Array], float]:
    """Batches along a leading axis, and the share of one of them in the mean."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batches)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "`batches` must be a list or another iterable of batches, or arrays with one "
            "leading axis of the same length: the number of batches. Found leaves of "
            f"shapes {shapes}. Add that axis, or pass a list."
        )
    return jax.tree.map(jnp.asarray, batches), 1 / counts.pop()


def _stack_by_size(batches: list[PyTree]) -> list[tuple[PyTree[Array], float]]:
    """Stack all batches of one size, and find the share of one of them in the mean."""
    shapes = [tuple(map(jnp.shape, jax.tree.leaves(batch))) for batch in batches]
    kinds = {
        (jax.tree.structure(batch), *((len(shape), shape[1:]) for shape in leaves))
        for batch, leaves in zip(batches, shapes, strict=True)
    }
    # The number of examples is the length that differs between batches. Arrays of one
    # length in all of them, such as keys or weights of classes, have another axis.
    lengths = {tuple(s[:1] for s in column) for column in zip(*shapes, strict=False)}
    differing = [column for column in lengths if len(set(column)) > 1]
    sizes = differing[0] if differing else ((1,),) * len(batches)
    if len(kinds) != 1 or not lengths or len(differing) > 1 or (0,) in sizes:
        distinct = [list(leaves) for leaves in dict.fromkeys(shapes)][:3]
        raise ValueError(
            "`batches` must be alike if they are a list: of one structure, with arrays "
            "whose shapes differ only in the length of the leading axis, the number of "
            f"examples, 1 or more. Found batches of shapes {distinct}. Pad other axes. "
            "Pass the parts of stacked batches, such as images and labels, as a tuple."
        )
    total = sum(size for (size,) in sizes)
    alike: dict[int, list[PyTree]] = {}
    for batch, (size,) in zip(batches, sizes, strict=True):
        alike.setdefault(size, []).append(batch)
    stack = lambda *arrays: jnp.stack(arrays)  # noqa: E731
    return [(jax.tree.map(stack, *same), size / total) for size, same in alike.items()]


def _in_lanes(stacked: PyTree[Array], share: float, chunk_size: int) -> Iterator[_Stack]:
    """Batches that do not fill a chunk become a chunk of their own."""
    remainder = _length(stacked) % chunk_size
    whole = _length(stacked) - remainder
    if whole:
        yield _Stack(jax.tree.map(lambda b: b[:whole], stacked), share, chunk_size)
    if remainder:
        yield _Stack(jax.tree.map(lambda b: b[whole:], stacked), share, remainder)


def _read(batches: Any) -> PyTree:
    """The batches of a list or another iterable as a list, or those that are stacked as
    they are; with tensors of other libraries converted."""
    # An iterable that is neither a PyTree nor an array is a data loader.
    iterable = isinstance(batches, Iterable) and not hasattr(batches, "__array__")
    # JAX warns of iterators that it takes for leaves, without this function.
    is_leaf = lambda x: isinstance(x, Iterator)  # noqa: E731
    if iterable and jax.tree.structure(batches, is_leaf) == jax.tree.structure(0):
        batches = list(batches)
    return jax.tree.map(_as_array, batches)


def batches_with_keys(batches: Any, key: PRNGKeyArray) -> PyTree:
    """The pairs of a batch and a key of its own, in the form that the batches have."""
    batches = _read(batches)
    if isinstance(batches, list):
        return [(batch, jax.random.fold_in(key, i)) for i, batch in enumerate(batches)]
    stacked, _ = _check_stacked(batches)
    numbers = jnp.arange(_length(stacked))
    return stacked, jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)


def _make_stacks(batches: Any, chunk_size: int) -> tuple[_Stack, ...]:
    if batches is None:
        raise ValueError(
            "`chunk_size` is how many of the `batches` are processed at the same time. "
            f"Found chunk_size={chunk_size!r} without `batches`."
        )
    chunk_size = check_positive("chunk_size", chunk_size)
    batches = _read(batches)
    if isinstance(batches, list):
        stacks = _stack_by_size(batches)
    else:
        stacks = [_check_stacked(batches)]
    parts = (_in_lanes(stacked, share, chunk_size) for stacked, share in stacks)
    return tuple(itertools.chain.from_iterable(parts))


def mean_operator(
    make: Callable[..., lx.AbstractLinearOperator],
    *fns: Callable[..., Any],
    x: PyTree,
    batches: Any,
    chunk_size: int,
    tags: object,
) -> lx.FunctionLinearOperator:
    """The mean of `make(*fns, x)` over batches, where each `fn` has a batch as its second
    argument."""
    stacks = _make_stacks(batches, chunk_size)
    mean_mv = MeanProduct(make=make, fns=fns, x=x, stacks=stacks)
    structure = jax.eval_shape(
        lambda: eqx.filter(convert_bfloat16(x), eqx.is_inexact_array)
    )
    operator = lx.FunctionLinearOperator(mean_mv, structure, tags, closure_convert=False)
    # Tracing checks `x` and the results of the functions, here and not in a later call.
    operator.out_structure()
    return operator


class _Forms(eqx.Module):
    """`v -> v^T M(b) v` for each batch b, in one vector, without keeping any product."""

    product: MeanProduct

    def __call__(self, vector: PyTree[Array]) -> Array:
        def form(batch):
            image = self.product.of_batch(batch, vector)
            with standard_promotion():
                # Sums would lose digits in bfloat16 or float16.
                wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
                dot = lambda v, y: jnp.sum(wide(v) * wide(y))  # noqa: E731
                parts = jax.tree.leaves(jax.tree.map(dot, vector, image))
                return jnp.sum(jnp.stack(parts))

        return jnp.concatenate([stack.each(form) for stack in self.product.stacks])


def quadratic_forms(
    operator: lx.AbstractLinearOperator, product: MeanProduct
) -> lx.FunctionLinearOperator:
    """The quadratic forms of all batches as a function that enters like an operator,
    though it is not linear: only vectors whose largest entry is 1 may be applied."""
    structure = operator.in_structure()
    return lx.FunctionLinearOperator(_Forms(product), structure, closure_convert=False)
