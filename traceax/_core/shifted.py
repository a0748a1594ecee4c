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

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return self.quantity.read(left, image)

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

    def present(self, value: Array, std_err: Array) -> tuple[PyTree, PyTree]:
        return self.quantity.present(value + self.offset, std_err)


def is_trace(quantity: AbstractQuantity) -> bool:
    """Whether this is the trace, or the trace plus a known offset."""
    while isinstance(quantity, Shifted):
        quantity = quantity.quantity
    return isinstance(quantity, Trace)
