"""Promotion and precision of our own arithmetic, whatever the user has set."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """JAX's default promotion for our own arithmetic, whatever strict mode a user set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def full_precision(
    matmat: Callable[..., Array],
) -> Iterator[Callable[..., Array]]:
    """A context in which matrix products are made in full precision, also on
    accelerators whose default is less.

    **Arguments:**

    - `matmat`: the product with the operator, a function of arrays.

    **Returns:**

    A context manager, which gives `matmat` in the precision that the user has asked JAX
    for.
    """
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore

    def as_asked(*args, **kwargs):
        with jax.default_matmul_precision(asked):
            return matmat(*args, **kwargs)

    with jax.default_matmul_precision("highest"):
        yield as_asked
