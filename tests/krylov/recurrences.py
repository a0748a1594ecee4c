"""Compiled recurrences, and their starts."""

import equinox as eqx
import numpy as np

from traceax._krylov.golub_kahan_recurrence import (
    golub_kahan_advance,
    golub_kahan_run,
    golub_kahan_start,
)
from traceax._krylov.lanczos_recurrence import lanczos


N = 60


@eqx.filter_jit
def lanczos_of(matrix, start, num_steps, window=None, eps=1e-16):
    return lanczos(lambda v: matrix @ v, start, num_steps, window=window, eps=eps)


@eqx.filter_jit
def golub_kahan_of(matrix, start, num_steps, window=None, eps=1e-16):
    products = (lambda v: matrix @ v), (lambda v: matrix.conj().T @ v)
    state = golub_kahan_start(products[0], start, num_steps)
    settings = {"window": window, "eps": eps}
    state = golub_kahan_advance(*products, state, 0, num_steps, **settings)
    return golub_kahan_run(state, num_steps)


def normal(seed, shape, dtype=np.float64):
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    is_complex = np.issubdtype(dtype, np.complexfloating)
    return (parts[0] + 1j * parts[1] if is_complex else parts[0]).astype(dtype)
