"""Quantities with a part that is known."""

from jaxtyping import Array, Inexact, PyTree, Real

from .quantity import AbstractQuantity, Trace


class Shifted(AbstractQuantity):
    """A quantity plus an `offset` that is known exactly."""

    quantity: AbstractQuantity
    offset: Array

    @property
    def diagonal_only(self) -> bool:  # pyright: ignore
        return self.quantity.diagonal_only

    @property
    def entrywise(self) -> bool:  # pyright: ignore
        return self.quantity.entrywise

    @property
    def joined(self) -> bool:  # pyright: ignore
        return self.quantity.joined

    @property
    def parts(self) -> tuple[AbstractQuantity, ...]:
        # The offset is no matter of pairs.
        return self.quantity.parts

    def open(self) -> "Shifted":
        return Shifted(self.quantity.open(), self.offset)

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return self.quantity.read(left, image)

    def split(self, entries: Array) -> list[Array]:
        return self.quantity.split(entries)

    def magnitude(self, images: Inexact[Array, "p n"]) -> Real[Array, ""]:
        return self.quantity.magnitude(images)

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, "..."] | None:
        return self.quantity.size(left, image)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, "..."] | None:
        return self.quantity.marks(left, image)

    def comparable(self, hermitian: bool) -> bool:
        return self.quantity.comparable(hermitian)

    def scalars(self, entries: Array) -> Array | None:
        return self.quantity.scalars(entries)

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return self.quantity.present(value + self.offset, std_err)


def is_trace(quantity: AbstractQuantity) -> bool:
    """Whether this is the trace, or the trace plus a known offset."""
    return not quantity.joined and isinstance(quantity.parts[0], Trace)
