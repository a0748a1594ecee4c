"""Several linear quantities from the same pairs of vectors.

For quantities q_1 .. q_p, `read` gives the entries of `q_1(image left*)`, ..,
`q_p(image left*)`, flattened and joined. Each of these *parts* has moments of its own, so
that its error bar is the one that it has alone. Of the scalars among the entries the
samples are kept together, and from these follows their covariance (`covariance.py`).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, PyTree, Real

from .checks import describe
from .moments import Moments
from .quantity import AbstractQuantity
from .sign_moments import SignMoments


class Joint(AbstractQuantity):
    """A PyTree of quantities.

    - `quantities`: its leaves.
    - `shapes`: what each of them reads.
    """

    quantities: tuple[AbstractQuantity, ...]
    treedef: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    joined: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[AbstractQuantity, ...]:
        return self.quantities

    @property
    def diagonal_only(self) -> bool:  # pyright: ignore
        return all(part.diagonal_only for part in self.parts)

    @property
    def entrywise(self) -> bool:  # pyright: ignore
        return all(part.entrywise for part in self.parts)

    def open(self) -> "Joint":
        return Joint(tuple(x.open() for x in self.parts), self.treedef, self.shapes)

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " m"]) -> Array:
        return join([part.read(left, image) for part in self.parts])

    def split(self, entries: Array) -> list[Array]:
        ends = list(accumulate(math.prod(shape) for shape in self.shapes))
        pieces = zip(jnp.split(entries, ends[:-1]), self.shapes, strict=True)
        return [piece.reshape(shape) for piece, shape in pieces]

    def arrange(self, entries: Array) -> PyTree[Array]:
        pairs = zip(self.parts, self.split(entries), strict=True)
        leaves = [part.arrange(piece) for part, piece in pairs]
        return jax.tree.unflatten(self.treedef, leaves)


def quantity_of(
    quantities: PyTree[AbstractQuantity],
    structure: PyTree[jax.ShapeDtypeStruct],
    size: int,
    dtype: DTypeLike,
) -> AbstractQuantity:
    """The quantity that a PyTree of quantities is, for operators of this structure, size
    and dtype."""
    is_quantity = lambda x: isinstance(x, AbstractQuantity)  # noqa: E731
    leaves, treedef = jax.tree.flatten(quantities, is_leaf=is_quantity)
    example = 'Pass, for example, `{"trace": traceax.Trace()}`.'
    if not leaves:
        raise ValueError(
            f"`quantities` must have at least one quantity. Found none. {example}"
        )
    for leaf in leaves:
        if not is_quantity(leaf):
            raise TypeError(
                "`quantities` must be a PyTree of `traceax.AbstractQuantity`s. Found "
                f"{describe(leaf)}. {example}"
            )
        if not leaf.linear:
            raise ValueError(
                "`quantities` must be linear in the operator. Found "
                f"`{type(leaf).__name__}`. Estimate it by a call of its own, such as "
                "`traceax.frobenius_norm`."
            )
    parts = tuple(leaf.for_structure(structure) for leaf in leaves)
    if is_quantity(quantities):
        return parts[0]
    vector = jax.ShapeDtypeStruct((size,), dtype)
    read = lambda x: [part.open().read(x, x) for part in parts]  # noqa: E731
    shapes = tuple(x.shape for x in eqx.filter_eval_shape(read, vector))
    return Joint(parts, treedef, shapes)


def scalars_of(part: AbstractQuantity, entries: Array) -> Array | None:
    """The scalars of a part, also of one that is a single number."""
    return entries[None] if entries.ndim == 0 else part.scalars(entries)


def join(pieces: Sequence[Array]) -> Array:
    """One flat array of the entries of all parts."""
    return jnp.concatenate([jnp.ravel(piece) for piece in pieces])


class JointMoments(eqx.Module):
    """The moments of each part of a quantity, in the order of `AbstractQuantity.parts`.
    Its results have the shape of samples, whose entries may be `joined`."""

    parts: tuple[Moments | SignMoments, ...]
    joined: bool = eqx.field(static=True)

    @classmethod
    def merge(cls, stacked: "JointMoments") -> "JointMoments":
        """The moments of the union of several stacked sets of samples."""
        parts = [
            part.merge(part)  # pyright: ignore[reportArgumentType]
            for part in stacked.parts
        ]
        return cls(tuple(parts), stacked.joined)

    def _join(self, of_part: Callable[[Any], Array]) -> Array:
        pieces = [of_part(part) for part in self.parts]
        return join(pieces) if self.joined else pieces[0]

    @property
    def count(self) -> Real[Array, "*sets"]:
        """The number of samples; of parts from strata, which may have several, the
        smallest one."""
        return jnp.min(jnp.stack([part.count for part in self.parts]), axis=0)

    @property
    def mean(self) -> Inexact[Array, "*q"]:
        return self._join(lambda part: part.mean)

    @property
    def size(self) -> Real[Array, "*q"]:
        """What rounding errors are relative to; 0 if only to the mean."""
        return self._join(
            lambda part: (
                jnp.zeros_like(part.mean.real) if part.size is None else part.size
            )
        )

    @property
    def skewness(self) -> Real[Array, "*q"]:
        """0 for samples that are not skewed."""

        def of_part(part):
            moments = part.samples if isinstance(part, SignMoments) else part
            skewed = moments.cubes is not None
            return moments.skewness if skewed else jnp.zeros_like(moments.mean.real)

        return self._join(of_part)

    def std_err(self) -> Real[Array, "*q"]:
        return self._join(lambda part: part.std_err())

    def statistics(self, *, scalar: bool) -> dict[str, Array]:
        """Entries of `stats` from which intervals are made."""
        every = [part.samples.statistics(scalar=scalar) for part in self.parts]  # pyright: ignore
        joined = every[0]
        if "freedom" in joined:
            freedoms = jnp.stack([x["freedom"] for x in every])
            joined = joined | {"freedom": jnp.min(freedoms)}
        return joined
