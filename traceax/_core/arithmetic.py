"""Dtype promotion and matrix precision of the library's own arithmetic, independent of
what the user has set."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """A context with JAX's default promotion of dtypes and ranks, so that a user's strict
    modes do not turn the library's own arithmetic into errors."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def complex_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The complex dtype of the same precision, complex64 for half precision."""
    with standard_promotion():
        return jnp.promote_types(dtype, jnp.complex64)


@contextlib.contextmanager
def full_precision(
    matmat: Callable[..., Array],
) -> Iterator[Callable[..., Array]]:
    """A context in which matrix products are made in full precision, also on
    accelerators whose default precision is lower.

    **Arguments:**

    - `matmat`: a function of arrays that multiplies the operator with a block of vectors.

    **Returns:**

    A context manager, which gives `matmat` in the precision that the user has asked JAX
    for.
    """
    # The basis of a sketch loses its orthogonality in TF32 or bfloat16: an error of 1e-3
    # is fatal to the estimate. The operator is the user's, and keeps their precision.
    user_precision = jax.config.jax_default_matmul_precision  # pyright: ignore

    def matmat_in_user_precision(*args, **kwargs):
        with jax.default_matmul_precision(user_precision):
            return matmat(*args, **kwargs)

    with jax.default_matmul_precision("highest"):
        yield matmat_in_user_precision
