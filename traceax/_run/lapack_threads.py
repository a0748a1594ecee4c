"""A switch for the threads of LAPACK."""

import contextlib
from collections.abc import Iterator
from importlib import import_module


@contextlib.contextmanager
def single_threaded_lapack() -> Iterator[None]:
    """Run LAPACK on one thread within a `with` block, which makes most calls with dense
    operators faster on CPUs.

    On CPUs JAX factorises by the BLAS of SciPy, usually OpenBLAS. After each
    factorisation its threads wait for the next one in a busy loop, for about 20 ms, on
    the cores that the next matvecs need. With one thread none waits. Factorisations are
    small beside matvecs, and lose less than that. Matvecs are JAX's own, and keep all
    cores.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 50))
        gram = tx.as_operator(lambda v: x @ (x.T @ v), like=(500,))
        with tx.single_threaded_lapack():
            solution = tx.trace(gram, k=40, key=jax.random.key(1))
            print(solution.value, "+-", solution.std_err)
        ```

    JAX may return from a call before its program has ended: use the results within the
    block, or wait for them by `jax.block_until_ready`. The limit holds for the whole
    process, for NumPy and SciPy too, and ends with the block. The environment variable
    `OPENBLAS_NUM_THREADS=1`, set before Python starts, does the same for a whole run. On
    other devices nothing changes.

    **Returns:**

    A context manager, which is also a decorator of functions. To enter it raises an
    `ImportError` if the package `threadpoolctl` is not installed.
    """
    try:
        threadpoolctl = import_module("threadpoolctl")
    except ImportError as error:
        raise ImportError(
            "`single_threaded_lapack` needs the package threadpoolctl: `pip install "
            "threadpoolctl`. Or set the environment variable OPENBLAS_NUM_THREADS=1 "
            "before Python starts."
        ) from error
    import_module("scipy.linalg")  # loads the library whose threads are limited
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield
